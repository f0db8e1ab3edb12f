"""`optimizer.state` of a sharded optimizer, and what a program changes of its state between steps.

A rank has the state of its own pieces only, so no rank can read or write that of a parameter. It
can be dropped, as programs do to reset the moments: each rank drops its pieces at once. A
rank that has run out of data drops them before the next step is applied; it hears of it when the
ranks vote on that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chorusline.collectives.contract.errors import CollectiveMismatch
from chorusline.collectives.group import Group

from .shards.parameter_shard import ParameterShard

_IN_SHARDS = (
    "the state of a ZeroRedundancyOptimizer is in shards, so no rank can read or write that of a "
    "parameter. To reset it, drop it on all ranks: optimizer.state.clear(), or "
    "optimizer.state.pop(parameter). To read it, consolidate_state_dict() and state_dict(); to "
    "change it, give the changed one to load_state_dict(). This rank's pieces are in "
    "optimizer.shard_optimizer.state"
)


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of the state on one rank since the last step.

    dropped: the numbers of the parameters whose state is gone.
    num_loads: how often a whole state was loaded.
    """

    dropped: frozenset[int] = frozenset()
    num_loads: int = 0

    def __bool__(self) -> bool:
        return bool(self.dropped or self.num_loads)

    def __str__(self) -> str:
        return f"{len(self.dropped)} dropped, {self.num_loads} loaded"


class StateChanges:
    """What the program has done to the state of one optimizer on one rank since the last step."""

    def __init__(self, shard: ParameterShard) -> None:
        self._shard = shard
        self.own = Changes()

    def drop(self, numbers: Iterable[int]) -> None:
        dropped = frozenset(numbers)
        self._shard.drop_state(dropped)
        self.own = Changes(self.own.dropped | dropped, self.own.num_loads)

    def loaded(self) -> None:
        self.own = Changes(num_loads=self.own.num_loads + 1)

    def forget(self) -> None:
        """All ranks have the same state now: that of a step that counts, with the changes before
        it, or of an earlier optimizer."""
        self.own = Changes()

    def take(self, by_rank: Sequence[Changes], live: tuple[int, ...], group: Group) -> None:
        """Drop what the ranks with data have dropped.

        by_rank: the changes of each. live: the ranks with data.

        Raises CollectiveMismatch, on all ranks, if these have changed different things, or have
        loaded a state that the others lack.
        """
        others = {by_rank[rank] for rank in live}
        for changes in others if len(others) == 1 else ():
            # A state that was dropped can be dropped elsewhere; what was loaded is on the loading
            # ranks only.
            if all(one.num_loads == changes.num_loads for one in by_rank):
                self.drop(changes.dropped)
                return
        each = ", ".join(f"{one} on rank {rank}" for rank, one in enumerate(by_rank))
        raise CollectiveMismatch(
            "step()",
            group.generation,
            [rank for rank, one in enumerate(by_rank) if one != by_rank[min(live, default=0)]],
            f"the optimizer's state was not changed alike since the last step: {each}",
            "All ranks must drop the same of it (optimizer.state.clear(), pop()), or load the same "
            "state. Ranks that have run out of data drop what the others drop, but they have "
            "nothing to load: call load_state_dict() before or after the Join.",
        )


def dropped_by_some(by_rank: Mapping[int, Changes], group: Group) -> frozenset[int]:
    """The parameters whose state is gone for ranks that have left their functions. Some may have
    come to a change to which others had not come, and the functions do not come there again.

    by_rank: the changes of the ranks that have state.

    Raises CollectiveMismatch, on all ranks, if some of them have loaded a state.
    """
    if len({one.num_loads for one in by_rank.values()}) > 1:
        each = ", ".join(f"{one} on rank {rank}" for rank, one in by_rank.items())
        raise CollectiveMismatch(
            "ctx.register()",
            group.generation,
            [*by_rank],
            "a worker was lost while some ranks had loaded a state of the optimizer, and others "
            f"had not: {each}",
            "Resume from the last checkpoint.",
        )
    return frozenset[int]().union(*(one.dropped for one in by_rank.values()))


class StateOfParameter:
    """The state of one parameter, which can be dropped: `clear()`. All else that a dictionary has
    raises RuntimeError, and says what to do."""

    def __init__(self, state: ShardedState, parameter: torch.Tensor) -> None:
        self._state, self._parameter = state, parameter

    def clear(self) -> None:
        del self._state[self._parameter]

    def __getattr__(self, name: str) -> Any:
        if hasattr(dict, name):
            raise RuntimeError(_IN_SHARDS)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError(_IN_SHARDS)

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    __reduce_ex__ = _refuse


class ShardedState(MutableMapping[torch.Tensor, Any]):
    """`optimizer.state`. What is dropped of it (clear, pop, del, `state[p] = {}`) is dropped in the
    shards. It has all parameters, or none where no state can be."""

    def __init__(self, shard: ParameterShard, drop: Callable[[Iterable[int]], None]) -> None:
        """drop: drops the state of parameters, by their numbers, on all ranks."""
        self._shard, self._drop = shard, drop

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        return StateOfParameter(self, parameter)

    def __setitem__(self, parameter: torch.Tensor, value: Any) -> None:
        # Python assigns the result of `state[p] |= {…}`, which has changed it already.
        is_state = isinstance(value, StateOfParameter)
        if is_state and value._state._shard is self._shard and value._parameter is parameter:
            return
        if not isinstance(value, dict) or value:
            raise RuntimeError(_IN_SHARDS)
        del self[parameter]

    def __delitem__(self, parameter: torch.Tensor) -> None:
        known = enumerate(self._shard.parameters)
        self._drop([number for number, one in known if one is parameter])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([*self._shard.parameters] if self._shard.may_have_state else [])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RuntimeError(_IN_SHARDS)

    def clear(self) -> None:
        self._drop(range(len(self._shard.parameters)))

    def replace(self, value: Any) -> None:
        """`optimizer.state = value`. Raises RuntimeError for anything but an empty mapping."""
        if isinstance(value, ShardedState) and value._shard is self._shard:
            return
        if not isinstance(value, dict) or value:
            raise RuntimeError(_IN_SHARDS)
        self.clear()
