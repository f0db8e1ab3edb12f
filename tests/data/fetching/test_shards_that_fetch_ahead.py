"""`ctx.shard` with loader processes: on real ranks that die, and where a run resumes."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    get_worker_info,
)

import chorusline as cl
from chorusline.runtime.data.cursor import Cursor
from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.data.fetching.loader_settings import of_loader
from chorusline.runtime.data.fetching.on_device import ToDevice
from chorusline.runtime.data.fetching.options import FetchOptions
from chorusline.runtime.program.packing import packed_program
from tests.data.fetching.test_fetcher import Heavy, Numbers, numbers, runs
from tests.references.killed_runs import SIX_PHASES, Kind, assert_as_if_nothing_was, train

AHEAD = Kind(loading={"num_workers": 2})
PERSISTENT = Kind(loading={"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4})


@pytest.mark.promise("prefetched batches")
@pytest.mark.parametrize(
    ("kind", "phase", "victim"),
    [
        pytest.param(
            kind,
            phase,
            number % 3,
            id=f"{phase}, {name}",
            marks=[pytest.mark.slow] if number else [],
        )
        for name, kind in {"two": AHEAD, "persistent": PERSISTENT}.items()
        for number, phase in enumerate(SIX_PHASES)
        if kind is AHEAD or number == 3
    ],
)
async def test_a_death_costs_no_sample_that_was_fetched_ahead(
    session: cl.Session, tmp_path: Path, kind: Kind, phase: str, victim: int
) -> None:
    victims = {victim: (3, phase)}
    told = await session.run(train, kind=kind, folder=str(tmp_path), victims=victims)
    assert {one.world_size for one in told} == {2}
    assert_as_if_nothing_was(kind, str(tmp_path), told, victims)


class MadeBy(Dataset[Any]):
    """Sample n is n, and the process that made it."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, number: int) -> tuple[int, int, bool]:
        return number, os.getpid(), get_worker_info() is not None


def makers_by_epoch(ctx: cl.Context, **options: Any) -> list[set[int]]:
    dataset, seen = MadeBy(), []
    for epoch in ctx.epochs(2):
        batches = list(ctx.shard(dataset, 4, epoch=epoch, num_workers=2, **options))
        assert all(bool(in_worker.all()) for _, _, in_worker in batches)
        seen.append({pid for _, pids, _ in batches for pid in pids.tolist()})
    return seen


async def test_loader_processes_stay_from_epoch_to_epoch_if_asked_and_end_with_the_function(
    session: cl.Session,
) -> None:
    for is_kept in (False, True):
        by_rank = await session.run(makers_by_epoch, persistent_workers=is_kept)
        for first, second in by_rank:
            assert len(first) == len(second) == 2
            assert (first == second) == is_kept and bool(first & second) == is_kept
        pids = [pid for epochs in by_rank for pids in epochs for pid in pids]
        assert not [pid for pid in pids if runs(pid)]


def fails_inside(ctx: cl.Context) -> None:
    for _, pids, _ in ctx.shard(MadeBy(), 4, num_workers=2, shuffle=False):
        raise ValueError(f"made by {pids[0].item()}")


async def test_loader_processes_end_with_a_function_that_fails(session: cl.Session) -> None:
    with pytest.raises(ValueError, match=r"made by \d+") as raised:
        await session.run(fails_inside)
    assert not runs(int(str(raised.value).split()[-1]))


def dies_with_loaders(ctx: cl.Context, folder: str) -> list[int]:
    model = cl.DistributedDataParallel(torch.nn.Linear(2, 1))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.0, replicas=2)
    taken = []
    with cl.Join([model, optim]):
        for number, made_by, _ in ctx.shard(MadeBy(), 2, num_workers=2):
            if len(taken) == 4 and ctx.rank == 1 and ctx.world_size == 3:
                Path(folder, "pids").write_text(" ".join(map(str, set(made_by.tolist()))))
                os.kill(os.getpid(), signal.SIGKILL)
            taken += number.tolist()
            model(torch.ones(1, 2)).sum().backward()
            optim.step()
            optim.zero_grad()
    return taken


async def test_loader_processes_of_a_killed_rank_end_with_it(
    session: cl.Session, tmp_path: Path
) -> None:
    taken = await session.run(dies_with_loaders, folder=str(tmp_path))
    lost = set(range(23)) - {number for of_rank in taken for number in of_rank}
    assert len(taken) == 2 and len(lost) == 4  # Of the victim's two steps that counted.
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    give_up_at = time.monotonic() + 10
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    assert pids and not left


def dies_with_torchs_loader(ctx: cl.Context, folder: str) -> None:
    batches = iter(DataLoader(Heavy(), 1, num_workers=1, collate_fn=list))
    next(batches)
    if ctx.rank == 1 and ctx.world_size == 3:
        Path(folder, "pid").write_text(str(batches._workers[0].pid))  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.barrier()


async def test_loader_processes_of_the_functions_own_loader_end_with_a_killed_rank(
    session: cl.Session, tmp_path: Path
) -> None:
    await session.run(dies_with_torchs_loader, folder=str(tmp_path))
    pid = int((tmp_path / "pid").read_text())
    give_up_at = time.monotonic() + 20
    while runs(pid) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    assert not runs(pid)


# -- without Ray -----------------------------------------------------------------------------------


