"""A training whose workers are killed, stopped, drained and added, and whose driver is killed.

    python -m benchmarks.faults.chaos [--seed 0] [--minutes 2] [--json]
    python -m benchmarks.faults.chaos --outside [--seed 0] [--rounds 8] [--kind zero] [--json]

On a cluster on this machine, of nodes that each have room for one worker. Each round is one run of
a session whose workers, three or four, train for some epochs, and a plan drawn from the seed
(chaos_faults.py): the same seed commits the same faults again. At the end of each round the
parameters and the samples are checked (chaos_training.py). At the end of all nothing may be left:
no process of an actor, no file in /dev/shm.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

import ray
import torch
from ray import cloudpickle
from ray.cluster_utils import Cluster

import chorusline as cl
from benchmarks.alternation import finish, parser, table
from benchmarks.faults import chaos_outside
from benchmarks.faults.chaos_faults import DRAIN_S, FAULTS, PHASES, Fault, Plan, draw, entries_of
from benchmarks.faults.chaos_kinds import KINDS
from benchmarks.faults.chaos_training import Told, complaints, train
from chorusline.actors.worker_group.retry import beside

TIMEOUT_S = 8.0
"""Of a collective, and so of how long a stopped worker is waited for."""

ROUND_S = 120.0
"""A round that is not over by then hangs."""

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# -- nodes -----------------------------------------------------------------------------------------


class Nodes:
    """A cluster of this process: a head without CPUs, and nodes that have one each.

    Ray starts nodes from the main thread only, so the loop stands still while one starts.
    """

    HEAD = "head"
    """A resource of the head, for a worker that must not be on the nodes."""

    def __init__(self) -> None:
        # A node that was killed is found dead within seconds; one that is busy is not dead.
        health = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 1000,
            "health_check_timeout_ms": 3000,
            "health_check_failure_threshold": 3,
        }
        few = {"include_dashboard": False, "object_store_memory": 80 << 20}
        head = {"num_cpus": 0, "resources": {self.HEAD: 1}, "_system_config": health, **few}
        self._few = few
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, object] = {}
        self.address = self._cluster.address

    def close(self) -> None:
        self._cluster.shutdown()

    def add(self) -> None:
        node = self._cluster.add_node(num_cpus=1, **self._few)
        self._nodes[node.node_id] = node

    def remove(self, node_id: str) -> None:
        """As if it had lost its power."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def have(self, count: int) -> None:
        while len(self._nodes) > count:
            self.remove(next(reversed(self._nodes)))
        while len(self._nodes) < count:
            self.add()

    @contextlib.asynccontextmanager
    async def granting(self, wishes: Path) -> AsyncIterator[None]:
        """While the body runs, do with the nodes what its workers ask for.

        A drained node ends when its time is over, and another comes in its place. What was asked
        for before was granted in an earlier run.
        """
        granted = sum(1 for _ in entries_of(wishes))

        async def grant(what: str, node_id: str) -> None:
            if what == "remove":
                await asyncio.sleep(DRAIN_S)
                self.remove(node_id)
            self.add()

        async def look() -> None:
            nonlocal granted
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for wish in itertools.islice(entries_of(wishes), granted, None):
                        tasks.create_task(grant(*wish), name="grant")
                        granted += 1
                    await asyncio.sleep(0.1)

        async with beside(look(), "wishes"):
            yield
        # What was drained when the round was nearly over still has to go.
        for what, node_id in entries_of(wishes):
            if what == "remove" and node_id in self._nodes:
                self.remove(node_id)


