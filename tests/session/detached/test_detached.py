"""Sessions that outlive their program: it is killed, and its driver and session host as well."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group_table
from ray.util.placement_group import placement_group, remove_placement_group

import chorusline as cl
from chorusline.actors.errors import StartupError
from chorusline.actors.ray_calls.detached_actors import DetachedActors, new_group_name
from chorusline.runtime.session.detached.client import DetachedClient
from tests.harness.forked_workers import python
from tests.harness.programs import completed

PROGRAM = """
import asyncio, json, os, sys, time
import torch
import chorusline as cl

def train(ctx, num_samples, pause_s):
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(3, 1)))
    optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(
        model, torch.optim.SGD, lr=0.01, replicas=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    samples = torch.arange(3.0 * num_samples).reshape(num_samples, 3) / num_samples
    for epoch in ctx.epochs(1):
        with cl.Join([model, optim]):
            for batch in ctx.shard(samples, 1, epoch=epoch, shuffle=False):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
                ctx.report(sample=round(batch[0, 0].item() * num_samples / 3), step=ctx.step)
                if ctx.rank == 0 and ctx.step % 10 == 0:
                    print(f"at step {ctx.step}", flush=True)
                time.sleep(pause_s)
    return ctx.step, [parameter.flatten().tolist() for parameter in model.parameters()]

async def main():
    given = json.loads(sys.argv[1])
    few = {"CPU": 0.2}
    async with cl.Session(detached=True, resources_per_worker=few, **given["session"]) as s:
        print("started", flush=True)
        if given["num_samples"]:
            run = await s.submit(train, num_samples=given["num_samples"], pause_s=given["pause_s"])
            print("submitted", run, flush=True)
            if given["waits"]:
                print(json.dumps(await s.results()), flush=True)

asyncio.run(main())
"""


class Script:
    """A program that has a detached session, in a process of its own."""

    def __init__(self, folder: Path, environment: dict[str, str], **given: Any) -> None:
        script = folder / "night.py"
        script.write_text(PROGRAM)
        given = {"num_samples": 0, "pause_s": 0.02, "waits": True} | given
        command, variables = python()
        self.process = subprocess.Popen(
            [*command, script, json.dumps(given)],
            env={**environment, **variables, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    async def says(self, word: str) -> str:
        assert self.process.stdout is not None
        while line := await asyncio.to_thread(self.process.stdout.readline):
            if word in line:
                return line
        pytest.fail(self.process.communicate()[1])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
async def name(cluster: None) -> AsyncIterator[str]:
    """A name for a session, which is ended after the test if it is there still."""
    name = f"night-{random.randrange(10**6)}"
    yield name
    with contextlib.suppress(StartupError):
        async with cl.attach(name) as session:
            await session.stop()
    assert DetachedActors(name).host() is None
    assert DetachedActors(name).saved("run") is None, "the head remembers nothing of it"


def kill(name: str, who: str) -> None:
    """Kill the session host, or the newest driver, of which there may be none for a moment."""
    detached = DetachedActors(name)
    if who == "host":
        actor = detached.host()
    else:
        actor = max(detached.drivers().items(), default=(-1, None))[1]
    with contextlib.suppress(ray.exceptions.RayActorError, ProcessLookupError):
        if actor is not None:
            pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
            os.kill(pid, signal.SIGKILL)


def check_run(results: list[Any], reports: list[cl.Report], num_samples: int) -> None:
    """No step was lost or taken twice, and each sample was used once."""
    steps = {result[0] for result in results}
    taken = Counter(report.values["sample"] for report in reports)
    assert taken == Counter(range(num_samples))
    assert len(steps) == 1
    for rank in {report.rank for report in reports}:
        theirs = [report.step for report in reports if report.rank == rank]
        assert theirs == list(range(len(theirs)))
    assert all(result[1] == results[0][1] for result in results)


@pytest.mark.promise("the death of the program that has a detached session, with the driver's")
async def test_a_program_that_dies_with_its_driver_costs_no_step_and_another_one_attaches(
    name: str, on_cluster: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {"num_workers": 2, "max_failures": 1, "name": name}
    script = Script(tmp_path, on_cluster, session=given, num_samples=240)
    await script.says("submitted")
    with pytest.raises(StartupError, match=f"chorusline stop {name}"):  # The name is taken.
        await DetachedClient.started(name, cl.Session()._options, 1.0)
    kill(name, "driver")
    script.kill()

    async with cl.attach(name) as session:
        assert session.num_workers == 2
        with pytest.raises(RuntimeError, match="runs another function"):
            await session.submit(lambda ctx: None)
        results = await session.results()
        reports = await session.reports()
        check_run(results, reports, 240)
        assert "[rank 0] at step 110" in capfd.readouterr().out
        assert await session.run(lambda ctx: ctx.rank) == [0, 1], "it takes the next function"
        running = await session.submit(lambda ctx: asyncio.sleep(60))
        assert running == 2
        assert await session.interrupt()
        with pytest.raises(cl.GroupAborted, match="interrupted"):
            await session.results()
    detached = DetachedActors(name)
    assert detached.host() is not None and len(detached.workers()) == 2, "it continues"
    await session.stop()
    assert detached.host() is None and not detached.workers() and not detached.drivers()


def test_wrong_names_are_told_with_the_mend_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"needs a name.*Session\(name='night', detached=True\)"):
        cl.Session(detached=True)
    with pytest.raises(ValueError, match="detached=True"):
        cl.Session(name="night")
    for wrong in ("", "a/b", "-x", "x" * 65, "session-1"):
        with pytest.raises(ValueError, match="letters, digits"):
            cl.Session(name=wrong, detached=True)
    with pytest.raises(TypeError, match="must be a string"):
        cl.Session(name=3, detached=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="idle_timeout_s"):
        cl.Session(name="night", detached=True, idle_timeout_s=0)


async def test_a_run_that_its_program_does_not_wait_for_is_refused_where_trackers_want_to_record_it(
    tmp_path: Path,
) -> None:
    recorded = [f"jsonl:{tmp_path / 'runs'}"]
    session = cl.Session(name="night", detached=True, trackers=recorded)
    session._holder = DetachedClient("night", None)
    with pytest.raises(ValueError, match=r"submit\(\) does not wait.*session\.run.*leave trackers"):
        await session.submit(lambda ctx: None)


async def test_a_cluster_that_ends_with_the_program_and_a_session_that_is_not_there_are_refused(
    cluster: None,
) -> None:
    with pytest.raises(StartupError, match="ray start --head"):  # This process has started it.
        await cl.Session(name="night", detached=True).start()
    with pytest.raises(StartupError, match=r"no detached session 'nigth'.*there is none"):
        await cl.attach("nigth")
    with pytest.raises(StartupError, match=r"no detached session 'nigth'.*there is none"):
        await cl.attach("nigth").stop()
    session = cl.Session()
    with pytest.raises(RuntimeError, match=r"cl\.attach"):
        await session.results()


def groups_of(name: str) -> list[str]:
    """The states of a session's placement groups."""
    groups = placement_group_table().values()
    return [one["state"] for one in groups if one["name"].startswith(f"chorusline/{name}/")]


async def test_a_start_that_is_cancelled_while_it_waits_for_room_leaves_no_placement_group(
    name: str,
) -> None:
    # All CPUs, of which another program has a share: the wait is no hopeless one.
    others = placement_group([{"CPU": 0.01}])
    assert await asyncio.to_thread(others.wait, 30)
    all_of_them = {"CPU": ray.cluster_resources()["CPU"]}
    options = cl.Session(resources_per_worker=all_of_them)._options
    start = asyncio.create_task(DetachedClient.started(name, options, 1.0))
    try:
        async with asyncio.timeout(50):
            while "PENDING" not in groups_of(name):
                assert not start.done(), start.result()
                await asyncio.sleep(0.1)
    finally:
        start.cancel()
        await asyncio.wait([start])
        remove_placement_group(others)
    assert start.cancelled()
    assert set(groups_of(name)) == {"REMOVED"}


async def test_a_start_that_fails_after_its_workers_are_there_leaves_none_of_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(client: DetachedClient) -> None:
        raise RuntimeError("the session actor did not answer")

    monkeypatch.setattr(DetachedClient, "status", silent)
    options = cl.Session(1, resources_per_worker={"CPU": 0.2})._options
    with pytest.raises(RuntimeError, match="did not answer"):
        await DetachedClient.started(name, options, 60.0)
    detached = DetachedActors(name)
    assert detached.host() is None and not detached.workers() and not detached.drivers()
    assert set(groups_of(name)) == {"REMOVED"}


def instants(kind: str) -> Iterator[float]:
    draw = random.Random(kind)
    return iter([draw.uniform(0.0, 4.0) for _ in range(2)])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "victims",
    ["script", "driver", "driver script", "host", "host script", "driver host script"],
)
async def test_a_kill_at_a_random_instant_costs_no_step_for_one_who_attaches(
    name: str, on_cluster: dict[str, str], tmp_path: Path, victims: str
) -> None:
    given = {"num_workers": 2, "max_failures": 1, "name": name}
    script = Script(tmp_path, on_cluster, session=given, num_samples=600)
    await script.says("submitted")
    seen: set[tuple[int, int]] = set()
    for pause_s in instants(victims):  # The first may be before the first step, the second not.
        await asyncio.sleep(pause_s)
        for victim in victims.split():
            if victim == "script":
                script.kill()
            else:
                kill(name, victim)
        async with cl.attach(name) as session:
            history = await session.reports()
            taken = {(report.rank, report.step) for report in history}
            assert seen <= taken, "what was there to see before is in the history"
            async with asyncio.timeout(60):
                while not seen:
                    seen = {(report.rank, report.step) for report in await session.reports()}
                    await asyncio.sleep(0.1)
    async with cl.attach(name) as session:
        results = await session.results()
        check_run(results, await session.reports(), 600)
    if "host" in victims:  # Once more, after the run.
        kill(name, "host")
        async with cl.attach(name) as session:
            assert await session.results() == results
            check_run(results, await session.reports(), 600)
    if "script" not in victims:
        assert json.loads(await script.says("[[")) == [list(one) for one in results]
        script.process.communicate()


