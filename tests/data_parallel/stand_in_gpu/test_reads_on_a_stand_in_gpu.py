"""Every wait on the host that a read needs: each is left out in turn, and a stand-in GPU finds it.

A read behind `wait()` comes back when a failure ends the kernel, with anything there. Whether the
kernel has ended by then makes no difference to the stand-in, so these mistakes are found every
time. A wait that is new has to be added to `WAITS` below.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import chorusline as cl
from chorusline.collectives.contract.work import Work
from chorusline.collectives.objects import blocking
from chorusline.runtime.commands import bench
from tests import ROOT
from tests.harness.ranks import Rank
from tests.harness.stand_in_gpu import streams
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in
from tests.harness.stand_in_gpu.runs import in_run


def end_a_join_behind_others(group: cl.Group) -> None:
    """Rank 0 has not taken the last step, and learns from rank 1 whether an optimizer did."""
    model = cl.DistributedDataParallel(torch.nn.Linear(3, 2).to(group.device), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cl.Join([model], step_along=[optimizer]):
        for _ in range(2 + group.rank):
            optimizer.zero_grad()
            model(torch.ones(4, 3, device=group.device)).sum().backward()
            optimizer.step()


def normalise_one_value(group: cl.Group) -> None:
    norm = cl.SyncBatchNorm(3, process_group=group).to(group.device)
    norm(torch.ones(1, 3, device=group.device))


def step_and_gather_state(group: cl.Group) -> None:
    model = cl.DistributedDataParallel(torch.nn.Linear(3, 2).to(group.device), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.Adam, lr=0.1)
    model(torch.ones(4, 3, device=group.device)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict()


def measure(group: cl.Group) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_MOST_CALLS", 5)
        bench._row(group, "all_reduce", 256)


def gather_in_lightning(group: cl.Group) -> None:
    strategy = importlib.import_module("chorusline.runtime.lightning.strategy")
    strategy._gathered(torch.ones(3), group)


def reduce_in_lightning(group: cl.Group) -> None:
    strategy = importlib.import_module("chorusline.runtime.lightning.strategy").ChoruslineStrategy
    at_once = strategy.__new__(strategy)  # Lightning's trainer would give it its parts.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "root_device", group.device)
        at_once.reduce(torch.ones(3), group)


WAITS: dict[tuple[str, str], Callable[[cl.Group], object] | str] = {
    ("collectives/objects/blocking.py", "all_gather_row"): (
        lambda group: blocking.all_gather_row(group, [group.rank])
    ),
    ("collectives/objects/blocking.py", "broadcast_bytes"): (
        lambda group: blocking.broadcast_object(group, {"a": 1})
    ),
    ("collectives/objects/blocking.py", "all_gather_bytes"): (
        lambda group: blocking.all_gather_object(group, "x" * group.rank)
    ),
    ("collectives/objects/blocking.py", "gather_bytes"): "between CPUs only",
    ("collectives/objects/blocking.py", "scatter_bytes"): "between CPUs only",
    ("collectives/objects/messages.py", "step"): "asks is_completed() before it reads",
    ("collectives/objects/messages.py", "script"): "before the header is read",
    ("collectives/operations/composed_work.py", "_block"): "before a future is completed",
    ("collectives/operations/composed_work.py", "_block_host"): "hands on a wait on the host",
    ("collectives/operations/host_reads.py", "tolist"): step_and_gather_state,
    ("runtime/commands/bench.py", "_row"): measure,
    ("runtime/commands/bench.py", "wrong"): measure,
    ("runtime/data_parallel/distributed_data_parallel.py", "_settle"): end_a_join_behind_others,
    ("runtime/data_parallel/gradients/reducer.py", "wait"): "Reading.tolist waits as well",
    ("runtime/data_parallel/gradients/micro_batch_sums.py", "wait"): (
        "before the exact norm of tests/steps/test_on_a_stand_in_gpu.py"
    ),
    ("runtime/data_parallel/sync_batch_norm.py", "forward"): normalise_one_value,
    ("runtime/lightning/strategy.py", "reduce"): reduce_in_lightning,
    ("runtime/lightning/strategy.py", "_gathered"): gather_in_lightning,
    ("runtime/recovery/arrivals.py", "at_boundary"): "before the generation is ended on purpose",
    ("runtime/program/reducing.py", "_reduced"): (
        lambda group: in_run(group, lambda ctx: ctx.reduce(1.0), goes_on=False)
    ),
    ("runtime/zero/shards/optimizer_state.py", "_gather_bucket"): step_and_gather_state,
    ("runtime/data_parallel/buffers.py", "tensors"): "learns whether buffers are whole",
    ("runtime/data_parallel/same_model.py", "broadcast_tensors"): "before tensors are changed",
    (
        "runtime/zero/zero_redundancy_optimizer.py",
        "_end_step",
    ): "what the program reads behind step()",
    (
        "runtime/zero/zero_redundancy_optimizer.py",
        "_take_summed_step",
    ): "what the program reads behind step()",
    (
        "runtime/zero/shards/parameter_shard.py",
        "gather",
    ): "what the program reads behind a recovery",
    ("runtime/zero/shards/shard_state.py", "exchange"): "before state is taken for received",
    (
        "runtime/zero/shards/parameter_shard.py",
        "parameters_of",
    ): "before parameters are taken for received",
    ("runtime/zero/shards/parameter_bucket.py", "send_own"): "what it receives is not used",
    ("runtime/zero/zero_redundancy_optimizer.py", "switch"): "a barrier",
    ("actors/worker/worker.py", "_meet"): "a barrier",
    ("actors/worker/current_run.py", "meet_again"): "a barrier",
}
"""By file and function: what comes to its reads, or why there are none behind its wait."""


class Site(NamedTuple):
    file: str
    function: str
    line: int


def sites() -> Iterator[Site]:
    for package in ("collectives", "actors", "runtime"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if "wait_on_host()" in path.read_text():
                yield from _in_file(name, path)


def _in_file(name: str, path: Path) -> Iterator[Site]:
    innermost: dict[int, str] = {}  # by line; ast.walk comes to inner functions later
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr == "wait_on_host":
                    innermost[node.end_lineno or 0] = function.name
    yield from (Site(name, function, line) for line, function in innermost.items())


SITES = list(sites())


def test_every_wait_on_the_host_is_known_here() -> None:
    assert {(site.file, site.function) for site in SITES} == {*WAITS}


def forget_at(rank: Rank, site: Site) -> None:
    """Come to a read whose wait, at `site`, orders the stream only."""
    plain = Work.wait_on_host

    def wait_on_host(self: Work) -> Any:
        caller = sys._getframe(1)
        is_there = caller.f_code.co_filename.endswith(site.file) and caller.f_lineno == site.line
        return self.wait() if is_there else plain(self)

    with pytest.MonkeyPatch.context() as patch, rank.group() as group:
        patch.setattr(Work, "wait_on_host", wait_on_host)
        come_to_read(group, site.file, site.function)


def come_to_read(group: cl.Group, file: str, function: str) -> None:
    streams.machine().strict = True
    reads = WAITS[file, function]
    assert callable(reads)
    with contextlib.suppress(ValueError):  # More than one value is expected.
        reads(group)


def come_to_all_reads(rank: Rank) -> None:
    with rank.group() as group:
        for (file, function), reads in WAITS.items():
            if callable(reads) and "lightning" not in file:
                come_to_read(group, file, function)


NEEDS_READS = [site for site in SITES if callable(WAITS.get((site.file, site.function)))]
IN_FAST_SUITE = ("_settle", "all_gather_bytes", "_gather_bucket")


@needs_stand_in
@pytest.mark.parametrize(
    "site",
    [
        pytest.param(
            site,
            marks=[] if site.function in IN_FAST_SUITE else pytest.mark.slow,
            id=f"{Path(site.file).stem}-{site.function}-{site.line}",
        )
        for site in NEEDS_READS
    ],
)
def test_a_read_behind_a_wait_that_orders_the_stream_only_is_found(site: Site) -> None:
    if "lightning" in site.file:
        pytest.importorskip("lightning")
    with StandInRanks(2) as ranks, pytest.raises(AssertionError, match="after no wait_on_host"):
        ranks.run(forget_at, site)


@needs_stand_in
def test_all_these_reads_are_behind_a_wait_on_the_host() -> None:
    with StandInRanks(2) as ranks:
        ranks.run(come_to_all_reads)
