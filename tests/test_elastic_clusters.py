"""Runs that grow and shrink with their cluster: nodes that a test adds and drains, and nodes that
Ray's own autoscaler starts because workers are wanted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from head_node import ENVIRONMENT, free_ports, head_node

GROWS = """
import asyncio, json, os, sys, time
import ray, torch
import chorusline as cl

sizes = []

def train(ctx, goal):
    torch.manual_seed(0)
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(4, 4)))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.Adam, lr=0.1, replicas=2)
    ctx.register("optim", optim)
    for epoch in ctx.epochs(10_000):
        with cl.Join([model, optim]):
            for batch in ctx.shard(torch.ones(48, 4), 4, epoch=epoch):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
                if sizes[-1:] != [ctx.world_size]:
                    sizes.append(ctx.world_size)
                    ctx.report(size=ctx.world_size)
                time.sleep(0.05)
        if ctx.reduce(int(sizes[-len(goal):] == goal[-len(sizes):]), "min"):
            break
    return os.getpid(), sizes, [p.tolist() for p in model.parameters()]

async def main():
    seen = []
    async with cl.Session((1, 3), timeout_s=30, on_report=lambda r: seen.append(r.rank)) as session:
        at_start = session.num_workers
        told = await asyncio.wait_for(session.run(train, goal=[1, 3]), 120)
    assert all(one[2] == told[0][2] for one in told)
    assert {0, 1, 2} == set(seen), "reports of newcomers arrive, too"
    print(json.dumps([at_start, [one[:2] for one in told]]))

ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_autoscaler_brings_the_nodes_that_a_run_wants_and_it_goes_on_with_them(
    tmp_path: Path,
) -> None:
    port, *others = free_ports(5)
    head_id = "f" * 51 + "00000"
    address = f"{socket.gethostbyname(socket.gethostname())}:{port}"
    # As on a cloud, but for the provider, whose machines are processes of this one.
    node_types = {
        name: {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": most}
        for name, most in (("ray.head.default", 0), ("worker", 2))
    }
    config = {
        "cluster_name": "fake",
        "max_workers": 2,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
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
    written = tmp_path / "autoscaling.json"
    written.write_text(json.dumps(config))
    names = ("dashboard", "dashboard-agent-listen", "ray-client-server", "metrics-export")
    flags = [
        *(f"--port={port}", "--num-cpus=1", "--include-dashboard=false"),
        *(f"--{name}-port={other}" for name, other in zip(names, others, strict=True)),
        f"--autoscaling-config={written}",
    ]
    environment = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": head_id,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head_id,
    }

    def is_up() -> bool:
        try:
            return ray._raylet.check_health(address, timeout=2)
        except Exception:
            return False

    with head_node(*flags, is_up=is_up, environment=environment, has_autoscaler=True):
        done = subprocess.run(
            [sys.executable, "-c", GROWS],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            env=ENVIRONMENT | {"RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert done.returncode == 0, done.stderr[-3000:]
    at_start, told = json.loads(done.stdout.splitlines()[-1])
    assert at_start == 1
    assert len(told) == 3
    # The worker of the start is there at the end, and has not left off in between.
    (_, sizes), *newcomers = told
    assert sizes[0] == 1 and sizes[-1] == 3
    assert all(sizes[-1] == 3 and sizes[0] > 1 for _, sizes in newcomers)
