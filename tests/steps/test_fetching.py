"""Batches of `ctx.steps` are a function of the micro-batch, whoever makes them, and when."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy
import pytest
import torch

import chorusline as cl
from benchmarks.proofs.invariance_training import digest
from chorusline.runtime.data.dealer import Dealer
from chorusline.runtime.data.fetching.options import FetchOptions
from chorusline.runtime.data.steps.step_rows import DatasetRows, MicroBatch
from chorusline.runtime.data.steps.steps import Steps


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are augmented by all three generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, number: int) -> torch.Tensor:
        noise = torch.rand(3) + float(numpy.random.rand()) + random.random()
        return torch.full((3,), float(number)) + noise


class NoisyByLists(Noisy):
    def __getitems__(self, numbers: list[int]) -> list[torch.Tensor]:
        return [self[number] for number in numbers]


def rows(dataset: Any = None, **options: Any) -> DatasetRows:
    given = Noisy() if dataset is None else dataset
    return DatasetRows(given, epoch=0, seed=0, shuffle=True, options=FetchOptions(**options))


ASKED = [MicroBatch(4 * n, 4, 100 + n) for n in range(5)]


def taken(source: DatasetRows, asked: list[MicroBatch], foreseen: list[MicroBatch]) -> str:
    source.begin(("", 0, 0))
    try:
        batches = [
            source.batch(one, iter(foreseen[n + 1 :] if foreseen else ()))
            for n, one in enumerate(asked)
        ]
    finally:
        source.end()
    return digest(batches)


class FromFile(torch.utils.data.Dataset[int]):
    handle: Any = None

    def __len__(self) -> int:
        return 23

    def __getitem__(self, number: int) -> int:
        return int(self.handle[number])


def opens_a_file(number: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.handle = range(100, 100 + len(info.dataset))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_init_fn_changes_the_dataset_as_torch_documents(
    alone: cl.Group, context: str
) -> None:
    made = rows(
        FromFile(), num_workers=1, worker_init_fn=opens_a_file, multiprocessing_context=context
    )
    batch = made.batch(ASKED[0], ())
    made.end()
    assert batch.tolist() == [100 + number for number in made._order[:4]]


def test_loader_processes_make_the_same_batches(alone: cl.Group) -> None:
    here = taken(rows(), ASKED, ASKED)
    assert taken(rows(num_workers=2), ASKED, ASKED) == here
    assert taken(rows(NoisyByLists(), num_workers=1, prefetch_factor=1), ASKED, ASKED) == here
    torch.manual_seed(99)  # What the training thread has drawn does not matter.
    assert taken(rows(), ASKED, []) == here


def test_what_was_foreseen_wrongly_is_made_anew(alone: cl.Group) -> None:
    here = [taken(rows(), [one], []) for one in ASKED]
    source = rows(num_workers=2)
    source.begin(("", 0, 0))
    order = [0, 3, 1, 1, 4]
    try:
        for place in order:
            batch = source.batch(ASKED[place], iter(ASKED[place + 1 :]))
            assert digest([batch]) == here[place]
    finally:
        source.end()


class Asked(DatasetRows):
    """Notes each micro-batch that is asked for, with those that are to come."""

    def __init__(self, num_samples: int) -> None:
        data = torch.ones(num_samples, 3)
        super().__init__(data, epoch=0, seed=0, shuffle=False)  # type: ignore[arg-type]
        self.asked: list[tuple[int, list[int]]] = []

    def batch(self, mine: MicroBatch, coming: Iterable[MicroBatch]) -> Any:
        self.asked.append((mine.first, [one.first for one in coming]))
        return super().batch(mine, ())


def test_the_micro_batches_of_later_steps_are_foreseen(alone: cl.Group) -> None:
    """Else loader processes would rest while a step ends, and the next one would wait for them."""
    rows, model = Asked(10), cl.DistributedDataParallel(torch.nn.Linear(3, 1), alone)
    for step in Steps(rows, 4, 2, key="", group=lambda: alone, dealer=Dealer(0, 1)):
        for batch in step:
            model(batch).sum().backward()
        model.zero_grad()
    assert rows.asked == [(first, [*range(first + 2, 10, 2)]) for first in range(0, 10, 2)]


def steps_of_one(ctx: cl.Context, num_workers: int) -> str:
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Dropout())
    )
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    dataset = Noisy()
    for epoch in ctx.epochs(2):
        steps = ctx.steps(
            dataset, 8, 2, epoch=epoch, num_workers=num_workers, persistent_workers=num_workers > 0
        )
        for step in steps:
            for batch in step:
                model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
    return digest(dict(model.module.state_dict()))


@pytest.mark.slow
async def test_a_run_with_loader_processes_ends_with_the_same_bits(session: cl.Session) -> None:
    without = await session.run(steps_of_one, num_workers=0)
    assert len(set(without)) == 1
    assert await session.run(steps_of_one, num_workers=1) == without
