"""Collectives between GPUs, by NCCL; the only file that uses CuPy.

torch owns the memory and the streams; only the binding of NCCL comes from CuPy. This file adds
what NCCL lacks: deadlines, one error for all ranks, and the names of the ranks at fault.

Works, the thread that watches them and the rule by which a work counts as done are in
nccl_works.py. A work is in flight before it is launched: the first operation between two ranks
connects them inside its launch, which a rank that never comes would block forever.

The store learns of an abort `ABORT_AFTER_S` before NCCL does, so that no rank takes the data of a
stopped kernel for a result. NCCL's abort runs in a thread of its own and without a lock, as it may
take seconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..contract.communicator import Communicator
from ..contract.errors import CollectiveError, GroupAborted, GroupClosed
from ..contract.in_flight import InFlight
from ..contract.operation import Kind, Operation, ReduceOp
from ..contract.work import Work
from ..stores.store import Store
from .host import host_identity
from .liveness import LOOK_S, RollCall
from .nccl_codes import DTYPE_CODES, REDUCE_OP_CODES, as_moved, described, lacks
from .nccl_connecting import Attempt
from .nccl_works import ABORT_AFTER_S, LONGEST_PAUSE_S, NcclWork, Watcher
from .shared_gpus import MAY_SHARE, GpuPlace, environment_for

CLOSE_TIMEOUT_S = 5.0  # for the other ranks to close as well
_NO_ID = b"no id: "
ISSUE_TIMEOUT_S = 1.0  # for a launch in progress, before an abort goes ahead without it


def load_nccl() -> Any:
    """`cupy.cuda.nccl`. Raises ImportError that says what to install."""
    remedy = (
        "In a checkout of Chorusline: pip install -e '.[cuda13]' (torch from PyPI is a CUDA 13 "
        "build) or, with a CUDA 12 build of torch, '.[cuda12]'; never both."
    )
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ImportError(f"groups on cuda devices need CuPy: {error}. {remedy}") from error
    if not nccl.available:
        raise ImportError(f"groups on cuda devices need NCCL, and CuPy did not find it. {remedy}")
    return nccl


def connect(
    store: Store, rank: int, size: int, device: torch.device, generation: int
) -> Communicator:
    """Meet in `store` and connect. Blocks until all ranks have come.

    1. Every rank writes where it runs, and waits for all ranks: some may share a GPU.
    2. Every rank writes that it is ready, rank 0 NCCL's unique id, and waits for all ranks.
    3. All ranks enter NCCL, which connects them (nccl_connecting.py).

    Raises StoreTimeout in (1) and (2), naming the keys `.../<rank>` that are missing, and
    GroupAborted with what NCCL says if rank 0 gets no id. In (3) a rank that dies, or a deadline,
    which is that of the store once more, is one error of all ranks: PeerLost, CollectiveTimeout, or
    GroupAborted with what NCCL says.
    """
    # For a bad rank, NCCL would only report "unhandled cuda error".
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")
    nccl = load_nccl()
    # Fixed here: threads of this group have a current device of their own.
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    # Connect all algorithms now. By default NCCL connects inside the first collective of each
    # algorithm, whose launch then waits for the other ranks' launches.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")

    # 1. Where the ranks are. NCCL reads its environment once, already for the unique id.
    place = json.dumps(_place(index))
    places = [GpuPlace(*json.loads(one)) for one in store.gather("place", rank, size, place)]
    for name, value in environment_for(places, rank, nccl.get_version()).items():
        # What the user has set stands.
        os.environ.setdefault(name, value)

    # 2. Meet. What keeps rank 0 from an id is an error of all ranks, and ends their wait.
    try:
        ready = b"" if rank else nccl.get_unique_id()
    except Exception as error:
        # Without a word the other ranks would wait for the id until their deadline.
        ready = _NO_ID + described(error, nccl.get_version()).encode()
    unique_id = store.gather("ready", rank, size, ready)[0]
    if unique_id.startswith(_NO_ID):
        why = unique_id.removeprefix(_NO_ID).decode()
        reason = f"NCCL could not begin on rank 0: {why}. NCCL_DEBUG=WARN shows more"
        raise GroupAborted(generation, [0], reason)

    # 3. Connect
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # Also creates the CUDA context that NCCL needs.
    roll_call = RollCall(store, rank, size, generation)
    make = functools.partial(nccl.NcclCommunicator, size, unique_id, rank)
    comm = Attempt(make, device, nccl.get_version()).result(roll_call)
    return NcclCommunicator(comm, stream, store, rank, size, device, generation)


_PROCESS = uuid.uuid4().hex


def _place(index: int) -> GpuPlace:
    from cupy.cuda import runtime

    # CUDA shows a process one part of a GPU, whatever else the list names.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    part = visible if visible.startswith("MIG-") else ""
    # A process that is forked after its import has an id of its own by its number.
    process = f"{_PROCESS}-{os.getpid()}"
    may_share = os.environ.get(MAY_SHARE) == "1"
    return GpuPlace(host_identity(), runtime.deviceGetPCIBusId(index), part, process, may_share)


class _Launch(NamedTuple):
    """One operation to launch. start: makes NCCL's calls; takes the stream's address."""

    operation: Operation
    tensors: list[torch.Tensor]
    start: Callable[[int], None]


class NcclCommunicator(Communicator):
    """One rank's end of an NCCL communicator, made by `connect`.

    It has two locks. `in_flight.changed` guards the works and the failure; no thread holds it while
    it waits. `_nccl` is held around launches and whoever takes the NCCL handle away, because NCCL's
    abort frees the handle even if another thread uses it; NCCL itself ends without the lock.
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
        # Made once, as launches take turns: each costs the host microseconds.
        self._on_device = torch.cuda.device(device)
        self._issued_before = torch.cuda.Event()
        self._nccl = threading.Lock()
        self._comm = comm  # None after it was released
        self._asked_at = 0.0  # when `failure` last read the store, in time.monotonic() seconds
        self._ending: threading.Thread | None = None
        """None: until the generation ends, and afterwards where no thread could be started."""
        self._library = load_nccl()
        self._together: list[_Launch] | None = None  # of the open block; None: none is open
        self._work_together: NcclWork | None = None  # None: no operation in a block yet
        self._barrier_element = torch.zeros(1, dtype=torch.int32, device=device)
        self.watcher = Watcher(
            self.in_flight,
            self._roll_call,
            device,
            generation,
            abort=self.abort,
            ask_nccl=self._async_error,
        )
        self.watcher.start()

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
            # On the same stream, so that the end of the operation covers this copy as well.
            with torch.cuda.stream(self._stream):
                outputs[self.rank].copy_(inputs[self.rank])

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
            # Of all works only that of a barrier has `wait()` block the host.
            work.blocks_host = any(one.operation.kind is Kind.BARRIER for one in launches)
            self._launch(work, launches)

    def barrier(self, operation: Operation) -> Work:
        return self.all_reduce(operation, self._barrier_element, ReduceOp.MAX)

    def _issue(
        self, operation: Operation, tensors: list[torch.Tensor], start: Callable[[int], None]
    ) -> Work:
        launch = _Launch(operation, tensors, start)
        # NCCL launches a block as one group call, so its operations have one work and one end.
        if self._together is not None:
            # Not all tensors need be filled on the stream that is current at the block's end.
            if self.in_flight.failure is None:  # As in `_launch`.
                with self._nccl, self._on_device:
                    self._follow_caller()
            self._together.append(launch)
            if self._work_together is None:
                self._work_together = self._work_of(operation)
            return self._work_together
        work = self._work_of(operation)
        self._launch(work, [launch])
        return work

    def _work_of(self, operation: Operation) -> NcclWork:
        return NcclWork(operation, self.in_flight, self.device, self.watcher.settle_ended)

    def _launch(self, work: NcclWork, launches: list[_Launch]) -> None:
        if self.in_flight.failure is not None:
            self.in_flight.add(work)  # Fails at once, without the lock: an abort may hold it.
            return
        try:
            # The lock is held until the work is launched, so that the queue has the stream's order.
            with self._nccl:
                self.in_flight.add(work)  # First: the deadline holds for the launch as well.
                if not work.done:
                    self._enqueue(work, launches)
                    work.is_launched = True
        # Some ranks may have launched it: none of them could complete it without this one.
        except BaseException as error:
            self.abort(self._broken(f"{work.operation} could not be launched", error))
            if not isinstance(error, Exception):  # An interrupt is the caller's.
                raise

    def _enqueue(self, work: NcclWork, launches: list[_Launch]) -> None:
        # Launches of zero elements are skipped: they have no address to send from.
        real = [one for one in launches if any(tensor.numel() for tensor in one.tensors)]
        work.used = used = [tensor for one in launches for tensor in one.tensors]
        with self._on_device:
            self._follow_caller()
            work.started.record(self._stream)
            # A group call of one operation costs the host time, and gains nothing.
            if len(real) == 1:
                real[0].start(self._stream.cuda_stream)
            elif real:
                self._library.groupStart()
                try:
                    for one in real:
                        one.start(self._stream.cuda_stream)
                finally:
                    self._library.groupEnd()
            for one in launches:
                finish = one.operation.finish  # An abort may end the operation meanwhile.
                if finish is not None:
                    with torch.cuda.stream(self._stream):
                        finish()
                    used += finish.tensors
            # After `finish`: whoever waits for the work reads what that has written.
            work.ended.record(self._stream)
            # The allocator must not hand out what this stream still reads and writes, even if the
            # caller has dropped it.
            for tensor in used:
                tensor.record_stream(self._stream)

    def _follow_caller(self) -> None:
        """What this thread has launched on the tensors comes first; the host waits for nothing.
        With the lock held."""
        self._issued_before.record(torch.cuda.current_stream(self.device))
        self._stream.wait_event(self._issued_before)

    # -- the end ---------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        """End the generation with `error`. Returns at once; threads publish it and abort NCCL.
        Short of threads, this one publishes it, as fast as the store is, and `close` aborts NCCL.

        Works of this rank raise `error`, unless another came first. The other ranks raise the
        error in the store: `error`, or one that another rank wrote before it.
        """
        with self.in_flight.changed:
            stopped = self.in_flight.settle_all(error)
            # Another error was first, and its thread ends NCCL.
            if stopped is None:
                return
            is_published = self._roll_call.publish_meanwhile(error)
            # A daemon: the abort may hang in NCCL, and must not keep the process alive.
            if is_published is not None:
                ending = threading.Thread(
                    target=self._end_nccl,
                    args=(is_published, stopped),
                    name="chorusline-abort-nccl",
                    daemon=True,
                )
                with contextlib.suppress(RuntimeError):
                    ending.start()
                    self._ending = ending
        if is_published is None:
            self._roll_call.publish(error)
        for work in stopped:
            work.call_back()

    def failure(self) -> CollectiveError | None:
        with self.in_flight.changed:
            failure = self.in_flight.failure
        # A program may ask in a loop; the store is on another machine.
        if failure is None and time.monotonic() - self._asked_at >= LOOK_S:
            # The watcher does not read the store while nothing is in flight.
            self._asked_at = time.monotonic()
            failure = self._roll_call.news()
            if failure is not None:
                self.abort(failure)
        return failure

    def turn(self) -> None:
        self._roll_call.turn()

    def rest(self, operations: int) -> None:
        self._roll_call.rest(operations)

    def close(self) -> None:
        """Free the handle, the stream and the thread.

        1. Works that a stream waits for get 5 s to finish; all others raise GroupClosed.
        2. The other ranks get 5 s to close too: ncclCommDestroy needs all ranks of a host, and
           frees memory that a slower rank may still read.
        3. Destroy the handle; abort it after an error, with works left, or if (2) took too long.
        """
        # 1. Finish
        with torch.cuda.device(self.device):  # The control loop's threads have chosen none.
            self._let_finish()
        # Held until NCCL has ended their kernels; None after an error.
        left = self.in_flight.settle_all(GroupClosed("close", self.generation))
        for work in left or ():
            work.call_back()
        # 2. Wait for the others
        closes = left is not None
        published = closes and self._roll_call.tell_closed(self.in_flight.operations_done())
        gently = published and not left and self._roll_call.all_close(CLOSE_TIMEOUT_S)
        # 3. Destroy or abort
        # The other ranks have to read of it first, or take garbage of stopped kernels for results.
        if not gently:
            if self._ending is not None:
                self._ending.join(CLOSE_TIMEOUT_S)
            else:
                time.sleep(ABORT_AFTER_S)
        self._give_back(gently)
        self.watcher.join(CLOSE_TIMEOUT_S)

    def _end_nccl(self, is_published: threading.Event, stopped: list[NcclWork]) -> None:
        # Publish first: ncclCommAbort may return only after the other ranks abort as well.
        is_published.wait(CLOSE_TIMEOUT_S)
        time.sleep(ABORT_AFTER_S)
        torch.cuda.set_device(self.device)
        self._give_back(gently=False)
        # Their kernels, and the copies after them, run to their end on what the works keep.
        with contextlib.suppress(RuntimeError):  # The GPU has failed.
            while not all(work.see_end() for work in stopped if work.is_launched):
                time.sleep(LONGEST_PAUSE_S)

    def _give_back(self, gently: bool) -> None:
        # A launch blocks when the GPU's queue is full of kernels that wait for a lost rank, or when
        # it connects to a rank that never comes. Only the abort frees it, so the abort must not
        # wait for it without a limit.
        held = self._nccl.acquire(timeout=ISSUE_TIMEOUT_S)
        try:
            # Taken by one thread: NCCL frees the handle, and a second abort would use it
            # afterwards.
            comm, self._comm = self._comm, None
        finally:
            if held:
                self._nccl.release()
        if comm is not None:
            comm.destroy() if gently else comm.abort()

    def _let_finish(self) -> None:
        with self.in_flight.changed:
            # What nobody waits for may never end: its peers need not have issued it.
            works = [work for work in self.in_flight.works if work.waited_for]
        give_up_at = time.monotonic() + CLOSE_TIMEOUT_S
        while works and not works[-1].is_completed() and time.monotonic() < give_up_at:
            time.sleep(LONGEST_PAUSE_S)
        self.watcher.settle_ended()

    def _async_error(self) -> str:
        """What NCCL's own threads report, such as a broken connection; "" if nothing."""
        if not self._nccl.acquire(blocking=False):
            return ""  # A launch is in progress and raises its own errors.
        try:
            if self._comm is not None:
                self._comm.check_async_error()
        except Exception as error:  # NcclError; KeyError for a status that CuPy has no name for.
            return described(error, self._library.get_version())
        finally:
            self._nccl.release()
        return ""

    def _broken(self, what: str, error: BaseException) -> GroupAborted:
        reason = f"{what}: {described(error, self._library.get_version())}"
        return GroupAborted(self.generation, [self.rank], reason)
