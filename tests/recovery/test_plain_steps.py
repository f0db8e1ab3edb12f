"""A worker is killed while plain optimizers step: the others go on from the furthest of them.

What they end with is compared with one process that takes the same steps over the same samples.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import chorusline as cl
from chorusline.actors.errors import WorkerLost
from chorusline.runtime.program.context import call_of
from tests.references.killed_runs import PHASES, Diary, Lines
from tests.references.plain_runs import (
    MOMENTS,
    PlainKind,
    assert_as_one_process,
    attempts_at,
    train_plain,
)
from tests.references.training_to_kill import die

DEATHS = [moment for moment in MOMENTS if not moment.startswith(("is ", "when it has asked"))]


@pytest.mark.promise("SIGKILL of a worker at any instant of a step", "samples")
@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        pytest.param(moment, victim, marks=[] if number % 3 == victim else pytest.mark.slow)
        for number, moment in enumerate(DEATHS)
        for victim in range(3)
    ],
)
async def test_a_death_costs_no_step_and_no_sample(
    session: cl.Session, tmp_path: Path, moment: str, victim: int
) -> None:
    kind = PlainKind()
    acts = {(0, victim): (2, moment)}
    told = await session.run(train_plain, kind=kind, folder=str(tmp_path), acts=acts)
    assert {one.num_recoveries for one in told} >= {1}
    assert_as_one_process(kind, str(tmp_path), told)


@pytest.mark.parametrize(
    "left", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
async def test_a_step_that_one_rank_has_taken_and_another_was_left_in_counts(
    session: cl.Session, tmp_path: Path, left: int
) -> None:
    kind = PlainKind(batch_norm=True, schedule=True)
    victim = (left + 1) % 3
    acts = {(0, left): (3, "is left"), (0, victim): (3, "after the step")}
    told = await session.run(train_plain, kind=kind, folder=str(tmp_path), acts=acts)
    assert_as_one_process(kind, str(tmp_path), told)
    assert len(attempts_at(str(tmp_path))[3]) == 1, "it was not taken again"


@pytest.mark.slow
async def test_a_step_that_only_the_dead_have_taken_is_taken_again(
    session: cl.Session, tmp_path: Path
) -> None:
    kind = PlainKind(batch_norm=True)
    acts = {(0, 0): (3, "after the step"), (0, 1): (3, "is left"), (0, 2): (3, "is left")}
    told = await session.run(train_plain, kind=kind, folder=str(tmp_path), acts=acts)
    assert_as_one_process(kind, str(tmp_path), told)
    assert len(attempts_at(str(tmp_path))[3]) == 2


@pytest.mark.slow
async def test_a_step_that_all_have_agreed_on_and_none_has_taken_is_taken_again(
    session: cl.Session, tmp_path: Path
) -> None:
    """In a collective of the function's own, which comes between; buffers are those of before."""
    kind = PlainKind(reduces_first=True, batch_norm=True, num_samples=60)
    acts = {(0, 0): (3, "when it has the result")}
    told = await session.run(train_plain, kind=kind, folder=str(tmp_path), acts=acts)
    assert_as_one_process(kind, str(tmp_path), told)
    assert len(attempts_at(str(tmp_path))[3]) == 2


@pytest.mark.slow
async def test_a_loss_before_the_first_step_leaves_no_trace_in_buffers(
    session: cl.Session, tmp_path: Path
) -> None:
    kind = PlainKind(batch_norm=True)
    acts = {(0, 2): (0, "before the gradients are sent")}
    told = await session.run(train_plain, kind=kind, folder=str(tmp_path), acts=acts)
    assert_as_one_process(kind, str(tmp_path), told)


