"""Training in the steps of `ctx.steps`, for comparisons of bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch

from benchmarks.proofs.invariance_training import digest
from chorusline.collectives.group import Group
from chorusline.runtime.data.dealer import Dealer
from chorusline.runtime.data.steps.step_rows import DatasetRows
from chorusline.runtime.data.steps.steps import Steps
from chorusline.runtime.data_parallel.distributed_data_parallel import DistributedDataParallel
from chorusline.runtime.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer


class Tied(torch.nn.Module):
    """A small transformer with dropout, and one matrix for the first and the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(17, 12)
        self.block = torch.nn.TransformerEncoderLayer(
            12, 3, 20, dropout=0.2, batch_first=True, norm_first=True
        )
        self.head = torch.nn.Linear(12, 17, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.block(self.words(tokens)))
        return logits


def tokens_of(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return list(torch.randint(0, 17, (number, 6), generator=generator))


def points_of(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return list(torch.randn(number, 10, generator=generator))


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """Points, with noise that all three generators draw."""

    def __init__(self, number: int) -> None:
        self.points = points_of(number)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, number: int) -> torch.Tensor:
        noise = torch.rand(10) + float(numpy.random.rand()) + random.random()
        return self.points[number] + noise


def loss_of_tokens(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def loss_of_points(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def _perceptron() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(10, 33), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(33, 1)
    )


def _normalised() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(10, 21), torch.nn.BatchNorm1d(21), torch.nn.ReLU(), torch.nn.Linear(21, 2)
    )


class Spectral(torch.nn.Module):
    """Its weights and gradients are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(10, 33, dtype=torch.complex128))
        self.bias = torch.nn.Parameter(torch.randn(33, dtype=torch.complex128))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return (points.to(torch.complex128) @ self.weight + self.bias).abs()


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Any, Any]] = {
    "transformer": (Tied, tokens_of, loss_of_tokens),
    "perceptron": (_perceptron, points_of, loss_of_points),
    "augmented": (_perceptron, Augmented, loss_of_points),
    "normalised": (_normalised, points_of, loss_of_points),
    "spectral": (Spectral, points_of, loss_of_points),
}

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.02}),
}


def stepped(
    group: Group,
    model_name: str = "perceptron",
    optimizer_name: str = "adamw",
    *,
    sharded: bool = True,
    num_samples: int = 53,
    global_batch_size: int = 16,
    micro_batch_size: int = 3,
    epochs: int = 2,
    max_norm: float | None = None,
    weighs: bool = False,
    num_passes: int = 1,
    skips: bool = False,
    changes: bool = False,
    deterministic: bool = True,
    paces: list[float] | None = None,
    replicas: int = 1,
    check_every: int | None = None,
    watch: Callable[[ZeroRedundancyOptimizer], None] = lambda _: None,
) -> tuple[str, str, list[list[float]]]:
    """Train; num_passes: of some micro-batches. The others have one, and a `zero_grad` before it.
    skips: some micro-batches do not use the model, as their data are bad.
    changes: the program changes the gradients of some micro-batches.
    watch: is called with the sharded optimizer, before the first step.

    Returns the digests of parameters and buffers, of the optimizer's state, and the samples that
    this rank has seen, by micro-batch (their first element)."""
    make, data, loss_of = MODELS[model_name]
    optimizer_class, options = OPTIMIZERS[optimizer_name]
    torch.manual_seed(3)
    model = DistributedDataParallel(make().to(group.device), group, bucket_cap_mb=0.004)
    if sharded:
        optimizer: Any = ZeroRedundancyOptimizer(
            model,
            optimizer_class,
            max_norm=max_norm,
            replicas=replicas,
            check_every=check_every,
            **options,
        )
        watch(optimizer)
    else:
        optimizer = optimizer_class(model.parameters(), **options)
    seen = []
    dealer = Dealer(group.rank, group.size)
    for epoch in range(epochs):
        rows = DatasetRows(data(num_samples), epoch=epoch, seed=0, shuffle=True)
        steps = Steps(
            rows,
            global_batch_size,
            micro_batch_size,
            key="",
            group=lambda: group,
            dealer=dealer,
            epoch=epoch,
            deterministic=deterministic,
        )
        for step in steps:
            if paces is not None:
                steps.paces = paces
            for batch in step:
                seen.append(batch.flatten(1)[:, 0].tolist())
                if skips and bool(batch.sum() < 0):
                    continue
                has_several = num_passes > 1 and bool(batch.sum() > 0)
                if num_passes > 1 and not has_several:
                    optimizer.zero_grad(set_to_none=False)
                for number in range(num_passes if has_several else 1):
                    loss = loss_of(model, batch.to(group.device)) / (1 + number)
                    if weighs:
                        loss = model.weigh(loss, 0.1 * (1 + len(batch)))
                    loss.backward()
                if changes and bool(batch.sum() < 0):
                    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                elif changes:
                    for parameter in list(model.parameters())[::2]:
                        parameter.grad = parameter.grad * 2 if bool(batch.max() < 2) else None
            if max_norm is not None and not sharded:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    if sharded:
        optimizer.consolidate_state_dict(0)
    state = optimizer.state_dict() if not sharded or group.rank == 0 else None
    tensors = dict(model.module.state_dict())
    return digest(tensors), digest(state), seen
