"""Runs with plain optimizers whose ranks are killed, and one process that takes the same steps.

Every rank notes, in a file that outlives it, what it is about to take, and as which step. A step
that was left and taken again stands there twice: what counts is the generation that came last. One
process then takes those steps over those samples, as for sharded runs (killed_runs.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import chorusline as cl
from chorusline.runtime.data_parallel.distributed_data_parallel import engine_of
from chorusline.runtime.process.step_boundary import boundary
from chorusline.runtime.program.context import call_of
from tests.references.killed_runs import Diary, Kind, assert_same_parameters, reference, wrap
from tests.references.training_to_kill import BATCH_SIZE, Samples, die


@dataclass(frozen=True)
class PlainKind(Kind):
    """joins: inside Join, else with equally many batches on all ranks. sends: dtype of what a
    communication hook sends, if there is one. reduces_first: a collective of the function's own is
    between the backward pass and the step. along: joined ranks step along. num_samples: of one
    epoch. sync_norm: of batch norms. resumes: the loop has a name.
    torch_hook: torch's, which sends float16 in a process group of torch.distributed."""

    joins: bool = True
    sends: torch.dtype | None = None
    reduces_first: bool = False
    along: bool = True
    num_samples: int = 61
    sync_norm: bool = False
    resumes: bool = False
    torch_hook: bool = False


class Count:
    """Steps of the loop's body."""

    def __init__(self) -> None:
        self.value = 0

    def step(self) -> None:
        self.value += 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Stepping:
    """What the body does behind its backward pass, also on a rank that has joined."""

    def __init__(self, optim: Any, scaler: Any, schedule: Any, count: Count) -> None:
        self.optim, self.scaler, self.schedule, self.count = optim, scaler, schedule, count

    def step(self) -> None:
        self.scaler.step(self.optim)
        self.scaler.update()
        if self.schedule:
            self.schedule.step()
        self.count.step()


@dataclass
class PlainTold:
    pid: int
    rank: int
    world_size: int
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    state: list[dict[str, torch.Tensor]] = field(repr=False)
    num_steps: int
    steps_taken: int
    ctx_step: int
    learning_rate: float
    num_recoveries: int


def dies_before(owner: Any, name: str) -> None:
    wrap(owner, name, first=die)


def dies_after(owner: Any, name: str) -> None:
    wrap(owner, name, then=die)


def is_left(model: Any) -> None:
    """Be the rank that has not got the result when the others have."""

    def until_it_fails() -> None:
        while (failure := model.group.failure()) is None:
            time.sleep(0.01)
        raise failure

    wrap(engine_of(model), "sync_buffers", then=until_it_fails)


MOMENTS: dict[str, Callable[[Any, Any], None]] = {
    "in the forward pass": lambda model, optim: dies_before(model, "forward"),
    "before the gradients are sent": lambda model, optim: dies_before(
        engine_of(model).reducer, "_launch_rest"
    ),
    "before it has the result": lambda model, optim: dies_before(engine_of(model).reducer, "wait"),
    "between two passes": lambda model, optim: wrap(
        engine_of(model).reducer,
        "_finish",
        then=lambda: dies_before(engine_of(model).reducer, "_launch_rest"),
    ),
    "before it has the result of the second pass": lambda model, optim: wrap(
        engine_of(model).reducer,
        "_finish",
        then=lambda: dies_before(engine_of(model).reducer, "wait"),
    ),
    "when it has the result": lambda model, optim: dies_after(engine_of(model).reducer, "_finish"),
    "before it steps": lambda model, optim: dies_before(optim, "step"),
    "after the step": lambda model, optim: dies_after(optim, "step"),
    "when it has asked for more rows": lambda model, optim: wrap(
        model,
        "forward",
        first=lambda: (time.sleep(0.5), die()),  # Ray sends what it was given to send.
    ),
    "is told to end": lambda model, optim: os.kill(os.getpid(), signal.SIGTERM),
    "is left": lambda model, optim: is_left(model),
}


def sent_as(dtype: torch.dtype) -> Callable[[cl.Group, Any], Any]:
    def sent(group: cl.Group, bucket: Any) -> Any:
        work = group.all_reduce(bucket.buffer().to(dtype), cl.ReduceOp.AVG)
        return work.get_future()

    return sent


