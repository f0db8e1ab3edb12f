"""The contract that every transport fulfils."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from .errors import CollectiveError
from .operation import Operation, ReduceOp
from .work import Work


class Communicator(ABC):
    """Moves tensors between `size` ranks; `Group` is its only caller.

    Group has checked ranks, roots, dtypes, sizes, devices and contiguity, and counts. All tensors
    are flat and contiguous, of the real dtypes of the contract without bool. A communicator trusts
    that, moves the bytes, and keeps three promises:

    1. Collectives run in the order of issue and make progress without being waited for.
    2. `abort` may be called from any thread at any time and frees every waiter, here and, where
       the transport can, on all ranks. From then on every operation raises that error.
    3. A peer that died, or that does not arrive within `operation.timeout_s`, is an error that
       names it, on every rank.

    For the flight recorder it sets `operation.state` to STARTED when the operation's turn has come,
    and calls `operation.end` when it is over.
    When the data of an operation has arrived, and before its work is done, it calls
    `operation.finish`, if there is one.

    device: where the tensors live. backend: the name that errors use.
    """

    compares = False
    """Whether it compares the shapes of the caller's tensors (transports/comparing.py)."""
    backend: str
    rank: int
    size: int
    device: torch.device
    receives_from_any = True
    has_tags = True

    def lacks(self, op: ReduceOp, dtype: torch.dtype) -> str:
        """What to do instead, if this transport cannot reduce `dtype` with `op`; else nothing."""
        return ""

    @abstractmethod
    def all_reduce(self, operation: Operation, tensor: torch.Tensor, op: ReduceOp) -> Work:
        """tensor: (n,), reduced in place."""

    @abstractmethod
    def reduce(self, operation: Operation, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        """tensor: (n,), reduced in place on `root`, left as it is elsewhere."""

    @abstractmethod
    def reduce_scatter(
        self, operation: Operation, output: torch.Tensor, input: torch.Tensor, op: ReduceOp
    ) -> Work:
        """input: (size * n,), left as it is. output: (n,), this rank's part."""

    @abstractmethod
    def all_gather(self, operation: Operation, output: torch.Tensor, input: torch.Tensor) -> Work:
        """input: (n,). output: (size * n,). `input` may be this rank's part of `output`."""

    @abstractmethod
    def broadcast(self, operation: Operation, tensor: torch.Tensor, root: int) -> Work:
        """tensor: (n,), read on `root`, written elsewhere."""

    @abstractmethod
    def exchange(
        self, operation: Operation, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Work:
        """inputs[r] goes to rank r; outputs[r] gets what rank r sends. (n,) of any n, also 0.

        Where a rank sends another number of elements than the other one expects, it is a
        CollectiveMismatch, if the transport can see it.
        """

    @abstractmethod
    def send(self, operation: Operation, tensor: torch.Tensor) -> Work:
        """tensor: (n,), to operation.peer, with operation.tag."""

    @abstractmethod
    def recv(self, operation: Operation, tensor: torch.Tensor) -> Work:
        """tensor: (n,), from operation.peer, which is set if it is ANY_RANK; operation.tag."""

    def begin_together(self) -> None:
        """What is issued from here on may wait for `end_together`, to be one launch."""

    def end_together(self) -> None:
        """Launch it."""

    @abstractmethod
    def barrier(self, operation: Operation) -> Work:
        """Done on no rank before it was issued on all."""

    @abstractmethod
    def abort(self, error: CollectiveError) -> None:
        """End the generation with `error`. The first error wins; later ones are ignored."""

    @abstractmethod
    def failure(self) -> CollectiveError | None:
        """The error that ended the generation, here or elsewhere; None while it lives.

        Asked some twenty times a second; may be late by half a second where the end was elsewhere.
        """

    def gone(self) -> dict[int, str]:
        """The ranks that will not come again, and how they went, where no operation is needed to
        see that. Nobody need be missing them yet."""
        return {}

    def watching(
        self, ranks: Sequence[int], what: str, limit_s: float
    ) -> contextlib.AbstractContextManager[None]:
        """While `ranks`, this one among them, do something else together, see whether one dies.

        For transports that see a death only where something is in flight. All of `ranks` enter
        it, and the block ends on none before it has begun on all. what: for errors.
        limit_s: seconds the block takes at most.
        """
        return contextlib.nullcontext()

    def show_waits(self, ranks: Sequence[int], since: float) -> None:
        """In a group made of this one, this rank has waited for `ranks` since that
        time.monotonic(); none: it waits no more. For transports that can tell the others."""

    def on_wait(self, told: Callable[[Sequence[int], float], None]) -> None:
        """Call `told` likewise, where this rank waits here."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Pending works raise GroupClosed; peers that wait: PeerLost."""
