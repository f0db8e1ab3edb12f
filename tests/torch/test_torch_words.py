"""What people type who come from torch: it works, or an error says what to write."""

import copy
import inspect
import re
import warnings
from operator import attrgetter
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, optim
from torch.distributed.algorithms import join
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler

import chorusline as cl


class Here:
    """What the calls below are made on, on one rank."""

    def __init__(self, group):
        self.group = group
        self.net = torch.nn.Linear(3, 2)
        self.model = cl.DistributedDataParallel(torch.nn.Linear(3, 2), group)
        self.zero = cl.ZeroRedundancyOptimizer(self.model, torch.optim.AdamW)
        self.plain = torch.optim.AdamW(self.net.parameters())
        self.one, self.two = torch.ones(1), torch.ones(1)

    def backward_in_double(self):
        model = cl.DistributedDataParallel(torch.nn.Linear(3, 2), self.group)
        model.module.double()
        model(torch.ones(1, 3).double()).sum().backward()


ADAMW = torch.optim.AdamW

TYPED = {
    # Collectives.
    "async_op": (lambda h: h.group.all_reduce(h.one, async_op=True), "returns a Work at once"),
    "group": (lambda h: h.group.all_reduce(h.one, group=None), "call it on that group"),
    "timeout": (lambda h: h.group.barrier(timeout=3), "write timeout_s=, in seconds"),
    "positions": (
        lambda h: h.group.all_reduce(h.one, cl.ReduceOp.SUM, None, True),
        "no arguments group and async_op",
    ),
    "torch's op": (
        lambda h: h.group.all_reduce(h.one, dist.ReduceOp.AVG),
        "that is torch's: write chorusline.ReduceOp.AVG",
    ),
    "torch's op, made": (
        lambda h: h.group.reduce_scatter(h.one, h.two, dist.ReduceOp(dist.ReduceOp.SUM)),
        "op must be a ReduceOp",
    ),
    "torch's function": (
        lambda h: dist.all_reduce(h.one, group=h.group),
        "which ctx.init_torch_distributed() makes",
    ),
    "broadcast src": (lambda h: h.group.broadcast(h.one, src=0), "write root="),
    "broadcast objects": (lambda h: h.group.broadcast_object_list([1], src=0), "write root="),
    "gather object": (lambda h: h.group.gather_object(1, dst=0), "write root="),
    "gather object by position": (
        lambda h: h.group.gather_object(1, [None], 0),
        "write gather_object(value, root); the list of all values is the result of the Work",
    ),
    "all_gather_object by position": (
        lambda h: h.group.all_gather_object([None], 1),
        "write all_gather_object(value); the list of all values is the result of the Work",
    ),
    "scatter objects by position": (
        lambda h: h.group.scatter_object_list([None], [1], 0),
        "write scatter_object_list(objects, root); this rank's object is the result of the Work",
    ),
    "reduce root": (lambda h: h.group.reduce(h.one, root=0), "write dst="),
    "gather_list": (lambda h: h.group.gather(h.one, gather_list=[h.two]), "write output="),
    "scatter_list": (lambda h: h.group.scatter(h.one, scatter_list=[h.two]), "write input="),
    "tensor_list": (
        lambda h: h.group.all_gather(tensor_list=[h.one], tensor=h.two),
        "write output=",
    ),
    "device_ids of a barrier": (lambda h: h.group.barrier(device_ids=[0]), "leave it out"),
    "wait": (lambda h: h.group.all_reduce(h.one).wait(3.0), "Pass timeout_s=, in seconds"),
    "isend": (lambda h: h.group.isend(h.one, 0), "send() returns a Work at once"),
    "irecv": (lambda h: h.group.irecv(h.one, 0), "recv() returns a Work at once"),
    "tensor form": (
        lambda h: h.group.all_gather_into_tensor(h.one, h.two),
        "write all_gather(output, input)",
    ),
    "rank of a group": (lambda h: h.group.get_rank(), "write rank"),
    "spawn of a group": (lambda h: h.group.spawn(print), "write cl.run(function, num_workers=4)"),
    "launch of a group": (lambda h: h.group.launch(), "chorusline run --workers 4 script.py"),
    "a typing error": (lambda h: h.group.al_reduce(h.one), "no attribute 'al_reduce'"),
    "new_group": (lambda h: h.group.new_group([0], timeout=3), "pass timeout_s= to an operation"),
    "new_group of": (lambda h: h.group.new_group([0], backend="gloo"), "Group.create(store"),
    "new_group of all": (lambda h: h.group.new_group(), "write new_group(range(group.size))"),
    "monitored_barrier": (lambda h: h.group.monitored_barrier(timeout=3), "write timeout_s="),
    # Sessions.
    "world_size of a session": (lambda h: cl.Session(world_size=2), "write num_workers="),
    "nproc_per_node": (lambda h: cl.Session(nproc_per_node=2), "write num_workers="),
    "scaling_config": (lambda h: cl.Session(scaling_config=None), "are arguments of the session"),
    # The module.
    "get_backend": (lambda h: cl.get_backend(), "ctx.group.backend"),
    "is_initialized": (lambda h: cl.is_initialized(), "ctx.group is always there"),
    "init_process_group": (lambda h: cl.init_process_group("gloo"), "Group.from_url('env://')"),
    "function": (lambda h: cl.all_reduce(h.one), "write ctx.group.all_reduce(...)"),
    "isend of the module": (lambda h: cl.isend(h.one, 0), "send() returns a Work at once"),
    "spawn": (lambda h: cl.spawn(print, nprocs=2), "write cl.run(function, num_workers=4)"),
    "launch": (lambda h: cl.launch("script.py"), "chorusline run --workers 4 script.py"),
    "is_nccl_available": (lambda h: cl.is_nccl_available(), "chorusline doctor"),
    "Backend": (lambda h: cl.Backend("gloo"), "register_backend(name, factory, devices)"),
    "sampler of the module": (lambda h: cl.DistributedSampler([1]), "write ctx.shard("),
    # Models.
    "process_group": (
        lambda h: cl.DistributedDataParallel(h.net, process_group=h.group),
        "DistributedDataParallel() has no argument 'process_group': write group=",
    ),
    "device_ids": (lambda h: cl.DistributedDataParallel(h.net, [0]), "leave device_ids out"),
    "no module": (
        lambda h: cl.DistributedDataParallel(h.net.parameters(), h.group),
        "module must be a torch.nn.Module, got generator",
    ),
    "many positions": (
        lambda h: cl.DistributedDataParallel(h.net, h.group, None),
        "pass the arguments after the group by name",
    ),
    "pure": (
        lambda h: cl.PureDistributedDataParallel(h.net, process_group=h.group),
        "write group=",
    ),
    "conversion": (
        lambda h: cl.SyncBatchNorm.convert_sync_batchnorm(h.net, group=h.group),
        "write process_group=",
    ),
    "deepcopy": (lambda h: copy.deepcopy(h.model), "copy.deepcopy(model.module)"),
    "average": (lambda h: AveragedModel(h.model), "AveragedModel(model.module)"),
    "double": (lambda h: h.model.double(), "DistributedDataParallel(module.double())"),
    "double inside": (lambda h: h.backward_in_double(), "convert the module before"),
    "attribute process_group": (lambda h: h.model.process_group, "'process_group': write group"),
    "join_process_group of a model": (lambda h: h.model.join_process_group, "write join_group"),
    "device of a model": (lambda h: h.model.device, "write group.device"),
    "_set_static_graph": (lambda h: h.model._set_static_graph(), "static_graph=True"),
    "logging data": (lambda h: h.model._get_ddp_logging_data(), "write statistics()"),
    "builtin hook": (
        lambda h: h.model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
        "write register_comm_hook(None, hook)",
    ),
    "of the module": (lambda h: h.model.in_features, "write model.module.in_features"),
    "of no module": (lambda h: h.model.featurs, "has no attribute 'featurs'"),
    "is_success": (
        lambda h: h.group.barrier().is_success(),
        "write is_completed() and error() is None",
    ),
    "exception of a work": (lambda h: h.group.barrier().exception(), "write error()"),
    "size of a FileStore": (lambda h: cl.FileStore("unused", 2), "leave out their number"),
    # Optimizers.
    "instance": (
        lambda h: cl.ZeroRedundancyOptimizer(h.model, h.plain),
        "optimizer_class must be a class, got an optimizer",
    ),
    "function as class": (
        lambda h: cl.ZeroRedundancyOptimizer(h.model, lambda p: None),
        "such as torch.optim.AdamW",
    ),
    "unwrapped": (
        lambda h: cl.ZeroRedundancyOptimizer(h.net, ADAMW, group=h.group),
        "ZeroRedundancyOptimizer(DistributedDataParallel(module), ...)",
    ),
    "learning_rate": (
        lambda h: cl.ZeroRedundancyOptimizer(h.model, ADAMW, learning_rate=0.1),
        "AdamW has no option 'learning_rate'; write lr=",
    ),
    "process_group of zero": (
        lambda h: cl.ZeroRedundancyOptimizer(h.model, ADAMW, process_group=h.group),
        "write group=",
    ),
    "world_size of zero": (lambda h: h.zero.world_size, "write group.size"),
    "rank of zero": (lambda h: h.zero.rank, "write group.rank"),
    "optim of zero": (lambda h: h.zero.optim, "write shard_optimizer"),
    "overlap_with_ddp": (
        lambda h: cl.ZeroRedundancyOptimizer(h.model, ADAMW, overlap_with_ddp=True),
        "leave it out: step() comes after the backward pass",
    ),
    "hook_with_zero_step": (
        lambda h: hook_with_zero_step(allreduce_hook, h.model, h.zero),
        "Leave the hook out",
    ),
    "hook_with_zero_step_interleaved": (
        lambda h: hook_with_zero_step_interleaved(allreduce_hook, h.model, h.zero),
        "Leave the hook out",
    ),
    "step": (lambda h: h.zero.step(scale=2.0), "Set options in optimizer.param_groups"),
    "group of zero by position": (
        lambda h: cl.ZeroRedundancyOptimizer(h.model, ADAMW, h.group),
        "pass the arguments after optimizer_class by name",
    ),
    "scaler of nothing": (lambda h: cl.GradScaler(enabled=True), "write GradScaler(optimizer)"),
    "scaler": (lambda h: cl.GradScaler("cpu"), "write GradScaler(optimizer)"),
    # Join.
    "plain optimizer": (lambda h: cl.Join([h.model, h.plain]), "step_along=[optimizer]"),
    "plain module": (lambda h: cl.Join([h.net]), "Join([DistributedDataParallel(module)])"),
    "schedule": (
        lambda h: cl.Join([h.model, torch.optim.lr_scheduler.LinearLR(h.plain)]),
        "belong in step_along=[...]",
    ),
    "step_along": (
        lambda h: cl.Join([h.model], step_along=h.plain),
        "step_along=[optimizer, schedule]",
    ),
    "no list": (lambda h: cl.Join(h.model), "as in Join([model])"),
}
"""By name, a call on `Here` and a part of the error, which says what to write."""

