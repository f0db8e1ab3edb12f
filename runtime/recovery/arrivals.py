"""How a worker comes to ranks that train with `ctx.steps`, and they continue where they are.

On a rank that was there before:

    (1) A rank is asked for the **replay log** of its function's beginning (state_transfer.py), and
        gives it between two steps.
    (2) When the worker waits at its first step, all ranks are asked to admit it. A rank says so
        in its next vote, if it is in the pass over the epoch in which the worker waits, has made
        the same objects, and no checkpoint of it is being written.
    (3) When all ranks have said so in one vote, they meet after that step, end the generation
        together, and enter the next one in place (in_place.py), with the worker.

On the worker:

    (a) The function runs from the top, with the replay log, in a group without peers
        (collectives/dry_run.py), up to its first step of `ctx.steps`.
    (b) It waits there, and says what it has made (`ReadyToken`).
    (c) It enters the generation of the others as a rank that holds nothing, and continues after
    their step with their random state, options, schedules and place in the data.

Where the others have moved on to another epoch meanwhile, or their number has changed, it
makes another dry run. If the function can have none, all run again from the top (from_the_top.py).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator

from chorusline.actors.errors import ends_a_generation
from chorusline.actors.messages.admission import AdmissionRequest, GivenReplayLog, ReadyToken
from chorusline.actors.messages.messages import Resumption
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.collectives.contract.errors import CollectiveError, GroupAborted
from chorusline.collectives.diagnosis.debug import logger
from chorusline.collectives.dry_run import DryRunGroup, DryRunRefused
from chorusline.collectives.kept_results import KeptResults

from ..data.steps.steps import Steps
from ..process.registry import Registered
from ..process.step_boundary import boundary
from .live_objects import LiveObjects
from .state_transfer import ReplayLog, digest_of, has_room, replay_log_of, why_not_within


class Arrivals:
    """These steps on one rank, for one run: the `AdmissionPoint` of its steps, and what the control
    loop asks for."""

    def __init__(
        self,
        lifeline: Lifeline,
        objects: LiveObjects,
        cross: Callable[[BaseException], None],
        be_admitted: Callable[[Resumption], None],
    ) -> None:
        """cross: gets this rank from the boundary between two steps into the next generation.
        be_admitted: the same for a worker after its dry run."""
        self.replay_log: ReplayLog | None = None
        """For the dry run of this rank; None if it makes none."""
        self.steps: Steps | None = None
        """The pass over an epoch in which the ranks are, or are to meet; None before the first."""
        self._lifeline = lifeline
        self._objects = objects
        self._cross = cross
        self._be_admitted = be_admitted
        self._steps_in: object = None
        """The call of the function in which a step was taken with `ctx.steps`."""
        self._lock = threading.Lock()
        self._asked: concurrent.futures.Future[GivenReplayLog | None] | None = None
        """For the replay log; None: nobody has asked for it since a step."""
        self._request: AdmissionRequest | None = None  # None: no worker waits
        self._has_told = False
        self._kept = KeptResults()
        self._is_keeping = False

    # -- for the control loop --------------------------------------------------------------------

    def give_replay_log(self) -> concurrent.futures.Future[GivenReplayLog | None]:
        """(1) Filled in between two steps; None if the function ends before."""
        with self._lock:
            # Answered by the training thread, which alone knows when no step is under way.
            self._asked = self._asked or concurrent.futures.Future()
            return self._asked

    def request_admission(self, request: AdmissionRequest) -> None:
        """(2) This rank says in its next vote whether it can admit the worker."""
        self._request = request

    def let_go(self) -> None:
        """No step comes any more."""
        self._give(None)

    @property
    def admits(self) -> bool:
        """Whether a worker could be admitted between two steps, as far as this rank knows."""
        # Only in a loop of ctx.steps does a rank pass the place where a worker comes in.
        if self._steps_in is None or self._steps_in is not self._objects.call:
            return False
        why = why_not_within(self._objects)
        if why and not self._has_told:
            self._has_told = True
            tell_why_not(why)
        return not why

    # -- the function's beginning ----------------------------------------------------------------

    def begin_call(self) -> None:
        """The function is called next: keep what its collectives give, for a worker that comes."""
        self._kept = KeptResults()
        self._keep()

    @contextlib.contextmanager
    def in_body(self) -> Iterator[None]:
        """The body of an epoch."""
        self._kept.begin_body()
        self._keep()
        try:
            yield
        finally:
            self._kept.end_body()
            self._keep()

    def step_counts(self) -> None:
        if self._is_keeping:
            self._kept.spoil("it takes a step before those of ctx.steps")
            self._keep_no_more()

    def _keep(self) -> None:
        if not self.is_dry_run and not self._kept.why_not:
            self._is_keeping = True
            self._objects.call.group.keep_results(self._kept)

    def _keep_no_more(self) -> None:
        if self._is_keeping:
            self._is_keeping = False
            self._objects.call.group.keep_results(None)

    # -- the steps -------------------------------------------------------------------------------

    def begin(self, steps: Steps) -> None:
        if self.replay_log is not None:
            self._end_dry_run(steps)
        self._keep_no_more()  # What comes now is repeated by no worker that comes.

    def before_step(self, steps: Steps) -> None:
        bound, request = boundary(), self._request
        # Said again for each vote: a save may have begun since the last one.
        bound.would_admit = False
        if request is None:
            return
        if request.generation != self._lifeline.generation:
            self._request = None  # The driver has called it off with the generation.
            return
        why = self._why_not_now(steps, request.token)
        if why:
            self._request = None
            is_final = request.token.iteration == steps.iteration and steps.has_next
            self._lifeline.decline(request.number, why, is_final=is_final)
            return
        checkpoints = self._objects.call.checkpoints
        bound.would_admit = checkpoints is None or not checkpoints.is_saving

    def _why_not_now(self, steps: Steps, token: ReadyToken) -> str:
        if token.iteration != steps.iteration or not steps.has_next:
            return "the ranks have reached the end of the epoch in which it waits"
        # Shards and buckets are matched by number, so both must have made the same.
        if token.objects != digest_of(self._objects):
            return "it made other models or optimizers than the function made here"
        if not has_room(self._objects, token.num_ranks):
            return f"shards for {token.num_ranks} ranks need longer buckets than were made here"
        return ""

    def at_boundary(self, steps: Steps) -> None:
        self.steps, self._steps_in = steps, self._objects.call
        # Between two steps, so that all parts of the log are of the same moment.
        if self._asked is not None:
            self._answer()
        bound = boundary()
        # Some rank could not yet, or nobody waits: the next vote asks again.
        if not bound.admits:
            return
        bound.admits = bound.would_admit = False
        # It is granted: what comes next is another request.
        self._request = None
        checkpoints, group = self._objects.call.checkpoints, self._objects.call.group
        if checkpoints is not None:
            checkpoints.finish()  # One that was due after this step: the next group is another.
        error: CollectiveError
        try:
            # (3) No rank ends the generation while another one is still in code of the loop's body.
            group.barrier().wait_on_host()
            error = GroupAborted(group.generation, [], "a worker joins between two steps")
        except CollectiveError as failure:
            if not ends_a_generation(failure):
                raise
            error = failure
        self._cross(error)

    def _give(self, replay_log: GivenReplayLog | None) -> None:
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked.set_result(replay_log)

    def _answer(self) -> None:
        why = why_not_within(self._objects) or self._kept.why_not
        payload = b""
        if not why:
            payload, why = replay_log_of(self._objects, self._kept)
        # In the log as well: a person wonders why all functions begin again.
        if why:
            tell_why_not(why)
        self._give(GivenReplayLog(payload, why))

    # -- on a worker that comes ------------------------------------------------------------------

    @property
    def is_dry_run(self) -> bool:
        return self.replay_log is not None

    def refuse(self, why: str) -> None:
        """The function does something that it cannot do by itself. Raises DryRunRefused."""
        raise DryRunRefused(why)

    def restore(self, entry: Registered) -> bool:
        """An object is registered in a dry run."""
        assert self.replay_log is not None
        return self.replay_log.restore(entry)

    def _end_dry_run(self, steps: Steps) -> None:
        """(b) and (c): the worker waits at its first step, and comes in with the others' state."""
        group = self._objects.call.group
        why = group.refusal if isinstance(group, DryRunGroup) else ""
        # Code of the function may have caught the refusal and continued without the results.
        why = why or why_not_within(self._objects)
        if why:
            self.refuse(why)
        token = ReadyToken(steps.iteration, digest_of(self._objects), group.size)
        assert self.replay_log is not None
        # A worker that comes later may ask this rank for its log.
        self._kept.take(self.replay_log.outside, self.replay_log.body)
        resumption = self._lifeline.dry_run_ready(token)
        self.steps, self._steps_in, self.replay_log = steps, self._objects.call, None
        self._be_admitted(resumption)


def tell_why_not(why: str) -> None:
    """In the log of the rank or worker that knows it."""
    logger.warning(
        "a new worker is joining; the functions run again from the top on all ranks, because %s",
        why,
    )
