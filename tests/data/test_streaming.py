"""Streams on real ranks: rows that cannot be had by number, each used once whoever is killed."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import chorusline as cl
from chorusline.runtime.data import streaming
from chorusline.runtime.data.number_set import NumberSet
from chorusline.runtime.data.row_reader import RowReader
from tests.harness.programs import output_of
from tests.references.killed_runs import (
    BATCH_SIZE,
    NUM_SAMPLES,
    SIX_PHASES,
    Kind,
    Lines,
    assert_as_if_nothing_was,
    die,
    train,
)

CASES = [
    pytest.param(phase, i % 3, marks=[pytest.mark.slow] if i != 3 else [], id=phase)
    for i, phase in enumerate(SIX_PHASES)
]


@pytest.mark.promise("rows of a `cl.Stream`")
@pytest.mark.parametrize(("phase", "victim"), CASES)
async def test_a_death_costs_no_row_of_a_stream(
    session: cl.Session, tmp_path: Path, phase: str, victim: int
) -> None:
    victims = {victim: (3, phase)}
    with cl.Stream(Lines()) as stream:
        told = await session.run(
            train, kind=Kind(), folder=str(tmp_path), victims=victims, stream=stream
        )
    assert {one.world_size for one in told} == {2}
    assert_as_if_nothing_was(Kind(), str(tmp_path), told, victims)


def numbers_only(rows: list[dict[str, int]]) -> Any:
    return torch.tensor([row["id"] for row in rows]), None, None


@pytest.mark.slow
@pytest.mark.parametrize("victims", [{}, {1: (3, "before it votes (3)")}], ids=["whole", "killed"])
async def test_rows_of_ray_data_are_used_once_and_exactly(
    session: cl.Session, tmp_path: Path, victims: dict[int, Any]
) -> None:
    rows = ray.data.range(NUM_SAMPLES, override_num_blocks=7)
    with cl.Stream(rows) as stream:
        told = await session.run(
            train,
            kind=Kind(),
            folder=str(tmp_path),
            victims=victims,
            stream=stream,
            collate=numbers_only,
        )
    assert {one.world_size for one in told} == {3 - len(victims)}
    assert_as_if_nothing_was(Kind(), str(tmp_path), told, victims)


def test_each_row_of_ray_data_is_dealt_once_and_its_number_is_its_place(cluster: None) -> None:
    rows = ray.data.range(37, override_num_blocks=5)
    reader, key = RowReader(rows, lambda: False), ("run", 0, 1)
    assert rows.context.execution_options.preserve_order, "it means the same row when read again"
    for holder in range(3):
        reader.begin(key, None, 0, 3, NumberSet(), {}, holder, [1])
    dealt: list[list[Any]] = [[], [], []]
    for holder, count in itertools.cycle(enumerate((4, 1, 2))):
        taken = reader.take(key, holder, count, False, None)
        dealt[holder] += taken
        if not taken:
            break
    assert len({len(hand) for hand in dealt}) > 1, "the ranks are uneven"
    assert sorted(number for hand in dealt for number, _ in hand) == list(range(37))
    assert all(row == {"id": number} for hand in dealt for number, row in hand)


def evaluate(ctx: cl.Context, rows: Any, split: bool = False) -> Any:
    """What each rank was given, and the mean over all of them by real counts."""
    mine: list[int] = []
    with torch.no_grad():
        if split:
            batches = rows[ctx.rank].iter_torch_batches(batch_size=4)
            mine = [number for batch in batches for number in batch["id"].tolist()]
        else:
            for batch in ctx.shard(rows, batch_size=4):
                mine += batch["id"].tolist()
    mean = ctx.reduce(sum(mine) / max(1, len(mine)), weight=len(mine))
    return mine, mean


@pytest.mark.slow
async def test_an_evaluation_counts_each_row_once(session: cl.Session) -> None:
    rows = ray.data.range(37, override_num_blocks=5)
    with cl.Stream(rows) as stream:
        ours = await session.run(evaluate, rows=stream)
        again = await session.run(evaluate, rows=stream)
    iterators = rows.streaming_split(3, equal=False)
    splits = await session.run(evaluate, rows=iterators, split=True)
    ray.kill(iterators[0]._coord_actor)
    for told in (ours, again, splits):
        assert sorted(n for mine, _ in told for n in mine) == list(range(37))
        assert [mean for _, mean in told] == pytest.approx([18.0] * 3, rel=1e-14)


def train_on_splits(ctx: cl.Context, splits: list[Any]) -> tuple[list[int], list[float]]:
    """An iterator of streaming_split is this rank's own, and is iterated as it is."""
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1).double())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=1e-4)
    mine: list[int] = []
    with cl.Join([model, optim], divide_by_initial_world_size=False):
        for batch in splits[ctx.rank].iter_torch_batches(batch_size=4):
            mine += batch["id"].tolist()
            model(batch["id"].double().view(-1, 1)).mean().backward()
            optim.step()
            optim.zero_grad()
    return mine, [p.item() for p in model.parameters()]


