"""A rank runs the function by itself up to its first step, with what another one has kept."""

from __future__ import annotations

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.actors.messages.admission import GivenReplayLog, ReadyToken
from chorusline.actors.messages.messages import Assignment, RunRequest
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.ray_calls.actor_store import ActorStore
from chorusline.actors.reporting.report_buffer import ReportBuffer
from chorusline.actors.worker.current_run import CurrentRun
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.actors.worker.worker import Worker
from chorusline.collectives.contract.endpoint import Endpoint
from chorusline.collectives.contract.errors import GroupAborted
from chorusline.collectives.dry_run import DryRunGroup, DryRunRefused
from chorusline.collectives.kept_results import KeepingCommunicator
from chorusline.collectives.objects.payloads import pickled
from chorusline.collectives.stores.store import HashStore
from chorusline.runtime.program.context import call_of
from chorusline.runtime.program.program import FunctionRun, Program
from chorusline.runtime.recovery.arrivals import Arrivals
from chorusline.runtime.recovery.live_objects import LiveObjects
from chorusline.runtime.recovery.state_transfer import digest_of, why_not_within
from tests.harness.gpus import OnGpu5
from tests.harness.stand_in_gpu.runs import Driver, _Call, in_run
from tests.references.script_values import ScriptState, told_after

HEARD: list[Any] = []
"""What the function has heard in this process before its last first step."""


class Points:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((4,), float(number))


def train(ctx: cl.Context) -> tuple[list[Any], GivenReplayLog, ReadyToken]:
    """Takes the replay log in its second epoch."""
    seed = {"seed": 3 + ctx.rank, "drawn by": os.getpid()}
    HEARD[:] = [ctx.broadcast(seed), ctx.reduce(2.0 * ctx.rank), ctx.step]
    ctx.barrier()
    recovery = call_of(ctx).recovery
    assert recovery is not None
    torch.manual_seed(HEARD[0]["seed"])
    model = cl.DistributedDataParallel(torch.nn.Linear(4, 2))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1, replicas=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
    script = ScriptState()
    named = (("model", model), ("optim", optim), ("schedule", schedule), ("script", script))
    for name, one in named:
        ctx.register(name, one)
    HEARD.append(script.told())
    asked, iteration = None, ""
    for epoch in ctx.epochs(2):
        HEARD.append((epoch, ctx.reduce(epoch + ctx.rank, "max"), schedule.last_epoch))
        for step in ctx.steps(Points(), 8, 2, epoch=epoch):
            assert not isinstance(ctx.group._communicator, KeepingCommunicator)
            for batch in step:
                model(batch).square().mean().backward()
            optim.step()
            schedule.step()
            script.change()
            optim.zero_grad()
            if (epoch, step.number) == (1, 1):
                asked = recovery.arrivals.give_replay_log()
            if asked is not None and asked.done() and not iteration:
                assert recovery.arrivals.steps is not None
                iteration = recovery.arrivals.steps.iteration
    assert asked is not None
    # The worker that comes is one more.
    token = ReadyToken(iteration, digest_of(recovery._objects), ctx.world_size + 1)
    return list(HEARD), asked.result(), token


def _trains(group: Any) -> Any:
    return in_run(group, train, goes_on=True)


class Called(Exception):
    pass


class Waiting(Driver):
    """The driver of a worker in its dry run: it hears where that waits, and calls it off."""

    token: ReadyToken | None = None

    @property
    def dry_run_ready(self) -> _Call:
        return _Call(self._dry_run_ready)

    def _dry_run_ready(
        self, run: int, worker_id: str, token: ReadyToken, endpoint: Endpoint | None
    ) -> None:
        self.token = token
        assert self.lifeline is not None
        self.lifeline.stop(GroupAborted(0, [], "enough"))


def begin_dry_run(function: Any, replay_log: bytes, size: int, rank: int) -> Waiting:
    driver = Waiting()
    assignment = Assignment(0, rank, size, rank, size, 0)
    request = RunRequest(0, 5.0, False, max_failures=None)
    group = DryRunGroup(
        rank, size, torch.device("cpu"), generation=0, timeout_s=5.0, store=HashStore()
    )
    driver.lifeline = Lifeline(request, driver, assignment, lambda: group)  # type: ignore[arg-type]
    program = Program(function, {}, None)
    status = RunStatus()
    with pytest.raises(GroupAborted, match="enough"):
        program(
            assignment, group, ReportBuffer(keep=False), driver.lifeline, status, None, replay_log
        )
    assert status.taken == 5  # Of three steps in an epoch, behind the second of the second one.
    return driver


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_comes_to_the_step_of_the_others_by_itself(ranks_of: Any, rank: int) -> None:
    """In the place of rank 0, which has sent, or of none."""
    (heard, replay_log, token), (other, _, same) = ranks_of(2).run(_trains)
    assert not replay_log.why_not and token == same
    assert heard == other and heard[0]["seed"] == 3 and heard[1] == 1.0
    driver = begin_dry_run(train, replay_log.payload, 3, rank)
    assert driver.token == token
    # What stands before the loop, and in the body of the epoch that is under way.
    assert [*heard[:2], 5, told_after(5), (1, 2, 5)] == HEARD
    assert heard[-1] == (1, 2, 3)


