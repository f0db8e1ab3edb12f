"""How ranks that share only a store learn which ranks are late or gone, and what ended a group.

For NCCL and Gloo, which can neither see their peers nor carry such messages. A rank whose
collectives follow each other without delay does not use the store; a rank that waits, sends and
receives messages, or has been idle for a while, writes and reads these keys:

    position/<rank>   how far a rank has come, and what it is doing, in words
    abort/error       the error that ended the generation, as JSON; the first one written stands
    abort/closed      a line "rank operations" for every rank that closed, with the number of
                      operations it took part in
    rest/<turns>      a line "rank operations" for every rank that rests (Communicator.rest)
    call/asked        a rank's transport failed without a cause: every live rank must answer
    call/<rank>       the answer of a rank

If the store fails, each rank still has its own deadline.
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
    StoreLost,
    error_from_json,
    error_to_json,
    waits_for_resting,
)
from ..contract.operation import ANY_RANK, Operation
from ..diagnosis.blame import describe_waits, to_blame
from ..stores.store import Store

LOOK_S = 0.5  # between two reads of the store, while an operation is in flight
_ANSWER_S = 2.5  # for a live rank to answer a roll call: several of these reads


class StorePosition(NamedTuple):
    """How far a rank has come.

    arrived: the last operation that the rank arrived in. where: what it is doing, in words.
    waits: whether it is still in that operation, perhaps because of other ranks.
    peers: in a send or a recv, the other rank, if it is known.
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
    """The position of a rank with nothing in flight, after it has finished `last`."""
    if last is None:
        return StorePosition(-1, "has issued nothing")
    return StorePosition(last.sequence, f"has finished {last.place()} and issued nothing since")


def look_s(operation: Operation) -> float:
    """Seconds between two reads of the store while `operation` is in flight."""
    return min(LOOK_S, operation.timeout_s / 4)


def culprits(behind: Mapping[int, StorePosition]) -> list[int]:
    """The ranks to blame among those that are late.

    A rank that stopped while it sent has served only some of the other ranks. A rank that still
    waits in an earlier operation, for a rank that is even further behind, is not to blame.
    """
    furthest = min((at.arrived for at in behind.values()), default=0)
    return [rank for rank, at in behind.items() if at.arrived == furthest or not at.waits]


