"""The user's function on its way to the ranks: checked and pickled here, called there."""

from __future__ import annotations

import contextlib
import inspect
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ray import cloudpickle

from actors.errors import Interrupted, StateLost, ends_a_generation
from actors.journal import Journal
from actors.messages import NOWHERE, Assignment, Resumption
from actors.run_status import RunStatus
from actors.worker.lifeline import Lifeline
from collectives.group import Group

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.config import AUTO, NEVER, CheckpointConfig
from ..process import torch_distributed
from ..process.between_runs import between_runs
from ..process.running import running
from ..process.step_boundary import entered
from ..recovery.recovery import Recovery
from .context import Context
from .function_call import FunctionCall

LEADS_TO_USERS_CODE = True  # Tracebacks leave out the frames of this file (actors/outcomes.py).


class Program:
    """A train function and its arguments; what `actors.worker.run_here.Program` asks for."""

    def __init__(
        self,
        train: Callable[..., object],
        kwargs: Mapping[str, Any],
        checkpoint: CheckpointConfig | None = None,
    ) -> None:
        self.train = train
        self.kwargs = dict(kwargs)
        self.checkpoint = checkpoint
        self.run_id = uuid.uuid4().hex
        """Of one call of `Session.run`; equal on all ranks, newcomers included."""

    def __call__(
        self,
        assignment: Assignment,
        group: Group,
        journal: Journal,
        lifeline: Lifeline,
        steps: RunStatus,
        resumption: Resumption | None,
    ) -> object:
        """None where the function was interrupted: all ranks have stopped alike, so no rank has
        failed, and the caller knows that it asked for it."""
        _register_with_lightning()
        between_runs().enter(group)
        run = FunctionRun(self, journal, lifeline, steps, is_newcomer=resumption is not None)
        result = run.begun(assignment, group, resumption)
        # The training thread awaits it on its own loop.
        return run.awaited(result) if inspect.isawaitable(result) else result


class FunctionRun:
    """One run of a program on one rank: its function is called once, and again from the top where
    the run goes on like that."""

    def __init__(
        self,
        program: Program,
        journal: Journal,
        lifeline: Lifeline,
        steps: RunStatus,
        *,
        is_newcomer: bool,
    ) -> None:
        self._program = program
        self._steps = steps
        self._journal = journal
        self._lifeline = lifeline
        self._recovery = Recovery(lifeline) if lifeline.goes_on else None
        if self._recovery is not None and is_newcomer:
            self._recovery.begin_as_newcomer()
        self._call: FunctionCall | None = None
        self._goes_back = False  # To the last checkpoint, because memory has lost something.

    def begun(self, assignment: Assignment, group: Group, resumption: Resumption | None) -> object:
        """The value of the function, or its coroutine, which has not begun."""
        while True:
            try:
                if resumption is not None and self._recovery is not None:
                    self._recovery.meet(group)
                    if resumption.gives_up is not None:
                        raise self._last_words(group)
                self._enter(assignment, group, resumption)
                with self._scope() as call:
                    try:
                        result = self._program.train(Context(call), **self._program.kwargs)
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
        """Make what the function is given. resumption: of a run that was begun before."""
        # What a function that failed, or was left, has made was kept until now: to close it before
        # the peers were told would tell them another story.
        torch_distributed.end()
        if self._call is not None:
            between_runs().begin_again()
        call = FunctionCall(
            assignment,
            group,
            self._journal,
            self._recovery,
            self._call,
            run_id=self._program.run_id,
        )
        self._call = call
        config = self._program.checkpoint
        if config is not None and self._goes_back:
            config = replace(config, resume=AUTO)
        elif config is not None and resumption is not None:
            config = replace(config, resume=NEVER)  # It goes on from memory.
        checkpoints = call.checkpoints = Checkpoints(group, call.registry, config)
        checkpoints.tell_progress = call.told_data
        with running(call), checkpoints:
            if resumption is not None and self._recovery is not None:
                told = self._recovery.begin_again(group, self._steps)
                call.resume_data(told)
            elif checkpoints.reader is not None:
                call.resume_data(checkpoints.reader.manifest.progress)

    @contextlib.contextmanager
    def _scope(self) -> Iterator[FunctionCall]:
        call = self._call
        assert call is not None and call.checkpoints is not None
        # Entered anew for a coroutine, which has not begun when its function returns.
        with running(call), call.checkpoints, entered(self._steps):
            yield call

    def _again(self, error: BaseException) -> tuple[Assignment, Group, Resumption | None]:
        """How the function, left by `error`, runs again; raises if it does not."""
        if self._recovery is None:
            raise error
        group = self._lifeline.group
        assert group is not None
        if isinstance(error, StateLost) and self._call and self._call.has_checkpoint(group):
            # All ranks are in the next generation already, and raise this alike.
            self._recovery.forget()
            self._goes_back = True
            return self._lifeline.assignment, group, None
        while True:
            resumption = self._recovery.leave(error)
            try:
                group = self._recovery.connect()
                has_begun = resumption.entered != NOWHERE
                return resumption.assignment, group, resumption if has_begun else None
            except Exception as failure:
                if not ends_a_generation(failure):
                    raise
                error = failure

    def _last_words(self, group: Group) -> BaseException:
        """Save what is held; what to say then to the driver, which has given the run up."""
        assert self._recovery is not None and self._program.checkpoint is not None
        return self._recovery.save_last(group, self._program.checkpoint)


