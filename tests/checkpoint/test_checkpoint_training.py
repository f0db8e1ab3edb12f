"""Checkpoints beside training: what goes on meanwhile, how many stay, and where data goes on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.runtime.checkpoint.format.manifest import MANIFEST
from chorusline.runtime.data.cursor import Cursor, Used
from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.data.dealer import Counts, ShardIteration
from chorusline.runtime.data.dealing import Hands, Remainder, deal
from tests.references.checkpoint_runs import Parts, in_run, make_model, run_train, same
from tests.references.training import per_channel


class Ballast:
    """Something large enough that writing it takes longer than a step."""

    def __init__(self) -> None:
        self.state = {"ballast": torch.zeros(8_000_000)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _train_on(group: cl.Group, config: cl.CheckpointConfig) -> dict[str, Any]:
    def body(ctx: cl.Context) -> dict[str, Any]:
        parts = Parts(ctx)
        ctx.register("ballast", Ballast(), required=False)
        parts.step()
        collectives = sum(group.statistics.operations.values())
        first = ctx.save()
        without_collectives = sum(group.statistics.operations.values()) == collectives
        was_ready = first.is_ready
        at_save = parts.state()
        parts.step()
        parts.step()
        second = ctx.save()
        waited = first.is_ready
        times = second.wait()
        return {
            "state": at_save,
            "was_ready": was_ready,
            "without_collectives": without_collectives,
            "second_waited_for_first": waited,
            "times": times,
        }

    return in_run(group, body, config)


def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_the_step_it_was_made_at(
    ranks_of, tmp_path
):
    told = ranks_of(2).run(_train_on, cl.CheckpointConfig(tmp_path))
    for rank in told:
        assert not rank["was_ready"]
        assert rank["without_collectives"]
        assert rank["second_waited_for_first"]
        times = rank["times"]
        assert 0 < times.paused_s < times.total_s and 0 < times.wrote_s < times.total_s
        assert times.num_bytes > 16_000_000  # half of the ballast
    (first,) = tmp_path.glob("step-00000001-*")
    config = cl.CheckpointConfig(tmp_path / "elsewhere", resume=first)
    ((resumed, _), _) = ranks_of(2).run(run_train, config, {"until": 1})
    assert same(resumed, told[0]["state"])


def _train_by_itself(
    group: cl.Group, config: cl.CheckpointConfig, num_epochs: int
) -> list[tuple[int, int, list[int]]]:
    """Over uneven data inside Join; (epoch, steps before, sample ids) of each batch."""
    keys = [0] * 17 + [1] * 6 + [2] * 9 + list(range(3, 8))

    def body(ctx: cl.Context) -> list[tuple[int, int, list[int]]]:
        model = ctx.register("model", cl.DistributedDataParallel(make_model(is_local=False)))
        optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW))
        given = []
        for epoch in ctx.epochs(num_epochs):
            with cl.Join([model, optim], skew_warning=None):
                batches = ctx.shard(list(range(37)), batch_size=3, epoch=epoch, keep_together=keys)
                for ids in batches:
                    given.append((epoch, ctx.step, ids.tolist()))
                    model(ids[:, None] / 37 * torch.ones(7)).square().mean().backward()
                    optim.step()
                    optim.zero_grad()
            with torch.no_grad():
                evaluated = sum(len(ids) for ids in ctx.shard(list(range(11)), batch_size=2))
            assert ctx.reduce(evaluated, "sum") == 11  # Each once, also after a resume.
        return given

    return in_run(group, body, config)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 2)])
def test_each_sample_is_given_once_per_epoch_over_a_resume_also_while_ranks_have_joined(
    ranks_of, tmp_path, before, after
):
    config = cl.CheckpointConfig(tmp_path, every_n_steps=2)
    first = ranks_of(before).run(_train_by_itself, config, 2)
    steps = max(step for rank in first for _, step, _ in rank) + 1
    places = {int(path.name.split("-")[1]): path for path in tmp_path.iterdir()}
    assert sorted(places) == list(range(2, steps + 1, 2))
    joined = [step for step in places if any(step not in {s for _, s, _ in rank} for rank in first)]
    assert joined  # Some were made while a rank had no data.
    for step in (2, joined[0], steps // 2 + 1 & ~1, max(places)):
        config = cl.CheckpointConfig(tmp_path / "elsewhere", resume=places[step])
        second = ranks_of(after).run(_train_by_itself, config, 2)
        ledger: Counter[tuple[int, int]] = Counter()
        for epoch, at, ids in itertools.chain(*first):
            if at < step:
                ledger.update((epoch, sample) for sample in ids)
        for epoch, at, ids in itertools.chain(*second):
            assert at >= step
            ledger.update((epoch, sample) for sample in ids)
        assert ledger == Counter(itertools.product(range(2), range(37)))


def test_with_the_same_ranks_a_resume_goes_on_with_the_very_batches(ranks_of, tmp_path):
    config = cl.CheckpointConfig(tmp_path, every_n_steps=3)
    first = ranks_of(2).run(_train_by_itself, config, 2)
    (place,) = tmp_path.glob("step-00000003-*")
    config = cl.CheckpointConfig(tmp_path / "elsewhere", resume=place)
    second = ranks_of(2).run(_train_by_itself, config, 2)
    assert second == [[batch for batch in rank if batch[1] >= 3] for rank in first]


class _InnerOptimizer(torch.optim.Optimizer):
    """As SAM does, it steps by an optimizer of its own, and its `step` is never called."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr)

    def take(self) -> None:
        self.inner.step()


