"""PyTorch's own tests: what Gloo passes, ours passes."""

import pytest

from tests.harness.programs import figures_of


def passed(figures):
    return {name for name, outcome in figures["outcomes"].items() if outcome == "passed"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", ["2", "4"])
def test_what_gloo_passes_of_torchs_suite_ours_passes(ranks):
    figures = figures_of("torch_suite.py", "--ranks", ranks, timeout_s=1500)
    gloos = passed(figures[f"gloo/{ranks}"])
    assert len(gloos) > 80
    assert gloos - passed(figures[f"ours/{ranks}"]) == set()