for _one in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"):
    _wanted = attrgetter(f"{_one}_multigpu")
    TYPED |= {
        f"{_one} on several GPUs": (lambda h, get=_wanted: get(h.group), f"GPU, and write {_one}("),
        f"the same, of the module: {_one}": (
            lambda h, get=_wanted: get(cl),
            f"GPU, and write ctx.group.{_one}(",
        ),
    }


def answers(group):
    here, told = Here(group), {}
    for name, (call, _) in TYPED.items():
        try:
            call(here)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            told[name] = str(error)
    here.model.float().to("cpu").train()  # These change nothing, and work.
    here.model(torch.ones(2, 3)).sum().backward()
    here.zero.step()
    group.all_reduce(here.one).wait()  # None of it has hurt the group.
    return told


def test_what_torch_users_type_is_answered_with_what_to_write(ranks_of):
    told = ranks_of(1).run(answers)[0]
    for name, (_, text) in TYPED.items():
        assert name in told, f"{name}: was taken"
        assert text in told[name], f"{name}: {told[name]}"


def without_self(function):
    return {*inspect.signature(function).parameters} - {"self", "kwargs", "defaults"}


@pytest.mark.parametrize(
    "ours",
    [
        *(cl.Join, cl.SyncBatchNorm, cl.ZeroRedundancyOptimizer, cl.PostLocalSGDState),
        *(cl.PostLocalSGDOptimizer, cl.PeriodicModelAverager, cl.HierarchicalModelAverager),
    ],
    ids=lambda one: one.__name__,
)
def test_a_constructor_takes_each_argument_of_torchs_own(ours):
    places = [torch.nn, join, optim, averagers, hierarchical_model_averager, post_localSGD_hook]
    (torchs,) = (getattr(place, ours.__name__) for place in places if hasattr(place, ours.__name__))
    missing = without_self(torchs) - without_self(ours)
    answered = (
        {"process_group", "overlap_with_ddp"} if ours is cl.ZeroRedundancyOptimizer else set()
    )
    assert missing == answered


