"""Actors that outlive the process that started them: their names, and what the cluster remembers.

A detached session is held by a *session host*, an actor that Ray starts again when it dies. The
driver and the workers are detached actors as well, so they continue. The new session host finds
them by their names. What no actor could tell it (where the seats are, which run was asked for) the
session host has written to the key-value store of the cluster's head, a few kilobytes.

If the session host is gone for good, the driver and the workers end themselves (`end_without`), and
remove the session's placement groups.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Collection
from typing import Any

import ray
from ray import cloudpickle
from ray._raylet import PlacementGroupID
from ray.experimental import internal_kv
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, remove_placement_group

from .calls import Actor

NAMESPACE = "chorusline"
"""Ray's namespace of our named actors, by which another process finds a cluster's sessions."""

INCARNATION, SESSION_HOST, WORKER = "/driver-", "/host", "/worker-"

OF_PROGRAM = "session-"
"""Beginning of the names of sessions that end with their program. No detached one has it."""

_ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray's resource of the head node, whose loss no session survives anyhow."""

_STORED = b"chorusline"

_HOST_WATCH_S, _MISSED = 5.0, 3
"""Seconds between two questions whether a session host is there, and how often it has to be
missed."""


class DetachedActors:
    """The actors of the detached session `name`, and the cluster's memory of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.host_name = f"{name}{SESSION_HOST}"

    def options_of_host(self) -> dict[str, Any]:
        """Ray's actor options; with them Ray raises ValueError if the name is taken."""
        here = {"num_cpus": 0, "resources": dict(_ON_HEAD), "max_restarts": -1}
        return {**self._named(self.host_name), **here}

    def options_of_driver(self, incarnation: int) -> dict[str, Any]:
        return self._named(f"{self.name}{INCARNATION}{incarnation}")

    def options_of_worker(self, seat: int, number: str) -> dict[str, Any]:
        """number: in no other name."""
        return self._named(f"{self.name}{WORKER}{seat}-{number}")

    def _named(self, name: str) -> dict[str, Any]:
        return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}

    def drivers(self) -> dict[int, Actor]:
        """Those that live, by incarnation."""
        return {int(rest): actor for rest, actor in self._found(INCARNATION)}

    def workers(self) -> list[tuple[int, Actor]]:
        """Those that live, each with the seat that it was started in."""
        return [(int(rest.partition("-")[0]), actor) for rest, actor in self._found(WORKER)]

    def _found(self, kind: str) -> list[tuple[str, Actor]]:
        found = []
        for name in names_of(kind, self.name):
            with contextlib.suppress(ValueError):  # It has died since Ray listed it.
                actor = ray.get_actor(f"{self.name}{kind}{name}", namespace=NAMESPACE)
                found.append((name, actor))
        return found

    def host(self) -> Actor | None:
        """The session host, even while Ray starts it again; None if there is none."""
        try:
            return ray.get_actor(self.host_name, namespace=NAMESPACE)
        except ValueError:
            return None

    def save(self, what: str, value: object) -> None:
        """Have the head remember a small value. Blocks for one call."""
        internal_kv._internal_kv_put(self._key(what), cloudpickle.dumps(value), namespace=_STORED)

    def saved(self, what: str) -> Any:
        """What was saved last; None if nothing was."""
        stored = internal_kv._internal_kv_get(self._key(what), namespace=_STORED)
        return None if stored is None else cloudpickle.loads(stored)

    def remove_groups(self, kept: Collection[PlacementGroup] = ()) -> None:
        """Remove the placement groups of this session (`new_group_name`) but those in `kept`."""
        stay = {group.id.hex() for group in kept}
        for number, entry in placement_group_table().items():
            is_ours = entry["name"].startswith(_groups_of(self.name))
            if is_ours and entry["state"] != "REMOVED" and number not in stay:
                remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(number))))

    def clear(self) -> None:
        """End the driver and the workers, remove the groups, and have the head forget it all."""
        self.end_actors()
        self.forget()

    def end_actors(self) -> None:
        """End the driver and the workers, and remove the groups."""
        for actor in [*self.drivers().values(), *(worker for _, worker in self.workers())]:
            ray.kill(actor)
        self.remove_groups()

    def forget(self) -> None:
        """Have the head forget all of this session."""
        internal_kv._internal_kv_del(self._key(""), del_by_prefix=True, namespace=_STORED)

    def _key(self, what: str) -> bytes:
        return f"{self.name}/{what}".encode()


def _groups_of(session: str) -> str:
    # With the package's name: other programs of the cluster may name groups as they like.
    return f"{NAMESPACE}/{session}/"


def new_group_name(session: str) -> str:
    """A name for a new placement group of a session, by which `remove_groups` finds it."""
    return f"{_groups_of(session)}{uuid.uuid4().hex}"


def end_without(session: str) -> None:
    """End this actor's process when the session host of its session is gone for good, and not only
    restarted; it would stay forever."""
    detached = DetachedActors(session)

    def watch() -> None:
        missed = 0
        while missed < _MISSED:
            time.sleep(_HOST_WATCH_S)
            # That the head does not answer says nothing about the session host.
            with contextlib.suppress(Exception):
                missed = 0 if detached.host() is not None else missed + 1
        with contextlib.suppress(Exception):
            detached.remove_groups()
            detached.forget()
        os._exit(1)

    threading.Thread(target=watch, name="host-watch", daemon=True).start()


def names_of(kind: str, session: str | None = None) -> list[str]:
    """What follows `kind` in the names of one session's actors; or, with None, the names of all
    sessions that have an actor of that kind."""
    found = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name, is_kind, rest = entry["name"].partition(kind)
        if entry["namespace"] == NAMESPACE and is_kind and session in (None, name):
            found.append(name if session is None else rest)
    return sorted(set(found))
