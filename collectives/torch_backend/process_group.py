"""A process group of torch.distributed over `Group`.

torch calls the operations in two ways, by the names and with the arguments that it uses. Its C++
(DDP's reducer, functional collectives) finds overridden methods by their C++ names and passes lists
of tensors and an options object. Its Python also calls methods by former names. The decorator
`operation` (dispatcher.py) lets only plain calls in, and keeps torch.compile from tracing into the
methods.

The class also has parts of `Backend`'s interface, because torch calls `_get_backend(device)` for
them, which returns the process group itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ErrorType,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed.distributed_c10d import PrefixStore as TorchPrefixStore

from ..contract.errors import CollectiveTimeout, GroupAborted, UnsupportedOperation
from ..contract.work import Work
from ..group import Group
from ..stores.torch_store import StoreFromTorch
from . import sparse, tensor_lists
from .device_groups import DeviceGroups
from .dispatcher import formerly, hand_on_functional_operators, operation
from .monitored_barrier import monitored_barrier
from .options import Options
from .reconfiguring import GroupMembership, Unconnected
from .registration import NAME
from .tensor_lists import only, some
from .torch_work import TorchWork, in_turn
from .translation import MOST_S, all_moved, group_timeout_s, moved, reduction, seconds

_MAX_TAG = (1 << 29) - 2  # monitored_barrier uses the tag above


def create(arguments: Any, options: Options | None) -> ChoruslineProcessGroup:
    """Make a process group; torch calls it on every rank. Blocks until all ranks have come.

    arguments: torch's _DistributedBackendOptions.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"pg_options must be chorusline's Options or None, got {type(options).__name__}; this "
            "backend cannot use the options of other backends"
        )
    name = f"torch {arguments.group_id}"
    timeout_s = group_timeout_s(arguments.timeout, MOST_S)
    parent = None if options is None else options.parent
    if getattr(arguments, "enable_reconfigure", False):  # torch 2.14 and newer
        if parent is not None:
            raise ValueError(
                "enable_reconfigure=True needs a process group of its own; this one is over a "
                "group of Chorusline, whose members its session decides"
            )
        store = StoreFromTorch(arguments.store)
        rank, size = arguments.group_rank, arguments.group_size
        return ChoruslineProcessGroup(
            GroupMembership(store, name, rank, size, timeout_s), arguments.store
        )
    members = list(range(arguments.group_size))
    if parent is None and dist.is_initialized():
        world = dist.group.WORLD
        # A subgroup then has its parent's family: a rank that is lost to one is lost to both.
        if isinstance(world, ChoruslineProcessGroup):
            parent, members = world.group, list(arguments.global_ranks_in_group)
            if world.supports_reconfigure:
                # torch's name counts the groups that a process has made, and a rank that came
                # later has made fewer. Groups of the same ranks meet in the order of their making.
                digest = hashlib.sha256(repr(members).encode()).hexdigest()[:12]
                name = f"torch, {len(members)} ranks, {digest}"
    if parent is None:
        store = StoreFromTorch(arguments.store)
        size = arguments.group_size
        host = Group.create(store, arguments.group_rank, size, timeout_s=timeout_s, name=name)
    else:
        # The ranks meet in the parent's store, where no rank waits for a lost one.
        host = _on_host(parent, members, name, timeout_s)
    return ChoruslineProcessGroup(host, arguments.store)


def _on_host(parent: Group, members: Sequence[int], name: str, timeout_s: float) -> Group:
    return parent.connect_child(
        members, name, name=name, device=torch.device("cpu"), timeout_s=timeout_s
    )


# Untyped, because no Python method can match the overloads in torch's stubs for its C++.
_TorchProcessGroup: Any = dist.ProcessGroup


