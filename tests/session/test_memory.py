"""What functions and arguments cost in the memory of the workers."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import ray
import torch

import chorusline as cl
from chorusline.actors.parcels.pickling import packed, pickled
from chorusline.collectives.objects.payloads import loads, pickled as pickled_for_ranks
from tests.harness.forked_workers import STARTED_BY_RAY

MB = 2**20


@pytest.fixture(scope="module")
async def session(cluster: None) -> AsyncIterator[cl.Session]:
    # What a fork shares with others is its own once they have ended.
    async with cl.Session(2, timeout_s=30, env_vars=STARTED_BY_RAY) as session:
        await session.run(lambda ctx: None)
        yield session


def private_mb(ctx: cl.Context | None = None) -> float:
    """Memory that this process shares with no other, as the kernel counts it."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the kernel does not say it")


def small_samples(num: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
    """Samples that are views of two tensors, and the bytes of those."""
    inputs, labels = torch.randn(num, 64), torch.randn(num, 1)
    return list(zip(inputs, labels, strict=True)), 4 * (inputs.numel() + labels.numel())


@pytest.mark.parametrize("way", ["to workers", "from workers", "between ranks"])
def test_samples_that_are_views_are_sent_with_one_storage(way: str) -> None:
    samples, nbytes = small_samples(500)
    if way == "to workers":
        parcel = packed(samples)
        sent, back = parcel.nbytes, parcel.opened()
    elif way == "from workers":
        payload = pickled(samples)
        sent, back = len(payload), loads(payload)
    else:
        payload = pickled_for_ranks(samples)
        sent, back = len(payload), loads(payload)
    assert sent < 2 * nbytes
    assert all(
        torch.equal(one, other)
        for mine, theirs in zip(samples, back, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    )
    assert len({inputs.untyped_storage().data_ptr() for inputs, _ in back}) == 1


def loaded(value: torch.Tensor) -> torch.Tensor:
    """As `torch.load` gives it, with its empty dictionary of hooks."""
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    back: torch.Tensor = torch.load(content)
    return back


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.empty(0, 3),
        torch.ones(1, dtype=torch.float8_e4m3fn),
        loaded(torch.ones(3, dtype=torch.float8_e4m3fn)),
        loaded(torch.ones(3, dtype=torch.int16).view(torch.uint16)),
        loaded(torch.ones(3)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.float8_e5m2), requires_grad=False),
        torch.eye(3).to_sparse(),
        torch.ones(300_000),
        torch.ones(300_000).numpy(),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)}",
)
def test_every_kind_of_tensor_arrives_as_it_was(value: Any) -> None:
    for back in (packed(value).opened(), loads(pickled(value)), loads(pickled_for_ranks(value))):
        assert type(back) is type(value)
        assert back.dtype == value.dtype
        if isinstance(value, torch.Tensor):
            assert (back.requires_grad, back.is_conj()) == (value.requires_grad, value.is_conj())
            if value.layout is torch.strided:
                assert back.stride() == value.stride()
            sent, back = (each.detach().to_dense().to(torch.complex64) for each in (value, back))
            assert torch.equal(back, sent)
        else:
            assert (back == value).all()


