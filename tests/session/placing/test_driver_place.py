"""The driver, and the reader of a Stream, run beside their session, on a cluster of three nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.programs import last_line_of

PROGRAM = """
import asyncio, json
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
import chorusline as cl


async def node_of(actor):
    return await actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())


async def main():
    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()
    drivers = []
    async with cl.Session(1, address=cluster.address, timeout_s=20) as session:
        worker_group = session._holder.worker_group
        for _ in range(3):
            await session.run(lambda ctx: None)
            drivers.append(await node_of(worker_group._driver) == here)
            worker_group._kill_driver()
        gone = NodeAffinitySchedulingStrategy("ab" * 28, soft=False)
        worker_group._driver_options = {"scheduling_strategy": gone}
        anywhere = await session.run(lambda ctx: "it ran")
    readers = []
    for _ in range(3):
        stream = cl.Stream(range(3))
        readers.append(await node_of(stream.reader) == here)
        stream.close()
    print(json.dumps([drivers, readers, anywhere]))
    ray.shutdown()
    cluster.shutdown()


asyncio.run(main())
"""


@pytest.mark.slow
def test_the_driver_runs_beside_its_session_and_elsewhere_if_that_node_takes_none(
    tmp_path: Path,
) -> None:
    program = tmp_path / "place.py"
    program.write_text(PROGRAM)
    drivers, readers, anywhere = last_line_of(program, timeout_s=150)
    assert drivers == [True] * 3
    assert readers == [True] * 3
    assert anywhere == ["it ran"]
