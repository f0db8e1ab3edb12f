"""A Stream of a DataLoader: rows of an IterableDataset that loader processes make."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

import chorusline as cl
from chorusline.runtime.data import streaming
from chorusline.runtime.data.fetching.loader_rows import LoaderRows
from chorusline.runtime.data.steps.step_rows import MicroBatch, StreamRows
from tests.data.fetching.test_fetcher import Numbers
from tests.references.killed_runs import (
    NUM_SAMPLES,
    Kind,
    Samples,
    assert_as_if_nothing_was,
    train,
)


class Parts(IterableDataset[Any]):
    """Rows 0 to 29, of which each loader process gives every n-th."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.tensor([number, os.getpid()]) for number in range(first, 30, step))


class Everything(IterableDataset[Any]):
    """Rows 0 to 29, in each loader process."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(30))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_rows_come_once_and_in_the_same_order_each_time(
    num_workers: int, batch_size: int | None
) -> None:
    rows = LoaderRows(DataLoader(Parts(), batch_size, num_workers=num_workers))
    first, again = ([row.tolist() for row in rows] for _ in range(2))
    assert [number for number, _ in first] == [number for number, _ in again]
    assert sorted(number for number, _ in first) == list(range(30))
    makers = {pid for _, pid in first}
    assert len(makers) == max(num_workers, 1) and (os.getpid() in makers) == (num_workers == 0)


def test_rows_that_would_come_twice_are_refused_with_the_mend() -> None:
    before = set(multiprocessing.active_children())  # Of other tests.
    twice = r"every row would come 2 times.*get_worker_info"
    with pytest.raises(ValueError, match=twice) as caught:
        list(LoaderRows(DataLoader(Everything(), 4, num_workers=2)))
    assert caught.tb is not None  # It refers to torch's iterator,
    assert (
        set(multiprocessing.active_children()) <= before
    )  # whose processes have ended all the same.
    assert list(LoaderRows(DataLoader(Everything(), 4, num_workers=1))) == list(range(30))


def split_by_init(number: int) -> None:
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Range)
    info.dataset.numbers = info.dataset.numbers[info.id :: info.num_workers]


class Range(IterableDataset[int]):
    def __init__(self) -> None:
        self.numbers = range(11)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


def test_a_worker_init_fn_may_split_the_dataset_as_torch_documents() -> None:
    loader = DataLoader(Range(), 2, num_workers=2, worker_init_fn=split_by_init)
    assert sorted(LoaderRows(loader)) == list(range(11))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_rows_are_the_same_when_they_are_read_again_and_others_in_another_epoch(
    num_workers: int,
) -> None:
    class Drawn(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is None if num_workers == 0 else info.id >= 0  # type: ignore[union-attr]
            return (torch.rand(()) for _ in range(4))

    rows = LoaderRows(DataLoader(Drawn(), 2, num_workers=num_workers))
    drawn = []
    for epoch in (0, 0, 1):
        rows.set_epoch(epoch)
        drawn.append([row.item() for row in rows])
    assert drawn[0] == drawn[1] and not set(drawn[0]) & set(drawn[2])


def test_loaders_that_need_no_stream_or_are_sharded_are_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match=r"numbered samples.*ctx.shard\(loader, epoch=epoch\)"):
        cl.Stream(DataLoader(Numbers(), 4))
    sampler: Any = DistributedSampler(Numbers(), 2, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has a DistributedSampler"):
        cl.Stream(DataLoader(Numbers(), 4, sampler=sampler))


def test_the_rows_of_one_rank_are_refused_with_and_without_a_loader() -> None:
    class Split(Everything):
        _distributed = "as split_dataset_by_node leaves it"

    for source in (Split(), DataLoader(Split(), 2)):
        with pytest.raises(ValueError, match="split_dataset_by_node has left this dataset"):
            cl.Stream(source)


def sent(stream: cl.Stream) -> cl.Stream:
    """As a rank has it."""
    stream._reader, stream._is_sent = SimpleNamespace(window=None), True
    return pickle.loads(pickle.dumps(stream))  # type: ignore[no-any-return]


def test_steps_make_batches_of_the_rows_as_the_loader_of_the_stream_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(streaming, "pin_memory", lambda batch: ("pinned", batch))
    plain = sent(cl.Stream(DataLoader(Everything(), 2, collate_fn=tuple)))
    pinned = sent(cl.Stream(DataLoader(Everything(), 2, collate_fn=tuple, pin_memory=True)))
    for stream, pins, made in (
        (plain, False, (1, 2)),
        (plain, True, ("pinned", (1, 2))),
        (pinned, False, ("pinned", (1, 2))),
    ):
        rows = StreamRows(stream, epoch=0, pin_memory=pins)
        rows._ask = lambda method, *place: [1, 2]  # type: ignore[method-assign]
        assert rows.batch(MicroBatch(0, 2, 0), ()) == made


class SampleRows(IterableDataset[Any]):
    """The samples of a run whose ranks are killed, in parts."""

    def __iter__(self) -> Iterator[Any]:
        info, samples = get_worker_info(), Samples()
        assert info is not None
        return (samples[number] for number in range(info.id, NUM_SAMPLES, info.num_workers))


@pytest.mark.parametrize(
    "victims", [pytest.param({}, marks=pytest.mark.slow), {1: (3, "before it votes (3)")}]
)
async def test_rows_of_loader_processes_are_used_once_whoever_is_killed(
    session: cl.Session, tmp_path: Path, victims: dict[int, Any]
) -> None:
    # One row at a time: the rows of two processes alternate, so a row's number is its sample's.
    with cl.Stream(DataLoader(SampleRows(), None, num_workers=2)) as stream:
        told = await session.run(
            train, kind=Kind(), folder=str(tmp_path), victims=victims, stream=stream
        )
    assert_as_if_nothing_was(Kind(), str(tmp_path), told, victims)


@pytest.mark.parametrize("drop_last", [False, True])
async def test_the_options_of_batches_are_those_of_the_loader(
    session: cl.Session, drop_last: bool
) -> None:
    def read(ctx: cl.Context, stream: cl.Stream) -> list[list[int]]:
        return list(ctx.shard(stream))

    loader = DataLoader(
        Range(), 3, drop_last=drop_last, collate_fn=lambda rows: [10 * row for row in rows]
    )
    with cl.Stream(loader) as stream:
        by_rank = await session.run(read, stream=stream)
    batches = [*itertools.chain(*by_rank)]
    assert sorted(itertools.chain(*batches)) == [10 * n for n in range(9 if drop_last else 11)]
    assert sorted(map(len, batches)) == ([3, 3, 3] if drop_last else [2, 3, 3, 3])
