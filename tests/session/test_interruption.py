"""A run that is interrupted stops between two steps, and the next run goes on bit by bit alike."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.actors.messages.messages import RunRequest, RunSucceeded, WorkerSnapshot
from chorusline.actors.worker_group import worker_group
from chorusline.actors.worker_group.worker_group import Stop, WorkerGroup
from chorusline.runtime.process.between_runs import BetweenRuns
from chorusline.runtime.session.holding.local_session import LocalSession
from tests.references.interrupted_runs import (
    SIZES,
    assert_same,
    interrupted_after,
    train,
    uninterrupted,
)

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""A batch that was aborted is taken again, so some rank's BatchNorm has seen it twice."""


@pytest.fixture(autouse=True)
async def _nothing_kept(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    yield
    if "session" in request.fixturenames:
        await request.getfixturevalue("session").run(lambda ctx: ctx.forget())


@pytest.mark.parametrize("kind", ["zero", "plain"])
async def test_a_run_interrupted_twice_goes_on_bit_by_bit_alike(
    session: cl.Session, kind: str
) -> None:
    reference = await uninterrupted(session, kind)
    for wait_s in (0.4, 0.7):  # The second time one rank has no data left, and shadows.
        await interrupted_after(session, wait_s, kind=kind, pause_s=0.04)
    results = await session.run(train, kind=kind, pause_s=0.0)
    assert 0 < results[0]["taken"] < reference[0]["taken"], "it went on, and did not begin anew"
    assert results[0]["generation"] == reference[0]["generation"], "nothing was aborted"
    assert_same(results, reference)
    assert (await session.run(train, kind=kind, pause_s=0.0))[0]["taken"] == 0, "all is done"


class Rank:
    """A worker that takes steps, or takes none."""

    def __init__(self, takes_steps: bool) -> None:
        self.stop_after_step = SimpleNamespace(remote=self._reply)
        self._takes_steps = takes_steps

    async def _reply(self, run: int) -> bool:
        return self._takes_steps


@pytest.mark.parametrize(
    ("stops", "told"),
    [
        ("after its step", "all ranks stopped between the same two steps"),
        ("with one rank less", "all ranks stopped between the same two steps"),
        ("in its step", "no step ended within 2 s, so the run was aborted"),
        ("without steps", "no rank takes steps, so the run was aborted"),
        ("before it begins", "Interrupted: the run was aborted"),
        ("after its end", "Interrupted: the run had ended. The session is ready"),
    ],
)
async def test_an_interrupted_cell_is_told_how_its_run_was_stopped(
    stops: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def outcome() -> RunSucceeded:
        await asyncio.sleep(60 if stops == "in its step" else 0)
        return RunSucceeded(0, (b"", b"")[: 1 if stops == "with one rank less" else 2])

    async def nothing(timeout_s: float) -> None:
        pass

    group: Any = WorkerGroup(
        SimpleNamespace(most=2),  # type: ignore[arg-type]
        2,
        use_gpu=False,
        driver_options={},
        environment={},
        modules=(),
        detached=None,
    )
    group._workers |= {seat: Rank(stops != "without steps") for seat in range(2)}
    group._assemble, group._outcome = nothing, lambda call: call
    group._recruiting = lambda *_: contextlib.nullcontext()
    group._driver = SimpleNamespace(run=SimpleNamespace(remote=lambda *_: outcome()))
    monkeypatch.setattr(worker_group, "STEP_S", 0.05)
    local: Any = LocalSession(cl.Session()._options)
    local.worker_group = group
    for before in (Stop.AFTER_STEP, Stop.IN_STEP):  # Of another run.
        group.last_stop = before
        await group.assemble(0.0)
        if stops == "after its end":
            await group.run(RunRequest(0, 1.0, True), None)
        elif stops != "before it begins":
            call = asyncio.ensure_future(outcome())
            await group._stopped_after_step(0, call)
            call.cancel()
        assert told in local.how_interrupted()


def use_once(
    ctx: cl.Context, data: list[Any], fail_at: int = -1, pause_s: float = 0.0
) -> list[tuple[int, list[list[int]]]]:
    """Over shards of all `data` side by side; by step of all runs its epoch and its samples."""

    def make() -> tuple[Any, Any]:
        model = cl.DistributedDataParallel(torch.nn.Linear(1, 1))
        return model, cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=1e-6)

    model, optim = ctx.keep("both", make)
    used: list[Any] = ctx.keep("used", list)
    taken = 0
    for epoch in ctx.epochs(2, resume="once"):
        with cl.Join([model, optim], skew_warning=None):
            for batches in zip(*(ctx.shard(one, 2, epoch=epoch) for one in data), strict=False):
                if taken == fail_at:
                    ctx.barrier()  # All ranks have noted the step before.
                    if ctx.rank == 0:
                        raise LookupError("a slip of the user's")
                model(torch.cat(batches).float()[:, None]).mean().backward()
                optim.step()
                optim.zero_grad()
                used.append((epoch, [batch.tolist() for batch in batches]))
                taken += 1
                time.sleep(pause_s)
    return used


@pytest.mark.parametrize("kind", ["a stream", "two datasets"])
async def test_runs_that_fail_and_are_stopped_use_each_sample_once(
    session: cl.Session, kind: str
) -> None:
    with cl.Stream(range(41)) as stream:
        data = [stream] if kind == "a stream" else [list(range(41)), list(range(100, 161))]
        for fail_at in (3, 2):  # The second one in the same epoch.
            with pytest.raises(LookupError, match="a slip"):
                await session.run(use_once, data=data, fail_at=fail_at)
        running = asyncio.create_task(session.run(use_once, data=data, pause_s=0.05))
        await asyncio.sleep(0.4)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        told = await session.run(use_once, data=data)
    for epoch in range(2):
        steps = [batches for used in told for at, batches in used if at == epoch]
        assert sorted(number for first, *_ in steps for number in first) == list(range(41))
        beside = [number for _, *others in steps for batch in others for number in batch]
        assert len(set(beside)) == len(beside), "it is longer, and no sample of it came twice"


async def test_a_step_that_does_not_end_is_aborted_and_taken_again(session: cl.Session) -> None:
    reference = await uninterrupted(session, "zero")
    began_at = time.monotonic()
    await interrupted_after(session, 0.6, kind="zero", pause_s=0.0, stuck_at=2)
    assert time.monotonic() - began_at < 6
    results = await session.run(train, kind="zero", pause_s=0.0)
    assert results[1]["generation"] > reference[1]["generation"]
    for name, tensor in reference[0]["state"].items():
        assert name.endswith(_BUFFERS) or torch.equal(results[0]["state"][name], tensor), name
    assert_same(results, [results[1], results[0]])


async def test_kept_models_outlive_a_failure_of_the_function(session: cl.Session) -> None:
    reference = await uninterrupted(session, "plain")
    with pytest.raises(LookupError, match="a slip"):
        await session.run(train, kind="plain", pause_s=0.0, fail_at=9)
    results = await session.run(train, kind="plain", pause_s=0.0)
    assert results[0]["taken"] == reference[0]["taken"] - 9
    assert results[0]["generation"] > reference[0]["generation"]
    for name, tensor in reference[0]["state"].items():
        assert name.endswith(_BUFFERS) or torch.equal(results[0]["state"][name], tensor), name
    assert_same(results, [results[1], results[0]])


def train_with_statistics(ctx: cl.Context, pause_s: float, fail_at: int = -1) -> dict[str, Any]:
    """Statistics over all ranks, and a collective of the body's own behind its step."""

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            torch.nn.Linear(5, 7), cl.SyncBatchNorm(7), torch.nn.Linear(7, 1)
        )
        model = cl.DistributedDataParallel(module)
        return model, cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2)

    model, optim = ctx.keep("both", make)
    told = ctx.group.new_group(range(ctx.world_size))
    keys = [0] * SIZES[0] + [1] * SIZES[1]
    dataset = torch.randn(len(keys), 5, generator=torch.Generator().manual_seed(1))
    taken = 0
    for epoch in ctx.epochs(2, resume="training"):
        with cl.Join([model, optim], groups=[told], skew_warning=None):
            for batch in ctx.shard(dataset, 4, epoch=epoch, keep_together=keys):
                if ctx.rank == 0 and taken == fail_at:
                    raise LookupError("a slip of the user's")
                loss = model(batch).square().mean()
                model.weigh(loss, len(batch)).backward()
                optim.step()
                optim.zero_grad()
                time.sleep(pause_s)
                told.all_reduce(loss.detach()).wait()
                taken += 1
    return {"state": model.module.state_dict(), "taken": taken, "generation": ctx.generation}


