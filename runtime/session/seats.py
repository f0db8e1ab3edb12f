"""The seats of a session's workers: each has the resources of one worker, on a node that stays.

The first seats are the bundles of one placement group, which was there when the session started.
Each of the others has a group of its own, asked for when a run could use a worker there. To Ray's
autoscaler a group that cannot be placed is a wish for a node; to a cluster that does not grow it
is nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from actors.calls import nodes_leaving

from . import placement

_LOOK_S = 0.5

_ASKED_AT_ONCE = 16
"""Groups that wait for room: a session that would take a thousand does not flood the scheduler."""


class Seats:
    """first: placed. most: how many there may be in all.

    It is what `actors.crew.recruiting.Seats` asks for.

    With STRICT_SPREAD each of the later groups names the nodes that it must not be on. It cannot
    name those of groups that wait like itself, so one waits at a time; and where Ray has moved it,
    as its node has gone, what it names is out of date, and another takes its place. With
    STRICT_PACK there are never more than the first, which fill their node as a rule.
    """

    def __init__(
        self, first: PlacementGroup, bundle: Mapping[str, float], most: int, strategy: str
    ) -> None:
        self._first = first
        self._bundle = dict(bundle)
        self._strategy = strategy
        self._own: dict[int, PlacementGroup] = {}  # by seat
        self._waiting: set[int] = set()
        """Seats that have asked for room, and have not got any yet."""
        self._homes: dict[int, str] = {}  # by seat with a group of its own, where that came first
        self._lock = threading.Lock()  # Each seat is asked about in a thread of its own.
        self._is_spread = strategy == "STRICT_SPREAD"
        self.most = first.bundle_count if strategy == "STRICT_PACK" else most

    @property
    def has_all(self) -> bool:
        return self._first.bundle_count == self.most or (
            len(self._own) == self.most - self._first.bundle_count and not self._waiting
        )

    def placed(self) -> list[int]:
        with self._lock:
            return sorted(self._nodes())

    async def wait_for(self, seat: int) -> None:
        while True:
            if await asyncio.to_thread(self._has_room, seat):
                return
            await asyncio.sleep(_LOOK_S)

    def _has_room(self, seat: int) -> bool:
        """Also that the node is not to go: a worker there would have to leave at once."""
        with self._lock:
            nodes = self._nodes()
            if self._has_moved(seat):
                self._drop(seat)
            if seat >= self._first.bundle_count and seat not in self._own:
                if len(self._waiting) >= (1 if self._is_spread else _ASKED_AT_ONCE):
                    return False
                self._waiting.add(seat)
                self._own[seat] = self._asked_for(set(nodes.values()))
                nodes = self._nodes()
        return nodes.get(seat, "") not in {"", *nodes_leaving()}

    def _asked_for(self, taken: set[str]) -> PlacementGroup:
        """taken: nodes that have a seat."""
        apart: dict[str, Any] = {}
        if self._is_spread and taken:
            # Without blanks: Ray takes ", b" for another node than "b", and says nothing.
            others = {"ray.io/node-id": f"!in({','.join(sorted(taken))})"}
            apart["bundle_label_selector"] = [others]
        group: PlacementGroup = placement_group([self._bundle], strategy=self._strategy, **apart)
        return group

    def _nodes(self) -> dict[int, str]:
        """By seat that has one, the node where it is. Ray moves a group whose node has gone; one
        that it could not move yet is asked for anew."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        seats = {(self._first, index): index for index in range(self._first.bundle_count)}
        seats |= {(group, 0): seat for seat, group in self._own.items()}
        tables = {
            group: placement_group_table(group) for group in (self._first, *self._own.values())
        }
        places = {group: table.get("bundles_to_node_id", {}) for group, table in tables.items()}
        nodes = {seat: str(places[group].get(i, "")) for (group, i), seat in seats.items()}
        for seat, group in list(self._own.items()):
            if tables[group].get("state") == "RESCHEDULING":
                del nodes[seat]
                self._renew(seat)
        found = {seat: node for seat, node in nodes.items() if node in alive}
        if self._is_spread:
            found = self._apart(found)
        self._waiting.difference_update(found)
        return found

    def _renew(self, seat: int) -> None:
        """Ask anew for a seat whose node has gone. While a group that had a place finds no other,
        Ray's head tries again without a pause, and spends a core on it, and one more on telling
        (Ray 2.60; github.com/ray-project/ray/pull/65007). A group that is new waits quietly."""
        self._drop(seat)
        if not self._is_spread:  # Those wait one at a time.
            self._waiting.add(seat)
            self._own[seat] = self._asked_for(set())

    def _drop(self, seat: int) -> None:
        remove_placement_group(self._own.pop(seat))
        self._homes.pop(seat, None)
        self._waiting.discard(seat)

    def _has_moved(self, seat: int) -> bool:
        home = self._homes.get(seat)
        if home is None:
            return False
        table = placement_group_table(self._own[seat]).get("bundles_to_node_id", {})
        return str(table.get(0, "")) not in {"", home}

    def _apart(self, found: dict[int, str]) -> dict[int, str]:
        """Without seats that Ray has moved to where another may be."""
        own = {seat: node for seat, node in found.items() if seat in self._own}
        own = {s: node for s, node in own.items() if self._homes.setdefault(s, node) == node}
        # The first ones keep apart from each other only.
        taken = set(own.values())
        first = {s: node for s, node in found.items() if s not in self._own and node not in taken}
        return own | first

    def _bundle_of(self, seat: int) -> tuple[PlacementGroup, int]:
        if seat < self._first.bundle_count:
            return self._first, seat
        return self._own[seat], 0

    def options(self, seat: int) -> dict[str, Any]:
        return placement.options_of_bundle(*self._bundle_of(seat), self._bundle)

    async def give_back(self) -> None:
        groups = [*self._own.values(), self._first]
        self._own, self._waiting, self._homes = {}, set(), {}
        for group in groups:
            await placement.give_back(group)
