"""What benchmarks/collectives.py prints, and what it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.alternation import quartiles, table, timed
from benchmarks.collectives import copies_in_place, copies_moved
from tests import ROOT


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


def test_a_peer_that_cannot_start_does_not_end_the_table(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI here')")
    command = "benchmarks/collectives.py --mpi --ranks 2 --sizes 4B --operations barrier --json"
    run = subprocess.run(
        [sys.executable, *command.split()],
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


def test_every_case_has_its_quartiles_and_a_lost_one_is_listed() -> None:
    command = "benchmarks/collectives.py --no-ray --ranks 2 --sizes 4B --json"
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
    command = "benchmarks/collectives.py --mpi --ranks 2 --sizes 4B --json"
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
