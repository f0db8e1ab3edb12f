"""Groups made of the ranks of another group. They meet in the store that it met in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import CollectiveMismatch
from .group import Group
from .store import PrefixStore, Store


def new_group(parent: Group, ranks: Sequence[int], name: str | None) -> Group | None:
    """`Group.new_group`."""
    ranks = [_whole(rank, "ranks must be whole numbers") for rank in ranks]
    outside = [rank for rank in ranks if not 0 <= rank < parent.size]
    if outside:
        raise ValueError(
            f"ranks must be in [0, {parent.size}), the ranks of group {parent.name!r}; "
            f"got {outside}"
        )
    if not ranks:
        raise ValueError("ranks must name at least one rank, got none")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"ranks must name each rank once, got {ranks}")
    number, said = _agree(parent, (ranks, name))
    usual = max(said, key=said.count)
    if said.count(usual) != len(said):
        majority = 2 * said.count(usual) > len(said)
        blamed = [r for r, what in enumerate(said) if not majority or what != usual]
        told = ", ".join(
            f"rank {r} passed {what[0]}, name {what[1]!r}" for r, what in enumerate(said)
        )
        raise CollectiveMismatch(f"new_group #{number}", parent.generation, blamed, told)
    return _make(parent, ranks, name, f"{number}")


def split(parent: Group, color: int | None, key: int | None, name: str | None) -> Group | None:
    """`Group.split`."""
    if color is not None:
        color = _whole(color, "color must be a whole number or None")
    place = 0 if key is None else _whole(key, "key must be a whole number or None")
    number, said = _agree(parent, (color, place))
    if color is None:
        return None
    members = [rank for rank in range(parent.size) if said[rank][0] == color]
    members.sort(key=lambda rank: (said[rank][1], rank))
    return _make(parent, members, name, f"{number}.{color}")


def another_store(parent: Group) -> Store:
    """A place of its own in the store that `parent` met in, for whatever else its ranks agree on.

    All ranks ask for it in the same order, between the groups that they make.
    """
    return PrefixStore(f"others/{next(parent._children_made)}", parent._store)


def channel_group(owner: Group, limit_s: float) -> Group:
    """The group behind an `ObjectChannel`: the ranks of `owner`, on their hosts."""
    backend = owner._asked_backend if owner.device.type == "cpu" else None
    group = Group.create(
        PrefixStore("objects", owner._store),
        owner.rank,
        owner.size,
        generation=owner.generation,
        timeout_s=limit_s,
        name=f"{owner.name}, objects",
        backend=backend,
    )
    adopt(owner, group, range(owner.size))
    return group


def _agree(parent: Group, mine: Any) -> tuple[int, list[Any]]:
    """The number of the group to be made, and what all ranks pass."""
    said = parent.all_gather_object(mine).wait()
    return next(parent._children_made), said


def _make(parent: Group, members: Sequence[int], name: str | None, key: str) -> Group | None:
    """members: ranks of the parent, in the order of the new group."""
    if parent.rank not in members:
        return None
    child = Group.create(
        PrefixStore(f"children/{key}", parent._store),
        members.index(parent.rank),
        len(members),
        parent.device,
        generation=parent.generation,
        timeout_s=parent.timeout_s,
        name=name or f"{parent.name}.{key}",
        backend=parent._asked_backend,
    )
    adopt(parent, child, members)
    return child


def adopt(parent: Group, child: Group, members: Sequence[int]) -> None:
    """Make `child` one of the family of `parent`, whose ranks `members` it is made of, in order."""
    child.parent = parent
    child.ranks = tuple(parent.ranks[rank] for rank in members)
    child._family.remove(child)
    child._family = parent._family
    parent._children.append(child)
    child._family.add(child)


def _whole(number: object, told: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{told}, got {number!r}")
    return number
