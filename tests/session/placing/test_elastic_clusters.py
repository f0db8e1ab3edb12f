"""Runs that grow and shrink with their cluster: nodes that Ray's own autoscaler starts because
workers are wanted, and nodes that a test adds and drains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.autoscaling_head import autoscaling_head
from tests.harness.head_node import ENVIRONMENT
from tests.harness.programs import completed, last_line_of


def at(address: str) -> dict[str, str]:
    """The environment of a program whose sessions come to the cluster at `address`."""
    return ENVIRONMENT | {"RAY_ADDRESS": address}


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
        # Workers come one after another, or together.
        if ctx.reduce(int(sizes[-1:] == [goal]), "min"):
            break
    return os.getpid(), sizes, [p.tolist() for p in model.parameters()]

async def main():
    seen = []
    async with cl.Session((1, 3), timeout_s=30, on_report=lambda r: seen.append(r.rank)) as session:
        at_start = session.num_workers
        told = await asyncio.wait_for(session.run(train, goal=3), 120)
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
    with autoscaling_head(tmp_path, num_cpus=1, most_nodes=2) as address:
        done = completed("-c", GROWS, timeout_s=180, environment=at(address))
    at_start, told = json.loads(done.stdout.splitlines()[-1])
    assert at_start == 1
    assert len(told) == 3
    # The worker of the start is there at the end, and has not left off in between.
    (_, sizes), *newcomers = told
    assert sizes[0] == 1 and sizes[-1] == 3
    assert all(sizes[-1] == 3 and sizes[0] > 1 for _, sizes in newcomers)


STARTS_FROM_NOTHING = """
import asyncio, json, os, sys, time
import ray
import chorusline as cl

async def main():
    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
    assert not ray.cluster_resources().get("CPU")
    refusals = []
    for wrong in ({"num_workers": 4}, {"num_workers": 1, "use_gpu": True}):
        began_at = time.monotonic()
        try:
            await cl.Session(**wrong, startup_timeout_s=60).start()
        except Exception as error:
            refusals.append((type(error).__name__, str(error), time.monotonic() - began_at))
    try:
        await cl.Session(2, startup_timeout_s=0.5).start()
    except Exception as error:
        refusals.append((type(error).__name__, str(error), 0))
    async with cl.Session((2, 3), startup_timeout_s=90) as session:
        ranks = await session.run(lambda ctx: ctx.world_size)
    print(json.dumps([refusals, ranks]))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", [1, 2])
def test_a_session_starts_on_a_cluster_that_has_no_workers_yet(
    tmp_path: Path, version: int
) -> None:
    head = autoscaling_head(tmp_path, num_cpus=0, most_nodes=3, version=version)
    script = STARTS_FROM_NOTHING
    if version == 1:  # It does not tell what it can never do; so this would wait for its minute.
        script = script.replace('({"num_workers": 4}, {"num_workers": 1, "use_gpu": True})', "()")
    with head as address:
        done = completed("-c", script, timeout_s=200, environment=at(address))
    refusals, ranks = json.loads(done.stdout.splitlines()[-1])
    assert ranks in ([2, 2], [3, 3, 3])
    *never, too_late = refusals
    assert too_late[0] == "StartupError"
    assert "not placed within 0.5 s" in too_late[1] and "raise startup_timeout_s" in too_late[1]
    waits = [line for line in done.stderr.splitlines() if "Waiting for nodes" in line]
    # Each start says once that it waits, unless the autoscaler says at once that it cannot.
    assert len(refusals) + 1 - len(never) <= len(waits) <= len(refusals) + 1
    assert "num_workers=2 with CPU 1 each" in waits[-1] and "up to 90 s" in waits[-1]
    assert "the cluster has CPU 0 (0 free) on 1 node" in waits[-1]
    assert "its autoscaler has" in waits[-1] or "nothing yet" in waits[-1]
    if version == 1:
        return
    assert all(kind == "StartupError" and seconds < 30 for kind, _, seconds in never)
    assert "num_workers=4 with CPU 1 each" in never[0][1]
    assert "the cluster has CPU 0 (0 free)" in never[0][1]
    assert "its autoscaler reports that it cannot add suitable nodes" in never[0][1]
    assert "the cluster has no GPU" in never[1][1]


