"""Random histories of a training in the steps of `ctx.steps`, and the bits it ends with.

    python -m benchmarks.proofs.invariance [--seed 0] [--histories 100] [--no-nodes] [--json]

Each history is drawn from a seed (invariance_histories.py): a model, an optimizer, with or without
ZeRO; one to four workers; kills at the phases of a step, between forward and backward, after the
loop over the batches and during recovery; stops, drains, arrivals, a driver that dies, a rank that
is stopped half of the time, a resume from a checkpoint with another number of workers. At the end
parameters, buffers, optimizer state and random states have to be, by SHA-256, those of the same
training with one worker, and the ledger has to have each sample once in each epoch
(invariance_training.py). At the end of all nothing may be left: no process, no file in /dev/shm.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

import ray
from ray import cloudpickle

import chorusline as cl
from benchmarks.alternation import finish, parser, table
from benchmarks.faults.chaos import Nodes, fill, left_behind, shared_memory_files
from benchmarks.faults.chaos_faults import Fault, entries_of
from benchmarks.faults.chaos_outside import signal_to
from benchmarks.proofs.invariance_histories import draw
from benchmarks.proofs.invariance_training import (
    Plan,
    Told,
    Training,
    complaints,
    deal_in,
    train,
)
from chorusline.actors.worker_group.retry import beside

TIMEOUT_S = 8.0
"""Of a collective, and so of how long a stopped worker is waited for."""

NUM_LOCAL = 3
"""Workers where there are no nodes."""

HISTORY_S = 240.0
"""A history that is not over by then hangs."""

THROTTLED_S, PERIOD_S = 3.0, 0.06
"""A throttled worker is stopped for half of each period, for as long as that."""

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass
class History:
    """What came of a plan. told: of the ranks that were there at the end."""

    plan: Plan
    seconds: float = 0.0
    struck: list[Fault] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def recoveries(self) -> int:
        return max((one.recoveries for one in self.told), default=0)


class References:
    """What one worker ends with, and what it computes, by training; each is run once.

    session: of one worker.
    """

    def __init__(self, session: cl.Session) -> None:
        self._session = session
        self._known: dict[Training, tuple[Told, set[Any]]] = {}

    async def of(self, training: Training) -> tuple[Told, set[Any]]:
        if training not in self._known:
            plan = Plan(0, training, num_workers=1, replicas=1, bucket_cap_mb=25.0)
            with tempfile.TemporaryDirectory() as folder:
                [told] = await self._session.run(train, plan=plan, folder=folder)
                self._known[training] = told, deal_in(folder)
        return self._known[training]


class Stage:
    """Where histories are played: a session that stands, and what can happen to its workers.

    checkpoints: the folder of the session's checkpoints. nodes: each with room for one worker;
    None: the workers stay on one node, and are as many as the session has.
    """

    def __init__(
        self,
        session: cl.Session,
        references: References,
        checkpoints: Path,
        nodes: Nodes | None = None,
    ) -> None:
        self._session = session
        self._references = references
        self._checkpoints = checkpoints
        self._nodes = nodes

    async def play(self, plan: Plan) -> History:
        history = History(plan)
        alone, deal = await self._references.of(plan.training)
        shutil.rmtree(self._checkpoints, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            await fill(self._session, self._nodes, plan.num_workers)
            began_at = time.monotonic()
            gone_well: set[int] = set()
            try:
                history.told = await self._run(plan, folder)
                if plan.saves_at:
                    gone_well = {one.pid for one in history.told}
                    await fill(self._session, self._nodes, plan.resumes_with)
                    history.told = await self._run(plan, folder, is_resumed=True)
            except TimeoutError:
                history.wrong.append(f"it hangs: {await self._seen()}")
            except Exception as error:
                history.wrong.append(f"{type(error).__name__}: {error}")
            else:
                history.wrong += complaints(history.told, alone, folder, deal, gone_well)
            history.seconds = time.monotonic() - began_at
            history.struck = [Fault(*entry) for entry in entries_of(Path(folder) / "struck")]
        return history

    async def _run(self, plan: Plan, folder: str, **options: Any) -> list[Told]:
        granting = self._nodes.granting(Path(folder) / "wishes") if self._nodes else None
        async with granting or contextlib.nullcontext(), throttling(plan, folder):
            async with asyncio.timeout(HISTORY_S):
                return await self._session.run(train, plan=plan, folder=folder, **options)

    async def _seen(self) -> str:
        with contextlib.suppress(Exception):
            return str(await self._session.snapshot())
        return "no snapshot"


@contextlib.asynccontextmanager
async def throttling(plan: Plan, folder: str) -> AsyncIterator[None]:
    """While the body runs, stop the throttled seats' first workers half of the time."""

    async def throttle() -> None:
        while not (pids := self_pids()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        ends_at = time.monotonic() + THROTTLED_S
        while time.monotonic() < ends_at:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                signal_to(pids, number)
                await asyncio.sleep(PERIOD_S / 2)

    def self_pids() -> set[int]:
        by_seat = dict(reversed(list(entries_of(Path(folder) / "pids"))))
        return {by_seat[seat] for seat in plan.throttled if seat in by_seat}

    if not plan.throttled:
        yield
        return
    try:
        async with beside(throttle(), "throttle"):
            yield
    finally:
        signal_to(self_pids(), signal.SIGCONT)


def said(history: History, no_nodes: bool = False) -> str:
    """One line about a history, and more if something is wrong."""
    plan, training = history.plan, history.plan.training
    sharded = f"ZeRO with {plan.replicas} copies" if training.sharded else "plain"
    also = [f"seat {fault.seat}: {fault.kind} {fault.phase}" for fault in history.struck]
    also += [f"seat {seat} throttled" for seat in plan.throttled]
    if plan.saves_at:
        also.append(f"resumed at step {plan.saves_at} with {plan.resumes_with} workers")
    sizes = " ".join(map(str, history.told[0].world_sizes)) if history.told else "none"
    line = (
        f"{plan.seed}: {training.model}, {training.optimizer}, {sharded}, {history.seconds:.1f} s, "
        f"{history.recoveries} recoveries, ranks {sizes}: {'; '.join(also) or 'nothing happened'}"
    )
    again = f"python -m benchmarks.proofs.invariance --seed {plan.seed} --histories 1"
    again += " --no-nodes" if no_nodes else ""
    return "\n".join([line, *(f"   WRONG ({again}): {wrong}" for wrong in history.wrong)])


async def play_all(nodes: Nodes | None, args: Any) -> list[History]:
    histories: list[History] = []
    if nodes is not None:
        nodes.have(3)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder) / "checkpoints"
        # The one worker has a place on the head, so that nothing happens to it.
        at_head = {"CPU": 0.0, Nodes.HEAD: 1.0}
        few: dict[str, Any] = {"progress": False}
        if nodes is not None:
            few["address"] = nodes.address
        async with (
            cl.Session(1, resources_per_worker=at_head, timeout_s=120, **few) as alone,
            cl.Session(
                (1, 4 if nodes is not None else NUM_LOCAL),
                timeout_s=args.timeout_s,
                max_failures=None,
                checkpoint=cl.CheckpointConfig(checkpoints),
                **few,
            ) as session,
        ):
            stage = Stage(session, References(alone), checkpoints, nodes)
            ends_at = time.monotonic() + args.minutes * 60
            for seed in range(args.seed, args.seed + args.histories):
                if time.monotonic() > ends_at:
                    break
                histories.append(await stage.play(draw(seed, has_nodes=nodes is not None)))
                print(said(histories[-1], args.no_nodes), flush=True)
    await asyncio.sleep(1.0)
    histories[-1].wrong += [f"left behind: {what}" for what in left_behind()]
    return histories


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--seed", type=int, default=0, help="of the first history")
    flags.add_argument("--histories", type=int, default=100)
    flags.add_argument("--minutes", type=float, default=240.0, help="begin no history after them")
    flags.add_argument(
        "--timeout-s", type=float, default=TIMEOUT_S, help="of collectives; more on a busy machine"
    )
    flags.add_argument(
        "--no-nodes",
        action="store_true",
        help=f"{NUM_LOCAL} workers on one node: no drains, no nodes that come",
    )
    args = flags.parse_args()
    files = shared_memory_files()
    nodes = None if args.no_nodes else Nodes()
    try:
        if nodes is not None:
            ray.init(address=nodes.address, log_to_driver=False)
        else:
            few: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
            ray.init("local", num_cpus=NUM_LOCAL, resources={Nodes.HEAD: 1}, **few)
        histories = asyncio.run(play_all(nodes, args))
    finally:
        ray.shutdown()
        if nodes is not None:
            nodes.close()
    if left := sorted(shared_memory_files() - files):
        histories[-1].wrong.append(f"left in /dev/shm: {left}")
    finish(args, {}, report(args.seed, histories))
    if any(one.wrong for one in histories):
        sys.exit(1)


