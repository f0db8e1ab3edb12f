"""What the processes of a session tell each other, as frozen records checked at construction.

Who speaks to whom:

    Session ── RunRequest ──▶ Driver ── Assignment, RunRequest ──▶ Worker
    Session ◀─ RunSucceeded / RunFailed ─ Driver ◀── Success / Failure ── Worker
    Session ◀──────────── Report (pulled while a run is in progress) ──── Worker
                        Driver ◀── Frozen ── Worker, Driver ── Resumption ──▶ Worker
                                             (a run that continues in the next generation)
    anybody ◀── snapshots ── Driver, Worker

User objects (the function, its result, its exception) travel as bytes made by cloudpickle, so
that the driver never imports the user's code.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from chorusline.collectives.contract.endpoint import Endpoint
from chorusline.collectives.contract.errors import CollectiveError
from chorusline.collectives.diagnosis.debug import DebugLevel

from ..fault_plan import Order
from .admission import Readiness as Readiness
from .run_status import Gone, RunStatus


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What identifies a worker; nothing here changes while its process lives.

    worker_id: Ray's actor id.
    seat: its place in the session, from 0. A replacement takes the same seat.
    pid: 0 for a worker that was lost with its driver: of it only the rank is known.
    device: of its tensors, as torch writes it.
    versions: of Python, torch and chorusline (versions.py).
    """

    worker_id: str
    seat: int
    node_id: str
    hostname: str
    pid: int
    device: str
    versions: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    def __post_init__(self) -> None:
        if not self.worker_id or not self.node_id:
            raise ValueError("worker_id and node_id must not be empty")
        if self.seat < 0:
            raise ValueError(f"seat must be at least 0, got {self.seat}")

    def __str__(self) -> str:
        if not self.pid:
            return "a worker that was lost with its driver"
        return f"worker in seat {self.seat} (pid {self.pid} on {self.hostname}, {self.device})"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker's part in one generation.

    rank: in [0, world_size). Ranks of one node are adjacent.
    local_rank: among the local_world_size ranks of the worker's node.
    node_rank: of the worker's node, among the nodes of the generation.
    """

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int

    def __post_init__(self) -> None:
        if self.generation < 0:
            raise ValueError(f"generation must be at least 0, got {self.generation}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {self.rank}")
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise ValueError(
                f"local_rank must be in [0, {self.local_world_size}), got {self.local_rank}"
            )
        if not 0 <= self.node_rank <= self.rank:
            raise ValueError(f"node_rank must be in [0, {self.rank}], got {self.node_rank}")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One call of `Session.run`.

    run: its number in the session, from 0.
    timeout_s: deadline of rendezvous and of each collective.
    keep_reports: the session will pull the reports; otherwise a worker keeps only the last one.
    debug_level: of the session's process; a worker whose own level is higher keeps its own.
    fewest: the smallest number of workers with which the run continues when others are lost.
    max_failures: workers that may be lost before the run fails. With 0 the first one ends it;
    None allows any number.
    pause_s: how long the run waits for new workers when fewer than `fewest` are left.
    last_save_s: how long the run waits for the checkpoint that the ranks write before it is given
    up; None if the session keeps no checkpoints.
    fault_plan: what a person has ordered to happen to workers (fault_plan.py).
    report_history: reports that a worker holds although they were pulled, for a session host that
    is started again.
    replaces_stragglers: a worker that is far behind the others for long leaves, and another one
    takes its seat.
    replica_size: ranks of a replica (driver/replicas.py).
    """

    run: int
    timeout_s: float
    keep_reports: bool
    debug_level: DebugLevel = DebugLevel.OFF
    fewest: int = 1
    max_failures: int | None = 0
    pause_s: float = 300.0
    last_save_s: float | None = None
    fault_plan: tuple[Order, ...] = ()
    report_history: int = 0
    replaces_stragglers: bool = False
    replica_size: int = 1

    def __post_init__(self) -> None:
        if self.run < 0:
            raise ValueError(f"run must be at least 0, got {self.run}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")
        if self.fewest < 1:
            raise ValueError(f"fewest must be at least 1, got {self.fewest}")
        if self.max_failures is not None and self.max_failures < 0:
            raise ValueError(f"max_failures must be at least 0, or None, got {self.max_failures}")

    @property
    def survives_loss(self) -> bool:
        """Whether a lost worker may be survived."""
        return self.max_failures != 0


