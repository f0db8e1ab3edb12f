"""Messages between two ranks of one host: send and recv, beside the ticks of the collectives.

Each ordered pair of ranks has a ring of bytes (ring.py). A send is done when its message is in the
ring; so a small send is done at once, and its message survives the sender.

Messages of a pair leave the ring in the order in which they were sent. A message whose tag no recv
waits for stays in the ring, and may block its sender; if a recv waits for another tag from that
rank, the message is put aside in the receiver's own memory.

A rank that writes to a ring, or reads from it, rings the bell of the other rank: a word on which
that rank sleeps (futex, in slices, as with ticks). Between slices a sleeper checks the abort word,
the other processes and the deadlines. work_queue.py says which thread drives.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass

import torch

from ..contract.errors import CollectiveError, CollectiveTimeout, PeerLost
from ..contract.modes import outside_modes
from ..contract.operation import ANY_RANK, Operation
from ..contract.work import Work
from ..diagnosis.blame import describe_waits, to_blame
from ..diagnosis.signature import message_mismatch
from .ring import HEADER, UNIT, Channel
from .segment import SharedSegment
from .work_queue import DrivenQueue, DrivenWork

_SLICES_S = (0.002, 0.005, 0.02)


class MessageWork(DrivenWork):
    """A send or recv. content: (nbytes,) uint8, the caller's memory. moved: bytes moved so far."""

    def __init__(self, messages: Messages, operation: Operation, tensor: torch.Tensor) -> None:
        super().__init__(operation, messages.lock)
        self._queue = messages
        self.content = tensor.view(torch.uint8)
        self.moved = -1  # the header has not been moved yet


@dataclass
class _Arriving:
    """A message that has begun to leave its ring. work: its recv; None while it is aside."""

    source: int
    tag: int
    numel: int
    dtype: int
    content: torch.Tensor
    work: MessageWork | None
    moved: int = 0

    def has_arrived(self) -> bool:
        return self.moved == len(self.content)


