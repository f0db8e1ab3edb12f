"""What benchmarks/speed/collectives.py prints and counts; a peer that fails, in any table."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import chorusline as cl
from benchmarks.alternation import by_time, cell, median_of, quartiles, table, timed
from benchmarks.speed import checkpoint, input as data_input
from benchmarks.speed.collectives import copies_in_place, copies_moved
from tests import ROOT
from tests.references.checkpoint_runs import in_run


@pytest.mark.parametrize(
    ("operation", "nbytes", "num_ranks", "copies"),
    [
        ("all_reduce", 4, 2, 2.5),  # one copy, and one addition of three halves
        ("all_reduce", 16 << 20, 2, 2.25),
        ("reduce_scatter", 16 << 20, 2, 1.25),
        ("all_gather", 16 << 20, 4, 1.25),
        ("broadcast", 4, 4, 1.0),
        ("all_to_all", 1 << 20, 2, 1.5),
        ("barrier", 0, 2, None),
    ],
)
def test_copies_are_counted_as_the_algorithms_make_them(
    operation: str, nbytes: int, num_ranks: int, copies: float | None
) -> None:
    assert copies_moved(operation, nbytes, num_ranks) == copies


@pytest.mark.parametrize(
    ("operation", "num_ranks", "copies"),
    [
        ("all_reduce", 2, 1.25),  # half of it added, and half of it copied
        ("all_reduce", 4, 2.125),
        ("reduce_scatter", 2, 0.75),
        ("all_gather", 4, 1.0),
    ],
)
def test_copies_of_symmetric_tensors(operation: str, num_ranks: int, copies: float) -> None:
    assert copies_in_place(operation, num_ranks) == copies


def test_quartiles_are_of_all_times() -> None:
    assert quartiles([5.0, 1.0, 4.0, 2.0, 3.0]) == (2.0, 3.0, 4.0)


@pytest.mark.fast
def test_a_failed_round_is_shown_and_has_no_place_among_the_others() -> None:
    rounds = [3.0, math.nan, 1.0, 2.0]
    shown = {cell(order, min, max) for order in itertools.permutations(rounds)}
    assert shown == {"2.00 (1.00, 3.00), failed 1 of 4"}
    assert {median_of(order) for order in itertools.permutations(rounds)} == {2.0}
    assert cell([math.nan, math.nan], max) == "failed 2 of 2"
    assert math.isnan(median_of([math.nan]))
    assert cell([2.0, 1.0]) == "1.50" and cell([2.0, 1.0], max) == "1.50 (2.00)"


def test_a_peer_that_fails_is_called_no_more_and_its_cells_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []

    def theirs() -> None:
        calls.append(1)
        raise RuntimeError("a pair has timed out\nand more")

    found = timed({"ours": lambda: None, "torch ddp": theirs}, rounds=3, calls=2)
    assert len(found["ours"]) == 6 and found["torch ddp"] == [] and len(calls) == 1
    assert "torch ddp failed: RuntimeError: a pair has timed out" in capsys.readouterr().err
    first, median, _ = quartiles(found["torch ddp"])
    table("", ("way", "us"), [("torch ddp", f"{median:.1f}"), ("both", f"({first:.1f}, nan)")])
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["way", "us"],
        ["torch", "ddp", "failed"],
        ["both", "failed"],
    ]
    with pytest.raises(RuntimeError, match="ours"):
        timed({"ours": lambda: (_ for _ in ()).throw(RuntimeError("ours"))}, rounds=1, calls=1)


@pytest.mark.parametrize("of_ranks", [[2.0, math.nan], [math.nan, 2.0]])
def test_a_peer_that_failed_on_any_rank_has_failed(of_ranks: list[float]) -> None:
    assert math.isnan(max(of_ranks, key=by_time)) and max([1.0, 2.0], key=by_time) == 2.0


def _checkpoints_beside_peers_that_fail(group: cl.Group, folder: str) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no planner today")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.dcp, "async_save", fail)
        if group.rank == 1:  # The yardstick has no disk there. Rank 0 writes its half.
            patch.setattr(checkpoint, "os", SimpleNamespace(urandom=os.urandom, fsync=fail))
        patch.setattr(checkpoint, "_WARM_UP", 0)
        return checkpoint.measure(group.rank, 2, f"{folder}/store", folder, 1, 2)


def test_a_checkpoint_of_a_peer_that_fails_is_a_row_that_says_so(
    ranks_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_rank = ranks_of(2).run(_checkpoints_beside_peers_that_fail, str(tmp_path))
    assert [len(one["a file"]) for one in by_rank] == [2, 0]
    checkpoint.report(Namespace(json=True, rounds=2), by_rank)
    *lines, printed = capsys.readouterr().out.splitlines()
    failed = [line.split("  ")[0] for line in lines if line.split()[-4:] == ["failed"] * 4]
    assert failed == ["DCP", "a file"]
    ratios = json.loads(printed)["ratios"]
    assert ratios["checkpoint_total/DCP"] is None and ratios["checkpoint_total/torch.save"] > 0


def _steps_beside_a_loader_that_fails(group: cl.Group) -> Any:
    class Loader(data_input.DataLoader[torch.Tensor]):
        def __iter__(self) -> Any:
            batches = super().__iter__()
            yield next(batches)
            if group.rank == 1 and self.num_workers:
                raise RuntimeError("a loader process was killed")
            yield from batches

    args = {"batch": 2, "workers": 1, "steps": 7, "rounds": 1, "sample_s": 0.0, "step_s": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_input, "DataLoader", Loader)
        return in_run(group, lambda ctx: data_input.train(ctx, args), None)


def test_a_step_beside_a_loader_that_fails_is_a_row_that_says_so(
    ranks_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    by_rank = ranks_of(2).run(_steps_beside_a_loader_that_fails)
    args = Namespace(json=True, ranks=2, batch=2, sample_ms=0.0, workers=1)
    data_input.report(args, by_rank)
    *lines, printed = capsys.readouterr().out.splitlines()
    failed = [line.split("  ")[0] for line in lines if line.split()[-4:] == ["failed"] * 4]
    assert failed == ["DataLoader, fetched ahead"]
    ratios = json.loads(printed)["ratios"]
    assert ratios["ours / DataLoader, fetched ahead"] is None
    assert ratios["ours / DataLoader, no data work"] > 0


@pytest.mark.slow
def test_a_peer_that_cannot_start_does_not_end_the_table(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI here')")
    command = "-m benchmarks.speed.collectives --mpi --ranks 2 --sizes 4B --json"
    run = subprocess.run(
        [sys.executable, *command.split(), "--operations", "barrier"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "mpi failed: " in run.stderr
    row = next(line for line in run.stdout.splitlines() if line.startswith("barrier/2/0B"))
    assert row.split()[-2:] == ["failed", "failed"]
    assert json.loads(run.stdout.splitlines()[-1])["figures"]["ratios_to_peer"] == {
        "barrier/2/0B": None
    }


@pytest.mark.slow
def test_every_case_has_its_quartiles_and_a_lost_one_is_listed() -> None:
    command = "-m benchmarks.speed.collectives --no-ray --ranks 2 --sizes 4B --json"
    run = subprocess.run(
        [sys.executable, *command.split(), "--operations", "broadcast,barrier"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    printed = json.loads(run.stdout.splitlines()[-1])
    figures, ratios = printed["figures"], printed["ratios"]
    assert set(ratios) == {"broadcast/2/4B", "barrier/2/0B"}
    for name, ways in figures["quartiles_s"].items():
        for way, (first, median, third) in ways.items():
            assert 0 < first <= median <= third
            assert figures["medians_s"][name][way] == median
    assert figures["lost"] == [name for name, ratio in ratios.items() if ratio > 1]
    assert "slower than a peer: " + (", ".join(figures["lost"]) or "none") in run.stdout
    assert figures["copies_moved"]["broadcast/2/4B"] == 1
    assert "memcpy" not in figures["medians_s"]["barrier/2/0B"]


def test_mpi_takes_its_turns_among_ranks_that_mpiexec_has_started() -> None:
    pytest.importorskip("mpi4py", reason="MPI needs the extra bench")
    command = "-m benchmarks.speed.collectives --mpi --ranks 2 --sizes 4B --json"
    run = subprocess.run(
        [sys.executable, *command.split(), "--operations", "all_reduce,barrier"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    figures = json.loads(run.stdout.splitlines()[-1])["figures"]
    assert set(figures["ratios_to_peer"]) == {"all_reduce/2/4B", "barrier/2/0B"}
    for name, ratio in figures["ratios_to_peer"].items():
        ways = figures["medians_s"][name]
        assert ratio == ways["ours"] / ways["mpi"]
        assert (name in figures["lost"]) == (max(ratio, ways["ours"] / ways["gloo"]) > 1)
