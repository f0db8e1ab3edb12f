"""Everything that ranks can do together: the arguments of each operation, checked and explained.

Names, argument orders and meanings are those of torch.distributed. Where torch has one function
for a list of tensors and one for a single tensor (all_gather and all_gather_into_tensor), there is
one method here, and the type of the argument chooses: a list or tuple has one tensor per rank, a
tensor holds the parts of all ranks one after the other, in rank order, each as a contiguous range.

A tensor may be anything that arguments.py takes: a torch tensor of any strides, a numpy or CuPy
array, anything with DLPack, on the group's device; results are written into the caller's memory.
Dtypes: float64, float32, float16, bfloat16, int64 to int8, uint8, bool, complex128, complex64.

Each method checks, counts, and hands on to the communicator, and returns a `Work` at once. Errors
of the caller raise here, before anything is enqueued: ValueError, TypeError, or
UnsupportedOperation for what this backend lacks. Tensors that are written are undefined until the
work is done; until then nobody else may touch what an operation reads or writes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from .arguments import (
    DTYPE_INDEX,
    Finisher,
    checked,
    checked_list,
    checked_op,
    finisher,
    read,
    same_dtype,
    share_memory,
    travelling_dtype,
    written,
)
from .arithmetic import reduce_into
from .communicator import Communicator
from .errors import UnsupportedOperation
from .operation import ANY_RANK, FIRST_OBJECT_TAG, UNEVEN, Kind, Operation, root_and_op
from .reduce_op import ReduceOp
from .work import Work

Array = Any
"""A torch tensor, a numpy or CuPy array, or anything with DLPack."""


class Operations(ABC):
    """The operations of a `Group`, which issues them."""

    rank: int
    size: int
    device: torch.device
    backend: str
    _communicator: Communicator
    _notes_shapes: bool  # at debug level DETAIL
    _shapes: list[tuple[FrameType, tuple[int, ...]]]
    _wire_ops: dict[tuple[ReduceOp, torch.dtype], ReduceOp]  # of what may be reduced without factor

    @abstractmethod
    def _begin(
        self,
        kind: Kind,
        numel: int,
        dtype: int,
        detail: int,
        timeout_s: float | None,
        elements: float,
        finish: Callable[[], None] | None = None,
    ) -> Operation:
        """Number and count an operation."""

    @abstractmethod
    def _begin_between_two(
        self, kind: Kind, numel: int, dtype: int, peer: int, tag: int, timeout_s: float | None
    ) -> Operation:
        """Count a send or recv."""

    @abstractmethod
    def _issued(self, work: Work, output: Any = None) -> Work:
        """What the caller is given: `work`, or the work of the coalesced block that it is in.

        output: what the work's `result()` is.
        """

    # -- one tensor, all ranks -------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Array,
        op: ReduceOp = ReduceOp.SUM,
        *,
        factor: complex | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce `tensor` over all ranks, in place, to the same bits on every rank.

        tensor: any shape, same number of elements and dtype on all ranks. factor: of PREMUL_SUM.
        """
        tensor = self._checked(tensor, "tensor", True)
        wire_op = self._checked_op("all_reduce", op, factor, tensor)
        finishers: list[Finisher] = []
        flat = written(tensor, finishers, also_read=True)
        numel = tensor.numel()
        operation = self._begin(
            Kind.ALL_REDUCE,
            numel,
            DTYPE_INDEX[tensor.dtype],
            op,
            timeout_s,
            2 * numel * (self.size - 1) / self.size,
            finisher(finishers),
        )
        if factor is not None:
            _scale(flat, tensor, factor)
        return self._issued(self._communicator.all_reduce(operation, flat, wire_op), tensor)

    def reduce(
        self,
        tensor: Array,
        dst: int = 0,
        op: ReduceOp = ReduceOp.SUM,
        *,
        factor: complex | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce `tensor` over all ranks into `tensor` of rank `dst`; elsewhere it stays as it is.

        tensor: any shape, same number of elements and dtype on all ranks. factor: of PREMUL_SUM.
        """
        self._check_rank(dst, "dst")
        is_root = dst == self.rank
        tensor = self._checked(tensor, "tensor", is_root)
        wire_op = self._checked_op("reduce", op, factor, tensor)
        finishers: list[Finisher] = []
        flat = written(tensor, finishers, also_read=True) if is_root else read(tensor)
        numel = tensor.numel()
        operation = self._begin(
            Kind.REDUCE,
            numel,
            DTYPE_INDEX[tensor.dtype],
            root_and_op(dst, op),
            timeout_s,
            0 if is_root else numel,
            finisher(finishers),
        )
        if factor is not None:
            if not is_root:
                flat = flat.clone()
            _scale(flat, tensor, factor)
        return self._issued(self._communicator.reduce(operation, flat, dst, wire_op), tensor)

    def broadcast(self, tensor: Array, root: int = 0, *, timeout_s: float | None = None) -> Work:
        """Copy `tensor` of rank `root` into `tensor` of every other rank.

        tensor: any shape, same number of elements and dtype on all ranks.
        """
        self._check_rank(root, "root")
        is_root = root == self.rank
        tensor = self._checked(tensor, "tensor", not is_root)
        finishers: list[Finisher] = []
        flat = read(tensor) if is_root else written(tensor, finishers)
        numel = tensor.numel()
        operation = self._begin(
            Kind.BROADCAST,
            numel,
            DTYPE_INDEX[tensor.dtype],
            root,
            timeout_s,
            numel if is_root else 0,
            finisher(finishers),
        )
        return self._issued(self._communicator.broadcast(operation, flat, root), tensor)

    def barrier(self, *, timeout_s: float | None = None) -> Work:
        """Done on no rank before every rank has issued it."""
        operation = self._begin(Kind.BARRIER, 0, -1, -1, timeout_s, 0)
        return self._issued(self._communicator.barrier(operation))

    # -- parts of all ranks ----------------------------------------------------------------------

    def reduce_scatter(
        self,
        output: Array,
        input: Array | Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        factor: complex | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce `input` over all ranks and leave this rank's part in `output`.

        input: size * n elements, left as they are; or a list of size tensors, of which tensor r
        goes to rank r: their sizes may differ, and are the same on all ranks. output: n elements,
        or those of tensor `rank` of the list; same dtype. factor: of PREMUL_SUM.

        Parts of different sizes are all received before they are added: size * n elements of
        memory.
        """
        output = self._checked(output, "output", True)
        wire_op = self._checked_op("reduce_scatter", op, factor, output)
        if isinstance(input, list | tuple):
            inputs = self._checked_list(input, "input", written=False)
            same_dtype("reduce_scatter", "input", inputs[0], "output", output)
            self._check_own("reduce_scatter", "output", output, "input", inputs)
            parts = [read(tensor) for tensor in inputs]
            numel = sum(tensor.numel() for tensor in inputs)
            even = all(tensor.numel() == output.numel() for tensor in inputs)
            whole = torch.cat(parts) if even else None
            if factor is not None and whole is None:
                parts = [part.clone() for part in parts]
                for part in parts:
                    _scale(part, output, factor)
        else:
            input = self._checked(input, "input", False)
            self._check_parts("reduce_scatter", "input", input, "output", output)
            parts, numel, whole = [], input.numel(), read(input)
        if whole is not None and factor is not None:
            whole = whole.clone()
            _scale(whole, output, factor)
        elif share_memory([output], [whole] if whole is not None else parts):
            # Chunks of the output are written while others of the input are still to be read.
            whole = None if whole is None else whole.clone()
            parts = [part.clone() for part in parts]
        finishers: list[Finisher] = []
        flat = written(output, finishers)
        dtype = DTYPE_INDEX[output.dtype]
        sent = numel - output.numel()
        if whole is not None:
            operation = self._begin(
                Kind.REDUCE_SCATTER, numel, dtype, op, timeout_s, sent, finisher(finishers)
            )
            work = self._communicator.reduce_scatter(operation, flat, whole, wire_op)
            return self._issued(work, output)
        received = flat.new_empty(self.size, flat.numel())
        finishers.insert(0, lambda: reduce_into(flat, received.unbind(), wire_op))
        operation = self._begin(
            Kind.REDUCE_SCATTER, numel, dtype, op | UNEVEN, timeout_s, sent, finisher(finishers)
        )
        return self._issued(self._communicator.exchange(operation, list(received), parts), output)

    def all_gather(
        self, output: Array | Sequence[Array], input: Array, *, timeout_s: float | None = None
    ) -> Work:
        """Put the `input` of all ranks, in rank order, into `output` on every rank.

        input: n elements; it may be this rank's part of `output` itself.
        output: size * n elements; or a list of size tensors, whose sizes may differ and are the
        same on all ranks: tensor r gets the input of rank r. Same dtype.
        """
        input = self._checked(input, "input", False)
        dtype = DTYPE_INDEX[input.dtype]
        finishers: list[Finisher] = []
        flat = read(input)
        if not isinstance(output, list | tuple):
            output = self._checked(output, "output", True)
            self._check_parts("all_gather", "output", output, "input", input)
            whole = written(output, finishers)
            numel = output.numel()
        else:
            outputs = self._checked_list(output, "output", written=True)
            same_dtype("all_gather", "output", outputs[0], "input", input)
            self._check_own("all_gather", "input", input, "output", outputs)
            numel = sum(tensor.numel() for tensor in outputs)
            if any(tensor.numel() != input.numel() for tensor in outputs):
                parts = [written(tensor, finishers) for tensor in outputs]
                sent = input.numel() * (self.size - 1)
                operation = self._begin(
                    Kind.ALL_GATHER, numel, dtype, UNEVEN, timeout_s, sent, finisher(finishers)
                )
                work = self._communicator.exchange(operation, parts, [flat] * self.size)
                return self._issued(work, output)
            whole = flat.new_empty(self.size * flat.numel())
            rows = whole.view(self.size, -1)
            for row, tensor in zip(rows, outputs, strict=True):
                copied: list[Finisher] = []
                target = written(tensor, copied)
                finishers.append(_copying(target, row))
                finishers += copied
        operation = self._begin(
            Kind.ALL_GATHER,
            numel,
            dtype,
            -1,
            timeout_s,
            numel - input.numel(),
            finisher(finishers),
        )
        return self._issued(self._communicator.all_gather(operation, whole, flat), output)

    def gather(
        self,
        tensor: Array,
        output: Array | Sequence[Array] | None = None,
        dst: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """Put the `tensor` of all ranks, in rank order, into `output` on rank `dst`.

        tensor: n elements; in the list form, n may differ between ranks.
        output: on `dst` size * n elements, or a list of size tensors; None on all other ranks.
        """
        self._check_rank(dst, "dst")
        tensor = self._checked(tensor, "tensor", False)
        self._check_given("output", output, "dst", dst)
        finishers: list[Finisher] = []
        outputs = self._nothing(tensor)
        if output is not None:
            outputs = self._parts("gather", output, "output", tensor, "tensor", finishers)
        inputs = self._nothing(tensor)
        inputs[dst] = read(tensor)
        sent = 0 if dst == self.rank else tensor.numel()
        return self._exchange(
            Kind.GATHER, tensor, dst, timeout_s, sent, outputs, inputs, finishers, output
        )

    def scatter(
        self,
        tensor: Array,
        input: Array | Sequence[Array] | None = None,
        src: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """Put part r of `input` of rank `src` into `tensor` of rank r.

        tensor: n elements; in the list form, n may differ between ranks.
        input: on `src` size * n elements, or a list of size tensors; None on all other ranks.
        """
        self._check_rank(src, "src")
        tensor = self._checked(tensor, "tensor", True)
        self._check_given("input", input, "src", src)
        finishers: list[Finisher] = []
        outputs = self._nothing(tensor)
        outputs[src] = written(tensor, finishers)
        inputs = self._nothing(tensor)
        if input is not None:
            inputs = self._parts("scatter", input, "input", tensor, "tensor", None)
        sent = sum(self._numel(part, tensor) for part in inputs)
        sent -= self._numel(inputs[self.rank], tensor)
        return self._exchange(
            Kind.SCATTER, tensor, src, timeout_s, sent, outputs, inputs, finishers, tensor
        )

    def all_to_all(
        self,
        output: Array | Sequence[Array],
        input: Array | Sequence[Array],
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """Send part r of `input` to rank r, and put what rank r sends into part r of `output`.

        output, input: both tensors, or both lists of size tensors, one per rank, of any sizes.
        Of tensors, the split sizes say how many rows (along the first dimension) each part has;
        without them all parts have the same number. Same dtype everywhere. What a rank sends to
        another is as many elements as that one expects.
        """
        finishers: list[Finisher] = []
        if isinstance(output, list | tuple) != isinstance(input, list | tuple):
            raise TypeError(
                f"output is a {type(output).__name__} and input a {type(input).__name__}; pass two "
                "lists of tensors or two tensors"
            )
        if isinstance(output, list | tuple):
            if output_split_sizes is not None or input_split_sizes is not None:
                raise ValueError("split sizes are for tensors; with lists, tensors say their sizes")
            outputs = self._checked_list(output, "output", written=True)
            inputs = self._checked_list(input, "input", written=False)
            dtype_of, other = outputs[0], inputs[0]
            into = [written(tensor, finishers) for tensor in outputs]
            parts = [read(tensor) for tensor in inputs]
        else:
            dtype_of = self._checked(output, "output", True)
            other = self._checked(input, "input", False)
            parts = self._split(other, read(other), input_split_sizes, "input")
            flat = written(dtype_of, finishers)
            into = self._split(dtype_of, flat, output_split_sizes, "output")
        same_dtype("all_to_all", "output", dtype_of, "input", other)
        own_in, own_out = parts[self.rank].numel(), into[self.rank].numel()
        if own_in != own_out:
            raise ValueError(
                f"all_to_all: part {self.rank} of input, which this rank sends to itself, has "
                f"{own_in} elements, and part {self.rank} of output {own_out}; make them equal"
            )
        if share_memory(into, parts):
            parts = [part.clone() for part in parts]
        sent = sum(self._numel(part, other) for part in parts) - self._numel(
            parts[self.rank], other
        )
        return self._exchange(
            Kind.ALL_TO_ALL, dtype_of, -1, timeout_s, sent, into, parts, finishers, output
        )

    # -- between two ranks -----------------------------------------------------------------------

    def send(
        self, tensor: Array, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """Send `tensor` to rank `dst`, which receives it with the same tag.

        Messages of one tag between two ranks arrive in the order in which they were sent. Done
        when `tensor` may be written again, which may be before it is received. Sends and
        receives do not hold up collectives, nor each other, on CPU; on NCCL all operations of a
        group run in the order of issue, so an exchange belongs inside `coalesce()`, and there are
        no tags.
        """
        tensor = self._checked(tensor, "tensor", False)
        self._check_peer(dst, "dst")
        self._check_tag(tag)
        operation = self._begin_between_two(
            Kind.SEND, tensor.numel(), DTYPE_INDEX[tensor.dtype], dst, tag, timeout_s
        )
        return self._issued(self._communicator.send(operation, read(tensor)))

    def recv(
        self,
        tensor: Array,
        src: int | None = None,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """Receive into `tensor` what rank `src` sends with the same tag; None: any rank, on CPU.

        tensor: of the number of elements and the dtype that were sent; anything else ends the
        group with CollectiveMismatch. The work's `source_rank` is the rank that sent it.
        """
        tensor = self._checked(tensor, "tensor", True)
        peer = self._check_source(src)
        self._check_tag(tag)
        finishers: list[Finisher] = []
        flat = written(tensor, finishers)
        operation = self._begin_between_two(
            Kind.RECV, tensor.numel(), DTYPE_INDEX[tensor.dtype], peer, tag, timeout_s
        )
        operation.finish = finisher(finishers)
        return self._issued(self._communicator.recv(operation, flat), tensor)

    # --------------------------------------------------------------------------------------------

    def _exchange(
        self,
        kind: Kind,
        tensor: torch.Tensor,
        detail: int,
        timeout_s: float | None,
        sent: float,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        finishers: list[Finisher],
        given: Any,
    ) -> Work:
        """given: what the caller wants written, which is the work's result."""
        dtype = DTYPE_INDEX[tensor.dtype]
        operation = self._begin(kind, -1, dtype, detail, timeout_s, sent, finisher(finishers))
        return self._issued(self._communicator.exchange(operation, outputs, inputs), given)

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
        """What to reduce by; of a pair that was found good before, at once."""
        known = (op, tensor.dtype)
        if factor is None and known in self._wire_ops:
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
            raise ValueError(f"{name} is {rank}, this rank itself; name another one")

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
                f"{operation}: {name} has {own.numel()} elements and {list_name}[{self.rank}], "
                f"this rank's part, {numel}; make them equal"
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
        """A part per rank, flat, to be written (with finishers) or read."""
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
        """`flat`, the elements of `tensor`, in a part per rank."""
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
        """Elements as the caller counts them: a complex number is one."""
        return flat.numel() // 2 if tensor.is_complex() else flat.numel()


def _scale(flat: torch.Tensor, tensor: torch.Tensor, factor: complex) -> None:
    """Multiply what travels for `tensor`, or for a part of the same dtype, by `factor`."""
    if tensor.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    flat.mul_(factor)


def _copying(target: torch.Tensor, source: torch.Tensor) -> Finisher:
    return lambda: target.copy_(source)