def reports_each_step(ctx: cl.Context, folder: str) -> None:
    """Rank 1 is killed once, when its fifth report was heard."""
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(2, 1)))
    optim = ctx.register("optim", torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.ones(60, 2)
    for epoch in ctx.epochs(1):
        with cl.Join([model], step_along=[optim], skew_warning=None):
            for number, batch in enumerate(ctx.shard(rows, batch_size=2, epoch=epoch), 1):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
                ctx.report(pid=os.getpid())
                if ctx.rank == 1 and number == 5 and not (died := Path(folder) / "died").exists():
                    died.touch()
                    time.sleep(1.0)
                    die()
                if ctx.world_size == 1:
                    time.sleep(1.0)  # A worker that starts slowly finds the run not over.


async def test_a_worker_that_comes_counts_its_reports_as_the_others_do(
    cluster: None, tmp_path: Path
) -> None:
    """Trackers take the number of a report for the step, where no optimizer of a session steps."""
    heard: list[cl.Report] = []
    async with cl.Session(
        (1, 2), spares=1, resources_per_worker={"CPU": 0.1}, on_report=heard.append
    ) as session:
        await session.run(reports_each_step, folder=str(tmp_path))
    first: dict[int, int] = {}
    for one in heard:
        first.setdefault(one.values["pid"], one.step)
    assert len(first) == 3 and max(first.values()) >= 5


KINDS = {
    "a norm with buffers": PlainKind(batch_norm=True),
    "a norm over all ranks": PlainKind(batch_norm=True, sync_norm=True),
    "float32": PlainKind(dtype=torch.float32),
    "SGD with momentum": PlainKind(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "a schedule": PlainKind(schedule=True),
    "a scaled loss": PlainKind(scaler=True),
    "accumulation": PlainKind(accumulate=2),
    "one bucket": PlainKind(bucket_cap_mb=25.0),
    "a collective before the step": PlainKind(reduces_first=True, batch_norm=True, num_samples=60),
    "a hook": PlainKind(sends=torch.float32, joins=False, num_samples=60, tolerance=1e-5),
    "a hook of torch's": PlainKind(
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9},
        torch_hook=True,
        joins=False,
        num_samples=60,
        tolerance=1e-3,
    ),
    "a hook that halves": PlainKind(
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9},
        sends=torch.bfloat16,
        joins=False,
        num_samples=60,
        tolerance=1e-2,
    ),
    "a loop that may be resumed": PlainKind(resumes=True),
    "joined ranks that do not step": PlainKind(torch.optim.SGD, {"lr": 0.05}, along=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before it has the result", "before it steps"])
@pytest.mark.parametrize("name", KINDS)
async def test_a_death_costs_nothing_in_any_kind_of_training(
    session: cl.Session, tmp_path: Path, name: str, moment: str
) -> None:
    kind = KINDS[name]
    told = await session.run(
        train_plain, kind=kind, folder=str(tmp_path), acts={(0, 1): (3, moment)}
    )
    assert_as_one_process(kind, str(tmp_path), told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "acts",
    [
        {(0, 1): (3, "before it has the result")},
        {(0, 1): (3, "after the step"), (0, 2): (3, "is left")},
        # It has told the reader of step 2 by then, which the others take again.
        {
            (0, 0): (3, "when it has asked for more rows"),
            (0, 1): (2, "is left"),
            (0, 2): (2, "is left"),
        },
    ],
    ids=["before", "taken by one", "taken by the dead"],
)
async def test_a_death_costs_no_row_of_a_stream(
    session: cl.Session, tmp_path: Path, acts: dict[tuple[int, int], tuple[int, str]]
) -> None:
    """Which can be read once for each epoch."""
    kind = PlainKind()
    with cl.Stream(Lines()) as stream:
        told = await session.run(
            train_plain, kind=kind, folder=str(tmp_path), acts=acts, stream=stream
        )
    assert_as_one_process(kind, str(tmp_path), told)


def steps_after_its_loop(
    ctx: cl.Context, folder: str, moment: str, sharded: bool, data: Any
) -> None:
    """A step for each epoch, after the loop over its batches. Rank 1 dies in the second epoch."""
    is_first = not any(Path(folder).glob("*.died"))
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1)))
    optim: Any = torch.optim.SGD(model.parameters(), lr=1e-6)
    if sharded:
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=1e-6, replicas=2)
    ctx.register("optim", optim)
    diary = Diary(folder, os.getpid())
    for epoch in ctx.epochs(2):
        numbers: list[int] = []
        for batch in ctx.shard(data, 2, epoch=epoch):
            numbers += batch.tolist()
            # It is not known which batch of a stream is the last one.
            with model.no_sync():
                model(batch.float()[:, None]).mean().backward()
        model(torch.ones(1, 1)).mean().backward()
        if is_first and epoch == 1 and ctx.rank == 1:
            (Path(folder) / f"{os.getpid()}.died").touch()
            if moment == "in the step":
                PHASES["before it votes (3)"](optim)
            elif moment == "before it":
                die()
        if moment != "in the step":
            ctx.reduce(1.0)
        optim.step()
        optim.zero_grad()
        diary.note((epoch, numbers))
        ctx.barrier()  # All have noted it.
        if moment == "after it" and is_first and epoch == 1 and ctx.rank == 1:
            die()