async def test_a_large_argument_costs_a_worker_nothing_while_it_only_reads(
    session: cl.Session, tmp_path: Path
) -> None:
    def read(ctx: cl.Context, data: Any) -> tuple[float, float]:
        return float(data.sum()), private_mb()

    mapped = numpy.memmap(tmp_path / "data", numpy.float32, "w+", shape=(40 * MB // 4,))
    mapped[:] = 1
    before = await session.run(private_mb)
    for data in (torch.ones(40 * MB // 4), numpy.ones(40 * MB // 4, numpy.float32), mapped):
        for total, during in await session.run(read, data=data):
            assert total == 40 * MB // 4
            assert during < min(before) + 12
    assert max(await session.run(private_mb)) < min(before) + 12


async def test_a_rank_writes_to_its_own_copy_of_an_argument(session: cl.Session) -> None:
    def write(ctx: cl.Context, tensor: torch.Tensor, array: Any) -> tuple[float, float]:
        ctx.barrier()
        for each in (tensor, array):
            each[:1000] += ctx.rank + 1
        ctx.barrier()
        return float(tensor.sum()), float(array.sum())

    tensor, array = torch.zeros(MB), numpy.zeros(MB, numpy.float32)
    for _ in range(2):
        results = await session.run(write, tensor=tensor, array=array)
        assert results == [(1000.0, 1000.0), (2000.0, 2000.0)]
    assert not tensor.any()
    assert not array.any()


async def test_an_array_that_is_read_only_stays_so(session: cl.Session) -> None:
    def write(ctx: cl.Context, array: Any) -> None:
        array[0] = 1

    array = numpy.zeros(MB)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        await session.run(write, array=array)


async def test_what_an_argument_becomes_after_the_call_does_not_count(session: cl.Session) -> None:
    data = torch.ones(MB)
    running = asyncio.create_task(session.run(lambda ctx, data: float(data.sum()), data=data))
    await asyncio.sleep(0)
    data.zero_()
    assert await running == [float(MB)] * 2


async def test_what_a_run_keeps_of_an_argument_stays_whole(session: cl.Session) -> None:
    def keep(ctx: cl.Context, data: torch.Tensor) -> None:
        ctx.keep("data", lambda: data)

    def look(ctx: cl.Context) -> tuple[float, float]:
        kept = ctx.keep("data", lambda: torch.zeros(0))
        return float(kept.min()), float(kept.max())

    await session.run(keep, data=torch.full((MB,), 7.0))
    for filler in range(3):  # The object store would use the memory anew.
        await session.run(lambda ctx, data: None, data=torch.full((MB,), float(filler)))
        ray.put(numpy.full(MB, float(filler)))
    assert await session.run(look) == [(7.0, 7.0)] * 2
    await session.run(lambda ctx: ctx.forget("data"))


async def test_the_objects_of_a_run_that_may_lose_workers_are_gone_in_the_next_run(
    cluster: None,
) -> None:
    def train(ctx: cl.Context) -> None:
        model = cl.DistributedDataParallel(torch.nn.Linear(77, 1))
        optim = cl.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        model(torch.ones(1, 77)).sum().backward()
        optim.step()

    def left(ctx: cl.Context) -> int:
        gc.collect()
        return sum(isinstance(one, torch.nn.Linear) for one in gc.get_objects())

    async with cl.Session(2, timeout_s=30, max_failures=1) as session:
        await session.run(train)
        assert await session.run(left) == [0, 0]


async def test_heavy_data_is_told_once_with_its_name(
    session: cl.Session, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = torch.zeros(110 * 10**6, dtype=torch.uint8)

    def train(ctx: cl.Context) -> int:
        return len(dataset)

    with caplog.at_level(logging.WARNING, "chorusline"):
        for _ in range(2):
            assert await session.run(train) == [110 * 10**6] * 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert "the variable dataset (110 MB)" in told
    assert "ctx.keep" in told


@pytest.mark.slow
async def test_fifty_runs_over_small_samples_leave_the_workers_as_large_as_they_were(
    session: cl.Session,
) -> None:
    samples, _ = small_samples(5_000)

    def train(ctx: cl.Context) -> float:
        model = cl.DistributedDataParallel(torch.nn.Linear(64, 1))
        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        with cl.Join([model]):
            for inputs, labels in ctx.shard(samples, batch_size=512, epoch=0):
                (model(inputs) - labels).square().mean().backward()
                optim.step()
                optim.zero_grad()
        return private_mb()

    first = await session.run(train)
    grown = [await session.run(train) for _ in range(50)]
    for rank in range(2):
        assert max(run[rank] for run in grown) < first[rank] + 50