OF_TORCH_ALONE = {
    *("GroupName", "Logger", "QueueEmptyError", "RankType", "Reducer", "log", "timedelta"),
}
"""Names that torch.distributed lists, and that no script writes."""


def test_each_name_of_torch_distributed_is_here_or_is_answered() -> None:
    with warnings.catch_warnings(action="ignore"):  # torch's reduce_op is out of date.
        listed = {name for name in dir(dist) if not name.startswith("_")}
        listed |= {*distributed_c10d.__all__}
        names = {name for name in listed if not isinstance(getattr(dist, name), ModuleType)}
    assert {"all_reduce", "TCPStore", "is_backend_available", "get_node_local_rank"} < names
    unanswered = []
    for name in sorted(names - OF_TORCH_ALONE):
        try:
            getattr(cl, name)
        except AttributeError as error:
            if not re.fullmatch(r"module 'chorusline' has no attribute '\w+': .+", str(error)):
                unanswered.append(name)
    assert not unanswered


IN_FUNCTIONS = {
    "loader": (lambda ctx: ctx.shard(DataLoader([1, 2]), 1), "ctx.shard(loader.dataset"),
}


@pytest.mark.parametrize("name", IN_FUNCTIONS)
async def test_what_is_typed_in_a_train_function_is_answered_too(session, name):
    call, text = IN_FUNCTIONS[name]
    with pytest.raises(TypeError) as raised:
        await session.run(lambda ctx: call(ctx))
    assert text in str(raised.value)


@pytest.mark.parametrize("is_coroutine", [False, True])
async def test_classes_of_torch_distributed_name_the_call_that_they_need(session, is_coroutine):
    def sample(ctx):
        DistributedSampler([1, 2])

    async def sample_async(ctx):
        DistributedSampler([1, 2])

    with pytest.raises(ValueError, match="Default process group") as raised:
        await session.run(sample_async if is_coroutine else sample)
    notes = " ".join(raised.value.__notes__)
    assert "ctx.shard(dataset" in notes and "ctx.init_torch_distributed() first" in notes
