"""PyTorch's own tests: what Gloo passes, ours passes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def counted(*flags):
    """The figures that benchmarks/torch_suite.py prints."""
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks/torch_suite.py", "--json", *flags],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])["figures"]


def passed(figures):
    return {name for name, outcome in figures["outcomes"].items() if outcome == "passed"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", ["2", "4"])
def test_what_gloo_passes_of_torchs_suite_ours_passes(ranks):
    figures = counted("--ranks", ranks)
    gloos = passed(figures[f"gloo/{ranks}"])
    assert len(gloos) > 80
    assert gloos - passed(figures[f"ours/{ranks}"]) == set()
