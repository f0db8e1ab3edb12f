"""A head node of our own, started as a user would, in processes of its own.

Never `ray stop`: it ends every Ray process of the machine. `--block` ties the node's processes to
one, which takes them along when it is told to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

BIN = Path(sys.executable).parent
MARK = "CHORUSLINE_TEST_HEAD"  # In the environment of all that the head node starts.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {
    "PATH": f"{BIN}:{os.environ['PATH']}",  # A job says `python`, and means ours.
    "RAY_AUTH_MODE": "disabled",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@contextlib.contextmanager
def head_node(
    *flags: str,
    is_up: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    has_autoscaler: bool = False,
) -> Iterator[None]:
    """flags: of `ray start --head`, ports among them. is_up: whether it answers. has_autoscaler: it
    starts nodes of its own, which outlive it as a cloud's machines would, and are ended here."""
    # Not pytest's folder: sockets lie in it, and their paths may not be long.
    with tempfile.TemporaryDirectory(prefix="head", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            head = subprocess.Popen(
                [
                    *(BIN / "ray", "start", "--head", "--block", f"--temp-dir={folder}"),
                    *flags,
                ],
                env=ENVIRONMENT | dict(environment or {}) | {MARK: folder},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            wait_until(lambda: is_up() or head.poll() is not None, 90)
            assert head.poll() is None, log.read_text()
            assert marked(folder), "the watch for what is left behind sees nothing"
            yield
        finally:
            head.terminate()
            head.wait(60)
            wait_until(lambda: not marked(folder), 3 if has_autoscaler else 30)
            left = marked(folder)
            for process in left:
                os.kill(process, signal.SIGKILL)
            assert has_autoscaler or not left, f"processes of the cluster were left behind: {left}"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)


def marked(folder: str) -> list[int]:
    """Ids of the living processes that descend from the head node of `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # It ended meanwhile, or is another user's.
            if f"{MARK}={folder}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def dashboard_of_head(environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """A head node to which jobs can be submitted; gives the address of its dashboard."""
    port, client, agent = free_ports(3)
    address = f"http://127.0.0.1:{port}"
    flags = [
        *("--port=0", "--num-cpus=2", "--include-dashboard=true", "--dashboard-host=127.0.0.1"),
        *(f"--dashboard-port={port}", f"--dashboard-agent-listen-port={agent}"),
        f"--ray-client-server-port={client}",
    ]

    def is_up() -> bool:
        # A job is submitted to the node's agent, which begins seconds after the dashboard.
        health = f"http://127.0.0.1:{agent}/api/local_raylet_healthz"
        return answers(f"{address}/api/version") and answers(health)

    with head_node(*flags, is_up=is_up, environment=environment):
        yield address


def answers(url: str) -> bool:
    """Whether a server answers there with anything but an error, or wants a token for it."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except OSError:
        return False
