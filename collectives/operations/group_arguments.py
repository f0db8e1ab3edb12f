"""Checks of arguments against the group: its size, rank, device and backend.

A wrong argument raises here, before anything is enqueued; the error names the argument and the
remedy. Checks that need no group are in arguments.py.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from ..contract.communicator import Communicator
from ..contract.errors import UnsupportedOperation
from ..contract.operation import ANY_RANK, FIRST_OBJECT_TAG, ReduceOp
from ..stores.signed_store import Seal
from .arguments import (
    Finisher,
    checked,
    checked_list,
    checked_op,
    read,
    same_dtype,
    travelling_dtype,
    written,
)

Array = Any
"""A torch tensor, a numpy or CuPy array, or anything with DLPack."""


class GroupArguments(ABC):
    """The part of `Group` that checks arguments."""

    rank: int
    size: int
    device: torch.device
    backend: str
    timeout_s: float
    seal: Seal | None  # signs the payloads of objects; see stores/signed_store.py
    _communicator: Communicator
    _notes_shapes: bool  # at debug level DETAIL
    _shapes: list[tuple[FrameType, tuple[int, ...]]]
    _wire_ops: dict[tuple[ReduceOp, torch.dtype], ReduceOp]  # pairs known to be valid

    def _checked(self, value: Array, name: str, written: bool) -> torch.Tensor:
        tensor = checked(value, name, self.device, self.backend, written)
        if self._notes_shapes:
            self._shapes.append((sys._getframe(1), tuple(tensor.shape)))
        return tensor

    def _checked_list(
        self, values: Sequence[Array], name: str, *, written: bool
    ) -> list[torch.Tensor]:
        return checked_list(values, name, self.size, self.device, self.backend, written=written)

    def _checked_op(
        self, name: str, op: ReduceOp, factor: complex | None, tensor: torch.Tensor
    ) -> ReduceOp:
        """The reduction that travels, from a cache for pairs of op and dtype already checked."""
        known = (op, tensor.dtype)
        # torch's ReduceOp equals ours of the same number, which is another reduction.
        if factor is None and op.__class__ is ReduceOp and known in self._wire_ops:
            return self._wire_ops[known]
        wire_op = checked_op(name, op, factor, tensor.dtype, self.backend)
        remedy = self._communicator.lacks(wire_op, travelling_dtype(tensor.dtype))
        if remedy:
            what = f"{name} of {tensor.dtype} with {ReduceOp(op).name}"
            raise UnsupportedOperation(what, self.backend, remedy)
        if factor is None:
            self._wire_ops[known] = wire_op
        return wire_op

    def _check_rank(self, rank: int, name: str) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} must be a rank in [0, {self.size}), got {rank}")

    def _check_peer(self, rank: int, name: str) -> None:
        self._check_rank(rank, name)
        if rank == self.rank:
            raise ValueError(f"{name} is {rank}, this rank itself; name another rank")

    def _check_source(self, src: int | None) -> int:
        """The peer of a recv from `src`."""
        if src is not None:
            self._check_peer(src, "src")
            return src
        if not self._communicator.receives_from_any:
            raise UnsupportedOperation("recv from any rank", self.backend, "name the rank with src")
        if self.size == 1:
            raise ValueError("recv from any rank in a group of one: nobody can send")
        return ANY_RANK

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag < FIRST_OBJECT_TAG:
            raise ValueError(f"tag must be in [0, 2**29), got {tag}")
        if tag and not self._communicator.has_tags:
            raise UnsupportedOperation(
                f"tag {tag}", self.backend, "messages between two ranks arrive in order; use tag 0"
            )

    def _check_given(self, name: str, value: object, root_name: str, root: int) -> None:
        if (value is not None) != (root == self.rank):
            has = "missing" if value is None else "given"
            where = "only rank" if value is not None else "rank"
            raise ValueError(
                f"{name} is {has} on rank {self.rank}, but {root_name} is {root}; {where} {root} "
                f"passes {name}, the others None"
            )

    def _check_own(
        self,
        operation: str,
        name: str,
        own: torch.Tensor,
        list_name: str,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        numel = tensors[self.rank].numel()
        if own.numel() != numel:
            raise ValueError(
                f"{operation}: {name} has {own.numel()} elements, but {list_name}[{self.rank}], "
                f"this rank's part, has {numel}; make them equal"
            )

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

    def _parts(
        self,
        operation: str,
        value: Array | Sequence[Array],
        name: str,
        own: torch.Tensor,
        own_name: str,
        finishers: list[Finisher] | None,
    ) -> list[torch.Tensor]:
        """One flat part per rank, to be written (if there are finishers) or read."""
        writes = finishers is not None

        def travelling(tensor: torch.Tensor) -> torch.Tensor:
            return read(tensor) if finishers is None else written(tensor, finishers)

        if isinstance(value, list | tuple):
            tensors = self._checked_list(value, name, written=writes)
            same_dtype(operation, name, tensors[0], own_name, own)
            self._check_own(operation, own_name, own, name, tensors)
            return [travelling(tensor) for tensor in tensors]
        whole = self._checked(value, name, writes)
        self._check_parts(operation, name, whole, own_name, own)
        return list(travelling(whole).view(self.size, -1 if whole.numel() else 0))

    def _split(
        self, tensor: torch.Tensor, flat: torch.Tensor, rows: Sequence[int] | None, name: str
    ) -> list[torch.Tensor]:
        """`flat`, the elements of `tensor`, split into one part per rank."""
        num_rows = tensor.shape[0] if tensor.dim() else 1
        if rows is None:
            if num_rows % self.size:
                raise ValueError(
                    f"all_to_all: {name} has {num_rows} rows, which {self.size} ranks cannot share "
                    f"equally; pass {name}_split_sizes"
                )
            rows = [num_rows // self.size] * self.size
        if len(rows) != self.size or min(rows) < 0 or sum(rows) != num_rows:
            raise ValueError(
                f"{name}_split_sizes must be {self.size} numbers, one per rank, not negative, "
                f"with the sum {num_rows} of the rows of {name}; got {list(rows)}"
            )
        width = flat.numel() // num_rows if num_rows else 0
        return list(flat.split_with_sizes([n * width for n in rows]))

    def _nothing(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        dtype = travelling_dtype(tensor.dtype)
        return [torch.empty(0, dtype=dtype, device=self.device)] * self.size

    def _numel(self, flat: torch.Tensor, tensor: torch.Tensor) -> int:
        """The number of elements as the caller counts them: a complex number is one."""
        return flat.numel() // 2 if tensor.is_complex() else flat.numel()