class Messages(DrivenQueue):
    """All messages to and from this rank. The lock guards all fields; no sleeper holds it."""

    def __init__(self, segment: SharedSegment) -> None:
        super().__init__(segment, "chorusline-messages")
        self._sending: dict[int, deque[MessageWork]] = {}  # by peer, in the order of issue
        self._receiving: list[MessageWork] = []  # without a message yet, in the order of issue
        self._arriving: dict[int, _Arriving] = {}  # by source
        self._aside: list[_Arriving] = []
        self._out: dict[int, Channel] = {}
        self._in: dict[int, Channel] = {}
        self._shown: set[int] = set()  # words that show which ranks this rank waits for

    def send(self, operation: Operation, tensor: torch.Tensor) -> Work:
        work = MessageWork(self, operation, tensor)
        with self.lock:
            self._sending.setdefault(operation.peer, deque()).append(work)
        return self._begin(work)

    def recv(self, operation: Operation, tensor: torch.Tensor) -> Work:
        work = MessageWork(self, operation, tensor)
        with self.lock:
            self._receiving.append(work)
        return self._begin(work)

    def _end_works(self, error: CollectiveError) -> None:
        with self.lock:
            self._finish_all(error)
        self._call_back()

    def close(self, error: CollectiveError) -> None:
        """Accept no more messages; pending ones fail with `error`."""
        try:
            self._run_what_can()
        finally:
            self.end(error)
            self.segment.ring_bell(self.segment.rank)
            self._let_go(error)

    # -- moving bytes, with the lock -------------------------------------------------------------

    @outside_modes
    def _advance(self) -> None:
        """Move all bytes that can move without waiting."""
        if self._end is not None:
            self._finish_all(self._end)
            return
        failure = self.segment.failure()
        # The segment is shared with the collectives: an error there ends the messages as well.
        if failure is not None:
            self._finish_all(failure)
            return
        try:
            for peer, queue in self._sending.items():
                self._push(peer, queue)
            # Without a receive nothing is taken from the rings: a full ring is what makes a sender
            # wait.
            if self._receiving or self._arriving:
                self._take_aside()
                for source in range(self.segment.size):
                    if source != self.segment.rank:
                        self._pull(source)
        except CollectiveError as error:
            self._finish_all(self.segment.abort(error))
        except BaseException as error:
            # A tensor that was resized, or an interrupt: a ring may be out of step with its peer.
            self._finish_all(self.segment.abort(self._interrupted("the messages", error)))
            raise

    def _push(self, peer: int, queue: deque[MessageWork]) -> None:
        while queue:
            channel = self._channel_to(peer)
            work = queue[0]
            free = channel.free()
            # The header goes first, in a unit of its own.
            if work.moved < 0:
                # The receiver rings the bell when it has made room.
                if not free:
                    return
                o = work.operation
                header = HEADER.pack(o.tag, o.numel, o.dtype, len(work.content), 0, 0, 0, 0)
                channel.put(torch.frombuffer(bytearray(header), dtype=torch.uint8))
                work.moved = 0
                free -= UNIT
            piece = work.content[work.moved : work.moved + free]
            if len(piece):
                channel.put(piece)
                work.moved += len(piece)
            self.segment.ring_bell(peer)
            # The ring is full. The next message of this peer waits too, since their order is kept.
            if work.moved < len(work.content):
                return
            self._finish(work, None)
            queue.popleft()

    def _pull(self, source: int) -> None:
        while True:
            channel = self._channel_from(source)
            arriving = self._arriving.get(source)
            if arriving is None:
                arriving = self._next_from(source, channel)
                if arriving is None:
                    return
                self._arriving[source] = arriving
                if arriving.work is not None:
                    self._receiving.remove(arriving.work)
            left = arriving.content[arriving.moved :]
            # A message may be larger than its ring, and comes in pieces.
            piece = left[: channel.filled()]
            if len(piece):
                channel.take(piece)
                arriving.moved += len(piece)
                # The sender may wait for this room.
                self.segment.ring_bell(source)
            if not arriving.has_arrived():
                return
            # Afterwards, as it may fail, and its work has to be among those that then end.
            self._arrived(arriving)
            del self._arriving[source]

    def _next_from(self, source: int, channel: Channel) -> _Arriving | None:
        """The next message in the ring; None if there is none or no recv waits for its rank."""
        if not channel.filled():
            return None
        tag, numel, dtype, nbytes = channel.header()
        # Only then is a header looked at: with no receive for this rank its messages stay in the
        # ring.
        wanting = [w for w in self._receiving if w.operation.peer in (source, ANY_RANK)]
        if not wanting:
            return None
        work = next((w for w in wanting if w.operation.tag == tag), None)
        channel.skip_header()
        self.segment.ring_bell(source)
        # One with another tag is in front of what a receive wants: it is kept until it is asked
        # for.
        if work is None:
            aside = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            arriving = _Arriving(source, tag, numel, dtype, aside, None)
            self._aside.append(arriving)
            return arriving
        self._match(work, source, numel, dtype)
        return _Arriving(source, tag, numel, dtype, work.content, work)

    def _take_aside(self) -> None:
        """Match messages that were put aside with the receives that want them."""
        for arriving in list(self._aside):
            # In the order of arrival, and each for the first receive that fits.
            for work in self._receiving if arriving.work is None else ():
                o = work.operation
                if o.tag == arriving.tag and o.peer in (arriving.source, ANY_RANK):
                    self._match(work, arriving.source, arriving.numel, arriving.dtype)
                    arriving.work = work
                    self._receiving.remove(work)
                    if arriving.has_arrived():
                        self._arrived(arriving)
                    break

    def _match(self, work: MessageWork, source: int, numel: int, dtype: int) -> None:
        operation = work.operation
        operation.peer = source
        error = message_mismatch(
            operation, self.segment.generation, self.segment.rank, numel, dtype
        )
        if error is not None:
            raise error
        work.moved = 0

    def _arrived(self, arriving: _Arriving) -> None:
        work = arriving.work
        if work is None:
            return  # The message stays aside.
        # It was put aside before its receive was issued.
        if arriving.content is not work.content:
            work.content.copy_(arriving.content)
        finish = work.operation.finish
        if finish is not None:
            finish()
        self._finish(work, None)
        if arriving.content is not work.content:
            self._aside.remove(arriving)

    def _channel_to(self, peer: int) -> Channel:
        channel = self._out.get(peer)
        if channel is None:
            channel = self._out[peer] = Channel(self.segment, self.segment.rank, peer)
        return channel

    def _channel_from(self, source: int) -> Channel:
        channel = self._in.get(source)
        if channel is None:
            channel = self._in[source] = Channel(self.segment, source, self.segment.rank)
        return channel

    def _pending(self) -> list[MessageWork]:
        found = [work for queue in self._sending.values() for work in queue]
        found += self._receiving
        arriving = {id(a): a for a in (*self._arriving.values(), *self._aside)}
        return found + [a.work for a in arriving.values() if a.work is not None]

    def _finish(self, work: DrivenWork, failure: CollectiveError | None) -> None:
        super()._finish(work, failure)
        if self._shown:
            self._hide_waits()  # `_look` shows them again for works that are still pending.

    def _finish_all(self, error: CollectiveError) -> None:
        super()._finish_all(error)
        self._sending.clear()
        self._receiving.clear()
        self._arriving.clear()
        self._aside.clear()

    # -- driving ---------------------------------------------------------------------------------

    def _begin(self, work: MessageWork) -> Work:
        self._run_what_can()
        # A thread that drives leaves what it has not done to the background thread, once that runs.
        if not work.done and not (self._driven and self._wake_up is not None):
            self._watch_over(work)
        return work

    def _run_what_can(self) -> None:
        try:
            with self.lock:
                self._advance()
        finally:  # Also after an exception, which has ended all works.
            self._call_back()

    def _drive(self, until: DrivenWork | None) -> None:
        segment = self.segment
        spins = segment.spins if until is not None else 1
        slices = iter(_SLICES_S)
        slice_s = 0.0
        looked_at = time.monotonic()
        while True:
            # Read before looking for work, so that bytes that come in between end the sleep at
            # once.
            seen = segment.bell()
            self._run_what_can()
            if until.done if until is not None else not self._has_pending():
                return
            for _ in range(spins):
                os.sched_yield()
                if segment.bell() != seen:
                    break
            else:
                slice_s = next(slices, slice_s)
                segment.sleep_on_bell(seen, slice_s)
                if segment.bell() == seen:
                    # A full slice without news: time to look for peers that died and for deadlines.
                    self._look()
                    looked_at = time.monotonic()
                    continue
            slices = iter(_SLICES_S)
            # Other messages may ring in every slice.
            if time.monotonic() - looked_at >= _SLICES_S[-1]:
                self._look()
                looked_at = time.monotonic()

    def _has_pending(self) -> bool:
        with self.lock:
            return bool(self._pending())

    def _look(self) -> None:
        """End the generation if a peer is gone or a deadline has passed."""
        gone = self.segment.gone()
        others = set(range(self.segment.size)) - {self.segment.rank}
        now = time.monotonic()
        with self.lock:
            self._advance()  # Messages that a lost rank put into its ring are still valid.
            for work in self._pending():
                o = work.operation
                peers = others if o.peer == ANY_RANK else {o.peer}
                error: CollectiveError
                # A receive from any rank fails only when none is left that could send.
                if peers <= gone.keys():
                    how = "; ".join(sorted({gone[peer] for peer in peers}))
                    error = PeerLost(str(o), o.generation, sorted(peers), how)
                elif now >= o.issued_at + o.timeout_s:
                    waits_for = self.segment.waits.of_all(o.timeout_s)
                    blamed = to_blame(peers, waits_for, [self.segment.rank])
                    shown = sorted(peers.union(blamed))
                    where = "; ".join(self.segment.position_of(rank) for rank in shown)
                    where += describe_waits(waits_for, waits_for.keys() - {self.segment.rank})
                    error = CollectiveTimeout(str(o), o.generation, blamed, o.timeout_s, where)
                else:
                    continue
                self._finish_all(self.segment.abort(error))
                break
            self._show_waits()
        self._call_back()

    def _show_waits(self) -> None:
        """Show which ranks this rank waits for, so that a rank that waits for it can blame them."""
        for work in self._pending():
            o = work.operation
            # It may be any of them, so none can be blamed.
            if o.peer == ANY_RANK:
                continue
            channel = self._channel_from(o.peer) if o.receives else self._channel_to(o.peer)
            # Since the issue of the oldest one: that is how long this rank waits.
            if channel.waits_at not in self._shown:
                self._shown.add(channel.waits_at)
                self.segment.waits.show(channel.waits_at, o.issued_at)

    def _hide_waits(self) -> None:
        for at in self._shown:
            self.segment.waits.hide(at)
        self._shown.clear()