@pytest.mark.parametrize("source", ["dataset", pytest.param("stream", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sharded", "moment"),
    [
        (False, "before it"),
        pytest.param(False, "after it", marks=pytest.mark.slow),
        (True, "in the step"),
        pytest.param(True, "before it", marks=pytest.mark.slow),
        pytest.param(True, "after it", marks=pytest.mark.slow),
    ],
)
async def test_a_death_costs_no_sample_of_a_loop_before_its_step(
    session: cl.Session, tmp_path: Path, sharded: bool, moment: str, source: str
) -> None:
    """The loop is over, so it has to begin again to give the samples of the lost rank."""
    with cl.Stream(torch.arange(24)) as stream:
        await session.run(
            steps_after_its_loop,
            folder=str(tmp_path),
            moment=moment,
            sharded=sharded,
            data=stream if source == "stream" else torch.arange(24),
        )
    assert [*tmp_path.glob("*.died")]
    assert used_in(tmp_path) == Counter(itertools.product(range(2), range(24)))


def used_in(folder: Path) -> Counter[tuple[int, int]]:
    """By epoch and number, how often the steps that counted had a sample."""
    return Counter(
        (epoch, number)
        for path in folder.glob("*.diary")
        for epoch, numbers in Diary(str(folder), int(path.stem)).read()
        for number in numbers
    )


def registers_late(ctx: cl.Context) -> list[str]:
    """What is said of it."""
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1)))
    optim = ctx.register("optim", torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, batch in enumerate(ctx.shard(torch.ones(12, 1), batch_size=2)):
            model(batch).sum().backward()
            optim.step()
            optim.zero_grad()
            if number == 0:
                ctx.register("average", AveragedModel(model.module))
    return [str(one.message) for one in caught]


async def test_what_is_registered_after_a_step_is_warned_of(session: cl.Session) -> None:
    told = await session.run(registers_late)
    words = "'average' is registered after a step"
    assert [sum(words in one for one in of_rank) for of_rank in told] == [1, 0, 0]


def skips_batches(ctx: cl.Context, folder: str, dies_at: int) -> None:
    """A batch whose step fails is skipped, as one that is out of memory. Rank 1 dies once."""
    is_first = not (died := Path(folder) / "died").exists()
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1)))
    optim = ctx.register("optim", torch.optim.SGD(model.parameters(), lr=1e-6))
    diary = Diary(folder, os.getpid())
    for epoch in ctx.epochs(2):
        for number, batch in enumerate(ctx.shard(torch.arange(72), 2, epoch=epoch)):
            if is_first and ctx.rank == 1 and number == dies_at:
                died.touch()
                die()
            try:
                model(batch.float()[:, None]).mean().backward()
                optim.step()
            except RuntimeError:
                continue
            finally:
                optim.zero_grad()
            diary.note((epoch, batch.tolist()))


@pytest.mark.parametrize("dies_at", [3, pytest.param(0, marks=pytest.mark.slow)])
async def test_a_body_that_skips_a_batch_whose_step_fails_does_not_skip_all_after_a_death(
    session: cl.Session, tmp_path: Path, dies_at: int
) -> None:
    await session.run(skips_batches, folder=str(tmp_path), dies_at=dies_at)
    assert (tmp_path / "died").exists()
    assert used_in(tmp_path) == Counter(itertools.product(range(2), range(72)))


def predicts_when_it_has_trained(ctx: cl.Context) -> int:
    """Nothing is registered. After a step each rank reads data by itself, and rank 1 dies there."""
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in ctx.shard(torch.ones(3, 1), 1):
        model(batch).sum().backward()
        optim.step()
    num_read = 0
    for batch in ctx.shard(torch.ones(30, 1), 2):
        if ctx.rank == 1 and num_read == 4:
            die()
        while num_read == 4 and ctx.group.failure() is None:
            time.sleep(0.01)
        assert model.module(batch).isfinite().all()
        num_read += len(batch)
    return num_read


async def test_a_function_that_has_trained_and_reads_data_returns_when_another_rank_has_died(
    session: cl.Session,
) -> None:
    assert await session.run(predicts_when_it_has_trained) == [10, 10]


@pytest.mark.slow
async def test_one_death_after_another(session: cl.Session, tmp_path: Path) -> None:
    kind = PlainKind(batch_norm=True)
    acts = {(0, 2): (2, "before it steps"), (1, 0): (2, "before it has the result")}
    told = await session.run(train_plain, kind=kind, folder=str(tmp_path), acts=acts)
    assert_as_one_process(kind, str(tmp_path), told)