SPREADS = """
import asyncio, json, os, time
import ray, torch
import chorusline as cl

def train(ctx):
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(4, 4)))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.Adam, lr=0.1, replicas=2)
    ctx.register("optim", optim)
    for epoch in ctx.epochs(10_000):
        with cl.Join([model, optim]):
            for batch in ctx.shard(torch.ones(48, 4), 4, epoch=epoch):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
                time.sleep(0.05)
        if ctx.world_size == 3:
            return ray.get_runtime_context().get_node_id()

async def main():
    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
    few = {"CPU": 0.2}  # All three would fit on the head.
    async with cl.Session(
        (1, 3), placement_strategy="STRICT_SPREAD", resources_per_worker=few, timeout_s=30
    ) as session:
        at_start = session.num_workers
        nodes = await asyncio.wait_for(session.run(train), 220)
    print(json.dumps([at_start, nodes]))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_session_that_is_strictly_spread_grows_onto_nodes_of_their_own(tmp_path: Path) -> None:
    with autoscaling_head(tmp_path, num_cpus=1, most_nodes=2) as address:
        done = completed("-c", SPREADS, timeout_s=260, environment=at(address))
    at_start, nodes = json.loads(done.stdout.splitlines()[-1])
    if at_start == 3:
        pytest.skip("the autoscaler has added all nodes before the session had begun")
    assert len(nodes) == len(set(nodes)) == 3


TWO_FOUR_THREE = """
import asyncio, json, sys, tempfile, time
import ray
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION
import chorusline as cl
from benchmarks.faults.chaos import Nodes
from benchmarks.faults.chaos_faults import Plan
from benchmarks.faults.chaos_training import complaints, train

async def until(session, running, num_ranks):
    while True:
        driver = (await session.snapshot()).driver
        told = [] if driver is None else driver.members
        members = [info for info, state in told if state.value == "running"]
        if len(members) == num_ranks:
            return members
        assert not running.done(), await running
        await asyncio.sleep(0.2)

async def until_all_step(session, running, num_ranks):
    # Until each of them has taken a step with the others.
    began = None
    while True:
        seen = [one for one in (await session.snapshot()).workers if not isinstance(one, str)]
        taken = [one.status.taken for one in seen]
        if len(taken) == num_ranks:
            began = max(taken) if began is None else began
            if min(taken) > began:
                return
        assert not running.done(), await running
        await asyncio.sleep(0.2)

async def main(nodes, folder):
    plan = Plan(0, 2, 2, 0.001, (), registers=True, step_s=1.0)
    nodes.have(2)
    async with cl.Session((1, 4), address=nodes.address, timeout_s=30) as session:
        running = asyncio.create_task(session.run(train, plan=plan, folder=folder))
        await until(session, running, 2)
        await until_all_step(session, running, 2)
        nodes.have(4)
        members = await until(session, running, 4)
        if not sys.argv[1:]:
            await until_all_step(session, running, 4)
        GcsClient(address=nodes.address).drain_node(
            members[1].node_id, DRAIN_NODE_REASON_PREEMPTION, "", int((time.time() + 300) * 1000)
        )
        told = await running
    first = {members[0].pid, members[2].pid, members[3].pid}
    print(json.dumps([
        [one.world_sizes for one in told],
        complaints(told, folder),
        {one.pid for one in told} == first,
    ]))

nodes = Nodes()
try:
    ray.init(nodes.address, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(nodes, folder))
finally:
    ray.shutdown()
    nodes.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("meanwhile", ["newcomers make their objects", "all four take steps"])
def test_two_ranks_become_four_and_then_three_and_take_the_steps_of_one_process(
    meanwhile: str,
) -> None:
    """A node is drained when four have a rank, at once, or when they have taken a step."""
    at_once = ["at once"] if "newcomers" in meanwhile else []
    sizes, wrong, are_the_same = last_line_of(
        "-c", TWO_FOUR_THREE, *at_once, timeout_s=230, environment=ENVIRONMENT
    )
    assert wrong == []
    assert are_the_same, "no process was started anew"
    # Two nodes come one after the other, so some steps may be taken by three in between.
    assert len(sizes) == 3 and sizes[0][0] == 2 and all(one[-1] == 3 for one in sizes)
    if not at_once:
        assert all(one[-2:] == [4, 3] for one in sizes)


TWO_LOST_ONE_COMES = """
import asyncio, json
import ray
import chorusline as cl
from benchmarks.faults.chaos import Nodes

def where(ctx):
    return ray.get_runtime_context().get_node_id()

async def until_there_are(session, num):
    async with asyncio.timeout(90):
        while len(found := await session.run(where)) != num:
            await asyncio.sleep(0.2)
    return found

async def main(nodes):
    nodes.have(3)
    async with cl.Session((1, 3), address=nodes.address, max_failures=None) as session:
        seen = []
        for num in (3, 1, 2, 3):
            nodes.have(num)
            seen.append(await until_there_are(session, num))
    return seen

nodes = Nodes()
try:
    ray.init(nodes.address, log_to_driver=False)
    seen = asyncio.run(main(nodes))
finally:
    ray.shutdown()
    nodes.close()
print(json.dumps(seen))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_node_that_comes_after_two_were_lost_is_used_at_once() -> None:
    """Ray moves what was lost of a placement group only when there is room for all of it."""
    before, one, two, three = last_line_of(
        "-c", TWO_LOST_ONE_COMES, timeout_s=280, environment=ENVIRONMENT
    )
    assert set(one) < set(before) and set(one) < set(two) < set(three)
    assert len(set(three)) == 3
