"""The objects that a train function has registered by name, whose state has to survive."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.lr_scheduler import LRScheduler

from chorusline.collectives.contract.argument_kinds import check_text
from chorusline.collectives.contract.errors import with_article

from .option_numbers import copied_options
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
        self._put_back: list[Callable[[], None]] = []
        self._loaded_at: object = None

    def add(self, name: str, stateful: Stateful, *, per_rank: bool = False) -> Registered:
        """Register an object. Raises TypeError for an object without a state, ValueError for a name
        that is taken or is not a word."""
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(
                f"a name must be a non-empty string without a slash, such as 'model'; got {name!r}"
            )
        check_text("a name", name)
        if not isinstance(stateful, Stateful):
            raise TypeError(
                f"register({name!r}, ...) takes an object with state_dict and load_state_dict, got "
                f"{type(stateful).__name__}"
            )
        if name in self._entries:
            raise ValueError(
                f"{name!r} is registered already, for "
                f"{with_article(type(self._entries[name].object))}; every object needs a name of "
                "its own"
            )
        # Equal random numbers on all ranks would be a mistake that no error shows.
        per_rank = per_rank or isinstance(stateful, RandomState)
        entry = self._entries[name] = Registered(name, stateful, per_rank)
        return entry

    def note_loaded(self, entry: Registered, step: object) -> None:
        """The state of an object was loaded, before the first step of this call of the function.

        Objects that were made since the last call of this method may have written into earlier
        ones: a schedule sets the learning rate of its optimizer, or steps other schedules back, and
        a model draws random numbers. The earlier ones get back what was loaded.

        step: where the function is; nothing is put back once a step was taken.
        """
        if step != self._loaded_at:
            self._loaded_at = step
            self._put_back.clear()
        for put_back in self._put_back:
            put_back()
        made = entry.object
        if isinstance(made, torch.optim.Optimizer):
            self._put_back.append(_options_of(made))
        elif isinstance(made, LRScheduler | RandomState):
            self._put_back.append(_state_of(made))

    def __iter__(self) -> Iterator[Registered]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)


def _options_of(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What puts the present options of all parameter groups back."""
    options = copied_options(optimizer.param_groups)

    def put_back() -> None:
        for group, kept in zip(optimizer.param_groups, options, strict=False):
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)  # A schedule and a compiled step hold the same tensor.
                else:
                    group[key] = copy.deepcopy(value)

    return put_back


def _state_of(stateful: LRScheduler | RandomState) -> Callable[[], None]:
    state = copy.deepcopy(stateful.state_dict())
    return lambda: stateful.load_state_dict(copy.deepcopy(state))
