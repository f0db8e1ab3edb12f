"""Weights that a body or a step hook writes, beside what the optimizer does: with a sharded
optimizer they are on all ranks what they are in one process, over any lengths."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.combinations import combinations
from tests.harness.reused_ranks import another_group
from tests.references.training import backward_of_all, data_of, largest_difference, loss_of

DTYPE = torch.float64
Write = Callable[[torch.nn.Module], None]


def make_model() -> torch.nn.Module:
    """The last layer is frozen: what a body writes to it no optimizer steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 1, 7)),
        torch.nn.Conv2d(1, 3, (1, 3)),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(15, 5),
        torch.nn.Linear(5, 5),
    ).to(DTYPE)
    model[-1].requires_grad_(False)
    return model.to(memory_format=torch.channels_last)


def clamp(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.15, 0.15)


@torch.no_grad()
def shrink(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(0.9)


def prune(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        mask = torch.arange(parameter.numel()).view(parameter.shape) % 3 > 0
        parameter.data *= mask


def rebind(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.9


def put_vector(module: torch.nn.Module) -> None:
    vector = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector * 0.9, module.parameters())


def load(module: torch.nn.Module) -> None:
    module.load_state_dict({k: v * 0.9 for k, v in module.state_dict().items()})


def turn(module: torch.nn.Module) -> None:
    """The same values in another order."""
    for parameter in module.parameters():
        parameter.data = parameter.data.flip(0)


def follow_teacher(module: torch.nn.Module) -> None:
    """As momentum encoders do: a frozen part follows a trained one."""
    with torch.no_grad():
        module[-1].bias.lerp_(module[-2].bias, 0.5)


WRITES: list[Write] = [clamp, shrink, prune, rebind, put_vector, load, turn, follow_teacher]
PLACES = ("before the pass", "before the step", "after the step")


def train(
    group: cl.Group | None,
    write: Write,
    place: str,
    every: int,
    lengths: Sequence[int],
    options: dict[str, Any],
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9},  # noqa: B006
) -> list[torch.Tensor]:
    """Two epochs. every: of so many batches, the write is done in one. group: None: in one process,
    over the batches of all ranks."""
    module = make_model()
    model: Any = module
    if group is None:
        optim = optimizer([p for p in module.parameters() if p.requires_grad], **sgd)
    else:
        model = cl.DistributedDataParallel(module, group, bucket_cap_mb=1e-4)
        optim = cl.ZeroRedundancyOptimizer(model, optimizer, **sgd, **options)
    data = data_of(group, lengths, DTYPE)
    for _ in range(2):
        join = cl.Join([model, optim], skew_warning=None) if group else contextlib.nullcontext()
        with join:
            for number in range(max(map(len, data))):
                writes = place if number % every == every - 1 else ""
                if writes == "before the pass":
                    write(module)
                backward_of_all(model, data, number)
                if writes == "before the step":
                    write(module)
                optim.step()
                if writes == "after the step":
                    write(module)
                optim.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


def train_all(group: cl.Group, write: Write, *args: Any) -> Any:
    """By place and number: the parameters, or the error or warning."""
    found: dict[tuple[str, int], Any] = {}
    for case in itertools.product(PLACES, (1, 2)):
        with another_group(group) as own, warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                found[case] = train(own, write, *case, *args)
            except Exception as error:
                found[case] = f"{type(error).__name__}: {error}"
    return found


def check(ranks_of: Any, write: Write, lengths: Sequence[int], *args: Any) -> None:
    by_rank = ranks_of(len(lengths)).run(train_all, write, lengths, *args)
    for case in by_rank[0]:
        expected = train(None, write, *case, lengths, {}, *args[1:])
        for parameters in (found[case] for found in by_rank):
            assert not isinstance(parameters, str), (case, parameters)
            assert largest_difference(parameters, expected) < 1e-12, case


@combinations(4, write=WRITES, lengths=[(5, 3), (1, 4), (0, 3), (3, 3)])
def test_what_the_body_writes_is_that_of_one_process(ranks_of, write, lengths):
    check(ranks_of, write, lengths, {})


@combinations(
    3,
    write=[clamp, rebind, follow_teacher],
    options=[{"replicas": 2}, {"check_every": 1}, {"replicas": 2, "check_every": 2}],
)
def test_it_is_with_replicas_and_no_corruption_where_digests_are_compared(ranks_of, write, options):
    check(ranks_of, write, (5, 3), options)
    check(ranks_of, write, (1, 4, 2), options)


@pytest.mark.parametrize("write", [clamp, rebind, turn])
def test_it_is_where_whole_parameters_are_stepped(ranks_of, write):
    check(ranks_of, write, (5, 3), {}, torch.optim.Adafactor, {"lr": 0.1})


def write_alone(
    group: cl.Group, lengths: Sequence[int], way: str, write: Write, num_steps: int, deals: bool
) -> Any:
    """After so many steps the body only writes. deals: the batches are numbers of a Shard, so that
    each rank knows how many the others have."""
    with another_group(group) as own:
        module = make_model()
        model: Any = cl.DistributedDataParallel(module, own)
        trained = [p for p in module.parameters() if p.requires_grad]
        optim: Any = torch.optim.SGD(trained, lr=0.1)
        if way == "zero":
            optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        (batches,) = data_of(own, lengths, DTYPE)
        dealt = cl.Shard(range(sum(lengths)), 1, rank=own.rank, world_size=own.size)
        try:
            with cl.Join([model, optim] if way == "zero" else [model], skew_warning=None):
                for number, _ in enumerate(dealt if deals else batches):
                    if number < num_steps:
                        loss_of(model, batches[number]).backward()
                        optim.step()
                        optim.zero_grad()
                    write(module)
        except cl.CollectiveMismatch as error:
            return str(error)
        return [p.detach().clone() for p in module.parameters()]


@combinations(
    3,
    write=[shrink, rebind, load, follow_teacher, turn],
    loop=[
        *itertools.product(["zero", "plain"], [0, 2], [True]),
        # A plain optimizer in a loop over a list, after steps: not compared.
        ("zero", 2, False),
        ("plain", 0, False),
    ],
)
def test_what_a_rank_with_more_data_writes_and_no_step_brings_to_the_others_is_told(
    ranks_of, loop, write
):
    way, num_steps, deals = loop
    told = ranks_of(2).run(write_alone, (4, 3), way, write, num_steps, deals)
    assert told[0] == told[1]
    assert "rank 0 and rank 1 at the end, and the ranks have agreed on no step" in told[0]
    first, second = ranks_of(2).run(write_alone, (3, 3), way, write, num_steps, deals)
    assert largest_difference(first, second) == 0
