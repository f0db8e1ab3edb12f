"""SIGTERM while a process connects to Ray, and from then on: it unwinds, and exits with 143."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest
import ray

from chorusline.runtime.session import connecting


@pytest.fixture(autouse=True)
def _handler_is_put_back() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of what answers, and is no cluster."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def set_rays_handler(**options: object) -> None:
    """As ray.init begins."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))


def terminate() -> NoReturn:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
    raise AssertionError("the signal did nothing")


def enter_connected(address: str) -> None:
    with connecting.connected(address):
        pass


@pytest.mark.parametrize("connect", [connecting.connect, enter_connected])
def test_sigterm_while_ray_starts_exits_with_143(
    connect: object, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: object) -> None:
        set_rays_handler()
        terminate()

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(SystemExit) as exited:
        connect(address)  # type: ignore[operator]
    assert exited.value.code == 143


def test_sigterm_exits_with_143_while_a_command_is_connected(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", set_rays_handler)
    with pytest.raises(SystemExit) as exited, connecting.connected(address):
        terminate()
    assert exited.value.code == 143
