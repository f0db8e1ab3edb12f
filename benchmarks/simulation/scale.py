"""How large a session the driver can hold: its own decisions, with simulated workers.

    python -m benchmarks.simulation.scale [--json] [--workers 10,100,1000,10000]
        [--plot docs/images/scale.png]

What is measured is the state machine that the driver actor runs (actors/driver/membership.py and
actors/driver/regeneration.py), unchanged: events go in, instructions come out, and the simulated
workers answer each of them as a live one does. Left out is what carries them: Ray's calls, at 0.7
to 1 ms each of one caller, side by side.

A *generation change* lasts, in a run that continues, from the death of one worker until all others
were told how to continue. *Messages* are calls between driver and workers.

A step in steady state costs the driver nothing, whatever the number of workers. That is not
simulated here: tests/session/showing/test_observing.py stops the driver's process, and the ranks
continue.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray import cloudpickle

from benchmarks.alternation import finish, parser, table
from chorusline.actors.driver.events import (
    RankEnded,
    RankFinished,
    RankFroze,
    RunStarted,
    WorkerDied,
    WorkerRegistered,
)
from chorusline.actors.driver.instructions import (
    EndRun,
    FreezeRank,
    Instruction,
    ReleaseRank,
    ResumeRank,
    StartRank,
)
from chorusline.actors.driver.membership import Membership
from chorusline.actors.messages.messages import (
    Frozen,
    OptimizerProgress,
    RunRequest,
    RunSucceeded,
    Success,
    WorkerInfo,
)
from chorusline.collectives.contract.errors import CollectiveError

_RANKS_PER_NODE = 8
_OPTIMIZERS = 1
_REPEATS = 3


@dataclass(frozen=True)
class Scale:
    """start_s: from the run's beginning until every rank is told its place. change_s: of a
    generation change. end_s: until the run's outcome. messages_*: both ways. resume_bytes: of all
    messages of one change, pickled. memory_bytes: of the state machine, in the middle of the run.
    """

    workers: int
    start_s: float
    change_s: float
    end_s: float
    messages_start: int
    messages_change: int
    messages_end: int
    resume_bytes: int
    memory_bytes: int


def simulated_worker(seat: int) -> WorkerInfo:
    """One of eight on its node."""
    node = f"node-{seat // _RANKS_PER_NODE}"
    return WorkerInfo(f"{seat:032x}", seat, node, node, 1000 + seat, "cuda:0")


def simulated_report(rank: int, generation: int, steps: int, error: CollectiveError) -> Frozen:
    """Of a rank that waits inside a step, and continues there."""
    progress = (OptimizerProgress(steps, (0.0,) * 32),) * _OPTIMIZERS
    return Frozen(rank, generation, progress, error, generation, missing="no model is registered")


class SimulatedWorkers:
    """Answers the driver's instructions as workers do. messages: sent either way."""

    def __init__(self, membership: Membership, count: int) -> None:
        self.membership = membership
        self.messages = 0
        self.bytes_of_one = 0
        self.rank_of: dict[str, int] = {}
        self.generation = -1
        self.steps = 100  # taken by the time of the change
        self.outcome: Any = None
        for seat in range(count):
            membership.handle(WorkerRegistered(simulated_worker(seat)))

    def tell(self, event: Any) -> list[Instruction]:
        self.messages += 1
        return self.membership.handle(event)

    def do(self, instructions: list[Instruction]) -> None:
        """Carry out, and answer; what the answers bring, too."""
        waiting = list(instructions)
        position = 0
        while position < len(waiting):
            instruction = waiting[position]
            position += 1
            match instruction:
                case StartRank(worker_id, assignment):
                    self.messages += 1
                    self.rank_of[worker_id] = assignment.rank
                    self.generation = assignment.generation
                case FreezeRank(worker_id, generation, error):
                    self.messages += 1
                    rank = self.rank_of[worker_id]
                    report = simulated_report(rank, generation, self.steps, error)
                    waiting += self.tell(RankFroze(report))
                case ResumeRank(worker_id, resumption):
                    self.messages += 1
                    self.rank_of[worker_id] = resumption.assignment.rank
                    self.generation = resumption.assignment.generation
                    self.bytes_of_one = self.bytes_of_one or len(cloudpickle.dumps(instruction))
                case ReleaseRank(worker_id):
                    self.messages += 1
                    ending = Success(self.rank_of[worker_id], b"", self.steps)
                    waiting += self.tell(RankEnded(ending))
                case EndRun(outcome):
                    self.outcome = outcome


