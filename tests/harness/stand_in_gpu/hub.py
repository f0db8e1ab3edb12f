"""Where the kernels of the ranks meet: a thread of the test's process, which no test kills.

A kernel leaves its payload under a key and, unless it only gives, waits for those of other ranks.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, NamedTuple

Key = tuple[Any, ...]


class Request(NamedTuple):
    """What a kernel sends, as a plain tuple.

    key: what meets. rank: a name that is unique there. payload: what it gives.
    needs: the names that it waits for. takers: how many kernels wait so under this key.
    ring: whether a rank also gets through when the rank before it posted garbage.
    """

    key: Key
    rank: Any
    payload: Any
    needs: frozenset[Any] = frozenset()
    takers: int = 0
    ring: bool = False


class Garbage(NamedTuple):
    """A payload of a kernel that was aborted: its data is wrong, its flags are valid."""

    content: Any


STOP = "stop"


@dataclass
class Room:
    payloads: dict[Any, Any] = field(default_factory=dict)
    waiting: dict[Connection, Request] = field(default_factory=dict)
    takers: int = 0
    served: int = 0


class Hub:
    def __init__(self, path: Path) -> None:
        self._listener = Listener(str(path), "AF_UNIX", backlog=128)
        self._rooms: dict[Key, Room] = {}
        self._keys: dict[Connection, Key] = {}  # in which a connection waits
        self._connections: set[Connection] = set()
        threading.Thread(target=self._accept, daemon=True, name="stand-in-hub").start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        here, there = Pipe()
        threading.Thread(target=self._serve, args=(there,), daemon=True).start()
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                here.close()
                return
            self._connections.add(connection)
            here.send(None)  # Look again.

    def _serve(self, news: Connection) -> None:
        while True:
            for ready in wait([news, *self._connections]):
                assert isinstance(ready, Connection)
                try:
                    received = ready.recv()
                except (EOFError, OSError):
                    if ready is news:
                        return
                    self._leave(ready)
                    self._connections.discard(ready)
                    continue
                if received == STOP:
                    if self._leave(ready):
                        _send(ready, None)
                elif received is not None:
                    self._take(ready, Request(*received))

    def _leave(self, connection: Connection) -> bool:
        """It waits no longer; whether it had waited."""
        key = self._keys.pop(connection, None)
        if key is not None:
            del self._rooms[key].waiting[connection]
        return key is not None

    def _take(self, connection: Connection, request: Request) -> None:
        room = self._rooms.setdefault(request.key, Room())
        room.payloads[request.rank] = request.payload
        room.takers = max(room.takers, request.takers)
        if request.needs:
            room.waiting[connection] = request
            self._keys[connection] = request.key
        else:
            _send(connection, True)
        for waiting, waits in list(room.waiting.items()):
            if _is_served(room, waits):
                self._leave(waiting)
                room.served += 1
                _send(waiting, dict(room.payloads))
        if room.served and room.served == room.takers:
            del self._rooms[request.key]


def _is_served(room: Room, waits: Request) -> bool:
    if waits.needs <= room.payloads.keys():
        return True
    if not waits.ring:
        return False
    before = room.payloads.get((waits.rank - 1) % waits.takers)
    return isinstance(before, Garbage)


def _send(connection: Connection, payload: Any) -> None:
    with contextlib.suppress(OSError):  # Its process is gone.
        connection.send(payload)


class Line:
    """A rank's connection to the hub, for one thread at a time."""

    def __init__(self, path: str) -> None:
        self._connection = Client(path, "AF_UNIX")

    def give(self, key: Key, rank: Any, payload: Any) -> None:
        self._connection.send(tuple(Request(key, rank, payload)))
        self._connection.recv()

    def meet(
        self,
        key: Key,
        rank: Any,
        payload: Any,
        needs: frozenset[Any],
        stopped: threading.Event | None = None,
        *,
        takers: int,
        ring: bool = False,
    ) -> dict[Any, Any] | None:
        """The payloads of `needs`; None if `stopped` was set before they had all come."""
        self._connection.send(tuple(Request(key, rank, payload, needs, takers, ring)))
        asked = False
        while not self._connection.poll(0.005):
            if stopped is not None and stopped.is_set() and not asked:
                self._connection.send(STOP)
                asked = True
        found: dict[Any, Any] | None = self._connection.recv()
        return found
