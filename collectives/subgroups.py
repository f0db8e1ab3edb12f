"""Groups made of the ranks of another group. They meet in the store that it met in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from .errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PeerLost,
    StoreTimeout,
    fresh_copy,
)
from .group import Group
from .inference import outside_inference_mode
from .meeting import WatchedStore, ranks_of_keys
from .operation import Operation
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


def channel_group(owner: Group, operation: Operation) -> Group:
    """The group behind an `ObjectChannel`: the ranks of `owner`, on their hosts.

    operation: the first one that needs it, whose deadline holds.
    """
    left_s = operation.issued_at + operation.timeout_s - time.monotonic()
    return connect_child(
        owner,
        range(owner.size),
        "objects",
        name=f"{owner.name}, objects",
        what=str(operation),
        device=torch.device("cpu"),
        backend=owner._asked_backend if owner.device.type == "cpu" else None,
        limit_s=max(left_s, 0.001),
        timeout_s=operation.timeout_s,
    )


def _meeting_place(prefix: str, parent: Group, members: Sequence[int]) -> WatchedStore:
    """Part of the store that `parent` met in, for a group of `members` of it to meet.

    Who waits there for a rank that is lost, or while the parent ends, raises that at once; the
    store alone would let it wait for the deadline.
    """

    def look() -> None:
        failure = parent.failure()
        if failure is not None:
            raise fresh_copy(failure)
        gone = parent._communicator.gone()
        lost = [number for number, rank in enumerate(members) if rank in gone]
        if lost:
            how = "; ".join(gone[members[number]] for number in lost)
            raise PeerLost("rendezvous", parent.generation, lost, how)

    return WatchedStore(prefix, parent._store, look)


def _agree(parent: Group, mine: Any) -> tuple[int, list[Any]]:
    """The number of the group to be made, and what all ranks pass."""
    said = parent.all_gather_object(mine).wait()
    return next(parent._children_made), said


def _make(parent: Group, members: Sequence[int], name: str | None, key: str) -> Group | None:
    """members: ranks of the parent, in the order of the new group."""
    if parent.rank not in members:
        return None
    name = name or f"{parent.name}.{key}"
    return connect_child(
        parent,
        members,
        f"children/{key}",
        name=name,
        what=f"the making of group {name!r}",
        device=parent.device,
        backend=parent._asked_backend,
        limit_s=parent.timeout_s,
        timeout_s=parent.timeout_s,
    )


@outside_inference_mode
def connect_child(
    parent: Group,
    members: Sequence[int],
    prefix: str,
    *,
    name: str,
    what: str,
    device: torch.device,
    backend: str | None,
    limit_s: float,
    timeout_s: float,
) -> Group:
    """Connect `members` of `parent` within `limit_s`, as one of its family.

    All have agreed to come: who does not is lost to the parent as well, and its generation ends.
    what, timeout_s: for that error.
    """
    group: Group | None = None
    try:
        with parent._communicator.watching(members, what, limit_s):
            group = Group.create(
                _meeting_place(prefix, parent, members),
                members.index(parent.rank),
                len(members),
                device,
                generation=parent.generation,
                timeout_s=limit_s,
                name=name,
                backend=backend,
            )
            adopt(parent, group, members)  # From here on its end is the parent's.
    except (CollectiveError, StoreTimeout) as error:
        if group is not None and parent._closed:
            group.close()
        failure = parent.failure()
        if failure is None:
            failure = _lost(error, what, parent, members, timeout_s)
            parent.abort(failure)
        raise fresh_copy(failure) from error
    if parent._closed:  # Meanwhile, by another thread, which cannot have known this one.
        group.close()
        raise GroupClosed(what, parent.generation)
    return group


def _lost(
    error: CollectiveError | StoreTimeout,
    what: str,
    parent: Group,
    members: Sequence[int],
    timeout_s: float,
) -> CollectiveError:
    """Why `members` of `parent` did not meet; the ranks as `parent` counts them."""
    if isinstance(error, StoreTimeout):
        late = sorted(members[number] for number in ranks_of_keys(error.keys))
        return CollectiveTimeout(what, parent.generation, late, timeout_s)
    ranks = sorted(members[rank] for rank in error.ranks)
    match error:
        case CollectiveTimeout():
            return CollectiveTimeout(what, parent.generation, ranks, timeout_s, error.whereabouts)
        case PeerLost():
            return PeerLost(what, parent.generation, ranks, error.detail)
        case _:
            return GroupAborted(parent.generation, ranks, f"{what} failed: {error}")


def adopt(parent: Group, child: Group, members: Sequence[int]) -> None:
    """Make `child` one of the family of `parent`, whose ranks `members` it is made of, in order."""
    child.parent = parent
    child.ranks = tuple(parent.ranks[rank] for rank in members)
    child._family.remove(child)
    child._family = parent._family
    parent._children.append(child)
    child._family.add(child)
    child._communicator.on_wait(
        lambda ranks, since: parent._communicator.show_waits([members[r] for r in ranks], since)
    )


def _whole(number: object, told: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{told}, got {number!r}")
    return number