@pytest.mark.slow
async def test_the_same_module_wrapped_again_starts_from_the_furthest_rank(
    session: cl.Session, tmp_path: Path
) -> None:
    """Not from rank 0, which was left in the step."""
    kind = PlainKind(batch_norm=True)
    acts = {(0, 0): (3, "is left"), (0, 2): (3, "after the step")}
    told = await session.run(
        train_plain, kind=kind, folder=str(tmp_path), acts=acts, module=kind.network()
    )
    assert_as_one_process(kind, str(tmp_path), told)
    assert len(attempts_at(str(tmp_path))[3]) == 1


def never_returns_alike(ctx: cl.Context, folder: str) -> list[int]:
    """Rank 0 has returned when rank 1 dies, and rank 2 is left in the last step."""
    (Path(folder) / f"{ctx.generation}-{ctx.rank}").touch()
    assert call_of(ctx).recovery is not None
    is_first = call_of(ctx).recovery.num_recoveries == 0
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False)))
    optim = ctx.register("optim", torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5))
    batches = 0
    for _ in ctx.epochs(1):
        for batch in ctx.shard(torch.ones(18, 1), batch_size=2):
            batches += 1
            if is_first and batches == 3 and ctx.rank == 2:
                MOMENTS["is left"](model, optim)
            if is_first and batches == 3 and ctx.rank == 1:
                MOMENTS["after the step"](model, optim)
            model(batch).mean().backward()
            optim.step()
            optim.zero_grad()
    return [batches, float(optim.state[model.module.weight]["momentum_buffer"])]


@pytest.mark.slow
async def test_who_has_returned_leads_those_that_were_left_in_the_last_step(
    session: cl.Session, tmp_path: Path
) -> None:
    told = await session.run(never_returns_alike, folder=str(tmp_path))
    assert len({path.name.split("-")[0] for path in tmp_path.iterdir()}) >= 2, "it ran again"
    # Nothing was left to do, and the momentum is that of three steps: 1, 1.5, 1.75.
    assert told == [[0, 1.75]] * len(told)


def train_a_pair(
    ctx: cl.Context, victim: int, which: int, moment: str, sharded: bool, together: bool
) -> Any:
    """Two models that step with each batch. victim: dies in what it does with model `which`.
    sharded: the first one's optimizer. together: both backward passes come before both steps."""
    assert call_of(ctx).recovery is not None
    is_first = call_of(ctx).recovery.num_recoveries == 0
    torch.manual_seed(0)
    models, optims = [], []
    for name in ("generator", "judge"):
        layer = torch.nn.Linear(1, 1, bias=False).double()
        models.append(ctx.register(name, cl.DistributedDataParallel(layer)))
        optim: Any = torch.optim.AdamW(models[-1].parameters(), lr=0.1)
        if sharded and name == "generator":
            optim = cl.ZeroRedundancyOptimizer(models[-1], torch.optim.AdamW, lr=0.1, replicas=2)
        optims.append(ctx.register(f"{name}_optim", optim))

    def pass_back(i: int, batch: torch.Tensor) -> None:
        models[i](batch).square().mean().backward()

    def step(i: int, _: torch.Tensor) -> None:
        optims[i].step()
        optims[i].zero_grad()

    for _ in ctx.epochs(1):
        for number, batch in enumerate(ctx.shard(torch.ones(60, 1).double(), batch_size=2)):
            if is_first and number == 3 and ctx.rank == victim:
                MOMENTS[moment](models[which], optims[which])
            if together:
                todo = [pass_back, pass_back, step, step]
            else:
                todo = [pass_back, step, pass_back, step]
            for act, i in zip(todo, [0, 1, 0, 1] if together else [0, 0, 1, 1], strict=True):
                act(i, batch)
    steps = [
        optim.num_steps
        if isinstance(optim, cl.ZeroRedundancyOptimizer)
        else int(optim.state[model.module.weight]["step"])
        for model, optim in zip(models, optims, strict=True)
    ]
    return steps, [model.module.weight.item() for model in models]


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize("moment", ["before it has the result", "after the step"])
async def test_of_two_models_each_goes_on_where_the_furthest_rank_was(
    session: cl.Session, moment: str, which: int, sharded: bool, together: bool
) -> None:
    """All samples are alike, so a parameter tells how often it was stepped."""
    told = await session.run(
        train_a_pair, victim=1, which=which, moment=moment, sharded=sharded, together=together
    )
    steps, weights = told[0]
    assert all(one == told[0] for one in told)
    # Between the steps of the two, the second is left out for the samples of that batch.
    assert steps[0] - steps[1] in (0, 1)
    torch.manual_seed(0)
    for count, weight in zip(steps, weights, strict=True):
        layer = torch.nn.Linear(1, 1, bias=False).double()
        optim = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for _ in range(count):
            layer(torch.ones(2, 1).double()).square().mean().backward()
            optim.step()
            optim.zero_grad()
        assert weight == pytest.approx(layer.weight.item(), rel=1e-12)


