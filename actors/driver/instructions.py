"""What a driver is to do next: records that `Membership` makes and `driver.py` carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from collectives.contract.errors import CollectiveError

from ..messages import Assignment, Resumption, RunFailed, RunSucceeded


@dataclass(frozen=True, slots=True)
class StartRank:
    """resumption: of a newcomer to a run in progress, what the others are told."""

    worker_id: str
    assignment: Assignment
    resumption: Resumption | None = None


@dataclass(frozen=True, slots=True)
class AttachRank:
    """Take over a rank that runs; its ending comes as that of one that was started."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class AskRanks:
    """Ask all ranks what they do, before anything stops them; they answer within a deadline.

    worker_ids: by rank.
    """

    worker_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AbortRank:
    """Tell a rank that still runs to stop; `error` is what its collectives raise."""

    worker_id: str
    error: CollectiveError


@dataclass(frozen=True, slots=True)
class DismissRank:
    """As AbortRank, of a rank that the run goes on without: its node goes, its seat is empty."""

    worker_id: str
    error: CollectiveError


@dataclass(frozen=True, slots=True)
class StartGrace:
    """Send GraceEnded when ranks have had long enough to stop."""


@dataclass(frozen=True, slots=True)
class FreezeRank:
    """Have a rank end the generation for itself and say how far it is; `error` is the reason.

    is_late: it is the one that a timeout has named, so it has had its time; any other has that
    before its silence counts, as code that holds Python's lock is no sign of a hang.
    """

    worker_id: str
    generation: int
    error: CollectiveError
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class StartPatience:
    """Send PatienceEnded when the ranks of a generation have had long enough to freeze."""

    generation: int


@dataclass(frozen=True, slots=True)
class StartPause:
    """Send PauseEnded when the run has waited long enough for new workers."""

    generation: int


@dataclass(frozen=True, slots=True)
class StartLastSave:
    """Send LastSaveEnded when the ranks have had long enough to write the last checkpoint."""

    generation: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Kill a worker that says nothing: what it might still do would contradict the decision."""

    worker_id: str
    why: str


@dataclass(frozen=True, slots=True)
class ResumeRank:
    worker_id: str
    resumption: Resumption


@dataclass(frozen=True, slots=True)
class ReleaseRank:
    """The function has returned on all ranks; this one may end."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run is over; nothing more comes for it."""

    outcome: RunSucceeded | RunFailed


Instruction: TypeAlias = (
    StartRank
    | AttachRank
    | AskRanks
    | AbortRank
    | DismissRank
    | StartGrace
    | FreezeRank
    | StartPatience
    | StartPause
    | StartLastSave
    | Fence
    | ResumeRank
    | ReleaseRank
    | EndRun
)
