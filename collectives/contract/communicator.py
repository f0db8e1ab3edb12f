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

        class Transport(cl.Communicator):
            def abort(self, error):  # And so on, for each abstract method.
                self.error = error

    Group checks and counts: ranks, roots, dtypes, sizes, devices and contiguity. All tensors are
    flat and contiguous, of the contract's real dtypes without bool. A communicator trusts that,
    moves the bytes, and keeps three promises:

    1. Collectives run in the order of issue and make progress although no thread waits for them.
    2. `abort` may be called from any thread at any time and frees every waiter, here and, where
       the transport can, on all ranks. From then on every operation raises that error.
    3. A peer that died, or that does not arrive within `operation.timeout_s`, raises an error that
       names the peer, on every rank.

    The communicator sets `operation.state` to STARTED when the operation's turn has come. When the
    data has arrived, and before the work is done, it calls `operation.finish`, if there is one. It
    calls `operation.end` when the operation is over.

    device: where the tensors live. backend: the name that errors use.
    """

    compares = False
    """Whether the transport compares the shapes of callers' tensors (transports/comparing.py)."""
    backend: str
    rank: int
    size: int
    device: torch.device
    receives_from_any = True
    has_tags = True

    def lacks(self, op: ReduceOp, dtype: torch.dtype) -> str:
        """The remedy if this transport cannot reduce `dtype` with `op`; "" if it can."""
        return ""

    @abstractmethod
    def all_reduce(self, operation: Operation, tensor: torch.Tensor, op: ReduceOp) -> Work:
        """tensor: (n,), reduced in place."""

    @abstractmethod
    def reduce(self, operation: Operation, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        """tensor: (n,), reduced in place on `root`, unchanged on the other ranks."""

    @abstractmethod
    def reduce_scatter(
        self, operation: Operation, output: torch.Tensor, input: torch.Tensor, op: ReduceOp
    ) -> Work:
        """input: (size * n,), unchanged. output: (n,), this rank's part."""

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
        """Send inputs[r] to rank r and receive from it into outputs[r]. Each is (n,) of any n >= 0.

        Raises CollectiveMismatch where a rank sends another number of elements than its peer
        expects, if the transport can detect that.
        """

    @abstractmethod
    def send(self, operation: Operation, tensor: torch.Tensor) -> Work:
        """tensor: (n,), sent to operation.peer with operation.tag."""

    @abstractmethod
    def recv(self, operation: Operation, tensor: torch.Tensor) -> Work:
        """tensor: (n,), from operation.peer with operation.tag. ANY_RANK becomes the sender."""

    def empty_symmetric(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor, (numel,), not initialised, that the other ranks can read where it lies, if the
        transport has such memory; otherwise an ordinary one."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def begin_together(self) -> None:
        """Operations issued from here on may wait for `end_together`, to be one launch."""

    def end_together(self) -> None:
        """Launch the operations issued since `begin_together`."""

    @abstractmethod
    def barrier(self, operation: Operation) -> Work:
        """Wait until all ranks have issued it."""

    @abstractmethod
    def abort(self, error: CollectiveError) -> None:
        """End the generation with `error`. The first error wins; later ones are ignored."""

    @abstractmethod
    def failure(self) -> CollectiveError | None:
        """The error that ended the generation, here or elsewhere; None while it lives.

        Called about 20 times a second. It may return a remote rank's error half a second late.
        """

    def gone(self) -> dict[int, str]:
        """The ranks known to be lost, and how each was lost, where the transport can see that
        without an operation. No operation has to wait for them."""
        return {}

    def ended_ranks(self) -> set[int]:
        """Those of `gone` whose process has ended, for certain."""
        return set()

    def watching(
        self, ranks: Sequence[int], what: str, limit_s: float
    ) -> contextlib.AbstractContextManager[None]:
        """A block in which `ranks` do something else together, and the death of one is detected.

        For transports that detect a death only while an operation is in flight. All of `ranks`,
        this one among them, enter the block; it ends on no rank before it has begun on all.
        what: for errors. limit_s: seconds that the block takes at most.
        """
        return contextlib.nullcontext()

    def show_waits(self, ranks: Sequence[int], since: float) -> None:
        """Tell the other ranks, where the transport can, that this rank waits in a subgroup: for
        `ranks`, since a time.monotonic(). Empty `ranks`: it no longer waits."""

    def on_wait(self, callback: Callable[[Sequence[int], float], None]) -> None:
        """Call `callback(ranks, since)`, as in `show_waits`, when this rank waits here."""

    def turn(self) -> None:
        """All ranks turn to another task; a rank that rested until now issues collectives again."""

    def rest(self, operations: int) -> None:
        """Tell the other ranks, where the transport can, that this one issues nothing more before
        the next turn. A collective that needs it until then raises a CollectiveMismatch at once.

        operations: how many this rank has issued. None is in flight.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all resources. Pending works raise GroupClosed, and peers that wait PeerLost."""