@pytest.mark.slow
async def test_uneven_splits_of_ray_data_train_with_no_row_dropped_or_repeated(
    session: cl.Session,
) -> None:
    splits = ray.data.range(58, override_num_blocks=7).streaming_split(3, equal=False)
    told = await session.run(train_on_splits, splits=splits)
    ray.kill(splits[0]._coord_actor)
    assert sorted(n for mine, _ in told for n in mine) == list(range(58))
    assert told[0][1] == told[1][1] == told[2][1]


def train_and_fail_to_meet(ctx: cl.Context, stream: cl.Stream, folder: str) -> Any:
    """Rank 1 dies before a collective of the function's own: all run again from the top."""
    torch.manual_seed(0)
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(5, 3).double()))
    optim = ctx.register(
        "optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.01, replicas=2)
    )
    used = ctx.register("used", Counted(), per_rank=True)
    evaluated: list[int] = []
    for epoch in ctx.epochs(2):
        with cl.Join([model, optim]):
            shard = ctx.shard(stream, BATCH_SIZE, epoch=epoch)
            for numbers, inputs, _ in shard:
                model(inputs).square().mean().backward()
                optim.step()
                optim.zero_grad()
                used.ids += numbers.tolist()
                if optim.num_steps == 3:
                    if ctx.rank == 1:
                        Path(folder, "used").write_text(repr(used.ids))
                        die()
                    ctx.reduce(1.0)
        evaluated = []
        with torch.no_grad():
            for numbers, _, _ in ctx.shard(stream, BATCH_SIZE, epoch=epoch + 10 * ctx.generation):
                evaluated += numbers.tolist()
    return used.ids, evaluated


class Counted:
    def __init__(self) -> None:
        self.ids: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"ids": list(self.ids)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ids = list(state["ids"])


@pytest.mark.slow
async def test_a_function_that_runs_again_goes_on_in_the_stream(
    session: cl.Session, tmp_path: Path
) -> None:
    with cl.Stream(Lines()) as stream:
        told = await session.run(train_and_fail_to_meet, stream=stream, folder=str(tmp_path))
    of_the_dead = eval((tmp_path / "used").read_text())
    used = Counter([*of_the_dead, *(n for ids, _ in told for n in ids)])
    assert used == Counter([*range(NUM_SAMPLES)] * 2)
    assert sorted(n for _, ids in told for n in ids) == list(range(NUM_SAMPLES))


class Stopped(Exception):
    pass


