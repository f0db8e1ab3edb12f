"""The objects that a train function has registered by name, whose state has to survive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from .random_state import RandomState


@runtime_checkable
class Stateful(Protocol):
    """An object with a state: a module, an optimizer, a scheduler, a scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered object. per_rank: True: each rank has a state of its own; False: all ranks have
    the same state."""

    name: str
    object: Stateful
    per_rank: bool


class Registry:
    """The registered objects of one rank, in the order of their registration."""

    def __init__(self) -> None:
        self._entries: dict[str, Registered] = {}

    def add(self, name: str, stateful: Stateful, *, per_rank: bool = False) -> Registered:
        """Register an object. Raises TypeError for an object without a state, ValueError for a name
        that is taken or is not a word."""
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(
                f"a name must be a non-empty string without a slash, such as 'model'; got {name!r}"
            )
        if not isinstance(stateful, Stateful):
            raise TypeError(
                f"register({name!r}, ...) takes an object with state_dict and load_state_dict, got "
                f"{type(stateful).__name__}"
            )
        if name in self._entries:
            raise ValueError(
                f"{name!r} is registered already, a {type(self._entries[name].object).__name__}; "
                "every object needs a name of its own"
            )
        # Equal random numbers on all ranks would be a mistake that no error shows.
        per_rank = per_rank or isinstance(stateful, RandomState)
        entry = self._entries[name] = Registered(name, stateful, per_rank)
        return entry

    def __iter__(self) -> Iterator[Registered]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)
