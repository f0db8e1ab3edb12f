"""The cluster that a session connects to, or starts."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError

from chorusline.actors.errors import NoCluster, StartupError

from ..notebook import in_kernel
from ..process.running import is_running
from .interrupts import show_in_one_line
from .showing import rays_notices

_CONNECT_S = 5.0  # for a TCP connection to the cluster's head

_one_at_a_time = threading.Lock()  # Sessions may start in several threads.
_lasting_thread = ThreadPoolExecutor(1, "ray-start")
_our_node: Any = None
"""Ray's, of the local cluster that a session of this process has started."""
_num_users = 0
"""Sessions that use this cluster. The last one stops it."""


@dataclass(frozen=True)
class Connection:
    """This process's connection to Ray, as a session has found or made it.

    is_local: to a cluster that sessions of this process have started; its users must `leave` it.
    """

    node: Any
    is_local: bool

    @property
    def is_alive(self) -> bool:
        """False after `ray.shutdown()`, though this process may have another connection since."""
        return ray.is_initialized() and self.node is _node()

    @property
    def cluster(self) -> str:
        """The address of the cluster's head, even after the connection's end."""
        return str(self.node.gcs_address) if self.node is not None else ""

    def leave(self) -> None:
        """Stop the local cluster, unless another session of this process uses it, or the program
        itself has stopped it."""
        global _our_node, _num_users
        with _one_at_a_time:
            if not self.is_local or not self.is_alive or self.node is not _our_node:
                return
            _num_users -= 1
            if not _num_users:
                _our_node = None
                ray.shutdown()


def connect(
    address: str | None, log_to_driver: bool = True, *, may_start: bool = True
) -> Connection:
    """Connect this process to Ray.

    An existing connection is used first; else `address`; else RAY_ADDRESS (set in each Ray job);
    else a new cluster on this machine, or, without may_start, the one that runs here. Raises
    StartupError for the address of another cluster than that of the existing connection.

    It blocks the calling thread for seconds: Ray installs its SIGTERM handler only from the main
    thread, and a start in another thread could not be cancelled.
    """
    global _our_node, _num_users
    with _one_at_a_time, _sigterm_unwinds():
        try:
            if _connect(address, log_to_driver, may_start):
                _our_node, _num_users = _node(), 0
            is_ours = _our_node is not None and _our_node is _node()
            _num_users += is_ours
            rays_notices.leave_out()
            return Connection(_node(), is_ours)
        finally:
            show_in_one_line()


def _node() -> Any:
    """The node that this process has started or joined. No public call of Ray says it."""
    return ray._private.worker._global_node


def has_started_node() -> bool:
    """Whether this process has started the cluster that it is connected to."""
    return _node() is not None and bool(_node().head)


def what_it_does(address: str | None, *, may_start: bool) -> str:
    """What `connect` is about to do, for a line about the start."""
    address = address or os.environ.get("RAY_ADDRESS") or ("local" if may_start else "auto")
    if ray.is_initialized():
        return "waiting for Ray"
    if address == "local":
        return "starting Ray on this machine"
    where = "on this machine" if address == "auto" else f"at {address}"
    return f"waiting for the Ray cluster {where}"


def check_stays(name: str, address: str | None) -> None:
    """Raise NoCluster if the cluster for the detached session `name` would end with this process:
    this process has started it, or address says that it should."""
    is_ours = (address or os.environ.get("RAY_ADDRESS")) == "local"
    # The address does not count any more: this process is connected already.
    if ray.is_initialized():
        is_ours = has_started_node()
    if is_ours:
        show_in_one_line()
        raise NoCluster(
            f"the session {name!r} cannot be detached here",
            "the cluster is one that this program starts, and ends with it; start one that stays, "
            "with `ray start --head`, and connect to that one first, by address='auto'",
        )


def _connect(address: str | None, log_to_driver: bool, may_start: bool) -> bool:
    if is_running():
        raise RuntimeError(
            "a Session was started inside a train function: its workers would wait for resources "
            "that the workers of the outer session hold. Start sessions in the program, and call "
            "what this function should run directly, as other(ctx)"
        )
    # The user has connected, or another session has, and disconnects as well.
    if ray.is_initialized():
        _check_is_ours(address)
        return False
    address = address or os.environ.get("RAY_ADDRESS") or ("local" if may_start else "auto")
    options: dict[str, Any] = {"log_to_driver": log_to_driver}
    if in_kernel():  # A notebook shows what Ray says of the connection as if it were an error.
        options["logging_level"] = logging.WARNING
        rays_notices.leave_out_tokens()
    if address == "local" and may_start:
        _start_cluster(**options)
        return True
    join(address, may_start=may_start, **options)
    return False


def _start_cluster(**options: Any) -> None:
    """Raises NoCluster if Ray cannot start, as on a machine that is too busy."""
    _check_paths()
    rays_notices.leave_out_tokens()  # Ray makes the token, and this process has it.
    start = partial(ray.init, address="local", include_dashboard=False, **options)
    try:
        if threading.current_thread() is threading.main_thread():
            start()
        else:
            # Linux ends Ray's processes with the thread that has started them, and another session
            # may need them longer than this thread lives.
            _lasting_thread.submit(start).result()
    except Exception as error:
        if isinstance(error, ValueError | TypeError):
            raise  # Of the arguments, or of the environment's variables.
        raise NoCluster(
            "Ray cannot start on this machine",
            f"{' '.join(str(error).split()).rstrip('.')}. Try again when the machine is less busy, "
            "or start a cluster that stays, with `ray start --head`, and use it with "
            "address='auto'; `chorusline doctor` shows what is wrong here",
        ) from error