def left_behind() -> list[str]:
    """Processes of actors, stopped ones too, of this program's cluster."""
    found = []
    for pid in sorted(chaos_outside.actors("ray::Worker", "ray::Driver")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            found.append(f"process {pid} {command.split('(')[0][:40]}")
    return found


# -- rounds ----------------------------------------------------------------------------------------


@dataclass
class Round:
    """One run of a plan, and what was wrong with it."""

    plan: Plan
    seconds: float
    struck: list[Fault]
    told: list[Told]
    wrong: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.told[0].num_steps if self.told else 0

    @property
    def recoveries(self) -> int:
        return max((one.recoveries for one in self.told), default=0)


async def play(session: cl.Session, plan: Plan, nodes: Nodes | None = None) -> Round:
    """One run of a session that has as many workers as the plan says."""
    with tempfile.TemporaryDirectory() as folder:
        began_at = time.monotonic()
        told: list[Told] = []
        wishes = Path(folder) / "wishes"
        try:
            async with nodes.granting(wishes) if nodes else contextlib.nullcontext():
                async with asyncio.timeout(ROUND_S):
                    told = await session.run(train, plan=plan, folder=folder)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        else:
            wrong = complaints(told, folder)
        struck = [Fault(*entry) for entry in entries_of(Path(folder) / "struck")]
        return Round(plan, time.monotonic() - began_at, struck, told, wrong)


def _warm_up(ctx: cl.Context) -> None:
    """The first optimizer of a process imports for seconds, for which a busy machine's neighbours
    would take it for hung."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.AdamW([parameter]).step()


async def fill(session: cl.Session, nodes: Nodes | None, num_workers: int) -> None:
    """Until there is a worker on each of so many nodes, and each is warm."""
    if nodes is not None:
        nodes.have(num_workers)
    async with asyncio.timeout(ROUND_S):
        while True:
            if len(await session.run(_warm_up)) == num_workers:
                return
            await asyncio.sleep(0.5)


async def play_all(nodes: Nodes, first_seed: int, seconds: float) -> list[Round]:
    """Rounds, each with the next seed, until the time is over; at least one."""
    rounds: list[Round] = []
    nodes.have(3)
    async with cl.Session((1, 4), address=nodes.address, timeout_s=TIMEOUT_S) as session:
        ends_at = time.monotonic() + seconds
        for number in itertools.count():
            plan = draw(first_seed * 1_000_003 + number)
            await fill(session, nodes, plan.num_workers)
            one = await play(session, plan, nodes)
            rounds.append(one)
            faults = "; ".join(f"seat {f.seat}: {f.kind} {f.phase}" for f in one.struck)
            sizes = " ".join(map(str, one.told[0].world_sizes)) if one.told else ""
            print(
                f"{number}: {one.seconds:.1f} s, {one.steps} steps, ranks {sizes}: "
                f"{faults or 'nothing struck'}",
                flush=True,
            )
            for wrong in one.wrong:
                print(f"   WRONG (plan {plan}): {wrong}", flush=True)
            if time.monotonic() > ends_at:
                break
    await asyncio.sleep(1.0)
    rounds[-1].wrong += [f"left behind: {what}" for what in left_behind()]
    return rounds


def shared_memory_files() -> set[str]:
    """Of ours and of torch's; Ray's own object store is Ray's."""
    return {p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(("torch_", "chorus"))}


def from_outside(args: argparse.Namespace) -> None:
    rounds: list[chaos_outside.Round] = []
    is_interrupted = False
    try:
        chaos_outside.run(rounds, args.seed, args.rounds, args.kind, args.minutes)
    except KeyboardInterrupt:  # Or SIGTERM: hours of rounds say what they have seen.
        is_interrupted = True
    wrong = [told for one in rounds for told in one.wrong]
    figures = {
        "rounds": len(rounds),
        "faults": sum(len(one.struck) for one in rounds),
        "ended": sum(bool(one.ended_with) for one in rounds),
        "wrong": len(wrong),
        "interrupted": is_interrupted,
    }
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    finish(args, {}, figures)
    if wrong or is_interrupted:
        sys.exit(1)


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--minutes", type=float, default=2.0)
    flags.add_argument("--outside", action="store_true", help="kill by pid, at random instants")
    flags.add_argument(
        "--rounds",
        type=int,
        default=8,
        help="with --outside: seeds, one by one, as long as there are minutes",
    )
    flags.add_argument("--kind", choices=KINDS, help="with --outside: of the training function")
    args = flags.parse_args()
    if args.outside:
        from_outside(args)
        return
    files = shared_memory_files()
    nodes = Nodes()
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        rounds = asyncio.run(play_all(nodes, args.seed, args.minutes * 60))
    finally:
        ray.shutdown()
        nodes.close()
    wrong = [told for one in rounds for told in one.wrong]
    wrong += [f"left in /dev/shm: {name}" for name in sorted(shared_memory_files() - files)]
    struck = [fault for one in rounds for fault in one.struck]
    by_phase = Counter((fault.phase, fault.kind) for fault in struck)
    table(
        f"seed {args.seed}: {len(rounds)} rounds",
        ("phase", *FAULTS),
        [(phase, *(str(by_phase[phase, kind]) for kind in FAULTS)) for phase in PHASES],
    )
    for told in wrong:
        print(f"WRONG: {told}")
    figures = {
        "rounds": len(rounds),
        "steps": sum(one.steps for one in rounds),
        "faults": len(struck),
        "recoveries": sum(one.recoveries for one in rounds),
        "wrong": len(wrong),
        "struck": [[f.seat, f.ballots, f.kind, f.phase] for f in struck],
    }
    print(", ".join(f"{name} {value}" for name, value in figures.items() if name != "struck"))
    finish(args, {}, figures)
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
