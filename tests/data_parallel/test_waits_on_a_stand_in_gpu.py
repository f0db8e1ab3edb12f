"""How often a step waits on the host for the GPU, counted on a stand-in, by kind of step.

A wait empties the queue of launched kernels, and the GPU then idles until the host has launched
more. torch's DDP has none in a step; here a step ends with an agreement, which the host reads once.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import chorusline as cl
from actors.journal import Journal
from actors.messages import Assignment, RunRequest
from actors.run_status import RunStatus
from actors.worker.lifeline import Lifeline
from runtime.program.program import Program
from runtime.zero.ballot import Ballot
from tests.harness.ranks import Rank
from tests.harness.stand_in_gpu import streams
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in

pytestmark = needs_stand_in

WARM = 3
"""Steps before the one that is counted: the first ones lay out buckets, and make state."""


class Counts(NamedTuple):
    """Of one step. in_backward, elsewhere: waits by place. kernels: device operations. in_ballot:
    those between the beginning of a ballot and its outcome."""

    in_backward: dict[str, int]
    elsewhere: dict[str, int]
    kernels: int
    in_ballot: int


class NoDriver:
    """The driver of a run in which nothing happens."""

    def __init__(self) -> None:
        self.lifeline: Lifeline | None = None
        self.finished = self

    def remote(self, *_: object) -> None:
        assert self.lifeline is not None
        self.lifeline.release()


def in_run(group: cl.Group, train: Callable[[cl.Context], Any], *, goes_on: bool) -> Any:
    """What a session's worker does with a train function."""
    place = group.rank, group.size
    assignment = Assignment(group.generation, *place, *place, 0)
    request = RunRequest(0, group.timeout_s, False, max_failures=None if goes_on else 0)
    driver = NoDriver()
    lifeline = driver.lifeline = Lifeline(request, driver, assignment, lambda: group)  # type: ignore[arg-type]
    lifeline.begin()
    program = Program(train, {}, None)
    return program(assignment, group, Journal(keep=False), lifeline, RunStatus(), None)


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
    if "overlapped" in kind:
        more["overlap_with_ddp"] = True
    return cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2, **more)


def launched() -> int:
    return sum(streams.machine().launches.values())


def of_one_step(rank: Rank, kind: str) -> Counts:
    in_ballot: Counter[str] = Counter()
    plain = Ballot.hold

    def hold(self: Ballot, vote: Any) -> Any:
        before = launched()
        try:
            return plain(self, vote)
        finally:
            in_ballot["kernels"] += launched() - before

    with pytest.MonkeyPatch.context() as patch, rank.group(timeout_s=60) as group:
        patch.setattr(Ballot, "hold", hold)
        counts: Counts = in_run(
            group, lambda ctx: count_step(ctx, kind, in_ballot), goes_on="recovery" in kind
        )
        return counts


def count_step(ctx: cl.Context, kind: str, in_ballot: Counter[str]) -> Counts:
    model = cl.DistributedDataParallel(net(kind).to(ctx.device), bucket_cap_mb=0.001)
    optimizer = optimizer_of(kind, model)
    scaler = cl.GradScaler(optimizer, init_scale=4.0) if "scaled" in kind else None
    scale = scaler.scale if scaler is not None else torch.nn.Identity()
    ctx.register("model", model)
    ctx.register("optimizer", optimizer)

    def take_step(batch: torch.Tensor) -> Counts:
        batch = batch.to(ctx.device)
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
        return Counts(in_backward, dict(outside), launched() - kernels, in_ballot["kernels"])

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


@pytest.mark.parametrize(
    ("kind", "in_backward", "elsewhere", "in_ballot"),
    [
        ("ddp", 3, 0, 0),
        ("ddp, recovery", 4, 0, 0),
        ("zero", 0, 4, 12),
        ("zero, recovery", 0, 5, 13),
        ("zero, clipped, replicas, recovery", 0, 5, 13),
        ("zero, overlapped", 6, 4, 12),
        ("scaled", 0, 6, 12),
        ("norms", 3, 5, 0),
        ("zero, norms, recovery", 0, 10, 13),
        ("join", 3, 0, 0),
        ("zero, join", 0, 4, 12),
        ("norms, join", 12, 17, 0),
    ],
)
def test_a_step_waits_for_the_gpu_no_more_often_than_it_has_to(
    kind: str, in_backward: int, elsewhere: int, in_ballot: int, ranks: StandInRanks
) -> None:
    counts = ranks.run(of_one_step, kind)[0]
    assert sum(counts.in_backward.values()) <= in_backward, counts
    assert sum(counts.elsewhere.values()) <= elsewhere, counts
    assert counts.in_ballot <= in_ballot, counts
