"""How a rank gets from one generation into the next, seen from its training thread.

The thread has met with the end of a generation, and calls `regenerate`: it says how far it is, and
waits for the driver's word. The words come to the control loop, `resume`, `stop` and `release`, and
are handed over here. Locks are held for assignments only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from collectives.contract.errors import CollectiveError, GroupAborted, fresh_copy

from ..calls import Actor
from ..errors import ends_a_generation
from ..messages import NOWHERE, Assignment, Frozen, Resumption, RunRequest

if TYPE_CHECKING:
    from collectives.group import Group


class Lifeline:
    """One rank's, for one run.

    connect: makes the group of the generation that this rank was put into last; it has published
    it for the control loop by the time it returns, so that it can be aborted. Errors of its own end
    that generation, too. resumption: of a run that others are in already, when this rank comes.
    """

    def __init__(
        self,
        request: RunRequest,
        driver: Actor,
        assignment: Assignment,
        connect: Callable[[], Group],
        resumption: Resumption | None = None,
    ) -> None:
        self.goes_on = request.goes_on
        self.group: Group | None = None
        self.assignment = assignment
        self.generation = assignment.generation
        """The last one that this rank was put into; its group may not have come about."""
        self._request = request
        self._driver = driver
        self._connect = connect
        self._changed = threading.Condition()
        self._resumption: Resumption | None = None
        self._stop_error: CollectiveError | None = None
        self._freeze_error: CollectiveError | None = None
        self._is_released = False
        self.last_resumption = resumption
        self._unanswered: Callable[[Actor], object] | None = None
        """What this rank has told the driver, and waits for the answer to."""

    def begin(self) -> tuple[Assignment, Group, Resumption | None]:
        """Meet the others, before the function is called; again and again where that fails, and
        the run goes on: who does not come is replaced, and others may come meanwhile.

        Returns what `last_resumption` then is, but None if nobody has begun.
        """
        while True:
            try:
                group = self.connect()
            except Exception as error:
                if not self.goes_on or not ends_a_generation(error):
                    raise
                # Nothing has begun here, so nothing has to be registered to begin once more.
                frozen = self.leave_generation(error)
                self.regenerate(replace(frozen, is_parked=False, can_restart=True))
                continue
            told = self.last_resumption
            has_begun = told is not None and told.entered != NOWHERE
            return self.assignment, group, told if has_begun else None

    def leave_generation(self, error: BaseException) -> Frozen:
        """End the generation for this rank: nothing of it can complete here any more.

        Returns the report for `regenerate`, of a rank that has not begun. How far a rank is must be
        read after this call, when it can no longer change.
        """
        met = self._as_collective_error(error)
        if self.group is not None and not self.group.failure():
            self.group.abort(met)
        return Frozen(self.assignment.rank, self.generation, (), met, NOWHERE)

    def regenerate(self, frozen: Frozen) -> Resumption:
        """Report that this rank is frozen, and wait for the driver's decision.

        Blocks the training thread. `connect` then meets the others in the next generation.
        Raises the error that the run was stopped with, if it does not go on.
        """
        run = self._request.run
        self._tell(lambda driver: driver.froze.remote(run, frozen))
        with self._changed:
            self._changed.wait_for(lambda: self._resumption or self._stop_error)
            self._unanswered = None
            if self._stop_error is not None:
                raise fresh_copy(self._stop_error)
            resumption, self._resumption = self._resumption, None
            assert resumption is not None
            self.last_resumption = resumption
            self.assignment = resumption.assignment
            self.generation = self.assignment.generation
            self._freeze_error = None
        return resumption

    def connect(self) -> Group:
        self.group = self._connect()
        return self.group

    def finish(self) -> CollectiveError | None:
        """The function has returned: wait until it has on all ranks.

        Returns None when that is so, or the error for which this rank has to take part in another
        regeneration first. Raises what the run was stopped with.
        """
        run, rank, generation = self._request.run, self.assignment.rank, self.generation
        self._tell(lambda driver: driver.finished.remote(run, rank, generation))
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_released or self._freeze_error or self._stop_error
            )
            self._unanswered = None
            if self._stop_error is not None:
                raise fresh_copy(self._stop_error)
            return None if self._is_released else self._freeze_error

    def _tell(self, word: Callable[[Actor], object]) -> None:
        """Nobody waits for the call: if the driver dies, the next one hears it again (`attach`)."""
        with self._changed:
            self._unanswered = word
            word(self._driver)

    # ── Control loop ─────────────────────────────────────────────────────────────────────────────

    def freeze(self, generation: int, error: CollectiveError) -> None:
        with self._changed:
            if generation == self.generation:
                self._freeze_error = error
                self._changed.notify_all()

    def resume(self, resumption: Resumption) -> None:
        with self._changed:
            self._resumption = resumption
            self._changed.notify_all()

    def attach(self, driver: Actor) -> None:
        """Another driver has taken over."""
        with self._changed:
            self._driver = driver
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

    def _as_collective_error(self, error: BaseException) -> CollectiveError:
        if isinstance(error, CollectiveError):
            return fresh_copy(error)
        return GroupAborted(self.generation, [], f"{type(error).__name__}: {error}")
