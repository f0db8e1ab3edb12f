"""The user's function, called on the ranks. packing.py checks and packs it before."""

from __future__ import annotations

import contextlib
import inspect
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from chorusline.actors.errors import Interrupted, StateLost, ends_a_generation
from chorusline.actors.messages.messages import NOWHERE, Assignment, Resumption
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.reporting.report_buffer import ReportBuffer
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.collectives.dry_run import DryRunGroup, DryRunRefused
from chorusline.collectives.group import Group
from chorusline.collectives.objects.payloads import GpusTo, loads

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.config import AUTO, NEVER, CheckpointConfig
from ..process import torch_distributed
from ..process.between_runs import between_runs
from ..process.running import running
from ..process.step_boundary import boundary, entered
from ..process.torch_loaders import end_loaders_with_this_process
from ..recovery.arrivals import tell_why_not
from ..recovery.recovery import Recovery
from .context import Context
from .function_call import FunctionCall
from .hints import note_on

LEADS_TO_USERS_CODE = True  # Tracebacks leave out the frames of this file (outcomes.py).


class Program:
    """A train function and its arguments, as `actors/worker/current_run.py` asks for them."""

    def __init__(
        self,
        train: Callable[..., object],
        kwargs: Mapping[str, Any],
        checkpoint: CheckpointConfig | None = None,
        seed: int | None = None,
    ) -> None:
        self.train = train
        self.kwargs = dict(kwargs)
        self.checkpoint = checkpoint
        self.seed = seed
        self.run_id = uuid.uuid4().hex
        """Identifies one call of `Session.run`; equal on all ranks, newcomers included."""

    def __call__(
        self,
        assignment: Assignment,
        group: Group,
        report_buffer: ReportBuffer,
        lifeline: Lifeline,
        status: RunStatus,
        resumption: Resumption | None,
        replay_log: bytes = b"",
    ) -> object:
        """Call the function; return its value, or a coroutine. The value is None if the function
        was interrupted: all ranks stopped at the same step, so no rank has failed."""
        _register_with_lightning()
        end_loaders_with_this_process()  # Those of a Trainer or of the function itself.
        between_runs().enter(group)
        run = FunctionRun(self, report_buffer, lifeline, status, is_newcomer=resumption is not None)
        # A dry run is a function that begins as a newcomer, in a group without peers.
        if replay_log:
            run.begin_dry_run(replay_log, group.device)
        result = run.begun(assignment, group, resumption)
        # The training thread awaits the coroutine on its own event loop.
        return run.awaited(result) if inspect.isawaitable(result) else result


