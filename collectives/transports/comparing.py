"""At debug level DETAIL, all ranks compare each collective in full before it begins.

ComparingCommunicator wraps the group's communicator. It exchanges descriptions through a second
communicator between CPUs, so that an error in the first cannot hide a mismatch and no GPU stream
is delayed. Issuing a collective then blocks until all ranks have issued one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..contract.call_site import encoded
from ..contract.communicator import Communicator
from ..contract.dtypes import DTYPE_INDEX
from ..contract.errors import (
    CollectiveError,
    CollectiveMismatch,
    GroupAborted,
    StoreTimeout,
    name_ranks,
)
from ..contract.operation import Kind, OnBehalf, Operation, described
from ..contract.wrapping import WrappingCommunicator
from ..diagnosis.blame import describe_issued, usual_and_blamed
from ..diagnosis.signature import pair_mismatch
from ..stores.store import PrefixStore, Store
from .host import connect

_WORDS = 128  # int64 words of a description; a longer description is cut
_BETWEEN_TWO = {"send", "recv"}
"""Not compared, because the other ranks do not take part in them."""

_SAME_SHAPES = {"broadcast", "all_reduce", "reduce", "reduce_scatter", "all_gather"}
"""In other operations ranks may pass tensors of different shapes, or none; there each pair of ranks
compares what one sends with what the other expects."""


class ComparingCommunicator(WrappingCommunicator):
    """Compares each collective, then lets `inner` move the tensors."""

    def __init__(self, inner: Communicator, store: Store, generation: int, name: str) -> None:
        """Blocks until all ranks have come; closes `inner` and raises if one does not. name: the
        group's name."""
        super().__init__(inner)
        self.compares = True
        self._generation = generation
        self._name = name
        self._num_compared = 0
        try:
            self._side = connect(PrefixStore("detail", store), inner.rank, inner.size, generation)
        except StoreTimeout as error:
            inner.close()
            absent = sorted({int(key.rsplit("/", 1)[-1]) for key in error.keys})
            detail = (
                f"{name_ranks(absent)} of {self.size} did not take part in the comparison of "
                "operations. Check that the debug level DETAIL is set on all ranks or on none"
            )
            raise StoreTimeout(error.keys, error.waited_s, detail) from error
        except BaseException:
            inner.close()
            raise

    def abort(self, error: CollectiveError) -> None:
        self.inner.abort(error)
        self._side.abort(error)

    def close(self) -> None:
        self.inner.close()
        self._side.close()

    def turn(self) -> None:
        self.inner.turn()
        self._side.turn()

    def rest(self, operations: int) -> None:
        self.inner.rest(operations)
        # The others wait there, before they issue what this rank will never take part in.
        self._side.rest(self._num_compared)

    def before(self, name: str, operation: Operation, *arguments: Any) -> None:
        if name == "exchange":
            outputs, inputs = arguments
            self._compare(operation, False, [part.numel() for part in (*inputs, *outputs)])
        elif name not in _BETWEEN_TWO:
            self._compare(operation, name in _SAME_SHAPES)

    def _compare(
        self, operation: Operation, has_same_shapes: bool, table: Sequence[int] = ()
    ) -> None:
        """Return when all ranks have issued the same operation. On a mismatch, end the generation,
        so that the work that is issued next raises the error.

        table: of an exchange, elements to each rank, then from each; pairs of ranks must agree.
        """
        shapes = [list(shape) for shape in operation.shapes] if has_same_shapes else None
        mine = OperationDescription(
            described(operation),
            shapes,
            self.device.type,
            self._name,
            operation.site(),
        )
        error: CollectiveError | None
        try:
            descriptions = [_unpacked(row) for row in self._rows_of_all(operation, _packed(mine))]
            error = mismatch(operation, descriptions)
            # Only between ranks that are in the same operation is there a table to compare.
            if error is None and table:
                tables = self._rows_of_all(operation, torch.tensor(table, device="cpu")).tolist()
                error = pair_mismatch(operation, self._generation, tables)
                if error is not None:
                    error = _with_sites(error, descriptions)
        except CollectiveError as failure:
            error = failure
        except BaseException as interrupt:
            # The others wait in this comparison for this rank.
            what = f"{type(interrupt).__name__} during {operation}"
            self.abort(GroupAborted(self._generation, [self.rank], what))
            raise
        if error is not None:
            self.abort(error)

    def _rows_of_all(self, operation: Operation, row: torch.Tensor) -> torch.Tensor:
        """row: (n,) int64. Returns (size, n)."""
        everybody = row.new_empty(self.size, len(row))
        comparing = OnBehalf(
            Kind.COMPARISON,
            self._num_compared,
            operation.generation,
            everybody.numel(),
            DTYPE_INDEX[torch.int64],
            -1,
            operation.timeout_s,
        )
        comparing.whole = operation
        self._num_compared += 1
        self._side.all_gather(comparing, everybody.view(-1), row).wait()
        return everybody


# -- what is compared: pure ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OperationDescription:
    """The operation that one rank is about to run.

    operation: its name with sequence, size, dtype, and reduce op or root.
    shapes: of the tensors; None where they may differ. site: `train.py:41`, never compared.
    """

    operation: str
    shapes: list[list[int]] | None
    device: str
    group: str
    site: str

    def compared(self) -> tuple[str, str, str, str]:
        return self.operation, json.dumps(self.shapes), self.device, self.group

    def __str__(self) -> str:
        words = [self.operation]
        if self.shapes:
            words.append("of shape " + ", ".join(str(tuple(shape)) for shape in self.shapes))
        words.append(f"on {self.device} in group {self.group!r}")
        if self.site:
            words.append(f"at {self.site}")
        return " ".join(words)


def mismatch(
    operation: Operation, descriptions: Sequence[OperationDescription]
) -> CollectiveMismatch | None:
    """The error if the ranks' operations differ; every rank computes the same error.

    descriptions: one per rank. Ranks may issue the same operation at different lines; the error
    then shows each line.
    """
    usual, blamed = usual_and_blamed([description.compared() for description in descriptions])
    if not blamed:
        return None
    name = re.split(" (?:with|from|to|in) ", usual[0])[0]
    detail = describe_issued([str(description) for description in descriptions])
    return CollectiveMismatch(name, operation.generation, blamed, detail)


def _with_sites(
    error: CollectiveMismatch, descriptions: Sequence[OperationDescription]
) -> CollectiveMismatch:
    """The same error with the calling lines of the ranks that it blames."""
    at = ", ".join(
        f"rank {r} is at {descriptions[r].site}" for r in error.ranks if descriptions[r].site
    )
    detail = f"{error.detail}; {at}" if at else error.detail
    return CollectiveMismatch(error.operation, error.generation, error.ranks, detail, error.remedy)


def _packed(description: OperationDescription) -> torch.Tensor:
    """(_WORDS,) int64. A description that is too long loses the ends of its texts."""
    d = description
    fields: list[Any] = [d.operation, d.shapes, d.device, d.group[:100], d.site[-100:]]
    # Escaped by JSON, a letter would take six bytes.
    data = encoded(json.dumps(fields, ensure_ascii=False))
    if len(data) > 8 * _WORDS:
        # Without the shapes, which then have more than a hundred numbers.
        fields = [d.operation, None, d.device, d.group[:50], d.site[-50:]]
        data = encoded(json.dumps(fields, ensure_ascii=False))
    return torch.frombuffer(bytearray(data.ljust(8 * _WORDS)), dtype=torch.int64)


def _unpacked(words: torch.Tensor) -> OperationDescription:
    return OperationDescription(*json.loads(words.numpy().tobytes().decode()))
