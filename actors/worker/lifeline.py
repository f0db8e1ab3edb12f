"""How a rank gets from one generation into the next, seen from its training thread.

When the thread meets with the end of a generation it calls `leave_generation` and `regenerate`: it
reports how far this rank is, and waits for what the driver decides. The decision comes to the
control loop, as a call of `resume`, `stop` or `release`, and is handed to the thread here. Locks
are held for assignments only.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import ray

from chorusline.collectives.contract.endpoint import Endpoint
from chorusline.collectives.contract.errors import CollectiveError, GroupAborted, fresh_copy

from ..errors import ends_a_generation
from ..fault_plan import Faults, Instant
from ..messages.admission import AdmissionRequest, GivenReplayLog, ReadyToken
from ..messages.messages import (
    NOWHERE,
    Assignment,
    Frozen,
    Readiness,
    Resumption,
    RunRequest,
    Waiting,
)
from ..messages.run_status import MOST_CHANGES, GenerationChange, RunStatus
from ..ray_calls.calls import HEAD_S, HEAD_WATCH_S, Actor, HeadWatch
from .generation_changes import GenerationChanges

if TYPE_CHECKING:
    from chorusline.collectives.group import Group

logger = logging.getLogger(__name__)

_HELD_S = 0.3
"""The most seconds that a rank waits before a step for the end of its generation."""


class AdmittingRank(Protocol):
    """What the control loop asks of a rank to which a worker comes (recovery/arrivals.py)."""

    def give_replay_log(self) -> concurrent.futures.Future[GivenReplayLog | None]: ...

    def request_admission(self, request: AdmissionRequest) -> None: ...

    def let_go(self) -> None: ...


class Lifeline:
    """The lifeline of one rank in one run.

    connect: makes the group of the generation that this rank was put into last. By the time it
    returns, the group is known to the control loop, so that it can be aborted. An error that it
    raises ends that generation as well.
    resumption: what the other ranks are told of the generation, if they are in the run already.
    """

    def __init__(
        self,
        request: RunRequest,
        driver: Actor,
        assignment: Assignment,
        connect: Callable[[], Group],
        resumption: Resumption | None = None,
        seat: int = -1,
        status: RunStatus | None = None,
        worker_id: str = "",
        prepare: Callable[[], Endpoint | None] = lambda: None,
    ) -> None:
        """seat: of this worker, if it is one with which the run began: it commits what is ordered
        for that seat.
        prepare: makes what the group of the next generation may need, for a later `connect`.
        status: of this rank, which says how it went from generation to generation."""
        self.faults = Faults.of(request.fault_plan, seat, lambda: ray.kill(self._driver))
        self.survives_loss = request.survives_loss
        self.replica_size = request.replica_size
        self.group: Group | None = None  # None: before the first meeting
        self.assignment = assignment
        self.generation = assignment.generation
        """The generation that this rank was put into last; its group may not exist yet."""
        self._request = request
        self._driver = driver
        self._connect = connect
        self._prepare = prepare
        self._worker_id = worker_id
        self._changed = threading.Condition()
        self._resumption: Resumption | None = None  # None: the driver has not decided
        self._stop_error: CollectiveError | None = None  # None: the run is not stopped
        self._freeze_error: CollectiveError | None = None  # None: this generation may go further
        self._is_released = False
        self._status = status or RunStatus()
        self._reasons: dict[int, str] = {}
        """By process, why it was lost, of those that were lost before that was known."""
        self._changes = GenerationChanges(assignment.world_size)
        self.last_resumption = resumption
        self.readiness: Callable[[bool], Readiness] = _not_yet
        """Whether the generation could be ended, by whether ranks would leave then. Set by the
        run's program, as is `arrivals`. For any thread."""
        self.missing: Callable[[], str] = str
        """As `readiness`: why the function cannot run again with a worker that comes; empty if it
        can."""
        self.arrivals: AdmittingRank | None = None  # None: no recovery, or the function is over
        self._held: concurrent.futures.Future[None] | None = None
        """Done when this rank waits in `before_step`; None: it was not asked to."""
        self._unanswered: Callable[[Actor], object] | None = None
        """The call to the driver whose answer this rank waits for; None: it waits for none."""

    def begin(self) -> tuple[Assignment, Group, Resumption | None]:
        """Meet the other ranks before the function is called.

        In a run that continues, this is tried again where it fails: a rank that does not come is
        replaced, and newcomers may come meanwhile.

        Returns assignment and group, and `last_resumption` unless no rank has begun.
        """
        while True:
            try:
                group = self.connect()
            except Exception as error:
                # An error of another kind, say of the network's set-up, would come each time.
                if not self.survives_loss or not ends_a_generation(error):
                    raise
                # Nothing has begun here, so nothing has to be registered to begin once more.
                frozen = self.leave_generation(error)
                self.regenerate(replace(frozen, waiting=Waiting.NOWHERE))
                continue
            last = self.last_resumption
            has_begun = last is not None and last.entered != NOWHERE
            return self.assignment, group, last if has_begun else None

    def leave_generation(self, error: BaseException) -> Frozen:
        """End the generation for this rank: nothing of it can complete here any more.

        Returns the report for `regenerate`, of a rank that has not begun. How far a rank is must be
        read after this call, when it can no longer change.
        """
        met = self._as_collective_error(error)
        ended: set[int] = set()
        # The group of this generation may not exist yet, and in another one ranks differ.
        if self.group is not None and self.group.generation == self.generation:
            ended = self.group._ended_ranks()
        self._changes.left(time.time(), self._status.step)
        # Else peers would wait in it for a rank that has left.
        if self.group is not None and not self.group.failure():
            self.group.abort(met)
        return Frozen(self.assignment.rank, self.generation, (), met, NOWHERE, ended=tuple(ended))

    def regenerate(self, frozen: Frozen) -> Resumption:
        """Report that this rank is frozen, and wait for the driver's decision.

        Blocks the training thread. `connect` then meets the others in the next generation.
        Raises the error that the run was stopped with, if it does not continue.
        """
        run, frozen = self._request.run, replace(frozen, endpoint=self._prepare())
        return self._resumed_after(lambda driver: driver.froze.remote(run, frozen))

    def dry_run_ready(self, token: ReadyToken) -> Resumption:
        """This worker waits at its first step. Returns when the other ranks admit it: how it
        continues in its first generation. Raises the error that ended the run or the dry run."""
        run, worker_id, endpoint = self._request.run, self._worker_id, self._prepare()
        return self._resumed_after(
            lambda driver: driver.dry_run_ready.remote(run, worker_id, token, endpoint)
        )

    def decline(self, number: int, why: str, *, is_final: bool) -> None:
        """This rank does not admit the worker, as it was asked. number: of the request.
        is_final: it would not do so later in this call of its function either."""
        self._driver.declined.remote(self._request.run, self.generation, number, why, is_final)

    def _resumed_after(self, report: Callable[[Actor], object]) -> Resumption:
        self._ask(report, lambda: self._resumption)
        with self._changed:
            resumption, self._resumption = self._resumption, None
            assert resumption is not None
            self.last_resumption = resumption
            self.assignment = resumption.assignment
            self.generation = self.assignment.generation
            self._freeze_error = None
        self._changes.attempted(resumption)
        return resumption

    def has_entered(self, *, runs_again: bool, dealt_again: int = 0) -> None:
        """The function continues in the generation that this rank was put into last, or is about to
        be called there: say so in the status. dealt_again: as in GenerationChange."""
        status = self._status
        change = self._changes.entered(
            self.assignment,
            time.time(),
            status.step,
            runs_again=runs_again,
            dealt_again=dealt_again,
        )
        if change is not None:
            with self._changed:
                changes = (*status.generation_changes, self._explained(change))
                status.generation_changes = changes[-MOST_CHANGES:]
                status.num_lost += len(set(change.lost) - set(change.left))
        status.generation = self.generation

    def before_step(self) -> None:
        """The function has ended a step, and another one comes. If the driver is about to end the
        generation, wait here for that: then no rank passes the coming step, after which may be code
        that cannot be repeated."""
        if self._held is None:
            return
        with self._changed:
            held, self._held = self._held, None
            if held is not None and not held.done():
                held.set_result(None)
                self._changed.wait_for(lambda: self._freeze_error or self._stop_error, _HELD_S)

    def connect(self) -> Group:
        self.faults.reach(Instant.MEET)
        self.group = self._connect()
        return self.group

    def finish(self) -> CollectiveError | None:
        """The function has returned on this rank: wait until it has on all ranks.

        Returns None when it has, or the error for which this rank has to take part in another
        regeneration first. Raises the error that the run was stopped with.
        """
        run, rank, generation = self._request.run, self.assignment.rank, self.generation
        assert self.group is not None
        # Peers that wait for this rank in a collective learn at once that it issues none.
        self.group.rest()
        self._ask(
            lambda driver: driver.finished.remote(run, rank, generation),
            lambda: self._is_released or self._freeze_error,
        )
        with self._changed:
            if self._is_released:
                self.group.turn()  # To what follows the function, as all ranks do.
                return None
            return self._freeze_error

    def _ask(self, report: Callable[[Actor], object], is_decided: Callable[[], object]) -> None:
        """Make a call that is not awaited, and return when the driver has decided. If the driver
        dies, `attach` repeats the call to the next one. Raises the error that the run was stopped
        with. Ends this process if it is cut off from the cluster: the others continue without it,
        and it would keep its device until the network is back."""
        with self._changed:
            self._unanswered = report
            report(self._driver)
        head = HeadWatch()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._stop_error or is_decided(), HEAD_WATCH_S):
                    self._unanswered = None
                    # A stop counts more than a decision that came before it.
                    if self._stop_error is not None:
                        raise fresh_copy(self._stop_error)
                    return
            # Without the lock, as the question may take seconds, and the control loop needs it.
            if head.gives_up():
                logger.error(
                    "rank %d in generation %d waits for the driver, and the cluster's head has "
                    "taken no connection for %g s: this worker is cut off, and ends",
                    self.assignment.rank,
                    self.generation,
                    HEAD_S,
                )
                os._exit(1)

    # ── Control loop ─────────────────────────────────────────────────────────────────────────────

    def hold(self) -> concurrent.futures.Future[None]:
        """Have the training thread wait in `before_step`; done when it does."""
        with self._changed:
            self._held = self._held or concurrent.futures.Future()
            return self._held

    def freeze(self, generation: int, error: CollectiveError) -> None:
        with self._changed:
            # An order for an earlier generation comes late: this rank has left that one.
            if generation == self.generation:
                self._freeze_error = error
                self._changed.notify_all()

    def resume(self, resumption: Resumption) -> None:
        with self._changed:
            self._resumption = resumption
            self._changed.notify_all()

    def explain_loss(self, pid: int, why: str) -> None:
        """The driver has learned why the process of a lost rank has ended."""
        with self._changed:
            self._reasons[pid] = why
            changes = self._status.generation_changes
            self._status.generation_changes = tuple(map(self._explained, changes))

    def attach(self, driver: Actor) -> None:
        """Another driver has taken the run over."""
        with self._changed:
            self._driver = driver
            # The driver that was asked is dead, and its answer will not come.
            if self._unanswered is not None:
                self._unanswered(driver)

    def stop(self, error: CollectiveError) -> None:
        with self._changed:
            self._stop_error = self._stop_error or error
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self._is_released = True
            self._changed.notify_all()

    def let_go(self) -> None:
        """The function is over: refer to nothing of it any more. The worker keeps its last run."""
        arrivals, self.arrivals = self.arrivals, None
        if arrivals is not None:
            arrivals.let_go()
        self.readiness, self.missing = _not_yet, str
        with self._changed:
            self._held = self._held or concurrent.futures.Future()
            if not self._held.done():
                self._held.set_result(None)

    def _explained(self, change: GenerationChange) -> GenerationChange:
        reasons = ((one, self._reasons.get(one.pid, one.why)) for one in change.gone)
        return replace(change, gone=tuple(replace(one, why=why) for one, why in reasons))

    def _as_collective_error(self, error: BaseException) -> CollectiveError:
        if isinstance(error, CollectiveError):
            return fresh_copy(error)
        return GroupAborted(self.generation, [], f"{type(error).__name__}: {error}")


def _not_yet(for_departure: bool) -> Readiness:
    return Readiness.NOT_YET
