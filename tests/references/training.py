"""Small models, uneven data, and the one-process run that a distributed one has to equal.

The reference takes the step that all live ranks take together: the sum of their gradients, in rank
order, over the divisor. In the same dtype it has to give the same bits; in float64 it says how far
rounding may lead away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from chorusline.collectives.group import Group

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
}


EXACT = {"rtol": 1e-9, "atol": 1e-12}
_IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
# torch 2.8 rounds the factor by which it clips DTensors to float32, on Gloo as well.
CLIPPED = {"rtol": 1e-5, "atol": 1e-7} if _IS_OLD else EXACT
"""What parameters may be off by, of models in float64 that `fully_shard` has sharded."""


def make_model(dtype: torch.dtype, batch_norm: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    norm = [torch.nn.BatchNorm1d(13)] if batch_norm else []
    return torch.nn.Sequential(
        torch.nn.Linear(7, 13), *norm, torch.nn.Tanh(), torch.nn.Linear(13, 5)
    ).to(dtype)


def per_channel() -> torch.nn.Module:
    """The first batch gives its buffers an element for each channel."""
    return torch.ao.quantization.FakeQuantize(
        torch.ao.quantization.MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=1,
    )


def batches_of(rank: int, num_batches: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank + 1)
    return [
        torch.randn(3, 7, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(num_batches)
    ]


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def data_of(
    group: Group | None, lengths: Sequence[int], dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    """The batches of this rank alone; without a group, those of all ranks, by rank. lengths: how
    many each rank has."""
    everybodys = [batches_of(rank, length, dtype) for rank, length in enumerate(lengths)]
    return everybodys if group is None else [everybodys[group.rank]]


def backward_of_all(
    model: torch.nn.Module,
    data: Sequence[Sequence[torch.Tensor]],
    number: int,
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
) -> None:
    """The mean gradient of batch `number` over all in `data`; those without it count as zeros."""
    for batches in data:
        if number < len(batches):
            scale(loss_of(model, batches[number]) / len(data)).backward()


def reference(
    lengths: tuple[int, ...], optimizer: str, dtype: torch.dtype, divide_by_initial: bool = True
) -> list[torch.Tensor]:
    """The parameters after all ranks' batches, from one process."""
    model = make_model(dtype)
    kind, options = OPTIMIZERS[optimizer]
    stepper = kind(model.parameters(), **options)
    data = [batches_of(rank, n, dtype) for rank, n in enumerate(lengths)]
    for step in range(max(lengths)):
        live = [rank for rank, n in enumerate(lengths) if step < n]
        total: list[torch.Tensor] = []
        for rank in live:
            stepper.zero_grad()
            loss_of(model, data[rank][step]).backward()
            mine = [parameter.grad for parameter in model.parameters()]
            total = [a + b for a, b in zip(total, mine, strict=True)] if total else mine
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient / (len(lengths) if divide_by_initial else len(live))
        stepper.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(
        (a.double() - b.double()).abs().max().item() for a, b in zip(ours, theirs, strict=True)
    )
