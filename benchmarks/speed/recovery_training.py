"""What both sides of recovery.py train, and what a process writes down of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from ray import cloudpickle

NUM_WORKERS, WIDTH, BATCH = 4, 256, 16
STEP_S = 0.02
"""Of computing in each step: most instants that are drawn at random fall between collectives."""
PATIENCE_S = 120.0

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(8):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def batch_of(seat: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seat * 100_003 + step)
    return torch.randn(BATCH, WIDTH, generator=generator)


class Log:
    """Lines of one process in a file that outlives it: seconds of a clock that all processes of a
    host share, a word, a number."""

    def __init__(self, folder: str, name: str) -> None:
        self._file = (Path(folder) / name).open("a", buffering=1)

    def note(self, word: str, number: int) -> None:
        self._file.write(f"{time.monotonic()} {word} {number}\n")

    @staticmethod
    def read(folder: str) -> Iterator[tuple[str, float, str, int]]:
        """name, seconds, word, number; a line that a death cut short is left out."""
        for path in sorted(Path(folder).iterdir()):
            for line in path.read_text().splitlines(keepends=True):
                parts = line.split()
                if line.endswith("\n") and len(parts) == 3:
                    yield path.name, float(parts[0]), parts[1], int(parts[2])