def train_and_stop(ctx: cl.Context, stream: cl.Stream, until: int) -> list[int]:
    """Rows that this rank was given, those before a resume too; raises behind step `until`."""
    torch.manual_seed(0)
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(5, 3).double()))
    optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.01))
    given = ctx.register("given", Counted(), per_rank=True)
    for epoch in ctx.epochs(1):
        with cl.Join([model, optim]):
            for numbers, inputs, _ in ctx.shard(stream, BATCH_SIZE, epoch=epoch):
                model(inputs).square().mean().backward()
                optim.step()
                optim.zero_grad()
                given.ids += numbers.tolist()
                if optim.num_steps == until:
                    ctx.save().wait()
                    raise Stopped
    return given.ids


@pytest.mark.slow
async def test_a_run_that_goes_on_from_a_checkpoint_leaves_out_what_was_given(
    cluster: None, tmp_path: Path
) -> None:
    few = {"CPU": 0.1}
    saves = cl.CheckpointConfig(tmp_path)
    for size in (2, 2):
        async with cl.Session(
            size, resources_per_worker=few, timeout_s=20, checkpoint=saves
        ) as session:
            with cl.Stream(Lines()) as stream:
                if not list(tmp_path.iterdir()):
                    with pytest.raises(Stopped):
                        await session.run(train_and_stop, stream=stream, until=3)
                else:
                    told = await session.run(train_and_stop, stream=stream, until=-1)
    assert sorted(n for ids in told for n in ids) == list(range(NUM_SAMPLES))


def read(ctx: cl.Context, stream: cl.Stream) -> int:
    return sum(1 for _ in ctx.shard(stream, batch_size=4))


class Broken:
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise OSError("the disk is gone")


async def test_what_goes_wrong_in_a_stream_is_told(session: cl.Session) -> None:
    with cl.Stream(Broken()) as stream, pytest.raises(RuntimeError) as told:
        await session.run(read, stream=stream)
    assert "the rows of a Stream cannot be read: OSError: the disk is gone" in str(told.value)
    with pytest.raises(TypeError, match=r"stream .*cannot be sent .*: this Stream was closed"):
        await session.run(read, stream=stream)


class Hangs:
    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        threading.Event().wait()


