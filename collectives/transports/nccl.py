"""Collectives between GPUs, by NCCL; the only file that knows CuPy.

torch owns the memory and the streams; CuPy lends its binding of NCCL and nothing else. What NCCL
does not have, this file adds: deadlines, one error for all ranks, and names for the ranks at fault.

A work is a pair of CUDA events on the communicator's own stream, around NCCL's kernel. One daemon
thread, the watcher, follows the works in flight in the order of issue. It alone waits; it asks the
events ever more slowly, and when a work takes longer than half a second, or there was none for half
a second, it also looks into the store: liveness.py says what the ranks leave there for each other.

An abort also completes events, so an event proves nothing by itself. This rank's own abort: works
are settled under the lock that guards the failure, and a failure settles them all before NCCL is
told to stop. Another rank's abort: the kernel of a rank that aborted may let ours run to its end on
half the data. A work that was issued after half a second without any is therefore not settled
before a look into the store; what remains is a race of less than that, which NCCL cannot close.
Who must know that all ranks finished sends a nonce along, as the ballot of a step does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
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

FIRST_PAUSE_S = 0.00005  # between two looks at an event; doubles up to:
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

    1. Every rank says that it is here, rank 0 together with NCCL's unique id, and waits for all.
    2. All enter NCCL, which connects them.

    Raises StoreTimeout in (1), naming the keys `.../<rank>` that are missing. A rank that dies
    during (2) leaves the others inside ncclCommInitRank, which returns no handle that could be
    aborted: the process that connects must be expendable, and whoever started it must be ready to
    kill it. (1) makes that window small.
    """
    # NCCL would answer a bad rank with "unhandled cuda error".
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")
    nccl = load_nccl()
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    # Connect everything now. By default NCCL connects inside the first collective of each
    # algorithm, where a launch then waits for the other ranks' launches.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")

    # 1. Meet
    if rank == 0:
        store.set("unique_id/0", nccl.get_unique_id())
    store.set(f"ready/{rank}", "1")
    store.wait([f"ready/{peer}" for peer in range(size)])
    unique_id = store.get("unique_id/0")

    # 2. Connect
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # Also makes the CUDA context that NCCL wants.
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
    """One operation on its way to the GPU. start: NCCL's calls, given the stream's address."""

    operation: Operation
    tensors: list[torch.Tensor]
    start: Callable[[int], None]


