"""Datasets and loaders of other libraries, by the libraries themselves, beside one process."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import chorusline as cl
from chorusline.runtime.data.dataset_batches import Shard, check_dataset
from chorusline.runtime.data.fetching.fetcher import Fetcher
from chorusline.runtime.data.fetching.loader_rows import LoaderRows
from chorusline.runtime.data.fetching.loader_settings import of_loader
from chorusline.runtime.data.fetching.options import FetchOptions
from chorusline.runtime.process.torch_loaders import end_loaders_with_this_process
from tests.data.fetching.test_fetcher import (
    Heavy,
    Numbers,
    check_loader_processes_end_with,
    numbers,
)
from tests.data.fetching.test_loader_rows import Parts
from tests.references.killed_runs import NUM_SAMPLES, Kind, assert_as_if_nothing_was, train

AHEAD = Kind(loading={"num_workers": 1})


def numbers_of_columns(rows: list[dict[str, Any]]) -> Any:
    return torch.tensor([int(row["number"]) for row in rows]), None, None


async def check_used_once(
    session: cl.Session, folder: Path, victims: dict[int, Any], rows: Any, collate: Any
) -> None:
    told = await session.run(
        train,
        kind=AHEAD,
        folder=str(folder),
        victims=victims,
        stream=rows,
        collate=collate,
    )
    assert_as_if_nothing_was(AHEAD, str(folder), told, victims)


@pytest.mark.slow
@pytest.mark.parametrize("victims", [{}, {1: (3, "before it votes (3)")}], ids=["whole", "killed"])
async def test_a_hugging_face_dataset_is_used_once_and_exactly(
    session: cl.Session, tmp_path: Path, victims: dict[int, Any]
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = datasets.Dataset.from_dict({"number": list(range(NUM_SAMPLES))})
    await check_used_once(session, tmp_path, victims, rows, numbers_of_columns)


@pytest.mark.slow
async def test_an_iterable_hugging_face_dataset_is_read_by_loader_processes(
    session: cl.Session, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    table = datasets.Dataset.from_dict({"number": list(range(NUM_SAMPLES))})
    rows = table.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=5)
    with cl.Stream(DataLoader(rows, batch_size=3, num_workers=2)) as stream:
        assert stream.has_epochs
        told = await session.run(
            train,
            kind=Kind(),
            folder=str(tmp_path),
            victims={},
            stream=stream,
            collate=numbers_of_columns,
        )
    assert_as_if_nothing_was(Kind(), str(tmp_path), told, {})


@pytest.mark.slow
def test_a_hugging_face_dataset_of_one_rank_is_refused() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"number": [1, 2, 3]}).to_iterable_dataset()
    mine = split_dataset_by_node(rows, rank=0, world_size=2)
    with pytest.raises(ValueError, match="split_dataset_by_node has left this dataset"):
        cl.Stream(DataLoader(mine, 2))


@pytest.mark.slow
def test_a_stateful_loader_is_taken_over_or_makes_the_rows_of_a_stream() -> None:
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )
    loader = stateful.StatefulDataLoader(Numbers(), 3, shuffle=True, num_workers=1)
    taken = of_loader(loader)
    assert (taken.batch_size, taken.shuffle, taken.options.num_workers) == (3, True, 1)
    shard = Shard(taken.dataset, 3, rank=0, world_size=1, options=taken.options)
    with pytest.raises(LookupError, match="sample 13"):
        list(shard)
    rows = LoaderRows(stateful.StatefulDataLoader(Parts(), 4, num_workers=2))
    assert sorted(row[0].item() for row in rows) == list(range(30))


def hold_batches_of_a_stateful_loader() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    end_loaders_with_this_process()
    batches: Any = iter(StatefulDataLoader(Heavy(), 1, num_workers=2, collate_fn=list))
    next(batches)
    print(*[worker.pid for worker in batches._workers], flush=True)
    threading.Event().wait()


def test_processes_of_a_stateful_loader_end_with_a_rank_that_is_killed() -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    check_loader_processes_end_with(hold_batches_of_a_stateful_loader)


def test_a_torchdata_that_does_not_fit_this_torch_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchdata"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torchdata.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    end_loaders_with_this_process()


def tens_of_numbers(rows: list[int]) -> Any:
    return torch.tensor(rows) // 10, None, None


@pytest.mark.slow
@pytest.mark.parametrize("victims", [{}, {1: (3, "before it votes (3)")}], ids=["whole", "killed"])
async def test_a_grain_dataset_is_used_once_and_exactly(
    session: cl.Session, tmp_path: Path, victims: dict[int, Any]
) -> None:
    grain = pytest.importorskip("grain", reason="grain is not installed")
    rows = grain.MapDataset.source(range(NUM_SAMPLES)).map(lambda row: 10 * row)
    await check_used_once(session, tmp_path, victims, rows, tens_of_numbers)


def test_what_has_no_end_and_samples_that_are_none_are_refused_as_of_grain() -> None:
    grain = pytest.importorskip("grain", reason="grain is not installed")
    rows = grain.MapDataset.source(range(7)).map(lambda row: row * row)
    squares = [Shard(rows, 2, rank=rank, world_size=2) for rank in range(2)]
    taken = [number for shard in squares for batch in shard for number in batch.tolist()]
    assert sorted(taken) == [row * row for row in range(7)]
    with pytest.raises(ValueError, match=r"has no end, .*leave repeat\(\) out, and write"):
        check_dataset(rows.repeat(), "shard")
    with pytest.raises(TypeError, match=r"[12] of them are None: filter the source of the dataset"):
        list(Shard(rows.filter(lambda row: row % 2 == 0), 3, rank=0, world_size=1))


def goes_on_with_its_loader(ctx: cl.Context, stops_at: int | None) -> list[int]:
    """A loader of this rank alone, whose place is in the checkpoints."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    model = cl.DistributedDataParallel(torch.nn.Linear(2, 1))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    ctx.register("model", model)
    ctx.register("optim", optim)
    mine = list(range(ctx.rank, 24, ctx.world_size))
    loader: Any = StatefulDataLoader(mine, batch_size=2, num_workers=1)  # type: ignore[arg-type]
    ctx.register("loader", loader, per_rank=True)
    seen: list[int] = []
    with cl.Join([model, optim]):
        for batch in loader:
            seen += batch.tolist()
            model(torch.ones(1, 2)).sum().backward()
            optim.step()
            optim.zero_grad()
            if ctx.step == stops_at:
                ctx.save().wait()
                return seen
    return seen


