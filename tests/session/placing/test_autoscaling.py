"""What is read from an autoscaler's own words, in the messages that Ray uses for them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ray.core.generated.autoscaler_pb2 import AutoscalingState

from chorusline.runtime.session.placing.autoscaling import (
    Growth,
    of_state,
    of_status,
    prospect,
)

GROUP = "6e16b5c42aab3676fddc1da7abe901000000"


def state(*, never: str = "", coming: int = 0, failed: str = "") -> AutoscalingState:
    said = AutoscalingState(autoscaler_state_version=2)
    if never:
        gang = said.infeasible_gang_resource_requests.add(details=f"{never}:PACK|PENDING")
        gang.requests.add(resources_bundle={"CPU": 1.0})
    if coming:
        said.pending_instance_requests.add(ray_node_type_name="worker", count=coming)
    if failed:
        said.failed_instance_requests.add(ray_node_type_name="worker", count=2, reason=failed)
    return said


@pytest.mark.parametrize(
    ("said", "growth", "why"),
    [
        (state(never=GROUP), Growth.FIXED, "it cannot add suitable nodes"),
        (state(never="another"), Growth.GROWS, "has been asked"),
        (state(never=GROUP, coming=3), Growth.GROWS, "has 3 nodes on the way"),
        (state(coming=1), Growth.GROWS, "has 1 node on the way"),
        (state(failed="no quota"), Growth.GROWS, r"could not start 2 of 'worker' \(no quota\)"),
        (None, Growth.UNKNOWN, "has not reported yet"),
    ],
)
def test_the_second_autoscaler_is_believed_about_this_group_alone(
    said: AutoscalingState | None, growth: Growth, why: str
) -> None:
    told = of_state(said, GROUP)
    assert told.growth is growth
    assert re.search(why, told.why), told.why


def status(types: dict[str, str], **report: Any) -> dict[str, Any]:
    return {"autoscaler_report": {"node_type_mapping": types, **report}}


@pytest.mark.parametrize(
    ("said", "growth", "why"),
    [
        ({}, Growth.UNKNOWN, "no autoscaler has reported yet"),
        ({"load_metrics_report": {}}, Growth.UNKNOWN, "no autoscaler has reported yet"),
        (status({"ab12": "node_ab12"}), Growth.FIXED, "has no autoscaler"),
        (status({"ab12": "head"}), Growth.GROWS, "has been asked"),
        (status({"ab12": "head", "cd34": "node_cd34"}), Growth.GROWS, "has been asked"),
        (
            status({"ab12": "head"}, pending_launches={"cpu": 2}, pending_nodes=[["x", "cpu", ""]]),
            Growth.GROWS,
            "has 3 nodes on the way",
        ),
        (status({"ab12": "head"}, failed_nodes=[["x", "cpu"]]), Growth.GROWS, "1 failed"),
    ],
)
def test_the_first_autoscaler_is_known_by_the_types_of_its_nodes(
    said: dict[str, Any], growth: Growth, why: str
) -> None:
    told = of_status(said)
    assert told.growth is growth
    assert why in told.why


def test_a_cluster_without_an_autoscaler_is_known_for_one(cluster: None) -> None:
    told = prospect(GROUP)
    # Its first words may not have come yet, where this is the first test.
    assert told.growth is Growth.FIXED or "yet" in told.why