class NcclWork(PendingWork):
    """An operation, or a coalesced block of them, on the communicator's stream.

    started: this rank's GPU has come to it. ended: it is over, or NCCL was aborted.
    waited_for: a stream was told to go on behind it, so `close` lets it finish.
    blocks_host: it holds a barrier.
    """

    def __init__(self, communicator: NcclCommunicator, operation: Operation) -> None:
        super().__init__(operation, communicator.in_flight)
        self.communicator = communicator
        self.started = torch.cuda.Event()
        self.ended = torch.cuda.Event()
        self.waited_for = False
        self.blocks_host = operation.kind is Kind.BARRIER

    def _block(self) -> None:
        """Order the current stream behind the work; a barrier blocks the host, as in torch."""
        # So does a work whose future was asked for: it must be complete when wait() returns.
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
    """One rank's end of an NCCL communicator. Made by `connect`.

    Two locks. `in_flight.changed` guards the verdicts; it is never held while anything waits.
    `_nccl` is held around every use of the NCCL handle, for NCCL frees it in `abort` without asking
    who else is inside.
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
        self._comm = comm  # None once it was given back
        self._doubtful = False  # after a pause: settle nothing before a look into the store
        self._asked_at = 0.0  # when somebody asked for the failure, in time.monotonic() seconds
        self._ending: threading.Thread | None = None
        self._library = load_nccl()
        self._together: list[_Launch] | None = None  # what a coalesced block has issued so far
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
            # Written on the root only.
            self._comm.reduce(at, at, tensor.numel(), dtype, REDUCE_OP_CODES[op], root, stream)

        return self._issue(operation, [tensor], launch)

    def exchange(
        self, operation: Operation, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Work:
        """Grouped, for no rank could send before it receives. The own part is a copy of torch's."""

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
            # In the roll call it stands where its last collective does.
            work.operation = launches[-1].operation
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
        # Held until the work is queued, so that the queue has the order of the stream.
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
        # Zero elements: nothing to send, and no address to send from.
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
                    if one.operation.finish is not None:
                        one.operation.finish()
            work.ended.record(self._stream)
            for one in launches:
                for tensor in one.tensors:
                    tensor.record_stream(self._stream)

    # -- the end ---------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        """End the generation with `error`. Returns at once; the store and NCCL are told meanwhile.

        Works of this rank raise `error`, unless another came first. The other ranks raise what
        stands in the store: `error`, or the one that some rank wrote before it.
        """
        with self.in_flight.changed:
            if not self.in_flight.fail(error):
                return
            telling = self._roll_call.publish_meanwhile(error)
            # A daemon: giving back may hang in NCCL, and must not keep the process.
            self._ending = threading.Thread(
                target=self._end_nccl, args=(telling,), name="chorusline-abort-nccl", daemon=True
            )
            self._ending.start()

    def failure(self) -> CollectiveError | None:
        with self.in_flight.changed:
            failure = self.in_flight.failure
        if failure is None and time.monotonic() - self._asked_at >= LOOK_S:
            # The watcher does not look into the store while nothing is in flight.
            self._asked_at = time.monotonic()
            failure = self._roll_call.news()
            if failure is not None:
                self.abort(failure)
        return failure

    def close(self) -> None:
        """Give the handle, the stream and the thread back.

        1. Works that a stream waits for get 5 s to finish; all others raise GroupClosed.
        2. The other ranks get 5 s to close too: ncclCommDestroy wants all ranks of a host, and
           frees memory that a slower rank may still read.
        3. Destroy; abort instead after an error, with works left over, or if (2) took too long.
        """
        # 1. Finish
        self._let_finish()
        with self.in_flight.changed:
            idle = not self.in_flight.works
            first = self.in_flight.fail(GroupClosed("close", self.generation))
        # 2. Wait for the others
        told = first and self._roll_call.tell_closed(self.in_flight.operations_done())
        gently = told and idle and self._roll_call.all_close(CLOSE_TIMEOUT_S)
        # 3. Give back
        self._give_back(gently)
        for thread in (self._ending, self._watcher):
            if thread is not None and thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT_S)

    def _end_nccl(self, telling: threading.Thread) -> None:
        # The others first: ncclCommAbort may need them to abort as well before it returns.
        telling.join(CLOSE_TIMEOUT_S)
        self._give_back(gently=False)

    def _give_back(self, gently: bool) -> None:
        # A launch blocks where the GPU's queue is full of kernels that wait for a lost rank; then
        # only the abort frees it, and must not wait for it.
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
        """Settle the works whose events have completed. Any thread may; never raises."""
        ended: list[NcclWork] = []
        broken: Exception | None = None
        with self.in_flight.changed:
            try:
                works = self.in_flight.works
                while works and not self._doubtful and works[0].ended.query():
                    ended.append(works[0])
                    self.in_flight.settle_head()
            except Exception as error:  # An error of the GPU, perhaps of an earlier kernel.
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
        """Settle works in order and, where one takes long, look what the other ranks do."""
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
        """Say where this rank is; end the generation if it is over elsewhere, or overdue here."""
        self._roll_call.tell(self._position())
        if self._look_for_the_end(head):
            return
        error = self._async_error()
        if error is None:
            # A look later than the deadline: who arrived in time has said so by then.
            overdue = self.in_flight.overdue(look_s)
            if overdue is not None:
                error = self._roll_call.timeout(overdue, head.operation, self._position())
        if error is not None:
            self.abort(self._roll_call.publish(error))

    def _look_for_the_end(self, head: NcclWork) -> bool:
        """End the generation if it is over elsewhere."""
        error = self._roll_call.the_end(head.operation)
        if error is not None:
            self.abort(self._roll_call.publish(error))
        return error is not None

    def _async_error(self) -> CollectiveError | None:
        """What NCCL's own threads report, such as a broken connection."""
        if not self._nccl.acquire(blocking=False):
            return None  # A launch is in progress, and reports by itself.
        try:
            if self._comm is not None:
                self._comm.check_async_error()
        except Exception as error:  # NcclError; KeyError for a status that CuPy has no name for.
            return self._broken("NCCL failed, which often means that a peer died", error)
        finally:
            self._nccl.release()
        return None

    def _position(self) -> StorePosition:
        """The last operation that this rank's GPU has come to, and in words what it does."""
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
        # A message stands where the collective before it does, and that has ended.
        return StorePosition(operation.sequence - (not operation.is_between_two), where)
