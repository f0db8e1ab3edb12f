"""What a Join lists twice, or in step_along in place of the joinables: refused with the place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.optim.swa_utils import AveragedModel

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model

WRONG = {
    # The joinables and step_along, by their letters; what the text says.
    ("mm", ""): "Join lists one DistributedDataParallel at places 0 and 1",
    ("mom", ""): "Join lists one DistributedDataParallel at places 0 and 2",
    ("momo", ""): "Join lists one DistributedDataParallel at places 0 and 2",
    ("moo", ""): "Join lists one ZeroRedundancyOptimizer at places 1 and 2",
    ("moss", ""): "Join lists one GradScaler at places 2 and 3",
    ("mocc", ""): "Join lists one Counter at places 2 and 3",
    ("mo", "o"): r"step_along\[0\] is a ZeroRedundancyOptimizer, .*: leave it out",
    ("mos", "hs"): r"step_along\[1\] is a GradScaler, .*: leave it out",
    ("mo", "m"): r"step_along\[0\] is a DistributedDataParallel, .*: leave it out",
    ("moc", "hc"): r"step_along\[1\] is a Counter, .*: leave it out",
    ("m", "o"): r"step_along\[0\] is a ZeroR.*list a ZeroRedundancyOptimizer among the joinables",
    ("mo", "s"): r"step_along\[0\] is a GradScaler.*list a GradScaler among the joinables",
}


class Counter(cl.Joinable):
    def __init__(self, group: cl.Group) -> None:
        self.group = group

    join_group = property(lambda self: self.group)  # type: ignore[assignment]
    join_device = property(lambda self: self.group.device)  # type: ignore[assignment]

    def join_hook(self, **kwargs: Any) -> cl.JoinHook:
        return cl.JoinHook()

    def step(self) -> None: ...


@pytest.mark.parametrize("listed", WRONG, ids=" along ".join)
def test_a_joinable_has_one_place_in_a_join(listed: tuple[str, str], alone: cl.Group) -> None:
    model = cl.DistributedDataParallel(make_model(torch.float32), alone)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    known = {
        "m": model,
        "o": optimizer,
        "s": cl.GradScaler(optimizer),
        "c": Counter(alone),
        "h": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    joinables, along = ([known[letter] for letter in letters] for letters in listed)
    with pytest.raises(ValueError, match=WRONG[listed]):
        cl.Join(joinables, step_along=along)
    if "leave it out" in WRONG[listed]:
        cl.Join(joinables, step_along=along[:-1])


def steps_in_a_function(group: cl.Group, lengths: tuple[int, int]) -> str:
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        with (
            pytest.raises((RuntimeError, cl.GroupAborted)) as raised,
            cl.Join([model, optimizer], step_along=[step], skew_warning=None),
        ):
            for batch in batches_of(own.rank, lengths[own.rank], torch.float32):
                loss_of(model, batch).backward()
                step()
        return str(raised.value)


@pytest.mark.parametrize("lengths", [(2, 4), (3, 0)])
def test_a_function_that_steps_a_sharded_optimizer_is_refused_on_the_rank_without_data(
    ranks_of: Callable[[int], Any], lengths: tuple[int, int]
) -> None:
    joined = lengths.index(min(lengths))
    for told in ranks_of(2).run(steps_in_a_function, lengths):
        assert f"calls step() of a ZeroRedundancyOptimizer on rank {joined}, which has run" in told
        assert "needs gradients" not in told


class Stepping:
    def step(self) -> None: ...


def make_nothing() -> None: ...


def listed_twice(group: cl.Group) -> tuple[cl.DistributedDataParallel, dict[str, Any]]:
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, {
        "SGD": optimizer,
        "StepLR": torch.optim.lr_scheduler.StepLR(optimizer, 1),  # It replaces the step of SGD.
        "AveragedModel": AveragedModel(model.module),
        "Stepping": Stepping(),
    }


@pytest.mark.parametrize("between", [0, 1])
@pytest.mark.parametrize("kind", ["SGD", "StepLR", "AveragedModel", "Stepping"])
def test_an_object_that_is_stepped_has_one_place(kind: str, between: int, alone: cl.Group) -> None:
    model, known = listed_twice(alone)
    one = known[kind]
    first = [known["SGD"]] if kind == "AveragedModel" else []
    listed = [*first, one, *[make_nothing] * between]
    says = rf"one {kind} at places {len(first)} and {len(listed)}, .* write a function"
    for again in [one] if kind == "AveragedModel" else [one, one.step]:
        with pytest.raises(ValueError, match=says):
            cl.Join([model], step_along=[*listed, again])


def test_a_function_may_have_two_places(alone: cl.Group) -> None:
    model, known = listed_twice(alone)
    function = known["SGD"].zero_grad
    cl.Join([model], step_along=[function, known["SGD"], function])


class Meter:
    def step(self, loss: float) -> None: ...


NEED_AN_ARGUMENT: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "Sequential": (lambda _: make_model(torch.float32), "List a function in its place that calls"),
    "Meter": (lambda _: Meter(), "List a function in its place that calls step"),
    "<lambda>": (lambda _: lambda loss: loss, "List a function in its place that calls it"),
    "ReduceLROnPlateau": (
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        r"call its step\(metric\) after the Join, with ctx\.reduce",
    ),
    "GradScaler": (
        lambda _: torch.amp.GradScaler("cpu"),
        r"step_along=\[functools\.partial\(scaler\.step, optimizer\), scaler\.update\]",
    ),
}


@pytest.mark.parametrize("kind", NEED_AN_ARGUMENT)
def test_what_needs_an_argument_says_what_to_list_in_its_place(kind: str, alone: cl.Group) -> None:
    model = cl.DistributedDataParallel(make_model(torch.float32), alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make, says = NEED_AN_ARGUMENT[kind]
    named = rf"step_along\[1\], {kind}, cannot be called without arguments .*{says}"
    with pytest.raises(TypeError, match=named):
        cl.Join([model], step_along=[optimizer, make(optimizer)])


def nested_joins(group: cl.Group, lengths: tuple[int, int], outer: str, inner: str) -> str:
    with another_group(group) as own:
        models = [cl.DistributedDataParallel(make_model(torch.float32), own) for _ in "oi"]
        steppers: list[Any] = []
        joinables: list[list[cl.Joinable]] = []
        for kind, model in zip((outer, inner), models, strict=True):
            if kind == "plain":
                steppers.append(torch.optim.SGD(model.parameters(), lr=0.1))
                joinables.append([model])
            else:
                optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
                steppers.append(optimizer)
                joinables.append([model, optimizer])
        with (
            pytest.raises((RuntimeError, cl.CollectiveError)) as raised,
            cl.Join(joinables[0], skew_warning=None),
            cl.Join(joinables[1], skew_warning=None),
        ):
            for batch in batches_of(own.rank, lengths[own.rank], torch.float32):
                for model, stepper in zip(models, steppers, strict=True):
                    loss_of(model, batch).backward()
                    stepper.step()
                    stepper.zero_grad()
        return str(raised.value)


@pytest.mark.parametrize("kinds", [("plain", "plain"), ("zero", "zero"), ("zero", "plain")])
@pytest.mark.parametrize("lengths", [(2, 2), (3, 1), (0, 2)])
def test_a_step_of_the_outer_of_two_joins_is_refused_by_name(
    ranks_of: Any, lengths: tuple[int, int], kinds: tuple[str, str]
) -> None:
    for told in ranks_of(2).run(nested_joins, lengths, *kinds):
        assert "that an outer Join lists takes a step inside another Join" in told
        assert "List the joinables of both in one Join" in told


def test_torchs_join_over_ours_is_told_of_ours(alone: cl.Group) -> None:
    model = cl.DistributedDataParallel(make_model(torch.float32), alone)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    for one in (model, optimizer, cl.GradScaler(optimizer)):
        with pytest.raises(TypeError, match=r"torch's Join.* write chorusline\.Join"):
            TorchJoin([one])


def test_a_join_that_is_entered_twice_says_so(alone: cl.Group) -> None:
    model = cl.DistributedDataParallel(make_model(torch.float32), alone)
    join = cl.Join([model])
    with pytest.raises(RuntimeError, match="inside another one that lists the same"), join:
        join.__enter__()


def test_one_optimizer_in_place_of_the_list_is_named_by_its_class(alone: cl.Group) -> None:
    model = cl.DistributedDataParallel(make_model(torch.float32), alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"got an SGD\."):
        cl.Join([model], step_along=optimizer)  # type: ignore[arg-type]


class Later:
    async def step(self) -> None:
        """Runs where it is awaited."""


async def later() -> None:
    """Runs where it is awaited."""


def one_by_one() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("listed", "named"),
    [
        (later, "later, is async"),
        (functools.partial(later), "partial, is async"),
        (Later(), "Later, is async"),
        (one_by_one, "one_by_one, is a generator"),
    ],
)
def test_a_function_of_which_a_call_runs_nothing_is_refused(
    alone: cl.Group, listed: Any, named: str
) -> None:
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1), alone)
    with pytest.raises(TypeError, match=rf"step_along\[0\], {named}, and a rank that has run out"):
        cl.Join([model], step_along=[listed])
