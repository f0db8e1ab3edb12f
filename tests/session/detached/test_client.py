"""What a program leaves of its client when it drops the session, or its connection to Ray."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import chorusline as cl
from chorusline.actors.parcels.parcel import Parcel
from chorusline.runtime.session.detached import client as clients
from chorusline.runtime.session.detached.client import DetachedClient


class Host:
    """A session host that counts what it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=self._count)

    def _count(self, *_: object) -> None:
        self.num_calls += 1


def thread_of(name: str) -> threading.Thread:
    """The thread that says that the program is there still."""
    return next(one for one in threading.enumerate() if one.name == f"attached-{name}")


def test_a_session_that_nobody_holds_any_more_is_not_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    session: Any = cl.attach("dropped")
    session._holder = DetachedClient("dropped", Host())
    session._holder._stay()
    thread = thread_of("dropped")
    del session
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


async def test_a_client_whose_process_has_left_the_cluster_calls_nothing_of_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray would start or join a cluster for the call."""
    monkeypatch.setattr(clients, "_HERE_S", 0.01)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "put", lambda _: pytest.fail("it joins a cluster"))
    monkeypatch.setattr(ray, "get_actor", lambda *_, **__: pytest.fail("it joins a cluster"))
    host = Host()
    client = DetachedClient("left", host)
    client._stay()
    thread = thread_of("left")
    thread.join(10)
    assert not thread.is_alive()
    for call in (client.status(), client.begin(Parcel(b"")), client.reports(), client.stop()):
        with pytest.raises(RuntimeError, match=r"no longer connected to Ray.*cl.attach\('left'\)"):
            await call
    await client.close()
    assert host.num_calls == 1, "when it attached"
