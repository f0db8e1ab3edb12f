"""A step counts, its parameters are still under way, and the functions are to run again.

What the loop's body does behind that step reads them: a moving average of the parameters has to
have the bits of one process that takes the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import ray
import torch
from torch.optim.swa_utils import AveragedModel

import chorusline as cl
from chorusline.actors.messages.messages import MemberState
from chorusline.runtime.program.context import call_of
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.references.killed_runs import look_in_vain, one_thread
from tests.references.script_values import ScriptState, told_after
from tests.references.training_to_kill import NUM_SAMPLES, Samples, die

NUM_STEPS, FAILS_IN = 7, 4


def network(with_buffers: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(13) if with_buffers else torch.nn.Identity()
    return torch.nn.Sequential(
        torch.nn.Linear(5, 13), norm, torch.nn.Tanh(), torch.nn.Linear(13, 3)
    ).double()


def numbers_of(seat: int, step: int) -> list[int]:
    return [(seat * 20 + step * 3 + i) % NUM_SAMPLES for i in range(4)]


def loss_of(model: torch.nn.Module, numbers: list[int], samples: Samples) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(samples.inputs[numbers]), samples.targets[numbers])


class Log:
    """Of the steps that count, which seats took each."""

    def __init__(self) -> None:
        self.seats: dict[int, list[int]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seats": self.seats}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seats = dict(state["seats"])


@dataclass
class Told:
    calls: int
    seats: dict[int, list[int]]
    averaged: list[torch.Tensor]
    parameters: list[torch.Tensor]
    num_averaged: int


seats: list[int] = []


def looks_in_vain(ctx: cl.Context, optim: Any) -> None:
    """It hands its parameters out, looks for the others' when one of those has died, and finds
    nothing: as between hosts, where a death takes along what was on its way."""
    original = optimizer_engine_of(optim).shard.start_gather

    def start_gather(portion: Any) -> Any:
        begun = original(portion)
        if (
            optimizer_engine_of(optim).progress.ballots == FAILS_IN
            and portion[-1] == len(optimizer_engine_of(optim).shard.buckets) - 1
        ):
            look_in_vain(ctx, optim)
        return begun

    optimizer_engine_of(optim).shard.start_gather = start_gather


def dies_behind(ctx: cl.Context, optim: Any) -> None:
    original = optimizer_engine_of(optim).take_step

    def take_step(*told: Any, **more: Any) -> None:
        original(*told, **more)
        if optim.num_steps == FAILS_IN:
            time.sleep(0.5)
            die()

    optimizer_engine_of(optim).take_step = take_step


def dies_in(ctx: cl.Context, optim: Any) -> None:
    original = optimizer_engine_of(optim).shard.apply

    def apply(*arguments: Any) -> None:
        original(*arguments)
        if optimizer_engine_of(optim).progress.ballots == FAILS_IN:
            die()

    optimizer_engine_of(optim).shard.apply = apply


def waits_for_a_newcomer(ctx: cl.Context, optim: Any) -> None:
    """Before it says how far it is, there is one who wants to take part."""
    assert call_of(ctx).recovery is not None
    lifeline = call_of(ctx).recovery._lifeline
    original = lifeline.regenerate

    def regenerate(*arguments: Any, **more: Any) -> Any:
        if optimizer_engine_of(optim).progress.ballots == FAILS_IN:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                seen = ray.get(lifeline._driver.snapshot.remote())
                if any(state is MemberState.READY for _, state in seen.members):
                    break
                time.sleep(0.1)
        return original(*arguments, **more)

    lifeline.regenerate = regenerate  # type: ignore[method-assign]


def train(
    ctx: cl.Context,
    acts: dict[int, Callable[[cl.Context, Any], None]],
    with_buffers: bool,
    replicas: int = 2,
) -> Told:
    """acts: by seat, what is done in the first call of the function."""
    # Not the rank that it began with, which newcomers that come one by one may share.
    (worker,) = ray._private.worker.global_worker.actors.values()
    seats.append(worker._info.seat)
    seat, samples = seats[0], Samples()
    model = ctx.register(
        "model", cl.DistributedDataParallel(network(with_buffers), bucket_cap_mb=0.0005)
    )
    optim = ctx.register(
        "optim", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.05, replicas=replicas)
    )
    average = ctx.register("average", AveragedModel(model.module))
    log = ctx.register("log", Log())
    script = ctx.register("script", ScriptState())
    if len(seats) == 1 and not optim.num_steps:
        acts.get(seat, lambda *_: None)(ctx, optim)
    while optim.num_steps < NUM_STEPS:
        there = ctx.reduce(1 << seat, "sum")
        loss_of(model, numbers_of(seat, optim.num_steps), samples).backward()
        optim.step()
        log.seats[optim.num_steps] = [one for one in range(3) if there & 1 << one]
        average.update_parameters(model.module)
        script.change()
        optim.zero_grad()
    assert script.told() == told_after(NUM_STEPS)
    return Told(
        len(seats),
        log.seats,
        [t.detach().clone() for t in (*average.module.parameters(), *average.module.buffers())],
        [p.detach().clone() for p in model.parameters()],
        int(average.n_averaged),
    )


@one_thread()
def reference(seats: dict[int, list[int]], with_buffers: bool) -> Any:
    """seats: by step, who took it. The buffers of a step are those of rank 0; of the one that
    nobody could end, of the highest that is left."""
    model, samples = network(with_buffers), Samples()
    average = AveragedModel(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        root = 1 if step == FAILS_IN - 1 else seats[step + 1][0]
        before = [b.clone() for b in model.buffers()]
        after = before
        total = [torch.zeros_like(p) for p in model.parameters()]
        for seat in seats[step + 1]:
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            model.zero_grad()
            loss_of(model, numbers_of(seat, step), samples).backward()
            for so_far, p in zip(total, model.parameters(), strict=True):
                so_far += p.grad
            if seat == root:
                after = [b.clone() for b in model.buffers()]
        for buffer, value in zip(model.buffers(), after, strict=True):
            buffer.copy_(value)
        for so_far, p in zip(total, model.parameters(), strict=True):
            p.grad = so_far / len(seats[step + 1])
        optim.step()
        average.update_parameters(model)
    averaged = [*average.module.parameters(), *average.module.buffers()]
    return [t.detach() for t in averaged], [p.detach() for p in model.parameters()]


def assert_as_reference(told: list[Told], with_buffers: bool) -> None:
    assert all(told[0].seats[step] == [0, 1, 2] for step in range(1, FAILS_IN + 1))
    averaged, parameters = reference(told[0].seats, with_buffers)
    for one in told:
        assert one.num_averaged == NUM_STEPS
        assert all(map(torch.equal, one.parameters, parameters))
        assert all(map(torch.equal, one.averaged, averaged))


@pytest.fixture(autouse=True)
async def _forget_seats(session: cl.Session) -> Any:
    yield
    await session.run(lambda ctx: seats.clear())


async def test_an_average_is_whole_while_another_rank_is_in_a_collective_of_its_own(
    session: cl.Session,
) -> None:
    """Rank 0 lacks the parameters of a step that the others have ended; rank 1 is in ctx.reduce."""
    acts = {0: looks_in_vain, 2: dies_behind}
    told = await session.run(train, acts=acts, with_buffers=False)
    assert max(one.calls for one in told) >= 2, "the functions have run again"
    assert_as_reference(told, with_buffers=False)


def dies_when_they_meet(ctx: cl.Context, optim: Any) -> None:
    from chorusline.runtime.recovery import waiting_steps

    waiting_steps.complete = lambda *arguments: die()


@pytest.mark.slow
async def test_a_death_while_the_parameters_are_sent_begins_it_again(session: cl.Session) -> None:
    """Who waits is alone then, and still in the step."""
    acts = {0: looks_in_vain, 1: dies_when_they_meet, 2: dies_behind}
    told = await session.run(train, acts=acts, with_buffers=False, replicas=3)
    assert_as_reference(told, with_buffers=False)


@pytest.mark.slow
async def test_an_average_is_whole_where_a_worker_comes_while_all_are_in_that_step(
    session: cl.Session,
) -> None:
    acts = {0: waits_for_a_newcomer, 2: dies_in}
    told = await session.run(train, acts=acts, with_buffers=True)
    assert [one.calls for one in told] == [2, 2, 1]
    assert told[0].seats[FAILS_IN + 1] == [0, 1, 2], "who comes has the seat of the dead"
    assert_as_reference(told, with_buffers=True)
