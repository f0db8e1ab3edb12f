"""A store by its URL, in which ranks meet that Chorusline did not start.

The ranks of a session meet in the driver and need no URL. Ranks that a launcher, torchrun or a
shell starts do. The URLs have torch's forms:

    tcp://host:port?rank=0&world_size=2    rank 0 hosts torch's TCPStore there
    file:///path?rank=0&world_size=2       a FileStore: ranks of one host, no port
    env://                                 tcp, from MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE

With tcp and env, rank 0 opens a port: at the address that the URL names, and at no other, unless
the URL has the parameter listen=ADDRESS (0.0.0.0 for every interface). torch's server has no
password. A program that reaches the port can pass for a rank, and as ranks unpickle each other's
objects, **may run code as this user**: every user of this host can, if the address is 127.0.0.1. A
secret that all ranks have (`secret=`, or CHORUSLINE_SECRET) shuts them out; see signed_store.py.
For ranks of one host, file:// needs no port. Under torchrun, the agent hosts the store already, and
listens everywhere.
"""

from __future__ import annotations

import os
import socket
import weakref
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..contract.argument_kinds import check_kinds, checked_place
from ..contract.deadlines import Seconds, checked_seconds
from ..contract.errors import StoreLost
from .file_store import FileStore
from .signed_store import checked_secret, signed
from .store import PrefixStore, Store
from .torch_store import Caller, CallTimedOut, StoreFromTorch

DEFAULT_TIMEOUT_S = 60.0

_FORMS = "tcp://host:port, file:///absolute/path or env://"
_GRACE_S = 3.0  # torch stops trying to connect somewhat after its timeout


class Rendezvous(NamedTuple):
    """The content of a URL: the store, this process's rank, and the number of ranks.

    Example:

        meeting = cl.store_from_url(f"file://{folder}/store", rank=group.rank, size=2)
        with cl.Group.create(meeting.store, meeting.rank, meeting.size) as another:
            another.barrier().wait()
    """

    store: Store
    rank: int
    size: int


def store_from_url(
    url: str,
    rank: int | None = None,
    size: int | None = None,
    *,
    timeout_s: Seconds = DEFAULT_TIMEOUT_S,
    secret: str | bytes | None = None,
) -> Rendezvous:
    """The store at `url`, and this process's rank and the number of ranks.

        url = f"file://{folder}/store?rank={group.rank}&world_size=2"  # Or tcp://host:port, env://
        store, rank, size = cl.store_from_url(url)
        with cl.Group.create(store, rank, size) as another:
            another.barrier().wait()

    rank, size: needed if neither the URL (parameters `rank` and `world_size`) nor the environment
    gives them. timeout_s: seconds that rank 0 may be late, and the timeout of the store.
    secret: at least 16 bytes, the same on all ranks; by default the environment variable
    CHORUSLINE_SECRET. With one, ranks read in the store, and from each other as objects, only what
    is signed with it (signed_store.py): another value raises SecretMismatch, and another object
    ends the group, with a GroupAborted on all ranks.

    The store lives as long as the object on rank 0: keep it while ranks meet in it. Several groups
    and generations share one store: `Group.create(store, rank, size, generation=1)`.

    Does not wait for the other ranks. Raises ValueError if the URL lacks something; StoreLost if
    its host cannot be reached in time, or the port is taken; StaleStore for an earlier run's file.
    """
    if not isinstance(url, str):
        raise TypeError(f"url must be a string, got {type(url).__name__}; write {_FORMS}")
    check_kinds(store_from_url, locals())
    timeout_s = checked_seconds(timeout_s)
    if secret is not None:
        secret = checked_secret(secret)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"url {url!r} cannot be read: {error}; write {_FORMS}") from None
    if parts.scheme not in ("tcp", "file", "env"):
        raise ValueError(f"url {url!r} is of an unknown kind; write {_FORMS}")
    settings = _parameters(url, parts)
    listen = settings.pop("listen", None)
    if listen is not None and parts.scheme == "file":
        raise ValueError(
            f"url {url!r} names a file, which needs no address to listen at; leave out listen"
        )
    if parts.scheme == "env":
        # What the URL says counts more than a variable of the environment.
        settings = _environment(url) | settings
    rank = _settled("rank", rank, "rank", settings, url)
    size = _settled("size", size, "world_size", settings, url)
    rank, size = checked_place(rank, size)
    store: Store
    if parts.scheme == "file":
        store = _file_store(url, parts)
    elif parts.scheme == "env":
        master_port = _number("MASTER_PORT", settings["MASTER_PORT"], url)
        store = _tcp_store(url, settings["MASTER_ADDR"], master_port, listen, rank, timeout_s)
    else:
        if not parts.hostname or port is None:
            raise ValueError(f"url {url!r} lacks a host or a port; write tcp://host:port")
        store = _tcp_store(url, parts.hostname, port, listen, rank, timeout_s)
    store = signed(store, secret)
    store.set_timeout(timeout_s)
    return Rendezvous(store, rank, size)


def _parameters(url: str, parts: SplitResult) -> dict[str, str]:
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    for name, _ in pairs:
        if name not in ("rank", "world_size", "listen"):
            raise ValueError(
                f"url {url!r} has the parameter {name!r}; known: rank, world_size, listen"
            )
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"url {url!r} names a parameter twice; leave one")
    return dict(pairs)


