"""The user's function on its way to the ranks: checked and pickled here, called there."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ray import cloudpickle

from actors.errors import Interrupted
from actors.journal import Journal
from actors.lifeline import Lifeline
from actors.messages import Assignment
from actors.steps import Steps
from collectives.group import Group

from .boundary import entered
from .checkpoint.checkpoints import Checkpoints
from .checkpoint.config import CheckpointConfig
from .context import Context, running
from .kept import kept


class Program:
    """A train function and its arguments; what `actors.worker.Program` asks for."""

    def __init__(
        self,
        train: Callable[..., object],
        kwargs: Mapping[str, Any],
        checkpoint: CheckpointConfig | None = None,
    ) -> None:
        self.train = train
        self.kwargs = dict(kwargs)
        self.checkpoint = checkpoint

    def __call__(
        self,
        assignment: Assignment,
        group: Group,
        journal: Journal,
        lifeline: Lifeline,
        steps: Steps,
    ) -> object:
        """None where the function was interrupted: all ranks have stopped alike, so no rank has
        failed, and the caller knows that it asked for it."""
        kept().enter(group)
        context = Context(assignment, group, journal, lifeline)
        checkpoints = context.checkpoints = Checkpoints(group, context.registry, self.checkpoint)
        checkpoints.tell_progress = context.told_data
        # Entered anew for a coroutine, which has not begun when its function returns.
        with running(context), checkpoints, entered(steps):
            if checkpoints.reader is not None:
                context.resume_data(checkpoints.reader.manifest.progress)
            try:
                result = self.train(context, **self.kwargs)
            except Interrupted:
                result = None
            # The training thread awaits it on its own loop.
            if inspect.isawaitable(result):
                return self._awaited(context, checkpoints, steps, result)
            context.finish()
            return result

    async def _awaited(
        self,
        context: Context,
        checkpoints: Checkpoints,
        steps: Steps,
        awaitable: Awaitable[object],
    ) -> object:
        with running(context), checkpoints, entered(steps):
            try:
                result = await awaitable
            except Interrupted:
                result = None
            context.finish()
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