class ChoruslineProcessGroup(_TorchProcessGroup):
    """`size` ranks of torch.distributed, over one `Group` for each device and depth.

    group: the group for the program's tensors on the host. It has the flight recorder,
    `describe()` and `failure()`. A process group that was initialised with enable_reconfigure=True
    has one after `reconfigure`, and then another one after each.
    """

    profiling_name = NAME
    """The prefix of the names of ranges in torch.profiler."""

    def __init__(self, members: Group | GroupMembership, torch_store: Any) -> None:
        """members: the group; a GroupMembership if it is to be made by `reconfigure`.
        torch_store: returned to torch as the store of this process group."""
        _TorchProcessGroup.__init__(self, members.rank, members.size)
        self._membership = members if isinstance(members, GroupMembership) else None
        self._device_groups: DeviceGroups | Unconnected = (
            Unconnected() if isinstance(members, GroupMembership) else DeviceGroups(members)
        )
        self._rank, self._size, self._timeout_s = members.rank, members.size, members.timeout_s
        self._next_sequence = 0
        self._coalescing: Any = None
        hand_on_functional_operators()
        self._torch_store = torch_store
        self._group_name = members.name
        self._group_desc = "undefined"
        self._splits = 0

    @property
    def group(self) -> Group:
        return self._device_groups.host

    # -- groups ----------------------------------------------------------------------------------

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ChoruslineProcessGroup | None:
        """A process group of some ranks of this one; None on a rank that is not among them.

        new_ranks: this group's numbers of this rank's split; other ranks may pass other splits.
        """
        self._splits += 1
        ranks = list(new_ranks)
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self._group_name}:split:{self._splits}"
        # The ranks of a split agree on this name, which no other split has.
        host = _on_host(
            self.group,
            ranks,
            f"torch {name} of ranks {ranks}",
            group_timeout_s(timeout, self.group.timeout_s),
        )
        made = ChoruslineProcessGroup(host, TorchPrefixStore(host.name, self._torch_store))
        made._set_group_name(name)
        made._set_group_desc(group_desc or f"{self._group_desc}:split")
        return made

    splitGroup = split_group

    def merge_remote_group(self, *_: Any, **__: Any) -> ChoruslineProcessGroup:
        raise UnsupportedOperation(
            "merge_remote_group",
            NAME,
            "destroy the process groups and initialise a new one of all ranks, or call "
            "reconfigure() of one (torch 2.14 and newer)",
        )

    mergeRemoteGroup = merge_remote_group

    @property
    def supports_reconfigure(self) -> bool:
        """Whether it was initialised with enable_reconfigure=True."""
        return self._membership is not None

    def get_reconfigure_handle(self) -> str:
        """This rank's name for the ranks that call `reconfigure`; another one after each."""
        return self._reconfigurable("get_reconfigure_handle").handle

    def reconfigure(self, opts: Any) -> TorchWork:
        """Connect the ranks of opts.handles, in that order, in place of those so far.

        All of them call it, with the same handles and the same uuid, and it blocks until they have
        come. Works in flight, and groups that were made of this one, end. After an error the
        process group has no members, and `reconfigure` may be called again.

        opts: torch's ReconfigureOptions. Its timeout is that of the meeting; by default the process
        group's, which stays that of later operations.
        """
        membership = self._reconfigurable("reconfigure")
        members = membership.members(opts.handles)
        limit_s = group_timeout_s(opts.timeout, self._timeout_s)
        self._device_groups.close()
        self._device_groups, self._coalescing = Unconnected(), None
        host = membership.connect(members, opts.uuid, limit_s)
        host.timeout_s = self._timeout_s
        self._device_groups = DeviceGroups(host)
        self._rank, self._size = host.rank, host.size
        self._next_sequence = self._splits = 0  # New ranks begin to count here, too.
        return self._in_flight(host.barrier(), [], "reconfigure")

    def _reconfigurable(self, method: str) -> GroupMembership:
        if self._membership is None:
            raise UnsupportedOperation(
                method,
                NAME,
                "this process group was not initialised with enable_reconfigure=True, which "
                "init_process_group takes from torch 2.14 on; without it, destroy the process "
                "group and initialise a new one of the ranks that are left",
            )
        return self._membership

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def options(self) -> None:
        """The options that torch passes on to `split_group`."""

    def comm_split_count(self) -> int:
        return self._splits

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside a new group do not take part in making it."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._device_groups.group(device)

    # -- operations ------------------------------------------------------------------------------

    @operation("allreduce_", 1, AllreduceOptions)
    def allreduce(self, tensors: Any, opts: Any = None) -> TorchWork:
        """Reduce one tensor; of several, as Gloo does, all tensors of all ranks into each."""
        op, factor = reduction(opts)
        limit_s = seconds(opts)
        if len(tensors) == 1:
            tensor, after = tensors[0], None
        else:
            tensor = tensor_lists.reduced(tensors, op)
            after = tensor_lists.copying(tensor, tensors)
        group = self._device_groups.group(tensor.device)
        if tensor.layout is not torch.strided:
            work, add_up = sparse.all_reduce(group, tensor, op, limit_s)
            return self._in_flight(work, tensors, "all_reduce", in_turn(add_up, after))
        work = group.all_reduce(tensor.data, op, factor=factor, timeout_s=limit_s)
        return self._in_flight(work, tensors, "all_reduce", after)

    @operation("allreduce_coalesced_", 1, AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> TorchWork:
        op, factor = reduction(opts)
        limit_s = seconds(opts)
        group = self._device_groups.group(some(tensors)[0].device)
        if any(tensor.layout is not torch.strided for tensor in tensors):
            for tensor in tensors:
                sparse.checked(group, tensor, op)
            for tensor in tensors:
                work, add_up = sparse.all_reduce(group, tensor, op, limit_s)
                if tensor is not tensors[-1]:
                    work.wait()
                    add_up()
            return self._in_flight(work, tensors, "all_reduce", add_up)
        # Before equal memory is told apart: an expanded tensor is refused even as a second one.
        for tensor in tensors:
            group._checked_op("all_reduce", op, factor, group._checked(tensor.data, "tensor", True))
        apart, after = tensor_lists.apart(tensors)
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
            tensor_lists.alike(tensors)
            after = tensor_lists.copying(tensors[of], tensors)
        group = self._device_groups.group(tensors[0].device)
        work = group.broadcast(moved(tensors[of]), root, timeout_s=seconds(opts))
        return self._in_flight(work, tensors, "broadcast", after)

    @operation("reduce_", 1, ReduceOptions)
    def reduce(self, tensors: Any, opts: Any = None) -> TorchWork:
        op, factor = reduction(opts)
        root, of = (0, 0) if opts is None else (opts.rootRank, opts.rootTensor)
        group = self._device_groups.group(only(tensors).device)
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
            inputs, outputs, after = tensor_lists.gathered(inputs, outputs, self.group.size)
        work = self._all_gather(outputs[0], inputs[0], opts)
        return self._in_flight(work, written, "all_gather", after, shapes_of=inputs)

    @operation("allgather_coalesced_", 2, AllgatherOptions)
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """outputs[r][i] receives inputs[i] of rank r."""
        by_input = [[by_rank[i] for by_rank in outputs] for i in range(len(inputs))]
        written = [tensor for output in outputs for tensor in output]
        group = self._device_groups.group(inputs[0].device)
        work = _together(
            group,
            lambda output, input: self._all_gather(output, input, opts),
            by_input,
            inputs,
            check=lambda output, input: _check_gather(group, all_moved(output), moved(input)),
        )
        return self._in_flight(work, written, "all_gather", shapes_of=inputs)

    def _all_gather(self, output: Any, input: torch.Tensor, opts: Any) -> Work:
        group = self._device_groups.group(input.device)
        return group.all_gather(all_moved(output), moved(input), timeout_s=seconds(opts))

    @operation("allgather_into_tensor_coalesced_", 2, AllgatherOptions)
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        group = self._device_groups.group(inputs[0].device)
        limit_s = seconds(opts)
        work = _together(
            group,
            lambda output, input: group.all_gather(moved(output), moved(input), timeout_s=limit_s),
            outputs,
            inputs,
            check=lambda output, input: _check_gather(group, moved(output), moved(input)),
        )
        return self._in_flight(work, list(outputs), "_all_gather_base", shapes_of=inputs)

    @operation("_allgather_base_", 2, AllgatherOptions, single=True)
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> TorchWork:
        group = self._device_groups.group(input.device)
        work = group.all_gather(moved(output), moved(input), timeout_s=seconds(opts))
        return self._in_flight(work, [output], "_all_gather_base", shapes_of=[input])

    @operation("gather_", 2, GatherOptions)
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        group = self._device_groups.group(only(inputs).device)
        output = list(only(outputs, "list of outputs")) if outputs else None
        work = group.gather(
            moved(inputs[0]),
            None if output is None else all_moved(output),
            0 if opts is None else opts.rootRank,
            timeout_s=seconds(opts),
        )
        return self._in_flight(work, output or [], "gather", shapes_of=inputs)

    @operation("gather_into_tensor_", 2, GatherOptions, single=True)
    def gather_single(self, output: Any, input: Any, opts: Any = None) -> TorchWork:
        group = self._device_groups.group(input.device)
        root = 0 if opts is None else opts.rootRank
        # Elsewhere torch passes an empty tensor.
        whole = moved(output) if group.rank == root else None
        work = group.gather(moved(input), whole, root, timeout_s=seconds(opts))
        return self._in_flight(work, [output], "gather", shapes_of=[input])

    @operation("scatter_", 2, ScatterOptions)
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        group = self._device_groups.group(only(outputs).device)
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
        group = self._device_groups.group(outputs[0].device)

        def check(output: torch.Tensor, input: Any) -> None:
            own = group._checked(output.data, "output", True)
            group._checked_op("reduce_scatter", op, factor, own)
            group._parts("reduce_scatter", input, "input", own, "output", None)

        work = _together(
            group,
            lambda output, input: group.reduce_scatter(
                output.data, input, op, factor=factor, timeout_s=limit_s
            ),
            outputs,
            inputs,
            check=check,
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
        group = self._device_groups.group(output.device)
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
        group = self._device_groups.group(outputs[0].device)
        work = group.all_to_all(all_moved(outputs), all_moved(inputs), timeout_s=seconds(opts))
        return self._in_flight(work, list(outputs), "all_to_all")

    @operation("barrier", 0, BarrierOptions)
    def barrier(self, opts: Any = None) -> TorchWork:
        """A barrier on the GPU that `opts` names, or on the host."""
        device = getattr(opts, "device", None)
        if device is None or device.type != "cuda":
            device = torch.device("cpu")
        work = self._device_groups.group(device).barrier(timeout_s=seconds(opts))
        return self._in_flight(work, [], "barrier")

    @operation("send", 1, None, ("dst", "tag"))
    def send(self, tensors: Any, dst: int, tag: int, opts: Any = None) -> TorchWork:
        group = self._device_groups.group(only(tensors).device)
        work = group.send(moved(tensors[0]), dst, _checked_tag(tag))
        return self._in_flight(work, tensors, "send")

    @operation("recv_", 1, None, ("src", "tag"))
    def recv(self, tensors: Any, src: int, tag: int, opts: Any = None) -> TorchWork:
        group = self._device_groups.group(only(tensors).device)
        work = group.recv(moved(tensors[0]), src, _checked_tag(tag))
        return self._in_flight(work, tensors, "recv")

    @operation("recv_any_source_", 1, None, ("tag",))
    def recv_anysource(self, tensors: Any, tag: int, opts: Any = None) -> TorchWork:
        group = self._device_groups.group(only(tensors).device)
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
        limit_s = group_timeout_s(timeout, self.group.timeout_s)
        monitored_barrier(self.group, limit_s, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = self._device_groups.group(torch.device(device)).coalesce()

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
        name, ranks = f"{self.profiling_name}:{name}", self.group.ranks
        return TorchWork(work, outputs, name, after, shapes_of, ranks=ranks)

    # -- identity --------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    _get_backend_name = name = getBackendName

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    rank, size = getRank, getSize

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        types = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in types]

    def _get_backend(self, device: torch.device) -> ChoruslineProcessGroup:
        # A build of torch for CUDA asks for its accelerator where there is none, too.
        if device.type not in [one.type for one in self._device_types]:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def get_group_store(self) -> Any:
        return self._torch_store

    def _get_sequence_number_for_group(self) -> int:
        return self._next_sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: this class counts from the start."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Do nothing: no works are pending in threads of C++."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = group_timeout_s(timeout, self._timeout_s)
        self._device_groups.set_timeout(self._timeout_s)

    _set_default_timeout = set_timeout

    # -- the end ---------------------------------------------------------------------------------

    def abort(self) -> None:
        """End the generation on all ranks: works in flight raise GroupAborted."""
        self._device_groups.abort("the process group was aborted")
        self._device_groups.close()

    def shutdown(self) -> None:
        self._device_groups.close()

    def get_error(self) -> Any:
        """What torch calls the error that ended the group; an abort by this rank is none."""
        failure = self.group.failure()
        if isinstance(failure, CollectiveTimeout):
            return ErrorType.TIMEOUT
        if failure is None or (isinstance(failure, GroupAborted) and failure.ranks == [self._rank]):
            return ErrorType.SUCCESS
        return ErrorType.REMOTE_ERROR

    def __repr__(self) -> str:
        over = "no members" if isinstance(self._device_groups, Unconnected) else repr(self.group)
        return f"<ChoruslineProcessGroup {self._group_name!r} over {over}>"


def _together(
    group: Group,
    issue: Callable[..., Work],
    *arguments: Sequence[Any],
    check: Callable[..., None] | None = None,
) -> Work:
    """Call `issue` for each tuple of `arguments`, as one work.

    check: called for each of several tuples, before any is issued: the operations before one that
        is refused could not be taken back, and the caller would have no work of them. None: the
        caller has done it.
    """
    calls = list(zip(*arguments, strict=True))
    if check is not None and len(calls) > 1:
        for call in calls:
            check(*call)
    if len(calls) == 1 or group._block_here() is not None:
        return [issue(*call) for call in calls][-1]  # In an open block all return the block's work.
    with group.coalesce() as work:
        for call in calls:
            issue(*call)
    return work


def _check_gather(group: Group, output: Any, input: torch.Tensor) -> None:
    own = group._checked(input, "input", False)
    group._parts("all_gather", output, "output", own, "input", [])


def _checked_tag(tag: int) -> int:
    if not 0 <= tag <= _MAX_TAG:
        raise ValueError(f"tag must be in [0, {_MAX_TAG}], got {tag}")
    return tag
