"""Fixtures of tests without Ray; those with it are in tests/with_ray.py."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket

# Before anything imports ray: no token files in the home directory, no drain at the end.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
# Ray lets its workers run at 15, where whatever else the machine does keeps them from their CPU.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (Ray spells it so)
os.environ.pop("RAY_ADDRESS", None)
# A shell lets its background jobs ignore Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Callable, Iterator

import pytest

import chorusline as cl
from tests.harness.reused_ranks import ReusedRanks

# The assertions of contracts say what they compare, as those of test modules do.
pytest.register_assert_rewrite("tests.contracts")

# A machine with a GPU may lack Ray: tests.on_gpu runs there what needs none.
_HAS_RAY = all(importlib.util.find_spec(name) is not None for name in ("ray", "pytest_asyncio"))
pytest_plugins = ["tests.selection", *(["tests.with_ray"] if _HAS_RAY else [])]


@pytest.fixture
def alone() -> Iterator[cl.Group]:
    """A group of this process only."""
    with cl.Group.create(cl.HashStore(), 0, 1) as group:
        yield group


@pytest.fixture
def port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], ReusedRanks]]:
    """ranks_of(size): processes that are the ranks of one group; no Ray."""
    started: dict[int, ReusedRanks] = {}

    def of_size(size: int) -> ReusedRanks:
        return started.setdefault(size, ReusedRanks(size))

    yield of_size
    for ranks in started.values():
        ranks.stop()


@pytest.fixture(scope="module")
def reused_ranks() -> Iterator[Callable[[str, int], ReusedRanks]]:
    """reused_ranks(transport, size): processes with one group, kept from one check to the next."""
    started: dict[tuple[str, int], ReusedRanks] = {}

    def of(transport: str, size: int) -> ReusedRanks:
        return started.setdefault((transport, size), ReusedRanks(size, transport))

    yield of
    for ranks in started.values():
        ranks.stop()
