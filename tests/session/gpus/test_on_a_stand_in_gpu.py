"""Sessions whose workers have a stand-in GPU each: placed by Ray, trained, lost and interrupted."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import chorusline as cl
from chorusline.actors.fault_plan import Instant
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.harness.stand_in_gpu.ranks import needs_stand_in
from tests.harness.stand_in_gpu.workers import here, stand_in_gpus
from tests.references import interrupted_runs
from tests.references.killed_runs import PHASES, Kind, assert_as_if_nothing_was, train

pytestmark = needs_stand_in

KIND = Kind(num_epochs=1)
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
async def on_gpus(cluster: None) -> AsyncIterator[cl.Session]:
    few = {"CPU": 0.1}
    with stand_in_gpus(seed=1) as env_vars:
        async with cl.Session(
            (1, 3), use_gpu=True, resources_per_worker=few, timeout_s=TIMEOUT_S, env_vars=env_vars
        ) as session:
            yield session


@pytest.fixture
async def session(on_gpus: cl.Session) -> AsyncIterator[cl.Session]:
    """Three workers, of which runs may lose some, and three again when the test is over."""
    yield on_gpus
    for told in await on_gpus.run(look_at_gpu):
        assert told["misuses"] == []


def look_at_gpu(ctx: cl.Context) -> dict[str, Any]:
    ctx.forget()
    gpu = here().machine()
    return {
        "device": str(ctx.device),
        "backend": ctx.group.backend,
        "ids": ray.get_gpu_ids(),
        "misuses": list(gpu.misuses),
    }


async def test_each_worker_has_a_gpu_and_a_killed_one_costs_no_step_and_no_sample(
    session: cl.Session, tmp_path: Path
) -> None:
    gpus = await session.run(look_at_gpu)
    assert {told["backend"] for told in gpus} == {"nccl"}
    assert all(told["device"].startswith("cuda:") for told in gpus)
    assert len({gpu for told in gpus for gpu in told["ids"]}) == 3
    victims = {1: (2, "before it votes (3)")}
    told = await session.run(train, kind=KIND, folder=str(tmp_path), victims=victims)
    assert {one.world_size for one in told} == {2}
    assert_as_if_nothing_was(KIND, str(tmp_path), told, victims)


def fill_gpu(ctx: cl.Context) -> int:
    ring: list[Any] = [torch.ones(1 << 18, device=ctx.device)]
    ring.append(ring)  # Only the garbage collector frees it.
    return torch.cuda.memory_allocated()


def look_at_memory(ctx: cl.Context) -> tuple[int, int]:
    return torch.cuda.memory_allocated(), here("memory").num_emptied


async def test_a_function_that_has_ended_leaves_nothing_on_the_gpu(session: cl.Session) -> None:
    before = await session.run(look_at_memory)
    most = await session.run(fill_gpu)
    after = await session.run(look_at_memory)
    for (at_first, emptied_before), full, (in_the_end, emptied_after) in zip(
        before, most, after, strict=True
    ):
        assert full >= 4 << 18
        assert max(at_first, in_the_end) < 1 << 10, "scalars of the group"
        assert emptied_after == emptied_before + 2, "once for each function that ended"


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("phase", PHASES)
async def test_a_worker_that_is_killed_in_any_phase_of_a_step_costs_nothing(
    session: cl.Session, tmp_path: Path, phase: str, victim: int
) -> None:
    victims = {victim: (2, phase)}
    told = await session.run(train, kind=KIND, folder=str(tmp_path), victims=victims)
    assert {one.world_size for one in told} == {2}
    assert_as_if_nothing_was(KIND, str(tmp_path), told, victims)


def die_in_nccl(ctx: cl.Context, optim: Any) -> None:
    """In the next generation, when it has met the others in the store."""
    here("nccl").settings.entering = lambda rank: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
async def test_a_worker_that_is_killed_while_nccl_connects_costs_nothing(
    session: cl.Session, tmp_path: Path
) -> None:
    """The others have one lost already, and meet anew; NCCL waits for the second one in vain."""
    kind = Kind(num_epochs=1, replicas=3)
    victims = {1: (2, "before it votes (3)"), 2: (2, "in NCCL")}
    acts = {2: die_in_nccl}
    began_at = time.monotonic()
    told = await session.run(train, kind=kind, folder=str(tmp_path), victims=victims, acts=acts)
    assert time.monotonic() - began_at < TIMEOUT_S, "no deadline had to pass"
    assert {one.world_size for one in told} == {1}
    assert_as_if_nothing_was(kind, str(tmp_path), told, victims)


def die_before_buffers(ctx: cl.Context, optim: Any) -> None:
    engine = optimizer_engine_of(optim)
    sync_buffers, steps = engine.model.sync_buffers, iter(range(3))

    def sync(*args: Any, **kwargs: Any) -> bool:
        if next(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return bool(sync_buffers(*args, **kwargs))

    engine.model.sync_buffers = sync


@pytest.mark.slow
async def test_a_worker_that_is_killed_before_its_buffers_have_come_costs_nothing(
    session: cl.Session, tmp_path: Path
) -> None:
    """The buffers are those of the last rank that took the step, which is the one that dies."""
    kind = Kind(num_epochs=1, batch_norm=True)
    victims = {2: (2, "before its buffers")}
    acts = {2: die_before_buffers}
    told = await session.run(train, kind=kind, folder=str(tmp_path), victims=victims, acts=acts)
    assert {one.world_size for one in told} == {2}
    assert_as_if_nothing_was(kind, str(tmp_path), told, victims)


def hang() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def hang_in_the_third_step(ctx: cl.Context, optim: Any) -> None:
    ctx.group.timeout_s = 5.0
    if ctx.rank == 1:
        optimizer_engine_of(optim).faults.at(Instant.VOTE, hang, 3)


def deadline_of_5_s(ctx: cl.Context, optim: Any) -> None:
    ctx.group.timeout_s = 5.0


@pytest.mark.slow
async def test_a_worker_that_hangs_is_killed_and_costs_nothing(
    session: cl.Session, tmp_path: Path
) -> None:
    victims = {1: (2, "hangs")}
    acts = {0: deadline_of_5_s, 1: hang_in_the_third_step, 2: deadline_of_5_s}
    told = await session.run(train, kind=KIND, folder=str(tmp_path), victims=victims, acts=acts)
    assert {one.world_size for one in told} == {2}
    assert_as_if_nothing_was(KIND, str(tmp_path), told, victims)


def compute_for_ever_in_the_third_step(ctx: cl.Context, optim: Any) -> None:
    """Its process goes on, and answers; its GPU runs one kernel that does not end."""
    faults = optimizer_engine_of(optim).faults
    faults.at(Instant.REDUCE, lambda: here().launch(threading.Event().wait), 3)


@pytest.mark.timeout(240)
async def test_a_kernel_that_never_ends_is_told_with_rank_and_operation_and_costs_nothing(
    session: cl.Session,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rank leaves the first generation as all do; in the second one it does not."""
    holding: Any = session._holder
    monkeypatch.setattr(holding, "_options", replace(holding._options, timeout_s=5.0))
    victims = {1: (2, "computes for ever")}
    acts = {1: compute_for_ever_in_the_third_step}
    told = await session.run(train, kind=KIND, folder=str(tmp_path), victims=victims, acts=acts)
    assert {one.world_size for one in told} == {2}
    assert_as_if_nothing_was(KIND, str(tmp_path), told, victims)
    lines = [line for line in capsys.readouterr().err.splitlines() if "rank 1 (pid" in line]
    killed = re.compile(
        r"step 2: rank 1 \(pid \d+\) died \(the driver ended its process, because it did not "
        r"come to \w+ #\d+ \(.*\) within 5 s, and its function did not stop in time\)\. 2 workers "
        r"continue after .*; no step is lost"
    )
    assert any(map(killed.match, lines)), lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero", "plain"])
async def test_an_interrupted_run_goes_on_bit_by_bit_alike(session: cl.Session, kind: str) -> None:
    reference = await interrupted_runs.uninterrupted(session, kind)
    for wait_s in (0.6, 0.9):
        await interrupted_runs.interrupted_after(session, wait_s, kind=kind, pause_s=0.04)
    results = await session.run(interrupted_runs.train, kind=kind, pause_s=0.0)
    assert 0 < results[0]["taken"] < reference[0]["taken"], "it went on, and did not begin anew"
    assert results[0]["generation"] == reference[0]["generation"], "nothing was aborted"
    interrupted_runs.assert_same(results, reference)
