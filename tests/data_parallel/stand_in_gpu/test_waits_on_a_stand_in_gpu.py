"""How often a step waits on the host for the GPU, counted on a stand-in, by kind of step.

A wait empties the queue of launched kernels, and the GPU then idles until the host has launched
more. torch's DDP has none in a step; here a step ends with an agreement, which the host reads once.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import chorusline as cl
from chorusline.collectives.contract.work import Work
from chorusline.runtime.zero.ballot import Ballot
from chorusline.runtime.zero.shards.parameter_shard import ParameterShard
from tests.harness.ranks import Rank
from tests.harness.stand_in_gpu import nccl, streams
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in
from tests.harness.stand_in_gpu.runs import in_run

pytestmark = needs_stand_in

WARM = 2
"""Steps before the one that is counted: the first ones lay out buckets, and make state."""


class Counts(NamedTuple):
    """Of one step. in_backward, elsewhere: waits by place. early: those of the backward pass of a
    plain model before its last bucket is launched. kernels: device operations. in_ballot:
    those between the beginning of a ballot and its outcome, without those that compute a norm."""

    in_backward: dict[str, int]
    elsewhere: dict[str, int]
    early: int
    kernels: int
    in_ballot: int


def net(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if "norms" in kind:
        middle = [cl.SyncBatchNorm(33), cl.SyncBatchNorm(33, momentum=None)]
    else:
        middle = [torch.nn.Tanh(), torch.nn.Linear(33, 33)]
    return torch.nn.Sequential(torch.nn.Linear(7, 33), *middle, torch.nn.Linear(33, 5))


def optimizer_of(kind: str, model: Any) -> torch.optim.Optimizer:
    if "zero" not in kind and "scaled" not in kind:
        return torch.optim.SGD(model.parameters(), lr=1e-2)
    more: dict[str, Any] = {}
    if "clipped" in kind:
        more["max_norm"] = 0.5
    if "replicas" in kind:
        more["replicas"] = 2
    return cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2, **more)


def launched() -> int:
    return sum(streams.machine().launches.values())


def of_one_step(rank: Rank, kind: str) -> Counts:
    streams.machine().strict = True
    nccl.settings.kernel_s = 0.002  # Else a work may have ended before anybody waits for it.
    in_ballot: Counter[str] = Counter()

    def counting(plain: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            before = launched()
            try:
                return plain(*args)
            finally:
                in_ballot["kernels"] += sign * (launched() - before)

        return counted

    with pytest.MonkeyPatch.context() as patch, rank.group(timeout_s=60) as group:
        patch.setattr(Ballot, "hold", counting(Ballot.hold, 1))
        norm = counting(ParameterShard.add_squared_norm, -1)
        patch.setattr(ParameterShard, "add_squared_norm", norm)
        counts: Counts = in_run(
            group, lambda ctx: count_step(ctx, kind, in_ballot), goes_on="recovery" in kind
        )
        return counts


def count_step(ctx: cl.Context, kind: str, in_ballot: Counter[str]) -> Counts:
    dtype = torch.bfloat16 if "half" in kind else torch.float32
    module = net(kind).to(ctx.device, dtype)
    model = cl.DistributedDataParallel(module, bucket_cap_mb=0.001)
    optimizer = optimizer_of(kind, model)
    scaler = cl.GradScaler(optimizer, init_scale=4.0) if "scaled" in kind else None
    scale = scaler.scale if scaler is not None else torch.nn.Identity()
    ctx.register("model", model)
    ctx.register("optimizer", optimizer)

    early: list[int] = []  # waits in the pass so far, at the launch of each bucket
    if "ddp" in kind:
        launch = model._reducer._launch

        def launching(bucket: Any) -> None:
            launch(bucket)
            early.append(sum(streams.machine().waits.values()))

        model._reducer._launch = launching  # type: ignore[method-assign]

    def take_step(batch: torch.Tensor) -> Counts:
        batch = batch.to(ctx.device, dtype)
        with streams.counting_waits() as waits:
            kernels, in_ballot["kernels"] = launched(), 0
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            outside = Counter(waits)
            waits.clear()
            scale(loss).backward()
            in_backward = dict(waits)
            waits.clear()
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            outside += waits
        return Counts(
            in_backward,
            dict(outside),
            early[-1] if early else 0,
            launched() - kernels,
            in_ballot["kernels"],
        )

    if "join" not in kind:
        samples = torch.randn(6 * ctx.world_size * (WARM + 1), 7)
        return [take_step(batch) for batch in ctx.shard(samples, 6)][-1]
    joinables = [model, optimizer] if "zero" in kind else [model]
    with warnings.catch_warnings(action="ignore"), cl.Join(joinables):
        steps = range(WARM + 1 if ctx.rank == 0 else 1)
        return [take_step(torch.randn(6, 7)) for _ in steps][-1]


@pytest.fixture(scope="module")
def ranks() -> Iterator[StandInRanks]:
    with StandInRanks(2) as started:
        yield started


ONE_IN_BACKWARD, ONE_IN_STEP, TWO_IN_STEP = (1, 0), (0, 1), (0, 2)


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        ("ddp", ONE_IN_BACKWARD),
        ("ddp, recovery", ONE_IN_BACKWARD),
        ("half", ONE_IN_BACKWARD),
        ("zero", ONE_IN_STEP),
        ("zero, recovery", TWO_IN_STEP),
        ("zero, clipped, replicas, recovery", TWO_IN_STEP),
        ("scaled", ONE_IN_STEP),
        ("norms", ONE_IN_BACKWARD),
        ("zero, norms, recovery", TWO_IN_STEP),
        ("join", ONE_IN_BACKWARD),
        # A rank has no data: the ballot, and the digests of what the others may have written.
        ("zero, join", (0, 5)),
        ("norms, join", (1, 1)),  # which ranks have data for the batch
    ],
)
def test_a_step_waits_for_the_gpu_no_more_often_than_it_has_to(
    kind: str, waits: tuple[int, int], ranks: StandInRanks
) -> None:
    """And reads nothing that another rank could still spoil: the ranks are strict."""
    counts = ranks.run(of_one_step, kind)[0]
    assert sum(counts.in_backward.values()) <= waits[0], counts
    assert sum(counts.elsewhere.values()) <= waits[1], counts
    assert counts.in_ballot <= 4, counts
    assert counts.early == 0, counts


def forget_to_wait(rank: Rank, kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "wait_on_host", Work.wait)
        with contextlib.suppress(Exception):  # Of what was read, garbage.
            of_one_step(rank, kind)


@pytest.mark.parametrize("kind", ["ddp", "zero", "norms, join"])
def test_a_read_that_forgets_to_wait_is_found(kind: str) -> None:
    with StandInRanks(2) as ranks, pytest.raises(AssertionError, match="after no wait_on_host"):
        ranks.run(forget_to_wait, kind)


def names_recorded(rank: Rank) -> list[str]:
    named: list[str] = []

    def begin(name: str) -> int:
        named.append(name)
        return 41 + len(named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.nvtx, "range_start", begin)
        patch.setattr(torch.cuda.nvtx, "range_end", lambda number: named.append(f"end of {number}"))
        for tool in (None, "tool.so"):
            if tool is not None:
                patch.setenv("NVTX_INJECTION64_PATH", tool)
            with rank.group() as group:
                group.all_reduce(torch.ones(3, device=group.device)).wait_on_host()
    return named


def test_operations_are_named_for_nvtx_when_a_tool_listens(ranks: StandInRanks) -> None:
    name = "chorusline::all_reduce #0 (3 float32) with SUM"
    assert ranks.run(names_recorded)[0] == [name, "end of 42"]
