"""A worker is killed at every phase of a step, for real, and the others go on as if nothing was.

What they end with is compared, bit by bit, with one process that takes the same steps over the
same samples: nothing may be lost, repeated, or reduced in another order.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from benchmarks.faults.chaos_training import loss_of, network, take_step
from chorusline.actors.errors import StateLost, WorkerLost
from chorusline.actors.fault_plan import Instant
from chorusline.runtime.program.context import call_of
from chorusline.runtime.recovery.recovery import Recovery
from chorusline.runtime.zero.digests.digest_checks import Correction
from chorusline.runtime.zero.shards.parameter_shard import ParameterShard
from chorusline.runtime.zero.zero_redundancy_optimizer import OptimizerEngine, optimizer_engine_of
from tests.references.killed_runs import PHASES, DiesAtALine, wrap
from tests.references.training_to_kill import BATCH_SIZE, LEARNING_RATE, NUM_SAMPLES, Samples, die


@dataclass
class Told:
    """What a rank returns. taken: by step that counts, the samples of this rank in it."""

    pid: int
    rank: int
    world_size: int
    parameters: list[torch.Tensor]
    taken: dict[int, list[int]]
    ids_of_the_lost: list[int]
    num_steps: int
    state_numel: int
    corrections: list[Correction]
    recovery: InRecovery


@dataclass
class InRecovery:
    """What happens to a rank in the recovery in place. instants: of the fault plan, in which it has
    been. bytes_moved: that it has sent. came_to_keep: elements that it keeps since."""

    instants: list[Instant]
    bytes_moved: int = 0
    came_to_keep: int = 0

    @classmethod
    def noted(cls, recovery: Recovery) -> InRecovery:
        told = cls([])
        for instant in INSTANTS:
            recovery.faults.at(instant, lambda instant=instant: told.instants.append(instant))
        return told


INSTANTS = [
    Instant.MEET,
    Instant.MOVE,
    Instant.ENTER,
    Instant.GATHER_AGAIN,
    Instant.RECOVERED,
]


def train(
    ctx: cl.Context,
    victims: dict[int, tuple[int, str | DiesAtALine]],
    replicas: int = 2,
    num_epochs: int = 1,
    in_recovery: dict[int, Callable[[cl.Context], None]] | None = None,
    check_every: int | None = None,
    flips: Sequence[int] = (),
) -> Told:
    """victims: by first rank, the step in which it dies, and the phase. in_recovery: by first rank,
    what is done to its context at the start. flips: steps in which rank 1 finds a bit of its
    replica flipped."""
    first_rank = ctx.rank
    (in_recovery or {}).get(first_rank, lambda _: None)(ctx)
    model = cl.DistributedDataParallel(network(), bucket_cap_mb=0.001)
    optim = cl.ZeroRedundancyOptimizer(
        model,
        torch.optim.AdamW,
        lr=LEARNING_RATE,
        replicas=replicas,
        check_every=check_every,
    )
    taken: dict[int, list[int]] = {}
    lost: list[int] = []
    recovery, parameters = call_of(ctx).recovery, optimizer_engine_of(optim).shard
    assert recovery is not None
    told_of_recovery = InRecovery.noted(recovery)
    told_of_recovery.came_to_keep = -kept_numel(parameters)
    for epoch in ctx.epochs(num_epochs):
        with cl.Join([model, optim], divide_by_initial_world_size=False):
            shard = ctx.shard(Samples(), BATCH_SIZE, epoch=epoch)
            for numbers, inputs, targets in shard:
                loss_of(model, inputs, targets).backward()
                step, phase = victims.get(first_rank, (-1, ""))
                if optim.num_steps == step:
                    (PHASES[phase] if isinstance(phase, str) else phase)(optim)
                if ctx.rank == 1 and optim.num_steps in flips:
                    flip_in_replica(optim)
                optim.step()
                optim.zero_grad()
                taken[optim.num_steps] = numbers.tolist()
            lost += shard.ids_of_the_lost
    state = optim.shard_optimizer.state.values() if optim.shard_optimizer else ()
    told_of_recovery.bytes_moved = recovery.bytes_moved
    told_of_recovery.came_to_keep += kept_numel(parameters)
    return Told(
        os.getpid(),
        ctx.rank,
        ctx.world_size,
        [p.detach().clone() for p in model.parameters()],
        taken,
        lost,
        optim.num_steps,
        sum(t.numel() for s in state for t in s.values() if t.dim() > 0),
        optim.corrections,
        told_of_recovery,
    )


def kept_numel(shard: ParameterShard) -> int:
    return sum(kept.numel for kept in shard.kept())


def flip_in_replica(optim: cl.ZeroRedundancyOptimizer) -> None:
    shard = optimizer_engine_of(optim).shard
    mine = next(mine for mine in shard.pieces[0] if mine.range is not shard.buckets[0].own)
    assert shard.optimizer is not None
    shard.optimizer.state[mine.tensor]["exp_avg"].view(torch.uint8)[5] ^= 4


def assert_equal_and_whole(told: list[Told], num_epochs: int = 1) -> None:
    """All that are left hold the same bits, and every sample was used once in each epoch."""
    assert [one.rank for one in told] == list(range(len(told)))
    for one in told[1:]:
        assert all(map(torch.equal, one.parameters, told[0].parameters))
        assert one.num_steps == told[0].num_steps
        assert one.ids_of_the_lost == told[0].ids_of_the_lost
    # What the survivors took, and what the victims did before they died.
    taken = [n for one in told for numbers in one.taken.values() for n in numbers]
    assert sorted(taken + told[0].ids_of_the_lost) == sorted([*range(NUM_SAMPLES)] * num_epochs)


def reference(told: list[Told], victim: int, num_ranks: int) -> list[torch.Tensor]:
    """One process that takes the same steps over the same samples, and adds in the same order."""
    model = network()
    optim = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    samples = Samples()
    lost = told[0].ids_of_the_lost
    of_survivors = iter(told)
    taken = [
        {n: lost[(n - 1) * BATCH_SIZE : n * BATCH_SIZE] for n in range(1, told[0].num_steps + 1)}
        if rank == victim
        else next(of_survivors).taken
        for rank in range(num_ranks)
    ]
    for step in range(1, told[0].num_steps + 1):
        batches = [numbers for of_rank in taken if (numbers := of_rank.get(step))]
        take_step(model, optim, samples, batches)
    return [p.detach() for p in model.parameters()]


CASES = [
    pytest.param(
        phase,
        victim,
        marks=[] if number % 3 == victim else [pytest.mark.slow],
        id=f"{phase}-{victim}",
    )
    for number, phase in enumerate(PHASES)
    for victim in range(3)
]
"""Every phase on every rank; in the fast suite every phase on one of them."""


@pytest.mark.promise(
    "SIGKILL of a worker at any instant of a step",
    "the survivors' gradients of that step",
    "samples",
    "the surviving processes",
)
@pytest.mark.parametrize(("phase", "victim"), CASES)
async def test_a_killed_worker_costs_no_step_and_no_sample(
    session: cl.Session, phase: str, victim: int
) -> None:
    pids = await session.run(lambda ctx: os.getpid())
    # Digests in no step, in every step, in every second one: a loss is not taken for a flip.
    check_every = (None, 1, 2)[victim]
    told = await session.run(train, victims={victim: (2, phase)}, check_every=check_every)
    assert not any(one.corrections for one in told)
    assert [one.pid for one in told] == pids[:victim] + pids[victim + 1 :]
    assert {one.world_size for one in told} == {2}
    assert_equal_and_whole(told)
    expected = reference(told, victim, num_ranks=3)
    assert all(map(torch.equal, told[0].parameters, expected))
    recoveries = [one.recovery for one in told]
    assert all(one.instants == INSTANTS for one in recoveries)
    # What a survivor had kept stays where it is: only the rest moves, in float64: the numbers that
    # are stepped, and two moments of each.
    moved = sum(one.bytes_moved for one in recoveries)
    assert moved == sum(one.came_to_keep for one in recoveries) * 3 * 8 > 0


def drawn() -> int:
    """A seed that the test prints; CHORUSLINE_TESTS_SEED repeats a run."""
    seed = int(os.environ.get("CHORUSLINE_TESTS_SEED", time.time_ns() % 1_000_000))
    print(f"CHORUSLINE_TESTS_SEED={seed}")
    return seed


@pytest.mark.promise("SIGKILL of a worker at any instant of a step")
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))]
)
async def test_a_worker_killed_at_any_line_of_a_step_costs_no_step_and_no_sample(
    session: cl.Session, number: int
) -> None:
    """The victim and the line, of thousands, are drawn anew in each run."""
    draw = random.Random(drawn() + number)
    victim, fraction = draw.randrange(3), draw.random()
    print(f"rank {victim} dies after {fraction:.4f} of the lines of a step")
    told = await session.run(train, victims={victim: (0, DiesAtALine(fraction))})
    assert {one.world_size for one in told} == {2}
    assert_equal_and_whole(told)
    expected = reference(told, victim, num_ranks=3)
    assert all(map(torch.equal, told[0].parameters, expected))


_MEMORY = "/memfd:chorusline (deleted)"


def memories_after(ctx: cl.Context, victims: dict[int, Any]) -> tuple[str, list[str]]:
    """After a training: where its group has met, and the memory of groups that is still open."""
    train(ctx, victims=victims)
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # The one by which they are listed.
            opened.append(str(descriptor.readlink()))
    return ctx.group._store.prefix, [name for name in opened if name.startswith(_MEMORY)]


async def test_ranks_of_one_host_meet_again_without_a_store(session: cl.Session) -> None:
    victims = {1: (1, "before it votes (3)"), 0: (3, "before it votes (3)")}
    told = await session.run(memories_after, victims=victims)
    [(place, memories)] = told
    assert place.endswith("/0"), "an attempt to meet in the store has another number"
    assert memories == [_MEMORY]


async def test_flips_before_and_after_a_loss_leave_no_trace(session: cl.Session) -> None:
    told = await session.run(
        train, victims={0: (2, "before it votes (3)")}, check_every=1, flips=(1, 4)
    )
    assert_equal_and_whole(told)
    assert all(map(torch.equal, told[0].parameters, reference(told, 0, num_ranks=3)))
    for one in told:
        found = [(wrong.step, wrong.rank, wrong.what) for wrong in one.corrections]
        assert found == [(1, 1, "optimizer state"), (4, 1, "optimizer state")]


@pytest.mark.slow
async def test_one_death_after_another_leaves_one_that_has_everything(session: cl.Session) -> None:
    phase = "when it has seen the ballot"
    told = await session.run(train, victims={0: (1, phase), 2: (4, phase)}, num_epochs=2)
    assert [one.world_size for one in told] == [1]
    assert_equal_and_whole(told, num_epochs=2)


def dies_before_it_deals(ctx: cl.Context) -> None:
    assert call_of(ctx).recovery is not None
    wrap(call_of(ctx).recovery.in_place, "deal", first=die)


def dies_before_it_sends(ctx: cl.Context) -> None:
    wrap(ParameterShard, "complete", first=die)


def dies_before_it_connects(ctx: cl.Context) -> None:
    assert call_of(ctx).recovery is not None
    wrap(call_of(ctx).recovery._lifeline, "connect", first=die)


IN_RECOVERY = {
    "before it meets the others (c)": dies_before_it_connects,
    "before it sends what moves (d)": dies_before_it_sends,
    "before it deals the samples (e)": dies_before_it_deals,
}


@pytest.mark.promise("a second death while the ranks recover from the first")
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=[pytest.mark.slow] if "(d)" in moment else [])
        for moment in IN_RECOVERY
    ],
)
async def test_a_death_while_the_others_recover_from_a_death_is_survived(
    session: cl.Session, moment: str
) -> None:
    told = await session.run(
        train,
        victims={0: (2, "after they are reduced")},
        in_recovery={1: IN_RECOVERY[moment]},
        # When ranks 0 and 1 are gone, two copies of rank 0's shard are.
        replicas=3,
    )
    assert [one.world_size for one in told] == [1]
    assert_equal_and_whole(told)


@pytest.mark.promise("all ranks that kept a shard die at once")
async def test_without_replicas_the_lost_state_is_named(session: cl.Session) -> None:
    with pytest.raises(StateLost) as raised:
        await session.run(train, victims={1: (2, "before it votes (3)")}, replicas=1)
    assert "no rank holds bucket 0[" in str(raised.value)
    assert "replicas=2" in str(raised.value)
    assert "before that, rank 1 died (worker in seat 1 (pid" in raised.value.__notes__[-1]


@pytest.mark.slow
async def test_more_losses_than_allowed_end_the_run(cluster: None) -> None:
    few = {"CPU": 0.1}
    async with cl.Session((2, 2), resources_per_worker=few, timeout_s=20) as session:
        with pytest.raises(
            WorkerLost,
            match=r"rank 1 \(pid .*\) died after step 2: its process (was killed|has ended)",
        ):
            await session.run(train, victims={1: (2, "before it votes (3)")})


def evaluate_for_long(ctx: cl.Context) -> int:
    """Rank 2 dies when all begin to compute without collectives, for longer than the others have
    time to freeze."""
    model = cl.DistributedDataParallel(network())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, replicas=2)
    for step in range(3):
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optim.step()
        optim.zero_grad()
        if step == 0:
            if ctx.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(9)
    return optim.num_steps


@pytest.mark.slow
async def test_ranks_that_evaluate_for_long_after_a_loss_are_not_killed(cluster: None) -> None:
    few = {"CPU": 0.1}
    async with cl.Session((1, 3), resources_per_worker=few, timeout_s=4) as session:
        assert await session.run(evaluate_for_long) == [3, 3]


def raise_on_rank_1(ctx: cl.Context) -> None:
    model = cl.DistributedDataParallel(network())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(3):
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        if ctx.rank == 1 and step == 1:
            raise ValueError("a mistake of the user's")
        optim.step()


async def test_an_exception_of_the_function_is_not_survived(session: cl.Session) -> None:
    with pytest.raises(ValueError, match="a mistake of the user's"):
        await session.run(raise_on_rank_1)


def stop_on_rank_1(ctx: cl.Context) -> Told:
    """In the third step, which has a short deadline; the meetings before and after it, in which a
    busy machine may take its time, have the session's."""

    def prepare(context: cl.Context) -> None:
        original = OptimizerEngine._try_step

        def stepped(engine: OptimizerEngine, is_live: bool) -> None:
            if engine.optimizer.num_steps == 1:
                context.group.timeout_s = 3.0  # Of what is issued from now on.
            if engine.optimizer.num_steps == 2 and first_rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            original(engine, is_live)

        OptimizerEngine._try_step = stepped  # type: ignore[method-assign]

    first_rank = ctx.rank
    return train(ctx, {}, in_recovery=dict.fromkeys(range(3), prepare))


@pytest.mark.promise("a stopped process, a network that carries nothing any more")
async def test_a_stopped_process_is_killed_and_survived(cluster: None) -> None:
    few = {"CPU": 0.1}
    async with cl.Session((1, 3), resources_per_worker=few, timeout_s=30) as session:
        told = await session.run(stop_on_rank_1)
    assert [one.world_size for one in told] == [2, 2]
    assert_equal_and_whole(told)