def _register_with_lightning() -> None:
    """Make `Trainer(strategy="chorusline")` known, where the program has imported Lightning."""
    if "lightning.pytorch" in sys.modules:
        with contextlib.suppress(ImportError):  # Of another version than the extra's.
            from ..lightning import (
                strategy as lightning_strategy,  # noqa: F401 - registers the strategy's name
            )


def _ended(call: FunctionCall, result: object) -> object:
    call.finish()
    torch_distributed.end()
    return result


def pickled(
    train: Callable[..., object],
    kwargs: Mapping[str, Any],
    checkpoint: CheckpointConfig | None = None,
) -> bytes:
    """The program as bytes. Every mistake that can be seen before anything is sent is a TypeError
    here: not callable, other parameters, a part that cannot be pickled."""
    if not callable(train):
        raise TypeError(
            f"train must be a function of a Context, got {type(train).__name__}; pass the function "
            "itself, and its arguments as keywords"
        )
    _check_parameters(train, kwargs)
    try:
        return bytes(cloudpickle.dumps(Program(train, kwargs, checkpoint)))
    except Exception as error:
        raise TypeError(
            f"{_culprit(train, kwargs)} cannot be sent to the workers: {error}. Make it inside the "
            "function, on each rank, or pass what is needed to make it"
        ) from error


def _check_parameters(train: Callable[..., object], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(train)
    except ValueError:
        return  # Some builtins have none.
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        given = ", ".join(["ctx", *(f"{name}=..." for name in kwargs)])
        raise TypeError(
            f"train is called as {_name(train)}({given}), but its parameters are {signature}: "
            f"{error}"
        ) from None


def _culprit(train: Callable[..., object], kwargs: Mapping[str, Any]) -> str:
    """The smallest part that does not pickle, in words."""
    for name, value in kwargs.items():
        if not _pickles(value):
            return f"the argument {name} ({type(value).__name__})"
    if inspect.isfunction(train):
        used = inspect.getclosurevars(train)
        for kind, variables in (("variable", used.nonlocals), ("global", used.globals)):
            for name, value in variables.items():
                if not _pickles(value):
                    return f"the {kind} {name} ({type(value).__name__}), used by {_name(train)},"
    return f"train ({_name(train)})"


def _pickles(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _name(train: Callable[..., object]) -> str:
    return getattr(train, "__qualname__", type(train).__name__)