ReportValue: TypeAlias = "float | int | str | list[ReportValue] | dict[str, ReportValue]"
"""One value of a report: a number, a text, or lists and dictionaries of them."""


@dataclass(frozen=True, slots=True)
class Report:
    """One call of `ctx.report` on one rank.

        def show(report):
            print(report.rank, report.step, report.values["loss"])
        cl.run(train, num_workers=2, on_report=show)

    step: calls of `report` before this one, on this rank in this run. A worker that comes later
    continues the count of the others.
    time: seconds since the epoch, by the clock of that machine.
    values: by name, each a ReportValue.
    taken: optimizer steps of the run so far, the same on all ranks.
    global_step: optimizer steps, including those before the checkpoint that the run resumed from.
    Where no optimizer of a session steps, each report counts as one. It decreases only when the
    function runs again.
    """

    rank: int
    step: int
    time: float
    values: dict[str, Any]
    taken: int = 0
    global_step: int = 0


def numbers_of(values: Mapping[str, Any], within: str = "") -> dict[str, float]:
    """The numbers among reported values, by name; `accuracy.top1` for one inside a dictionary."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, int | float):
            found[within + name] = float(value)
        elif isinstance(value, dict):
            found |= numbers_of(value, f"{within}{name}.")
    return found


# ── How a run continues without some of its ranks (regeneration.py) ───────────────────────────────


@dataclass(frozen=True, slots=True)
class OptimizerProgress:
    """How far one optimizer is.

    ballots: how many ballots it has seen.
    payload: the numbers of the last one, as all ranks read them; empty before the first.
    """

    ballots: int
    payload: tuple[float, ...] = ()


DROPPED = OptimizerProgress(-1)
"""The progress of an optimizer that the function has let go of: no rank waits for it."""


NOWHERE = -1
"""The generation of a rank that has not begun, and so has nothing to continue with."""


class Waiting(enum.Enum):
    """Where the function of a frozen rank waits."""

    IN_STEP = "in a step"
    """The function waits inside a step, or has returned, and can continue there."""

    AT_BOUNDARY = "between two steps"
    """The function waits for a worker that comes after its dry run, or is that worker's."""

    NOWHERE = "nowhere"
    """The function has been left, and has to run again from the top."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """A rank has ended `generation` for itself and waits for the next one.

    progress: of its optimizers, in the order in which they were made.
    error: what ended the generation for this rank.
    entered: the last generation that this rank has continued in, or NOWHERE. Later ones have not
    come about for it.
    spare: ranks that may go at once without any state being lost, as far as this rank knows.
    handed_over: the ranks that leave have handed over their state in this generation, to all who
    stay.
    missing: what keeps the function from running again; empty if nothing does.
    plain_steps: steps that this rank has taken with optimizers that hold no ballots.
    can_save: the ranks that are left can write everything that counts to a checkpoint.
    saved: the path of the run's last checkpoint, if it was written in this generation.
    admits: the function continues where it is when a worker comes after its dry run
    (driver/arrivals.py).
    ended: the ranks whose process has ended, as the kernel of this rank's machine says.
    endpoint: where the others of its host can meet it in the next generation; None: it has none.

    `handed_over`, `can_save` and `admits` do not exclude each other: they say what the rank can do
    for ranks that leave, for a run that is given up, and for a worker that comes.
    """

    rank: int
    generation: int
    progress: tuple[OptimizerProgress, ...]
    error: CollectiveError
    entered: int = 0
    waiting: Waiting = Waiting.IN_STEP
    spare: int = 0
    handed_over: bool = False
    missing: str = ""
    plain_steps: int = 0
    can_save: bool = False
    saved: str = ""
    admits: bool = False
    ended: tuple[int, ...] = ()
    endpoint: Endpoint | None = None

    @property
    def is_parked(self) -> bool:
        """Whether the function can continue where it waits."""
        return self.waiting is not Waiting.NOWHERE

    @property
    def can_restart(self) -> bool:
        """Whether the function can run again from the top."""
        return not self.missing


@dataclass(frozen=True, slots=True)
class FormerRanks:
    """By new rank, the rank in the generation that ended; -1 for a newcomer.

    Each rank gets the former ranks of all ranks, so a generation change sends the square of their
    number. Ranks that stay keep their order, which makes stretches short: (first former rank,
    length), or (-1, number of newcomers).
    """

    stretches: tuple[tuple[int, int], ...]

    @staticmethod
    def of(ranks: Iterable[int]) -> FormerRanks:
        stretches: list[tuple[int, int]] = []
        for rank in ranks:
            first, count = stretches[-1] if stretches else (-2, 0)
            if rank == (first + count if first >= 0 else first):
                stretches[-1] = (first, count + 1)
            else:
                stretches.append((rank, 1))
        return FormerRanks(tuple(stretches))

    def __len__(self) -> int:
        return sum(count for _, count in self.stretches)

    def ranks(self) -> tuple[int, ...]:
        return tuple(
            first + offset if first >= 0 else -1
            for first, count in self.stretches
            for offset in range(count)
        )


@dataclass(frozen=True, slots=True)
class Resumption:
    """How a frozen rank continues.

    former: which rank each rank had before.
    progress: what holds for all ranks. A rank that has seen less takes it from here.
    entered: the last generation that any rank has continued in, or NOWHERE if no rank has begun. A
    rank that has not continued in it had done all that was needed for that, and counts it as well.
    restarts: the function runs again from the top, on all ranks.
    leaving: ranks that hand over what they keep in this generation, which ends with that
    (departures.py).
    gives_up: what the run ends with. This generation is the last one, in which the ranks save what
    they have (last_generation.py); None: it is not.
    gone: ranks of the generation that has ended which are not in this one.
    pids: of the newcomers, in the order of their ranks.
    num_lost: workers that the run has lost by now, for a driver that takes it over.
    endpoints: of the ranks, if they can meet there; else they meet in a store.
    """

    assignment: Assignment
    former: FormerRanks
    progress: tuple[OptimizerProgress, ...]
    entered: int = 0
    restarts: bool = False
    leaving: tuple[int, ...] = ()
    gives_up: Loss | Failure | None = None
    gone: tuple[Gone, ...] = ()
    pids: tuple[int, ...] = ()
    num_lost: int = 0
    endpoints: tuple[Endpoint, ...] = ()

    def __post_init__(self) -> None:
        if len(self.former) != self.assignment.world_size:
            raise ValueError(
                f"former has {len(self.former)} ranks for a world of {self.assignment.world_size}"
            )

    @property
    def former_ranks(self) -> tuple[int, ...]:
        return self.former.ranks()


@dataclass(frozen=True, slots=True)
class PlaceInRun:
    """What a worker tells a new driver about the run that it is in.

    assignment: in the last generation that the worker was put into.
    resumption: what put it there; None in the first generation.
    secret: with which it signs what it writes to meet the others; None: with none.
    """

    info: WorkerInfo
    assignment: Assignment
    resumption: Resumption | None
    secret: bytes | None = field(default=None, repr=False)


# ── How a rank ends ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Success:
    """The user's function returned.

    result: the pickled value.
    collectives: how many this rank has issued in the generation. Where the ranks differ, something
    is left in flight, and the group cannot be used again.
    is_group_over: an error has ended the group, which the function has caught.
    """

    rank: int
    result: bytes
    collectives: int
    is_group_over: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The user's function, or the code around it, raised.

    exception: pickled; None where that is impossible.
    reason: type and text in one line.
    culprits: the ranks to blame; this one unless a CollectiveError names others.
    is_echo: it was raised because another rank had failed first, so it does not explain a failure.
    asks_all: the ranks did not meet, so the text has to say what each of them does.
    nobody_began: since this rank failed, no rank can have called the function (Worker.run).
    """

    rank: int
    exception: bytes | None
    reason: str
    traceback: str
    culprits: tuple[int, ...]
    is_echo: bool
    asks_all: bool = False
    nobody_began: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """The worker's process is gone, or its node does not answer. detail: what Ray knows."""

    rank: int
    worker: WorkerInfo
    detail: str


