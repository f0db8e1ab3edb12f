"""Collectives between GPUs, by NCCL; the only file that uses CuPy.

torch owns the memory and the streams; only the binding of NCCL comes from CuPy. This file adds
what NCCL lacks: deadlines, one error for all ranks, and the names of the ranks at fault.

A work is a pair of CUDA events on the communicator's own stream, around NCCL's kernel. One daemon
thread, the watcher, follows the works in flight in the order of issue. It polls the events at
growing intervals. When a work takes longer than half a second, or there was none for half a
second, it also reads the store, where ranks leave their positions and errors (liveness.py).

An abort also completes events, so a completed event alone proves nothing. If this rank aborts,
the failure settles all works, under the lock that guards it, before NCCL is stopped. If another
rank aborts, its kernel may let this rank's kernel end on half the data. Therefore a work that was
issued after half a second without works is settled only after a read of the store. A shorter race
remains, which NCCL cannot close. A caller that must know that all ranks finished sends a nonce
with the data, as the ballot of a step does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..contract.communicator import Communicator
from ..contract.errors import CollectiveError, GroupAborted, GroupClosed
from ..contract.in_flight import InFlight, PendingWork
from ..contract.operation import STARTED, Kind, Operation, ReduceOp
from ..contract.work import Work
from ..stores.store import Store
from .liveness import LOOK_S, RollCall, StorePosition, look_s, position_after, position_in
from .nccl_codes import DTYPE_CODES, REDUCE_OP_CODES, as_moved, lacks

FIRST_PAUSE_S = 0.00005  # between two queries of an event; doubles up to LONGEST_PAUSE_S
LONGEST_PAUSE_S = 0.001
CLOSE_TIMEOUT_S = 5.0  # for the other ranks to close as well
ISSUE_TIMEOUT_S = 2.0  # for a launch in progress, before an abort goes ahead without it


def load_nccl() -> Any:
    """`cupy.cuda.nccl`. Raises ImportError that says what to install."""
    remedy = (
        "Install chorusline[cuda13] (torch from PyPI is a CUDA 13 build) or, with a CUDA 12 build "
        "of torch, chorusline[cuda12]; never both."
    )
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ImportError(f"groups on cuda devices need CuPy: {error}. {remedy}") from error
    if not nccl.available:
        raise ImportError(f"groups on cuda devices need NCCL, and CuPy found none. {remedy}")
    return nccl


def connect(
    store: Store, rank: int, size: int, device: torch.device, generation: int
) -> Communicator:
    """Meet in `store` and connect. Blocks until all ranks have come.

    1. Every rank writes that it is ready, rank 0 also NCCL's unique id, and waits for all ranks.
    2. All ranks enter NCCL, which connects them.

    Raises StoreTimeout in (1), naming the keys `.../<rank>` that are missing. A rank that dies
    during (2) leaves the others inside ncclCommInitRank, which returns no handle that could be
    aborted: then the parent of a process that connects must kill it. (1) keeps that window small.
    """
    # For a bad rank, NCCL would only report "unhandled cuda error".
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")
    nccl = load_nccl()
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    # Connect all algorithms now. By default NCCL connects inside the first collective of each
    # algorithm, whose launch then waits for the other ranks' launches.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")

    # 1. Meet
    if rank == 0:
        store.set("unique_id/0", nccl.get_unique_id())
    store.set(f"ready/{rank}", "1")
    store.wait([f"ready/{peer}" for peer in range(size)])
    unique_id = store.get("unique_id/0")

    # 2. Connect
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # Also creates the CUDA context that NCCL needs.
        try:
            comm = nccl.NcclCommunicator(size, unique_id, rank)
        except (nccl.NcclError, KeyError) as error:  # KeyError: a status unknown to CuPy.
            raise GroupAborted(
                generation,
                [rank],
                f"NCCL could not connect on {device}: {error}. NCCL_DEBUG=WARN says more. Ranks "
                "that share a GPU need NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1",
            ) from error
    return NcclCommunicator(comm, stream, store, rank, size, device, generation)


class _Launch(NamedTuple):
    """One operation to launch. start: makes NCCL's calls; takes the stream's address."""

    operation: Operation
    tensors: list[torch.Tensor]
    start: Callable[[int], None]


class NcclWork(PendingWork):
    """An operation, or a coalesced block of them, on the communicator's stream.

    started: this rank's GPU has reached the work. ended: the work is over, or NCCL was aborted.
    waited_for: a stream waits for the work, so `close` lets it finish.
    blocks_host: the work contains a barrier.
    before: the operations of a coalesced block that precede the last one, which is `operation`.
    """

    def __init__(self, communicator: NcclCommunicator, operation: Operation) -> None:
        super().__init__(operation, communicator.in_flight)
        self.communicator = communicator
        self.started = torch.cuda.Event()
        self.ended = torch.cuda.Event()
        self.waited_for = False
        self.blocks_host = operation.kind is Kind.BARRIER
        self.before: Sequence[Operation] = ()

    def settle(self, failure: CollectiveError | None) -> None:
        operations = (*self.before, self.operation)
        finishes = [operation.finish for operation in operations]
        for operation in self.before:
            operation.end(failure)
        super().settle(failure)
        if failure is not None:
            # The GPU may still be copying to the callers' tensors, which stay with the group.
            for operation, finish in zip(operations, finishes, strict=True):
                operation.finish = finish

    def _block(self) -> None:
        """Order the current stream behind the work; a barrier blocks the host, as in torch."""
        # A work with a future also blocks: the future must be complete when wait() returns.
        if self.blocks_host or self._future is not None:
            super()._block()
            return
        if self.failure is None:
            device = self.communicator.device
            torch.cuda.current_stream(device).wait_event(self.ended)
            self.waited_for = True
        self._raise_failure()

    def is_completed(self) -> bool:
        if not self.done:
            self.communicator.settle_ended()
        return self.done


class NcclCommunicator(Communicator):
    """One rank's end of an NCCL communicator, made by `connect`.

    It has two locks. `in_flight.changed` guards the works and the failure; no thread holds it while
    it waits. `_nccl` is held around every use of the NCCL handle, because NCCL's abort frees the
    handle even if another thread uses it.
    """

    backend = "nccl"
    receives_from_any = False
    has_tags = False

    def __init__(
        self,
        comm: Any,
        stream: torch.cuda.Stream,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        generation: int,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.generation = generation
        self.in_flight: InFlight[NcclWork] = InFlight(rank, self.abort)
        self._roll_call = RollCall(store, rank, size, generation)
        self._stream = stream
        self._nccl = threading.Lock()
        self._comm = comm  # None after it was released
        self._doubtful = False  # after a pause: settle nothing before a read of the store
        self._asked_at = 0.0  # when `failure` last read the store, in time.monotonic() seconds
        self._ending: threading.Thread | None = None
        self._library = load_nccl()
        self._together: list[_Launch] | None = None  # the open coalesced block's operations
        self._work_together: NcclWork | None = None
        self._barrier_element = torch.zeros(1, dtype=torch.int32, device=device)
        self._watcher = threading.Thread(
            target=self._watch, name=f"chorusline-nccl-{generation}-{rank}", daemon=True
        )
        self.in_flight.worker = self._watcher
        self._watcher.start()

    # -- operations ------------------------------------------------------------------------------

    def all_reduce(self, operation: Operation, tensor: torch.Tensor, op: ReduceOp) -> Work:
        def launch(stream: int) -> None:
            at, dtype = tensor.data_ptr(), DTYPE_CODES[tensor.dtype]
            self._comm.allReduce(at, at, tensor.numel(), dtype, REDUCE_OP_CODES[op], stream)

        return self._issue(operation, [tensor], launch)

    def reduce_scatter(
        self, operation: Operation, output: torch.Tensor, input: torch.Tensor, op: ReduceOp
    ) -> Work:
        def launch(stream: int) -> None:
            self._comm.reduceScatter(
                input.data_ptr(),
                output.data_ptr(),
                output.numel(),
                DTYPE_CODES[input.dtype],
                REDUCE_OP_CODES[op],
                stream,
            )

        return self._issue(operation, [output, input], launch)

    def all_gather(self, operation: Operation, output: torch.Tensor, input: torch.Tensor) -> Work:
        def launch(stream: int) -> None:
            at, count, dtype = as_moved(input)
            self._comm.allGather(at, output.data_ptr(), count, dtype, stream)

        return self._issue(operation, [output, input], launch)

    def broadcast(self, operation: Operation, tensor: torch.Tensor, root: int) -> Work:
        def launch(stream: int) -> None:
            at, count, dtype = as_moved(tensor)
            self._comm.broadcast(at, at, count, dtype, root, stream)

        return self._issue(operation, [tensor], launch)

    def reduce(self, operation: Operation, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        def launch(stream: int) -> None:
            at, dtype = tensor.data_ptr(), DTYPE_CODES[tensor.dtype]
            # NCCL writes the tensor only on the root.
            self._comm.reduce(at, at, tensor.numel(), dtype, REDUCE_OP_CODES[op], root, stream)

        return self._issue(operation, [tensor], launch)

    def exchange(
        self, operation: Operation, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Work:
        """One group call, so that no send waits for a recv; torch copies this rank's own part."""

        def launch(stream: int) -> None:
            self._library.groupStart()
            try:
                for peer, (output, input) in enumerate(zip(outputs, inputs, strict=True)):
                    if peer == self.rank:
                        continue
                    if input.numel():
                        self._comm.send(*as_moved(input), peer, stream)
                    if output.numel():
                        self._comm.recv(*as_moved(output), peer, stream)
            finally:
                self._library.groupEnd()

        def copy_own_part() -> None:
            outputs[self.rank].copy_(inputs[self.rank])
            if finish is not None:
                finish()

        finish, operation.finish = operation.finish, copy_own_part
        return self._issue(operation, [*outputs, *inputs], launch)

    def send(self, operation: Operation, tensor: torch.Tensor) -> Work:
        def launch(stream: int) -> None:
            self._comm.send(*as_moved(tensor), operation.peer, stream)

        return self._issue(operation, [tensor], launch)

    def recv(self, operation: Operation, tensor: torch.Tensor) -> Work:
        def launch(stream: int) -> None:
            self._comm.recv(*as_moved(tensor), operation.peer, stream)

        return self._issue(operation, [tensor], launch)

    def lacks(self, op: ReduceOp, dtype: torch.dtype) -> str:
        return lacks(op, dtype)

    def begin_together(self) -> None:
        self._together, self._work_together = [], None

    def end_together(self) -> None:
        launches, self._together = self._together, None
        work, self._work_together = self._work_together, None
        if work is not None and launches:
            # The block's position for other ranks is that of its last operation.
            work.operation = launches[-1].operation
            work.before = [one.operation for one in launches[:-1]]
            work.blocks_host = any(one.operation.kind is Kind.BARRIER for one in launches)
            self._launch(work, launches)

    def barrier(self, operation: Operation) -> Work:
        return self.all_reduce(operation, self._barrier_element, ReduceOp.MAX)

    def _issue(
        self, operation: Operation, tensors: list[torch.Tensor], start: Callable[[int], None]
    ) -> Work:
        launch = _Launch(operation, tensors, start)
        if self._together is not None:
            self._together.append(launch)
            if self._work_together is None:
                self._work_together = NcclWork(self, operation)
            return self._work_together
        work = NcclWork(self, operation)
        self._launch(work, [launch])
        return work

    def _launch(self, work: NcclWork, launches: list[_Launch]) -> None:
        # The lock is held until the work is queued, so that the queue has the stream's order.
        with self._nccl:
            if self.in_flight.failure is None:
                try:
                    self._enqueue(work, launches)
                except Exception as error:
                    self.abort(self._broken(f"{work.operation} could not be launched", error))
            with self.in_flight.changed:
                if not self.in_flight.works:
                    self._doubtful = time.monotonic() - self.in_flight.settled_at >= LOOK_S
                self.in_flight.add(work)

    def _enqueue(self, work: NcclWork, launches: list[_Launch]) -> None:
        # Launches of zero elements are skipped: they have no address to send from.
        real = [one for one in launches if any(tensor.numel() for tensor in one.tensors)]
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            work.started.record(self._stream)
            if len(real) == 1:
                real[0].start(self._stream.cuda_stream)
            elif real:
                self._library.groupStart()
                try:
                    for one in real:
                        one.start(self._stream.cuda_stream)
                finally:
                    self._library.groupEnd()
            with torch.cuda.stream(self._stream):
                for one in launches:
                    finish = one.operation.finish
                    if finish is not None:
                        finish()
            work.ended.record(self._stream)
            for one in launches:
                for tensor in one.tensors:
                    tensor.record_stream(self._stream)

    # -- the end ---------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        """End the generation with `error`. Returns at once; threads publish it and abort NCCL.

        Works of this rank raise `error`, unless another came first. The other ranks raise the
        error in the store: `error`, or one that another rank wrote before it.
        """
        with self.in_flight.changed:
            if not self.in_flight.fail(error):
                return
            telling = self._roll_call.publish_meanwhile(error)
            # A daemon: the abort may hang in NCCL, and must not keep the process alive.
            self._ending = threading.Thread(
                target=self._end_nccl, args=(telling,), name="chorusline-abort-nccl", daemon=True
            )
            self._ending.start()

    def failure(self) -> CollectiveError | None:
        with self.in_flight.changed:
            failure = self.in_flight.failure
        if failure is None and time.monotonic() - self._asked_at >= LOOK_S:
            # The watcher does not read the store while nothing is in flight.
            self._asked_at = time.monotonic()
            failure = self._roll_call.news()
            if failure is not None:
                self.abort(failure)
        return failure

    def close(self) -> None:
        """Free the handle, the stream and the thread.

        1. Works that a stream waits for get 5 s to finish; all others raise GroupClosed.
        2. The other ranks get 5 s to close too: ncclCommDestroy needs all ranks of a host, and
           frees memory that a slower rank may still read.
        3. Destroy the handle; abort it after an error, with works left, or if (2) took too long.
        """
        # 1. Finish
        self._let_finish()
        with self.in_flight.changed:
            idle = not self.in_flight.works
            first = self.in_flight.fail(GroupClosed("close", self.generation))
        # 2. Wait for the others
        published = first and self._roll_call.tell_closed(self.in_flight.operations_done())
        gently = published and idle and self._roll_call.all_close(CLOSE_TIMEOUT_S)
        # 3. Destroy or abort
        self._give_back(gently)
        for thread in (self._ending, self._watcher):
            if thread is not None and thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT_S)

    def _end_nccl(self, telling: threading.Thread) -> None:
        # Publish first: ncclCommAbort may return only after the other ranks abort as well.
        telling.join(CLOSE_TIMEOUT_S)
        self._give_back(gently=False)

    def _give_back(self, gently: bool) -> None:
        # A launch blocks when the GPU's queue is full of kernels that wait for a lost rank. Only
        # the abort frees it, so the abort must not wait for it without a limit.
        held = self._nccl.acquire(timeout=ISSUE_TIMEOUT_S)
        try:
            comm, self._comm = self._comm, None
            if comm is not None:
                comm.destroy() if gently else comm.abort()
        finally:
            if held:
                self._nccl.release()

    def _let_finish(self) -> None:
        with self.in_flight.changed:
            works = [work for work in self.in_flight.works if work.waited_for]
        give_up_at = time.monotonic() + CLOSE_TIMEOUT_S
        while works and not works[-1].is_completed() and time.monotonic() < give_up_at:
            time.sleep(LONGEST_PAUSE_S)
        self.settle_ended()

    def _broken(self, what: str, error: BaseException) -> GroupAborted:
        reason = f"{what}: {type(error).__name__}: {error}"
        return GroupAborted(self.generation, [self.rank], reason)

    # -- works in flight -------------------------------------------------------------------------

    def settle_ended(self) -> None:
        """Settle the works whose events have completed. Any thread may call it; never raises."""
        ended: list[NcclWork] = []
        broken: Exception | None = None
        with self.in_flight.changed:
            try:
                works = self.in_flight.works
                while works and not self._doubtful and works[0].ended.query():
                    ended.append(works[0])
                    self.in_flight.settle_head()
            except Exception as error:  # A CUDA error, perhaps of an earlier kernel.
                broken = error
        for work in ended:
            work.call_back()
        if broken is not None:
            self.abort(self._broken("the GPU failed", broken))

    # -- the watcher -----------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._follow()
        except Exception as error:
            self.abort(self._broken("the thread that watches NCCL failed", error))

    def _follow(self) -> None:
        """Settle works in order and, when one takes long, read the other ranks' state."""
        pause_s = FIRST_PAUSE_S
        looked_at = 0.0
        followed: NcclWork | None = None
        while True:
            self.settle_ended()
            with self.in_flight.changed:
                if self.in_flight.failure is not None:
                    return
                head = self.in_flight.head()
                if head is None:
                    news = self._roll_call.is_news(self._position())
                    idle = not self.in_flight.changed.wait(LOOK_S if news else None)
            if head is None:
                if idle:
                    self._roll_call.tell(self._position())
                continue
            if head is not followed:
                followed, pause_s = head, FIRST_PAUSE_S
                if self._doubtful:
                    self._look_for_the_end(head)
                    self._doubtful = False
                    continue
            now = time.monotonic()
            if now - max(looked_at, head.operation.issued_at) >= look_s(head.operation):
                looked_at = now
                self._look(head)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _look(self, head: NcclWork) -> None:
        """Publish this rank's position; end the generation if it is over elsewhere, or overdue."""
        self._roll_call.tell(self._position())
        if self._look_for_the_end(head):
            return
        error = self._async_error()
        if error is None:
            # One look after the deadline, ranks that arrived in time have published that.
            overdue = self.in_flight.overdue(look_s)
            if overdue is not None:
                error = self._roll_call.timeout(overdue, head.operation, self._position())
        if error is not None:
            self.abort(self._roll_call.publish(error))

    def _look_for_the_end(self, head: NcclWork) -> bool:
        """End the generation if another rank has ended it; returns whether one has."""
        error = self._roll_call.the_end(head.operation)
        if error is not None:
            self.abort(self._roll_call.publish(error))
        return error is not None

    def _async_error(self) -> CollectiveError | None:
        """The error that NCCL's own threads report, such as a broken connection."""
        if not self._nccl.acquire(blocking=False):
            return None  # A launch is in progress and raises its own errors.
        try:
            if self._comm is not None:
                self._comm.check_async_error()
        except Exception as error:  # NcclError; KeyError for a status that CuPy has no name for.
            return self._broken("NCCL failed, which often means that a peer died", error)
        finally:
            self._nccl.release()
        return None

    def _position(self) -> StorePosition:
        """The last operation that this rank's GPU has reached, and what it is doing, in words."""
        with self.in_flight.changed:
            head = self.in_flight.head()
            last = self.in_flight.last_done
        if head is None:
            return position_after(last)
        operation = head.operation
        if head.started.query():
            operation.state = STARTED
            return position_in(operation)
        where = f"has issued {operation.place()}, but its GPU is busy with earlier kernels"
        # A message has the sequence of the collective before it, which has ended.
        return StorePosition(operation.sequence - (not operation.is_between_two), where)
