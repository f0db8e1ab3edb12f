"""Functions that run again from the top in the middle of a run: with what they have registered.

That is how a lost worker is survived outside a step, and how new workers come in.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import chorusline as cl
from benchmarks.faults.chaos_training import loss_of, network
from chorusline.actors.errors import StateLost, WorkerLost
from chorusline.actors.messages.messages import Report
from chorusline.actors.worker_group.recruiting import Recruiter
from chorusline.runtime.checkpoint.format.catalog import listing
from chorusline.runtime.checkpoint.format.manifest import read_manifest
from chorusline.runtime.checkpoint.format.storage import Folder
from chorusline.runtime.commands.status import headline
from chorusline.runtime.program.context import call_of
from chorusline.runtime.program.function_call import FunctionCall
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.harness.reused_ranks import ReusedRanks
from tests.references.checkpoint_runs import run_train
from tests.references.killed_runs import Diary
from tests.references.scheduled import SCHEDULES, train_scheduled
from tests.references.training_to_kill import BATCH_SIZE, LEARNING_RATE, NUM_SAMPLES, Samples, die


class Ledger:
    """What this rank has taken in steps that count: by step, samples; and the step's epoch."""

    def __init__(self) -> None:
        self.taken: dict[int, list[int]] = {}
        self.epochs: dict[int, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken, self.epochs = dict(state["taken"]), dict(state["epochs"])


@dataclass
class Told:
    pid: int
    seat_rank: int
    world_size: int
    parameters: list[torch.Tensor]
    taken: dict[int, list[int]]
    num_steps: int
    learning_rate: float
    calls: int
    epochs: dict[int, int]
    world_sizes: list[int] = field(default_factory=list)
    bytes_moved: int = 0
    kept_numel: int = 0


calls: list[int] = []


def patience(epoch: int, ctx: cl.Context) -> int:
    """How many times longer a step takes: a worker that starts slowly finds the run not over."""
    return 8 if epoch >= 16 and ctx.world_size < 3 else 1


def train(
    ctx: cl.Context,
    dies_on: int,
    dies_at: int,
    where: str,
    num_epochs: int = 1,
    step_s: float = 0.0,
    registers: bool = True,
    replicas: int = 2,
) -> Told:
    """dies_on: rank of the first generation; where: "own collective", or "step"."""
    calls.append(ctx.generation)
    moved_before = call_of(ctx).recovery.bytes_moved if call_of(ctx).recovery else 0
    model = cl.DistributedDataParallel(network(), bucket_cap_mb=0.001)
    optim = cl.ZeroRedundancyOptimizer(
        model, torch.optim.AdamW, lr=LEARNING_RATE, replicas=replicas
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optim, gamma=0.9)
    ledger = Ledger()
    if registers:
        ctx.register("model", model)
        ctx.register("optim", optim)
        ctx.register("schedule", schedule)
        ctx.register("ledger", ledger, per_rank=True)
    # Not who comes in its place, which goes on at the same step.
    is_victim = ctx.rank == dies_on and len(calls) == 1 and not optim.num_steps
    world_sizes = []
    for epoch in ctx.epochs(num_epochs):
        with cl.Join([model, optim], step_along=[schedule], divide_by_initial_world_size=False):
            for numbers, inputs, targets in ctx.shard(Samples(), BATCH_SIZE, epoch=epoch):
                time.sleep(step_s * patience(epoch, ctx))
                loss = loss_of(model, inputs, targets)
                if where == "own collective" and optim.num_steps < 4:  # All ranks have data.
                    ctx.reduce(loss.detach())
                loss.backward()
                if is_victim and optim.num_steps == dies_at and where == "step":
                    die()
                optim.step()
                schedule.step()
                optim.zero_grad()
                ledger.taken[optim.num_steps] = numbers.tolist()
                ledger.epochs[optim.num_steps] = epoch
                world_sizes.append(ctx.world_size)
                ctx.report(epoch=epoch)
                if is_victim and optim.num_steps == dies_at and where == "own collective":
                    die()
    assert call_of(ctx).recovery is not None
    return Told(
        os.getpid(),
        ctx.rank,
        ctx.world_size,
        [p.detach().clone() for p in model.parameters()],
        ledger.taken,
        optim.num_steps,
        optim.param_groups[0]["lr"],
        len(calls),
        ledger.epochs,
        world_sizes,
        call_of(ctx).recovery.bytes_moved - moved_before,
        sum(kept.numel for kept in optimizer_engine_of(optim).shard.held().ranges),
    )


def assert_equal(told: list[Told], num_epochs: int = 1, num_of_the_dead: int | None = None) -> None:
    """num_of_the_dead: samples that the victim has used in steps that count; None: not known."""
    for one in told[1:]:
        assert all(map(torch.equal, one.parameters, told[0].parameters))
        assert one.num_steps == told[0].num_steps
        assert one.learning_rate == told[0].learning_rate
    # One factor for each step that counts, none lost and none twice.
    assert told[0].learning_rate == pytest.approx(LEARNING_RATE * 0.9 ** told[0].num_steps)
    for epoch in {epoch for one in told for epoch in one.epochs.values()}:
        taken = taken_in(told, epoch)
        assert len(set(taken)) == len(taken), f"a sample counts twice in epoch {epoch}"
    if num_of_the_dead is not None:
        total = sum(len(numbers) for one in told for numbers in one.taken.values())
        assert total + num_of_the_dead == num_epochs * NUM_SAMPLES, "and none is left out"


def taken_in(told: list[Told], epoch: int) -> list[int]:
    return [
        number
        for one in told
        for step, numbers in one.taken.items()
        if one.epochs[step] == epoch
        for number in numbers
    ]


@pytest.fixture(autouse=True)
async def _forget_calls(session: cl.Session) -> AsyncIterator[None]:
    yield
    await session.run(lambda ctx: calls.clear())


async def test_a_death_at_a_collective_of_the_users_own_runs_the_function_again(
    session: cl.Session,
) -> None:
    """Rank 1 dies behind a step; the others wait for it in `ctx.reduce`."""
    told = await session.run(train, dies_on=1, dies_at=3, where="own collective")
    assert {one.world_size for one in told} <= {2, 3}
    assert_equal(told, num_of_the_dead=3 * BATCH_SIZE)
    assert any(one.calls == 2 for one in told)


async def train_in_a_coroutine(ctx: cl.Context) -> Told:
    await asyncio.sleep(0)
    return train(ctx, dies_on=1, dies_at=3, where="own collective")


@pytest.mark.slow
async def test_a_coroutine_runs_again_with_what_it_has_registered(session: cl.Session) -> None:
    told = await session.run(train_in_a_coroutine)
    assert_equal(told, num_of_the_dead=3 * BATCH_SIZE)
    assert any(one.calls == 2 for one in told)


@pytest.mark.promise("a new worker")
async def test_a_new_worker_comes_in_while_the_others_train(
    session: cl.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Report] = []
    monkeypatch.setattr(session, "_on_report", reports.append)
    told = await session.run(train, dies_on=1, dies_at=3, where="step", num_epochs=24, step_s=0.05)
    assert [one.world_size for one in told] == [3, 3, 3]
    assert_equal(told, num_epochs=24, num_of_the_dead=3 * BATCH_SIZE)
    assert sorted(one.calls for one in told) == [1, 2, 2]  # The newcomer's is its first.
    assert told[0].world_sizes[-1] == 3
    steps = [report.step for report in reports if report.rank == 1]
    assert steps == sorted({*steps}), "the new worker continues the numbers of its reports"
    last = next(report for report in reversed(reports) if report.rank == 1)
    assert last.taken > 3, "they reach the session, and count the run's steps"
    # The lost rank's ledger is gone, with what it had taken before it died. Of the other epochs,
    # that in which the new worker came among them, every sample counts once.
    for epoch in range(1, 24):
        assert sorted(taken_in(told, epoch)) == [*range(NUM_SAMPLES)], f"epoch {epoch}"
    # Two ranks had all of it in two copies: nothing moves but what the third keeps from now on,
    # in float64: the numbers that are stepped, and two moments of each.
    (newcomer,) = [one for one in told if one.calls == 1]
    assert newcomer.bytes_moved == 0
    assert sum(one.bytes_moved for one in told) == newcomer.kept_numel * 3 * 8 > 0


def train_by_name(ctx: cl.Context, data: Any, folder: str, fails: bool) -> None:
    """Rank 1 dies once; `fails`: rank 0 fails behind two steps of the ranks and a new one."""
    died = Path(folder, "died")
    is_whole_again = died.exists() and ctx.world_size == 3
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1)))
    optim = ctx.register(
        "optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=1e-6, replicas=2)
    )
    diary = Diary(folder, os.getpid())
    for number, epoch in enumerate(ctx.epochs(24, resume=folder)):
        taken = 0
        with cl.Join([model, optim], skew_warning=None):
            for numbers in ctx.shard(data, BATCH_SIZE, epoch=epoch):
                time.sleep(0.05 * patience(number, ctx) if fails else 0.0)
                # In a whole epoch: in the rest of one a rank may be alone with its second batch.
                if fails and is_whole_again and number > 0 and taken == 2:
                    ctx.barrier()  # All ranks have noted the step before.
                    if ctx.rank == 0:
                        raise LookupError("a slip of the user's")
                model(numbers.float()[:, None]).mean().backward()
                if ctx.rank == 1 and optim.num_steps == 3 and not died.exists():
                    died.touch()
                    die()
                optim.step()
                optim.zero_grad()
                diary.note((epoch, numbers.tolist()))
                taken += 1