@pytest.mark.slow
async def test_a_stateful_loader_of_a_rank_goes_on_where_the_checkpoint_was(
    cluster: None, tmp_path: Path
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    checkpoint = cl.CheckpointConfig(storage_path=str(tmp_path))
    few = {"CPU": 0.1}
    async with cl.Session(2, resources_per_worker=few, checkpoint=checkpoint) as session:
        before = await session.run(goes_on_with_its_loader, stops_at=2)
        after = await session.run(goes_on_with_its_loader, stops_at=None)
    for rank in range(2):
        assert len(before[rank]) == 4
        assert before[rank] + after[rank] == list(range(rank, 24, 2))


class Mapped(Dataset[Any]):
    """Rows of a file that is mapped, or of a tensor."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> float:
        return float(self.rows[number].sum())


def private_mib(pid: int) -> float:
    """Memory that this process has for itself: what it has written to."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024


@pytest.mark.parametrize("kind", ["tensor", "mapped file"])
def test_loader_processes_read_large_data_and_have_no_copy_of_it(kind: str, tmp_path: Path) -> None:
    rows: Any = torch.ones(60_000, 250)  # 60 MB
    if kind == "mapped file":
        numpy.save(tmp_path / "rows.npy", rows.numpy())
        os.sync()  # Until its pages are written, each process counts them as its own.
        rows = numpy.load(tmp_path / "rows.npy", mmap_mode="r")
    fetcher = Fetcher(Mapped(rows), FetchOptions(num_workers=2, collate_fn=sum))
    try:
        lists = [list(range(start, start + 6000)) for start in range(0, 60_000, 6000)]
        assert list(fetcher.fetch(lists)) == [6000 * 250] * 10
        loader: Any = fetcher._loader
        private = [private_mib(process.pid) for process in loader._iterator._workers]
    finally:
        fetcher.close()
    assert max(private) < 40, private


def test_the_rows_of_all_ranks_cover_a_mapped_file(tmp_path: Path) -> None:
    numpy.save(tmp_path / "rows.npy", numpy.arange(46, dtype=numpy.int64).reshape(23, 2))
    rows = numpy.load(tmp_path / "rows.npy", mmap_mode="r")
    options = FetchOptions(num_workers=1)
    shards = [Shard(rows, 4, rank=rank, world_size=3, options=options) for rank in range(3)]
    batches = itertools.chain(*shards)
    assert sorted(n for batch in batches for n in numbers(batch)) == list(range(0, 46, 2))