def _accumulate(group: cl.Group, config: cl.CheckpointConfig, until: int, kind: str) -> Any:
    def body(ctx: cl.Context) -> Any:
        model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1)))
        made = _InnerOptimizer if kind == "inner" else torch.optim.SGD
        optim = ctx.register("optim", made(model.parameters(), lr=0.1))
        step = optim.take if isinstance(optim, _InnerOptimizer) else optim.step
        stepped, sums = [], []
        for epoch in ctx.epochs(1):
            shard = ctx.shard(list(range(24)), batch_size=1, shuffle=False, epoch=epoch)
            for number, ids in enumerate(shard, ctx.step + 1):
                model(ids[:, None].float()).mean().backward()
                sums += ids.tolist()
                if number % 4 == 0:
                    step()
                    optim.zero_grad()
                    stepped.append((number, sums))
                    sums = []
                if number == until:
                    break
        return stepped

    return in_run(group, body, config)


@pytest.mark.parametrize("kind", ["itself", "inner"])
@pytest.mark.parametrize("every", [1, 6])
def test_a_scheduled_save_waits_for_the_step_of_an_optimizer_that_accumulates(
    ranks_of, tmp_path, every, kind
):
    config = cl.CheckpointConfig(tmp_path, every_n_steps=every)
    first = ranks_of(2).run(_accumulate, config, 11, kind)
    saved = sorted(int(path.name.split("-")[1]) for path in tmp_path.iterdir())
    assert saved == ([4, 8] if every == 1 else [8])  # Not after batches 6 or 7, between two passes.
    second = ranks_of(2).run(_accumulate, config, 0, kind)
    steps = [one for rank in (*first, *second) for one in rank]
    assert sorted(number for number, _ in steps) == [4, 4, 8, 8, 12, 12]
    assert sorted(sample for _, samples in steps for sample in samples) == list(range(24))


def test_only_the_newest_stay_and_only_once_a_newer_one_is_whole(ranks_of, tmp_path):
    torn = tmp_path / "step-00000001-00000000-0"
    torn.mkdir()
    (torn / "rank-0.distcp.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    config = cl.CheckpointConfig(tmp_path, every_n_steps=1, num_to_keep=2)
    given = ranks_of(2).run(_train_by_itself, config, 1)
    last = max(step for rank in given for _, step, _ in rank) + 1
    steps = [int(path.name.split("-")[1]) for path in tmp_path.glob("step-*")]
    assert sorted(steps) == [last - 1, last]
    assert (tmp_path / "notes.txt").exists()


def _save_inside_join(group: cl.Group, place: str) -> str:
    def body(ctx: cl.Context) -> str:
        model = ctx.register("model", cl.DistributedDataParallel(make_model()))
        optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1))
        with cl.Join([model, optim], skew_warning=None):
            for batch in [torch.ones(2, 7)] * (1 + 2 * ctx.rank):
                model(batch).sum().backward()
                optim.step()
                if ctx.step == 2:
                    try:
                        ctx.save(place)
                    except RuntimeError as error:
                        return str(error)
        return ""

    return in_run(group, body, None)