@dataclass(frozen=True, slots=True)
class Cancellation:
    """No rank failed: the caller, or a session that closes, has ended the run."""

    reason: str


# ── How a run ends ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RunSucceeded:
    """results: pickled, by rank.
    leaves_all_idle: every worker that the driver knows is idle; none has died when its rank had
    returned."""

    generation: int
    results: tuple[bytes, ...]
    leaves_all_idle: bool = True


@dataclass(frozen=True, slots=True)
class RunFailed:
    """How a run has failed.

    cause: what happened first.
    workers: by rank.
    returned: ranks whose function had returned before that.
    stuck: ranks that did not stop within the grace period; their workers are replaced before the
    next run.
    story: where each rank was, if ranks did not meet (whereabouts.py).
    nobody_began: workers were lost before any rank had called the function, so the run may begin
    once more, with others in their place.
    may_lose: the run could have survived a lost worker.
    losses: of workers, in their order.
    replica_size: as in RunRequest.
    """

    generation: int
    cause: Failure | Loss | Cancellation
    workers: tuple[WorkerInfo, ...]
    returned: tuple[int, ...]
    stuck: tuple[int, ...]
    story: str = ""
    nobody_began: bool = False
    may_lose: bool = False
    losses: tuple[Loss, ...] = ()
    replica_size: int = 1


