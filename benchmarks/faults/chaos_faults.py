"""What chaos does to a run, and where: drawn from a seed.

A fault is tied to a worker's seat, to a step, and to a numbered phase of the step or of the
recovery from the fault before, and not to time: the same seed commits the same faults again. The
worker commits it itself, in its training thread; what only the owner of the nodes can do (kill a
node that was drained, start another) it asks for, in a file.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

import chorusline as cl
from chorusline.actors.fault_plan import Instant
from chorusline.runtime.program.context import call_of
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of

NUM_SAMPLES, BATCH, EPOCHS = 157, 4, 3

DRAIN_S = 4.0
"""From the notice to the end of the node."""

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Fault:
    """ballots: how many the seat has seen when the phase is armed."""

    seat: int
    ballots: int
    kind: str
    phase: str


@dataclass(frozen=True)
class Plan:
    """registers: whether the function can run again from the top, and so take newcomers in.
    step_s: how long a step takes besides, so that a node may come in the middle of the run."""

    seed: int
    num_workers: int
    replicas: int
    bucket_cap_mb: float
    faults: tuple[Fault, ...]
    registers: bool = False
    step_s: float = 0.0


# -- what ----------------------------------------------------------------------------------------


def _kill(ctx: cl.Context, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _stop(ctx: cl.Context, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _drain(ctx: cl.Context, folder: Path) -> None:
    runtime = ray.get_runtime_context()
    deadline_ms = int((time.time() + DRAIN_S) * 1000)
    GcsClient(address=runtime.gcs_address).drain_node(
        runtime.get_node_id(), DRAIN_NODE_REASON_PREEMPTION, "chaos", deadline_ms
    )
    append(folder / "wishes", ("remove", runtime.get_node_id()))


def _add(ctx: cl.Context, folder: Path) -> None:
    append(folder / "wishes", ("add", ""))


def _kill_driver(ctx: cl.Context, folder: Path) -> None:
    assert call_of(ctx).recovery is not None
    ray.kill(call_of(ctx).recovery._lifeline._driver)


FAULTS: dict[str, Callable[[cl.Context, Path], None]] = {
    "kill": _kill,
    "stop": _stop,
    "drain": _drain,
    "add": _add,
    "driver": _kill_driver,
}
"""By name: a worker kills or stops itself, drains its node, has a node added, kills the driver. To
fault another way, add a row."""

ENDS_A_WORKER = ("kill", "stop", "drain")

# -- where ---------------------------------------------------------------------------------------


PHASES = {
    "(1) before": Instant.REDUCE,
    "(1) after": Instant.REDUCED,
    "(2)": Instant.REPLICATE,
    "(3) before": Instant.VOTE,
    "(3) after": Instant.SEEN,
    "(4) before": Instant.APPLY,
    "(4) after": Instant.APPLIED,
    "(5)": Instant.GATHER,
    "after the step": Instant.STEPPED,
    "recovery (c)": Instant.MEET,
    "recovery (d)": Instant.MOVE,
    "recovery (e)": Instant.ENTER,
    "recovery (f)": Instant.GATHER_AGAIN,
    "after the recovery": Instant.RECOVERED,
}
"""Where a fault may strike. Those of a recovery strike in the next one that there is."""

IN_A_STEP = [name for name in PHASES if "recovery" not in name]


def strike(ctx: cl.Context, optim: Any, plan: Plan, seat: int, folder: Path) -> None:
    """Arm the faults of this step that nobody has committed: a worker that came in the place of one
    that is gone may come to the same step."""
    due = [
        f
        for f in plan.faults
        if (f.seat, f.ballots) == (seat, optimizer_engine_of(optim).progress.ballots)
    ]
    done = list(entries_of(folder / "struck")) if due else []
    for fault in due:
        if astuple(fault) not in done:

            def act(fault: Fault = fault) -> None:
                append(folder / "struck", astuple(fault))
                FAULTS[fault.kind](ctx, folder)

            optimizer_engine_of(optim).faults.at(PHASES[fault.phase], act)


def append(path: Path, entry: Any) -> None:
    """To a file that outlives the process."""
    with path.open("ab", buffering=0) as file:
        file.write(pickle.dumps(entry))


def entries_of(path: Path) -> Iterator[Any]:
    """What was appended; what a death has cut short is left out."""
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    yield pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    return


# -- drawn ---------------------------------------------------------------------------------------


def draw(seed: int, *, has_nodes: bool = True) -> Plan:
    """At most as many workers end as the replicas stand if they end at once, and somebody is left.

    Faults may meet: the second in the same step as the first, or in the recovery from it. Besides,
    the driver may be killed, and a node added. has_nodes: whether there are any to drain and add.
    """
    rng = random.Random(seed)
    num_workers = rng.choice((3, 4))
    replicas = rng.choice((2, 3))
    seats = rng.sample(range(num_workers), rng.randint(1, replicas - 1 + (num_workers == 4)))
    steps = NUM_SAMPLES // (BATCH * num_workers)
    ends = {"kill": 0.6, "stop": 0.1} | ({"drain": 0.3} if has_nodes else {})
    faults: list[Fault] = []
    at = 0
    for number, seat in enumerate(seats):
        # Apart, where there would be more deaths at once than copies; not at all after a drain,
        # which the run hears of some steps later.
        if number + 1 >= replicas and any(fault.kind == "drain" for fault in faults):
            break
        is_near = number + 1 < replicas and number > 0
        at += rng.randint(0, 1) if is_near else rng.randint(2, steps - 2)
        phases = list(PHASES) if number > 0 else IN_A_STEP
        (kind,) = rng.choices(list(ends), list(ends.values()))
        faults.append(Fault(seat, at, kind, rng.choice(phases)))
    others = ["driver"] * rng.choice((0, 1, 1, 2)) + ["add"] * (has_nodes and rng.random() < 0.5)
    for kind in others:
        anywhere = rng.randrange(num_workers), rng.randint(1, 2 * steps)
        # There may be no recovery after it that it could wait for.
        phases = IN_A_STEP if rng.random() < 0.7 else list(PHASES)
        faults.append(Fault(*anywhere, kind, rng.choice(phases)))
    return Plan(
        seed,
        num_workers,
        replicas,
        rng.choice((0.001, 25.0)),
        tuple(faults),
        registers=rng.random() < 0.75,
        step_s=0.25 if has_nodes else 0.0,
    )