class RollCall:
    """One rank's use of these keys. No method raises, and none blocks longer than the store.

    last_messages_s: how long messages may take to end here whose peer has ended them and closed.
    """

    def __init__(
        self, store: Store, rank: int, size: int, generation: int, last_messages_s: float = 0.0
    ) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.generation = generation
        self._published: StorePosition | None = None  # None: before this rank has told anything
        self._answered = False
        self._turns = 1
        self._last_messages_s = last_messages_s
        self._seen_closed_at: dict[int, float] = {}  # by rank: time.monotonic() of the first read

    # -- the end ---------------------------------------------------------------------------------

    def publish(self, error: CollectiveError) -> CollectiveError:
        """Publish `error`; returns the error that stands, which another rank may have written."""
        try:
            stands = self.store.compare_set("abort/error", "", error_to_json(error))
            return error_from_json(stands.decode())
        except Exception:
            return error

    def publish_meanwhile(self, error: CollectiveError) -> threading.Event | None:
        """`publish` in a thread, no daemon: a rank that aborts and exits must still publish.
        Returns an event that is set afterwards; None short of threads: the caller publishes, and
        holds no lock meanwhile."""
        is_published = threading.Event()

        def tell() -> None:
            self.publish(error)
            is_published.set()

        try:
            # daemon=False is explicit, because a thread inherits it from the thread that starts it.
            threading.Thread(target=tell, name="chorusline-abort-tell", daemon=False).start()
        except RuntimeError:
            return None
        return is_published

    def news(self) -> CollectiveError | None:
        """The published error that ended the generation; None if there is none."""
        with contextlib.suppress(Exception):
            if self.store.check(["abort/error"]):
                return error_from_json(self.store.get("abort/error").decode())
        return None

    def tell_closed(self, operations: int) -> bool:
        """Publish that this rank closed after `operations` operations; whether that succeeded."""
        with contextlib.suppress(Exception):
            self.store.append("abort/closed", f"{self.rank} {operations}\n")
            return True
        return False

    def turn(self) -> None:
        self._turns += 1

    def rest(self, operations: int) -> None:
        """Publish that this rank issues nothing after `operations` operations, until it turns."""
        with contextlib.suppress(Exception):
            self.store.append(f"rest/{self._turns}", f"{self.rank} {operations}\n")

    def all_close(self, patience_s: float) -> bool:
        """Wait for the other ranks to close; whether all of them did, without an error."""
        give_up_at = time.monotonic() + patience_s
        with contextlib.suppress(Exception):
            # A rank that closed early waits for those that still use what it would free.
            while len(self._closed()) < self.size:
                if time.monotonic() > give_up_at or self.store.check(["abort/error"]):
                    return False
                time.sleep(0.01)
            return True
        return False

    def the_end(self, operation: Operation | None) -> CollectiveError | None:
        """The error if another rank published one, or closed without taking part in `operation`."""
        news = self.news()
        if news is not None or operation is None:
            return news
        # A store that does not answer is no word of any rank.
        with contextlib.suppress(Exception):
            closed = self._closed()
            closed.pop(self.rank, None)  # Read in a look that this rank began before it closed.
            gone = sorted(r for r, taken in closed.items() if taken <= operation.sequence)
            now = time.monotonic()
            seen = {r: self._seen_closed_at.setdefault(r, now) for r in closed}
            # It does not count among a peer's operations; but a peer that has closed sends nothing.
            ended = {r for r, at in seen.items() if now - at >= self._last_messages_s}
            if operation.is_between_two and ended >= set(self._peers(operation)):
                gone = self._peers(operation)
            if gone:
                how = "closed the group without taking part"
                return PeerLost(str(operation), self.generation, gone, how)
            resting = self._with_operations(f"rest/{self._turns}")
            never = sorted(r for r, taken in resting.items() if taken <= operation.sequence)
            # A rank that rests issues no collective, but a message from it may be on its way.
            if never and not operation.is_between_two:
                return waits_for_resting(operation, self.generation, never)
        return None

    def closed(self) -> set[int]:
        """The ranks that have closed the group; none if the store fails."""
        with contextlib.suppress(Exception):
            return set(self._closed())
        return set()

    def _closed(self) -> dict[int, int]:
        return self._with_operations("abort/closed")

    def _with_operations(self, key: str) -> dict[int, int]:
        """The ranks that have written to `key`, and the number of operations they took part in."""
        if not self.store.check([key]):
            return {}
        lines = self.store.get(key).decode().splitlines()
        return {int(rank): int(operations) for rank, operations in map(str.split, lines)}

    # -- who is late -----------------------------------------------------------------------------

    def tell(self, position: StorePosition) -> None:
        # A rank that waits for long writes nothing meanwhile.
        if position != self._published:
            self._published = position
            with contextlib.suppress(Exception):
                self.store.set(f"position/{self.rank}", json.dumps(position))

    def timeout(
        self, operation: Operation, head: Operation, position: StorePosition
    ) -> CollectiveTimeout:
        """A CollectiveTimeout that names the ranks without which `head` cannot run.

        operation: the overdue one. head: the first one in flight. position: this rank's.
        """
        asked = [rank for rank in range(self.size) if rank != self.rank]
        try:
            positions = {rank: self._position_of(rank) for rank in asked}
        except Exception as error:  # It is not known which ranks are late.
            return CollectiveTimeout(
                str(operation),
                self.generation,
                [],
                operation.timeout_s,
                f"the store fails: {error}",
            )
        waits_for = {rank: at.peers for rank, at in positions.items() if at.peers}
        # The numbers of messages are known to two ranks only, so positions do not compare there.
        if head.is_between_two:
            peers = self._peers(head)
            missing = to_blame(peers, waits_for, [self.rank])
            shown = sorted({*peers, *missing, *waits_for} if peers != missing else peers)
            whereabouts = [f"rank {rank} {positions[rank].where}" for rank in shown]
        else:
            # This rank's own is not in the store yet.
            positions[self.rank] = position
            behind = {r: at for r, at in sorted(positions.items()) if at.arrived < head.sequence}
            here = positions.keys() - behind.keys()
            missing = to_blame(culprits(behind), waits_for, here) if behind else []
            whereabouts = [f"rank {rank} {at.where}" for rank, at in behind.items()]
            if here and whereabouts:
                others = f"the others are at {head.place()}, as rank {self.rank} sees it"
                whereabouts.append(others)
        story = ("; ".join(whereabouts) + describe_waits(waits_for, waits_for)).removeprefix(
            "; "
        ) or ("all ranks are in it, so the transfer itself is stuck or slower than the deadline")
        return CollectiveTimeout(
            str(operation), self.generation, missing, operation.timeout_s, story
        )

    def _peers(self, operation: Operation) -> list[int]:
        """The rank that a send or recv needs, or all ranks from which a recv accepts a message."""
        if operation.peer != ANY_RANK:
            return [operation.peer]
        return [rank for rank in range(self.size) if rank != self.rank]

    def _position_of(self, rank: int) -> StorePosition:
        if self.store.check([f"position/{rank}"]):
            return StorePosition(*json.loads(self.store.get(f"position/{rank}")))
        return StorePosition(-1, "has not reported in this generation")

    # -- who is gone -----------------------------------------------------------------------------

    def answer(self) -> None:
        """If a rank has called the roll, write that this rank lives."""
        with contextlib.suppress(Exception):
            if not self._answered and self.store.check(["call/asked"]):
                self.store.set(f"call/{self.rank}", "here")
                self._answered = True

    def why_broken(self, operation: Operation | str, reason: str) -> CollectiveError:
        """The error for a transport that failed with `reason` during `operation`, by a roll call:
        that of `lost`, or GroupAborted if all ranks answer."""
        error = self.lost(operation, reason)
        if error is not None:
            return error
        return GroupAborted(self.generation, [self.rank], f"{operation} failed: {reason}")

    def lost(self, operation: Operation | str, reason: str) -> CollectiveError | None:
        """Call the roll, after `reason`; None if all ranks answer.

        An error that another rank has published comes first. Otherwise it is PeerLost with the
        ranks that do not answer within 2.5 s: those that have closed only if no other is silent. It
        names nobody if the store fails, as it does with the rank that hosts it.
        """
        issued = operation if isinstance(operation, Operation) else None
        give_up_at = time.monotonic() + _ANSWER_S
        try:
            self.store.set("call/asked", "1")
            self.store.set(f"call/{self.rank}", "here")
            while True:
                # Another rank may have called the roll before, and have found who is gone.
                error = self.the_end(issued)
                if error is not None:
                    return error
                silent = [r for r in range(self.size) if not self.store.check([f"call/{r}"])]
                if not silent:
                    break
                if time.monotonic() > give_up_at:
                    # A rank that has closed answers nothing, and need not be the one in question.
                    gone = sorted(set(silent) - self.closed())
                    how = f"no answer for {_ANSWER_S:g} s" if gone else "closed the group"
                    how += f", after {reason}"
                    return PeerLost(str(operation), self.generation, gone or silent, how)
                time.sleep(0.02)
        except (StoreLost, OSError) as error:
            return PeerLost(str(operation), self.generation, [], f"{reason}; {error}")
        except Exception:
            return None  # A slow store, for example, is no word of any rank.
        return None