def _check_paths() -> None:
    """Raises StartupError for a path or argument that Ray cannot send, as UTF-8."""
    for path in (*sys.argv, *sys.path):
        try:
            path.encode()
        except UnicodeEncodeError:
            raise StartupError(
                f"{path!a} is not text in this process's locale",
                "Ray sends the script's name, its arguments and the folders of sys.path as UTF-8. "
                "Set PYTHONUTF8=1, or another locale than C (LANG=C.UTF-8), before Python starts",
            ) from None


def join(address: str | None, *, may_start: bool = False, **options: Any) -> None:
    """Connect to a running cluster. Raises StartupError; NoCluster if there is none.

    address: host:port; "auto" for the cluster of this machine; None for RAY_ADDRESS, or "auto".
    may_start: whether the caller could have started a cluster, which an error then mentions.
    options: those of ray.init.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_is_no_url(address)
    _check_paths()
    try:
        reached(address)
        # As it was given: only for "auto" does Ray take the token that a local run has left.
        ray.init(address=address, **options)
    except OSError as error:  # Ray's ConnectionError is an OSError.
        raise no_cluster(address, error.strerror or str(error), may_start) from None
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        raise StartupError(
            f"the cluster at {address!r} runs other versions than this process",
            f"{' '.join(str(error).split())} Use the cluster's Python and Ray here (its image, or "
            "a job that runs on it), or start the cluster with these",
        ) from None


def _check_is_no_url(address: str) -> None:
    if "://" in address:
        raise StartupError(
            f"address={address!r}",
            "a session connects as a part of the cluster, to host:port (usually 6379) or 'auto'. "
            "From outside, submit the script: ray job submit --address ... -- python ...",
        )


def _check_is_ours(address: str | None) -> None:
    """Raise StartupError if `address` names another cluster than the one that this process is
    connected to. "auto" and "local" name none."""
    if not address or address in ("auto", "local"):
        return
    _check_is_no_url(address)
    here: Any = ray._private.worker.global_worker
    ours = ray.get_runtime_context().gcs_address
    reason = "is another cluster"
    try:
        # Not by the texts: the head of a cluster has several addresses, as that of a service.
        if address == ours:
            return
        if GcsClient(address=reached(address)).cluster_id == here.gcs_client.cluster_id:
            return
    except (OSError, RayError) as error:
        reason = f"does not answer ({error})"
    raise StartupError(
        f"address={address!r} {reason}, and this process is connected to the cluster at {ours!r}",
        "a process is a part of one cluster at a time: first close the other session, or call "
        "ray.shutdown(); or leave address= out",
    )


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Have this process connected to a running cluster while the body runs, for a command. Raises
    as `join`."""
    was_connected = ray.is_initialized()
    try:
        if was_connected:
            _check_is_ours(address)
        else:
            with _sigterm_unwinds():
                join(address, log_to_driver=False, logging_level=logging.WARNING)
        yield
    finally:
        if not was_connected:
            ray.shutdown()


def no_cluster(address: str, reason: str, may_start: bool) -> NoCluster:
    """reason: why `address` could not be connected to. may_start: as of `join`."""
    or_ours = "; without an address the session starts a cluster of its own" if may_start else ""
    if address == "auto":
        return NoCluster(
            "no Ray cluster runs on this machine",
            "start one with `ray start --head`, or name one that runs elsewhere, host:6379, as "
            f"address=, as --address of a command, or in RAY_ADDRESS{or_ours}",
        )
    return NoCluster(
        f"no Ray cluster answers at {address!r} ({reason})",
        "start one there with `ray start --head`, or correct address=, --address or RAY_ADDRESS; "
        "if its Ray uses tokens, export RAY_AUTH_MODE=token here as well; "
        f"'auto' is the cluster of this machine{or_ours}",
    )


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Have SIGTERM unwind this process during and after the body, which may call ray.init, so that
    sessions are closed, as after an interrupt. A handler of the user is put back.

    ray.init begins with a handler of its own, which stays. It dumps the stack, and exits with 15,
    where a shell reports SIGTERM as 143.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        if error.code == signal.SIGTERM:
            sys.exit(128 + signal.SIGTERM)
        raise
    finally:
        # Python sets handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            is_rays = getattr(before, "__module__", "").startswith("ray.")
            is_users = callable(before) and not is_rays
            after = before if is_users else lambda number, _: sys.exit(128 + number)
            signal.signal(signal.SIGTERM, after)


def reached(address: str) -> str:
    """The address of the cluster, as host:port, or [host]:port of IPv6. Raises OSError at once
    where nothing listens: Ray itself tries again for a minute, even with the address that a cluster
    has left behind which was killed."""
    if address == "auto":
        address = ray._private.services.canonicalize_bootstrap_address("auto") or ""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and len(port) < 6 and int(port) < 1 << 16):
        raise OSError("an address is host:port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except UnicodeError:  # Of the encoding that names of hosts have.
        raise OSError(f"{host!a} is no name of a host") from None
    return address
