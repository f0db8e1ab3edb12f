"""A head node with Ray's real autoscaler, as on a cloud, but for the provider: its machines are
processes of this one."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import ray

from tests.harness.head_node import free_ports, head_node

_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


@contextlib.contextmanager
def autoscaling_head(
    folder: Path, *, num_cpus: int, most_nodes: int, version: int = 2
) -> Iterator[str]:
    """Its address. num_cpus: of the head itself. most_nodes: of one CPU each, none at first.
    version: of the autoscaler."""
    port, *others = free_ports(5)
    head_id = "f" * 51 + "00000"
    address = f"{socket.gethostbyname(socket.gethostname())}:{port}"
    node_types = {
        name: {"resources": {"CPU": cpus}, "node_config": {}, "min_workers": 0, "max_workers": most}
        for name, cpus, most in (("ray.head.default", num_cpus, 0), ("worker", 1, most_nodes))
    }
    config = {
        "cluster_name": "fake",
        "max_workers": most_nodes,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "external",
            "module": _PROVIDER,
            "gcs_address": address,
            "head_node_id": head_id,
            "launch_multiple": True,
        },
        "available_node_types": node_types,
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        # What Ray's own file of defaults would say, which its wheel leaves out.
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        "file_mounts_sync_continuously": False,
        **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{f"{which}setup_commands": [] for which in ("", "head_", "worker_")},
        **{f"{which}_start_ray_commands": [] for which in ("head", "worker")},
        "initialization_commands": [],
    }
    written = folder / "autoscaling.json"
    written.write_text(json.dumps(config))
    environment = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head_id,
    }
    if version == 2:
        environment |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": head_id}
    names = ("dashboard", "dashboard-agent-listen", "ray-client-server", "metrics-export")
    flags = [
        *(f"--port={port}", f"--num-cpus={num_cpus}", "--include-dashboard=false"),
        *(f"--{name}-port={other}" for name, other in zip(names, others, strict=True)),
        f"--autoscaling-config={written}",
    ]

    def is_up() -> bool:
        try:
            return ray._raylet.check_health(address, timeout=2)
        except Exception:
            return False

    with head_node(*flags, is_up=is_up, environment=environment, has_autoscaler=True):
        yield address
