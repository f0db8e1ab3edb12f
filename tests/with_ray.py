"""One Ray cluster for all tests, and the watch that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.util import placement_group_table

import chorusline as cl
import tests
from tests.harness.forked_workers import forked_workers, starts

# Workers need not find tests/: what is in there, helpers too, is sent to them by value, as Ray
# sends the functions of a script.
cloudpickle.register_pickle_by_value(tests)

NUM_GPUS = 3  # as Ray is told; they stand in for real ones (tests/harness/stand_in_gpu)
NUM_CPUS = 5  # as Ray counts them, one for the session that stands; the machine may have fewer
_LEAK_PATIENCE_S = 30.0
_most_of_module: defaultdict[str, Counter[str]] = defaultdict(Counter)  # at the start of a test
_is_whole_in: set[str] = set()  # the modules for which the session of several tests was completed
_OF_RAY_DATA = {"_StatsActor", "_AutoscalingCoordinatorActor"}  # It has them stay.


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local cluster, started once: it takes seconds. Its workers are forked.

    Ray looks at all its log files ten times a second, for drivers that print them, and at all its
    processes every five seconds, for a dashboard: 90 s of a CPU in a run of the suite, and nobody
    is told.
    """
    with forked_workers(include_log_monitor=False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REPORTER_UPDATE_INTERVAL_MS", "86400000")
            ray.init(
                address="local",
                num_cpus=NUM_CPUS,
                num_gpus=NUM_GPUS,
                include_dashboard=False,
                log_to_driver=False,
            )
        yield
        ray.shutdown()


def pytest_sessionfinish(session: pytest.Session) -> None:
    told = getattr(session.config, "workeroutput", None)  # A process of pytest-xdist has it.
    if told is not None:
        told["starts"] = dict(starts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    starts.update(getattr(node, "workeroutput", {}).get("starts", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if starts:
        terminalreporter.write_line(
            f"processes that Ray started for actors and tasks: {starts.total()}, "
            f"{starts['forked']} of them forked"
        )


@pytest.fixture(scope="session")
async def _session_that_goes_on(cluster: None) -> AsyncIterator[cl.Session]:
    few = {"CPU": 0.1}
    async with cl.Session((1, 3), resources_per_worker=few, timeout_s=20) as session:
        yield session


@pytest.fixture
async def session(_session_that_goes_on: cl.Session) -> AsyncIterator[cl.Session]:
    """Three workers, of which runs may lose two; and three again when the test is over."""
    yield _session_that_goes_on
    await _session_that_goes_on.run(lambda ctx: None)


@pytest.fixture
def on_cluster(cluster: None) -> dict[str, str]:
    """The environment of a process whose sessions come to the tests' cluster."""
    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


@pytest.fixture(autouse=True)
async def _nothing_left_behind(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail on tasks, actors, actor processes and placement groups that a test adds and keeps."""
    if "cluster" not in request.fixturenames:
        yield
        return
    # A session of several tests may lack a worker or its driver, which the next run brings back: it
    # has them before the first test of a module that uses it, and what a later one lacks is not
    # taken for less.
    module = request.module.__name__
    if "_session_that_goes_on" in request.fixturenames and module not in _is_whole_in:
        await request.getfixturevalue("_session_that_goes_on").run(lambda ctx: None)
        _is_whole_in.add(module)
    now = _alive()  # The process of an actor may come after the actor.
    now |= {kind.replace("actor", "process", 1): now[kind] for kind in now if "actor" in kind}
    before = _most_of_module[request.module.__name__]
    before |= now
    yield
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not tasks, f"tasks are left behind: {tasks}"
    deadline = time.monotonic() + _LEAK_PATIENCE_S
    while (left := _alive() - before) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert not left, f"left behind: {dict(left)}"


def _alive() -> Counter[str]:
    """Actors, their processes and placement groups, counted by kind."""
    actors = ray._private.state.actors().values()
    alive = Counter(
        f"actor {actor['ActorClassName']}"
        for actor in actors
        if actor["State"] != "DEAD" and actor["ActorClassName"] not in _OF_RAY_DATA
    )
    groups = placement_group_table().values()
    alive["placement group"] = sum(group["state"] != "REMOVED" for group in groups)
    alive.update(f"process {title}" for title in actor_process_titles())
    return alive


def actor_process_titles() -> list[str]:
    """Class names of the actors whose processes exist: they descend from this process, by its
    raylet or by what forks workers."""
    titles = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().decode(errors="replace")
            if not command.startswith(
                ("ray::Worker", "ray::Driver", "ray::StoreActor", "ray::RowReader")
            ):
                continue
            if os.getpid() not in _ancestors(int(path.name)):
                continue  # Of somebody else's cluster on this machine.
        except OSError:
            continue  # It ended meanwhile.
        titles.append(command.removeprefix("ray::").split(".")[0].rstrip("\0 "))
    return titles


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        # The name in parentheses may hold anything; the fields after it are plain.
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid
