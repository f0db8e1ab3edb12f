"""The trainings that must end with the same bits whatever happens to their ranks.

Each process notes, in a file that outlives it, which samples it computes for which step. What
counts of that is known: the micro-batches of each step are those of the run with one worker, and a
process that is gone, or that had to begin the step again, has left its part to others.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from ray import cloudpickle
from torch import nn

import chorusline as cl
from benchmarks.faults.chaos_faults import FAULTS, PHASES, Fault, append, entries_of
from benchmarks.faults.chaos_training import seat_here
from chorusline.collectives.contract.errors import name_ranks
from chorusline.runtime.program.context import call_of
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of

NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS = 53, 16, 3, 3
STEPS_OF_EPOCH = -(-NUM_SAMPLES // GLOBAL_BATCH)
NUM_STEPS = STEPS_OF_EPOCH * EPOCHS

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# -- models ----------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Dropout, and one matrix for the first and the last layer. Inputs: (batch, 6) tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(17, 12)
        self.block = nn.TransformerEncoderLayer(
            12, 3, 20, dropout=0.2, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.block(self.words(tokens)))
        return logits.mean(1)


class Recurrent(nn.Module):
    """Inputs: (batch, 6) tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(17, 8)
        self.cells = nn.LSTM(8, 11, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(11, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.cells(self.words(tokens))
        logits: torch.Tensor = self.head(states[:, -1])
        return logits


class Sometimes(nn.Module):
    """A bag of embeddings, a branch that some micro-batches use, one that none uses, and a frozen
    one. Inputs: (batch, 6) tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(17, 10, mode="mean")
        self.sometimes = nn.Linear(10, 10)
        self.never = nn.Linear(4, 4)
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.head = nn.Linear(10, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.bag(tokens)
        if int(tokens[0, 0]) % 3 == 0:
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        logits: torch.Tensor = self.head(hidden + self.frozen(hidden))
        return logits


def _perceptron() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(36, 33), nn.Tanh(), nn.Dropout(0.3), nn.Linear(33, 17)]
    return nn.Sequential(*layers)


def _convolution() -> nn.Module:
    """With the buffers of two norms. Inputs: (batch, 1, 6, 6)."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 17),
    )


class Words:
    """Samples (number, 6 tokens, a token)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(0, 17, (NUM_SAMPLES, 7), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return number, self._tokens[number, :-1], self._tokens[number, -1]


class Pictures(Words):
    """Samples (number, (1, 6, 6) with noise that is drawn again each time, a class)."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        self._pixels = torch.randn(NUM_SAMPLES, 1, 6, 6, generator=generator)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        noisy = self._pixels[number] + 0.1 * torch.randn(1, 6, 6)
        return number, noisy, self._tokens[number, -1]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Words]]] = {
    "transformer": (Transformer, Words),
    "perceptron": (_perceptron, Pictures),
    "convolution": (_convolution, Pictures),
    "recurrent": (Recurrent, Words),
    "sometimes": (Sometimes, Words),
}

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.02}),
}

# -- one training ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What the bits depend on.

    model, optimizer: of MODELS and OPTIMIZERS. max_norm: gradients are clipped to it, if given.
    weighs: losses are weighted by the number of their samples, plus a half.
    """

    model: str
    optimizer: str
    sharded: bool
    max_norm: float | None = None
    weighs: bool = False

    @property
    def needs_whole_parameters(self) -> bool:
        """Whether each rank has the whole state of some parameters, and no other rank a copy."""
        return self.sharded and self.optimizer == "adafactor"


@dataclass(frozen=True)
class Plan:
    """A history. Nothing in it may change the bits, but for the training.

    registers: whether the function can run again from the top, and so take newcomers in.
    saves_at: the number of steps after which the first run saves a checkpoint and ends; a second
        run, of `resumes_with` workers, resumes from it. 0: one run.
    step_s: how long a step takes besides, so that a worker may come in the middle of the run.
    throttled: seats whose workers are stopped half of the time, from outside.
    """

    seed: int
    training: Training
    num_workers: int
    replicas: int
    bucket_cap_mb: float
    faults: tuple[Fault, ...] = ()
    registers: bool = False
    saves_at: int = 0
    resumes_with: int = 0
    step_s: float = 0.0
    throttled: tuple[int, ...] = ()


@dataclass
class Told:
    """What a rank returns. parameters (with buffers), state, noise: SHA-256. state: of the
    optimizer, empty on ranks that do not have all of it. num_steps: of the schedule, along with the
    optimizer. world_sizes: in which this process has taken steps, one after another."""

    rank: int
    pid: int
    num_steps: int
    parameters: str
    state: str
    noise: str
    rates: list[float]
    recoveries: int
    world_sizes: tuple[int, ...]


Entry = tuple[int, int, int, list[int]]
"""Of a diary: the generation in which functions began, epoch, step, samples of a micro-batch."""

MicroBatch = tuple[int, int, tuple[int, ...]]
"""Epoch, step, samples of a micro-batch."""

IN_THE_LOOP = (
    "before the step",
    "between forward and backward",
    "after a micro-batch",
    "after the loop",
    "after optimizer.step()",
    "soon",
)
"""Instants of the function's own code; "soon" is some milliseconds later, wherever it is then."""