def shard_of(cursor: Cursor, rank: int = 0, world_size: int = 1, **options: Any) -> Shard:
    return Shard(
        Numbers(),
        2,
        rank=rank,
        world_size=world_size,
        epoch=3,
        cursor=cursor,
        options=FetchOptions(**options),
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_was_fetched_and_not_taken_is_given_after_a_resume(world_size: int) -> None:
    class Whole(Numbers):
        def __getitem__(self, number: int) -> torch.Tensor:
            return torch.tensor([number, os.getpid()])

    def taken_by(shard: Shard, at_most: int) -> list[int]:
        shard.dataset, taken, batches = Whole(), [], iter(shard)
        while len(taken) < at_most and (batch := next(batches, None)) is not None:
            taken += numbers(batch)
        batches.close()  # type: ignore[attr-defined]
        return taken

    former = Cursor()
    given = taken_by(shard_of(former, num_workers=2), at_most=6)
    rest = []
    for rank in range(world_size):
        later = Cursor()
        later.resume([former.state()])
        rest += taken_by(shard_of(later, rank, world_size, num_workers=1), at_most=100)
    assert len(given) == 6 and sorted([*given, *rest]) == list(range(20))


def test_a_sample_that_failed_is_asked_for_again_by_the_next_batch() -> None:
    class Flaky(Numbers):
        fails = True

        def __getitem__(self, number: int) -> torch.Tensor:
            if number == 5 and self.fails:
                raise OSError("the disk is away")
            return torch.tensor([number, os.getpid()])

    dataset = Flaky()
    shard = Shard(
        dataset,
        2,
        rank=0,
        world_size=1,
        shuffle=False,
        options=FetchOptions(num_workers=1),
    )
    taken = []
    with pytest.raises(OSError, match="the disk is away"):
        for batch in shard:
            taken += numbers(batch)
    assert taken == [0, 1, 2, 3] and shard.taken_ids == taken
    dataset.fails = False
    assert [numbers(batch) for batch in shard][2] == [4, 5]


def test_random_numbers_of_the_process_and_of_its_samples_do_not_depend_on_each_other() -> None:
    class Augmented(Numbers):
        def __getitem__(self, number: int) -> torch.Tensor:
            return torch.rand(2, dtype=torch.float64)

    def drawn(seed: int, epoch: int, rank: int = 0) -> torch.Tensor:
        torch.manual_seed(seed)
        shard = Shard(
            Augmented(),
            2,
            rank=rank,
            world_size=2,
            epoch=epoch,
            options=FetchOptions(num_workers=2),
        )
        before = torch.get_rng_state()
        batches = torch.cat(list(shard))
        assert torch.equal(before, torch.get_rng_state())
        return batches

    first = drawn(seed=1, epoch=0)
    assert torch.equal(first, drawn(seed=1, epoch=0))
    for other in (drawn(seed=2, epoch=0), drawn(seed=1, epoch=1), drawn(1, 0, rank=1)):
        assert not torch.isin(first, other).any()


def test_batches_come_on_the_device_that_was_asked_for() -> None:
    shard = Shard([{"x": torch.ones(3), "name": "a"}], 1, rank=0, world_size=1, device="meta")
    (batch,) = shard
    assert batch["x"].device.type == "meta" and batch["name"] == ["a"]


def test_a_part_of_a_batch_is_copied_by_its_own_method() -> None:
    """torch would look into both: a PackedSequence keeps its sizes on the host."""

    class Edge(NamedTuple):
        origin: torch.Tensor
        to: torch.Tensor

    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = ToDevice("meta")({"packed": packed, "edge": Edge(torch.ones(2), torch.ones(2))})
    assert batch["packed"].data.device.type == "meta"
    assert batch["packed"].batch_sizes.device.type == "cpu"
    assert [part.device.type for part in batch["edge"]] == ["meta", "meta"]


def test_a_loader_is_taken_over_as_it_is() -> None:
    loader = DataLoader(
        Numbers(),
        batch_size=3,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=True,
        worker_init_fn=print,
        collate_fn=list,
        multiprocessing_context="forkserver",
    )
    taken = of_loader(loader)
    assert (taken.batch_size, taken.shuffle, taken.drop_last) == (3, True, True)
    assert taken.options == FetchOptions(
        num_workers=2,
        prefetch_factor=4,
        collate_fn=list,
        persistent_workers=True,
        worker_init_fn=print,
        multiprocessing_context="forkserver",
    )
    assert not of_loader(DataLoader(Numbers(), 3)).shuffle


def test_a_loader_that_gives_some_samples_only_is_refused() -> None:
    class Reversed(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            return reversed(range(len(self)))

    for sampler in (SequentialSampler(range(10)), Reversed(Numbers())):
        with pytest.raises(ValueError, match="that does not give every sample exactly once"):
            of_loader(DataLoader(Numbers(), 3, sampler=sampler))


def test_a_loader_of_one_rank_is_refused_before_it_is_sent() -> None:
    sampler: Any = DistributedSampler(MadeBy(), 2, 0)  # type: ignore[arg-type]
    loader = DataLoader(MadeBy(), 4, sampler=sampler)
    with pytest.raises(ValueError, match=r"has a DistributedSampler.*Leave the sampler out"):
        packed_program(lambda ctx, loader: None, {"loader": loader})
    with pytest.raises(ValueError, match="has a DistributedSampler"):
        packed_program(lambda ctx: loader.dataset, {})


async def test_a_loader_gives_its_batches_to_all_ranks(session: cl.Session) -> None:
    def train(ctx: cl.Context) -> list[int]:
        loader = DataLoader(MadeBy(), batch_size=4, shuffle=True, num_workers=1)
        return [n for ns, _, _ in ctx.shard(loader, epoch=1) for n in ns.tolist()]

    taken = await session.run(train)
    assert sorted(itertools.chain(*taken)) == list(range(23)) != [*itertools.chain(*taken)]
