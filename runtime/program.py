"""The user's function on its way to the ranks: checked and pickled here, called there."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ray import cloudpickle

from actors.errors import Interrupted
from actors.journal import Journal
from actors.messages import Assignment
from actors.steps import Steps
from collectives.group import Group

from .boundary import entered
from .context import Context, running
from .kept import kept


class Program:
    """A train function and its arguments; what `actors.worker.Program` asks for."""

    def __init__(self, train: Callable[..., object], kwargs: Mapping[str, Any]) -> None:
        self.train = train
        self.kwargs = dict(kwargs)

    def __call__(
        self, assignment: Assignment, group: Group, journal: Journal, steps: Steps
    ) -> object:
        """None where the function was interrupted: all ranks have stopped alike, so no rank has
        failed, and the caller knows that it asked for it."""
        kept().enter(group)
        context = Context(assignment, group, journal)
        try:
            with running(context), entered(steps):
                result = self.train(context, **self.kwargs)
        except Interrupted:
            return None
        # A coroutine has not begun yet; the training thread awaits it on its own loop.
        if inspect.isawaitable(result):
            return self._finish(context, steps, result)
        return result

    async def _finish(self, context: Context, steps: Steps, result: Awaitable[object]) -> object:
        try:
            with running(context), entered(steps):
                return await result
        except Interrupted:
            return None


def pickled(train: Callable[..., object], kwargs: Mapping[str, Any]) -> bytes:
    """The program as bytes. Every mistake that can be seen before anything is sent is a TypeError
    here: not callable, other parameters, a part that cannot be pickled."""
    if not callable(train):
        raise TypeError(
            f"train must be a function of a Context, got {type(train).__name__}; pass the function "
            "itself, and its arguments as keywords"
        )
    _check_parameters(train, kwargs)
    try:
        return bytes(cloudpickle.dumps(Program(train, kwargs)))
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
