"""Batches that are copied to a stand-in GPU while its kernels read those before them."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data.fetching.on_device import ToDevice
from tests.harness.stand_in_gpu import streams
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in, seeds

pytestmark = needs_stand_in

BATCHES, SIZE = 8, 4096


class Encoding(UserDict[str, torch.Tensor]):
    """A batch of a class of its own, as transformers makes them."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Encoding:
        return Encoding(
            {name: one.to(device, non_blocking=non_blocking) for name, one in self.items()}
        )


def sums(group: cl.Group, has_own_class: bool) -> list[float]:
    """Each batch is dropped as the next one comes, as in a loop; nothing is read before the end."""
    streams.machine().strict = True
    to_device = ToDevice(group.device)
    totals: list[torch.Tensor] = []
    batch: Any = None
    for number in range(BATCHES):
        batch = {"x": torch.full((SIZE,), float(number), pin_memory=True)}
        batch = to_device(Encoding(batch) if has_own_class else batch)
        totals.append((batch["x"] * 2).sum())
    return [total.item() for total in totals]


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("has_own_class", [False, True])
def test_a_batch_is_not_written_over_while_the_step_reads_it(
    has_own_class: bool, seed: int
) -> None:
    with StandInRanks(1, seed=seed, jitter_s=0.002) as ranks:
        [told] = ranks.check(sums, has_own_class)
    assert told == [2.0 * SIZE * number for number in range(BATCHES)]
