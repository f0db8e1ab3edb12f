"""The seats of a session's workers: a seat is the resources of one worker, on a node that stays.

Each seat has a placement group of its own, those of the first seats placed when the session started
(placement.py), the others made when a run could use a worker there. A pending group asks Ray's
autoscaler for a node; on a cluster that does not grow it costs nothing. The first seats are bundles
of one group where they can only be lost together.

Inside a Ray Tune trial the first seats are bundles of the trial's own group (`Borrowed`), and there
are no later ones: the trial holds what the session may use, and gives it back.

The seats of spare workers come last. When a spare worker takes an empty seat, the two seats
exchange their places; so a *place* is the number that a seat began with.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, remove_placement_group

from chorusline.actors.ray_calls.calls import nodes_leaving

from . import placement
from .placement import Needs

_LOOK_S = 0.5  # between two looks whether a group was placed

_SHARED_S = 0.25
"""Seconds for which all empty seats use one look at the cluster: each look asks the head for every
group of the session."""

_ASKED_AT_ONCE = 16
"""The most groups that are pending at once, so that a session of up to a thousand workers does not
flood the scheduler."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Bundles of a group that another owner has placed, and removes. indices: the bundles."""

    group: PlacementGroup
    indices: tuple[int, ...]


class PlacedSeats:
    """The implementation of `chorusline.actors.worker_group.seats.Seats` by placement groups.

    first: the groups of the first seats, already placed: one of all, or one of each; or bundles of
        another's group.
    most: the most seats of workers.
    spares: the number of spare workers.

    With STRICT_SPREAD each later group names the nodes that it must avoid. It cannot name the
    nodes of other pending groups, so only one group is pending at a time. When a node dies and Ray
    moves its group, these names are out of date, and a new group replaces it. With STRICT_PACK
    there are only the first seats, which usually fill their node.
    """

    def __init__(
        self,
        first: Sequence[PlacementGroup] | Borrowed,
        needs: Needs,
        most: int,
        spares: int = 0,
    ) -> None:
        strategy = needs.strategy
        self._is_borrowed = isinstance(first, Borrowed)
        self._first: PlacementGroup | None = None
        """The group of several first seats; None: each has its own."""
        self._first_bundles: tuple[int, ...] = ()
        """By place of such a seat, the index of its bundle."""
        self._own: dict[int, PlacementGroup] = {}  # by another place
        if isinstance(first, Borrowed):
            self._first, self._first_bundles = first.group, first.indices
        elif len(first) == 1 and (first[0].bundle_count > 1 or strategy == "STRICT_PACK"):
            self._first, self._first_bundles = first[0], tuple(range(first[0].bundle_count))
        else:
            self._own = dict(enumerate(first))
        self._needs = needs
        self._waiting: set[int] = set()
        """Places whose groups are pending."""
        self._seen: dict[int, str] = {}  # by place: its node, when it was last looked for
        self._leaving: frozenset[str] = frozenset()  # nodes that were drained at that time
        self._looked_at = -math.inf
        self._homes: dict[int, str] = {}  # by place with a group of its own: its first node
        self._moved: dict[int, int] = {}
        """By seat, its place, where the two are not the same."""
        self._on_change: Callable[[], None] = lambda: None
        self._lock = threading.Lock()  # Every `wait_for` looks from a thread of its own.
        self._is_over = False
        self._is_spread = strategy == "STRICT_SPREAD"
        num_first = len(self._first_bundles)
        self._num_begun = num_first + len(self._own)
        """The session has started with so many places, for which it asks again at any time."""
        # A trial has no more than it holds.
        if self._is_borrowed:
            most = min(most, num_first - spares)
        self.most = num_first if strategy == "STRICT_PACK" and not self._is_borrowed else most
        self.spare_seats = range(self.most, self.most + spares)

    def whenever_changed(self, on_change: Callable[[], None]) -> None:
        """Have `on_change` called, now and later, when `state` is to be remembered again."""
        self._on_change = on_change
        on_change()

    def state(self) -> dict[str, Any]:
        """For a session host that is started again: the groups, and which seat is where."""
        kept = ("_needs", "_first", "_first_bundles", "_own", "_num_begun", "_homes", "_moved")
        both = {name: getattr(self, name) for name in kept}
        return both | {"most": self.most, "spares": len(self.spare_seats)}

    @classmethod
    def recalled(cls, state: Mapping[str, Any]) -> PlacedSeats:
        """The seats that had this state."""
        seats = cls((), state["_needs"], state["most"], state["spares"])
        seats._first, seats._first_bundles = state["_first"], state["_first_bundles"]
        seats._num_begun = state["_num_begun"]
        seats.most = state["most"]  # With STRICT_PACK the groups have decided it.
        seats.spare_seats = range(seats.most, seats.most + state["spares"])
        seats._own, seats._homes = dict(state["_own"]), dict(state["_homes"])
        seats._moved = dict(state["_moved"])
        seats._waiting = set(seats._own)  # Until they are seen placed.
        return seats

    @property
    def has_all(self) -> bool:
        later = set(map(self._place_of, range(self.most))) - set(range(len(self._first_bundles)))
        return all(place in self._own and place not in self._waiting for place in later)

    def placed(self) -> list[int]:
        with self._lock:
            nodes = self._nodes()
            return [seat for seat in range(self.most) if self._place_of(seat) in nodes]

    def vacant(self, taken: Collection[int]) -> list[int]:
        # Places that have never been there are only asked for during a run (`wait_for`). That of a
        # former spare worker was there, and may have lost its group since (`_renew`).
        known = {*range(self._num_begun), *self._own, *self._moved.values()}
        empty = [seat for seat in range(self.most) if seat not in taken]
        return [s for s in empty if self._place_of(s) in known and self._has_room(s)]

    def swap(self, seat: int, other: int) -> None:
        # In one assignment: other threads read it, and none waits here for the lock.
        here, there = self._place_of(seat), self._place_of(other)
        self._moved = self._moved | {seat: there, other: here}
        self._on_change()

    def _place_of(self, seat: int) -> int:
        return self._moved.get(seat, seat)

    async def wait_for(self, seat: int) -> None:
        while True:
            if await asyncio.to_thread(self._has_room, seat):
                return
            await asyncio.sleep(_LOOK_S)

    def _has_room(self, seat: int) -> bool:
        """Whether a seat without a worker has a node that will stay. Makes a group for it if it has
        none, or if its node is drained: Ray starts no workers there."""
        with self._lock:
            place = self._place_of(seat)
            nodes = self._nodes()
            is_leaving = nodes.get(place) in self._leaving
            # After a move the nodes that its group avoids are out of date.
            if place in self._own and (is_leaving or self._has_moved(place)):
                self._drop(place)
            # The first seats have theirs from the start, and keep them.
            if place >= len(self._first_bundles) and place not in self._own:
                # Asked again later: each pending group is looked at by Ray's scheduler all the
                # time.
                if len(self._waiting) >= (1 if self._is_spread else _ASKED_AT_ONCE):
                    return False
                self._ask(place, set(nodes.values()))
            return nodes.get(place, "") not in {"", *self._leaving}

    def _ask(self, place: int, taken: set[str]) -> None:
        self._own[place] = group = self._asked_for(taken)
        self._waiting.add(place)
        # The caller of this thread may have been cancelled, and the session closed meanwhile.
        if self._is_over:
            remove_placement_group(group)
        else:
            self._on_change()

    def _asked_for(self, taken: set[str]) -> PlacementGroup:
        """A new group for one seat. taken: nodes that have a seat."""
        return (self._needs.apart_from(taken) if self._is_spread else self._needs).group()

    def _nodes(self) -> dict[int, str]:
        """The node of each place that has one, as was seen within _SHARED_S. Ray moves a group
        whose node has died; a group that Ray has not been able to move yet is replaced."""
        if time.monotonic() - self._looked_at < _SHARED_S:
            return self._seen
        self._leaving = frozenset(nodes_leaving())
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        places = {(group, 0): place for place, group in self._own.items()}
        if self._first is not None:
            places |= {(self._first, i): place for place, i in enumerate(self._first_bundles)}
        groups = [*self._own.values(), *([self._first] if self._first else [])]
        tables = {group: placement_group_table(group) for group in groups}
        bundles = {group: table.get("bundles_to_node_id", {}) for group, table in tables.items()}
        nodes = {place: str(bundles[group].get(i, "")) for (group, i), place in places.items()}
        for place, group in list(self._own.items()):
            # Ray's own search for another node is dear, and may last forever: see `_renew`. A
            # group is removed already where a session host has died before it noted the next one.
            if tables[group].get("state") in ("RESCHEDULING", "REMOVED"):
                del nodes[place]
                self._renew(place)
        # A pending group has no node, and one whose node has died may still name that.
        found = {place: node for place, node in nodes.items() if node in alive}
        if self._is_spread:
            found = self._apart(found)
        self._waiting.difference_update(found)
        # From the end of the look: the seats that have waited for it use it, however long it took.
        self._seen, self._looked_at = found, time.monotonic()
        return found

    def _renew(self, place: int) -> None:
        """Replace the group of a place whose node has died. While such a group finds no other node,
        Ray's head retries without a pause and spends two cores on it (Ray 2.60;
        github.com/ray-project/ray/pull/65007). A new pending group costs nothing."""
        self._drop(place)
        if not self._is_spread:  # With STRICT_SPREAD one group is pending at a time: `_has_room`.
            self._ask(place, set())

    def _drop(self, place: int) -> None:
        remove_placement_group(self._own.pop(place))
        self._seen.pop(place, None)
        self._homes.pop(place, None)
        self._waiting.discard(place)

    def _has_moved(self, place: int) -> bool:
        home = self._homes.get(place)
        # It has not been placed yet.
        if home is None:
            return False
        table = placement_group_table(self._own[place]).get("bundles_to_node_id", {})
        return str(table.get(0, "")) not in {"", home}

    def _apart(self, found: dict[int, str]) -> dict[int, str]:
        """Leave out the places that Ray has moved, since another may be on their new node."""
        own = {place: node for place, node in found.items() if place in self._own}
        own = {s: node for s, node in own.items() if self._homes.setdefault(s, node) == node}
        # Ray keeps the first seats apart from each other, but not from the later ones.
        taken = set(own.values())
        first = {s: node for s, node in found.items() if s not in self._own and node not in taken}
        return own | first

    def is_here(self, seat: int) -> bool:
        node_id = ray.get_runtime_context().get_node_id()
        return self._seen.get(self._place_of(seat)) == node_id

    def options(self, seat: int) -> dict[str, Any]:
        place = self._place_of(seat)
        if self._first is not None and place < len(self._first_bundles):
            group, index = self._first, self._first_bundles[place]
        else:
            group, index = self._own[place], 0
        return placement.options_of_bundle(group, index, self._needs.bundle)

    @property
    def groups(self) -> list[PlacementGroup]:
        # What is borrowed is given back by its owner.
        first = [] if self._first is None or self._is_borrowed else [self._first]
        return [*self._own.values(), *first]

    async def give_back(self) -> None:
        # First: a thread that makes a group now either sees this, or its group is among these.
        self._is_over = True
        groups = self.groups
        self._own, self._waiting, self._homes = {}, set(), {}
        await placement.give_back(groups)
