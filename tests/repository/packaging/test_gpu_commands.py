"""`make test-gpu` and `make bench-gpu`, as far as a machine without a GPU can run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.speed import gpu, gpu_machine
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
    for name, runs in (("test-gpu", "-m tests.on_gpu"), ("bench-gpu", "-m benchmarks.speed.gpu")):
        recipe = makefile.split(f"\n{name}:")[1].split("\n\n")[0]
        assert "-m benchmarks.speed.gpu_machine --install" in recipe
        assert f"{runs} --out out/{name}.json" in recipe


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sizes", "3M"], "--sizes knows tiny, 2M, 25M, 100M; got 3M"),
        (["--bytes", "5B"], "--bytes knows 4B, "),
        (["--ranks", "-1"], "--ranks must be at least 1, got -1"),
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
    <testcase classname="" name="tests.c"><error message="collection failure">
        E   ModuleNotFoundError: No module named 'ray'</error></testcase>
    <testcase classname="" name="tests.e"><skipped message="collection skipped">
        ('/tests/e.py', 3, 'Skipped: needs the extra lightning')</skipped></testcase>
    <testcase classname="" name="tests.d"><error message="collection failure">
        E   NameError: name 'rya' is not defined</error></testcase>
    </testsuite></testsuites>"""
    assert on_gpu.outcomes(report) == {
        "counts": {"passed": 1, "skipped": 1, "failed": 3, "left_out": 2},
        "skipped": {"tests.a.left": "4 ranks on 1 GPUs"},
        "failed": {
            "tests.b.bad": "1 == 2",
            "tests.b.none": "no fixture",
            ".tests.d": "collection failure",
        },
        "left_out": {
            "tests.c": "needs the package ray",
            "tests.e": "needs the extra lightning",
        },
    }


NOT_ON_A_GPU_MACHINE = (
    *("ray", "rich", "pydantic", "lazy_loader", "hypothesis"),
    *("pytest_asyncio", "pytest_timeout", "xdist", "lightning"),
)
"""Packages that a machine may lack which has torch, CuPy and pytest."""


@pytest.mark.slow
def test_a_machine_without_ray_runs_the_tests_of_collectives_and_names_what_it_leaves_out(
    tmp_path: Path,
) -> None:
    """Here pytest only collects them, as there is no GPU."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in {NOT_ON_A_GPU_MACHINE}:\n    sys.modules[name] = None\n"
    )
    (report := tmp_path / "report.xml").touch()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q"]
    command += [*on_gpu.ALSO_WITHOUT_PLUGINS, "-p", "no:cacheprovider", f"--junitxml={report}"]
    alone = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(
        [*command, "tests/collectives", "tests/recovery", "tests/zero"],
        cwd=ROOT,
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=110,
    )
    found = on_gpu.outcomes(report.read_text())
    assert found["failed"] == {}, ran.stdout
    assert found["left_out"]["tests.recovery.test_recovery"] == "needs the package ray"
    assert "tests.zero.test_zero_redundancy_optimizer" not in found["left_out"]  # nor Join, nor DDP
    assert "tests/collectives/contract/test_group_contract.py" in ran.stdout
    assert "tests/zero/test_zero_on_gpu.py" in ran.stdout


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
    assert {"zero", "torch zero", "torch fsdp2"} <= ways.keys()
    assert max(figures["steps"]["tiny"]["apart"].values()) < 1e-3
    assert figures["seen"]["torch"] == torch.__version__
    assert [one["GLOO_SOCKET_IFNAME"] for one in figures["environment_of_ranks"]] == ["lo", "lo"]
