"""Training on a stand-in GPU equals one process, over seeds of jitter; and nothing in a step waits
on the host for a stream that another rank could hold up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.collectives.objects.blocking import (
    all_gather_object,
    all_gather_row,
    broadcast_object,
)
from tests.harness.stand_in_gpu import nccl, streams
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in, seeds

pytestmark = needs_stand_in

STEPS = 3
KINDS = ("ddp", "zero, clipped", "zero, with replicas", "norm", "scaled")
MORE_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in seeds(11)[1:]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, StandInRanks]]:
    """By seed; processes that stay."""
    started: dict[int, StandInRanks] = {}
    yield started
    for some in started.values():
        some.stop()


def of_seed(ranks: dict[int, StandInRanks], seed: int) -> StandInRanks:
    return ranks.setdefault(seed, StandInRanks(2, seed=seed, jitter_s=0.002))


def net(kind: str, *, alone: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d if alone else cl.SyncBatchNorm
    middle = norm(33) if kind == "norm" else torch.nn.Tanh()
    first = torch.nn.Linear(7, 33, bias=kind != "norm")  # A bias before a norm has no gradient.
    return torch.nn.Sequential(first, middle, torch.nn.Linear(33, 5))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def optimizer_of(kind: str, model: Any) -> Any:
    if not kind.startswith(("zero", "scaled")):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    more: dict[str, Any] = {
        "zero, clipped": {"max_norm": 0.5},
        "zero, with replicas": {"replicas": 2},
        "scaled": {},
    }[kind]
    return cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2, **more)


def be_strict() -> None:
    streams.machine().strict = True
    nccl.settings.kernel_s = 0.003


def train(group: cl.Group, kind: str) -> list[torch.Tensor]:
    be_strict()
    model = cl.DistributedDataParallel(net(kind).to(group.device), group, bucket_cap_mb=0.0005)
    optimizer = optimizer_of(kind, model)
    scaler = cl.GradScaler(optimizer, init_scale=4.0) if kind == "scaled" else None
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(group.rank, step).to(group.device)).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def train_alone(kind: str, size: int) -> list[torch.Tensor]:
    model = net(kind, alone=True).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        data = torch.cat([batch(rank, step) for rank in range(size)])
        model(data.double()).square().mean().backward()
        if kind == "zero, clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("seed", [0, *MORE_SEEDS])
@pytest.mark.parametrize("kind", KINDS)
def test_training_on_a_stand_in_equals_one_process(
    kind: str, seed: int, ranks: dict[int, StandInRanks]
) -> None:
    found = of_seed(ranks, seed).check(train, kind)
    for mine in found:
        for parameter, expected in zip(mine, train_alone(kind, 2), strict=True):
            torch.testing.assert_close(parameter.double(), expected, atol=2e-5, rtol=2e-4)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def mean_of(group: cl.Group, bucket: Any) -> Any:
    return group.all_reduce(bucket.buffer(), cl.ReduceOp.AVG).get_future()


def mean_in_callback(group: cl.Group, bucket: Any) -> Any:
    """With kernels of its own, in the thread and on the stream that a callback gets."""
    future = group.all_reduce(bucket.buffer()).get_future()
    return future.then(lambda reduced: reduced.value()[0] / group.size)


def train_hooked(group: cl.Group, hook: str) -> list[torch.Tensor]:
    be_strict()
    model = cl.DistributedDataParallel(net("ddp").to(group.device), group, bucket_cap_mb=0.0005)
    model.register_comm_hook(group, {"mean": mean_of, "in a callback": mean_in_callback}[hook])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(group.rank, step).to(group.device)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("seed", [0, *MORE_SEEDS])
@pytest.mark.parametrize("hook", ["mean", "in a callback"])
def test_hooks_on_a_stand_in_give_what_one_process_gives(
    hook: str, seed: int, ranks: dict[int, StandInRanks]
) -> None:
    found = of_seed(ranks, seed).check(train_hooked, hook)
    for parameter, expected in zip(found[0], train_alone("ddp", 2), strict=True):
        torch.testing.assert_close(parameter.double(), expected, atol=2e-5, rtol=2e-4)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def train_in_halves(group: cl.Group) -> list[torch.Tensor]:
    """The vote cannot ride behind gradients that do not count, and has a sum of its own."""
    be_strict()
    module = net("ddp").to(group.device).to(torch.bfloat16)
    model = cl.DistributedDataParallel(module, group, bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(group.rank, step).bfloat16().to(group.device)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def train_in_halves_alone(size: int) -> list[torch.Tensor]:
    model = net("ddp").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        data = torch.cat([batch(rank, step) for rank in range(size)])
        model(data.double()).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("seed", [0, *MORE_SEEDS])
def test_bfloat16_on_a_stand_in_is_close_to_one_process(
    seed: int, ranks: dict[int, StandInRanks]
) -> None:
    found = of_seed(ranks, seed).check(train_in_halves)
    for parameter, expected in zip(found[0], train_in_halves_alone(2), strict=True):
        torch.testing.assert_close(parameter.double(), expected, atol=2e-2, rtol=2e-2)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def speak(group: cl.Group) -> list[Any]:
    be_strict()
    return [
        all_gather_row(group, [group.rank, 7]),
        broadcast_object(group, {"from": group.rank}),
        all_gather_object(group, "x" * group.rank),
    ]


def test_what_ranks_tell_each_other_on_a_stand_in_is_read_when_it_is_there(
    ranks: dict[int, StandInRanks],
) -> None:
    for told in of_seed(ranks, 0).check(speak):
        assert told == [[[0, 7], [1, 7]], {"from": 0}, ["", "x"]]


def train_unevenly(group: cl.Group, kind: str) -> list[torch.Tensor]:
    be_strict()
    model = cl.DistributedDataParallel(net(kind).to(group.device), group, bucket_cap_mb=0.0005)
    optimizer = optimizer_of(kind, model)
    joinables = [model, optimizer] if kind == "zero, clipped" else [model]
    with cl.Join(joinables, divide_by_initial_world_size=False):
        for step in range(2 + group.rank):
            optimizer.zero_grad()
            model(batch(group.rank, step).to(group.device)).square().mean().backward()
            optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def train_unevenly_alone(size: int, kind: str) -> list[torch.Tensor]:
    model = net(kind, alone=True).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(size + 1):
        live = [rank for rank in range(size) if step < 2 + rank]
        optimizer.zero_grad()
        data = torch.cat([batch(rank, step) for rank in live])
        model(data.double()).square().mean().backward()
        if kind == "zero, clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("seed", [0, *MORE_SEEDS])
@pytest.mark.parametrize("kind", ["ddp", "zero, clipped", "norm"])
def test_uneven_ranks_on_a_stand_in_equal_one_process(
    kind: str, seed: int, ranks: dict[int, StandInRanks]
) -> None:
    for mine in of_seed(ranks, seed).check(train_unevenly, kind):
        for parameter, expected in zip(mine, train_unevenly_alone(2, kind), strict=True):
            torch.testing.assert_close(parameter.double(), expected, atol=2e-5, rtol=2e-4)


class PartlyOnTheCpu(torch.nn.Module):
    """A trainable layer on the GPU, and behind it what stays on the CPU: a frozen layer and a
    buffer, or another trainable layer."""

    def __init__(self, seed: int, device: str, *, is_frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(7, 33).to(device)
        self.last = torch.nn.Linear(33, 5).requires_grad_(not is_frozen)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.last(torch.tanh(self.first(x)).cpu())


def train_partly(device: str, group: cl.Group | None, ranks: range) -> list[Any]:
    net = PartlyOnTheCpu(group.rank if group else 0, device, is_frozen=True)
    model = cl.DistributedDataParallel(net, group) if group else net
    optim = torch.optim.SGD(net.first.parameters(), lr=0.1)
    for step in range(STEPS):
        optim.zero_grad()
        for rank in ranks:
            (model(batch(rank, step).to(device)).square().mean() / len(ranks)).backward()
        optim.step()
    return [tensor.detach().cpu() for tensor in (*net.parameters(), net.seen)]


def train_partly_on_the_cpu(group: cl.Group) -> tuple[str, list[Any]]:
    with pytest.raises(ValueError) as told:
        cl.DistributedDataParallel(PartlyOnTheCpu(0, "cuda:0", is_frozen=False), group)
    return str(told.value), train_partly("cuda:0", group, range(group.rank, group.rank + 1))


def test_what_is_not_trained_may_be_on_another_device_and_what_is_trained_may_not(
    ranks: dict[int, StandInRanks],
) -> None:
    *expected, _ = train_partly("cpu", None, range(2))
    for refusal, (*trained, seen) in of_seed(ranks, 0).check(train_partly_on_the_cpu):
        assert refusal == (
            "parameters are on several devices: first.weight on cuda:0, last.weight on cpu. A rank "
            "owns one device; move the module with .to('cuda:0') (in a session: ctx.device)"
        )
        for ours, theirs in zip(trained, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert seen.tolist() == [6 * STEPS] * 3
