"""A node that was told to go is left before it goes: on a cluster of two nodes of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.programs import last_line_of, output_of

PROGRAM = """
import asyncio, os, sys, time
import ray, torch
from ray.cluster_utils import Cluster
from ray._private.worker import global_worker
from ray.core.generated import autoscaler_pb2
from ray._raylet import GcsClient
import chorusline as cl


def train(ctx, steps, replicas=1):
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(4, 4))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.Adam, lr=0.1, replicas=replicas)
    sizes = []
    for step in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        optim.zero_grad()
        sizes.append(ctx.world_size)
        time.sleep(0.05)
    return os.getpid(), sizes, [p.tolist() for p in model.parameters()]


async def main():
    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    async with cl.Session((1, 3), address=cluster.address, timeout_s=20) as session:
        await session.run(train, steps=1)
        replicas = int(sys.argv[1])
        running = asyncio.create_task(session.run(train, steps=80, replicas=replicas))
        await asyncio.sleep(1)
        GcsClient(address=cluster.address).drain_node(
            node.node_id,
            autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION,
            "the price has changed",
            int((time.time() + 60) * 1000),
        )
        told = await running
    print("RANKS", len(told))
    for _, sizes, parameters in told:
        assert parameters == told[0][2]
        print("SIZES", sizes[0], sizes[-1], len(sizes))
    ray.shutdown()
    cluster.shutdown()


asyncio.run(main())
"""


@pytest.mark.promise("a worker that receives SIGTERM, a node that is drained")
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_leave_a_node_that_is_drained_and_the_others_go_on(
    tmp_path: Path, replicas: int
) -> None:
    program = tmp_path / "drain.py"
    program.write_text(PROGRAM)
    said = output_of(program, str(replicas), timeout_s=150)
    assert "RANKS 2" in said
    assert said.count("SIZES 3 2 80") == 2, said


NEXT_RUN = """
import asyncio, json, os, signal, time
import ray
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION
from ray._raylet import GcsClient
import chorusline as cl

def where(ctx):
    return os.getpid(), ray.get_runtime_context().get_node_id()

async def main():
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    until_ms = int((time.time() + 300) * 1000)
    async with cl.Session(
        (1, 2), address=cluster.address, placement_strategy=STRATEGY, startup_timeout_s=30
    ) as session:
        first = dict(map(reversed, await session.run(where)))
        GcsClient(address=cluster.address).drain_node(
            node.node_id, DRAIN_NODE_REASON_PREEMPTION, "", until_ms
        )
        while node.node_id not in ray._private.state.state.get_draining_nodes():
            await asyncio.sleep(0.1)
        os.kill(first[node.node_id], signal.SIGKILL)
        second = await session.run(where)
        other = cluster.add_node(num_cpus=1)
        async with asyncio.timeout(40):
            while len(third := await session.run(where)) < 2:
                await asyncio.sleep(0.2)
    here = ray.get_runtime_context().get_node_id()
    names = {here: "here", node.node_id: "drained", other.node_id: "other"}
    print(json.dumps([[names[one] for _, one in run] for run in (second, third)]))
    ray.shutdown()
    cluster.shutdown()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "strategy", ["PACK", pytest.param("STRICT_SPREAD", marks=pytest.mark.slow)]
)
def test_the_next_run_starts_no_worker_on_a_node_that_is_drained(
    tmp_path: Path, strategy: str
) -> None:
    program = tmp_path / "next_run.py"
    program.write_text(NEXT_RUN.replace("STRATEGY", repr(strategy)))
    second, third = last_line_of(program, timeout_s=150)
    assert second == ["here"]
    assert sorted(third) == ["here", "other"]
