"""Ray's memory monitor kills a worker, since its node runs low on memory. For real: a program
starts a Ray of its own, whose monitor has a low threshold."""

from __future__ import annotations

import pytest

from tests.harness.programs import last_line_of

REMEDY = (
    "Give the node more memory, use fewer workers on it or smaller batches, or start Ray with a "
    "higher RAY_memory_usage_threshold"
)


@pytest.mark.promise("Ray's memory monitor kills a worker, since the node runs low on memory")
def test_an_actor_that_rays_memory_monitor_killed_has_died_and_the_error_says_what_to_do() -> None:
    detail = last_line_of("-m", "tests.references.low_memory", timeout_s=110)
    assert detail.startswith("Ray killed it because its node ran low on memory (1 worker(s) were ")
    assert detail.endswith(REMEDY)
    assert "\n" not in detail, "it ends where Ray's advice on tasks and its list of processes begin"