def train_plain(
    ctx: cl.Context,
    kind: PlainKind,
    folder: str,
    acts: dict[tuple[int, int], tuple[int, str]],
    stream: cl.Stream | None = None,
    module: torch.nn.Module | None = None,
    step_s: float = 0.0,
) -> PlainTold:
    """acts: by recoveries so far, and rank, at which step what befalls it. module: handed in, so
    that the same one is wrapped when the function runs again."""
    assert call_of(ctx).recovery is not None
    diary, samples = Diary(folder, os.getpid()), Samples(kind.num_samples)
    network = module if module is not None else kind.network()
    if kind.sync_norm:
        network = cl.SyncBatchNorm.convert_sync_batchnorm(network)
    model = ctx.register(
        "model", cl.DistributedDataParallel(network, bucket_cap_mb=kind.bucket_cap_mb)
    )
    if kind.torch_hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ctx.init_torch_distributed()
        model.register_comm_hook(None, fp16_compress_hook)
    if kind.sends is not None:
        model.register_comm_hook(ctx.group, sent_as(kind.sends))
    trained = [p for p in model.parameters() if p.requires_grad]
    optim = ctx.register("optim", kind.optimizer(trained, **kind.options))
    scaler = torch.amp.GradScaler("cpu", 4.0, growth_interval=3, enabled=kind.scaler)
    if kind.scaler:
        scaler.scale(torch.zeros(()))  # Makes the scale, also on a rank that shadows first.
        ctx.register("scaler", scaler)
    schedule = ctx.register("schedule", kind.scheduler(optim)) if kind.schedule else None
    count = ctx.register("count", Count())
    stepping = Stepping(optim, scaler, schedule, count)
    pending: list[list[int]] = []
    reducer = engine_of(model).reducer
    shadow = reducer.shadow

    def note() -> None:
        diary.note((ctx.generation, ctx.rank, count.value, [*pending]))
        pending.clear()

    def shadow_with_leftovers() -> None:
        if pending:
            note()
        shadow()

    reducer.shadow = shadow_with_leftovers
    for epoch in ctx.epochs(kind.num_epochs, resume=folder if kind.resumes else None):
        along: list[Any] = [stepping if kind.along else count]
        with contextlib.ExitStack() as stack:
            if kind.joins:
                stack.enter_context(
                    cl.Join([model], divide_by_initial_world_size=False, step_along=along)
                )
            shard = ctx.shard(stream if stream is not None else samples, BATCH_SIZE, epoch=epoch)
            for numbers, _, _ in shard:
                time.sleep(step_s)
                now = call_of(ctx).recovery.num_recoveries, ctx.rank
                pending.append(numbers.tolist())
                # Else the gradients of the last batch would be part of the next epoch.
                is_last = boundary().status.batches_left == 0
                if len(pending) < kind.accumulate and not is_last:
                    with model.no_sync():
                        kind.loss(model, numbers.tolist(), samples).backward()
                    continue
                note()
                if count.value == acts.get(now, (-1, ""))[0]:
                    MOMENTS[acts[now][1]](model, optim)
                for which in kind.passes_of(count.value):
                    loss = kind.loss(model, numbers.tolist(), samples, which)
                    scaler.scale(loss).backward()
                if kind.reduces_first:
                    ctx.reduce(loss.detach())
                stepping.step()
                optim.zero_grad()
    return PlainTold(
        os.getpid(),
        ctx.rank,
        ctx.world_size,
        [p.detach().clone() for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        list(optim.state.values()),
        count.value,
        steps_of_run(),
        ctx.step,
        optim.param_groups[0]["lr"],
        call_of(ctx).recovery.num_recoveries,
    )


def steps_of_run() -> int:
    return boundary().status.taken


def attempts_at(folder: str) -> dict[int, dict[int, dict[int, list[list[int]]]]]:
    """By step, by generation, by rank, the batches that were to be taken."""
    attempts: dict[int, dict[int, dict[int, list[list[int]]]]] = {}
    for path in sorted(Path(folder).glob("*.diary")):
        for generation, rank, step, batches in Diary(folder, int(path.stem)).read():
            attempts.setdefault(step, {}).setdefault(generation, {})[rank] = batches
    return attempts


def counted(folder: str) -> dict[int, dict[int, list[list[int]]]]:
    """By step, by rank, the batches that count."""
    return {step: tries[max(tries)] for step, tries in attempts_at(folder).items()}


def assert_as_one_process(kind: PlainKind, folder: str, told: list[PlainTold]) -> None:
    """All that are left hold the same, every sample was used once in each epoch, and one process
    that takes the same steps ends with the same bits."""
    for one in told[1:]:
        assert all(map(torch.equal, one.parameters, told[0].parameters))
        assert all(map(torch.equal, one.buffers, told[0].buffers))
        assert (one.num_steps, one.learning_rate) == (told[0].num_steps, told[0].learning_rate)
        if kind.along:
            for mine, theirs in zip(one.state, told[0].state, strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    steps = counted(folder)
    assert sorted(steps) == list(range(len(steps)))
    assert_each_once(kind, steps)
    if kind.sync_norm:
        return  # The reference takes statistics of each rank alone.
    model, num_steps, learning_rate = reference(kind, steps, {}, kind.num_samples)
    assert {one.num_steps for one in told} == {len(steps)}
    if not kind.scaler and kind.passes == (1,):  # Each pass ends with an agreement.
        assert {one.steps_taken for one in told} == {len(steps)}
    if not kind.scaler and kind.accumulate == 1:
        assert {one.ctx_step for one in told} == {len(steps)}
    assert told[0].learning_rate == learning_rate
    if "step" in next(iter(told[0].state), {}):
        assert num_steps == max(int(state["step"]) for state in told[0].state)
    assert_same_parameters(kind, told[0].parameters, model)
    for ours, theirs in zip(told[0].buffers, model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=kind.tolerance, atol=kind.tolerance)


def assert_each_once(kind: PlainKind, steps: dict[int, dict[int, list[list[int]]]]) -> None:
    taken, left_out = Counter[int](), Counter[int]()
    for by_rank in steps.values():
        numbers = [number for batches in by_rank.values() for batch in batches for number in batch]
        (left_out if kind.scaler and 7 in numbers else taken).update(numbers)
    whole = Counter([*range(kind.num_samples)] * kind.num_epochs)
    # What the scaler left out may come again: nobody knows, until a step is taken behind it, that
    # its gradients were not to be added to those of the next backward pass.
    assert taken + left_out == whole if not kind.scaler else taken <= whole <= taken + left_out