def _leave(ctx: cl.Context, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


ACTS: dict[str, Callable[[cl.Context, Path], None]] = {**FAULTS, "leave": _leave}
"""By name: the faults of chaos, and a worker that is told to end, and hands over what it keeps."""

_world_sizes: dict[str, list[int]] = {}
"""By folder, of this process; the function may run more than once in it."""


def train(ctx: cl.Context, plan: Plan, folder: str, is_resumed: bool = False) -> Told:
    torch.set_num_threads(1)
    seat, training = seat_here(), plan.training
    # As the ranks began: a worker that comes between two steps has a later generation than they.
    attempt = ctx.broadcast(ctx.generation)
    diary = Path(folder) / f"{seat}-{os.getpid()}.diary"
    append(Path(folder) / "pids", (seat, os.getpid()))
    world_sizes = _world_sizes.setdefault(folder, [])
    make, samples_of = MODELS[training.model]
    torch.manual_seed(3)
    model = cl.DistributedDataParallel(make(), bucket_cap_mb=plan.bucket_cap_mb)
    optimizer_class, options = OPTIMIZERS[training.optimizer]
    optim: Any
    if training.sharded:
        optim = cl.ZeroRedundancyOptimizer(
            model, optimizer_class, replicas=plan.replicas, max_norm=training.max_norm, **options
        )
    else:
        optim = optimizer_class(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 3, 0.7)
    if plan.registers:
        for name, made in (("model", model), ("optim", optim), ("schedule", schedule)):
            ctx.register(name, made)
    samples = samples_of()

    def has_saved() -> bool:
        if is_resumed or schedule.last_epoch != plan.saves_at or not plan.saves_at:
            return False
        ctx.save().wait()
        return True

    # Where the function runs again, as ranks were lost in the save, that is what is left to do.
    if has_saved():
        return _told(ctx, model, optim, schedule, training, world_sizes)
    for epoch in ctx.epochs(EPOCHS):
        for step in ctx.steps(samples, GLOBAL_BATCH, MICRO_BATCH, epoch=epoch):
            time.sleep(plan.step_s)
            faults = _Armed(ctx, plan, optim, seat, epoch * STEPS_OF_EPOCH + step.number, folder)
            faults.reach("before the step")
            for numbers, inputs, targets in step:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                faults.reach("between forward and backward")
                if training.weighs:
                    loss = model.weigh(loss, len(numbers) + 0.5)
                loss.backward()
                append(diary, (attempt, epoch, step.number, numbers.tolist()))
                faults.reach("after a micro-batch")
            faults.reach("after the loop")
            if training.max_norm is not None and not training.sharded:
                nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
            optim.step()
            faults.reach("after optimizer.step()")
            schedule.step()
            optim.zero_grad()
            if world_sizes[-1:] != [ctx.world_size]:
                world_sizes.append(ctx.world_size)
            if has_saved():
                return _told(ctx, model, optim, schedule, training, world_sizes)
    return _told(ctx, model, optim, schedule, training, world_sizes)


def _told(
    ctx: cl.Context,
    model: Any,
    optim: Any,
    schedule: Any,
    training: Training,
    world_sizes: list[int],
) -> Told:
    noise = digest([torch.get_rng_state()])
    if training.sharded:
        optim.consolidate_state_dict(0)
    state = digest(optim.state_dict()) if not training.sharded or ctx.rank == 0 else ""
    recovery = call_of(ctx).recovery
    return Told(
        ctx.rank,
        os.getpid(),
        schedule.last_epoch,
        digest(dict(model.module.state_dict())),
        state,
        noise,
        [group["lr"] for group in optim.param_groups],
        recovery.num_recoveries if recovery is not None else 0,
        tuple(world_sizes),
    )


class _Armed:
    """The faults of one step that nobody has committed: a worker that came in the place of one that
    is gone may come to the same step."""

    def __init__(
        self, ctx: cl.Context, plan: Plan, optim: Any, seat: int, step: int, folder: str
    ) -> None:
        self._by_phase: dict[str, list[Callable[[], None]]] = defaultdict(list)
        due = [fault for fault in plan.faults if (fault.seat, fault.ballots) == (seat, step)]
        done = list(entries_of(Path(folder) / "struck")) if due else []
        for fault in due:
            if astuple(fault) in done:
                continue

            def act(fault: Fault = fault) -> None:
                append(Path(folder) / "struck", astuple(fault))
                ACTS[fault.kind](ctx, Path(folder))

            if fault.phase in PHASES:
                optimizer_engine_of(optim).faults.at(PHASES[fault.phase], act)
            elif fault.phase == "soon":
                delay_s = (plan.seed * 7919 + step * 31 + seat) % 40 / 1000
                timer = threading.Timer(delay_s, act)
                timer.daemon = True
                timer.start()
            else:
                self._by_phase[fault.phase].append(act)

    def reach(self, phase: str) -> None:
        for act in self._by_phase.pop(phase, ()):
            act()


def digest(values: Any) -> str:
    """SHA-256 of all tensors and numbers in nested dictionaries, lists and tuples."""
    told = hashlib.sha256()

    def tell(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            told.update(f"{value.dtype}{tuple(value.shape)}".encode())
            told.update(bytes(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)))
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                told.update(str(key).encode())
                tell(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                tell(one)
        else:
            told.update(repr(value).encode())

    tell(values)
    return told.hexdigest()


# -- what has to be true ---------------------------------------------------------------------------


def complaints(
    told: list[Told],
    alone: Told,
    folder: str,
    deal: set[MicroBatch],
    before: Set[int] = frozenset(),
) -> list[str]:
    """What is wrong with a history; nothing, we hope.

    alone: the run of one worker. deal: what it has computed.
    before: processes that were there at the end of the run before, from which this one resumed.
    """
    wrong = []
    for name in ("num_steps", "parameters", "noise", "rates"):
        differ = [one.rank for one in told if getattr(one, name) != getattr(alone, name)]
        if differ:
            wrong.append(
                f"{name} of {name_ranks(differ)} of {len(told)} are not those of one worker"
            )
    states = {one.state for one in told} - {""}
    if states != {alone.state}:
        wrong.append("the optimizer's state is not that of one worker")
    return wrong + ledger_complaints(folder, {one.pid for one in told} | before, deal)


def diaries_in(folder: str) -> Iterator[tuple[int, Entry]]:
    """The process, and what it has computed."""
    for path in sorted(Path(folder).glob("*.diary")):
        pid = int(path.stem.split("-")[1])
        for entry in entries_of(path):
            yield pid, entry


def deal_in(folder: str) -> set[MicroBatch]:
    """All micro-batches that were computed."""
    return {(epoch, step, tuple(ids)) for _, (_, epoch, step, ids) in diaries_in(folder)}


def ledger_complaints(folder: str, alive: Set[int], deal: set[MicroBatch]) -> list[str]:
    """What counts of a step is what was computed when its function had run from the top for the
    last time. By then each of its micro-batches was computed, and by one process only, unless one
    that had computed it is gone.

    alive: the processes that were there at the end.
    """
    wrong = []
    samples = [(epoch, number) for epoch, _, ids in deal for number in ids]
    if sorted(samples) != [(e, n) for e in range(EPOCHS) for n in range(NUM_SAMPLES)]:
        wrong.append("the micro-batches of one worker are not each sample once in each epoch")
    last: dict[tuple[int, int], int] = {}
    for _, (attempt, epoch, step, _) in diaries_in(folder):
        last[epoch, step] = max(attempt, last.get((epoch, step), attempt))
    computed: dict[MicroBatch, list[int]] = defaultdict(list)
    for pid, (attempt, epoch, step, ids) in diaries_in(folder):
        if attempt == last[epoch, step]:
            computed[epoch, step, tuple(ids)].append(pid)
    if missing := sorted(deal - computed.keys()):
        wrong.append(f"not computed: {missing}")
    if other := sorted(computed.keys() - deal):
        wrong.append(f"computed, and no part of any step: {other}")
    for entry, pids in computed.items():
        if sum(pid in alive for pid in pids) > 1:
            wrong.append(f"{entry} was computed by {pids}, of which more than one count")
    return wrong