def report(first_seed: int, histories: list[History]) -> dict[str, Any]:
    """Print the tables; the figures."""
    struck = [fault for one in histories for fault in one.struck]
    kinds = sorted({fault.kind for fault in struck})
    by_phase = Counter((fault.phase, fault.kind) for fault in struck)
    phases = sorted({fault.phase for fault in struck})
    table(
        f"seeds {first_seed} to {first_seed + len(histories) - 1}: faults",
        ("phase", *kinds),
        [(phase, *(str(by_phase[phase, kind]) for kind in kinds)) for phase in phases],
    )
    by_model: dict[str, list[History]] = {}
    for one in histories:
        training = one.plan.training
        for name in (training.model, training.optimizer, "ZeRO" if training.sharded else "plain"):
            by_model.setdefault(name, []).append(one)
    table(
        "histories",
        ("of", "all", "with the bits of one worker"),
        [
            (name, str(len(of_name)), str(sum(not one.wrong for one in of_name)))
            for name, of_name in by_model.items()
        ],
    )
    for one in histories:
        for wrong in one.wrong:
            print(f"WRONG: seed {one.plan.seed}: {wrong}")
    figures = {
        "histories": len(histories),
        "faults": len(struck),
        "recoveries": sum(one.recoveries for one in histories),
        "resumed": sum(bool(one.plan.saves_at) for one in histories),
        "throttled": sum(bool(one.plan.throttled) for one in histories),
        "differ": sum(bool(one.wrong) for one in histories),
    }
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    return figures


if __name__ == "__main__":
    main()
