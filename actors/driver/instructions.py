"""What the driver does next: records that `Membership` makes and `driver.py` carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from chorusline.collectives.contract.errors import CollectiveError

from ..messages.admission import AdmissionRequest
from ..messages.messages import Assignment, Resumption, RunFailed, RunSucceeded


@dataclass(frozen=True, slots=True)
class StartRank:
    """Run the program as a rank. resumption: for a newcomer to a run in progress, what the other
    ranks are told of the generation."""

    worker_id: str
    assignment: Assignment
    resumption: Resumption | None = None  # None: the run begins


@dataclass(frozen=True, slots=True)
class BeginDryRun:
    """Have a worker run the program by itself up to its first step, as the rank that it will be.

    source: the worker that gives the replay log. The worker's end comes as that of a rank.
    """

    worker_id: str
    assignment: Assignment
    source: str


@dataclass(frozen=True, slots=True)
class RequestAdmission:
    """Ask a rank to take in workers after their dry runs, after one of its next steps."""

    worker_id: str
    request: AdmissionRequest


@dataclass(frozen=True, slots=True)
class AttachRank:
    """Take over a rank that runs already; its end comes as that of a rank that was started."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class ExplainLoss:
    """Tell a rank why a process was lost, of which it knows only that it has ended."""

    worker_id: str
    pid: int
    why: str


@dataclass(frozen=True, slots=True)
class AskRanks:
    """Ask all ranks what they do, before they are stopped; RanksAnswered comes within a deadline.

    worker_ids: by rank.
    """

    worker_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AwaitReadiness:
    """A newcomer has come. Ask the ranks, again and again, whether their functions can run again;
    when all can, send RanksReady.

    worker_ids: by rank.
    """

    worker_ids: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class AbortRank:
    """Tell a rank that still runs to stop; `error` is what its collectives raise."""

    worker_id: str
    error: CollectiveError


@dataclass(frozen=True, slots=True)
class DismissRank:
    """As AbortRank, for a rank that the run continues without: its node goes, and its seat becomes
    empty."""

    worker_id: str
    error: CollectiveError


@dataclass(frozen=True, slots=True)
class RestRank:
    """As DismissRank, for a rank whose replica is not whole: its worker keeps its seat, and waits
    for others."""

    worker_id: str
    error: CollectiveError


@dataclass(frozen=True, slots=True)
class StartGrace:
    """Send GraceEnded when the ranks have had the time that they have to stop. is_for_ranks: as in
    GraceEnded."""

    is_for_ranks: bool = True


@dataclass(frozen=True, slots=True)
class FreezeRank:
    """Have a rank end the generation for itself and report how far it is; `error` is the reason.

    is_late: a timeout has named this rank, so it has had its time. Any other rank is given the
    same time before its silence counts, since code that holds Python's lock does not show a hang.
    """

    worker_id: str
    generation: int
    error: CollectiveError
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class StartPatience:
    """Send PatienceEnded when the ranks have had the time that they have to freeze."""

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
    """Kill a worker that is silent: what it might still do could contradict what is decided."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class ResumeRank:
    """Tell a frozen rank how it continues."""

    worker_id: str
    resumption: Resumption


@dataclass(frozen=True, slots=True)
class ReleaseRank:
    """The function has returned on all ranks; this one may end."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run is over; no instruction comes for it any more."""

    outcome: RunSucceeded | RunFailed


Instruction: TypeAlias = (
    StartRank
    | BeginDryRun
    | RequestAdmission
    | AttachRank
    | ExplainLoss
    | AskRanks
    | AwaitReadiness
    | AbortRank
    | DismissRank
    | RestRank
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