async def test_a_rank_that_follows_is_let_go_when_the_others_stop(session: cl.Session) -> None:
    reference = await session.run(train_with_statistics, pause_s=0.0)
    await session.run(lambda ctx: ctx.forget())
    running = asyncio.create_task(session.run(train_with_statistics, pause_s=0.15))
    while not any(
        isinstance(worker, WorkerSnapshot) and worker.status.has_joined
        for worker in (await session.snapshot()).workers
    ):
        await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(LookupError, match="a slip"):  # And the next generation has other groups.
        await session.run(train_with_statistics, pause_s=0.0, fail_at=2)
    results = await session.run(train_with_statistics, pause_s=0.0)
    assert 0 < results[0]["taken"] < reference[0]["taken"] - 2
    assert results[0]["generation"] == reference[0]["generation"] + 1, "only the slip aborted it"
    assert_same(results, reference)


async def test_a_loop_of_ones_own_stops_at_the_next_forward_pass(session: cl.Session) -> None:
    def own_loop(ctx: cl.Context, num_steps: int) -> float:
        def make() -> tuple[Any, Any, dict[str, int]]:
            model = cl.DistributedDataParallel(torch.nn.Linear(2, 1))
            return model, torch.optim.SGD(model.parameters(), lr=0.1), {"step": 0}

        model, optim, at = ctx.keep("all", make)
        while at["step"] < num_steps:
            model(torch.ones(1, 2)).sum().backward()
            optim.step()
            optim.zero_grad()
            time.sleep(0.01 * (1 + ctx.rank))
            at["step"] += 1
        return at["step"]

    running = asyncio.create_task(session.run(own_loop, num_steps=10**6))
    while not all(
        isinstance(worker, WorkerSnapshot) and worker.status.taken > 3
        for worker in (await session.snapshot()).workers
    ):
        await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    steps = await session.run(lambda ctx: ctx.kept["all"][2]["step"])
    assert steps[0] == steps[1] > 0
    assert await session.run(own_loop, num_steps=steps[0] + 3) == [steps[0] + 3] * 2