@pytest.mark.slow
async def test_an_idle_session_ends_gives_its_room_back_and_keeps_its_results(
    name: str, on_cluster: dict[str, str], tmp_path: Path
) -> None:
    given = {"num_workers": 2, "name": name, "idle_timeout_s": 3.0}
    script = Script(tmp_path, on_cluster, session=given, num_samples=20)
    await script.says("submitted")
    script.kill()
    detached = DetachedActors(name)
    async with asyncio.timeout(90):
        while detached.workers():
            await asyncio.sleep(0.5)
    async with cl.attach(name) as session:
        check_run(results := await session.results(), await session.reports(), 20)
        with pytest.raises(RuntimeError, match="idle for its limit of 3 s"):
            await session.submit(lambda ctx: None)
    kill(name, "host")
    async with cl.attach(name) as session:
        assert await session.results() == results
        with pytest.raises(RuntimeError, match="idle for its limit of 3 s"):
            await session.submit(lambda ctx: None)
    again = Script(tmp_path, on_cluster, session=given)
    await again.says("started")  # The name is free.
    again.kill()


@pytest.mark.slow
async def test_the_command_line_lists_shows_and_stops_a_detached_session(
    name: str, on_cluster: dict[str, str], tmp_path: Path
) -> None:
    def command(*words: str) -> str:
        arguments = ("-m", "chorusline.runtime.commands.command_line", *words)
        done = completed(*arguments, timeout_s=120, environment=on_cluster)
        return done.stdout + done.stderr

    given = {"num_workers": 2, "max_failures": 1, "name": name}
    script = Script(tmp_path, on_cluster, session=given, num_samples=600)
    await script.says("submitted")
    script.kill()
    listed = await asyncio.to_thread(command, "status", "--once")
    assert f"{name}: run 0" in listed
    # The session host may not have missed the killed program yet.
    attached = "it trains in the background; (1 program is|0 programs are) attached"
    assert re.search(f"{attached}; its workers are freed 30 min", listed)
    (pid,) = re.findall(r"(?m)^ *1 +(\d+) on ", listed)
    os.kill(int(pid), signal.SIGKILL)
    shown = await asyncio.to_thread(command, "attach", name)
    assert "[rank 0] at step 290" in shown and "[rank 0] returned (" in shown
    killed = rf"step \d+: rank 1 \(pid {pid}\) was killed or crashed. 2 workers continue .*"
    (line,) = re.findall(killed, shown)
    listed = await asyncio.to_thread(command, "status", "--once")
    assert "lost so far: 1, at step" in listed and line in listed
    assert "has ended" in await asyncio.to_thread(command, "stop", name)
    with pytest.raises(AssertionError, match="no detached session"):
        await asyncio.to_thread(command, "attach", name)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_nothing_is_left_of_a_stopped_session_whose_host_hangs(
    name: str, on_cluster: dict[str, str]
) -> None:
    options = cl.Session(1, resources_per_worker={"CPU": 0.2})._options
    client = await DetachedClient.started(name, options, 60.0)
    await client.close()
    detached = DetachedActors(name)
    pid = await detached.host().__ray_call__.remote(lambda _: os.getpid())  # type: ignore[union-attr]
    os.kill(pid, signal.SIGSTOP)
    command = ("-m", "chorusline.runtime.commands.command_line", "stop", name)
    stopped = completed(*command, timeout_s=150, environment=on_cluster)
    assert f"the session {name!r} has ended" in stopped.stdout
    assert f"the session actor of {name!r} did not end the session" in stopped.stderr
    assert detached.host() is None and not detached.workers() and not detached.drivers()
    assert set(groups_of(name)) == {"REMOVED"}
    async with asyncio.timeout(30):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_nothing_is_left_of_a_session_whose_host_is_gone_for_good(
    name: str, on_cluster: dict[str, str], tmp_path: Path
) -> None:
    script = Script(tmp_path, on_cluster, session={"num_workers": 2, "name": name})
    await script.says("started")
    script.kill()
    detached = DetachedActors(name)
    host = detached.host()
    ray.kill(host, no_restart=True)
    async with asyncio.timeout(90):
        while detached.workers() or detached.drivers():
            await asyncio.sleep(0.5)
    detached.forget()


