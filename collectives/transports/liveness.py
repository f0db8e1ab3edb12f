"""How ranks that share nothing but a store learn who is late, who is gone, and how it ended.

For transports that can neither see their peers nor be told anything by them: NCCL, and Gloo. A
rank whose operations follow each other and are not held up does not use the store at all; one
that waits, or has had nothing to do for a while, leaves and looks for these keys:

    position/<rank>   how far a rank has come, and in words what it does
    abort/error       the error that ended the generation, as JSON. The first one written stands
    abort/closed      a line "rank operations" for every rank that closed, with the number of
                      operations it took part in
    call/asked        somebody's transport broke and does not say why: who lives, answers
    call/<rank>       the answer

A store that fails must not make anything worse: then each rank has its own deadline left.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..contract.errors import (
    CollectiveError,
    CollectiveTimeout,
    GroupAborted,
    PeerLost,
    error_from_json,
    error_to_json,
)
from ..contract.operation import ANY_RANK, Operation
from ..diagnosis.blame import tell_waits, to_blame
from ..stores.store import Store

LOOK_S = 0.5  # between two looks into the store, while an operation is in flight


class StorePosition(NamedTuple):
    """How far a rank has come: the last operation it arrived in, and in words what it does.

    waits: whether it is in that operation, so that others may be what keeps it there.
    peers: in a send or a recv, the rank at its other end, if that is known.
    """

    arrived: int
    where: str
    waits: bool = False
    peers: Sequence[int] = ()


def position_in(head: Operation) -> StorePosition:
    """The position of a rank whose first operation in flight is `head`."""
    between_two = head.is_between_two and head.peer != ANY_RANK
    peers = (head.peer,) if between_two else ()
    return StorePosition(head.sequence, f"is at {head.place()}", True, peers)


def position_after(last: Operation | None) -> StorePosition:
    """The position of a rank with nothing in flight; `last` is what it finished last."""
    if last is None:
        return StorePosition(-1, "has issued nothing")
    return StorePosition(last.sequence, f"has finished {last.place()} and issued nothing since")


def look_s(operation: Operation) -> float:
    """Seconds between two looks into the store while `operation` is in flight."""
    return min(LOOK_S, operation.timeout_s / 4)


def culprits(behind: Mapping[int, StorePosition]) -> list[int]:
    """Of the ranks that are behind, those to blame.

    A rank that was stopped while it sent has served some of the others and not all: who still
    waits in an earlier operation, for somebody who is even further behind, is innocent.
    """
    furthest = min((at.arrived for at in behind.values()), default=0)
    return [rank for rank, at in behind.items() if at.arrived == furthest or not at.waits]


class RollCall:
    """One rank's part in it. No method raises, and none blocks longer than the store."""

    def __init__(self, store: Store, rank: int, size: int, generation: int) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.generation = generation
        self._told: StorePosition | None = None
        self._answered = False

    # -- the end ---------------------------------------------------------------------------------

    def publish(self, error: CollectiveError) -> CollectiveError:
        """Tell the other ranks; the error that stands, which another may have written before."""
        try:
            stands = self.store.compare_set("abort/error", "", error_to_json(error))
            return error_from_json(stands.decode())
        except Exception:
            return error

    def publish_meanwhile(self, error: CollectiveError) -> threading.Thread:
        """`publish` in a thread. No daemon: who aborts and exits must still tell the others."""
        # Said here, because a thread that a daemon starts is one as well.
        telling = threading.Thread(
            target=self.publish, args=(error,), name="chorusline-abort-tell", daemon=False
        )
        telling.start()
        return telling

    def news(self) -> CollectiveError | None:
        """The error that some rank ended the generation with."""
        with contextlib.suppress(Exception):
            if self.store.check(["abort/error"]):
                return error_from_json(self.store.get("abort/error").decode())
        return None

    def tell_closed(self, operations: int) -> bool:
        """Say that this rank closed after `operations` of them; whether that could be said."""
        with contextlib.suppress(Exception):
            self.store.append("abort/closed", f"{self.rank} {operations}\n")
            return True
        return False

    def all_close(self, patience_s: float) -> bool:
        """Wait for the others to close; whether all did, and none failed."""
        give_up_at = time.monotonic() + patience_s
        with contextlib.suppress(Exception):
            while len(self._closed()) < self.size:
                if time.monotonic() > give_up_at or self.store.check(["abort/error"]):
                    return False
                time.sleep(0.01)
            return True
        return False

    def the_end(self, operation: Operation | None) -> CollectiveError | None:
        """The error if it is over elsewhere: published, or by a close without `operation`."""
        news = self.news()
        if news is not None or operation is None:
            return news
        with contextlib.suppress(Exception):
            closed = self._closed()
            gone = sorted(r for r, taken in closed.items() if taken <= operation.sequence)
            if operation.is_between_two and closed.keys() >= set(self._peers(operation)):
                gone = self._peers(operation)
            if gone:
                how = "closed the group without taking part"
                return PeerLost(str(operation), self.generation, gone, how)
        return None

    def _closed(self) -> dict[int, int]:
        """The ranks that closed, and the number of operations they took part in."""
        if not self.store.check(["abort/closed"]):
            return {}
        lines = self.store.get("abort/closed").decode().splitlines()
        return {int(rank): int(operations) for rank, operations in map(str.split, lines)}

    # -- who is late -----------------------------------------------------------------------------

    def is_news(self, position: StorePosition) -> bool:
        return position != self._told

    def tell(self, position: StorePosition) -> None:
        if position != self._told:
            self._told = position
            with contextlib.suppress(Exception):
                self.store.set(f"position/{self.rank}", json.dumps(position))

    def timeout(
        self, operation: Operation, head: Operation, position: StorePosition
    ) -> CollectiveTimeout:
        """CollectiveTimeout that names the ranks without which `head` cannot run.

        operation: the one that is overdue. head: the first in flight. position: our own.
        """
        asked = [rank for rank in range(self.size) if rank != self.rank]
        positions = {rank: self._position_of(rank) for rank in asked}
        waits_for = {rank: at.peers for rank, at in positions.items() if at.peers}
        if head.is_between_two:
            peers = self._peers(head)
            missing = to_blame(peers, waits_for, [self.rank])
            told = sorted({*peers, *missing, *waits_for} if peers != missing else peers)
            whereabouts = [f"rank {rank} {positions[rank].where}" for rank in told]
        else:
            positions[self.rank] = position
            behind = {r: at for r, at in sorted(positions.items()) if at.arrived < head.sequence}
            here = positions.keys() - behind.keys()
            missing = to_blame(culprits(behind), waits_for, here) if behind else []
            whereabouts = [f"rank {rank} {at.where}" for rank, at in behind.items()]
            if here and whereabouts:
                others = f"the others are at {head.place()}, as rank {self.rank} sees it"
                whereabouts.append(others)
        story = ("; ".join(whereabouts) + tell_waits(waits_for, waits_for)).removeprefix("; ") or (
            "all ranks are in it, so the transfer itself is stuck or slower than the deadline"
        )
        return CollectiveTimeout(
            str(operation), self.generation, missing, operation.timeout_s, story
        )

    def _peers(self, operation: Operation) -> list[int]:
        """Whom a send or recv needs: its peer, or somebody of these."""
        if operation.peer != ANY_RANK:
            return [operation.peer]
        return [rank for rank in range(self.size) if rank != self.rank]

    def _position_of(self, rank: int) -> StorePosition:
        with contextlib.suppress(Exception):
            if self.store.check([f"position/{rank}"]):
                return StorePosition(*json.loads(self.store.get(f"position/{rank}")))
        return StorePosition(-1, "was not heard of in this generation")

    # -- who is gone -----------------------------------------------------------------------------

    def answer(self) -> None:
        """If somebody calls the roll, say that this rank lives."""
        with contextlib.suppress(Exception):
            if not self._answered and self.store.check(["call/asked"]):
                self.store.set(f"call/{self.rank}", "here")
                self._answered = True

    def why_broken(
        self, operation: Operation | str, reason: str, patience_s: float
    ) -> CollectiveError:
        """Call the roll: the error for a transport that broke with `reason` during `operation`.

        What another rank has published, if it has; else PeerLost with the ranks that do not
        answer within `patience_s`, which must be several times the pause between two of their
        looks; GroupAborted if all do.
        """
        issued = operation if isinstance(operation, Operation) else None
        give_up_at = time.monotonic() + patience_s
        with contextlib.suppress(Exception):
            self.store.set("call/asked", "1")
            self.store.set(f"call/{self.rank}", "here")
            while True:
                error = self.the_end(issued)
                if error is not None:
                    return error
                silent = [r for r in range(self.size) if not self.store.check([f"call/{r}"])]
                if not silent:
                    break
                if time.monotonic() > give_up_at:
                    how = f"no answer for {patience_s:g} s, after {reason}"
                    return PeerLost(str(operation), self.generation, silent, how)
                time.sleep(0.02)
        return GroupAborted(self.generation, [self.rank], f"{operation} failed: {reason}")