def _environment(url: str) -> dict[str, str]:
    """The variables of env://, by a URL's names. The caller may pass rank and size instead."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(
                f"url {url!r} needs the environment variable {name}, which is not set. Set "
                "MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE as torchrun does, or write "
                "tcp://host:port"
            )
    names = {"RANK": "rank", "WORLD_SIZE": "world_size"}
    return {
        names.get(name, name): os.environ[name]
        for name in ("MASTER_ADDR", "MASTER_PORT", *names)
        if os.environ.get(name)
    }


def _settled(
    argument: str, given: int | None, parameter: str, settings: dict[str, str], url: str
) -> int:
    """The number from the caller, the URL or the environment."""
    if parameter not in settings:
        if given is None:
            place = f"the parameter {parameter} of url {url!r}"
            if url.startswith("env:"):
                place = f"the environment variable {parameter.upper()}"
            raise ValueError(f"{argument} is missing: pass {argument}=..., or set {place}")
        return int(given)
    number = _number(argument, settings[parameter], url)
    # Two numbers that differ are a mistake in one of them, and nobody knows in which.
    if given is not None and given != number:
        raise ValueError(
            f"{argument}={given!r} is given, but url {url!r} says {number}; leave one of the two"
        )
    return number


def _number(name: str, text: str, url: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r} for url {url!r}") from None


def _file_store(url: str, parts: SplitResult) -> Store:
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(f"url {url!r} has no absolute path; write file:///absolute/path")
    try:
        return FileStore(unquote(parts.path))
    except OSError as error:
        raise ValueError(
            f"url {url!r} cannot be opened: {error.strerror}; name a file in a folder that exists "
            "and that this user may write to"
        ) from error


_hosted: weakref.WeakValueDictionary[tuple[str, int], TCPStore] = weakref.WeakValueDictionary()
"""The servers of this process, by address: a second URL of the same port shares one."""


def _tcp_store(
    url: str, host: str, port: int, listen: str | None, rank: int, timeout_s: float
) -> Store:
    if not 0 < port < 2**16:
        raise ValueError(
            f"url {url!r}: port must be in [1, 65535], got {port}; all ranks need the same one, so "
            "it cannot be left to the system"
        )
    # torchrun's agent hosts the store itself.
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # All others are clients: the store lives where rank 0 does.
    hosts = rank == 0 and not agent_hosts
    place = host if listen is None else listen

    def connect() -> StoreFromTorch:
        server = _hosted.get((place, port)) if hosts else None
        # torch's own server would listen on every interface, so it gets a socket that is bound.
        bound = _bound_at(place, port) if hosts and server is None else None
        try:
            store = TCPStore(
                # This process finds its server also if `host` is an address of a gateway.
                host if bound is None else _as_seen_here(bound),
                port,
                is_master=bound is not None,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,  # Group.create waits, and names the missing ranks.
                master_listen_fd=None if bound is None else bound.fileno(),
            )
        except BaseException:
            if bound is not None:
                bound.close()
            raise
        if bound is not None:
            bound.detach()  # The server closes it.
            _hosted[place, port] = store
        return StoreFromTorch(store, server)

    try:
        # A server of another kind would block torch forever.
        store = Caller().call(timeout_s + _GRACE_S, connect)
    except CallTimedOut:
        reason = f"it did not answer within {timeout_s + _GRACE_S:g} s"
    except (dist.DistError, StoreLost, OSError) as error:
        reason = str(error).splitlines()[0]
    else:
        # torch itself may use this port for its rendezvous; and torchrun's store outlives the ranks
        # of an attempt, whose keys would mislead the next attempt.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent_hosts else "0"
        return PrefixStore(f"chorusline/{attempt}", store)
    if hosts:
        remedy = (
            "Choose a port that is free on this host, and a host name that means this host; "
            "behind a gateway, where it does not, add the parameter listen=0.0.0.0 to the URL"
        )
    else:
        host_is = "torchrun's agent" if agent_hosts else "rank 0"
        remedy = (
            f"{host_is} hosts it: check that it runs, that {host!r} means its host from here and "
            "on that host itself (it listens at that address only), and that no firewall is "
            "between"
        )
    raise StoreLost("rendezvous", f"rank {rank} has no store at {host}:{port}: {reason}. {remedy}")


def _bound_at(host: str, port: int) -> socket.socket:
    """A socket that listens at the first address of `host` that this host has. Raises OSError."""
    failure: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        listening = socket.socket(family, kind, protocol)
        try:
            # A port whose last connections linger is free for a run that starts again.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(socket.SOMAXCONN)
        except OSError as error:
            listening.close()
            # A name may have several addresses, such as IPv6 and IPv4: the first reason is told.
            failure = failure or OSError(error.errno, f"{error.strerror} ({address[0]})")
        else:
            return listening
    assert failure is not None  # getaddrinfo raises, or knows an address.
    raise failure


def _as_seen_here(bound: socket.socket) -> str:
    """The address at which this process reaches its own listening socket."""
    address = str(bound.getsockname()[0])
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
