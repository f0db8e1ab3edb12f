"""What the driver hears of: records that `Membership` handles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from chorusline.collectives.contract.endpoint import Endpoint

from ..messages.admission import ReadyToken
from ..messages.messages import Failure, Frozen, PlaceInRun, RunRequest, Success, WorkerInfo
from ..messages.whereabouts import Whereabouts


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    """A worker is there and idle. It takes its seat from the worker that had it before.

    generation: the last one that the worker took part in; -1 if none.
    """

    worker: WorkerInfo
    generation: int = -1


@dataclass(frozen=True, slots=True)
class SeatEmptied:
    """Between runs: the worker in a seat cannot take part in the next one."""

    seat: int


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run begins on the workers that are ready."""

    request: RunRequest


@dataclass(frozen=True, slots=True)
class RunTakenOver:
    """A run that another driver had begun. places: of the workers that are in it.

    All workers are in the same generation, or some have not heard of it yet; then the places of
    the others say how it was formed.
    """

    request: RunRequest
    places: tuple[PlaceInRun, ...]


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The user's function has returned or raised on a rank, and its training thread is over."""

    ending: Success | Failure
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class RankFroze:
    """A rank has ended its generation for itself, and waits for the next one."""

    frozen: Frozen

    @property
    def generation(self) -> int:
        return self.frozen.generation


@dataclass(frozen=True, slots=True)
class RankFinished:
    """The user's function has returned on a rank, which waits until it has on all ranks."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class RankSilent:
    """A control loop does not answer, though its process lives: it is stopped, or cut off."""

    worker_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class PatienceEnded:
    """The time is over in which the ranks of a generation have to freeze."""

    generation: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """A node was told to go, so its workers leave before it does; or a worker was told to end. The
    event comes again and again until they have left.

    who: id of a node or of a worker.
    why: what is known of the reason.
    can_end: the ranks were asked, and would survive the end of their generation now.
    num_ready: spare workers that could take their seats now.
    """

    who: str
    why: str
    can_end: bool = True
    num_ready: int = 0


@dataclass(frozen=True, slots=True)
class RanksReady:
    """The functions of all ranks can run again now, with newcomers. can_admit: all of them can also
    continue where they are when a worker comes after its dry run."""

    generation: int
    can_admit: bool = False


@dataclass(frozen=True, slots=True)
class DryRunReady:
    """A worker that comes waits at its first step. endpoint: as in Frozen."""

    worker_id: str
    token: ReadyToken
    endpoint: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class DryRunEnded:
    """A worker could not begin its dry run. why: for people. is_final: and could not later
    either. counts: as an attempt; False where the ranks compute, and have not answered."""

    worker_id: str
    why: str
    is_final: bool = False
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Declined:
    """A rank does not admit the workers, as it was asked. number: of the request.
    is_final: it would not do so later in this call of its function either."""

    generation: int
    number: int
    why: str
    is_final: bool


@dataclass(frozen=True, slots=True)
class PauseEnded:
    """A run has waited long enough for new workers."""

    generation: int


@dataclass(frozen=True, slots=True)
class LastSaveEnded:
    """A run that is given up has waited long enough for its last checkpoint."""

    generation: int


@dataclass(frozen=True, slots=True)
class RanksAnswered:
    """The answers to AskRanks, by rank; a text says why a rank did not answer."""

    answers: Mapping[int, Whereabouts | str]


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker's process is gone. detail: what Ray knows of the reason."""

    worker_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class RunCancelled:
    """The caller, or a session that closes, ends the run."""

    reason: str


@dataclass(frozen=True, slots=True)
class GraceEnded:
    """The time to stop is over. is_for_ranks: False for the dry runs of a run that was released."""

    is_for_ranks: bool = True


GenerationEvent: TypeAlias = (
    RankFroze
    | RankFinished
    | RankSilent
    | PatienceEnded
    | RanksReady
    | Declined
    | PauseEnded
    | LastSaveEnded
)
"""What has happened in one generation, and is over with it."""

Event: TypeAlias = (
    WorkerRegistered
    | SeatEmptied
    | RunStarted
    | RunTakenOver
    | RankEnded
    | DryRunReady
    | DryRunEnded
    | Leaving
    | RanksAnswered
    | WorkerDied
    | RunCancelled
    | GraceEnded
    | GenerationEvent
)
