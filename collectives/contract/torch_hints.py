"""What a caller writes who is used to torch.distributed, and what to write here instead.

Python's TypeError for an unknown argument names the argument and no remedy. Functions with the
decorators of this file say in it what to write. The texts are looked up only when a call has
failed; until then the decorator `tensor_operation` costs nothing beside leaving torch's modes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from .modes import in_a_mode, modes_left, refuse_fake_mode

_P = ParamSpec("_P")
_T = TypeVar("_T")

TOO_MANY = "_"
"""The name of the text for positional arguments that a function does not take."""

TOO_FEW = "-"
"""The name of the text for a call that leaves out an argument that is needed."""

_OF_OPERATIONS = {
    "async_op": "every operation returns a Work at once; wait() for it, or await it",
    "group": "the operation is a method of its group, so call it on that group",
    "timeout": "write timeout_s=, in seconds",
    "group_src": "write src= or root=, which count the ranks of this group",
    "group_dst": "write dst=, which counts the ranks of this group",
    TOO_MANY: (
        "the arguments after those are keyword-only. This is a method of its group, and every "
        "operation returns a Work, so there are no arguments group and async_op"
    ),
}

_COALESCED = (
    "write `with group.coalesce() as work:`, the operations in the block, and work.wait() after it"
)

_METHODS = {
    "isend": "send() returns a Work at once; wait() for it, or await it",
    "irecv": "recv() returns a Work at once; wait() for it, or await it",
    "batch_isend_irecv": (
        "write `with group.coalesce() as work:`, send() and recv() in the block, and work.wait() "
        "after it"
    ),
    "all_gather_into_tensor": "write all_gather(output, input), which takes a tensor or a list",
    "all_gather_single": "write all_gather(output, input), which takes a tensor or a list",
    "gather_into_tensor": "write gather(tensor, output, dst), which takes a tensor or a list",
    "gather_single": "write gather(tensor, output, dst), which takes a tensor or a list",
    "reduce_scatter_tensor": "write reduce_scatter(output, input), which takes a tensor or a list",
    "reduce_scatter_single": "write reduce_scatter(output, input), which takes a tensor or a list",
    "all_to_all_single": "write all_to_all(output, input), which takes tensors or lists",
    "allreduce": (
        "write all_reduce(tensor). The functions of torch.distributed take process groups of "
        "torch, which ctx.init_torch_distributed() makes, and not a chorusline Group"
    ),
    "get_rank": "write rank",
    "get_world_size": "write size",
    "world_size": "write size",
    "get_backend": "write backend",
    "get_backend_config": "write backend",
    "get_backend_impl": "write backend",
    "set_timeout": "write timeout_s=, in Group.create or in the operation",
    "is_initialized": "a Group is connected as soon as it is made; describe().is_open says whether "
    "it still is",
    "get_global_rank": "write global_rank(group_rank)",
    "get_group_rank": "write group_rank(global_rank)",
    "get_process_group_ranks": "write ranks",
    "new_subgroups": "write split(rank // number_of_ranks_in_each)",
    "new_subgroups_by_enumeration": "write new_group(ranks) for each of the lists",
    "split_group": "write split(color), or new_group(ranks)",
    "shrink_group": "write new_group(ranks), with the ranks that stay",
    "destroy_process_group": "write close()",
    "abort_process_group": "write abort(reason)",
    "all_reduce_coalesced": _COALESCED,
    "all_gather_coalesced": _COALESCED,
    "record_comm": "the last operations are always recorded: write flight_recorder",
}
"""By name of torch.distributed, what a Group has instead."""

_DOCTOR = "`chorusline doctor` shows what a machine has"

_BY_STRING = "name a backend by its string; register_backend(name, factory, devices) adds one"

_WORLD = "ctx.group has all ranks; new_group(ranks) returns None on a rank that is not among them"

_ERRORS = "catch CollectiveError, the root of the errors of collectives"

_OF_TORCH = (
    "chorusline has none of its own; call ctx.init_torch_distributed(), and use that of torch"
)

_FUNCTIONS = {
    "get_rank": "write ctx.rank in a train function, or group.rank",
    "get_world_size": "write ctx.world_size in a train function, or group.size",
    "get_backend": "write ctx.group.backend in a train function, or group.backend",
    "is_initialized": "in a train function ctx.group is always there; elsewhere, a Group is "
    "connected as soon as Group.create has returned it",
    "is_available": "importing chorusline is enough",
    "is_nccl_available": _DOCTOR,
    "is_backend_available": _DOCTOR,
    "is_gloo_available": f"Gloo is always there; {_DOCTOR}",
    **{
        f"is_{name.lower()}_available": f"there is no {name} backend; {_DOCTOR}"
        for name in ("MPI", "UCC", "XCCL")
    },
    "is_torchelastic_launched": (
        "there is no such launcher; a Session runs a function on its ranks, and passes it a "
        "Context as the first argument"
    ),
    "Backend": _BY_STRING,
    "BackendConfig": _BY_STRING,
    "get_default_backend_for_device": "a Group takes NCCL for GPUs, and on CPUs shared memory or "
    "Gloo, by where its ranks are; write group.backend",
    "get_node_local_rank": "write ctx.local_rank in a train function",
    "get_pg_count": "a group is an object, and no list of them is kept",
    "supports_complex": "what a backend lacks is an UnsupportedOperation, before anything is sent",
    "default_pg_timeout": "write timeout_s=, of the Session or of Group.create",
    "group": _WORLD,
    "GroupMember": _WORLD,
    "rendezvous": "write store_from_url(url), which also gives the rank and the number of ranks",
    "register_rendezvous_handler": "derive a class from Store, and write Group.create(store, rank, "
    "size)",
    "TCPStore": "a session has a store that outlives its ranks; without one, write "
    "store_from_url('tcp://host:port', rank, size)",
    "breakpoint": "a rank has no terminal; snapshot() of the session shows where each rank is",
    "DeviceMesh": _OF_TORCH,
    "init_device_mesh": _OF_TORCH,
    "DTensor": _OF_TORCH,
    "fully_shard": _OF_TORCH,
    "FSDPModule": _OF_TORCH,
    "FullyShardedDataParallel": _OF_TORCH,
    "DistError": _ERRORS,
    "DistBackendError": _ERRORS,
    "DistNetworkError": _ERRORS,
    "DistStoreError": "catch StoreTimeout or StoreLost",
    "BuiltinCommHookType": "write model.register_comm_hook(None, hook), with a hook of "
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "reduce_op": "write ReduceOp",
    "spawn": "write cl.run(function, num_workers=4), which calls function(ctx) on every rank",
    "launch": "write `chorusline run --workers 4 script.py`, as with torchrun",
    "init_process_group": "a session connects its ranks (ctx.group); without one, write "
    "Group.create(store, rank, size) or Group.from_url('env://')",
    "destroy_process_group": "a session closes its group; write group.close() for your own group",
    "new_group": "write ctx.group.new_group(ranks)",
    "P2POp": _METHODS["batch_isend_irecv"],
    "DistributedSampler": (
        "write ctx.shard(dataset, batch_size, epoch=epoch), which gives every sample to one rank"
    ),
}
"""By name of torch.distributed, what to write for a function of the module."""

_MULTI_GPU = "_multigpu"
"""The end of five names that torch has removed: operations on several GPUs of one process."""

_OPTIONS, _PROCESS_GROUP = "Options", "ProcessGroup"
"""The end of the names of torch's records of what an operation is given; the beginning of those of
its classes of groups."""

_ONE_GPU = "a rank has one GPU; start a rank for each GPU, and write"


_OF_A_WORK = {
    "is_success": "write is_completed() and error() is None",
    "exception": "write error()",
    "synchronize": "write wait()",
}
"""By name of torch's Work, what a Work has instead."""