# ── What each says about itself ──────────────────────────────────────────────────────────────────


class WorkerState(enum.Enum):
    """What a worker says of its training thread."""

    IDLE = "idle"
    """There is no training thread; the group of the last generation may still be there."""

    STARTING = "starting"
    """The training thread meets the other ranks; there is no group to abort yet."""

    TRAINING = "training"
    """The user's function runs."""

    DRY_RUN = "dry run"
    """The user's function runs up to its first step, before the worker comes to the others."""

    STOPPING = "stopping"
    """The worker was told to abort, and the training thread has not ended yet."""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """What a worker says about itself.

    generation: the last one that this worker took part in; -1 before the first.
    rank, running_s: in the run in progress; None between runs.
    collectives: issued in the generation, by kind.
    last_report: None before the first one.
    status: of the run in progress, or of the last one.
    memory_bytes: of the process.
    device_memory_bytes: of its tensors on a GPU.
    """

    info: WorkerInfo
    state: WorkerState
    generation: int
    rank: int | None = None
    running_s: float | None = None
    collectives: dict[str, int] = field(default_factory=dict)
    last_report: Report | None = None
    status: RunStatus = field(default_factory=RunStatus)
    memory_bytes: int = 0
    device_memory_bytes: int = 0

    def __str__(self) -> str:
        words = [f"{self.info}: {self.state.value}, generation {self.generation}"]
        if self.rank is not None:
            words.append(f"rank {self.rank} for {self.running_s:.1f} s")
        if self.status.step:
            words.append(f"step {self.status.step}")
        words += [f"{count} {kind}" for kind, count in sorted(self.collectives.items())]
        if self.last_report is not None:
            values = ", ".join(f"{name}={value}" for name, value in self.last_report.values.items())
            words.append(f"report {self.last_report.step}: {values}")
        return "; ".join(words)


class MemberState(enum.Enum):
    """What the driver knows of a worker."""

    READY = "ready"
    """The worker is idle, and may be given a rank."""

    RUNNING = "running"
    """The worker has a rank in the run in progress."""

    DRY_RUN = "dry run"
    """The worker has none yet, and runs the function by itself (driver/arrivals.py)."""

    STUCK = "stuck"
    """The worker was told to stop, and has not yet; it is READY again only when it is idle."""

    LOST = "lost"
    """The worker's process is gone."""


@dataclass(frozen=True, slots=True)
class RunPause:
    """A run waits for new workers, because fewer than `fewest` are left.

    missing: workers that have to come before it continues.
    waited_s: so far. limit_s: seconds after which the run is given up.
    """

    missing: int
    fewest: int
    waited_s: float
    limit_s: float

    def __str__(self) -> str:
        return (
            f"waiting for {self.missing} more worker{'s' * (self.missing > 1)} of at least "
            f"{self.fewest}, {self.waited_s:.0f} s of {self.limit_s:.0f} s"
        )


@dataclass(frozen=True, slots=True)
class DriverSnapshot:
    """incarnation: how many drivers the session has had before this one. members: by seat.
    run: in progress; None between runs. pause: of this run; None unless it is paused."""

    incarnation: int
    generation: int
    run: int | None
    members: tuple[tuple[WorkerInfo, MemberState], ...]
    pause: RunPause | None = None

    def __str__(self) -> str:
        doing = "no run in progress" if self.run is None else f"run {self.run} in progress"
        if self.pause is not None:
            doing = f"run {self.run} paused, {self.pause}"
        lines = [f"driver {self.incarnation}: generation {self.generation}, {doing}"]
        lines += [f"  {info}: {state.value}" for info, state in self.members]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Survey:
    """A session as its driver sees it. workers: by seat; a text says why one did not answer."""

    driver: DriverSnapshot
    workers: tuple[WorkerSnapshot | str, ...]
