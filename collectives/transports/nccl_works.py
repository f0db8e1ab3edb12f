"""NCCL's works: when one counts as done, and the thread that follows them.

A work is a pair of CUDA events on the communicator's own stream, around NCCL's kernel. One daemon
thread, the watcher, follows the works in flight in the order of issue. It polls the events every
millisecond, and more often for a work that has callbacks or that a thread waits for on the host,
which polls as well. When a work takes longer than half a second it also reads the store, where
ranks leave their positions and errors (liveness.py).

**An abort completes events, too**, so a completed event alone proves nothing:

- If this rank aborts, the failure settles all works before NCCL is stopped.
- If another rank aborts, its kernel runs on and posts what it has, with valid flags, so that this
  rank's kernel may complete on wrong data, without an error. Therefore every rank publishes an
  abort at least `ABORT_AFTER_S` before it stops NCCL. An event that has completed by now is the end
  of a work if a read of the store that began at most `TRUST_S` ago found no abort: an abort
  published after that read has not stopped anything yet. The watcher makes such a read where there
  is none, for all works that have ended, so at most one for every `TRUST_S`.

The host must not read results after `wait()`, which orders the stream only: that read would come
back when this rank's own abort ends the kernel, with whatever is there. `wait_on_host()` returns
when the work is done by the rule above, and raises its error. What a program has computed after
`wait()` is worthless if the work fails later; `Group.has_misled` reports that then. Stores that
fail tell no aborts; then the votes of a step are counted (agreement.py of the runtime).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from ..contract.callback_thread import CallbackThread, callback_thread
from ..contract.errors import CollectiveError, GroupAborted
from ..contract.in_flight import InFlight, PendingWork
from ..contract.operation import STARTED, Kind, Operation
from .cuda_events import has_ended, relax_this_thread
from .liveness import LOOK_S, RollCall, StorePosition, look_s, position_after, position_in

TRUST_S = 0.05
ABORT_AFTER_S = 0.1  # longer than TRUST_S, for threads that wake late
FIRST_PAUSE_S = 0.00005  # between two queries of an event, if somebody waits; it grows
LONGEST_PAUSE_S = 0.001
YIELD_S = 0.0002  # in which a thread that waits only yields: shorter than a sleep comes back


class NcclWork(PendingWork):
    """An operation, or a coalesced block of them, on the communicator's stream.

    is_launched: the events are recorded; before that they say nothing.
    is_over: `ended` has been seen complete, and nothing uses the tensors any more.
    started: this rank's GPU has reached the work. ended: the work is over, or NCCL was aborted.
    waited_for: a stream waits for the work, so `close` lets it finish.
    is_awaited: a thread waits for it on the host.
    blocks_host: the work contains a barrier.
    before: the operations of a coalesced block that precede the last one, which is `operation`.
    used: the tensors that its kernels use, until it is over. `record_stream` protects only what is
        of torch's allocator: the memory of a CuPy array goes to another one when it is dropped.
    """

    def __init__(
        self,
        operation: Operation,
        in_flight: InFlight[NcclWork],
        device: torch.device,
        settle_ended: Callable[[], object],
    ) -> None:
        super().__init__(operation, in_flight)
        self.device = device
        self.settle_ended = settle_ended
        self.is_launched = False
        self.is_over = False
        self.started = torch.cuda.Event()
        self.ended = torch.cuda.Event()
        self.waited_for = False
        self.is_awaited = False
        self.blocks_host = operation.kind is Kind.BARRIER
        self.before: Sequence[Operation] = ()
        self.used: Sequence[torch.Tensor] = ()

    def see_end(self) -> bool:
        """Whether it is over; lets go of its tensors then. Raises RuntimeError if the GPU fails."""
        if not self.is_over and self.is_launched and has_ended(self.ended):
            self.is_over, self.used = True, ()
        return self.is_over

    def _cuda_devices(self) -> list[torch.device]:
        return [self.device]  # Also without a result: what its callbacks return is there.

    def _callback_thread(self) -> CallbackThread:
        # A callback that reads a tensor may wait for a later work.
        return callback_thread("chorusline-nccl-callbacks")

    def operations(self) -> Sequence[Operation]:
        return [*self.before, self.operation]

    def settle(self, failure: CollectiveError | None) -> None:
        for operation in self.before:
            operation.end(failure)
        super().settle(failure)

    def _block(self) -> None:
        # If it fails later, what was computed from it is wrong (`Group.has_misled`).
        for operation in self.operations():
            operation.relied_on = True
        self.order_stream()

    def order_stream(self) -> None:
        """Order the current stream after the work; a barrier blocks the host, as in torch."""
        # A work with a future also blocks: the future must be complete when wait() returns.
        if self.blocks_host or self._future is not None:
            self._block_host()
            return
        # An aborted kernel is not worth waiting for.
        if self.failure is None:
            torch.cuda.current_stream(self.device).wait_event(self.ended)
            self.waited_for = True
        self._raise_failure()

    def _block_host(self) -> None:
        super()._block()

    def _wait_until_done(self) -> None:
        self.is_awaited = True
        began_at = time.monotonic()
        while not self.done:
            self.settle_ended()
            waited_s = time.monotonic() - began_at
            time.sleep(0 if waited_s < YIELD_S else min(waited_s / 4, LONGEST_PAUSE_S))

    def is_completed(self) -> bool:
        if not self.done:
            self.settle_ended()
        return self.done


class Watcher:
    """Settles works in the order of issue, and ends the generation when it is over elsewhere.

    abort: the communicator's. ask_nccl: what NCCL's own threads report; "" if nothing.
    """

    def __init__(
        self,
        in_flight: InFlight[NcclWork],
        roll_call: RollCall,
        device: torch.device,
        generation: int,
        *,
        abort: Callable[[CollectiveError], None],
        ask_nccl: Callable[[], str],
    ) -> None:
        self._in_flight = in_flight
        self._roll_call = roll_call
        self._device = device
        self._generation = generation
        self._abort = abort
        self._ask_nccl = ask_nccl
        self._trusted_at = float("-inf")  # beginning of the last read that found no abort
        name = f"chorusline-nccl-{generation}-{in_flight.rank}"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def start(self) -> None:
        self._in_flight.workers = [self._thread]
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def settle_ended(self) -> bool:
        """Settle the works that have ended by the rule above. Any thread may call it; never raises.

        Returns whether a work has ended that needs a read of the store first.
        """
        in_flight = self._in_flight
        ended: list[NcclWork] = []
        needs_look = False
        # Events are queried without the lock: a query may block on the driver's.
        for work in in_flight.in_order():
            try:
                # Works end in the order of the stream, so none after it has ended either.
                if not work.see_end():
                    break
            except Exception as error:  # A CUDA error, perhaps of an earlier kernel.
                self._abort(self._broken("the GPU failed", error))
                break
            if time.monotonic() - self._trusted_at > TRUST_S:
                needs_look = True
            else:
                ended.append(work)
        # Another thread may have settled them meanwhile, or an abort.
        settled = [work for work in ended if in_flight.settle_if_head(work)]
        for work in settled:
            work.call_back()
        return needs_look

    def _watch(self) -> None:
        torch.cuda.set_device(self._device)  # Without it, a query would open a context on GPU 0.
        relax_this_thread()
        try:
            self._follow()
        except Exception as error:
            self._abort(self._broken("the thread that watches NCCL failed", error))

    def _follow(self) -> None:
        """Settle works in order and, when one takes long, read the other ranks' state."""
        pause_s = FIRST_PAUSE_S
        looked_at = 0.0
        followed: NcclWork | None = None
        while True:
            # Something has ended, and no read of the store is new enough to trust it.
            if self.settle_ended():
                self._look_for_the_end()
                continue
            head = self._in_flight.head()
            if self._in_flight.failure is not None:
                return
            if head is None:
                followed = None  # It keeps the caller's tensors.
                self._wait_for_work()
                continue
            # Most works are over within a few queries. Where nobody waits, this thread would only
            # take Python's lock from those that compute.
            if head is not followed:
                followed, pause_s = head, FIRST_PAUSE_S
            now = time.monotonic()
            # Messages say only that one other rank lives, so they do not put a look off.
            since = 0.0 if head.operation.is_between_two else head.operation.issued_at
            if now - max(looked_at, since) >= look_s(head.operation):
                looked_at = now
                self._look(head)
            is_awaited = head.is_awaited or bool(head.callbacks)
            # While this thread sleeps, it must not keep tensors of the caller alive.
            del head
            time.sleep(pause_s if is_awaited else LONGEST_PAUSE_S)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _wait_for_work(self) -> None:
        """Until there is one; meanwhile tell where this rank is, and answer roll calls."""
        in_flight = self._in_flight
        with in_flight.changed:
            if in_flight.works or in_flight.failure is not None:
                return
            idle = not in_flight.changed.wait(LOOK_S)
        if idle:
            self._roll_call.tell(self._position())
            self._roll_call.answer()

    def _look(self, head: NcclWork) -> None:
        """Publish this rank's position; end the generation if it is over elsewhere, or overdue."""
        self._roll_call.tell(self._position())
        self._roll_call.answer()
        if self._look_for_the_end():
            return
        error: CollectiveError | None = None
        found = self._ask_nccl()
        if found:
            # A peer may have died, or only its connection: the ranks that are left answer.
            reason = f"an NCCL error ({found})"
            error = self._roll_call.why_broken(head.operation, reason)
        else:
            # One look after the deadline, ranks that arrived in time have published that.
            overdue = self._in_flight.overdue(look_s)
            if overdue is not None:
                error = self._roll_call.timeout(overdue, head.operation, self._position())
        if error is not None:
            self._abort(self._roll_call.publish(error))

    def _look_for_the_end(self) -> bool:
        """End the generation if another rank has ended it; returns whether one has."""
        head = self._in_flight.head()
        began_at = time.monotonic()
        error = self._roll_call.the_end(None if head is None else head.operation)
        if error is None:
            # The beginning of the read counts: an abort may be published while it is under way.
            self._trusted_at = began_at
            return False
        self._abort(self._roll_call.publish(error))
        return True

    def _position(self) -> StorePosition:
        """The last operation that this rank's GPU has reached, and what it is doing, in words."""
        with self._in_flight.changed:
            head = self._in_flight.head()
            last = self._in_flight.last_done
        if head is None:
            return position_after(last)
        operation = head.operation
        if not head.is_launched or has_ended(head.started):  # A launch that blocks waits for peers.
            operation.state = STARTED
            return position_in(operation)
        where = f"has issued {operation.place()}, but its GPU is busy with earlier kernels"
        # A message has the sequence of the collective before it, which has ended.
        return StorePosition(operation.sequence - (not operation.is_between_two), where)

    def _broken(self, what: str, error: BaseException) -> GroupAborted:
        reason = f"{what}: {type(error).__name__}: {error}"
        return GroupAborted(self._generation, [self._in_flight.rank], reason)
