"""Replicas of a stock FSDP2 model lose ranks, and get them back (fsdp2_replicas.py)."""

import pytest

from tests.harness.programs import figures_of


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_killed_ranks_of_fsdp2_replicas_cost_no_step_and_no_sample() -> None:
    figures = figures_of("compatibility.fsdp2_replicas", "--kills", "2", timeout_s=450)
    assert figures["kills"] == 2
    # Each step has the same samples at any number of ranks: one lost or taken twice would show.
    assert figures["largest_difference_from_one_process"] < 1e-5
    assert set(figures["errors_of_survivors"]) <= {"PeerLost", "GroupAborted", "GroupClosed"}
    assert {"2 ranks", "4 ranks"} <= set(figures["step_ms"])
