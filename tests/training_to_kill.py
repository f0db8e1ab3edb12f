"""A small training in float64, for tests in which processes die: equal numbers mean equal bits."""

from __future__ import annotations

import os
import signal
import time

import torch

NUM_SAMPLES, BATCH_SIZE, LEARNING_RATE = 61, 4, 0.05


class Samples:
    """(number, input, target), float64."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return number, self.inputs[number], self.targets[number]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3)
    ).double()


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(inputs), targets)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
