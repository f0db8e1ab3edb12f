"""What is read from an autoscaler's own words, in the messages that Ray uses for them."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
import ray
from ray.core.generated.autoscaler_pb2 import (
    AutoscalingState,
    ClusterConfig,
    ReportClusterConfigRequest,
)
from ray.core.generated.autoscaler_pb2_grpc import AutoscalerStateServiceStub

from chorusline.runtime.session.placing.autoscaling import (
    Outlook,
    of_maximum,
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
    ("said", "outlook", "why"),
    [
        (state(never=GROUP), Outlook.FIXED, "it cannot add suitable nodes"),
        (state(never="another"), Outlook.GROWS, "has been asked"),
        (state(never=GROUP, coming=3), Outlook.GROWS, "has 3 nodes on the way"),
        (state(coming=1), Outlook.GROWS, "has 1 node on the way"),
        (state(failed="no quota"), Outlook.GROWS, r"could not start 2 of 'worker' \(no quota\)"),
        (None, Outlook.UNKNOWN, "has not reported yet"),
    ],
)
def test_the_second_autoscaler_is_believed_about_this_group_alone(
    said: AutoscalingState | None, outlook: Outlook, why: str
) -> None:
    told = of_state(said, GROUP)
    assert told.outlook is outlook
    assert re.search(why, told.why), told.why


def status(types: dict[str, str], **report: Any) -> dict[str, Any]:
    return {"autoscaler_report": {"node_type_mapping": types, **report}}


@pytest.mark.parametrize(
    ("said", "outlook", "why"),
    [
        ({}, Outlook.UNKNOWN, "no autoscaler has reported yet"),
        ({"load_metrics_report": {}}, Outlook.UNKNOWN, "no autoscaler has reported yet"),
        (status({"ab12": "node_ab12"}), Outlook.FIXED, "has no autoscaler"),
        (status({"ab12": "head"}), Outlook.GROWS, "has been asked"),
        (status({"ab12": "head", "cd34": "node_cd34"}), Outlook.GROWS, "has been asked"),
        (
            status({"ab12": "head"}, pending_launches={"cpu": 2}, pending_nodes=[["x", "cpu", ""]]),
            Outlook.GROWS,
            "has 3 nodes on the way",
        ),
        (status({"ab12": "head"}, failed_nodes=[["x", "cpu"]]), Outlook.GROWS, "1 failed"),
    ],
)
def test_the_first_autoscaler_is_known_by_the_types_of_its_nodes(
    said: dict[str, Any], outlook: Outlook, why: str
) -> None:
    told = of_status(said)
    assert told.outlook is outlook
    assert why in told.why


def test_a_configuration_that_is_too_small_is_told_with_its_numbers() -> None:
    bundle = {"CPU": 2.0, "GPU": 1.0}
    assert of_maximum(bundle, 3, {"CPU": 6, "GPU": 3}) is None
    told = of_maximum(bundle, 4, {"CPU": 6})
    assert told is not None and told.outlook is Outlook.FIXED
    assert told.why == (
        "by its configuration it may grow to CPU 6 at the most, and 8 are asked for, "
        "GPU 0 at the most, and 4 are asked for"
    )


def test_a_cluster_without_an_autoscaler_is_known_for_one(cluster: None) -> None:
    told = prospect({"CPU": 1.0}, 50, GROUP)
    # Its first words may not have come yet, where this is the first test.
    assert told.outlook is Outlook.FIXED or "yet" in told.why


def report(config: ClusterConfig) -> None:
    """To Ray's own state, as a provider does that tells what it may start."""
    with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
        asked = ReportClusterConfigRequest(cluster_config=config)
        AutoscalerStateServiceStub(channel).ReportClusterConfig(asked, timeout=5)


def test_what_a_provider_has_reported_is_heard(cluster: None) -> None:
    config = ClusterConfig()
    config.node_group_configs.add(resources={"CPU": 4}, min_count=0, max_count=3, name="workers")
    report(config)
    try:
        told = prospect({"CPU": 2.0}, 7, GROUP)
        assert told.outlook is Outlook.FIXED
        assert "CPU 12 at the most, and 14 are asked for" in told.why
        assert "configuration" not in prospect({"CPU": 2.0}, 6, GROUP).why
    finally:
        report(ClusterConfig())
    assert "configuration" not in prospect({"CPU": 2.0}, 7, GROUP).why
