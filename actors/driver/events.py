"""What happens to a session, as its driver hears of it: records that `Membership` handles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..messages import Failure, Frozen, Stand, Success, WorkerInfo
from ..whereabouts import Whereabouts


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    """A worker is here and idle. It takes its seat from whoever sat there.

    generation: the last one it took part in, -1 if none.
    """

    worker: WorkerInfo
    generation: int = -1


@dataclass(frozen=True, slots=True)
class SeatEmptied:
    """Between runs: the worker in a seat cannot take part, and is not counted on any more."""

    seat: int


@dataclass(frozen=True, slots=True)
class RunStarted:
    """fewest, max_failures: as in RunRequest. saves_last: it has a last_save_s."""

    run: int
    fewest: int = 1
    max_failures: int | None = 0
    saves_last: bool = False


@dataclass(frozen=True, slots=True)
class RunTakenOver:
    """A run that another driver had begun. stands: of the workers that are in it.

    All are in the same generation, or some have not heard of it yet: then those that have say how
    it was formed.
    """

    run: int
    fewest: int
    max_failures: int | None
    stands: tuple[Stand, ...]
    saves_last: bool = False


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The user's function has returned or raised on a rank, and its training thread is over."""

    ending: Success | Failure
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class RankFroze:
    frozen: Frozen

    @property
    def generation(self) -> int:
        return self.frozen.generation


@dataclass(frozen=True, slots=True)
class RankFinished:
    """The user's function has returned on a rank, which waits until it has on all."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class RankSilent:
    """A control loop does not answer though its process lives: stopped, or cut off."""

    worker_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class PatienceEnded:
    """The ranks of a generation have had their time to freeze."""

    generation: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """A node has been told to go, so its workers leave before it does; or a worker has. Comes again
    and again until they have left. who: id of a node, or of a worker. why: what is known."""

    who: str
    why: str


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
    """Where the ranks are; by rank, a text says why one said nothing."""

    answers: Mapping[int, Whereabouts | str]


@dataclass(frozen=True, slots=True)
class WorkerDied:
    worker_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class RunCancelled:
    reason: str


@dataclass(frozen=True, slots=True)
class GraceEnded:
    """The ranks that were told to stop have had their time."""


Event: TypeAlias = (
    WorkerRegistered
    | SeatEmptied
    | RunStarted
    | RunTakenOver
    | RankEnded
    | RankFroze
    | RankFinished
    | RankSilent
    | PatienceEnded
    | PauseEnded
    | LastSaveEnded
    | Leaving
    | RanksAnswered
    | WorkerDied
    | RunCancelled
    | GraceEnded
)