@pytest.mark.slow
def test_a_kernel_that_is_killed_leaves_the_run_to_the_next_one(
    name: str, on_cluster: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("ipykernel")
    from tests.harness.kernels import Kernel

    code = PROGRAM.split("async def main")[0]
    first = Kernel(RAY_ADDRESS=on_cluster["RAY_ADDRESS"])
    try:
        assert first.run(code).error is None
        assert (
            first.run(
                f"night = await cl.Session(2, name={name!r}, detached=True, max_failures=1, "
                "resources_per_worker={'CPU': 0.2})\n"
                "await night.submit(train, num_samples=400, pause_s=0.05)"
            ).error
            is None
        )
        time.sleep(3)
    finally:
        first.manager.shutdown_kernel(now=True)
    second = Kernel(RAY_ADDRESS=on_cluster["RAY_ADDRESS"])
    try:
        attached = second.run(
            "import chorusline as cl\n"
            f"night = await cl.attach({name!r})\nhistory = await night.reports()\n"
            "print(len(history))"
        )
        assert attached.error is None, attached.traceback
        assert int(attached.printed) > 0
        shown = second.run("results = await night.results()\nresults[0][0]")
        assert shown.error is None, shown.traceback
        assert shown.value == "200"
        last = shown.only_display()[-1]["text/html"]
        assert "sample" in last and "<svg" in last, "the live view has the history"
        assert second.run("await night.stop()").error is None
    finally:
        second.manager.shutdown_kernel(now=True)


def count_aloud(ctx: cl.Context, name: str, until: int) -> None:
    for number in range(until):
        print(f"of the {name} run: {number}", flush=True)
        time.sleep(0.05)


@pytest.mark.slow
async def test_each_line_is_shown_once_where_the_session_host_dies_meanwhile(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    few = {"CPU": 0.2}
    options = cl.Session(1, resources_per_worker=few)._options
    await (await DetachedClient.started(name, options, 60.0)).close()  # On the tests' cluster.
    async with cl.attach(name) as session:
        await session.run(count_aloud, name="first", until=40)
        running = asyncio.create_task(session.run(count_aloud, name="second", until=300))
        await asyncio.sleep(5)
        await asyncio.to_thread(kill, name, "host")
        await running
    shown = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[rank 0]")]
    assert shown == [
        *(f"[rank 0] of the first run: {number}" for number in range(40)),
        *(f"[rank 0] of the second run: {number}" for number in range(300)),
    ]


def test_only_placement_groups_of_the_session_are_removed_with_it(cluster: None) -> None:
    """Another program may name a group as it likes, also by the name of the session."""
    names = ["night/serving", new_group_name("night"), new_group_name("night-2")]
    groups = [placement_group([{"CPU": 0.01}], name=name) for name in names]
    try:
        DetachedActors("night").remove_groups()
        states = {one["name"]: one["state"] for one in placement_group_table().values()}
        assert [states[name] == "REMOVED" for name in names] == [False, True, False]
    finally:
        for group in groups:
            remove_placement_group(group)
