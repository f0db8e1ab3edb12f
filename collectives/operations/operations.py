"""The tensor operations of a `Group`: their arguments, checked and documented.

Names of operations, their meanings and the order of their positional arguments are those of
torch.distributed; a few arguments have names of our own (contract/torch_words.py names them to a
caller), and those that torch has after `group` do not exist. Where torch has one function for a
list of tensors and one for a single tensor (all_gather and all_gather_into_tensor), there is one
method here, and the type of the argument chooses: a list or tuple has one tensor per rank; a tensor
holds the parts of all ranks in rank order, each as a contiguous range.

A tensor may be anything that arguments.py accepts: a torch tensor of any strides, a numpy or CuPy
array, anything with DLPack, on the group's device. Results are written into the caller's memory.
Dtypes: float64, float32, float16, bfloat16, int64 to int8, uint8, bool, complex128, complex64.

Each method checks its arguments, counts the operation, hands it to the communicator and returns a
`Work` at once. A caller's mistake raises ValueError or TypeError before anything is enqueued, and
UnsupportedOperation if this backend lacks the operation. Written tensors are undefined until the
work is done; until then no other code may touch the tensors that an operation reads or writes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ..contract.arithmetic import reduce_into
from ..contract.articles import with_article
from ..contract.deadlines import Seconds
from ..contract.dtypes import DTYPE_INDEX
from ..contract.operation import UNEVEN, Finish, Kind, Operation, ReduceOp, root_and_op
from ..contract.torch_words import tensor_operation
from ..contract.work import Work
from .arguments import (
    Finisher,
    finisher,
    read,
    same_dtype,
    share_memory,
    written,
)
from .group_arguments import Array, GroupArguments


class Operations(GroupArguments):
    """The operations of a `Group`, which issues them."""

    @abstractmethod
    def _begin(
        self,
        kind: Kind,
        numel: int,
        dtype: int,
        detail: int,
        timeout_s: Seconds | None,
        elements: float,
        finish: Finish | None = None,
    ) -> Operation:
        """Number, count and record an operation."""

    @abstractmethod
    def _begin_between_two(
        self, kind: Kind, numel: int, dtype: int, peer: int, tag: int, timeout_s: Seconds | None
    ) -> Operation:
        """Count and record a send or recv."""

    @abstractmethod
    def _issued(self, work: Work, output: Any = None) -> Work:
        """The work for the caller: `work`, or that of the coalesced block that is open.

        output: what the work's `result()` returns.
        """

    # -- one tensor, all ranks -------------------------------------------------------------------

    @tensor_operation()
    def all_reduce(
        self,
        tensor: Array,
        op: ReduceOp = ReduceOp.SUM,
        *,
        factor: complex | None = None,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Reduce `tensor` over all ranks, in place, to the same bits on every rank.

        tensor: any shape; same number of elements and dtype on all ranks. factor: for PREMUL_SUM.
        """
        return self._all_reduce(tensor, op, factor, timeout_s)

    def _all_reduce(
        self,
        tensor: Array,
        op: ReduceOp = ReduceOp.SUM,
        factor: complex | None = None,
        timeout_s: Seconds | None = None,
        finishers: Sequence[Finisher] = (),
    ) -> Work:
        """finishers: what else ends the operation."""
        tensor = self._checked(tensor, "tensor", True)
        wire_op = self._checked_op("all_reduce", op, factor, tensor)
        finishers = [*finishers]
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

    @tensor_operation(root="write dst=")
    def reduce(
        self,
        tensor: Array,
        dst: int = 0,
        op: ReduceOp = ReduceOp.SUM,
        *,
        factor: complex | None = None,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Reduce `tensor` over all ranks into `tensor` of rank `dst`; the others keep theirs.

        tensor: any shape; same number of elements and dtype on all ranks. factor: for PREMUL_SUM.
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

    @tensor_operation(src="write root=")
    def broadcast(self, tensor: Array, root: int = 0, *, timeout_s: Seconds | None = None) -> Work:
        """Copy `tensor` of rank `root` into `tensor` of every other rank.

        tensor: any shape; same number of elements and dtype on all ranks.
        """
        return self._broadcast(tensor, root, timeout_s)

    def _broadcast(
        self,
        tensor: Array,
        root: int,
        timeout_s: Seconds | None = None,
        finishers: Sequence[Finisher] = (),
    ) -> Work:
        """finishers: what else ends the operation."""
        self._check_rank(root, "root")
        is_root = root == self.rank
        tensor = self._checked(tensor, "tensor", not is_root)
        finishers = [*finishers]
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

    @tensor_operation(device_ids="a group has one device, and its barrier uses that; leave it out")
    def barrier(self, *, timeout_s: Seconds | None = None) -> Work:
        """Wait until every rank has called barrier()."""
        operation = self._begin(Kind.BARRIER, 0, -1, -1, timeout_s, 0)
        return self._issued(self._communicator.barrier(operation))

    # -- parts of all ranks ----------------------------------------------------------------------

    @tensor_operation(input_list="write input=")
    def reduce_scatter(
        self,
        output: Array,
        input: Array | Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        factor: complex | None = None,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Reduce `input` over all ranks and leave this rank's part in `output`.

        output: n elements, or as many as tensor `rank` of the list; same dtype as `input`.
        input: size * n elements, unchanged; or a list of size tensors, of which tensor r goes to
            rank r. Tensor r has the same size on all ranks; sizes may differ within the list.
        factor: for PREMUL_SUM.

        Parts of different sizes are added after all have arrived, in size * n elements of memory.
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
            # A transport writes chunks of the output before it has read all of the input.
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
        finishers.insert(0, Finisher(flat, lambda: reduce_into(flat, received.unbind(), wire_op)))
        operation = self._begin(
            Kind.REDUCE_SCATTER, numel, dtype, op | UNEVEN, timeout_s, sent, finisher(finishers)
        )
        return self._issued(self._communicator.exchange(operation, list(received), parts), output)

    @tensor_operation(tensor_list="write output=", tensor="write input=")
    def all_gather(
        self, output: Array | Sequence[Array], input: Array, *, timeout_s: Seconds | None = None
    ) -> Work:
        """Put the `input` of all ranks, in rank order, into `output` on every rank.

        output: size * n elements; or a list of size tensors, of which tensor r receives the input
            of rank r. Tensor r has the same size on all ranks; sizes may differ within the list.
        input: n elements, same dtype; it may be this rank's part of `output` itself.
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

    @tensor_operation(gather_list="write output=", root="write dst=")
    def gather(
        self,
        tensor: Array,
        output: Array | Sequence[Array] | None = None,
        dst: int = 0,
        *,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Put the `tensor` of all ranks, in rank order, into `output` on rank `dst`.

        tensor: n elements; in the list form, n may differ between ranks.
        output: on `dst`, size * n elements or a list of size tensors; None on all other ranks.
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

    @tensor_operation(scatter_list="write input=", root="write src=")
    def scatter(
        self,
        tensor: Array,
        input: Array | Sequence[Array] | None = None,
        src: int = 0,
        *,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Put part r of `input` of rank `src` into `tensor` of rank r.

        tensor: n elements; in the list form, n may differ between ranks.
        input: on `src`, size * n elements or a list of size tensors; None on all other ranks.
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

    @tensor_operation(output_tensor_list="write output=", input_tensor_list="write input=")
    def all_to_all(
        self,
        output: Array | Sequence[Array],
        input: Array | Sequence[Array],
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Send part r of `input` to rank r, and put what rank r sends into part r of `output`.

        output, input: both tensors, or both lists of size tensors, one per rank, of any sizes.
            One dtype on all ranks. A rank sends as many elements as the receiver expects.
        output_split_sizes, input_split_sizes: rows (along the first dimension) of each part, for
            tensors; by default all parts have the same number.
        """
        finishers: list[Finisher] = []
        if isinstance(output, list | tuple) != isinstance(input, list | tuple):
            raise TypeError(
                f"output is {with_article(type(output))} and input {with_article(type(input))}; "
                "pass two lists of tensors or two tensors"
            )
        if isinstance(output, list | tuple):
            if output_split_sizes is not None or input_split_sizes is not None:
                raise ValueError(
                    "split sizes are for tensors; in lists, the tensors have their own sizes"
                )
            outputs = self._checked_list(output, "output", written=True)
            inputs = self._checked_list(input, "input", written=False)
            dtype_of, other = outputs[0], inputs[0]
            into = [written(tensor, finishers) for tensor in outputs]
            parts = [read(tensor) for tensor in inputs]
            overlap = share_memory(into, parts)
        else:
            dtype_of = self._checked(output, "output", True)
            other = self._checked(input, "input", False)
            sending, receiving = read(other), written(dtype_of, finishers)
            parts = self._split(other, sending, input_split_sizes, "input")
            into = self._split(dtype_of, receiving, output_split_sizes, "output")
            overlap = share_memory([receiving], [sending])
        same_dtype("all_to_all", "output", dtype_of, "input", other)
        own_in, own_out = parts[self.rank].numel(), into[self.rank].numel()
        if own_in != own_out:
            raise ValueError(
                f"all_to_all: part {self.rank} of input, which this rank sends to itself, has "
                f"{own_in} elements, and part {self.rank} of output {own_out}; make them equal"
            )
        # What arrives first would overwrite what is still to be sent.
        if overlap:
            parts = [part.clone() for part in parts]
        sent = sum(self._numel(part, other) for part in parts) - self._numel(
            parts[self.rank], other
        )
        return self._exchange(
            Kind.ALL_TO_ALL, dtype_of, -1, timeout_s, sent, into, parts, finishers, output
        )

    # -- between two ranks -----------------------------------------------------------------------

    @tensor_operation()
    def send(
        self, tensor: Array, dst: int, tag: int = 0, *, timeout_s: Seconds | None = None
    ) -> Work:
        """Send `tensor` to rank `dst`, which receives it with the same tag.

        Messages of one tag between two ranks arrive in the order in which they were sent. The work
        is done when `tensor` may be written again, which may be before it is received. On CPU,
        sends and receives delay neither collectives nor each other. On NCCL all operations of a
        group run in the order of issue, so an exchange belongs inside `coalesce()`; NCCL has no
        tags.
        """
        tensor = self._checked(tensor, "tensor", False)
        self._check_peer(dst, "dst")
        self._check_tag(tag)
        operation = self._begin_between_two(
            Kind.SEND, tensor.numel(), DTYPE_INDEX[tensor.dtype], dst, tag, timeout_s
        )
        return self._issued(self._communicator.send(operation, read(tensor)))

    @tensor_operation()
    def recv(
        self,
        tensor: Array,
        src: int | None = None,
        tag: int = 0,
        *,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Receive into `tensor` what rank `src` sends with the same tag; None: any rank, on CPU.

        tensor: with the number of elements and the dtype that were sent; anything else ends the
        group with CollectiveMismatch. The work's `source_rank` is the rank that sent the message.
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
        timeout_s: Seconds | None,
        sent: float,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        finishers: list[Finisher],
        given: Any,
    ) -> Work:
        """given: what the caller passed to be written; it is the work's result."""
        dtype = DTYPE_INDEX[tensor.dtype]
        operation = self._begin(kind, -1, dtype, detail, timeout_s, sent, finisher(finishers))
        return self._issued(self._communicator.exchange(operation, outputs, inputs), given)


def _scale(flat: torch.Tensor, tensor: torch.Tensor, factor: complex) -> None:
    """Multiply `flat`, the travelling form of `tensor` or of a part of that dtype, by `factor`."""
    if tensor.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    flat.mul_(factor)


def _copying(target: torch.Tensor, source: torch.Tensor) -> Finisher:
    return Finisher(target, lambda: target.copy_(source))
