"""A rank dies inside a step of `ctx.steps`: the others compute its micro-batches in the same step.

What they end with has the bits of one worker, which nothing happened to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from benchmarks.proofs.invariance_training import digest
from tests.references.killed_runs import PHASES
from tests.references.stepped_runs import Enough, Told, train
from tests.references.stepped_training import points_of
from tests.references.training_to_kill import die

_ALONE: dict[Any, Told] = {}


async def told_alone(**options: Any) -> Told:
    """What one worker ends with."""
    key = tuple(sorted(options.items()))
    if key not in _ALONE:
        few = {"CPU": 0.1}
        async with cl.Session(1, resources_per_worker=few, timeout_s=20) as session:
            [_ALONE[key]] = await session.run(train, victims={}, replicas=1, **options)
    return _ALONE[key]


def assert_same(told: list[Told], alone: Told) -> None:
    assert {one.parameters for one in told} == {alone.parameters}
    assert {one.noise for one in told} == {alone.noise}
    assert {one.num_steps for one in told} == {alone.num_steps}
    assert told[0].state == alone.state


CASES = [
    pytest.param(phase, number % 3, marks=[] if number % 4 == 0 else [pytest.mark.slow], id=phase)
    for number, phase in enumerate(["in a micro-batch", "after the loop", *PHASES])
]


@pytest.mark.parametrize(("phase", "victim"), CASES)
async def test_a_death_in_a_step_brings_the_others_its_micro_batches(
    session: cl.Session, cluster: None, phase: str, victim: int
) -> None:
    alone = await told_alone()
    told = await session.run(train, victims={victim: (2, phase)})
    assert {one.world_size for one in told} == {2}
    assert_same(told, alone)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model_name", ["transformer", "normalised"])
async def test_one_death_after_another_leaves_one_that_has_everything(
    session: cl.Session, cluster: None, model_name: str
) -> None:
    options: dict[str, Any] = {"model_name": model_name, "max_norm": 0.05}
    options |= {"num_samples": 54, "micro_batch_size": 4}
    alone = await told_alone(**options)
    victims = {0: (1, "in a micro-batch"), 2: (4, "when it has seen the ballot")}
    told = await session.run(train, victims=victims, **options)
    assert [one.world_size for one in told] == [1]
    assert_same(told, alone)


@pytest.mark.parametrize(
    "phase", ["in a micro-batch", pytest.param("after the loop", marks=pytest.mark.slow)]
)
async def test_with_a_plain_optimizer_the_step_is_taken_again_with_the_same_bits(
    session: cl.Session, cluster: None, phase: str
) -> None:
    options = {"sharded": False, "registers": True, "optimizer_name": "sgd"}
    alone = await told_alone(**options)
    told = await session.run(train, victims={1: (2, phase)}, **options)
    assert {one.world_size for one in told} == {2}
    assert_same(told, alone)


@pytest.mark.slow
async def test_a_registered_run_goes_on_in_place_as_well(
    session: cl.Session, cluster: None
) -> None:
    options = {"registers": True, "optimizer_name": "sgd"}
    alone = await told_alone(**options)
    told = await session.run(train, victims={1: (5, "before it votes (3)")}, **options)
    assert_same(told, alone)


async def test_the_rows_of_a_stream_make_the_same_steps(session: cl.Session, cluster: None) -> None:
    with cl.Stream(points_of(53)) as stream:
        few = {"CPU": 0.1}
        async with cl.Session(1, resources_per_worker=few, timeout_s=20) as other:
            [alone] = await other.run(train, victims={}, replicas=1, stream=stream)
    with cl.Stream(points_of(53)) as stream:
        told = await session.run(train, victims={1: (2, "in a micro-batch")}, stream=stream)
    assert {one.world_size for one in told} == {2}
    assert_same(told, alone)
    seen = sorted(x for one in told for own in one.seen.values() for x in own)
    assert set(seen) <= {float(row[0]) for row in points_of(53)}


def train_within_bounds(ctx: cl.Context, victim: int) -> str:
    """In half precision; the body clamps the parameters after each step."""
    torch.manual_seed(3)
    model = cl.DistributedDataParallel(torch.nn.Linear(10, 3).bfloat16())
    replicas = min(2, ctx.world_size)
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01, replicas=replicas)
    for step in ctx.steps(points_of(80), 16, 4):
        for batch in step:
            if step.number == 2 and ctx.rank == victim and ctx.world_size == 3:
                die()
            model(batch.bfloat16()).square().mean().backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.05, 0.05)
    return digest(dict(model.module.state_dict()))


async def test_what_the_body_has_written_to_half_precision_parameters_outlives_a_death(
    session: cl.Session, cluster: None
) -> None:
    async with cl.Session(1, resources_per_worker={"CPU": 0.1}, timeout_s=20) as other:
        alone = await other.run(train_within_bounds, victim=-1)
    assert set(await session.run(train_within_bounds, victim=1)) == set(alone)


class Once:
    """Rows that can be read once, as from a queue."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[Any] = list(points_of(num_rows))

    def __iter__(self) -> Iterator[Any]:
        while self.rows:
            yield self.rows.pop(0)


def train_and_meet(ctx: cl.Context, stream: cl.Stream, victim: int) -> tuple[int, str]:
    """A rank dies in a collective of the function, so it runs again from the top."""
    torch.manual_seed(3)
    model = cl.DistributedDataParallel(torch.nn.Linear(10, 3))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, replicas=2)
    ctx.register("model", model)
    ctx.register("optim", optim)
    begun_in = ctx.generation
    for epoch in ctx.epochs(1):
        for step in ctx.steps(stream, 16, 4, epoch=epoch):
            for batch in step:
                model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
            if step.number == 1 and victim >= 0:
                if ctx.rank == victim and ctx.world_size == 3:
                    die()
                ctx.reduce(1.0)
    return begun_in, digest(dict(model.module.state_dict()))


async def test_functions_that_run_again_lose_no_row_that_can_be_read_once(
    session: cl.Session,
) -> None:
    with cl.Stream(Once(53)) as stream:
        alone = await session.run(train_and_meet, stream=stream, victim=-1)
    with cl.Stream(Once(53)) as stream:
        told = await session.run(train_and_meet, stream=stream, victim=1)
    assert {begun_in for begun_in, _ in told} == {alone[0][0] + 1}
    assert {parameters for _, parameters in told} == {parameters for _, parameters in alone}


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [True, False])
async def test_a_checkpoint_inside_an_epoch_goes_on_at_another_number_of_workers(
    session: cl.Session, cluster: None, tmp_path: Path, sharded: bool
) -> None:
    options = {"sharded": sharded, "registers": True, "optimizer_name": "sgd"}
    alone = await told_alone(**options)
    few = {"CPU": 0.1}
    places = {"storage_path": str(tmp_path), "num_to_keep": 2}
    for number, checkpoint_at in ((2, 2), (3, 5), (1, -1)):
        config = cl.CheckpointConfig(**places)
        async with cl.Session(
            number, resources_per_worker=few, timeout_s=20, checkpoint=config
        ) as other:
            run = other.run(
                train,
                victims={},
                replicas=min(number, 2),
                checkpoint_at=checkpoint_at,
                **options,
            )
            if checkpoint_at >= 0:
                with pytest.raises(Enough):
                    await run
            else:
                told = await run
    assert told[0].parameters == alone.parameters
    assert told[0].state == alone.state
    assert told[0].noise == alone.noise
    assert [*told[0].seen] == [(1, 2), (1, 3)]
