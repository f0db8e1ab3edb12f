"""`Group`: the ranks of one generation, and everything they can do together."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import FrameType

import torch
from torch.autograd import profiler

from .communicator import Communicator
from .debug import DebugLevel, get_debug_level
from .errors import CollectiveError, GroupAborted, StoreTimeout, UnsupportedOperation
from .flight_recorder import FlightRecorder, FlightRecording
from .operation import DTYPES, Kind, Operation
from .profiling import begin_span
from .reduce_op import ReduceOp
from .statistics import Statistics
from .store import PrefixStore, Store
from .work import Work

DEFAULT_TIMEOUT_S = 60.0

_DTYPE_INDEX = {dtype: index for index, dtype in enumerate(DTYPES)}


class Group:
    """An immutable membership of `size` ranks that run collectives together.

    Make one with `Group.create`; no Ray is needed. Every rank issues the same operations in the
    same order. Each returns a `Work` at once; `.wait()` or `await` it before using the tensors.

    A failure on any rank (a death, a timeout, a mismatch, `abort`) ends the group for all ranks:
    pending and later works raise the same error everywhere, naming the culprits. There is no way
    back; the ranks that are left form a new group with the next generation number.

    rank, size: this process and the number of them. generation: number of the membership.
    device: where tensors must live. timeout_s: seconds an operation may take, counted from its
    issue, unless the call says otherwise. statistics: operations and elements so far.
    """

    def __init__(
        self, communicator: Communicator, *, generation: int, timeout_s: float, name: str
    ) -> None:
        self._communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size
        self.device = communicator.device
        self.backend = communicator.backend
        self.generation = generation
        self.timeout_s = timeout_s
        self.name = name
        self.statistics = Statistics()
        self._recorder = FlightRecorder(self.rank, self.size, name, generation)
        # At DETAIL: shapes that were checked, and the frame of the operation they belong to.
        self._shapes: list[tuple[FrameType, tuple[int, ...]]] = []
        self._notes_shapes = communicator.compares
        self._has_nvtx = self.device.type == "cuda"
        self._next_sequence = 0

    @classmethod
    def create(
        cls,
        store: Store,
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
        *,
        generation: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        name: str = "default",
    ) -> Group:
        """Meet the other ranks in `store` and connect. Blocks until all have come.

        Ranks pick the same `size`, `generation` and `name`; a second group of the same name and
        generation through the same store is told apart by the order of creation.

        Raises StoreTimeout naming the ranks that did not come within `timeout_s`.
        """
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), got {rank}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        device = torch.device(device)
        round_ = store.add(f"group/{name}/{generation}/created_by/{rank}", 1)
        rendezvous = PrefixStore(f"group/{name}/{generation}/{round_}", store)
        rendezvous.set_timeout(timeout_s)
        connect: Callable[[Store, int, int, torch.device, int], Communicator]
        if device.type == "cuda":
            from .nccl import connect
        elif device.type == "cpu":
            from .host import connect
        else:
            raise ValueError(f"device must be a cpu or cuda device, got {device}")
        try:
            communicator = connect(rendezvous, rank, size, device, generation)
        except StoreTimeout as error:
            absent = sorted({int(key.rsplit("/", 1)[-1]) for key in error.keys})
            raise StoreTimeout(
                error.keys,
                error.waited_s,
                f"ranks {absent} of {size} did not come to generation {generation} of group "
                f"{name!r}. Check that they run, and that all use the same store, size, name and "
                "generation",
            ) from error
        if get_debug_level() >= DebugLevel.DETAIL:
            from .comparison import comparing

            communicator = comparing(communicator, rendezvous, generation, name)
        return cls(communicator, generation=generation, timeout_s=timeout_s, name=name)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, timeout_s: float | None = None
    ) -> Work:
        """Reduce `tensor` over all ranks, in place, to the same bits on every rank.

        tensor: any shape, contiguous, same shape and dtype on all ranks.
        """
        tensor, dtype = self._checked(tensor, "tensor")
        numel = tensor.numel()
        operation = self._begin(
            Kind.ALL_REDUCE, numel, dtype, op, timeout_s, 2 * numel * (self.size - 1) / self.size
        )
        return self._communicator.all_reduce(operation, tensor, op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce `input` over all ranks and leave this rank's part in `output`.

        input: (size * n,) contiguous, left as it is. output: (n,) same dtype.
        """
        output, dtype = self._checked(output, "output")
        input, _ = self._checked(input, "input")
        numel = input.numel()
        self._check_parts("reduce_scatter", "input", input, "output", output)
        operation = self._begin(
            Kind.REDUCE_SCATTER, numel, dtype, op, timeout_s, numel - output.numel()
        )
        return self._communicator.reduce_scatter(operation, output, input, op)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, timeout_s: float | None = None
    ) -> Work:
        """Put the `input` of all ranks, in rank order, into `output` on every rank.

        input: (n,) contiguous; it may be this rank's part of `output` itself.
        output: (size * n,) same dtype.
        """
        output, dtype = self._checked(output, "output")
        input, _ = self._checked(input, "input")
        numel = output.numel()
        self._check_parts("all_gather", "output", output, "input", input)
        operation = self._begin(Kind.ALL_GATHER, numel, dtype, -1, timeout_s, numel - input.numel())
        return self._communicator.all_gather(operation, output, input)

    def broadcast(
        self, tensor: torch.Tensor, root: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """Copy `tensor` of rank `root` into `tensor` of every other rank.

        tensor: any shape, contiguous, same shape and dtype on all ranks.
        """
        if not 0 <= root < self.size:
            raise ValueError(f"root must be a rank in [0, {self.size}), got {root}")
        tensor, dtype = self._checked(tensor, "tensor")
        numel = tensor.numel()
        operation = self._begin(
            Kind.BROADCAST, numel, dtype, root, timeout_s, numel if root == self.rank else 0
        )
        return self._communicator.broadcast(operation, tensor, root)

    def barrier(self, *, timeout_s: float | None = None) -> Work:
        """Done on no rank before every rank has issued it."""
        return self._communicator.barrier(self._begin(Kind.BARRIER, 0, -1, -1, timeout_s, 0))

    def abort(self, reason: str | BaseException | CollectiveError) -> None:
        """End this generation on all ranks; may be called from any thread.

        Every pending and later work raises, everywhere: a CollectiveError as it is, anything else
        as GroupAborted by this rank, with the reason (of an exception: its traceback as well).
        """
        if isinstance(reason, CollectiveError):
            error = reason
        elif isinstance(reason, BaseException):
            told = "".join(traceback.format_exception_only(reason)).strip()
            trace = "".join(traceback.format_exception(reason))
            error = GroupAborted(self.generation, [self.rank], told, trace)
        else:
            error = GroupAborted(self.generation, [self.rank], reason)
        self._communicator.abort(error)

    def close(self) -> None:
        """Give back memory and threads; peers that still wait for this rank raise PeerLost."""
        self._communicator.close()

    @property
    def flight_recorder(self) -> FlightRecording:
        """The last collectives of this rank as they stand now; print it when something hangs."""
        return self._recorder.read()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Group({self.name!r}, rank={self.rank}, size={self.size}, "
            f"generation={self.generation}, backend={self.backend!r}, device={str(self.device)!r})"
        )

    def _begin(
        self,
        kind: Kind,
        numel: int,
        dtype: int,
        detail: int,
        timeout_s: float | None,
        elements: float,
    ) -> Operation:
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        if deadline_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {deadline_s}")
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        self.statistics.count(kind, elements)
        operation = Operation(kind, sequence, self.generation, numel, dtype, detail, deadline_s)
        self._recorder.record(operation, sys._getframe(2))
        if self._notes_shapes:
            issuing = sys._getframe(1)
            operation.shapes = tuple(shape for frame, shape in self._shapes if frame is issuing)
            self._shapes.clear()  # Also what an operation left behind that was refused.
        if profiler._is_profiler_enabled or self._has_nvtx:
            operation.span = begin_span(operation, self._has_nvtx)
        return operation

    def _checked(self, tensor: torch.Tensor, argument: str) -> tuple[torch.Tensor, int]:
        """The tensor without autograd, and its dtype's number; a sentence where it is unfit."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{argument} must be a torch.Tensor, got {type(tensor).__name__}")
        dtype = _DTYPE_INDEX.get(tensor.dtype)
        if dtype is None:
            raise UnsupportedOperation(
                f"{argument} of dtype {tensor.dtype}",
                self.backend,
                f"use one of {', '.join(map(str, DTYPES))}",
            )
        if tensor.device != self.device:
            raise ValueError(
                f"{argument} is on {tensor.device}, but this group moves tensors on {self.device}; "
                f"call .to({str(self.device)!r}) first"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{argument} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
                "contiguous; pass .contiguous()"
            )
        if self._notes_shapes:
            self._shapes.append((sys._getframe(1), tuple(tensor.shape)))
        return (tensor.detach() if tensor.requires_grad else tensor), dtype

    def _check_parts(
        self, name: str, whole_name: str, whole: torch.Tensor, part_name: str, part: torch.Tensor
    ) -> None:
        if whole.dtype != part.dtype:
            raise ValueError(
                f"{name}: {whole_name} is {whole.dtype} but {part_name} is {part.dtype}"
            )
        if whole.numel() != self.size * part.numel():
            raise ValueError(
                f"{name}: {whole_name} has {whole.numel()} elements, {part_name} "
                f"{part.numel()}; with {self.size} ranks {whole_name} must have "
                f"{self.size} * {part.numel()} = {self.size * part.numel()}"
            )