async def test_the_function_sees_the_interrupt_as_an_error_with_the_step(
    session: cl.Session,
) -> None:
    def watch(ctx: cl.Context) -> None:
        try:
            train(ctx, "zero", 0.02)
        except cl.Interrupted as error:
            ctx.kept["told"] = (error.step, str(error), ctx.reduce(1, "sum"))

    running = asyncio.create_task(session.run(watch))
    await asyncio.sleep(0.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    first, second = await session.run(lambda ctx: ctx.kept["told"])
    assert first == second, "both stopped at the same step, and could still talk"
    step, text, talked = first
    assert f"all ranks stopped after step {step}" in text and "run the function again" in text
    assert step > 0 and talked == 2


async def test_what_a_replaced_worker_has_lost_is_told_on_all_ranks(session: cl.Session) -> None:
    def kept_or_told(ctx: cl.Context) -> str:
        try:
            return ctx.keep("answer", lambda: f"made by rank {ctx.rank}")
        except RuntimeError as error:
            return str(error)

    def die(ctx: cl.Context) -> None:
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.barrier()

    await session.run(kept_or_told)
    with pytest.raises(cl.WorkerLost):
        await session.run(die)
    for told in await session.run(kept_or_told):
        assert told.startswith("rank 1 has no object 'answer', but the other ranks do")
        assert "ctx.forget() on all ranks" in told
    await session.run(lambda ctx: ctx.forget("answer"))
    assert await session.run(kept_or_told) == ["made by rank 0", "made by rank 1"]


async def test_ranks_that_remember_different_epochs_say_so(session: cl.Session) -> None:
    def differ(ctx: cl.Context) -> str:
        for _ in ctx.epochs(2, resume="x"):
            pass
        if ctx.rank == 1:
            ctx.forget()
        try:
            return str(list(ctx.epochs(2, resume="x")))
        except RuntimeError as error:
            return str(error)

    for told in await session.run(differ):
        assert "different epochs of 'x' (rank 0: 2, rank 1: 0)" in told


async def test_a_rank_that_has_forgotten_the_epoch_in_progress_is_named(
    session: cl.Session,
) -> None:
    data = [list(range(41))]
    with pytest.raises(LookupError, match="a slip"):
        await session.run(use_once, data=data, fail_at=3)

    def differ(ctx: cl.Context) -> str:
        if ctx.rank == 1:
            ctx.forget()
        try:
            return str(list(ctx.epochs(2, resume="once")))
        except RuntimeError as error:
            return str(error)

    for told in await session.run(differ):
        assert "different epochs of 'once' (rank 0: 0 as rank 0 of 2, rank 1: 0)" in told
        assert "ctx.forget() on all ranks" in told


def leave_a_step_unfinished(group: cl.Group) -> list[tuple[bool, int, bool]]:
    stay = BetweenRuns()
    stay.enter(group)
    stay.put("old", 1)
    stay.begin_applying(group)
    stay.end_applying()
    stay.begin_applying(group)
    stay.enter(group)  # The run ended before the step was applied in full.
    stay.put("new", 2)
    return [stay.age_of("old"), stay.age_of("new"), stay.age_of("none")]


def test_an_unfinished_step_spoils_what_was_made_before_it(
    ranks_of: Callable[[int], Any],
) -> None:
    for ages in ranks_of(2).run(leave_a_step_unfinished):
        assert ages == [(True, 2, True), (True, 0, False), (False, 0, False)]