def test_a_save_that_joined_ranks_would_miss_is_refused(ranks_of, tmp_path):
    told = ranks_of(2).run(_save_inside_join, str(tmp_path))
    assert told[1].startswith("ctx.save() inside Join, but rank 0 has run out of data")
    assert "CheckpointConfig(every_n_steps=...)" in told[1]


def test_what_was_given_in_earlier_worlds_is_not_dealt_again():
    keys = [number // 3 for number in range(40)]
    for keep in (None, keys):

        def whole(size: int, keep=keep) -> Hands:
            return [array("q", hand) for hand in deal(40, world_size=size, keep_together=keep)]

        runs = ((3, 9, 0, 4), (1, 2, 3))
        hands = whole(4)
        given = [hand[:count] for hand, count in zip(hands, runs[0], strict=True)]
        hands = Remainder(runs[:1]).dealt(whole, 3, keep)
        given += [hand[:count] for hand, count in zip(hands, runs[1], strict=True)]
        hands = Remainder(runs).dealt(whole, 2, keep)
        assert sorted(itertools.chain(*given, *hands)) == list(range(40))
        if keep is not None:
            owners = {(keep[n], rank) for rank, hand in enumerate(hands) for n in hand}
            assert len(owners) == len({key for key, _ in owners})
        rest = Remainder((), frozenset(itertools.chain(*given)))
        assert sorted(itertools.chain(*rest.dealt(whole, 5))) == sorted(itertools.chain(*hands))
        assert [*map(list, Remainder((), None).dealt(whole, 2))] == [[], []]


class _Pass(ShardIteration):
    """What a cursor sees of a Shard."""

    def __init__(
        self, taken_ids: list[int], ids_of_the_lost: list[int], agreed: int | None = None
    ) -> None:
        self.counts = Counts()
        self.counts.take(len(taken_ids) if agreed is None else agreed)
        self.counts.agree()
        self.counts.take(len(taken_ids) - self.counts.num_taken)
        self.ids_of_the_lost = ids_of_the_lost
        self._taken_ids = taken_ids

    @property
    def taken_ids(self) -> list[int]:
        return self._taken_ids

    def begin_dealt(self, *_: object) -> None:
        raise NotImplementedError

    def redeal(self, *_: object) -> Any:
        raise NotImplementedError

    def ids_by_counts(self, *_: object) -> list[int]:
        raise NotImplementedError


def begin_over(cursor: Cursor, key: str, taken_ids: list[int], agreed: int | None = None) -> None:
    """A pass that is over on this rank."""
    one = _Pass(taken_ids, [], agreed)
    cursor.begin(key, one)
    one.is_over = True


def test_a_cursor_goes_on_in_the_loop_and_epoch_where_it_was():
    before = Cursor()
    assert list(before.epochs(2)) == [0, 1]
    for epoch in before.epochs(5):
        if epoch == 3:
            begin_over(before, "over", [])
            before.begin("data", _Pass([5, 1], []))
            break
    after = Cursor()
    after.resume([before.state(), before.state()])
    assert list(after.epochs(2)) == []
    epochs = after.epochs(5)
    assert next(epochs) == 3
    assert after.rest_of("data") == Remainder(((2, 2),))
    assert after.rest_of("over") == Remainder((), None)
    after.begin("data", _Pass([], []))
    assert after.rest_of("data") == Remainder()  # A second pass in the same epoch is a whole one.
    assert next(epochs) == 4
    assert after.rest_of("data") == Remainder()
    assert list(epochs) == [] and list(after.epochs(2)) == [0, 1]


def test_after_the_loss_of_ranks_a_cursor_tells_samples_by_their_numbers():
    told = []
    for ids in ([5, 1], [2]):
        cursor = Cursor()
        cursor.begin("data", _Pass(ids, [7]))
        told.append(cursor.state(by_id=True))
    after = Cursor()
    after.resume(told)
    assert after.rest_of("data") == Remainder((), frozenset({5, 1, 2, 7}))
    after.begin("data", _Pass([3], []))
    again = Cursor()
    again.resume([after.state()])
    assert again.rest_of("data") == Remainder((), frozenset({5, 1, 2, 7, 3}))


def test_for_the_next_run_only_samples_of_agreed_steps_are_used():
    """The last batch of an aborted run is given again, also on a rank that has ended its loop."""
    over, inside = Cursor(), Cursor()
    in_body = [over.epochs(1), inside.epochs(1)]
    assert [*map(next, in_body)] == [0, 0]
    begin_over(over, "data", [5, 1])
    inside.begin("data", _Pass([2, 3, 4], [], agreed=2))
    for by_id, rest in [
        (False, Remainder(((2, 2),))),
        (True, Remainder((), frozenset({5, 1, 2, 3}))),
    ]:
        iterations = [
            cursor.state(Used.AGREED, by_id=by_id)["iterations"] for cursor in (over, inside)
        ]
        after = Cursor()
        after.resume_next_loop(0, iterations)
        epochs = after.epochs(1)
        assert next(epochs) == 0 and after.rest_of("data") == rest
    begin_over(over, "alone", [5, 1], agreed=1)
    told = over.state(Used.AGREED)["iterations"]["alone#0"]
    assert told["given"] == 1 and not told["is_over"], "its last batch was in no step"
    assert over.state()["iterations"]["alone#0"]["is_over"], "as a checkpoint counts"


def test_a_shard_that_is_iterated_again_does_not_change_what_its_first_iteration_was_given():
    cursor = Cursor()
    epochs = cursor.epochs(1)
    assert next(epochs) == 0
    shard = Shard(range(10), 2, rank=0, world_size=1, cursor=cursor, collate_fn=list)
    batches = iter(shard)
    next(batches), next(batches)
    batches.close()  # As a loop that is broken off.
    with torch.no_grad():
        next(iter(shard))
    assert [one["given"] for one in cursor.state()["iterations"].values()] == [4]
    assert sum(map(len, shard)) == 10
    with torch.no_grad():
        next(iter(shard))
    told = cursor.state()["iterations"].values()
    assert [(one["given"], one["is_over"]) for one in told] == [(4, False), (10, True)]


async def _train_in_session(
    ctx: cl.Context, crash_at: int, saves: bool = True
) -> tuple[str | None, list[int], float]:
    torch.manual_seed(ctx.rank)
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(3, 1)))
    optim = ctx.register("optimizer", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW))
    steps = []
    while ctx.step < 5:
        steps.append(ctx.step)
        if ctx.step == crash_at and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.full((2, 3), ctx.step + 1.0)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        if ctx.step == 2 and saves:
            times = await ctx.save()
            assert times.total_s > 0
    return ctx.resumed_from, steps, model.module.weight.sum().item()


