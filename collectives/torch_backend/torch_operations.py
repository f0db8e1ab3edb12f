"""The operations of a process group, by the names and with the arguments that torch uses.

torch calls the operations in two ways. Its C++ (DDP's reducer, functional collectives) finds
overridden methods by their C++ names and passes lists of tensors and an options object. Its Python
also calls methods by other names, most of which are aliases here. torch.compile must not trace into
the methods, so all of them are excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._compile import _disable_dynamo

from ..contract.work import Work
from ..group import Group
from . import sparse
from .depths import Depths
from .monitored_barrier import monitored_barrier
from .options import NAME
from .torch_work import TorchWork
from .translation import all_moved, listed, moved, reduction, seconds

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

    @_disable_dynamo
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> TorchWork:
        tensors = listed(tensors)
        op, factor = reduction(opts)
        limit_s = seconds(opts if timeout is None else timeout)
        group = self._depths.group(tensors[0].device)
        if tensors[0].layout is not torch.strided:
            work, add_up = sparse.all_reduce(group, tensors[0], op, limit_s)
            return self._in_flight(work, tensors, "all_reduce", add_up)
        work = _together(
            group,
            lambda tensor: group.all_reduce(tensor, op, factor=factor, timeout_s=limit_s),
            tensors,
        )
        return self._in_flight(work, tensors, "all_reduce")

    allreduce_coalesced = allreduce

    @_disable_dynamo
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> TorchWork:
        tensors = listed(tensors)
        root = opts if isinstance(opts, int) else 0 if opts is None else opts.rootRank
        limit_s = seconds(opts if timeout is None else timeout)
        group = self._depths.group(tensors[0].device)
        work = _together(
            group,
            lambda tensor: group.broadcast(tensor, root, timeout_s=limit_s),
            all_moved(tensors),
        )
        return self._in_flight(work, tensors, "broadcast")

    @_disable_dynamo
    def reduce(self, tensors: Any, opts: Any) -> TorchWork:
        tensors = listed(tensors)
        op, factor = reduction(opts)
        group = self._depths.group(tensors[0].device)
        work = group.reduce(tensors[0], opts.rootRank, op, factor=factor, timeout_s=seconds(opts))
        return self._in_flight(work, tensors, "reduce")

    @_disable_dynamo
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        group = self._depths.group(inputs[0].device)
        limit_s = seconds(opts)
        work = _together(
            group,
            lambda output, input: group.all_gather(
                all_moved(output), moved(input), timeout_s=limit_s
            ),
            outputs,
            inputs,
        )
        written = [tensor for output in outputs for tensor in output]
        return self._in_flight(work, written, "all_gather", shapes_of=inputs)

    @_disable_dynamo
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """outputs[r][i] receives inputs[i] of rank r."""
        by_input = [[by_rank[i] for by_rank in outputs] for i in range(len(inputs))]
        return self.allgather(by_input, inputs, opts)

    @_disable_dynamo
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

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> TorchWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    @_disable_dynamo
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> TorchWork:
        group = self._depths.group(inputs[0].device)
        output = list(outputs[0]) if outputs else None
        work = group.gather(
            moved(inputs[0]),
            None if output is None else all_moved(output),
            opts.rootRank,
            timeout_s=seconds(opts),
        )
        return self._in_flight(work, output or [], "gather", shapes_of=inputs)

    @_disable_dynamo
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> TorchWork:
        group = self._depths.group(outputs[0].device)
        work = group.scatter(
            moved(outputs[0]),
            all_moved(inputs[0]) if inputs else None,
            opts.rootRank,
            timeout_s=seconds(opts),
        )
        return self._in_flight(work, list(outputs), "scatter")

    @_disable_dynamo
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._reduce_scatter(outputs, [list(parts) for parts in inputs], opts)

    @_disable_dynamo
    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> TorchWork:
        return self._reduce_scatter(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> TorchWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> TorchWork:
        """inputs: for each output, a tensor, or a list with one tensor for each rank."""
        op, factor = reduction(opts)
        limit_s = seconds(opts)
        group = self._depths.group(outputs[0].device)
        work = _together(
            group,
            lambda output, input: group.reduce_scatter(
                output, input, op, factor=factor, timeout_s=limit_s
            ),
            outputs,
            inputs,
        )
        return self._in_flight(work, list(outputs), "reduce_scatter")

    @_disable_dynamo
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

    alltoall_base = all_to_all_single

    @_disable_dynamo
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        group = self._depths.group(outputs[0].device)
        work = group.all_to_all(all_moved(outputs), all_moved(inputs), timeout_s=seconds(opts))
        return self._in_flight(work, list(outputs), "all_to_all")

    @_disable_dynamo
    def barrier(self, opts: Any = None, timeout: Any = None) -> TorchWork:
        """A barrier on the GPU that `opts` names, or on the host."""
        device = getattr(opts, "device", None)
        if device is None or device.type != "cuda":
            device = torch.device("cpu")
        group = self._depths.group(device)
        work = group.barrier(timeout_s=seconds(opts if timeout is None else timeout))
        return self._in_flight(work, [], "barrier")

    @_disable_dynamo
    def send(self, tensors: Any, dst: int, tag: int = 0) -> TorchWork:
        tensor = listed(tensors)[0]
        group = self._depths.group(tensor.device)
        work = group.send(moved(tensor), dst, _checked_tag(tag))
        return self._in_flight(work, [tensor], "send")

    @_disable_dynamo
    def recv(self, tensors: Any, src: int, tag: int = 0) -> TorchWork:
        tensor = listed(tensors)[0]
        group = self._depths.group(tensor.device)
        work = group.recv(moved(tensor), src, _checked_tag(tag))
        return self._in_flight(work, [tensor], "recv")

    @_disable_dynamo
    def recv_anysource(self, tensors: Any, tag: int = 0) -> TorchWork:
        tensor = listed(tensors)[0]
        group = self._depths.group(tensor.device)
        work = group.recv(moved(tensor), None, _checked_tag(tag))
        return self._in_flight(work, [tensor], "recvAnySource")

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
        outputs: list[torch.Tensor],
        name: str,
        after: Callable[[], None] | None = None,
        shapes_of: Any = None,
    ) -> TorchWork:
        self._next_sequence += 1
        return TorchWork(work, outputs, f"{self.profiling_name}:{name}", after, shapes_of)


def _together(group: Group, issue: Callable[..., Work], *arguments: Sequence[Any]) -> Work:
    """Call `issue` for each tuple of `arguments`, as one work."""
    calls = list(zip(*arguments, strict=True))
    if len(calls) == 1 or group._coalesced is not None:
        return [issue(*call) for call in calls][-1]  # In an open block all return the block's work.
    with group.coalesce() as work:
        for call in calls:
            issue(*call)
    return work


def _checked_tag(tag: int) -> int:
    if not 0 <= tag <= _MAX_TAG:
        raise ValueError(f"tag must be in [0, {_MAX_TAG}], got {tag}")
    return tag