def read_in_step(ctx: cl.Context, stream: cl.Stream, told: str) -> None:
    streaming.TELL_S = 0.2
    tells = logging.Handler()
    tells.emit = lambda record: Path(told).write_text(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("chorusline").addHandler(tells)
    for _ in ctx.shard(stream, 1):
        ctx.group.barrier().wait()


async def test_a_source_that_hangs_is_told_and_the_deadline_of_a_peer_ends_the_run(
    cluster: None, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    with cl.Stream(Hangs()) as stream:
        async with cl.Session(2, resources_per_worker={"CPU": 0.1}, timeout_s=3) as session:
            with pytest.raises(cl.CollectiveTimeout, match="barrier"):
                await session.run(read_in_step, stream=stream, told=str(told))
    assert "the source of a Stream has given no rows" in told.read_text()


async def test_a_reader_that_dies_is_named(session: cl.Session) -> None:
    stream = cl.Stream(range(100_000))
    ray.kill(stream.reader)
    with pytest.raises(cl.StreamLost, match="the reader of a Stream is gone"):
        await session.run(read, stream=stream)


class ReadAgain(Lines):
    """Gives the same rows in the same order whenever it is read."""

    def set_epoch(self, epoch: int) -> None:
        pass


def kill_reader(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def train_without_reader(
    ctx: cl.Context,
    stream: cl.Stream,
    folder: str,
    dies_at: int,
    also_dies: int = -1,
    registers: bool = True,
) -> list[int]:
    """One rank kills the reader behind a step, once; and another one itself with it."""
    with (Path(folder) / f"calls of {os.getpid()}").open("a") as calls:
        calls.write(f"{ctx.generation}\n")
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(5, 3).double())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.01, replicas=2)
    used = Counted()
    if registers:
        ctx.register("model", model)
        ctx.register("optim", optim)
        ctx.register("used", used, per_rank=True)
    for epoch in ctx.epochs(2):
        with cl.Join([model, optim]):
            for numbers, inputs, _ in ctx.shard(stream, BATCH_SIZE, epoch=epoch):
                model(inputs).square().mean().backward()
                optim.step()
                optim.zero_grad()
                used.ids += numbers.tolist()
                ctx.report(step=optim.num_steps)
                if optim.num_steps != dies_at:
                    continue
                if ctx.rank == 0 and not (Path(folder) / "struck").exists():
                    (Path(folder) / "struck").touch()
                    kill_reader(int((Path(folder) / "reader").read_text()))
                if ctx.rank == also_dies and not (Path(folder) / "died").exists():
                    (Path(folder) / "died").write_text(repr(used.ids))
                    die()
    return used.ids


def reader_of(stream: cl.Stream, folder: Path) -> None:
    assert ray.get(stream.reader.ids.remote(("", 0, 0), {})) == []
    actor = ray._private.state.actors(stream.reader._actor_id.hex())
    (folder / "reader").write_text(str(actor["Pid"]))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dies_at", [1, 3, 5])
async def test_when_the_reader_dies_its_rows_are_read_again_and_each_counts_once(
    session: cl.Session, tmp_path: Path, dies_at: int
) -> None:
    with cl.Stream(ReadAgain()) as stream:
        reader_of(stream, tmp_path)
        told = await session.run(
            train_without_reader, stream=stream, folder=str(tmp_path), dies_at=dies_at
        )
        assert len(told) == 3
        for calls in tmp_path.glob("calls of *"):
            assert 2 <= len(calls.read_text().splitlines()) <= 3, "in the same processes"
        used = Counter(n for ids in told for n in ids)
        assert used == Counter([*range(NUM_SAMPLES)] * 2)
        again = await session.run(
            train_without_reader, stream=stream, folder=str(tmp_path), dies_at=-1
        )
        assert Counter(n for ids in again for n in ids) == used, "the next run reads it, too"


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_when_a_rank_dies_with_the_reader_nothing_counts_twice_in_silence(
    session: cl.Session, tmp_path: Path
) -> None:
    with cl.Stream(ReadAgain()) as stream:
        reader_of(stream, tmp_path)
        with pytest.raises(RuntimeError, match="it died together with a rank"):
            await session.run(
                train_without_reader,
                stream=stream,
                folder=str(tmp_path),
                dies_at=3,
                also_dies=2,
            )


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_without_registered_state_the_death_of_the_reader_ends_the_run(
    session: cl.Session, tmp_path: Path
) -> None:
    with cl.Stream(ReadAgain()) as stream:
        reader_of(stream, tmp_path)
        with pytest.raises(cl.StreamLost, match=r"the reader of a Stream is gone .*ctx.register"):
            await session.run(
                train_without_reader,
                stream=stream,
                folder=str(tmp_path),
                dies_at=3,
                registers=False,
            )


def test_unfit_sources_are_refused_with_the_mend() -> None:
    with pytest.raises(TypeError, match="list_iterator can be iterated only once, but every epoch"):
        cl.Stream(iter([1]))
    with pytest.raises(TypeError, match="source must be something to iterate, got int"):
        cl.Stream(3)


TWO_CLUSTERS = """
import asyncio, chorusline as cl

def count(ctx, rows):
    return sum(len(batch) for batch in ctx.shard(rows, batch_size=4))

async def main():
    with cl.Stream(range(10)) as rows:
        try:
            await asyncio.to_thread(cl.run, count, rows=rows)
        except TypeError as error:
            assert "call ray.init() before chorusline.run, or use a Session" in str(error)
        for _ in range(2):
            async with cl.Session(2, resources_per_worker={"CPU": 0.5}) as session:
                assert sum(await session.run(count, rows=rows)) == 10

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_stream_outlives_the_cluster_that_a_run_has_started() -> None:
    output_of("-c", TWO_CLUSTERS, timeout_s=150)