class FunctionRun:
    """One run of a program on one rank. The function is called once, and again from the top where
    the run needs that after a rank is lost."""

    def __init__(
        self,
        program: Program,
        report_buffer: ReportBuffer,
        lifeline: Lifeline,
        status: RunStatus,
        *,
        is_newcomer: bool,
    ) -> None:
        self._program = program
        self._status = status
        self._report_buffer = report_buffer
        self._lifeline = lifeline
        self._recovery = Recovery(lifeline) if lifeline.survives_loss else None
        if self._recovery is not None and is_newcomer:
            self._recovery.begin_as_newcomer()
        self._call: FunctionCall | None = None  # None: before the first call
        # None: no call has been seeded
        self._seeded: tuple[FunctionCall, Callable[[int], None] | None] | None = None
        self._runs_again = False  # True: from the top, with the state that the ranks have kept
        self._goes_back = False  # True: to the last checkpoint, as no rank's memory has all state.

    def begin_dry_run(self, replay_log: bytes, device: torch.device) -> None:
        """This worker runs the function by itself until it comes to the others."""
        assert self._recovery is not None
        self._recovery.begin_as_newcomer(loads(replay_log, GpusTo(device)))

    def begun(self, assignment: Assignment, group: Group, resumption: Resumption | None) -> object:
        """Call the function, again if need be; return its value, or its coroutine, not started."""
        while True:
            try:
                if resumption is not None and self._recovery is not None:
                    self._recovery.from_the_top.meet(group)
                    if resumption.gives_up is not None:  # The driver ends the run: save only.
                        raise self._last_save(group)
                self._enter(assignment, group, resumption)
                with self._scope() as call:
                    try:
                        result = self._program.train(Context(call), **self._program.kwargs)
                    # All ranks have stopped after the same step: the function has ended, and not
                    # failed.
                    except Interrupted:
                        result = None
                    return result if inspect.isawaitable(result) else _ended(call, result)
            except BaseException as error:
                assignment, group, resumption = self._again(error)

    async def awaited(self, coroutine: Awaitable[object]) -> object:
        result: object = coroutine
        while True:
            try:
                with self._scope() as call:
                    try:
                        value = await result if inspect.isawaitable(result) else result
                    except Interrupted:
                        value = None
                    return _ended(call, value)
            except BaseException as error:
                result = self.begun(*self._again(error))
                if not inspect.isawaitable(result):
                    return result

    def _enter(self, assignment: Assignment, group: Group, resumption: Resumption | None) -> None:
        """Make the FunctionCall. resumption: None at the beginning of a run, and after going back
        to a checkpoint."""
        # Process groups of a function that failed are closed only here. Closed earlier, they would
        # report to the peers an error other than the one that ended the function.
        torch_distributed.end()
        # The function was called before in this run: what `ctx.keep` made then may be torn.
        if self._call is not None:
            between_runs().begin_again()
        former = self._call
        call = self._call = FunctionCall(
            assignment,
            group,
            self._report_buffer,
            self._recovery,
            former,
            run_id=self._program.run_id,
        )
        config = self._program.checkpoint
        replay_log = self._recovery.arrivals.replay_log if self._recovery is not None else None
        if config is not None and (resumption is not None or replay_log is not None):
            # The run continues from memory, even when it has gone back to a checkpoint before: new
            # workers know nothing of that.
            config = replace(config, resume=NEVER)
        checkpoints = call.checkpoints = Checkpoints(group, call.registry, config)
        if resumption is not None and former is not None and former.checkpoints is not None:
            checkpoints.last_step = former.checkpoints.last_step
        checkpoints.tell_progress = call.data_state
        checkpoints.check_progress = call.check_progress
        checkpoints.run_id = self._program.run_id
        checkpoints.goes_back = resumption is None and self._goes_back
        # Then a full disk is a warning: to raise would cost what was trained.
        checkpoints.has_trained = resumption is not None or self._goes_back
        if replay_log is not None:
            assert isinstance(group, DryRunGroup)
            group.answer_with([*replay_log.outside, *replay_log.body])
            checkpoints.place, self._status.taken = replay_log.checkpoints, replay_log.taken
        with running(call), checkpoints:
            # In this order: from the others, from what the ranks have kept, from the disk.
            if replay_log is not None:
                call.resume_data([replay_log.data])
            elif resumption is not None and self._recovery is not None:
                positions = self._recovery.from_the_top.begin_again(group, self._status)
                call.resume_data(positions)
                if former is None:
                    call.number_reports(positions)
            elif checkpoints.reader is not None:
                call.resume_from(checkpoints, self._status.taken)
                self._status.resumed_from = checkpoints.reader.path
                self._status.resumed_step = checkpoints.reader.manifest.step
                if self._recovery is not None and self._program.checkpoint is not None:
                    self._recovery.can_resume_again = self._program.checkpoint.resume == AUTO
        self._status.origin, self._status.steps_before = call.origin, call.steps_before
        call.taken_before = self._status.taken
        # A worker in its dry run is in no generation yet.
        if replay_log is None:
            self._lifeline.has_entered(runs_again=True)
        if self._recovery is not None:
            self._recovery.arrivals.begin_call()
        self._runs_again = resumption is not None and replay_log is None

    @contextlib.contextmanager
    def _scope(self) -> Iterator[FunctionCall]:
        call = self._call
        assert call is not None and call.checkpoints is not None
        # A coroutine enters the scope again: its body has not begun when its function returns.
        with running(call), call.checkpoints, entered(self._status):
            self._seed(call)
            if self._runs_again:
                boundary().at_first_batch = call.at_first_batch
            try:
                yield call
            except Exception as error:
                if note := note_on(error, call.device):
                    error.add_note(note)
                raise
            finally:
                call.keep_place()
                call.fetchers.close()  # An iteration that an error has left keeps its processes.
                torch_distributed.restore_environment()  # At once, even after a failure.

    def _seed(self, call: FunctionCall) -> None:
        """What the session's seed asks for. Each scope has a step boundary of its own."""
        if self._program.seed is None:
            return
        # Once for each call: a coroutine enters its scope twice.
        if self._seeded is None or self._seeded[0] is not call:
            Context(call).seed(self._program.seed)
            self._seeded = call, boundary().at_first_step
        boundary().at_first_step = self._seeded[1]

    def _again(self, error: BaseException) -> tuple[Assignment, Group, Resumption | None]:
        """With what arguments the function that raised `error` runs again. Raises if it does not
        run again."""
        # The person who waits for the worker learns what the function does that keeps it out.
        if isinstance(error, DryRunRefused):
            tell_why_not(str(error))
        # No other rank waits for a dry run, so that there is nothing to recover.
        if self._recovery is None or self._recovery.arrivals.is_dry_run:
            raise error
        group, call = self._lifeline.group, self._call
        checkpoints = call.checkpoints if call is not None else None
        # What no rank holds may be on the disk. All ranks ask.
        config = self._program.checkpoint if isinstance(error, StateLost) else None
        try:
            if config and group and checkpoints and checkpoints.can_go_back(group, config.resume):
                # All ranks are in the next generation already, and all raise StateLost.
                self._recovery.forget()
                self._goes_back = True
                return self._lifeline.assignment, group, None
        except Exception as failure:
            if not ends_a_generation(failure):
                raise
            error = failure  # Another rank was lost: in the next generation all raise StateLost.
        while True:
            resumption = self._recovery.leave(error)
            try:
                group = self._recovery.from_the_top.connect()
                has_begun = resumption.entered != NOWHERE
                return resumption.assignment, group, resumption if has_begun else None
            except Exception as failure:
                if not ends_a_generation(failure):
                    raise
                error = failure  # Another rank was lost while the ranks met: try the next one.

    def _last_save(self, group: Group) -> BaseException:
        """Save the state that this rank holds, since the driver ends the run; return the error that
        reports the saving to the driver."""
        assert self._recovery is not None and self._program.checkpoint is not None
        return self._recovery.from_the_top.save_last(group, self._program.checkpoint)


def _register_with_lightning() -> None:
    """Make `Trainer(strategy="chorusline")` work, if the program has imported Lightning."""
    if "lightning.pytorch" in sys.modules:
        with contextlib.suppress(ImportError):  # Another version of Lightning than the extra's.
            from ..lightning import (
                strategy as lightning_strategy,  # noqa: F401 - registers the strategy's name
            )


def _ended(call: FunctionCall, result: object) -> object:
    # Before this rank waits for the others: one that still saves would wait for it.
    if call.checkpoints is not None:
        call.checkpoints.say_over()
    call.finish()
    torch_distributed.end()
    return result