def _save_and_go_on(ctx: cl.Context, until: int) -> tuple[str | None, int]:
    """A checkpoint after three steps, which takes longer to write than the next steps."""
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(3, 1)))
    optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW))
    ctx.register("ballast", Ballast())
    for epoch in ctx.epochs(1):
        for batch in ctx.shard(torch.ones(20_000, 3), 1, epoch=epoch):
            if ctx.step == until:
                break
            model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
            if ctx.step == 3:
                ctx.save()
            time.sleep(0.005)
    return ctx.resumed_from, ctx.step


@pytest.mark.slow
async def test_an_interrupt_lets_the_checkpoint_that_is_being_written_become_whole(
    cluster: None, tmp_path: Path
) -> None:
    def manifests() -> list[Path]:
        return list(tmp_path.glob(f"step-*/{MANIFEST}"))

    async with cl.Session(2, checkpoint=cl.CheckpointConfig(tmp_path)) as session:
        running = asyncio.create_task(session.run(_save_and_go_on, until=-1))
        async with asyncio.timeout(30):
            while not list(tmp_path.glob("step-*/*")):
                await asyncio.sleep(0.002)
        running.cancel()
        assert not manifests(), "it is being written"
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(manifests()) == 1
        results = await session.run(_save_and_go_on, until=5)
    for resumed_from, step in results:
        assert Path(str(resumed_from)).name.startswith("step-00000003-")
        assert step == 5


