"""The seats of a session's workers: a seat is the resources of one worker, on a node that stays.

The first seats are the bundles of one placement group, which was placed when the session started.
Each later seat has a placement group of its own, made when a run could use a worker there. A
pending group asks Ray's autoscaler for a node; on a cluster that does not grow it costs nothing.

The seats of the reserve come last. When a worker in reserve takes an empty seat, the two seats
exchange their places; so a *place* is the number that a seat began with.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.calls import nodes_leaving

from . import placement
from .options import NODE_ID

_LOOK_S = 0.5  # between two looks whether a group was placed

_ASKED_AT_ONCE = 16
"""The most groups that are pending at once, so that a session of up to a thousand workers does not
flood the scheduler."""


class Seats:
    """The implementation of `actors.crew.seats.Seats` by placement groups.

    first: the group of the first seats, already placed. most: the most seats of workers.
    spares: the number of seats in reserve.
    labels: of the nodes, as Ray's label selectors are written.

    With STRICT_SPREAD each later group names the nodes that it must avoid. It cannot name the
    nodes of other pending groups, so only one group is pending at a time. When a node dies and Ray
    moves its group, these names are out of date, and a new group replaces it. With STRICT_PACK
    there are only the first seats, which fill their node as a rule.
    """

    def __init__(
        self,
        first: PlacementGroup,
        bundle: Mapping[str, float],
        most: int,
        strategy: str,
        labels: Mapping[str, str],
        spares: int = 0,
    ) -> None:
        self._first = first
        self._bundle = dict(bundle)
        self._strategy = strategy
        self._labels = dict(labels)
        self._own: dict[int, PlacementGroup] = {}  # by later place
        self._waiting: set[int] = set()
        """Places whose groups are pending."""
        self._homes: dict[int, str] = {}  # by later place: the node where it was first
        self._moved: dict[int, int] = {}
        """By seat, its place, where the two are not the same."""
        self._lock = threading.Lock()  # Every `wait_for` looks from a thread of its own.
        self._is_spread = strategy == "STRICT_SPREAD"
        self.most = first.bundle_count if strategy == "STRICT_PACK" else most
        self.reserve = range(self.most, self.most + spares)

    @property
    def has_all(self) -> bool:
        later = [p for p in map(self._place_of, range(self.most)) if p >= self._first.bundle_count]
        return all(place in self._own and place not in self._waiting for place in later)

    def placed(self) -> list[int]:
        with self._lock:
            nodes = self._nodes()
            return [seat for seat in range(self.most) if self._place_of(seat) in nodes]

    def swap(self, seat: int, other: int) -> None:
        # In one assignment: other threads read it, and none waits here for the lock.
        here, there = self._place_of(seat), self._place_of(other)
        self._moved = self._moved | {seat: there, other: here}

    def _place_of(self, seat: int) -> int:
        return self._moved.get(seat, seat)

    async def wait_for(self, seat: int) -> None:
        while True:
            if await asyncio.to_thread(self._has_room, seat):
                return
            await asyncio.sleep(_LOOK_S)

    def _has_room(self, seat: int) -> bool:
        """Whether the seat has a node that will stay. Makes a group for it if it has none."""
        with self._lock:
            place = self._place_of(seat)
            nodes = self._nodes()
            if self._has_moved(place):
                self._drop(place)  # The nodes that its group avoids are out of date.
            if place >= self._first.bundle_count and place not in self._own:
                if len(self._waiting) >= (1 if self._is_spread else _ASKED_AT_ONCE):
                    return False
                self._waiting.add(place)
                self._own[place] = self._asked_for(set(nodes.values()))
                nodes = self._nodes()
        # A worker on a node that is being drained would have to leave at once.
        return nodes.get(place, "") not in {"", *nodes_leaving()}

    def _asked_for(self, taken: set[str]) -> PlacementGroup:
        """A new group for one seat. taken: nodes that have a seat."""
        labels = dict(self._labels)
        if self._is_spread and taken:
            # No blanks: Ray silently reads ", b" as a node other than "b".
            labels[NODE_ID] = f"!in({','.join(sorted(taken))})"
        return placement.group_of(self._bundle, 1, self._strategy, labels)

    def _nodes(self) -> dict[int, str]:
        """The node of each place that has one. Ray moves a group whose node has died; a group that
        Ray has not been able to move yet is replaced."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        places = {(self._first, index): index for index in range(self._first.bundle_count)}
        places |= {(group, 0): place for place, group in self._own.items()}
        tables = {
            group: placement_group_table(group) for group in (self._first, *self._own.values())
        }
        bundles = {group: table.get("bundles_to_node_id", {}) for group, table in tables.items()}
        nodes = {place: str(bundles[group].get(i, "")) for (group, i), place in places.items()}
        for place, group in list(self._own.items()):
            if tables[group].get("state") == "RESCHEDULING":
                del nodes[place]
                self._renew(place)
        found = {place: node for place, node in nodes.items() if node in alive}
        if self._is_spread:
            found = self._apart(found)
        self._waiting.difference_update(found)
        return found

    def _renew(self, place: int) -> None:
        """Replace the group of a place whose node has died. While such a group finds no other node,
        Ray's head retries without a pause and spends two cores on it (Ray 2.60;
        github.com/ray-project/ray/pull/65007). A new pending group costs nothing."""
        self._drop(place)
        if not self._is_spread:  # With STRICT_SPREAD one group is pending at a time: `_has_room`.
            self._waiting.add(place)
            self._own[place] = self._asked_for(set())

    def _drop(self, place: int) -> None:
        remove_placement_group(self._own.pop(place))
        self._homes.pop(place, None)
        self._waiting.discard(place)

    def _has_moved(self, place: int) -> bool:
        home = self._homes.get(place)
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

    def _bundle_of(self, place: int) -> tuple[PlacementGroup, int]:
        if place < self._first.bundle_count:
            return self._first, place
        return self._own[place], 0

    def options(self, seat: int) -> dict[str, Any]:
        return placement.options_of_bundle(*self._bundle_of(self._place_of(seat)), self._bundle)

    async def give_back(self) -> None:
        groups = [*self._own.values(), self._first]
        self._own, self._waiting, self._homes = {}, set(), {}
        for group in groups:
            await placement.give_back(group)
