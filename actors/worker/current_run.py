"""A run on the worker that takes part in it: what the loops and the training thread share."""

from __future__ import annotations

import concurrent.futures
import time
from typing import TYPE_CHECKING, Protocol

from chorusline.collectives.contract.errors import CollectiveError, fresh_copy

from ..messages.messages import Assignment, Failure, Resumption, RunRequest, Success, WorkerState
from ..messages.run_status import RunStatus
from ..parcels.parcel import Parcel
from ..ray_calls.actor_store import ActorStore
from ..ray_calls.calls import Actor
from ..reporting.report_buffer import ReportBuffer
from .lifeline import Lifeline
from .training_thread import TrainingThread

if TYPE_CHECKING:
    from chorusline.collectives.group import Group


class RunnableProgram(Protocol):
    """What a run's payload unpickles to: the user's function, ready to be called.

    An awaitable that it returns is awaited on the training thread's loop.
    replay_log: for its dry run (actors/messages/admission.py); empty if it makes none.
    """

    def __call__(
        self,
        assignment: Assignment,
        group: Group,
        report_buffer: ReportBuffer,
        lifeline: Lifeline,
        status: RunStatus,
        resumption: Resumption | None,
        replay_log: bytes = b"",
    ) -> object: ...


class CurrentRun:
    """The run in progress on this worker. The worker's lock guards all that changes.

    resumption: what has put this worker into its generation; None in the first one.
    store: of the generation. A cancelled store stays cancelled, so the next generation has another.
    lifeline: None until the training thread has unpickled the program.
    program: None when the run is over here, so that its memory is free.
    stop_error: the error that this rank was told to stop with.
    freezes: by generation, the error that ended it (`notes_freeze`).
    is_dry_run: this worker is not yet a rank of the run (actors/messages/admission.py).
    nobody_began: as long as this is true and this rank fails, no rank has called the function
    (phase 2 of `Worker.run`).
    """

    def __init__(
        self,
        assignment: Assignment,
        request: RunRequest,
        store: ActorStore,
        report_buffer: ReportBuffer,
        driver: Actor,
        program: Parcel | None = None,
        resumption: Resumption | None = None,
    ) -> None:
        self.assignment = assignment
        self.resumption = resumption
        self.request = request
        self.program = program
        self.store = store
        self.report_buffer = report_buffer
        self.status = RunStatus(rank=assignment.rank)
        self.driver = driver
        self.lifeline: Lifeline | None = None  # None: before the training thread begins
        self.thread: TrainingThread[Success | Failure] | None = None  # None: before it begins
        self.ending: concurrent.futures.Future[Success | Failure] = concurrent.futures.Future()
        self.state = WorkerState.STARTING
        self.stop_error: CollectiveError | None = None  # None: the run is not stopped
        self.freezes: dict[int, CollectiveError] = {}
        self.nobody_began = False
        self.is_dry_run = False
        self.began_at = time.monotonic()

    def notes_freeze(self, generation: int, error: CollectiveError) -> bool:
        """Whether this rank is in the generation that is over. Code that makes a group asks
        `ends_with` when it is made; the order to continue in a generation may come after its
        end."""
        if generation >= self.assignment.generation:
            self.freezes.setdefault(generation, error)
        return generation == self.assignment.generation

    def continues_in(self, resumption: Resumption, store: ActorStore) -> bool:
        """Whether this rank is put into another generation. An order may come twice: the driver
        that gave it is dead, and the next one could not know that it was on its way. Or too late:
        this worker stops, and would tell the next driver of a generation that nobody else is in."""
        is_late = resumption.assignment.generation <= self.assignment.generation
        if is_late or self.stop_error is not None:
            return False
        self.assignment, self.resumption = resumption.assignment, resumption
        self.store = store
        # A worker in its dry run becomes a rank by its first resumption.
        self.is_dry_run = False
        return True

    def ends_with(self, generation: int) -> CollectiveError | None:
        """The order that stands against the group of a generation; None if there is none."""
        return self.stop_error or self.freezes.get(generation)


class EarlyOrders:
    """Orders that are about a call of `run` and may overtake it, as the two are of different
    concurrency groups. Pure.

    A worker may be called more than once in one run: after a dry run, or a rest. So a call is told
    apart by its run and its generation, which is that of an order's error.
    """

    def __init__(self) -> None:
        self._last = (-1, -1)  # run and generation of the last call
        self._stops: dict[int, tuple[int, CollectiveError]] = {}  # by run; with the generation
        self._freezes: dict[tuple[int, int], CollectiveError] = {}  # by run and generation

    def note_stop(self, run: int, error: CollectiveError) -> None:
        generation = error.generation
        # Of a call that is over already.
        if (run, generation) > self._last:
            self._stops[run] = (generation, error)

    def note_freeze(self, run: int, generation: int, error: CollectiveError) -> None:
        if (run, generation) > self._last:
            self._freezes[run, generation] = error

    def taken_by(
        self, run: int, generation: int
    ) -> tuple[CollectiveError | None, CollectiveError | None]:
        """The order to stop, and the one to freeze, that stand against a call, which has come."""
        of, stop = self._stops.get(run, (-1, None))
        freeze = self._freezes.get((run, generation))
        self._stops.clear()
        self._freezes.clear()
        self._last = run, generation
        # It was for an earlier call: what this worker did as another rank.
        return None if of < generation else stop, freeze


def meet_again(group: Group, error: CollectiveError | None) -> None:
    """A barrier with the ranks that this one has met in an earlier run. error: of an order to stop
    that came before."""
    if error is not None:
        group.abort(error)
        raise fresh_copy(error)
    group.meet().wait_on_host()
