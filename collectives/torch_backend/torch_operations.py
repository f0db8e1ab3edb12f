"""The operations of a process group, by the names and with the arguments that torch uses.

torch calls the operations in two ways. Its C++ (DDP's reducer, functional collectives) finds
overridden methods by their C++ names and passes lists of tensors and an options object. Its Python
also calls methods by former names. The decorator `operation` (dispatcher.py) lets only plain calls
in, and keeps torch.compile from tracing into the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ..contract.work import Work
from ..group import Group
from . import several, sparse
from .depths import Depths
from .dispatcher import formerly, operation
from .monitored_barrier import monitored_barrier
from .registration import NAME
from .several import only, some
from .torch_work import TorchWork, in_turn
from .translation import all_moved, moved, reduction, seconds

_MAX_TAG = (1 << 29) - 2  # monitored_barrier uses the tag above


class TorchOperations:
    """The half of `ChoruslineProcessGroup` with the operations."""

    profiling_name = NAME
    """The prefix of the names of ranges in torch.profiler."""

    def __init__(self, depths: Depths) -> None:
        self._depths = depths
        self._next_sequence = 0
        self._coalescing: Any = None

    @property
    def group(self) -> Group:
        return self._depths.host

    @operation("allreduce_", 1, AllreduceOptions)
    def allreduce(self, tensors: Any, opts: Any = None) -> TorchWork:
        """Reduce one tensor; of several, as Gloo does, all tensors of all ranks into each."""
        op, factor = reduction(opts)
        limit_s = seconds(opts)
        if len(tensors) == 1:
            tensor, after = tensors[0], None
        else:
            tensor = several.reduced(tensors, op)
            after = several.copying(tensor, tensors)
        group = self._depths.group(tensor.device)
        if tensor.layout is not torch.strided:
            work, add_up = sparse.all_reduce(group, tensor, op, limit_s)
            return self._in_flight(work, tensors, "all_reduce", in_turn(add_up, after))
        work = group.all_reduce(tensor.data, op, factor=factor, timeout_s=limit_s)
        return self._in_flight(work, tensors, "all_reduce", after)

    @operation("allreduce_coalesced_", 1, AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> TorchWork:
        op, factor = reduction(opts)
        limit_s = seconds(opts)
        group = self._depths.group(some(tensors)[0].device)
        if any(tensor.layout is not torch.strided for tensor in tensors):
            for tensor in tensors:
                work, add_up = sparse.all_reduce(group, tensor, op, limit_s)
                if tensor is not tensors[-1]:
                    work.wait()
                    add_up()
            return self._in_flight(work, tensors, "all_reduce", add_up)
        apart, after = several.apart(tensors)
        work = _together(
            group,
            lambda tensor: group.all_reduce(tensor.data, op, factor=factor, timeout_s=limit_s),
            apart,
        )
        return self._in_flight(work, tensors, "all_reduce", after)

    @operation("broadcast_", 1, BroadcastOptions)
    def broadcast(self, tensors: Any, opts: Any = None) -> TorchWork:
        """Copy the tensor `rootTensor` of the root into all tensors of all ranks."""
        root, of = (0, 0) if opts is None else (opts.rootRank, opts.rootTensor)
        if not 0 <= of < len(tensors):
            raise ValueError(f"invalid root tensor: {of}, of {len(tensors)} tensors")
        after = None
        if len(tensors) > 1:
            several.alike(tensors)
            after = several.copying(tensors[of], tensors)
        group = self._depths.group(tensors[0].device)
        work = group.broadcast(moved(tensors[of]), root, timeout_s=seconds(opts))
        return self._in_flight(work, tensors, "broadcast", after)

    @operation("reduce_", 1, ReduceOptions)
    def reduce(self, tensors: Any, opts: Any = None) -> TorchWork:
        op, factor = reduction(opts)
        root, of = (0, 0) if opts is None else (opts.rootRank, opts.rootTensor)
        group = self._depths.group(only(tensors).device)
        if of != 0:
            raise ValueError(f"invalid root tensor: {of}, of 1 tensor")
        work = group.reduce(tensors[0].data, root, op, factor=factor, timeout_s=seconds(opts))
        return self._in_flight(work, tensors, "reduce")

    @operation("allgather_", 2, AllgatherOptions)
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """Gather one tensor of each rank; of several, as Gloo does, those of all ranks into each
        list."""
        if len(inputs) == 1:
            written, after = only(outputs, "list of outputs"), None
        else:
            written = outputs
            inputs, outputs, after = several.gathered(inputs, outputs, self.group.size)
        work = self._all_gather(outputs[0], inputs[0], opts)
        return self._in_flight(work, written, "all_gather", after, shapes_of=inputs)

    @operation("allgather_coalesced_", 2, AllgatherOptions)
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """outputs[r][i] receives inputs[i] of rank r."""
        by_input = [[by_rank[i] for by_rank in outputs] for i in range(len(inputs))]
        written = [tensor for output in outputs for tensor in output]
        group = self._depths.group(inputs[0].device)
        work = _together(
            group, lambda output, input: self._all_gather(output, input, opts), by_input, inputs
        )
        return self._in_flight(work, written, "all_gather", shapes_of=inputs)

    def _all_gather(self, output: Any, input: torch.Tensor, opts: Any) -> Work:
        group = self._depths.group(input.device)
        return group.all_gather(all_moved(output), moved(input), timeout_s=seconds(opts))

    @operation("allgather_into_tensor_coalesced_", 2, AllgatherOptions)
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        group = self._depths.group(inputs[0].device)
        limit_s = seconds(opts)
        work = _together(
            group,
            lambda output, input: group.all_gather(moved(output), moved(input), timeout_s=limit_s),
            outputs,
            inputs,
        )
        return self._in_flight(work, list(outputs), "_all_gather_base", shapes_of=inputs)

    @operation("_allgather_base_", 2, AllgatherOptions, single=True)
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> TorchWork:
        group = self._depths.group(input.device)
        work = group.all_gather(moved(output), moved(input), timeout_s=seconds(opts))
        return self._in_flight(work, [output], "_all_gather_base", shapes_of=[input])

    @operation("gather_", 2, GatherOptions)
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        group = self._depths.group(only(inputs).device)
        output = list(only(outputs, "list of outputs")) if outputs else None
        work = group.gather(
            moved(inputs[0]),
            None if output is None else all_moved(output),
            0 if opts is None else opts.rootRank,
            timeout_s=seconds(opts),
        )
        return self._in_flight(work, output or [], "gather", shapes_of=inputs)

    @operation("scatter_", 2, ScatterOptions)
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        group = self._depths.group(only(outputs).device)
        work = group.scatter(
            moved(outputs[0]),
            all_moved(only(inputs, "list of inputs")) if inputs else None,
            0 if opts is None else opts.rootRank,
            timeout_s=seconds(opts),
        )
        return self._in_flight(work, list(outputs), "scatter")

    @operation("reduce_scatter_", 2, ReduceScatterOptions)
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        return self._reduce_scatter(outputs, [list(parts) for parts in inputs], opts)

    @operation("reduce_scatter_tensor_coalesced_", 2, ReduceScatterOptions)
    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> TorchWork:
        return self._reduce_scatter(outputs, inputs, opts)

    @operation("_reduce_scatter_base_", 2, ReduceScatterOptions, single=True)
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> TorchWork:
        return self._reduce_scatter([output], [input], opts)

    def _reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> TorchWork:
        """inputs: for each output, a tensor, or a list with one tensor for each rank."""
        op, factor = reduction(opts)
        limit_s = seconds(opts)
        group = self._depths.group(outputs[0].device)
        work = _together(
            group,
            lambda output, input: group.reduce_scatter(
                output.data, input, op, factor=factor, timeout_s=limit_s
            ),
            outputs,
            inputs,
        )
        return self._in_flight(work, list(outputs), "reduce_scatter")

    @operation(
        "alltoall_base_",
        2,
        AllToAllOptions,
        ("output_split_sizes", "input_split_sizes"),
        single=True,
    )
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
    ) -> TorchWork:
        group = self._depths.group(output.device)
        work = group.all_to_all(
            moved(output),
            moved(input),
            list(output_split_sizes) if output_split_sizes else None,
            list(input_split_sizes) if input_split_sizes else None,
            timeout_s=seconds(opts),
        )
        return self._in_flight(work, [output], "all_to_all")

    @operation("alltoall_", 2, AllToAllOptions)
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        group = self._depths.group(outputs[0].device)
        work = group.all_to_all(all_moved(outputs), all_moved(inputs), timeout_s=seconds(opts))
        return self._in_flight(work, list(outputs), "all_to_all")

    @operation("barrier", 0, BarrierOptions)
    def barrier(self, opts: Any = None) -> TorchWork:
        """A barrier on the GPU that `opts` names, or on the host."""
        device = getattr(opts, "device", None)
        if device is None or device.type != "cuda":
            device = torch.device("cpu")
        work = self._depths.group(device).barrier(timeout_s=seconds(opts))
        return self._in_flight(work, [], "barrier")

    @operation("send", 1, None, ("dst", "tag"))
    def send(self, tensors: Any, dst: int, tag: int, opts: Any = None) -> TorchWork:
        group = self._depths.group(only(tensors).device)
        work = group.send(moved(tensors[0]), dst, _checked_tag(tag))
        return self._in_flight(work, tensors, "send")

    @operation("recv_", 1, None, ("src", "tag"))
    def recv(self, tensors: Any, src: int, tag: int, opts: Any = None) -> TorchWork:
        group = self._depths.group(only(tensors).device)
        work = group.recv(moved(tensors[0]), src, _checked_tag(tag))
        return self._in_flight(work, tensors, "recv")

    @operation("recv_any_source_", 1, None, ("tag",))
    def recv_anysource(self, tensors: Any, tag: int, opts: Any = None) -> TorchWork:
        group = self._depths.group(only(tensors).device)
        work = group.recv(moved(tensors[0]), None, _checked_tag(tag))
        return self._in_flight(work, tensors, "recvAnySource")

    _allgather_base = formerly(all_gather_single, "_allgather_base")
    allgather_into_tensor_coalesced = formerly(
        all_gather_single_coalesced, "allgather_into_tensor_coalesced"
    )
    _reduce_scatter_base = formerly(reduce_scatter_single, "_reduce_scatter_base")
    reduce_scatter_tensor_coalesced = formerly(
        reduce_scatter_single_coalesced, "reduce_scatter_tensor_coalesced"
    )
    alltoall_base = formerly(all_to_all_single, "alltoall_base")

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier on the host; `dist.monitored_barrier` would require a backend named gloo.

        Raises CollectiveTimeout that names ranks that did not come.
        """
        limit_s = self.group.timeout_s if timeout is None else timeout.total_seconds()
        monitored_barrier(self.group, limit_s, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = self._depths.group(torch.device(device)).coalesce()

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        block, self._coalescing = self._coalescing, None
        with block:
            pass
        return self._in_flight(block, [], "coalesced")

    def _in_flight(
        self,
        work: Work,
        outputs: list[Any],
        name: str,
        after: Callable[[], None] | None = None,
        shapes_of: Any = None,
    ) -> TorchWork:
        self._next_sequence += 1
        return TorchWork(work, outputs, f"{self.profiling_name}:{name}", after, shapes_of)


def _together(group: Group, issue: Callable[..., Work], *arguments: Sequence[Any]) -> Work:
    """Call `issue` for each tuple of `arguments`, as one work."""
    calls = list(zip(*arguments, strict=True))
    if len(calls) == 1 or group._block_here() is not None:
        return [issue(*call) for call in calls][-1]  # In an open block all return the block's work.
    with group.coalesce() as work:
        for call in calls:
            issue(*call)
    return work


def _checked_tag(tag: int) -> int:
    if not 0 <= tag <= _MAX_TAG:
        raise ValueError(f"tag must be in [0, {_MAX_TAG}], got {tag}")
    return tag
