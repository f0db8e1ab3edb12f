"""Ray's memory monitor kills a worker, since its node runs low on memory. For real: a program
starts a Ray of its own, whose monitor has a low threshold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import chorusline as cl
from chorusline.runtime.session.holding.local_session import LocalSession
from tests.harness.memory_limits import memory_limit
from tests.harness.programs import last_line_of
from tests.references import low_memory

REMEDY = (
    "Give the node more memory, use fewer workers on it or smaller batches, or start Ray with a "
    "higher RAY_memory_usage_threshold"
)


@pytest.mark.promise("Ray's memory monitor kills a worker, since the node runs low on memory")
def test_an_actor_that_rays_memory_monitor_killed_has_died_and_the_error_says_what_to_do() -> None:
    detail = last_line_of("-m", "tests.references.low_memory", "actor", timeout_s=110)
    assert detail.startswith("Ray killed it because its node ran low on memory (1 worker(s) were ")
    assert detail.endswith(REMEDY)
    assert "\n" not in detail, "it ends where Ray's advice on tasks and its list of processes begin"


def started_at() -> int:
    """When this process has, in ticks since the machine has."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


async def test_the_driver_is_older_than_the_workers_as_ray_ends_the_youngest(cluster: None) -> None:
    async with cl.Session(2, resources_per_worker={"CPU": 0.1}) as session:
        assert isinstance(session._holder, LocalSession)
        driver = session._holder.worker_group._driver
        assert driver is not None
        of_driver = await driver.__ray_call__.remote(lambda _: started_at())
        of_workers = await session.run(lambda ctx: started_at())
    assert of_driver < min(of_workers)


# As a container has it: the program sees its own group as all of the machine.
IN_GROUP = """
set -e
echo $$ > "$1/cgroup.procs"
mount --bind "$1" "$(dirname "$1")"
exec "$2" -m tests.references.low_memory session
"""


@pytest.mark.timeout(300)
def test_a_run_goes_on_without_a_worker_that_rays_memory_monitor_killed() -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets us make no mount namespaces")
    with memory_limit(low_memory.LIMIT) as procs:
        done = subprocess.run(
            [
                *("unshare", "-m", "--kill-child", "bash", "-c", IN_GROUP, "group"),
                *(procs.parent, sys.executable),
            ],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert done.returncode == 0, done.stdout + done.stderr
    hog, results = json.loads(done.stdout.splitlines()[-1])
    assert results and hog not in [pid for pid, _, _ in results]
    for _, num_steps, weight in results:
        assert num_steps == 10 and weight == low_memory.steps_of_one_process()
    assert f"(pid {hog}) died (Ray killed it because its node ran low on memory (" in done.stderr
    assert "no step is lost" in done.stderr, done.stderr
