"""Which tests run, and in which of pytest-xdist's processes: marks by what a test uses, the part of
a day, examples that hypothesis draws, and a Ray cluster in half of the processes."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

# A machine with a GPU may lack it, and leaves out the files whose tests draw examples.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # The fixtures of drawn examples, such as ranks that stand, are the same for all of them. A slow
    # or busy machine is no fault of a test.
    of_both: dict[str, Any] = {
        "deadline": None,
        "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    }
    # The ordinary suite draws the same few examples each time; `make test-slow` draws many others.
    settings.register_profile("few", max_examples=10, derandomize=True, database=None, **of_both)
    settings.register_profile("many", max_examples=100, print_blob=True, **of_both)
    settings.load_profile("few")

OWN_RAY = re.compile(
    "tests/(commands|notebook|session)/|tests/repository/benchmarks/test_chaos[.]py"
    "|tests/repository/documentation/test_(clusters_guide|documentation|examples?|quickstart)[.]py"
)
"""Whose tests may start Ray in a program of their own, which no fixture tells."""

FAST = re.compile(
    "tests/(actors|contracts|data|harness|join|partition|steps|tracking)/"
    "|tests/checkpoint/(test_(replica_check|schedules)|failures/test_trust)[.]"
    "|tests/collectives/(contract/test_(errors|group_contract|overlaps)|test_dry_run)[.]"
    "|tests/collectives/stores/test_(file_store|privacy)[.]"
    "|tests/data_parallel/(gradients/test_(backward_pass|comm_hooks|step_stat)"
    "|test_(grown_models|pure_distri))"
    "|tests/program/test_last_step[.]"
    "|tests/recovery/test_(furthest_rank|rank_state)[.]"
    "|tests/repository/code/test_(classes|comments|imports|process_wide_state|public_door)[.]"
    "|tests/repository/documentation/test_(documentation_site|quoted_errors)[.]"
    "|tests/repository/(benchmarks/test_faults_benchmark|packaging/test_project_files)[.]"
    "|tests/zero/(test_copies|shards/test_(exact_norm|resharding|shard_state|shards_and_buckets))[.]"
)
"""Files whose tests without Ray are decisions, names, and ranks on shared memory: they take seconds
in all, and are what `make test-fast` runs."""

_SLOWER = re.compile(
    r"gloo|stand.in|shared-memory-[34]|tests/data/(fetching/|test_streaming)"
    r"|tests/join/(bodies/)?test_(beside|fully_sharded|parts_of|random|several_models|weights)"
    r"|tests/steps/test_(on_a|refusals|same_bits)"
)
"""What takes long in these folders, such as comparisons of many programs with one process."""

_ASKS_FOR_RAY = re.compile(r"""def \w+\([^)]*\b(on_)?(cluster|session)\b|fixtures\("cluster""")
"""A test, or a fixture, that asks for a fixture with Ray."""

WORTH_A_CLUSTER = 8
"""Where so many files that need a cluster are left, one more process starts one."""

_began = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--part", metavar="I/N", help="the I-th of N parts of the tests, drawn by name")
    group.addoption("--budget-s", type=float, help="after so many seconds no test is begun")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For `-m fast`, files without such tests are not even imported."""
    if config.getoption("markexpr") != "fast" or collection_path.suffix != ".py":
        return None
    return not FAST.match(str(collection_path.relative_to(ROOT))) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if re.search("0x[0-9a-f]{6}", item.nodeid):
            raise pytest.UsageError(
                f"{item.nodeid} has the address of an object in its name, which is another one in "
                "each process of a run; give the case an id"
            )
        is_slow = any(item.get_closest_marker(name) for name in ("slow", "gpu"))
        draws_many = config.getoption("hypothesis_profile", None) == "many"
        # The plugin of hypothesis has not marked its tests yet.
        if draws_many and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.timeout(600))
        if "cluster" in getattr(item, "fixturenames", ()) or OWN_RAY.match(item.nodeid):
            item.add_marker("ray")
        elif FAST.match(item.nodeid) and not _SLOWER.search(item.nodeid) and not is_slow:
            item.add_marker("fast")
    if part := config.getoption("part"):
        number, parts = (int(word) for word in part.split("/"))
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != number - 1]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_began] = time.monotonic()
    # What is imported is no garbage: collections in tests, and in what they fork, are faster.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    budget_s = item.config.getoption("budget_s")
    if budget_s is not None and time.monotonic() - item.config.stash[_began] > budget_s:
        pytest.skip(f"not begun: the {budget_s:g} s of this run were over")


def pytest_configure(config: pytest.Config) -> None:
    told = getattr(config, "workerinput", None)  # A process of pytest-xdist has it.
    if told is not None and config.getoption("markexpr") != "fast":
        # Tests with Ray are the last to end, and each waits for processes that start.
        os.nice(0 if _has_ray(told["workerid"], told["workercount"]) else 4)


def _has_ray(name: str, num_processes: int) -> bool:
    """name: of a process of pytest-xdist, as "gw0"."""
    return int(name.removeprefix("gw")) < max(1, num_processes // 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`: files are units, and those with Ray go to half of the processes.

    Each process with such tests starts a cluster, which takes memory, and seconds.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByNeed(LoadFileScheduling):  # type: ignore[misc]
        helper: Any = None  # A process without a cluster that has none but such files left to take.

        def _assign_work_unit(self, node: Any) -> None:
            has_ray = _has_ray(node.gateway.id, self.numnodes)
            wanted = [file for file in self.workqueue if _may_use_ray(file) == has_ray]
            if not wanted and not has_ray:
                # The last ones: whatever starts a Ray of its own does not need the others' cluster.
                wanted = [file for file in self.workqueue if not _asks_for_cluster(file)]
                if not wanted and self.helper is None and len(self.workqueue) >= WORTH_A_CLUSTER:
                    self.helper = node
                if not wanted and self.helper is not node:
                    node.shutdown()
                    return
            self.workqueue.move_to_end((wanted or list(self.workqueue))[0], last=False)
            super()._assign_work_unit(node)

    return ByNeed(config, log)


def _may_use_ray(nodeid: str) -> bool:
    """Told without importing the file, which this process does not: it may say yes too often."""
    return bool(OWN_RAY.match(nodeid)) or _asks_for_cluster(nodeid)


def _asks_for_cluster(nodeid: str) -> bool:
    return bool(_ASKS_FOR_RAY.search((ROOT / nodeid.split("::")[0]).read_text()))
