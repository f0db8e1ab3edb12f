"""Collectives of CPU ranks on different hosts, through Gloo.

This file constructs torch.distributed's ProcessGroupGloo directly, without torch's global groups,
and uses it only to move bytes. arithmetic.py reduces in rank order, so results are bit-equal to
those of shared memory, for every dtype of the contract. Nearly every operation is one call of
alltoall: Gloo's allgather took two to five times as long, and its reduce_scatter is an allreduce.

Gloo does not check its callers: where ranks disagree, it leaves wrong data silently, or kills the
process. So each operation starts with an exchange of signatures. Gloo also cannot be aborted.
Therefore three kinds of threads share the work, besides those of gloo_messages.py:

- A caller's thread waits until a work is settled, never for Gloo.
- The **runner**, one daemon thread, runs the operations in order and waits for Gloo. After an abort
  it may be stuck in Gloo until Gloo's own timeout, a few seconds after the operation's; only then
  are the connections closed. The runner works on its own buffers and touches callers' tensors only
  under a lock that the end of the generation takes first: once a work has ended, its tensors
  belong to the caller again.
- The **watcher** enforces the deadlines and, when an operation takes long, reads the other ranks'
  positions from the store (liveness.py). It also answers roll calls through the store, which find
  the rank that died. Broken connections do not say that: a Gloo that fails closes all of its
  connections, and so makes its peers fail.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllToAllOptions, BroadcastOptions

from ..contract.arithmetic import reduce_into
from ..contract.communicator import Communicator
from ..contract.errors import ChoruslineError, CollectiveError, GroupClosed, StoreTimeout
from ..contract.in_flight import InFlight, PendingWork
from ..contract.operation import STARTED, Operation, ReduceOp
from ..contract.work import Work
from ..diagnosis.late_warning import Lateness
from ..diagnosis.signature import Signature, mismatch, pair_mismatch
from ..stores.store import PrefixStore, Store
from ..stores.torch_store import TorchStore
from .gloo_messages import GlooMessages, GlooMessageWork
from .interfaces import GLOO_VARIABLE, check_gloo_interfaces
from .liveness import RollCall, look_s, position_after, position_in

_TICK_S = 0.1  # between two turns of the watcher, most of which read nothing
_IDLE_LOOK_S = 0.5  # between two reads of the store, with nothing in flight
_LAST_BYTES_S = 0.4  # for the messages of a rank that has closed to end: they are under way
_GRACE_S = 5.0  # by which Gloo's deadlines are later than the operation's
_CLOSE_S = 0.3  # for the threads to end, unless the runner is stuck
_SLICE = timedelta(seconds=0.1)  # of a wait in Gloo
_DIRECT_BYTES = 32 << 10  # up to here all_reduce sends all data to all ranks: half the rounds


class _Over(Exception):
    """The generation has ended, so the runner must stop."""


class GlooWork(PendingWork):
    """body: moves the data, in the runner; None if the exchange of signatures is enough.
    counts: of an exchange, elements to each rank, then from each rank."""

    def __init__(
        self,
        operation: Operation,
        in_flight: InFlight[GlooWork],
        body: Callable[[], None] | None,
        counts: Sequence[int] = (),
    ) -> None:
        super().__init__(operation, in_flight)
        self.body = body
        self.counts = counts


class GlooCommunicator(Communicator):
    """One rank's end of a ProcessGroupGloo. `connect` of host.py makes it."""

    backend = "gloo"

    def __init__(self, store: Store, rank: int, size: int, generation: int) -> None:
        """Blocks until all ranks are connected. Raises CollectiveError, or StoreTimeout."""
        check_gloo_interfaces()
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self.generation = generation
        self._roll_call = RollCall(store, rank, size, generation, _LAST_BYTES_S)
        self._lateness = Lateness(rank, size)
        self._in_flight: InFlight[GlooWork] = InFlight(rank, self.abort)
        self._tensors = threading.RLock()  # held while tensors of callers are read or written
        self._over = threading.Event()
        self._may_disconnect = threading.Event()  # later than `_over` if this rank closes
        self._gloo: Any = None  # for the runner; None after it was released
        self._torch_store = TorchStore(PrefixStore("gloo", store))
        name = f"chorusline-gloo-{generation}-{rank}"
        self._messages: GlooMessages | None = None  # None: before all ranks are connected
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watcher", daemon=True)
        self._runner = threading.Thread(target=self._run, name=name, daemon=True)
        self._in_flight.workers = [self._runner]
        # Before the connections are made: it answers the roll calls of ranks whose Gloo has failed.
        self._watcher.start()
        try:
            self._connect(store)
        # The watcher would watch a group that nobody holds.
        except BaseException:
            self._end(GroupClosed("rendezvous", generation))
            self._torch_store.release()
            raise
        self._runner.start()
        _open.add(self)

    def _connect(self, store: Store) -> None:
        broken = ""
        try:
            self._gloo = dist.ProcessGroupGloo(
                self._torch_store, self.rank, self.size, timedelta(seconds=store.timeout_s)
            )
        # Gloo's own, or torch's. All else is of the store, which ends the wait: a secret that is
        # another one, or ranks that have given up and come again.
        except ChoruslineError:
            raise
        except RuntimeError as error:
            # The store knows which ranks are missing; Gloo only that its wait is over.
            if isinstance(error.__cause__, StoreTimeout):  # Ranks are late, perhaps not lost.
                raise error.__cause__ from None
            broken = (
                f"{error}. Gloo listens at the address of this host's name; the environment "
                f"variable {GLOO_VARIABLE} names another network interface"
            )
        if broken:
            raise self._end_broken("rendezvous", broken)
        self._messages = GlooMessages(
            self._gloo,
            self.rank,
            self.size,
            InFlight(self.rank, self.abort),
            self._message_failed,
            self._give,
            self._over,
            self._roll_call.closed,
        )
        store.gather("connected", self.rank, self.size, "1")

    # -- the contract ----------------------------------------------------------------------------

    def all_reduce(self, operation: Operation, tensor: torch.Tensor, op: ReduceOp) -> Work:
        flat = tensor.view(-1)

        def directly() -> None:
            parts = self._exchange(operation, self._taken(flat).expand(self.size, -1))
            self._give(lambda: reduce_into(flat, parts.unbind(), op))

        def in_parts() -> None:
            """Each rank reduces one part; parts are padded to one length."""
            # Twice the rounds of `directly`, and 2/size of its bytes: worth it from some size on.
            count = -(-flat.numel() // self.size)
            rows = flat.new_zeros(self.size * count)
            rows[: flat.numel()] = self._taken(flat)
            parts = self._exchange(operation, rows.view(self.size, count))
            reduced = flat.new_empty(count)
            reduce_into(reduced, parts.unbind(), op)
            whole = self._exchange(operation, reduced.expand(self.size, -1)).view(-1)
            self._give(lambda: flat.copy_(whole[: flat.numel()]))

        return self._issue(operation, flat, directly if flat.nbytes <= _DIRECT_BYTES else in_parts)

    def reduce_scatter(
        self, operation: Operation, output: torch.Tensor, input: torch.Tensor, op: ReduceOp
    ) -> Work:
        output, rows = output.view(-1), input.view(self.size, -1)

        def body() -> None:
            parts = self._exchange(operation, self._taken(rows))
            self._give(lambda: reduce_into(output, parts.unbind(), op))

        return self._issue(operation, input, body)

    def all_gather(self, operation: Operation, output: torch.Tensor, input: torch.Tensor) -> Work:
        rows, flat = output.view(self.size, -1), input.view(-1)

        def body() -> None:
            gathered = self._exchange(operation, self._taken(flat).expand(self.size, -1))
            self._give(lambda: rows.copy_(gathered))

        return self._issue(operation, input, body)

    def broadcast(self, operation: Operation, tensor: torch.Tensor, root: int) -> Work:
        flat = tensor.view(-1)

        def body() -> None:
            # A copy, into which Gloo writes: after an abort it may still do so, when the tensor is
            # the caller's again.
            staged = self._taken(flat) if self.rank == root else flat.new_empty(flat.numel())
            options = BroadcastOptions()
            options.rootRank = root
            options.timeout = _gloo_timeout(operation)
            moved = staged.view(torch.uint8)
            self._see_through(self._gloo.broadcast([moved], options), moved)
            if self.rank != root:
                self._give(lambda: flat.copy_(staged))

        return self._issue(operation, flat, body)

    def reduce(self, operation: Operation, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        def body() -> None:
            nothing = tensor.new_empty(0)
            sent = [nothing] * self.size
            sent[root] = self._taken(tensor)
            count = len(tensor) if self.rank == root else 0
            parts = self._exchange_parts(operation, sent, [count] * self.size)
            if self.rank == root:
                self._give(lambda: reduce_into(tensor, parts, op))

        return self._issue(operation, tensor, body)

    def exchange(
        self, operation: Operation, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Work:
        def body() -> None:
            sent = [self._taken(part) for part in inputs]
            parts = self._exchange_parts(operation, sent, [len(part) for part in outputs])

            def write() -> None:
                for output, part in zip(outputs, parts, strict=True):
                    output.copy_(part)

            self._give(write)

        counts = [len(part) for part in (*inputs, *outputs)]
        work = GlooWork(operation, self._in_flight, body, counts)
        self._in_flight.add(work)
        return work

    def send(self, operation: Operation, tensor: torch.Tensor) -> Work:
        assert self._messages is not None
        return self._messages.send(operation, tensor)

    def recv(self, operation: Operation, tensor: torch.Tensor) -> Work:
        assert self._messages is not None
        return self._messages.recv(operation, tensor)

    def barrier(self, operation: Operation) -> Work:
        return self._issue(operation, None, None)  # The exchange of signatures is a barrier.

    def watching(
        self, ranks: Sequence[int], what: str, limit_s: float
    ) -> contextlib.AbstractContextManager[None]:
        assert self._messages is not None
        last = self._in_flight.last_done
        sequence = -1 if last is None else last.sequence
        return self._messages.watching(ranks, what, self.generation, sequence, limit_s)

    def abort(self, error: CollectiveError) -> None:
        """End the generation with `error`. Returns at once; a thread informs the other ranks.
        Short of threads it informs them itself, as fast as the store is."""
        self._end(error, is_new=True)

    def turn(self) -> None:
        self._roll_call.turn()

    def rest(self, operations: int) -> None:
        self._roll_call.rest(operations)

    def failure(self) -> CollectiveError | None:
        return self._in_flight.failure

    def close(self) -> None:
        """Free connections and threads. A runner that is stuck in Gloo frees them later."""
        # After an error the others have heard of this rank's end by that. Else they read that it
        # closed before its connections are closed, so that nobody takes it for dead.
        if self._end(GroupClosed("close", self.generation), disconnects=False):
            try:
                self._roll_call.tell_closed(self._in_flight.operations_done())
            finally:
                self._may_disconnect.set()
        for thread in (self._watcher, self._runner):
            # A callback of a work, which one of these threads runs, may close the group.
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)
        _open.discard(self)

    def _issue(
        self,
        operation: Operation,
        tensor: torch.Tensor | None,
        body: Callable[[], None] | None,
    ) -> Work:
        has_data = tensor is not None and tensor.numel() > 0
        work = GlooWork(operation, self._in_flight, body if has_data else None)
        self._in_flight.add(work)
        return work

    def _end(
        self, error: CollectiveError, *, is_new: bool = False, disconnects: bool = True
    ) -> bool:
        """Settle all works with `error`; returns whether it is the first error.

        is_new: the other ranks do not know it yet.
        disconnects: the connections may be closed.
        """
        messages: list[GlooMessageWork] | None = None
        is_told = True
        with self._tensors:
            # The first error stands on all ranks, so only that one is published.
            if is_new and self._in_flight.failure is None:
                # Publish first: a waiter that is freed may exit the process, and this thread.
                is_told = self._roll_call.publish_meanwhile(error) is not None
            self._over.set()
            works = self._in_flight.settle_all(error)
            if self._messages is not None:
                messages = self._messages.in_flight.settle_all(error)
        if works is not None and disconnects:
            self._may_disconnect.set()
        if not is_told:
            self._roll_call.publish(error)
        for work in (*(works or ()), *(messages or ())):
            work.call_back()
        return works is not None

    def _message_failed(self, operation: Operation, error: Exception) -> None:
        """End the generation; called from a thread of the messages."""
        if isinstance(error, CollectiveError):
            self._end(self._roll_call.publish(error))
        else:
            self._end_broken(operation, f"{type(error).__name__}: {error}")

    def _end_broken(self, operation: Operation | str, reason: str) -> CollectiveError:
        """End the generation after Gloo failed. Returns the error that explains the failure."""
        error = self._roll_call.why_broken(operation, reason)
        error = self._roll_call.publish(error)
        self._end(error)
        return error

    # -- the runner ------------------------------------------------------------------------------

    def _run(self) -> None:
        broken = ""
        try:
            while (work := self._in_flight.next()) is not None:
                self._perform(work)
                del work  # While the runner is idle, it must not keep tensors alive.
        except _Over:
            pass
        except Exception as error:
            broken = f"{type(error).__name__}: {error}"
        if not broken:
            self._may_disconnect.wait()
        self._gloo = None  # Closes the connections, which frees the peers that wait in Gloo.
        self._torch_store.release()
        head = self._in_flight.head()
        if broken and head is not None:
            self._end_broken(head.operation, broken)

    def _perform(self, work: GlooWork) -> None:
        if time.monotonic() - self._in_flight.settled_at >= _IDLE_LOOK_S:
            # After an abort, runners that are stuck in Gloo could let this operation succeed.
            error = self._roll_call.the_end(work.operation)
            if error is not None:
                self._end(error)
                raise _Over
        work.operation.state = STARTED
        self._compare_signatures(work)
        if work.body is not None:
            work.body()
        finish = work.operation.finish  # The watcher may end the operation meanwhile.
        if finish is not None:
            self._give(finish)
        with self._in_flight.changed:
            if self._in_flight.failure is not None:
                raise _Over
            self._in_flight.settle_head()
        work.call_back()

    def _compare_signatures(self, work: GlooWork) -> None:
        """Return when all ranks have issued the same operation; else end the generation."""
        operation, size = work.operation, self.size
        counts = list(work.counts) or [0] * 2 * size
        signature = Signature.of(operation)
        mine = torch.tensor(
            [[*signature, counts[r], counts[size + r]] for r in range(size)], device="cpu"
        )
        rows = self._exchange(operation, mine).tolist()
        error = mismatch(self.generation, [Signature(*row[:-2]) for row in rows])
        # Equal operations may still have parts that do not fit, which Gloo would not notice.
        if error is None and work.counts:
            # This rank received only those counts of the others that concern itself.
            tables = [[0] * 2 * size for _ in range(size)]
            for r, row in enumerate(rows):
                tables[r][self.rank], tables[r][size + self.rank] = row[-2:]
            tables[self.rank] = counts
            error = pair_mismatch(operation, self.generation, tables)
        if error is not None:
            self._end(self._roll_call.publish(error))
            raise _Over

    def _exchange(self, operation: Operation, rows: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r. rows: (size, n). Returns (size, n): what each rank sent here."""
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        options = AllToAllOptions()
        # Later than the deadline, so that it is the watcher that finds an operation overdue, and
        # knows of whom.
        options.timeout = _gloo_timeout(operation)
        sent = rows.contiguous().view(-1).view(torch.uint8)
        into = received.view(-1).view(torch.uint8)
        work = self._gloo.alltoall_base(into, sent, [], [], options)
        self._see_through(work, sent, into)
        return received

    def _exchange_parts(
        self, operation: Operation, parts: list[torch.Tensor], counts: list[int]
    ) -> list[torch.Tensor]:
        """Send part r to rank r. counts: elements from each rank. Returns what each rank sent."""
        width = parts[0].element_size()
        sent = torch.cat(parts)
        received = sent.new_empty(sum(counts))
        options = AllToAllOptions()
        options.timeout = _gloo_timeout(operation)
        out_bytes, in_bytes = sent.view(torch.uint8), received.view(torch.uint8)
        work = self._gloo.alltoall_base(
            in_bytes,
            out_bytes,
            [count * width for count in counts],
            [len(part) * width for part in parts],
            options,
        )
        self._see_through(work, out_bytes, in_bytes)
        return list(received.split(counts))

    def _see_through(self, work: Any, *tensors: torch.Tensor) -> None:
        """Return when Gloo is done with `work`. Raises _Over then if the generation has ended.

        The process may exit meanwhile, and must not crash. A thread crashes it by returning from
        C++ to an interpreter that is gone: so this thread waits in slices, and only in Python once
        the generation is over. A thread of Gloo crashes it by dropping the last reference to a
        tensor that Python knows: so this frame holds `tensors` until Gloo has released them.
        """
        while not self._over.is_set():
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # Raises, unless the work has just succeeded.
                    return
        while not work.is_completed():
            time.sleep(0.02)
        raise _Over

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a caller's tensor. With one element, that may have any stride."""
        with self._tensors:
            # Its work has ended, and the tensor is the caller's again.
            if self._over.is_set():
                raise _Over
            return tensor.clone(memory_format=torch.contiguous_format)

    def _give(self, write: Callable[[], object]) -> None:
        """Call `write`, which changes callers' tensors, unless the generation is over."""
        with self._tensors:
            if self._over.is_set():
                raise _Over
            write()

    # -- the watcher -----------------------------------------------------------------------------

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._over.wait(_TICK_S):
            head: PendingWork | None = self._in_flight.head()
            # All ranks take part in a collective, so those that follow each other need no look.
            # Messages say only that one other rank lives, so they do not put it off.
            since = self._in_flight.settled_at if head is None else head.operation.issued_at
            # A rank that waits for a message is asked for its position as one in a collective is.
            if head is None and self._messages is not None:
                head = self._messages.in_flight.head()
            pause_s = _IDLE_LOOK_S if head is None else look_s(head.operation)
            if time.monotonic() - max(looked_at, since) >= pause_s:
                looked_at = time.monotonic()
                error = self._look(None if head is None else head.operation)
                if error is not None:
                    self._end(error)
        self._may_disconnect.wait()
        if self._messages is not None:
            # Threads that send and receive hold the connections until they are told to stop.
            self._messages.free(_CLOSE_S)

    def _look(self, head: Operation | None) -> CollectiveError | None:
        """Publish this rank's position; returns the error if another rank ended the generation, or
        an operation is overdue."""
        position = position_in(head) if head else position_after(self._in_flight.last_done)
        self._roll_call.tell(position)
        self._roll_call.answer()
        error = self._roll_call.the_end(head)
        overdue = self._in_flight.overdue(look_s) if error is None else None
        # Messages have deadlines of their own, and may be overdue while no collective is.
        if error is None and overdue is None and self._messages is not None:
            overdue = self._messages.in_flight.overdue(look_s)
            head = overdue or head
        if head is not None and overdue is not None:
            # One look after the deadline, ranks that arrived in time have published that.
            error = self._roll_call.timeout(overdue, head, position)
        if error is None and head is not None and self._lateness.is_due(head):
            late = self._roll_call.timeout(head, head, position)
            self._lateness.tell(head, late.ranks, late.whereabouts)
        return None if error is None else self._roll_call.publish(error)


def _gloo_timeout(operation: Operation) -> timedelta:
    left_s = operation.issued_at + operation.timeout_s - time.monotonic()
    return timedelta(seconds=max(left_s, 0.0) + _GRACE_S)


# Communicators are closed at exit: threads of Gloo that still hold Python's tensors would need the
# interpreter after it is gone, and crash the process.
_open: weakref.WeakSet[GlooCommunicator] = weakref.WeakSet()
_pid = os.getpid()


@atexit.register
def _close_all() -> None:
    if os.getpid() == _pid:  # A fork must not announce that its parent's rank has closed.
        for communicator in list(_open):
            communicator.close()
