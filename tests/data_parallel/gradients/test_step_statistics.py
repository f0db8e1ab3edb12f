"""What a model tells at INFO: its buckets, its unused parameters, and where its time goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.diagnosis.debug import DebugLevel, set_debug_level
from chorusline.collectives.group import Group
from chorusline.collectives.stores.store import HashStore
from chorusline.runtime.data_parallel.distributed_data_parallel import DistributedDataParallel
from chorusline.runtime.data_parallel.gradients import step_statistics
from tests.harness.log_lines import LogLines
from tests.harness.reused_ranks import ReusedRanks


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(5, 3)
        self.right = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, head: str) -> Any:
        time.sleep(0.01)
        return getattr(self, head)(x)


def train_and_tell(group: Group) -> tuple[list[str], Any]:
    told = LogLines()
    logging.getLogger("chorusline").addHandler(told)
    set_debug_level(DebugLevel.INFO)
    try:
        # 18 parameters of 4 bytes a head; a bucket takes 64 bytes, so every tensor has its own.
        model = DistributedDataParallel(TwoHeads(), group, bucket_cap_mb=64 / (1 << 20))
        for heads in (["right", "right"], ["right", "left"], ["right", "left"]):
            model(torch.ones(2, 5), heads[group.rank]).sum().backward()
        return told.lines, model.statistics()
    finally:
        set_debug_level(DebugLevel.OFF)
        logging.getLogger("chorusline").removeHandler(told)


def test_buckets_unused_parameters_and_times_are_told_on_every_rank(
    ranks_of: Callable[[int], ReusedRanks],
) -> None:
    for rank, (lines, statistics) in enumerate(ranks_of(2).run(train_and_tell)):
        record, *lines = lines
        assert record.startswith(
            f"DistributedDataParallel: module TwoHeads; rank {rank}; world_size 2; backend "
        )
        assert (
            "; parameters 4; bytes 144; dtypes torch.float32; bucket_cap_mb (in bytes) 64" in record
        )
        choice, measured = (line for line in lines if " parameters in " in line)
        unused_lines = [line for line in lines if " parameters in " not in line]
        assert choice.startswith(f"rank {rank}: 4 parameters in {len(statistics.buckets)} buckets")
        assert "from right.bias to right.bias" in choice
        assert measured.index("right.weight") < measured.index("left.weight"), "as they came"
        unused = "parameters without a gradient in this step"
        expected = [f"rank {rank}: {unused}: left.weight, left.bias"]
        if rank == 1:
            expected.append(f"rank 1: {unused}: right.weight, right.bias")
        assert unused_lines == expected, "said once, and again when it changes"
        assert statistics.steps == 3
        assert statistics.forward_s >= 0.01
        assert statistics.backward_s > 0
        assert statistics.communication_s >= statistics.overlap_s >= 0
        assert sum(statistics.buckets) >= 2 * 18 * 4
        never = ("left.weight", "left.bias") if rank == 0 else ()
        assert statistics.without_gradient == never
        assert "3 steps on average: forward " in str(statistics)


def mean(group: Group, bucket: Any) -> torch.futures.Future[Any]:
    time.sleep(0.001)
    return group.all_reduce(bucket.buffer(), ReduceOp.AVG).get_future()


def test_steps_of_a_hook_count_and_every_hundred_steps_have_a_line() -> None:
    told = LogLines()
    logging.getLogger("chorusline").addHandler(told)
    set_debug_level(DebugLevel.INFO)
    try:
        with Group.create(HashStore(), 0, 1) as group:
            model = DistributedDataParallel(torch.nn.Linear(2, 2), group)
            model.register_comm_hook(group, mean)
            for _ in range(199):
                model(torch.ones(1, 2)).sum().backward()
            statistics = model.statistics()
    finally:
        set_debug_level(DebugLevel.OFF)
        logging.getLogger("chorusline").removeHandler(told)
    assert statistics.steps == 100
    assert statistics.communication_s >= 0.001
    averages = [line for line in told.lines if " steps on average: " in line]
    assert len(averages) == 1 and averages[0].startswith("rank 0, model 0: 100 steps on average")


def test_each_time_is_that_of_its_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(step_statistics, "time", SimpleNamespace(monotonic=lambda: now))
    clock = step_statistics.StepClock(0, ["weight"])
    for began_at in (100.0, 200.0):
        now = began_at + 2
        clock.forward_ran(began_at)
        now = began_at + 6
        clock.backward_ended([True])
        # Launched a second before the end of the backward pass, and over three seconds after it.
        assert clock.count(began_at + 5, began_at + 9, 2.5)
    average = clock.average([])
    assert (average.steps, average.forward_s, average.backward_s) == (2, 2, 4)
    assert (average.communication_s, average.overlap_s, average.wait_s) == (4, 1, 2.5)


def test_below_info_nothing_is_timed_and_the_mend_is_told() -> None:
    with Group.create(HashStore(), 0, 1) as group:
        model = DistributedDataParallel(torch.nn.Linear(2, 2), group)
        with pytest.raises(RuntimeError, match="CHORUSLINE_DEBUG=INFO"):
            model.statistics()