@pytest.mark.slow
async def test_a_new_worker_comes_in_between_two_steps(session: cl.Session, tmp_path: Path) -> None:
    kind = PlainKind(batch_norm=True, schedule=True, num_epochs=20)
    acts = {(0, 1): (2, "before it steps")}
    told = await session.run(train_plain, kind=kind, folder=str(tmp_path), acts=acts, step_s=0.05)
    assert [one.world_size for one in told] == [3, 3, 3]
    assert max(one.num_recoveries for one in told) == 2
    assert_as_one_process(kind, str(tmp_path), told)


@pytest.mark.slow
async def test_a_worker_that_is_told_to_end_leaves(session: cl.Session, tmp_path: Path) -> None:
    kind = PlainKind(batch_norm=True, schedule=True, num_epochs=3)
    acts = {(0, 1): (2, "is told to end")}
    told = await session.run(train_plain, kind=kind, folder=str(tmp_path), acts=acts, step_s=0.1)
    pids = {int(path.stem) for path in tmp_path.glob("*.diary")}
    assert pids - {one.pid for one in told}, "one has left"
    assert_as_one_process(kind, str(tmp_path), told)


@pytest.mark.slow
async def test_checkpoints_are_made_at_the_same_steps_as_if_nothing_was(
    cluster: None, tmp_path: Path
) -> None:
    """Rank 0 dies after step 3, whose checkpoint is due, and before it saves. The functions of the
    others are left there, and where a worker comes in."""
    kind, few = PlainKind(batch_norm=True, num_epochs=4), {"CPU": 0.1}
    folder, place = tmp_path / "diaries", tmp_path / "checkpoints"
    folder.mkdir()
    saves = cl.CheckpointConfig(place, every_n_steps=3)
    async with cl.Session(
        (1, 3), resources_per_worker=few, timeout_s=20, checkpoint=saves
    ) as session:
        acts = {(0, 0): (2, "after the step")}
        told = await session.run(train_plain, kind=kind, folder=str(folder), acts=acts, step_s=0.05)
    assert_as_one_process(kind, str(folder), told)
    saved = {int(path.name.split("-")[1]): path for path in place.iterdir() if path.is_dir()}
    assert saved.keys() == set(range(3, told[0].num_steps + 1, 3))
    # One that resumes from it takes the steps after it as one process does.
    again = tmp_path / "diaries again"
    again.mkdir()
    for path in folder.glob("*.diary"):
        before = Diary(str(again), int(path.stem))
        for entry in Diary(str(folder), int(path.stem)).read():
            if entry[2] < 3:
                before.note(entry)
    resumes = cl.CheckpointConfig(tmp_path / "other checkpoints", resume=str(saved[3]))
    async with cl.Session((1, 2), resources_per_worker=few, checkpoint=resumes) as session:
        told = await session.run(train_plain, kind=kind, folder=str(again), acts={})
    told = [replace(one, steps_taken=one.steps_taken + 3) for one in told]
    assert_as_one_process(kind, str(again), told)


def refused(ctx: cl.Context, what: str) -> None:
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(3, 1)))
    optim: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if what == "a closure that is called often":
        optim = torch.optim.LBFGS(model.parameters(), lr=0.01)
    if what != "an optimizer that is not registered":
        ctx.register("optim", optim)
    calls = []

    def loss() -> torch.Tensor:
        calls.append(1)
        if ctx.rank == 1 and len(calls) == 7:
            MOMENTS["before it has the result"](model, optim)
        optim.zero_grad()
        loss = model(torch.arange(6.0).view(2, 3)).square().mean()
        with model.no_sync() if "alone" in what and len(calls) < 4 else contextlib.nullcontext():
            loss.backward()
        return loss

    for _ in range(20):
        optim.step(loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "why"),
    [
        (
            "an optimizer that is not registered",
            "no registered optimizer has parameter weight of the DistributedDataParallel over "
            "Linear; register the optimizer that steps it",
        ),
        ("steps of a rank alone", "optimizer 'optim' has stepped .* that were not reduced"),
        ("a closure that is called often", "'optim' was interrupted inside step.*as LBFGS does"),
    ],
)
async def test_what_cannot_go_on_says_why(session: cl.Session, what: str, why: str) -> None:
    with pytest.raises(WorkerLost, match=why):
        await session.run(refused, what=what)
