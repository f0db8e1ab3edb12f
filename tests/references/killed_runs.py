"""Runs whose ranks are killed, and one process that takes the steps that counted.

Every rank notes, in a file that outlives it, which samples it took for which step. One process then
takes the same steps over the same samples, and adds gradients in the same order: what the survivors
end with has to be that, bit by bit where no norm is taken, whose sum is cut by shards.

Of its samples, number 7 may have no finite loss (`Kind.scaler`).
"""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.actors.fault_plan import Instant
from chorusline.runtime.process.step_boundary import boundary
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.references.training_to_kill import BATCH_SIZE, NUM_SAMPLES, Samples, die


class Net(torch.nn.Module):
    """A norm with buffers, a part that is not used with every batch, and a frozen one."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 33)
        self.norm = torch.nn.BatchNorm1d(3) if batch_norm else torch.nn.Identity()
        self.sometimes = torch.nn.Linear(33, 33)
        self.never = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Linear(33, 33).requires_grad_(False)
        self.last = torch.nn.Linear(33, 3)

    def forward(self, inputs: torch.Tensor, is_used: bool = True) -> torch.Tensor:
        # In channels of eleven, so that a batch of one has a variance.
        hidden = torch.tanh(self.norm(self.first(inputs).view(-1, 3, 11)).flatten(1))
        if is_used:
            hidden = hidden + self.sometimes(hidden)
        return self.last(hidden + self.frozen(hidden))


@dataclass(frozen=True)
class Kind:
    """One way to train. accumulate: batches to a step. scaler: of the loss; with it, a batch that
    has sample 7 overflows. schedule: of the learning rate, along with the steps. passes: backward
    passes of a step, by its number; after the last one it begins anew. loading: how the shard makes
    batches."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05})
    zero: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    batch_norm: bool = False
    accumulate: int = 1
    passes: tuple[int, ...] = (1,)
    scaler: bool = False
    schedule: bool = False
    keys: bool = False
    bucket_cap_mb: float = 0.004
    tolerance: float = 0.0
    replicas: int = 2
    num_epochs: int = 2
    loading: dict[str, Any] = field(default_factory=dict)

    def network(self) -> torch.nn.Module:
        return Net(self.batch_norm).to(self.dtype)

    def loss(
        self, model: torch.nn.Module, numbers: list[int], samples: Samples, which: int = 0
    ) -> torch.Tensor:
        """which: of the passes of the step."""
        inputs = samples.inputs[numbers].to(device_of(model), self.dtype) + which
        output = model(inputs, is_used=(numbers[0] + which) % 3 == 0)
        targets = samples.targets[numbers].to(device_of(model), self.dtype)
        loss = torch.nn.functional.mse_loss(output, targets)
        return loss * torch.inf if self.scaler and 7 in numbers else loss

    def passes_of(self, step: int) -> range:
        return range(self.passes[step % len(self.passes)])

    def scheduler(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)

    def key_list(self) -> list[int] | None:
        return [number // 5 for number in range(NUM_SAMPLES)] if self.keys else None


def device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


class Lines(torch.utils.data.IterableDataset):
    """The samples as rows of a stream that can be read once for each epoch."""

    def __init__(self) -> None:
        self.epochs: set[int] = set()

    def set_epoch(self, epoch: int) -> None:
        assert epoch not in self.epochs, "it is read again"
        self.epochs.add(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples = Samples()
        return (samples[number] for number in range(NUM_SAMPLES))


EPOCH_IS_OVER = -1
"""In a diary, in place of the number of a ballot."""


class Diary:
    """What one rank took, by step, in a file that a SIGKILL leaves behind."""

    def __init__(self, folder: str, seat: int) -> None:
        self.path = Path(folder) / f"{seat}.diary"

    def note(self, entry: tuple[Any, ...]) -> None:
        with self.path.open("ab") as file:
            pickle.dump(entry, file)

    def read(self) -> Iterator[tuple[Any, ...]]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            while True:
                try:
                    yield pickle.load(file)
                except EOFError:
                    return


@dataclass
class Told:
    rank: int
    world_size: int
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    num_steps: int
    ids_of_the_lost: list[int]
    learning_rate: float
    state_numel: int


def wrap(owner: Any, name: str, *, first: Any = None, then: Any = None) -> None:
    """Do `first` before the next call of `owner.name`, `then` after it."""
    original = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        if first is not None:
            first()
        result = original(*args, **kwargs)
        setattr(owner, name, original)
        if then is not None:
            then()
        return result

    setattr(owner, name, called)


def look_in_vain(ctx: cl.Context, optim: Any) -> None:
    """Look for what others gather when one of them has died, and find nothing: as between hosts,
    where a death takes along what was on its way."""
    while (failure := ctx.group.failure()) is None:
        time.sleep(0.01)
    for bucket in optimizer_engine_of(optim).shard.buckets:
        kept = [kept.values.clone() for kept in bucket.ranges]
        bucket.flat.fill_(torch.nan)
        for values, was in zip(bucket.ranges, kept, strict=True):
            values.values.copy_(was)
    raise failure


def dies_at(instant: Instant, number: int = 1) -> Callable[[Any], None]:
    return lambda optim: optimizer_engine_of(optim).faults.at(instant, die, number)


PHASES: dict[str, Callable[[Any], None]] = {
    "while gradients are reduced (1)": dies_at(Instant.REDUCE),
    "after they are reduced": dies_at(Instant.REDUCED),
    "while replicas get theirs (2)": dies_at(Instant.REPLICATE),
    "before it votes (3)": dies_at(Instant.VOTE),
    "when it has seen the ballot": dies_at(Instant.SEEN),
    "before it applies (4)": dies_at(Instant.APPLY),
    "when it has applied (4)": dies_at(Instant.APPLIED),
    "while parameters are gathered (5)": dies_at(Instant.GATHER),
    "after the step": dies_at(Instant.STEPPED),
}


class DiesAtALine:
    """Kills the process between two lines of ours that its training thread executes: the one after
    the part `fraction` of those between two ends of steps. Of an armed step the lines are ignored,
    those of the next are counted, and in the one after it the process dies."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.lines = 0
        self.dies_at = math.inf

    def __call__(self, optim: Any) -> None:
        faults = optimizer_engine_of(optim).faults
        faults.at(Instant.STEPPED, lambda: sys.settrace(self._enter))
        faults.at(Instant.STEPPED, self._aim, 2)

    def _aim(self) -> None:
        self.dies_at = self.lines * (1 + self.fraction)

    def _enter(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        is_ours = frame.f_code.co_filename.startswith(_FOLDER)
        return self._go_on if is_ours else None

    def _go_on(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines > self.dies_at:
                die()
        return self._go_on


_FOLDER = f"{Path(cl.__file__).parent}/"

SENT_AGAIN = {
    "while gradients are reduced again": dies_at(Instant.REDUCE, 2),
    "after they are reduced again": dies_at(Instant.REDUCED, 2),
    "while replicas get theirs again": dies_at(Instant.REPLICATE, 2),
    "before it votes again": dies_at(Instant.VOTE, 2),
}
"""In a step in which passes followed when the gradients were on their way."""
SIX_PHASES = [
    phase
    for phase in PHASES
    if phase not in ("after they are reduced", "before it applies (4)", "after the step")
]
"""For tests that have many other cases."""


def train(
    ctx: cl.Context,
    kind: Kind,
    folder: str,
    victims: dict[int, tuple[int, str]],
    acts: dict[int, Callable[[cl.Context, Any], None]] | None = None,
    stream: cl.Stream | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Told:
    """victims: by first rank, how many steps it takes, and the phase of the next it dies in; an
    unknown phase is left to `acts`: by first rank, what is done to its context and optimizer.
    stream: of the samples, instead of the dataset that has a length; collate: of its rows."""
    seat, samples, diary = ctx.rank, Samples(), Diary(folder, ctx.rank)
    network = kind.network().to(ctx.device)
    model = cl.DistributedDataParallel(network, bucket_cap_mb=kind.bucket_cap_mb)
    optim = cl.ZeroRedundancyOptimizer(
        model, kind.optimizer, replicas=kind.replicas, **kind.zero, **kind.options
    )
    (acts or {}).get(seat, lambda *_: None)(ctx, optim)
    scaler = cl.GradScaler(optim, init_scale=4.0, growth_interval=3, enabled=kind.scaler)
    schedule = kind.scheduler(optim) if kind.schedule else None
    lost: list[int] = []
    pending: list[list[int]] = []
    shadow = optimizer_engine_of(optim).reducer.shadow

    def shadow_with_leftovers() -> None:
        if pending:
            diary.note((optimizer_engine_of(optim).progress.ballots, [*pending]))
            pending.clear()
        shadow()

    optimizer_engine_of(optim).reducer.shadow = shadow_with_leftovers
    for epoch in ctx.epochs(kind.num_epochs):
        joinables = [model, optim, *([scaler] if kind.scaler else [])]
        along = [schedule] if schedule else []
        with cl.Join(joinables, divide_by_initial_world_size=False, step_along=along):
            shard = ctx.shard(
                samples if stream is None else stream,
                BATCH_SIZE,
                epoch=epoch,
                keep_together=kind.key_list(),
                collate_fn=collate,
                **kind.loading,
            )
            for numbers, _, _ in shard:
                pending.append(numbers.tolist())
                # Else the gradients of the last batch would be part of the next epoch.
                is_last = boundary().status.batches_left == 0
                is_whole = len(pending) == kind.accumulate or is_last
                ballots = optimizer_engine_of(optim).progress.ballots
                with contextlib.nullcontext() if is_whole else model.no_sync():
                    for which in kind.passes_of(ballots):
                        loss = kind.loss(model, numbers.tolist(), samples, which)
                        scaler.scale(loss).backward()
                if not is_whole:
                    continue
                step, phase = victims.get(seat, (-1, ""))
                if ballots == step and (kill := (PHASES | SENT_AGAIN).get(phase)):
                    kill(optim)
                diary.note((optimizer_engine_of(optim).progress.ballots, [*pending]))
                pending.clear()
                scaler.step(optim)
                scaler.update()
                optim.zero_grad()
                if schedule:
                    schedule.step()
            lost += shard.ids_of_the_lost
        diary.note((EPOCH_IS_OVER, []))
    optimizer_engine_of(
        optim
    ).reducer.shadow = shadow  # The function leaves nothing that refers to itself.
    state = optim.shard_optimizer.state.values() if optim.shard_optimizer else ()
    return Told(
        ctx.rank,
        ctx.world_size,
        [p.detach().cpu().clone() for p in model.parameters()],
        [b.cpu().clone() for b in model.buffers()],
        optim.num_steps,
        lost,
        optim.param_groups[0]["lr"],
        sum(t.numel() for s in state for t in s.values() if torch.is_tensor(t) and t.dim()),
    )


def taken_by_step(folder: str, told: list[Told], victims: dict[int, Any]) -> dict[int, dict]:
    """By ballot, by seat, the batches that count."""
    lost = list(told[0].ids_of_the_lost)
    steps: dict[int, dict[int, list[list[int]]]] = {}
    for seat in range(3):
        entries = [*Diary(folder, seat).read()]
        over = [at for at, (ballot, _) in enumerate(entries) if ballot == EPOCH_IS_OVER]
        for at, (ballot, batches) in enumerate(entries):
            if ballot == EPOCH_IS_OVER:
                continue
            flat = [number for batch in batches for number in batch]
            # What a victim took in an epoch that it has seen the end of counts: others know of the
            # lost samples of the epoch in which it was lost only.
            if seat in victims:
                is_told = bool(flat) and lost[: len(flat)] == flat
                if is_told:
                    del lost[: len(flat)]
                elif not any(at < end for end in over):
                    continue
            steps.setdefault(ballot, {})[seat] = batches
    return steps


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As on the ranks: sums inside of a matrix product depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@one_thread()
def reference(
    kind: Kind,
    steps: dict[int, dict],
    victims: dict[int, tuple[int, str]],
    num_samples: int = NUM_SAMPLES,
    device: str = "cpu",
) -> tuple[torch.nn.Module, int, float]:
    """One process that takes the same steps on `device`; the model that it returns is on the CPU.
    Buffers are those of the last rank that took a step, and lives: a victim has not given any in
    the step that it died in."""
    model, samples = kind.network().to(device), Samples(num_samples)
    trained = [p for p in model.parameters() if p.requires_grad]
    is_half = kind.dtype is torch.bfloat16
    masters = [torch.nn.Parameter(p.detach().float()) if is_half else p for p in trained]
    optim = kind.optimizer(masters, **kind.options)
    schedule = kind.scheduler(optim) if kind.schedule else None
    num_steps = 0
    for ballot in sorted(steps):
        total: list[torch.Tensor | None] = [None] * len(trained)
        before = [b.clone() for b in model.buffers()]
        after = before
        for seat, batches in sorted(steps[ballot].items()):
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            model.zero_grad()
            for numbers in batches:
                for which in kind.passes_of(ballot):
                    kind.loss(model, numbers, samples, which).backward()
            for i, p in enumerate(trained):
                if p.grad is not None:
                    own = p.grad.float() if is_half else p.grad.clone()
                    total[i] = own if total[i] is None else total[i] + own
            if victims.get(seat, (-1, ""))[0] != ballot:
                after = [b.clone() for b in model.buffers()]
        for buffer, value in zip(model.buffers(), after, strict=True):
            buffer.copy_(value)
        for p, so_far in zip(masters, total, strict=True):
            if so_far is not None and is_half:
                so_far = so_far.bfloat16().float()
            p.grad = None if so_far is None else so_far / len(steps[ballot])
        grads = [p.grad for p in masters if p.grad is not None]
        if all(bool(g.isfinite().all()) for g in grads):
            if "max_norm" in kind.zero:
                torch.nn.utils.clip_grad_norm_(masters, kind.zero["max_norm"])
            optim.step()
            num_steps += 1
            if is_half:
                for p, master in zip(trained, masters, strict=True):
                    p.data.copy_(master)
        if schedule:
            schedule.step()
    return model.cpu(), num_steps, optim.param_groups[0]["lr"]


def assert_same_parameters(
    kind: Kind, parameters: list[torch.Tensor], model: torch.nn.Module
) -> None:
    for ours, theirs in zip(parameters, model.parameters(), strict=True):
        if kind.tolerance:
            torch.testing.assert_close(ours, theirs, rtol=kind.tolerance, atol=kind.tolerance)
        else:
            assert torch.equal(ours, theirs)


def assert_as_if_nothing_was(
    kind: Kind, folder: str, told: list[Told], victims: dict[int, Any], device: str = "cpu"
) -> None:
    for one in told[1:]:
        assert all(map(torch.equal, one.parameters, told[0].parameters))
        assert all(map(torch.equal, one.buffers, told[0].buffers))
        assert one.num_steps == told[0].num_steps
        # Who had returned before did not need to be told.
        assert one.ids_of_the_lost == told[0].ids_of_the_lost or one.world_size == 3
    steps = taken_by_step(folder, told, victims)
    taken = [
        n for of_seat in steps.values() for batches in of_seat.values() for b in batches for n in b
    ]
    assert sorted(taken) == sorted([*range(NUM_SAMPLES)] * kind.num_epochs)
    model, num_steps, learning_rate = reference(kind, steps, victims, device=device)
    assert told[0].num_steps == num_steps
    assert told[0].learning_rate == pytest.approx(learning_rate)
    assert_same_parameters(kind, told[0].parameters, model)
    for ours, theirs in zip(told[0].buffers, model.buffers(), strict=True):
        assert torch.equal(ours, theirs)
