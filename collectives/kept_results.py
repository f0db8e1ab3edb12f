"""What a rank keeps of the collectives of its function's beginning, for a worker that comes later.

That worker runs the function from the top by itself (dry_run.py), and gets what this rank got.
The results of operations that give all ranks the same are kept, up to MOST_BYTES.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .contract.communicator import Communicator
from .contract.operation import Finish, Kind, Operation, elements, with_detail
from .contract.wrapping import WrappingCommunicator

MOST_BYTES = 16 << 20
"""Bytes of the results that a rank keeps, and of all those that a worker gets before it runs the
function."""

_BYTES_OF_ONE = 256
"""Bytes that a result counts for in addition to its elements."""

_SAME_EVERYWHERE = ("all_reduce", "broadcast", "all_gather")
_NOT_ONE_RESULT = ("barrier", "exchange")


@dataclass(slots=True)
class KeptResult:
    """name: of the operation, for people. values: flat; None: not there, or another one on each
    rank, so that it cannot be given to a worker."""

    signature: tuple[int, ...]
    name: str
    values: torch.Tensor | None = None

    def on_host(self) -> KeptResult:
        values = None if self.values is None else self.values.cpu()
        return KeptResult(self.signature, self.name, values)


def signature_of(operation: Operation, tensor: torch.Tensor) -> tuple[int, ...]:
    """What the operations of two ranks must have in common for one result to be that of both."""
    return int(operation.kind), tensor.numel(), operation.dtype, operation.detail


def name_of(operation: Operation, tensor: torch.Tensor) -> str:
    """Without its number, which differs between ranks: `all_reduce (2 float32) with SUM`."""
    dtype = operation.dtype
    what = f" ({elements(tensor.numel(), dtype)})" if dtype >= 0 else ""
    return with_detail(
        f"{Kind(operation.kind).name.lower()}{what}", operation.kind, operation.detail
    )


class KeptResults:
    """The results that one rank keeps of one call of its function.

    A worker that comes runs the code outside of loops over `ctx.epochs`, and in the body of the
    epoch that is under way the code before the steps. So these two are kept.

    why_not: why they are not whole; empty if they are.
    """

    def __init__(self) -> None:
        self.why_not = ""
        self._outside: list[KeptResult] = []
        self._body: list[KeptResult] = []
        self._is_in_body = False
        self._num_bytes = 0
        self._pauses = 0

    def results(self) -> tuple[list[KeptResult], list[KeptResult]]:
        """Those outside of bodies, and those of the present one."""
        return [one.on_host() for one in self._outside], [one.on_host() for one in self._body]

    def take(self, outside: Sequence[KeptResult], body: Sequence[KeptResult]) -> None:
        """This rank has come later itself, and got these."""
        self._outside, self._body = list(outside), list(body)
        self._num_bytes = sum(map(_num_bytes, (*outside, *body)))

    def begin_body(self) -> None:
        """The body of an epoch begins."""
        # The results of two bodies would be in one list, and nobody could tell them apart.
        if self._is_in_body:
            self.spoil("it has a loop over ctx.epochs inside another one")
        # That of the epoch before: a worker that comes begins with the present one.
        self._num_bytes -= sum(map(_num_bytes, self._body))
        self._is_in_body, self._body = True, []

    def end_body(self) -> None:
        self._is_in_body = False

    def spoil(self, why: str) -> None:
        # Paused: what happens now is none of the function's own.
        if not self._pauses:
            self.why_not = self.why_not or why
            self._outside, self._body = [], []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not the function's own, and a worker that comes runs none."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def place_for(self, operation: Operation, tensor: torch.Tensor) -> KeptResult | None:
        """Where the result of an operation goes that is about to be issued."""
        if self._pauses or self.why_not:
            return None
        kept = KeptResult(signature_of(operation, tensor), name_of(operation, tensor))
        self._num_bytes += tensor.nbytes + _BYTES_OF_ONE
        if self._num_bytes > MOST_BYTES:
            self.spoil(
                f"its collectives before its first step returned more than {MOST_BYTES >> 20} "
                "MiB, the most that is kept for a new worker"
            )
            return None
        (self._body if self._is_in_body else self._outside).append(kept)
        return kept


def _num_bytes(kept: KeptResult) -> int:
    return _BYTES_OF_ONE + (kept.values.nbytes if kept.values is not None else 0)


class _Keeping:
    """What ends an operation whose result is kept. before: what else does."""

    def __init__(self, kept: KeptResult, tensor: torch.Tensor, before: Finish | None) -> None:
        self._kept, self._tensor, self._before = kept, tensor, before

    @property
    def tensors(self) -> Sequence[Any]:
        return [*(self._before.tensors if self._before is not None else ()), self._tensor]

    def __call__(self) -> None:
        # First what the operation itself still writes.
        if self._before is not None:
            self._before()
        self._kept.values = self._tensor.detach().clone()


class KeepingCommunicator(WrappingCommunicator):
    """Lets `inner` move the tensors, and keeps the results."""

    def __init__(self, inner: Communicator, kept: KeptResults) -> None:
        super().__init__(inner)
        self.kept = kept

    def before(self, name: str, operation: Operation, *arguments: Any) -> None:
        if name not in _NOT_ONE_RESULT:
            tensor = arguments[0]
            place = self.kept.place_for(operation, tensor)
            # Of the others the place stays empty: a worker that asks for one is refused by name.
            if place is not None and name in _SAME_EVERYWHERE:
                operation.finish = _Keeping(place, tensor, operation.finish)
