"""A communicator around another one, which sees each operation before it is issued."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from typing import Any

from .communicator import Communicator
from .operation import Operation


class WrappingCommunicator(Communicator):
    """Calls `before` with each operation, and lets `inner` do everything."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        for name, value in vars(Communicator).items():  # A transport's capabilities.
            if not name.startswith("_") and not callable(value):
                setattr(self, name, getattr(inner, name))
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self.backend = inner.backend

    @abc.abstractmethod
    def before(self, name: str, operation: Operation, *arguments: Any) -> None:
        """name: of the method that is called. arguments: what it gets besides `operation`."""


def _passed_on(name: str, is_operation: bool) -> Callable[..., Any]:
    def call(self: WrappingCommunicator, *arguments: Any, **named: Any) -> Any:
        if is_operation:
            self.before(name, *arguments)
        return getattr(self.inner, name)(*arguments, **named)

    call.__name__ = name
    return call


for _name, _method in inspect.getmembers(Communicator, inspect.isfunction):
    if not _name.startswith("_"):
        _is_operation = "operation" in inspect.signature(_method).parameters
        setattr(WrappingCommunicator, _name, _passed_on(_name, _is_operation))
abc.update_abstractmethods(WrappingCommunicator)  # type: ignore[type-abstract]
