"""The Joins that this process is in, from outside: the innermost, and their way to other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from chorusline.collectives.group import Group

from ..process.step_boundary import boundary
from .engine import JoinEngine


def change_ranks(former_ranks: Sequence[int]) -> None:
    """Renumber the ranks of every Join that this process is in. former_ranks: by new rank, its
    former rank; -1 for a newcomer."""
    for join in boundary().joins:
        join.ledger.change_ranks(former_ranks)


def follows_groups() -> bool:
    """Whether this process is in a Join that follows groups. These groups end with the generation,
    and their collectives belong to no step, so the loop cannot continue in the next generation: the
    function has to run again from the top."""
    return any(join.is_following for join in boundary().joins)


def change_group(group: Group) -> None:
    """Move every Join that this process is in to another group. None of them may follow groups."""
    for join in boundary().joins:
        join.change_group(group)


def active_join() -> JoinEngine | None:
    """The innermost Join that this process is in, if it is enabled."""
    joins: list[JoinEngine] = boundary().joins
    return joins[-1] if joins else None