@pytest.mark.parametrize("kind", ["dataset", pytest.param("stream", marks=pytest.mark.slow)])
async def test_a_named_loop_goes_on_after_a_run_that_lost_a_rank_and_got_another(
    session: cl.Session, tmp_path: Path, kind: str
) -> None:
    with cl.Stream(range(NUM_SAMPLES)) as stream:
        told = {"data": stream if kind == "stream" else list(range(NUM_SAMPLES))}
        with pytest.raises(LookupError, match="a slip"):
            await session.run(train_by_name, **told, folder=str(tmp_path), fails=True)
        await session.run(train_by_name, **told, folder=str(tmp_path), fails=False)
    used = Counter[tuple[int, int]]()
    for path in tmp_path.glob("*.diary"):
        for epoch, numbers in Diary(str(tmp_path), int(path.stem)).read():
            used.update((epoch, number) for number in numbers)
    assert used == Counter(itertools.product(range(24), range(NUM_SAMPLES)))


async def test_with_too_few_workers_the_run_waits_for_new_ones_and_says_so(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    progress = cl.Progress(console=Console(file=said, width=200))
    has_been_seen = asyncio.Event()
    come = Recruiter._newcomer

    async def come_when_it_has_been_seen(recruiter: Recruiter, seat: int) -> Any:
        await has_been_seen.wait()
        return await come(recruiter, seat)

    async def look() -> list[str]:
        """Where a person would look while nothing happens."""
        while "paused" not in progress._plain_line():
            await asyncio.sleep(0.05)
        driver = (await session.snapshot()).driver
        assert driver is not None
        has_been_seen.set()
        return [str(driver), headline(session.name, driver), progress._plain_line()]

    monkeypatch.setattr(Recruiter, "_newcomer", come_when_it_has_been_seen)
    options = {"timeout_s": 20, "max_failures": 1, "pause_s": 250, "progress": progress}
    async with cl.Session(2, resources_per_worker={"CPU": 0.1}, **options) as session:
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(look(), name="look")
            told = await session.run(train, dies_on=1, dies_at=3, where="step")
        assert [one.world_size for one in told] == [2, 2]
        driver = (await session.snapshot()).driver
        assert driver is not None
        assert driver.pause is None
    assert_equal(told)
    waits = r"waiting for 1 more worker of at least 2, \d+ s of 250 s"
    for place, line in zip(["run 0", f"{session.name}: run 0", ""], looking.result(), strict=True):
        assert re.search(f"{place} paused, {waits}", line)
    assert re.search(f"the run is paused, {waits}\n", said.getvalue())
    assert "paused" not in progress._plain_line()


@pytest.mark.slow
async def test_a_function_that_registers_nothing_cannot_run_again(cluster: None) -> None:
    few = {"CPU": 0.1}
    async with cl.Session(2, resources_per_worker=few, timeout_s=20, max_failures=1) as session:
        with pytest.raises(WorkerLost, match="has not registered its model and its ZeroRedund"):
            await session.run(train, dies_on=1, dies_at=3, where="step", registers=False)


@pytest.mark.promise("all ranks that kept a shard die at once")
async def test_when_a_shard_is_lost_the_run_goes_back_to_the_last_checkpoint(
    cluster: None, tmp_path: Path
) -> None:
    few = {"CPU": 0.1}
    saves = cl.CheckpointConfig(tmp_path, every_n_steps=3)
    async with cl.Session(
        (1, 3), resources_per_worker=few, timeout_s=20, checkpoint=saves
    ) as session:
        # Slow enough for the checkpoint of step 3 to be whole before step 5 is lost.
        told = await session.run(
            train, dies_on=1, dies_at=4, where="step", num_epochs=2, replicas=1, step_s=0.3
        )
    assert_equal(told, num_epochs=2)
    # Once for the loss, and once more where a third rank has come meanwhile.
    assert min(sorted(one.calls for one in told)[-2:]) >= 2, "the function has run again"
    # The checkpoint has three ledgers. Two ranks load two of them; what is in the third is missing,
    # up to the step that was saved, unless a third rank has come by then.
    lost = sorted(set(range(NUM_SAMPLES)) - set(taken_in(told, 0)))
    hand = cl.deal(NUM_SAMPLES, world_size=3)[2]
    assert lost in ([], sorted(hand[: 3 * BATCH_SIZE]))
    # A run that has gone back counts from less than 0; its next checkpoints can be resumed from.
    storage = Folder(str(tmp_path))
    written = [read_manifest(storage, name).progress for name in listing(storage).written]
    assert any(part["steps_before"] < 0 for progress in written for part in progress), written
    for progress in written:
        FunctionCall.check_progress(progress)


async def test_a_run_that_began_afresh_does_not_go_back_to_another_runs_checkpoint(
    cluster: None, ranks_of: Callable[[int], ReusedRanks], tmp_path: Path
) -> None:
    ranks_of(1).run(run_train, cl.CheckpointConfig(tmp_path), {"until": 1, "save_at": 1})
    assert listing(Folder(str(tmp_path))).written
    few, afresh = {"CPU": 0.1}, cl.CheckpointConfig(tmp_path, resume="never")
    async with cl.Session(
        (1, 2), resources_per_worker=few, timeout_s=20, checkpoint=afresh
    ) as session:
        with pytest.raises(StateLost, match="no rank holds bucket"):
            await session.run(train, dies_on=1, dies_at=2, where="step", replicas=1)


@pytest.mark.parametrize(
    "sharded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "sharded"]
)
async def test_every_schedule_goes_on_as_without_the_loss(
    session: cl.Session, tmp_path: Path, sharded: bool
) -> None:
    whole, *_ = await session.run(train_scheduled, sharded=sharded)
    lost, *_ = await session.run(train_scheduled, sharded=sharded, dies_at=5, folder=str(tmp_path))
    assert (tmp_path / "died").exists()
    assert lost["options"].keys() == SCHEDULES.keys()
    for part in ("step", "options", "schedules"):
        assert lost[part] == whole[part]
    assert torch.equal(lost["draw"], whole["draw"])
    for name, weight in whole["weights"].items():
        assert torch.allclose(lost["weights"][name], weight, atol=1e-6), name
    assert torch.allclose(lost["average"], whole["average"], atol=1e-6)
