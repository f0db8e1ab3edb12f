"""`make test-gpu` and `make bench-gpu`, as far as a machine without a GPU can run them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_machine
from tests import ROOT, on_gpu

COMMANDS = [gpu.main, gpu_machine.main, on_gpu.main]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__module__)
def test_without_a_gpu_each_command_says_so_in_one_sentence(
    command: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([]) == 3
    told, errors = capsys.readouterr()
    assert told.startswith("there is no ") and told.count("\n") == 1
    assert not errors


def test_a_command_of_make_installs_runs_and_writes_one_file() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name, runs in (("test-gpu", "-m tests.on_gpu"), ("bench-gpu", "benchmarks/gpu.py")):
        recipe = makefile.split(f"\n{name}:")[1].split("\n\n")[0]
        assert "benchmarks/gpu_machine.py --install" in recipe
        assert f"{runs} --out out/{name}.json" in recipe


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sizes", "3M"], "--sizes knows tiny, 2M, 25M, 100M; got 3M"),
        (["--bytes", "5B"], "--bytes knows 4B, "),
        (["--ranks", "1"], "--ranks must be at least 2, got 1"),
    ],
)
def test_words_that_are_wrong_are_told_before_anything_runs(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        gpu.main(words)
    assert exited.value.code == 2
    assert says in capsys.readouterr().err


def test_what_pytest_reports_is_counted_with_its_reasons() -> None:
    report = """<testsuites><testsuite name="pytest">
    <testcase classname="tests.a" name="good"/>
    <testcase classname="tests.a" name="left"><skipped message="4 ranks on 1 GPUs"/></testcase>
    <testcase classname="tests.b" name="bad"><failure message="1 == 2">.</failure></testcase>
    <testcase classname="tests.b" name="none"><error message="no fixture">...</error></testcase>
    </testsuite></testsuites>"""
    assert on_gpu.outcomes(report) == {
        "counts": {"passed": 1, "skipped": 1, "failed": 2},
        "skipped": {"tests.a.left": "4 ranks on 1 GPUs"},
        "failed": {"tests.b.bad": "1 == 2", "tests.b.none": "no fixture"},
    }


@pytest.mark.slow  # Two processes that import torch, and FSDP2's first step.
def test_the_benchmark_runs_on_a_cpu_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "bench.json"
    words = [
        "--device",
        "cpu",
        "--sizes",
        "tiny",
        "--bytes",
        "4B,64KiB",
        "--rounds",
        "1",
        "--json",
        "--out",
    ]
    assert gpu.main([*words, str(out)]) == 0
    told = capsys.readouterr().out
    assert "torch: " in told and "collective/bytes, 2 ranks" in told
    found = json.loads(told.splitlines()[-1])
    assert found == json.loads(out.read_text())
    ratios, figures = found["ratios"], found["figures"]
    assert {"all_reduce/4B", "all_to_all/64KiB", "ddp/tiny", "zero/tiny"} <= ratios.keys()
    assert all(ratio > 0 for ratio in ratios.values())
    ways = figures["steps"]["tiny"]["medians_s"]
    assert {"zero", "zero overlapped", "torch zero", "torch fsdp2"} <= ways.keys()
    assert max(figures["steps"]["tiny"]["apart"].values()) < 1e-3
    assert figures["seen"]["torch"] == torch.__version__
