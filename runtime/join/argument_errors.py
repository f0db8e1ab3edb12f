"""What is listed in a Join and does not belong there: the texts that say where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chorusline.collectives.contract.articles import with_article
from chorusline.collectives.group import Group

_OF_TORCH = ("DistributedDataParallel", "ZeroRedundancyOptimizer")
"""Classes of torch that a Join takes only from chorusline."""


def not_a_list(given: object) -> str:
    """given: in place of the list of joinables."""
    return f"Join takes a list of joinables, as in Join([model]); got {with_article(type(given))}"


def not_joinable(number: int, given: object) -> str:
    """given: the object at this place of the list, which is no joinable."""
    kind = type(given).__name__
    if kind in _OF_TORCH:
        remedy = "is torch's class. Use the class of that name in chorusline"
    elif isinstance(given, torch.optim.Optimizer):
        remedy = (
            "is stepped by each rank alone. Write Join([model], step_along=[optimizer]) for an "
            "optimizer of a DistributedDataParallel's parameters, or make it a "
            "ZeroRedundancyOptimizer"
        )
    elif isinstance(given, torch.nn.Module):
        remedy = "is not wrapped. Write Join([DistributedDataParallel(module)])"
    elif hasattr(given, "step"):
        remedy = "has no collectives. Objects with a step() belong in step_along=[...]"
    else:
        remedy = "is not a Joinable: derive its class from chorusline.Joinable"
    return f"Join takes joinables, and number {number} of its list, {with_article(kind)}, {remedy}"


def why_not_twice(first: int, again: int, given: object) -> str:
    """given: the joinable at both places of the list."""
    return (
        f"Join lists one {type(given).__name__} at places {first} and {again}, and a rank without "
        "data would shadow each step of it more than once. List it once; if the body steps it more "
        "often than the others, give Join a group to follow, "
        "groups=[ctx.group.new_group(range(ctx.world_size))]: then each step is announced"
    )


def why_not_along(number: int, given: object, *, is_listed: bool) -> str:
    """given: the joinable at this place of step_along. is_listed: whether the Join lists it too."""
    kind = type(given).__name__
    remedy = (
        "leave it out of step_along"
        if is_listed
        else f"list {with_article(kind)} among the joinables in place of step_along, after what it "
        "belongs to: Join([model, optimizer, scaler])"
    )
    return (
        f"step_along[{number}] is {with_article(kind)}, a joinable, whose steps a rank without "
        f"data shadows by itself: {remedy}"
    )


def refuse_torchs_join(joinable: object, config: object) -> None:
    """torch's Join has been given `joinable`, and sets its `config` in it."""
    raise TypeError(
        f"torch's Join cannot shadow the collectives of a chorusline {type(joinable).__name__}: "
        "write chorusline.Join, which takes the same list"
    )


def why_not_inside(joinable: object) -> str:
    """joinable: of the outer Join; it begins a step inside the inner one."""
    return (
        f"a {type(joinable).__name__} that an outer Join lists takes a step inside another Join. A "
        "rank that is out of data would shadow the steps of the inner Join alone, while the others "
        "wait for it in this one. List the joinables of both in one Join, Join([first, second])"
    )


def check_groups(groups: Sequence[Group], followed: Sequence[Group]) -> None:
    """Raises ValueError for groups that cannot be in one Join. groups: of the joinables."""
    first = groups[0]
    for group in (*groups, *followed):
        if group.ranks != first.ranks or group.rank != first.rank:
            raise ValueError(
                "Using join context manager with multiple process groups of different ranks: "
                f"{group} has {list(group.ranks)}, {first} has {list(first.ranks)}. A rank joins "
                "in all of them or in none; use one Join for each set of ranks"
            )
    for group in followed:
        if group in groups:
            raise ValueError(
                f"{group} is the group of a joinable, which issues collectives of its own on "
                "it. Pass another group of these ranks: group.new_group(range(group.size))"
            )