def _train_epochs(ctx: cl.Context, pause_s: float) -> tuple[bool, int, torch.Tensor]:
    """A loop that has a name, whose place is also in the checkpoints."""
    torch.manual_seed(0)
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(3, 1)))
    optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1))
    data = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    taken = 0
    for epoch in ctx.epochs(2, resume="training"):
        with cl.Join([model, optim]):
            for batch in ctx.shard(data, 4, epoch=epoch):
                model(batch).square().mean().backward()
                optim.step()
                optim.zero_grad()
                taken += 1
                time.sleep(pause_s)
    return ctx.resumed_from is not None, taken, model.module.weight.detach()


@pytest.mark.slow
async def test_a_named_loop_that_was_interrupted_goes_on_from_the_checkpoints_place(
    cluster: None, tmp_path: Path
) -> None:
    """Models that are registered, not kept, come back from the checkpoint; so does the place."""
    place = tmp_path / "interrupted"
    whole = cl.CheckpointConfig(tmp_path / "whole", every_n_steps=3)
    async with cl.Session(2, checkpoint=whole) as session:
        expected = await session.run(_train_epochs, pause_s=0.0)
    assert [taken for _, taken, _ in expected] == [16, 16]
    async with cl.Session(2, checkpoint=replace(whole, storage_path=place)) as session:
        running = asyncio.create_task(session.run(_train_epochs, pause_s=0.3))
        async with asyncio.timeout(60):
            while not list(place.glob(f"step-*/{MANIFEST}")):
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        results = await session.run(_train_epochs, pause_s=0.0)
    for (resumed, taken, weight), (_, _, whole_weight) in zip(results, expected, strict=True):
        assert resumed and 0 < taken <= 13
        assert torch.equal(weight, whole_weight)


def _train_without_session(group: cl.Group) -> Any:
    return asyncio.run(in_run(group, _train_in_session, None, crash_at=-1, saves=False))


async def test_a_session_goes_on_from_the_checkpoint_when_it_is_run_again(
    cluster, ranks_of, tmp_path
):
    config = cl.CheckpointConfig(tmp_path, num_to_keep=1)
    async with cl.Session(num_workers=2, checkpoint=config) as session:
        with pytest.raises(cl.WorkerLost):
            await session.run(_train_in_session, crash_at=4)
        (path, steps, weight), _ = await session.run(_train_in_session, crash_at=-1)
    assert Path(path).parent == tmp_path and Path(path).name.startswith("step-00000002-")
    assert steps == [2, 3, 4]
    uninterrupted = ranks_of(2).run(_train_without_session)
    assert uninterrupted[0] == (None, [0, 1, 2, 3, 4], weight)


GIVEN_FIVE: dict[str, Any] = {
    "runs": (),
    "given": 5,
    "ids": None,
    "again": "",
    "is_over": False,
    "num_ids": 0,
    "inner": {},
}
"""What a rank says of an iteration of which it was given five samples."""


def test_an_epoch_is_not_gone_on_with_in_a_dataset_of_another_length() -> None:
    cursor = Cursor()
    resumed = {"loop": 0, "epoch": 1, "iterations": {"61/1/0/True#0": GIVEN_FIVE}}
    cursor.resume([resumed])
    epochs = cursor.epochs(3)
    assert next(epochs) == 1
    with pytest.raises(ValueError, match="the dataset has 70 samples, and had 61 when this epoch"):
        cursor.begin("70/1/0/True", _Pass([], []))
    with pytest.raises(ValueError, match="the dataset has 70 samples, and had 61 when this epoch"):
        cursor.begin("70/1/0/True/of-70-keys", _Pass([], []))
    cursor.begin("61/1/0/True", _Pass([], []))
    cursor.begin(
        "70/1/0/True", _Pass([], [])
    )  # Another dataset of the same epoch, as the first one is there.


