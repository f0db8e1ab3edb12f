"""Deaths when the ranks are not in the same place: one is a step ahead, one has returned."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.runtime.program.context import call_of
from chorusline.runtime.recovery.last_checkpoint import newest
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.references.killed_runs import (
    NUM_SAMPLES,
    PHASES,
    Kind,
    Net,
    Samples,
    assert_as_if_nothing_was,
    die,
    look_in_vain,
    one_thread,
    train,
    wrap,
)


def at_step(optim: Any, ballots: int, do: Callable[[], None]) -> None:
    """Call `do` when the step begins before which there were so many."""
    original = optimizer_engine_of(optim).take_step

    def take_step(*told: Any, **more: Any) -> None:
        if optimizer_engine_of(optim).progress.ballots == ballots:
            do()
        original(*told, **more)

    optimizer_engine_of(optim).take_step = take_step


def is_slow(ballots: int) -> Callable[[cl.Context, Any], None]:
    """In that step, the rank hands its parameters out, looks for the others' when one of those has
    died, and finds nothing: as between hosts, where a death takes along what was on its way."""

    def act(ctx: cl.Context, optim: Any) -> None:
        look = functools.partial(look_in_vain, ctx, optim)
        at_step(
            optim,
            ballots,
            lambda: wrap(optimizer_engine_of(optim).shard, "start_gather", then=look),
        )

    return act


def dies_after(ballots: int, seconds: float = 1.0) -> Callable[[cl.Context, Any], None]:
    """When that step is over here."""

    def later() -> None:
        time.sleep(seconds)
        die()

    return lambda ctx, optim: at_step(
        optim, ballots, lambda: wrap(optimizer_engine_of(optim), "_try_step", then=later)
    )


def misses_the_ballot(ballots: int) -> Callable[[cl.Context, Any], None]:
    """In that step the rank votes, and the generation ends before it has read what came out."""

    def act(ctx: cl.Context, optim: Any) -> None:
        def lose() -> None:
            while (failure := ctx.group.failure()) is None:
                time.sleep(0.01)
            raise failure

        at_step(optim, ballots, lambda: wrap(optimizer_engine_of(optim)._ballot, "hold", then=lose))

    return act


def saves(act: Callable[[cl.Context, Any], None] | None = None) -> Callable[[Any, Any], None]:
    """Has something to save, and does the rest."""

    def register(ctx: cl.Context, optim: Any) -> None:
        ctx.register("optim", optim)
        if act is not None:
            act(ctx, optim)

    return register


def saves_by_itself(
    act: Callable[[cl.Context, Any], None] | None = None,
) -> Callable[[Any, Any], None]:
    """As `saves`, by ctx.save() after each of the first five steps."""

    def register(ctx: cl.Context, optim: Any) -> None:
        saves(act)(ctx, optim)
        optim.register_step_post_hook(lambda *_: ctx.save() if ctx.step <= 5 else None)

    return register


ONE_BUCKET = Kind(bucket_cap_mb=25.0, num_epochs=1)


async def test_a_death_before_the_first_step_after_a_death_repeats_no_sample(
    session: cl.Session, tmp_path: Path
) -> None:
    victims = {0: (2, "before it votes (3)"), 1: (2, "when it has recovered")}
    acts = {1: lambda ctx, optim: wrap(call_of(ctx).recovery, "recover", then=die)}
    told = await session.run(
        train, kind=ONE_BUCKET, folder=str(tmp_path), victims=victims, acts=acts
    )
    assert [one.world_size for one in told] == [1]
    assert_as_if_nothing_was(ONE_BUCKET, str(tmp_path), told, victims)


@pytest.mark.promise("SIGKILL of a worker at any instant of a step")
@pytest.mark.parametrize("misses", [0, 2])
async def test_a_ballot_that_one_survivor_has_seen_counts_for_the_one_that_has_not(
    session: cl.Session, tmp_path: Path, misses: int
) -> None:
    kind = Kind(num_epochs=1)
    victims = {1: (2, "when it has seen the ballot")}
    acts = {misses: misses_the_ballot(2)}
    told = await session.run(train, kind=kind, folder=str(tmp_path), victims=victims, acts=acts)
    assert [one.world_size for one in told] == [2, 2]
    assert_as_if_nothing_was(kind, str(tmp_path), told, victims)


def parameters_after_each_step(ctx: cl.Context) -> list[list[torch.Tensor]]:
    """Rank 1 dies in the third step, and rank 2 gets nothing of what the others gather then."""
    seat = ctx.rank
    model = cl.DistributedDataParallel(Net().double())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.01, replicas=2)
    if seat == 2:
        is_slow(2)(ctx, optim)
    told = []
    for step in range(4):
        model(torch.full((2, 5), 1.0 + seat + step, dtype=torch.float64)).sum().backward()
        if seat == 1 and step == 2:
            PHASES["when it has seen the ballot"](optim)
        optim.step()
        optim.zero_grad()
        told.append([p.detach().clone() for p in model.parameters()])
    return told


async def test_parameters_that_were_on_their_way_are_gathered_again(cluster: None) -> None:
    """Of three that are left no rank keeps all shards, as one of two would with their replicas."""
    few = {"CPU": 0.1}
    async with cl.Session((3, 4), resources_per_worker=few, timeout_s=15) as session:
        told = await session.run(parameters_after_each_step)
    assert len(told) == 3
    for of_step in zip(*told, strict=True):
        for other in of_step[1:]:
            assert all(map(torch.equal, other, of_step[0]))


def notes_in_recovery(path: Path, name: str, after_s: float) -> Callable[[cl.Context, Any], None]:
    """When a rank has moved what it has to, `after_s` later, or is about to enter."""

    def note() -> None:
        time.sleep(after_s)
        path.write_text(str(time.monotonic()))

    when = {"_move": "then", "_enter": "first"}[name]
    return lambda ctx, optim: wrap(call_of(ctx).recovery.in_place, name, **{when: note})


async def test_no_rank_enters_a_generation_before_all_have_what_they_will_keep(
    session: cl.Session, tmp_path: Path
) -> None:
    """Who enters drops what another may still have to be sent."""
    moved, entered = tmp_path / "moved", tmp_path / "entered"
    victims = {1: (2, "before it votes (3)")}
    acts = {
        0: notes_in_recovery(entered, "_enter", 0.0),
        2: notes_in_recovery(moved, "_move", 0.5),
    }
    await session.run(train, kind=ONE_BUCKET, folder=str(tmp_path), victims=victims, acts=acts)
    assert float(entered.read_text()) >= float(moved.read_text())


async def test_who_is_behind_takes_the_last_step_that_another_has_begun(
    session: cl.Session, tmp_path: Path
) -> None:
    # 61 samples in batches of 4: rank 0 has a sixth, alone. Rank 2 still gathers the fifth step.
    victims = {1: (5, "when the others have nothing left")}
    acts = {1: dies_after(4), 2: is_slow(4)}
    told = await session.run(
        train, kind=ONE_BUCKET, folder=str(tmp_path), victims=victims, acts=acts
    )
    assert [one.world_size for one in told] == [2, 2]
    assert_as_if_nothing_was(ONE_BUCKET, str(tmp_path), told, victims)


@pytest.mark.parametrize("every", [1, None], ids=["every step", "ctx.save()"])
async def test_a_step_that_one_rank_has_saved_before_the_loss_is_saved_by_no_other(
    cluster: None, tmp_path: Path, every: int | None
) -> None:
    # Rank 2 still gathers the fifth step, which rank 0 saves meanwhile.
    victims = {1: (5, "when the others have nothing left")}
    saving = saves if every else saves_by_itself
    acts = {0: saving(), 1: saving(dies_after(4)), 2: saving(is_slow(4))}
    config = cl.CheckpointConfig(tmp_path / "checkpoints", every_n_steps=every)
    folder = tmp_path / "notes"
    folder.mkdir()
    async with cl.Session(
        (2, 3),
        resources_per_worker={"CPU": 0.1},
        timeout_s=15,
        checkpoint=config,
    ) as session:
        told = await session.run(
            train, kind=ONE_BUCKET, folder=str(folder), victims=victims, acts=acts
        )
    assert [one.world_size for one in told] == [2, 2]
    assert_as_if_nothing_was(ONE_BUCKET, str(folder), told, victims)
    assert f"/step-0000000{6 if every else 4}-" in (newest(config) or "")


async def test_who_has_returned_helps_another_to_end_its_last_step(
    session: cl.Session, tmp_path: Path
) -> None:
    victims = {1: (6, "when another has returned")}
    acts = {
        0: is_slow(5),
        1: dies_after(5),
        # What the function had made is garbage then.
        2: lambda ctx, optim: wrap(call_of(ctx).recovery, "finish", first=gc.collect),
    }
    told = await session.run(
        train, kind=ONE_BUCKET, folder=str(tmp_path), victims=victims, acts=acts
    )
    assert [one.world_size for one in told] == [2, 3]  # As they were when the function returned.
    assert_as_if_nothing_was(ONE_BUCKET, str(tmp_path), told, victims)


# ── Two models ───────────────────────────────────────────────────────────────────────────────────

NUM_STEPS = 6


def critic() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 17), torch.nn.Tanh(), torch.nn.Linear(17, 1)
    ).double()


def losses_of(
    maker: torch.nn.Module, judge: torch.nn.Module, numbers: list[int], samples: Samples
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    inputs, real = samples.inputs[numbers], samples.targets[numbers]

    def of_judge() -> torch.Tensor:
        return judge(maker(inputs).detach()).square().mean() + (judge(real) - 1).square().mean()

    return of_judge, lambda: (judge(maker(inputs)) - 1).square().mean()


def numbers_of(seat: int, step: int) -> list[int]:
    return [(seat * 20 + step * 3 + i) % NUM_SAMPLES for i in range(3)]


def train_two(
    ctx: cl.Context,
    acts: dict[int, Callable[[cl.Context, Any, Any], None]],
) -> list[torch.Tensor]:
    """A critic and what it judges. The second backward pass goes through the first model, too:
    gradients that nobody steps with."""
    seat, samples = ctx.rank, Samples()
    maker = cl.DistributedDataParallel(Net().double(), bucket_cap_mb=0.004)
    judge = cl.DistributedDataParallel(critic(), bucket_cap_mb=0.0005)
    of_maker = cl.ZeroRedundancyOptimizer(maker, torch.optim.AdamW, lr=0.02, replicas=2)
    of_judge = cl.ZeroRedundancyOptimizer(judge, torch.optim.SGD, lr=0.1, momentum=0.9, replicas=2)
    acts.get(seat, lambda *_: None)(ctx, of_maker, of_judge)
    for step in range(NUM_STEPS):
        judge_loss, maker_loss = losses_of(maker, judge, numbers_of(seat, step), samples)
        of_judge.zero_grad()
        judge_loss().backward()
        of_judge.step()
        of_maker.zero_grad()
        maker_loss().backward()
        of_maker.step()
    return [p.detach().clone() for p in (*maker.parameters(), *judge.parameters())]


@one_thread()
def reference_of_two(last: dict[int, tuple[int, int]]) -> list[torch.Tensor]:
    """last: by seat, how many steps of the judge and of the maker count."""
    maker, judge, samples = Net().double(), critic(), Samples()
    of_maker = torch.optim.AdamW([p for p in maker.parameters() if p.requires_grad], lr=0.02)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        for which, (model, optim) in enumerate([(judge, of_judge), (maker, of_maker)]):
            seats = [seat for seat in range(3) if last[seat][which] > step]
            total: dict[Any, torch.Tensor] = {}
            for seat in seats:
                model.zero_grad()
                losses_of(maker, judge, numbers_of(seat, step), samples)[which]().backward()
                for p in model.parameters():
                    if p.grad is not None:
                        total[p] = total[p] + p.grad if p in total else p.grad.clone()
            for p in model.parameters():
                p.grad = total[p] / len(seats) if p in total else None
            optim.step()
    return [p.detach() for p in (*maker.parameters(), *judge.parameters())]


def dies_in(which: str, ballots: int, phase: str) -> Callable[[cl.Context, Any, Any], None]:
    def act(ctx: cl.Context, of_maker: Any, of_judge: Any) -> None:
        optim = of_maker if which == "maker" else of_judge
        owner, name = {
            "reduces": (optimizer_engine_of(optim).reducer, "wait"),
            "votes": (None, "hold"),
            "gathers": (optimizer_engine_of(optim).shard, "start_gather"),
        }[phase]
        first = die if phase == "votes" else None
        at_step(
            optim,
            ballots,
            lambda: wrap(owner or optimizer_engine_of(optim)._ballot, name, first=first, then=die),
        )

    return act


TWO = [
    ("judge", "reduces", (2, 2)),
    ("judge", "votes", (2, 2)),
    ("judge", "gathers", (3, 2)),
    ("maker", "reduces", (3, 2)),
    ("maker", "votes", (3, 2)),
    ("maker", "gathers", (3, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize(("which", "phase", "counted"), TWO)
async def test_two_models_and_their_optimizers_go_on(
    session: cl.Session,
    which: str,
    phase: str,
    counted: tuple[int, int],
    victim: int,
) -> None:
    acts = {victim: dies_in(which, 2, phase)}
    told = await session.run(train_two, acts=acts)
    assert len(told) == 2
    assert all(map(torch.equal, told[0], told[1]))
    last = {seat: counted if seat == victim else (NUM_STEPS, NUM_STEPS) for seat in range(3)}
    assert all(map(torch.equal, told[0], reference_of_two(last)))