def instead_of_attribute(name: str) -> str:
    """The end of an AttributeError for an attribute that a Work does not have; it may be empty."""
    return f": {_OF_A_WORK[name]}" if name in _OF_A_WORK else ""


def instead_of_method(name: str) -> str:
    """The end of an AttributeError for an attribute that a Group does not have; it may be empty."""
    if name.endswith(_MULTI_GPU):
        return f": {_ONE_GPU} {name.removesuffix(_MULTI_GPU)}(…)"
    text = _METHODS.get(name) or _FUNCTIONS.get(name)
    return f": {text}" if text else ""


def instead_of_function(name: str, is_method: bool) -> str:
    """The same for the module chorusline. is_method: whether a Group has such a method."""
    if name in _FUNCTIONS:
        return f": {_FUNCTIONS[name]}"
    if name.endswith(_OPTIONS):
        return ": an operation takes its options as arguments, such as timeout_s="
    if name.startswith(_PROCESS_GROUP):
        return ": write Group.create(store, rank, size), or ctx.group in a train function"
    if name.endswith(_MULTI_GPU):
        return f": {_ONE_GPU} ctx.group.{name.removesuffix(_MULTI_GPU)}(…)"
    if name in _METHODS:
        return f": of a group (ctx.group in a train function) {_METHODS[name]}"
    if is_method:
        return f": it is a method of a group; write ctx.group.{name}(...) in a train function"
    return ""


def says(**instead: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator whose function says what to write in place of an argument that it does not have.

    instead: by the name of the argument, what to write; TOO_MANY for positional arguments.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                _explain(error, function, kwargs, instead)
                raise

        return run

    return decorate


def object_operation(**instead: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """`says` for an operation on objects."""
    return says(**_OF_OPERATIONS | instead)


def tensor_operation(**instead: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """`says` for an operation on tensors, which runs outside of torch's modes (modes.py) as well:
    one wrapper, because each adds to the time of every operation."""
    instead = _OF_OPERATIONS | instead

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                if not in_a_mode():
                    return function(*args, **kwargs)
                refuse_fake_mode()
                with modes_left():
                    return function(*args, **kwargs)
            except TypeError as error:
                _explain(error, function, kwargs, instead)
                raise

        return run

    return decorate


def _explain(
    error: TypeError,
    function: Callable[..., object],
    given: Mapping[str, object],
    instead: Mapping[str, str],
) -> None:
    """Raise a TypeError that says what to write, if the call itself has failed and there is a text.
    given: the keyword arguments of the call."""
    trace = error.__traceback__
    if trace is None or trace.tb_next is not None:
        return  # The function was entered, and has raised the error itself.
    path = function.__qualname__.split(".")
    name = path[-2] if path[-1] == "__init__" else path[-1]
    known = inspect.signature(function).parameters
    for argument in given:
        if argument not in known and argument in instead:
            raise TypeError(f"{name}() has no argument {argument!r}: {instead[argument]}") from None
    # Python's own error: only its text tells what was wrong with the call.
    if TOO_MANY in instead and "positional argument" in str(error) and "given" in str(error):
        raise TypeError(f"{error}: {instead[TOO_MANY]}") from None
    if TOO_FEW in instead and "missing" in str(error) and "required" in str(error):
        raise TypeError(f"{error}: {instead[TOO_FEW]}") from None