def measure(num_workers: int) -> Scale:
    """One run: it begins, takes steps, loses one worker, continues, and ends."""
    gc.collect()
    tracemalloc.start()
    membership = Membership()
    workers = SimulatedWorkers(membership, num_workers)
    workers.do(membership.handle(RunStarted(RunRequest(0, 30.0, False, max_failures=None))))
    memory_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    membership = Membership()
    workers = SimulatedWorkers(membership, num_workers)
    began_at = time.perf_counter()
    workers.do(membership.handle(RunStarted(RunRequest(0, 30.0, False, max_failures=None))))
    start_s = time.perf_counter() - began_at
    messages_start = workers.messages

    before = workers.messages
    (lost, *_) = workers.rank_of
    began_at = time.perf_counter()
    del workers.rank_of[lost]
    workers.do(workers.tell(WorkerDied(lost, "SIGKILL")))
    change_s = time.perf_counter() - began_at
    messages_change = workers.messages - before
    assert workers.generation == 1, "all must have continued in the next generation"
    resume_bytes = workers.bytes_of_one * (num_workers - 1)

    before = workers.messages
    began_at = time.perf_counter()
    for rank in range(num_workers - 1):
        workers.do(workers.tell(RankFinished(rank, workers.generation)))
    end_s = time.perf_counter() - began_at
    assert isinstance(workers.outcome, RunSucceeded), workers.outcome
    return Scale(
        num_workers,
        start_s,
        change_s,
        end_s,
        messages_start,
        messages_change,
        workers.messages - before,
        resume_bytes,
        memory_bytes,
    )


def fastest(num_workers: int) -> Scale:
    """The fastest change of a few: the others were disturbed."""
    return min((measure(num_workers) for _ in range(_REPEATS)), key=lambda one: one.change_s)


def plot(scales: list[Scale], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    counts = [scale.workers for scale in scales]
    for label, name in (("start", "start_s"), ("generation change", "change_s"), ("end", "end_s")):
        times = [getattr(scale, name) * 1e3 for scale in scales]
        left.loglog(counts, times, marker="o", label=label)
    left.set(xlabel="workers", ylabel="milliseconds", title="decisions of the driver")
    left.legend()
    right.loglog(
        counts,
        [scale.messages_change for scale in scales],
        marker="o",
        label="messages",
    )
    right.loglog(
        counts, [scale.memory_bytes / 1024 for scale in scales], marker="s", label="memory, KiB"
    )
    right.set(xlabel="workers", title="of one generation change")
    right.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--workers", default="10,100,1000,10000")
    flags.add_argument("--plot", type=Path, default=None, help="a PNG to write")
    args = flags.parse_args()
    scales = [fastest(int(count)) for count in args.workers.split(",")]
    table(
        "the driver's decisions, with simulated workers",
        (
            "workers",
            "start ms",
            "change ms",
            "end ms",
            "messages",
            "sent MiB",
            "state MiB",
        ),
        [
            (
                f"{one.workers}",
                f"{one.start_s * 1e3:.1f}",
                f"{one.change_s * 1e3:.1f}",
                f"{one.end_s * 1e3:.1f}",
                f"{one.messages_change}",
                f"{one.resume_bytes / (1 << 20):.2f}",
                f"{one.memory_bytes / (1 << 20):.2f}",
            )
            for one in scales
        ],
    )
    if args.plot is not None:
        plot(scales, args.plot)
    finish(args, {}, {"scales": [asdict(one) for one in scales]})


if __name__ == "__main__":
    main()
