"""Messages between two ranks through Gloo: send and recv, beside the runner of the collectives.

A send waits in Gloo until it is received. So that messages do not delay each other, each peer, tag
and direction in use has a thread. A header (elements, dtype) precedes each message, because Gloo
kills a process that receives more than it expects. A recv from any rank waits for a header from
every rank; headers that come later serve a later recv.

Gloo cannot cancel a wait. But a wait that reaches its own deadline closes all connections of this
rank, and so ends all other waits: `free` does that once the generation is over. So no thread is
left in Gloo when the process exits, where it could crash the process.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..contract.dtypes import DTYPE_INDEX
from ..contract.errors import CollectiveError, StoreTimeout
from ..contract.in_flight import InFlight, PendingWork
from ..contract.operation import ANY_RANK, WATCHING_TAG, Kind, OnBehalf, Operation
from ..contract.work import Work
from ..diagnosis.signature import message_mismatch

_FOREVER = timedelta(days=1)  # The watcher enforces the deadlines.
_UINT8 = DTYPE_INDEX[torch.uint8]
_FREEING_TAG = (1 << 31) - 1  # odd, and above the tag of any message


class GlooMessageWork(PendingWork):
    """content: of a send, a copy of the caller's tensor; of a recv, the caller's tensor."""

    def __init__(
        self, operation: Operation, in_flight: InFlight[GlooMessageWork], content: torch.Tensor
    ) -> None:
        super().__init__(operation, in_flight)
        self.content = content


class GlooMessages:
    """This rank's messages. failed: called with operation and error when Gloo fails or the ranks
    disagree. give: calls a function that writes callers' tensors, unless the generation is over.
    over: set when it is.
    closed: the ranks that have closed the group; each says so before it closes its connections."""

    def __init__(
        self,
        gloo: Any,
        rank: int,
        size: int,
        in_flight: InFlight[GlooMessageWork],
        failed: Callable[[Operation, Exception], None],
        give: Callable[[Callable[[], None]], None],
        over: threading.Event,
        closed: Callable[[], set[int]],
    ) -> None:
        self.in_flight = in_flight
        self._gloo = gloo
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._failed = failed
        self._give = give
        self._over = over
        self._closed = closed
        self._changed = threading.Condition()
        self._sending: dict[tuple[int, int], deque[GlooMessageWork]] = {}  # by peer and tag
        self._wanted: list[GlooMessageWork] = []  # receives without a header, in order of issue
        self._asking: set[tuple[int, int]] = set()  # peer and tag of the threads that receive
        self._threads: set[threading.Thread] = set()
        in_flight.workers = self._threads

    def send(self, operation: Operation, tensor: torch.Tensor) -> Work:
        # A copy: the caller may write to its tensor as soon as the work is done.
        work = GlooMessageWork(operation, self.in_flight, tensor.clone())
        self.in_flight.add(work)
        key = (operation.peer, operation.tag)
        with self._issuing(operation):
            if not work.done:
                queue = self._sending.get(key)
                # A thread sends for this peer and tag already, and keeps the order.
                if queue is not None:
                    queue.append(work)
                else:
                    self._sending[key] = deque([work])
                    self._start(self._send_all, key)
        return work

    def recv(self, operation: Operation, tensor: torch.Tensor) -> GlooMessageWork:
        work = GlooMessageWork(operation, self.in_flight, tensor)
        self.in_flight.add(work)
        peers = self._others if operation.peer == ANY_RANK else [operation.peer]
        with self._issuing(operation):
            if not work.done:
                self._wanted.append(work)
                for peer in peers:
                    key = (peer, operation.tag)
                    # One thread a peer and tag: two would take each other's messages.
                    if key not in self._asking:
                        self._asking.add(key)
                        self._start(self._receive_all, key)
                # A thread may have a header that no receive wanted, and wait for this one.
                self._changed.notify_all()
        return work

    @contextlib.contextmanager
    def _issuing(self, operation: Operation) -> Iterator[None]:
        """Holds the lock. If no thread can be started, nothing would end the work."""
        try:
            with self._changed:
                yield
        except Exception as error:
            self._failed(operation, error)
            raise

    def _withdraw(self, receives: Sequence[GlooMessageWork]) -> None:
        """End receives whose messages may still come: the next receives get these."""
        with self._changed:
            left = [work for work in receives if work in self._wanted]
            for work in left:
                self._wanted.remove(work)
        for work in left:
            self.in_flight.settle(work)

    @contextlib.contextmanager
    def watching(
        self, ranks: Sequence[int], what: str, generation: int, sequence: int, timeout_s: float
    ) -> Iterator[None]:
        """`Communicator.watching`: a receive from each of `ranks`, which fails if that rank dies.
        A rank sends its message when its block has ended."""
        others = [rank for rank in ranks if rank != self._rank]

        def message(kind: Kind, peer: int) -> Operation:
            part = OnBehalf(kind, sequence, generation, 1, _UINT8, -1, timeout_s)
            part.whole, part.peer, part.tag = what, peer, WATCHING_TAG
            return part

        words = torch.zeros(len(others), 1, dtype=torch.uint8, device="cpu")
        receives = [
            self.recv(message(Kind.RECV, other), word)
            for other, word in zip(others, words, strict=True)
        ]
        try:
            yield
        except (CollectiveError, StoreTimeout):
            raise  # The generation ends, and the receives with it.
        except Exception:
            # This rank has refused: the group continues, and the receives have a deadline. Nothing
            # is sent: others that are in their blocks must hear of it if this process ends now.
            self._withdraw(receives)
            raise
        # All receives are under way by now. This rank does not wait for them: a rank that stops
        # after some of its sends would delay only some of the others.
        for work in [self.send(message(Kind.SEND, other), words.new_ones(1)) for other in others]:
            work.wait()

    def free(self, patience_s: float) -> None:
        """Get the threads out of Gloo after the end of the generation, and release it."""
        with self._changed:
            self._changed.notify_all()
            threads = list(self._threads)
        gloo, self._gloo = self._gloo, None
        # A receive from a rank that has closed its connections closes nothing, so all are tried.
        for other in self._others if threads and gloo is not None else ():
            with contextlib.suppress(Exception):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                gloo.recv([nothing], other, _FREEING_TAG).wait(timedelta(milliseconds=1))
        for thread in threads:
            thread.join(patience_s)

    # -- the threads -----------------------------------------------------------------------------

    def _start(self, target: Callable[[int, int], None], key: tuple[int, int]) -> None:
        def run() -> None:
            try:
                target(*key)
            finally:
                with self._changed:
                    self._threads.discard(threading.current_thread())

        if self._over.is_set():
            return
        thread = threading.Thread(
            target=run, name=f"chorusline-gloo-{target.__name__}-{key[0]}", daemon=True
        )
        thread.start()
        self._threads.add(thread)

    def _send_all(self, peer: int, tag: int) -> None:
        while True:
            with self._changed:
                queue = self._sending[peer, tag]
                if not queue or self._over.is_set():
                    # Under the lock: the next send finds no thread, and starts one.
                    del self._sending[peer, tag]
                    return
                work = queue.popleft()
            operation = work.operation
            try:
                header = torch.tensor([operation.numel, operation.dtype], device="cpu")
                self._wait(self._gloo.send([header], peer, 2 * tag))
                if operation.numel:
                    content = work.content.view(torch.uint8)
                    self._wait(self._gloo.send([content], peer, 2 * tag + 1))
                self.in_flight.settle(work)
            except Exception as error:
                # The end of the group breaks its connections: that is no failure of this message.
                if not self._over.is_set():
                    self._failed(operation, error)
                return

    def _receive_all(self, peer: int, tag: int) -> None:
        while True:
            with self._changed:
                asked = self._who_wants(peer, tag)
                # Under the lock: the next receive finds no thread, and starts one.
                if asked is None or self._over.is_set():
                    self._asking.discard((peer, tag))
                    return
            operation = asked.operation
            header = torch.zeros(2, dtype=torch.int64, device="cpu")
            try:
                self._wait(self._gloo.recv([header], peer, 2 * tag))
            except Exception as error:
                if self._over.is_set():
                    return
                closed = self._closed()
                if peer in closed:
                    missing = self._missing(peer, tag, closed)
                    if missing is None:
                        return
                    operation = missing
                self._failed(operation, error)
                return
            try:
                with self._changed:
                    # The receive for which it asked was served by another peer (ANY_RANK). The
                    # header was taken from the connection, so the content after it belongs to the
                    # next receive.
                    while (work := self._who_wants(peer, tag)) is None and not self._over.is_set():
                        self._changed.wait()
                    if work is None:
                        return
                    self._wanted.remove(work)
                operation = work.operation
                # A receive from any rank learns here from which one it is.
                operation.peer = peer
                self._receive(work, *map(int, header))
            except Exception as error:
                if not self._over.is_set():
                    self._failed(operation, error)
                return

    def _receive(self, work: GlooMessageWork, numel: int, dtype: int) -> None:
        operation = work.operation
        finish = operation.finish  # Another thread may end the operation meanwhile.
        error = message_mismatch(operation, operation.generation, self._rank, numel, dtype)
        # Before Gloo receives more than there is room for, which would kill the process.
        if error is not None:
            raise error
        received = torch.empty_like(work.content)
        if numel:
            content = received.view(torch.uint8)
            self._wait(self._gloo.recv([content], operation.peer, 2 * operation.tag + 1))

        def write() -> None:
            work.content.copy_(received)
            if finish is not None:
                finish()

        self._give(write)
        self.in_flight.settle(work)

    def _missing(self, peer: int, tag: int, closed: set[int]) -> Operation | None:
        """A receive that cannot end, since `peer` has closed the group; the thread that receives
        from there ends. A receive from any rank needs only one that is left."""
        with self._changed:
            self._asking.discard((peer, tag))
            for work in self._wanted:
                operation = work.operation
                needs = set(self._others) if operation.peer == ANY_RANK else {operation.peer}
                if operation.tag == tag and needs <= closed:
                    return operation
        return None

    def _who_wants(self, peer: int, tag: int) -> GlooMessageWork | None:
        for work in self._wanted:
            if work.operation.tag == tag and work.operation.peer in (peer, ANY_RANK):
                return work
        return None

    @staticmethod
    def _wait(work: Any) -> None:
        work.wait(_FOREVER)
