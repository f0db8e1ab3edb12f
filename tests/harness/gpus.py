"""GPUs for the bodies of tests: real ones where the machine has them, and stand-ins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.storage import _load_from_bytes

from chorusline.collectives.objects.storages import _saved
from tests.harness.ranks import NCCL, Body, on_gpus, run_ranks
from tests.harness.stand_in_gpu.ranks import WHY_NOT, StandInRanks, seeds


@dataclass(frozen=True)
class Gpus:
    """size: of the group of ranks. seed: of the delays of stand-ins; None: they are real."""

    size: int
    seed: int | None

    def run(self, body: Body, folder: Path, *arguments: Any) -> list[Any]:
        """The results of `body(rank, *arguments)`, by rank."""
        if self.seed is None:
            return run_ranks(body, self.size, folder, NCCL, *arguments)
        with StandInRanks(self.size, seed=self.seed) as ranks:
            return ranks.run(body, *arguments, timeout_s=100)


def gpus_of(size: int) -> list[Any]:
    """`Gpus` as a parameter: real ones, and stand-ins with one seed of jitter in the fast suite and
    ten in the slow one; more than two of them in the slow one only."""
    marks = on_gpus(size).marks
    skip = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
    return [
        pytest.param(Gpus(size, None), marks=marks, id=f"{size} GPUs"),
        *(
            pytest.param(
                Gpus(size, seed),
                marks=[skip, *([pytest.mark.slow] if seed or size > 2 else [])],
                id=f"{size} stand-ins, {seed}",
            )
            for seed in seeds(10)
        ),
    ]


class OnGpu5:
    """Pickles as a storage of a process that has six GPUs."""

    def __reduce__(self) -> Any:
        saved = _saved(torch.ones(2).untyped_storage())
        host, gpu = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:5"
        assert saved.count(host) == 1
        return _load_from_bytes, (saved.replace(host, gpu),)