def test_an_epoch_is_not_gone_on_with_in_another_order(tmp_path: Path) -> None:
    """The keys are those of Shard and Steps."""
    for before, now, said in [
        ("61/1/0/True", "61/1/7/True", "begun with seed=0, and continues with seed=7"),
        ("61/1/0/True", "61/1/0/False", "begun with shuffle=True, and continues with shuffle=F"),
        ("61/1/3/True", "61/1/0/False", "begun with seed=3, shuffle=True, and"),
        ("61/1/0/True/abc", "61/1/0/True", "begun with other groups of keep_together"),
        ("61/1/0/True/abc", "61/1/7/True/abd", "Keep the same samples together until the epoch is"),
        ("61/0/True/8/steps/1", "61/0/True/16/steps/1", "with global_batch_size=8, and"),
        ("stream/8/steps/1", "stream/16/steps/1", "Write global_batch_size=8 until the epoch is"),
    ]:
        for part, is_refused in [
            (GIVEN_FIVE, True),
            # A pass that is over, and another one after it.
            ({**GIVEN_FIVE, "is_over": True}, False),
        ]:
            cursor = Cursor()
            cursor.resume([{"loop": 0, "epoch": 1, "iterations": {f"{before}#0": part}}])
            epochs = cursor.epochs(3)
            assert next(epochs) == 1
            if is_refused:
                with pytest.raises(ValueError, match=said):
                    cursor.begin(now, _Pass([], []))
                cursor.begin(before, _Pass([], []))
            cursor.begin(now, _Pass([], []))