def test_a_replay_log_brings_no_tensor_to_the_gpu_of_the_rank_that_gave_it() -> None:
    lifeline: Any = SimpleNamespace(survives_loss=False)
    run = FunctionRun(
        Program(train, {}), ReportBuffer(keep=False), lifeline, RunStatus(), is_newcomer=False
    )
    given: list[Any] = []
    recovery: Any = SimpleNamespace(begin_as_newcomer=given.append)
    run._recovery = recovery
    run.begin_dry_run(pickled([OnGpu5()]), torch.device("meta"))
    assert given[0][0]._untyped_storage.device.type == "meta"


def unlike(ctx: cl.Context) -> None:
    ctx.reduce(1.0, "max")


def test_a_function_that_asks_for_something_else_cannot_have_a_dry_run(ranks_of: Any) -> None:
    (_, replay_log, _), _ = ranks_of(2).run(_trains)
    with pytest.raises(DryRunRefused, match="cannot give"):
        begin_dry_run(unlike, replay_log.payload, 3, 2)


# -- what a worker that comes would lack -----------------------------------------------------------


def scale_losses(ctx: cl.Context, registers: bool, unlike: str) -> str:
    """Why no worker could come between two steps; or the error. unlike: what differs by rank."""
    torch.manual_seed(0)
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(4, 2)))
    optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1))
    differs = 1.0 + ctx.rank
    scaler = cl.GradScaler(optim, init_scale=4.0 * (differs if unlike == "scale" else 1.0))
    if registers:
        ctx.register("scaler", scaler)
    if unlike == "rate":
        optim.param_groups[0]["lr"] *= differs
    try:
        for step in ctx.steps(Points(), 8, 2):
            for batch in step:
                scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
    except (RuntimeError, cl.CollectiveMismatch) as error:
        return str(error)
    recovery = call_of(ctx).recovery
    assert recovery is not None
    return why_not_within(recovery._objects)


def _scales(group: Any, registers: bool, unlike: str) -> Any:
    return in_run(group, lambda ctx: scale_losses(ctx, registers, unlike), goes_on=True)


@pytest.mark.parametrize("registers", [True, False])
def test_no_worker_comes_between_steps_by_a_scale_that_it_would_not_get(
    alone: cl.Group, registers: bool
) -> None:
    told = _scales(alone, registers, "")
    assert told == ("" if registers else "it has not registered its GradScaler (ctx.register)")


@pytest.mark.parametrize("unlike", ["scale", "rate"])
def test_the_error_for_ranks_that_differ_in_steps_names_what_a_worker_that_comes_needs(
    ranks_of: Any, unlike: str
) -> None:
    for told in ranks_of(2).run(_scales, False, unlike):
        assert "ctx.register(" in told and "Join" not in told, told


def asked_to_admit(ctx: cl.Context, num_ranks: int) -> str:
    """What this rank says to a worker with which there would be so many ranks."""
    model = cl.DistributedDataParallel(torch.nn.Linear(4, 2))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    recovery = call_of(ctx).recovery
    assert recovery is not None
    said = "nobody has asked"
    steps = ctx.steps(Points(), 8, 2)
    for step in steps:
        for batch in step:
            model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()
        if step.number == 1:
            token = ReadyToken(steps.iteration, digest_of(recovery._objects), num_ranks)
            said = recovery.arrivals._why_not_now(steps, token)
    return said


@pytest.mark.parametrize("num_ranks", [2, 66, 67])
def test_a_rank_admits_as_many_workers_as_its_buckets_can_be_cut_for(
    alone: cl.Group, num_ranks: int
) -> None:
    said = in_run(alone, lambda ctx: asked_to_admit(ctx, num_ranks), goes_on=True)
    longer = "shards for 67 ranks need longer buckets than were made here"
    assert said == (longer if num_ranks == 67 else "")


async def test_questions_to_a_rank_that_comes_to_no_step_are_answered() -> None:
    """They would fill its control loop: a driver asks again after each timeout."""
    nobody: Any = None
    assignment = Assignment(0, 0, 1, 0, 1, 0)
    request = RunRequest(0, 0.3, False, max_failures=None)
    worker: Any = object.__new__(Worker)
    worker._lock, worker._ended = threading.Lock(), None
    worker._run = run = CurrentRun(
        assignment, request, ActorStore(nobody), ReportBuffer(keep=False), nobody
    )
    run.lifeline = lifeline = Lifeline(request, nobody, assignment, nobody)
    objects = LiveObjects(nobody, nobody, 1)
    lifeline.arrivals = arrivals = Arrivals(lifeline, objects, nobody, nobody)

    async with asyncio.timeout(10):
        questions = (Worker.replay_log(worker, 0) for _ in range(120))
        assert await asyncio.gather(*questions) == [None] * 120
    waiting = arrivals.give_replay_log()
    assert not waiting.done()
    lifeline.let_go()
    assert waiting.result(timeout=0) is None
