"""Errors inside a Join: what they say, and what other errors mean there."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from chorusline.collectives.contract.call_site import users_level
from chorusline.collectives.contract.errors import (
    ALL_ARRIVE,
    SAME_ORDER,
    CollectiveMismatch,
    CollectiveTimeout,
    name_ranks,
)
from chorusline.collectives.diagnosis.blame import check_like_rank_0

IN_JOIN, DIVIDES_BY_ALL, THROWS = 1, 2, 4
HAS_OUTER = 8
"""The rank has more batches of a loop in whose body it iterates another shard."""
FIRST_PLACE, LAST_PLACE = 16, 15
"""The unit of a joinable's place in the list, and the place of all joinables that come later."""

IN_TURN = (
    "A rank without data shadows the listed models and optimizers in turn, once each: list them "
    "in the order in which the body comes to them. A model with a ZeroRedundancyOptimizer of its "
    "own comes in step(), just before the optimizer. One without, or whose optimizer has whole "
    "parameters or other models too, comes in the backward pass, and of those in one pass the one "
    "whose forward pass was last comes first, as in Join([decoder, encoder]). If the body uses one "
    "of them more often than another (a critic five times, its generator once, whose loss is also "
    "a pass of the critic), give Join a group to follow, "
    "groups=[ctx.group.new_group(range(ctx.world_size))]: then each step is announced. Optimizers "
    "in step_along cannot follow that: make them ZeroRedundancyOptimizers"
)

_DIFFERENT = {
    "backward": (
        "reduce gradients of different models, by the order of wrapping, at once",
        "model",
        "All ranks run the backward passes of the same models, in the same order. A rank whose "
        "loss needs one of them less adds 0 * other(x).sum() to it",
    ),
    "step()": (
        "step different sharded optimizers, by the order of construction, at once",
        "optimizer",
        "All ranks call step() of the same optimizers, in the same order",
    ),
}
"""By operation: what the ranks do, what is numbered, and the remedy."""

_FIRST_GENERATION = 1
"""Of a session; that of other groups is 0."""

_SETTINGS = {
    IN_JOIN: "whether the step is inside a Join that is enabled",
    DIVIDES_BY_ALL: "Join(divide_by_initial_world_size=)",
    THROWS: "Join(throw_on_early_termination=)",
}


def flags_of_number(number: int, generation: int) -> int:
    """What a vote says outside of a Join, in the place of a joinable's: the number of the model or
    sharded optimizer among those that were made in its group."""
    # Later on there may be ranks that have not made all those which the others have counted.
    return FIRST_PLACE * (number % (LAST_PLACE + 1)) if generation <= _FIRST_GENERATION else 0


def check_same_joins(operation: str, joins: Sequence[int], generation: int) -> None:
    """Raise CollectiveMismatch, on all ranks, where their Joins differ, or what they step.

    operation: outside of a Join, `backward` for a model's vote, `step()` for an optimizer's.
    joins: by rank, as `JoinEngine.vote_flags_of`, or `flags_of_number`.
    """
    bit = next((bit for bit in _SETTINGS if len({one & bit for one in joins}) > 1), 0)
    if not bit:
        # Models of equal size have buckets of equal size, and then their sums go through.
        places = [one // FIRST_PLACE for one in joins]
        if joins[0] & IN_JOIN:
            operation, name, remedy = "Join", "joinables[{}]", IN_TURN
            what = "take steps of different models or optimizers of the list at once"
        else:
            what, numbered, remedy = _DIFFERENT[operation]
            name = f"{numbered} {{}}"
        by_rank = [f"{name.format(place)} on rank {rank}" for rank, place in enumerate(places)]
        detail = f"the ranks {what}: {', '.join(by_rank)}"
        check_like_rank_0(operation, generation, places, detail, remedy)
        return
    values = [bool(one & bit) for one in joins]
    each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
    check_like_rank_0(
        "Join",
        generation,
        values,
        f"{_SETTINGS[bit]} is {each}, so the ranks would end the step differently",
        "Every rank must enter the same Join around its steps, with the same enable, "
        "divide_by_initial_world_size and throw_on_early_termination, and Join must list each "
        "model that the body trains: a rank without data takes part in no other's steps.",
    )


_SHADOWED = (
    "ranks without data take part in the steps of the listed joinables and in nothing else. If "
    "the loop's body issues other collectives (such as ctx.reduce, ctx.broadcast or a barrier), "
    "issue them on a group that Join follows: beside = ctx.group.new_group(range(ctx.world_size)), "
    "Join([...], groups=[beside]), beside.all_reduce(...); or after the Join."
)
_FOLLOWED = (
    "ranks without data take part in the steps of the listed joinables, and from the first forward "
    "pass of a batch on in collectives of the groups that Join follows. Issue those of the loop's "
    "body after that forward pass, on such a group; or iterate ctx.shard(dataset), with which all "
    "ranks know when a batch begins."
)


def explain(
    error: BaseException, absent: Sequence[int], *, follows: bool, has_several: bool
) -> None:
    """Make an error of a collective say what it means inside a Join, if it says no more than what
    it means anywhere.

    absent: the ranks that have run out of data, as far as known. follows: whether Join follows
    groups. has_several: whether it lists several models, or optimizers that end steps.
    """
    # An error with a remedy of its own knows more than this function.
    if isinstance(error, CollectiveMismatch) and error.remedy == SAME_ORDER:
        who = f"{name_ranks(absent, 'has', 'have')} run out of data, and " if absent else ""
        error.remedy = f"This was inside Join(): {who}"
        error.remedy += _FOLLOWED if follows else _SHADOWED
        error.remedy += (
            " A body that unfreezes parameters does it in a function in step_along, and buffers "
            "are registered before the loop. Ranks with data must issue the same collectives in "
            "the same order."
        )
        # With several of them the order of their steps may be what differs.
        if has_several and not follows:
            error.remedy += f" {IN_TURN}."
        error.__post_init__()
    elif isinstance(error, CollectiveTimeout) and error.remedy == ALL_ARRIVE:
        error.remedy = (
            "This was inside Join(), which waits for ranks that run out of data, but not for one "
            "that is busy elsewhere, or has left the loop alone: "
            + (
                "leave a loop in a Join that follows groups on all ranks at the same step, or on "
                "none; step after the first forward pass of a batch, or iterate "
                "ctx.shard(dataset), with which all ranks know when a batch begins; evaluate by "
                "model.module(...), whose forward passes no rank waits for"
                if follows
                else "a rank that stops early must leave the Join as well"
            )
            + "; if steps are only slow, raise the timeout (timeout_s)."
        )
        error.__post_init__()


def warn_of_skew(skew: float, steps_taken: Sequence[int]) -> None:
    """Warn in the user's line that takes the step. One rank calls it."""
    by_rank = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(steps_taken))
    warnings.warn(
        f"uneven inputs: a rank had no data for {skew:.0%} of the steps so far ({by_rank}). "
        "Training is exact, but that rank only waits; distribute the data more evenly, or raise "
        "skew_warning",
        stacklevel=users_level(),
    )