def test_an_epoch_continues_with_the_same_samples_kept_together_whatever_the_keys_are() -> None:
    def shard(cursor: Cursor, keys: Any) -> Shard:
        return Shard(
            list(range(12)),
            2,
            rank=0,
            world_size=2,
            keep_together=keys,
            cursor=cursor,
            collate_fn=list,
        )

    before = Cursor()
    for _ in before.epochs(1):
        used = next(iter(shard(before, [n // 3 for n in range(12)])))
        break
    parts = [before.state(), before.state()]
    for keys, is_refused in (
        (None, True),
        ([n // 4 for n in range(12)], True),
        (["abcd"[n // 3] for n in range(12)], False),
    ):
        cursor = Cursor()
        cursor.resume(parts)
        for _ in cursor.epochs(1):
            with pytest.raises(ValueError) if is_refused else contextlib.nullcontext():
                assert not {*used} & {*itertools.chain(*shard(cursor, keys))}


@pytest.mark.parametrize("by_id", [False, True])
def test_an_epoch_goes_on_with_another_batch_size_at_another_number_of_ranks(by_id: bool) -> None:
    used: list[int] = []
    parts: list[Any] | None = None
    for ranks, batch_size, num_batches in [(4, 3, 2), (2, 6, 1), (2, 4, 1), (3, 1, 100)]:
        cursors = [Cursor() for _ in range(ranks)]
        for rank, cursor in enumerate(cursors):
            if parts is not None:
                cursor.resume(parts)
            for epoch in cursor.epochs(1):
                shard = Shard(
                    list(range(61)),
                    batch_size,
                    rank=rank,
                    world_size=ranks,
                    epoch=epoch,
                    cursor=cursor,
                    collate_fn=list,
                )
                for batch in itertools.islice(shard, num_batches):
                    used += batch
                break
        parts = [cursor.state(by_id=by_id) for cursor in cursors]
    assert sorted(used) == list(range(61))


def test_an_epoch_over_two_datasets_goes_on_in_both() -> None:
    keys = ["61/1/0/True", "70/1/0/True"]
    for first, second in (keys, reversed(keys)):
        cursor = Cursor()
        iterations = {f"{key}#0": GIVEN_FIVE for key in keys}
        cursor.resume([{"loop": 0, "epoch": 1, "iterations": iterations}])
        epochs = cursor.epochs(3)
        assert next(epochs) == 1
        for key in (first, second):
            assert cursor.rest_of(key) == Remainder(((5,),))
            cursor.begin(key, _Pass([], []))


def _train_on_pairs(
    group: cl.Group, config: cl.CheckpointConfig
) -> tuple[int, list[tuple[int, list[int], list[int]]]]:
    """The step, and the samples of both shards, of each batch; and the step at the end."""

    def body(ctx: cl.Context) -> tuple[int, list[tuple[int, list[int], list[int]]]]:
        model = ctx.register("model", cl.DistributedDataParallel(make_model(is_local=False)))
        optim = ctx.register("optim", torch.optim.SGD(model.parameters(), lr=0.01))
        given = []
        for epoch in ctx.epochs(1):
            shards = [
                ctx.shard(list(range(16 * group.size)), 2, epoch=epoch, seed=seed)
                for seed in (1, 2)
            ]
            for first, second in zip(*shards, strict=True):
                given.append((ctx.step, first.tolist(), second.tolist()))
                ids = torch.cat([first, second])
                model(ids[:, None] / 37 * torch.ones(7)).square().mean().backward()
                optim.step()
                optim.zero_grad()
        return ctx.step, given

    return in_run(group, body, config)


def test_a_resume_inside_a_zip_goes_on_with_the_very_pairs(ranks_of, tmp_path):
    config = cl.CheckpointConfig(tmp_path / "a", every_n_steps=2)
    whole = ranks_of(2).run(_train_on_pairs, config)
    assert [step for step, _ in whole] == [8, 8], "a pair is one step"
    for save in (2, 4, 6):
        (place,) = (tmp_path / "a").glob(f"step-{save:08}-*")
        config = cl.CheckpointConfig(tmp_path / "b", resume=place)
        resumed = ranks_of(2).run(_train_on_pairs, config)
        assert resumed == [(8, given[save:]) for _, given in whole]


def _train_in_loops(
    group: cl.Group, config: cl.CheckpointConfig
) -> list[tuple[int, tuple[int, ...], int]]:
    """The step, the sample of the outer loop, and that of the inner one, of each batch."""

    def body(ctx: cl.Context) -> list[tuple[int, tuple[int, ...], int]]:
        model = ctx.register("model", cl.DistributedDataParallel(make_model(is_local=False)))
        optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW))
        given = []
        for epoch in ctx.epochs(2):
            for outer in ctx.shard(list(range(3 * group.size)), 1, epoch=epoch):
                for inner in ctx.shard(list(range(4 * group.size)), 1, epoch=epoch):
                    given.append((ctx.step, (epoch, outer.item()), inner.item()))
                    model(inner[:, None] / 37 * torch.ones(7)).square().mean().backward()
                    optim.step()
                    optim.zero_grad()
        return given

    return in_run(group, body, config)


def test_a_resume_inside_a_loop_in_a_loop_goes_on_with_the_very_batches(ranks_of, tmp_path):
    config = cl.CheckpointConfig(tmp_path / "a", every_n_steps=1)
    whole = ranks_of(2).run(_train_in_loops, config)
    assert [len(given) for given in whole] == [24, 24]
    for save in (2, 4, 7, 12, 17):
        (place,) = (tmp_path / "a").glob(f"step-{save:08}-*")
        config = cl.CheckpointConfig(tmp_path / "b", resume=place)
        resumed = ranks_of(2).run(_train_in_loops, config)
        assert resumed == [given[save:] for given in whole]


class Turned(torch.nn.Module):
    """Its first version kept the weight the other way round."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 3))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].T
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _save_or_resume_turned(
    group: cl.Group, config: cl.CheckpointConfig, per_rank: bool, saves: bool
) -> list[float]:
    def train(ctx: cl.Context) -> list[float]:
        net = torch.nn.Sequential(Turned())
        ctx.register("model", net, per_rank=per_rank)
        if saves:
            torch.nn.init.eye_(net[0].weight[:, 1:])
            ctx.save().wait()
        return net[0].weight.flatten().tolist()

    return in_run(group, train, config)


@pytest.mark.parametrize("per_rank", [False, True])
def test_a_module_with_versions_takes_its_state_as_it_was_saved(ranks_of, tmp_path, per_rank):
    config = cl.CheckpointConfig(tmp_path)
    saved = ranks_of(2).run(_save_or_resume_turned, config, per_rank, True)
    assert saved == [[0, 1, 0, 0, 0, 1, 0, 0, 0]] * 2
    assert ranks_of(2).run(_save_or_resume_turned, config, per_rank, False) == saved


class Seen(torch.nn.Module):
    """Its extra state has no tensor before the first batch."""

    last: torch.Tensor | None = None  # None: no batch yet

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.last = batch.detach().clone()
        return batch

    def get_extra_state(self) -> dict[str, Any]:
        return {"last": self.last, "version": 1}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.last = state["last"]


class Rows(torch.nn.Module):
    """Its buffer has a row for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.empty(0))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.rows = torch.cat([self.rows, batch.detach().mean().reshape(1)])
        return batch

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.rows = torch.empty_like(state_dict[prefix + "rows"])
        super()._load_from_state_dict(state_dict, prefix, *args)


GROWING = {
    "extra": Seen,
    "buffer": Rows,
    "fake quantize": per_channel,
    "lazy": torch.nn.LazyBatchNorm1d,
}


def _grown(ctx: cl.Context, which: str, saves: bool) -> dict[str, Any]:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), GROWING[which]())
    if saves:
        net(torch.arange(8.0).view(4, 2))
    ctx.register("model", net)
    if saves:
        ctx.save().wait()
    return net.state_dict()


@pytest.mark.parametrize("which", GROWING)
def test_a_module_whose_state_has_grown_resumes(alone, tmp_path, which):
    config = cl.CheckpointConfig(tmp_path)
    saved, resumed = (
        in_run(alone, _grown, config, which=which, saves=saves) for saves in (True, False)
    )
    assert same(resumed, saved)


def _grown_in(ctx: cl.Context, which: str, dtype: torch.dtype) -> None:
    net = GROWING[which]().to(dtype)
    if dtype == torch.float32:
        net(torch.arange(12.0).view(4, 3))
    ctx.register("model", net)
    ctx.save().wait()


@pytest.mark.parametrize("which", ["buffer", "fake quantize", "lazy"])
def test_what_may_have_another_shape_has_the_dtype_of_the_saved_one(alone, tmp_path, which):
    config = cl.CheckpointConfig(tmp_path)
    in_run(alone, _grown_in, config, which=which, dtype=torch.float32)
    with pytest.raises(cl.CheckpointMismatch, match=r"float32 in it, and .*bfloat16 here"):
        in_run(alone, _grown_in, config, which=which, dtype=torch.bfloat16)


def _save_or_refuse(ctx: cl.Context, num_layers: int) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(num_layers)))
    net.register_load_state_dict_pre_hook(lambda *_: None)
    if num_layers == 2:
        ctx.register("model", net)
        ctx.save().wait()
        return
    before = net[0].weight.detach().clone()
    with pytest.raises(cl.CheckpointMismatch, match=r"model\.1\.weight .* in it, and missing here"):
        ctx.register("model", net)
    assert torch.equal(net[0].weight, before)


def test_a_hook_of_the_whole_model_hides_no_layer_that_only_the_checkpoint_has(alone, tmp_path):
    for num_layers in (2, 1):
        in_run(alone, _save_or_refuse, cl.CheckpointConfig(tmp_path), num_layers=num_layers)


def _save_buffer(ctx: cl.Context, length: int) -> None:
    net = torch.nn.Linear(2, 2)
    net.register_buffer("seen", torch.zeros(length))
    ctx.register("model", net)
    ctx.save().wait()


def test_a_buffer_without_elements_is_not_called_missing(alone, tmp_path):
    config = cl.CheckpointConfig(tmp_path)
    in_run(alone, _save_buffer, config, length=3)
    with pytest.raises(cl.CheckpointMismatch) as raised:
        in_run(alone, _save_buffer, config, length=0)
    assert "model.seen is (3,) float32 in it, and (0,) float32 here" in str(raised.value)


@pytest.mark.parametrize("what", ["module", "optimizer", "sharded optimizer", "object"])
def test_a_state_of_each_rank_does_not_become_one_that_all_ranks_have(alone, tmp_path, what):
    def train(ctx: cl.Context, per_rank: bool) -> None:
        model = cl.DistributedDataParallel(torch.nn.Linear(2, 2))
        made: dict[str, Any] = {
            "module": model,
            "optimizer": torch.optim.Adam(model.parameters()),
            "object": Ballast(),
        }
        if not per_rank:
            made["sharded optimizer"] = cl.ZeroRedundancyOptimizer(model, torch.optim.Adam)
        ctx.register("x", made.get(what, made["optimizer"]), per_rank=per_rank)
        ctx.save().wait()

    config = cl.CheckpointConfig(tmp_path)
    in_run(alone, train, config, per_rank=True)
    with pytest.raises(cl.CheckpointMismatch, match="'x' was saved with per_rank=True") as raised:
        in_run(alone, train, config, per_rank=False)
    # A sharded optimizer cannot be registered so.
    assert ("register it with per_rank" in str(raised.value)) is (what != "sharded optimizer")
