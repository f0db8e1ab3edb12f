"""Lightning's Trainer inside a session: each rank runs it in its train function.

    def train(ctx):
        trainer = Trainer(strategy="chorusline", accelerator="cpu", devices=1, max_epochs=3)
        trainer.fit(module, loader)

The session is the cluster environment: it has started the processes and numbered them.
`chorusline.DistributedDataParallel` reduces gradients, and a `ZeroRedundancyOptimizer` from
`configure_optimizers` shards its step. All other collectives that Lightning asks of a strategy run
on the session's group, not on torch.distributed, on which Lightning would send something before
every batch.

Importing this file registers the name. The program imports it before a train function starts if
Lightning is imported by then (program.py), and so does `chorusline.ChoruslineStrategy`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchmetrics
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics.metric import jit_distributed_available

from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object

from ..averaging.model_averaging import PeriodicModelAverager
from ..averaging.post_local_sgd import PostLocalSGDState
from ..data_parallel.distributed_data_parallel import DistributedDataParallel, engine_of
from ..data_parallel.same_model import broadcast_tensors
from ..data_parallel.sync_batch_norm import SyncBatchNorm
from ..process.running import RunningContext, current
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from .epochs import Epochs

NAME = "chorusline"

_INSTEAD = {
    "ddp_comm_hook": "write comm_hook=",
    "ddp_comm_state": "write comm_state=",
    "ddp_comm_wrapper": "write comm_wrapper=",
    "process_group_backend": "it uses the group of the session; leave it out",
    "process_group": "it uses the group of the session; leave it out",
    "cluster_environment": "the session is the cluster; leave it out",
    "timeout": "write Session(timeout_s=…)",
    "start_method": "the session has started the ranks; leave it out",
}
"""By argument of Lightning's DDPStrategy, what to write."""


class ChoruslineEnvironment(ClusterEnvironment):
    """The ranks of a running train function, for Lightning."""

    def __init__(self, context: RunningContext) -> None:
        self._context = context

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return ""  # The ranks have met already, and no process listens at an address.

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False  # Only the strategy makes this environment.

    def world_size(self) -> int:
        return self._context.world_size

    def global_rank(self) -> int:
        return self._context.rank

    def local_rank(self) -> int:
        return self._context.local_rank

    def node_rank(self) -> int:
        return self._context.node_rank

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass


class ChoruslineStrategy(ParallelStrategy):
    """`Trainer(strategy="chorusline")`, or an instance of this class with options.

    comm_hook, comm_state: registered on the DistributedDataParallel.
    comm_wrapper: wraps `comm_hook` before it is registered, as torch's fp16_compress_wrapper.
    model_averaging_period: with `post_localSGD_hook`, after how many steps parameters are averaged.
    divide_by_initial_world_size: as in `Join`, for epochs in which ranks have different numbers of
        batches.
    options: all others of `DistributedDataParallel` (`bucket_cap_mb`, `static_graph`,
        `mixed_precision`, …), and the plugins of Lightning's ParallelStrategy.

    `devices` and `num_nodes` of the Trainer have no effect: a rank has the device of its context.
    A DistributedSampler that Lightning inserts does not repeat samples to make numbers equal. Each
    sample counts once in an epoch of `fit`, `validate` and `test`, and ranks may get different
    numbers of batches (the limits of that: lightning/epochs.py).

    Raises RuntimeError outside a train function; ValueError for gradient_clip_val or
    model_averaging_period with a ZeroRedundancyOptimizer, and for the post-local SGD hook without
    model_averaging_period, or the other way round.
    """

    def __init__(
        self,
        *,
        comm_hook: Callable[[Any, Any], torch.futures.Future[Any]] | None = None,
        comm_state: object = None,
        comm_wrapper: Callable[[Any], Any] | None = None,
        model_averaging_period: int | None = None,
        divide_by_initial_world_size: bool = True,
        **options: Any,
    ) -> None:
        self.context = current()
        for name in options.keys() & _INSTEAD:
            raise TypeError(f"ChoruslineStrategy has no argument {name!r}: {_INSTEAD[name]}")
        is_local = isinstance(comm_state, PostLocalSGDState)
        if is_local != (model_averaging_period is not None):
            raise ValueError(
                "model_averaging_period and post-local SGD need each other: give "
                "comm_hook=post_localSGD_hook, comm_state=PostLocalSGDState(…), and after how many "
                "steps the models are averaged"
            )
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        self._options = {name: options.pop(name) for name in [*options] if name in known}
        super().__init__(cluster_environment=ChoruslineEnvironment(self.context), **options)
        self._comm_hook = comm_hook if comm_wrapper is None else comm_wrapper(comm_hook)
        self._comm_state = comm_state
        self._averages_every = model_averaging_period
        self._averager: PeriodicModelAverager | None = None  # None: models are not averaged
        self._divides_by_all = divide_by_initial_world_size
        self._epochs: Epochs | None = None  # None: outside of fit()
        self._inserts_sampler = False
        """Lightning has asked for the arguments of a sampler, whose loader has not come yet."""

    @property
    def group(self) -> Group:
        return self.context.group

    @property
    def root_device(self) -> torch.device:
        return self.context.device

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        self._inserts_sampler = True
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # -- the model -------------------------------------------------------------------------------

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        _synchronise_metrics(self.lightning_module)
        torchmetrics.Metric.sync = _sync_over_session  # type: ignore[assignment, method-assign]
        super().setup(trainer)
        # Lightning wraps the model, and makes optimizers, only to fit it.
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert isinstance(self.model, DistributedDataParallel)
        sharded = [one for one in self.optimizers if isinstance(one, ZeroRedundancyOptimizer)]
        if sharded and trainer.gradient_clip_val:
            raise ValueError(
                "gradient_clip_val clips the gradients of one rank, which under a "
                "ZeroRedundancyOptimizer are not the mean yet; give the optimizer max_norm="
                f"{trainer.gradient_clip_val} instead"
            )
        if self._averages_every is not None:
            if sharded:
                raise ValueError(
                    "model_averaging_period does not work with a ZeroRedundancyOptimizer, whose "
                    "ranks must have equal parameters; wrap it in PostLocalSGDOptimizer in "
                    "configure_optimizers, over a subgroup"
                )
            assert isinstance(self._comm_state, PostLocalSGDState)
            warmup_steps = self._comm_state.start_localSGD_iter
            self._averager = PeriodicModelAverager(self._averages_every, warmup_steps, self.group)
        self._epochs = Epochs(
            trainer, self.model, sharded, divide_by_initial_world_size=self._divides_by_all
        )

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        module = self.lightning_module
        assert module is not None
        if module.trainer.state.fn != TrainerFn.FITTING:
            state = [*model.parameters(), *model.buffers()]
            broadcast_tensors([tensor.detach() for tensor in state], 0, self.group)
            return model
        if self._layer_sync is not None:  # Trainer(sync_batchnorm=True) has set it.
            model = SyncBatchNorm.convert_sync_batchnorm(model)
        wrapped = DistributedDataParallel(model, self.group, **self._options)
        if self._comm_hook is not None:
            wrapped.register_comm_hook(self._comm_state, self._comm_hook)
        return wrapped

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        # In manual optimization the pass runs inside the model's forward, before that has outputs.
        assert self.lightning_module is not None and isinstance(self.model, DistributedDataParallel)
        if not self.lightning_module.automatic_optimization:
            self.model._begin_backward_at(closure_loss)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *more: Any, **named: Any
    ) -> Any:
        result = super().optimizer_step(optimizer, closure, *more, **named)
        self.set_world_ranks()  # A rank may have been lost in the step, and this one be rank 0 now.
        if self._averager is not None:
            self._averager.average_parameters(optimizer.param_groups)
        return result

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync():
            yield

    def teardown(self) -> None:
        torchmetrics.Metric.sync = _sync_of_torchmetrics  # type: ignore[method-assign]
        if self._epochs is not None:
            self._epochs.close()
            self._epochs = None
        if isinstance(self.model, DistributedDataParallel):
            engine_of(self.model).release()
            self.model = self.lightning_module
        super().teardown()

    # -- data ------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Keep a DistributedSampler that Lightning has inserted from repeating samples to make the
        ranks' numbers equal. After a loss, deal one of the user's to the ranks that are left.

        Raises RuntimeError for a user's sampler of another class that deals to the ranks of before.
        """
        is_inserted, self._inserts_sampler = self._inserts_sampler, False
        dealt_as = self.world_size, self.global_rank
        sampler = _sampler_of(dataloader)
        if sampler is None:
            pass
        elif is_inserted:
            if not sampler.drop_last:
                total = len(sampler.dataset)  # type: ignore[arg-type]
                sampler.total_size = total
                sampler.num_samples = len(range(sampler.rank, total, sampler.num_replicas))
        elif (sampler.num_replicas, sampler.rank) in self.context.dealt_as - {dealt_as}:
            if type(sampler) is not DistributedSampler:
                raise RuntimeError(
                    f"a {type(sampler).__name__} deals samples to {sampler.num_replicas} ranks, of "
                    "which some were lost: make it in train_dataloader() of the module, or "
                    "continue with ckpt_path= from the last checkpoint"
                )
            options = sampler.shuffle, sampler.seed, sampler.drop_last
            sampler.__init__(sampler.dataset, *dealt_as, *options)  # type: ignore[misc]
        self.context.dealt_as.add(dealt_as)
        return dataloader

    # -- collectives -----------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        self.group.barrier().wait()

    def _group_of(self, group: Any) -> Group:
        """For a collective that was given `group`. Raises TypeError for a subgroup of torch."""
        # LightningModule.all_gather gives torch's default group where there is one.
        if group is None or group is torch.distributed.group.WORLD:
            return self.group
        if not isinstance(group, Group):
            raise TypeError(
                f"group must be a chorusline Group, got {type(group).__name__}: leave it out for "
                "all ranks, or make one with ctx.group.new_group([…])"
            )
        return group

    # Lightning evaluates in inference mode, and a thread that runs an operation outside of that
    # mode cannot write to tensors that were made in it.

    @torch.inference_mode(False)
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.context.broadcast(obj, src)

    @torch.inference_mode(False)
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The reduced tensor; a value of another type comes back as it is. reduce_op: "mean",
        "sum" and so on, or a ReduceOp of torch or of Chorusline."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        group = self._group_of(group)
        op = _op(reduce_op)
        if op is ReduceOp.AVG and not tensor.is_floating_point():
            # Lightning divides the mean of sums by the mean of counts, which must not be truncated.
            tensor = tensor.to(torch.float64)
        total = tensor.detach().to(self.root_device, copy=True).contiguous()
        group.all_reduce(total, op).wait_on_host()
        return total.to(tensor.device)

    @torch.inference_mode(False)
    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """(world_size, *shape); with sync_grads, gradients flow back to the ranks."""
        group = self._group_of(group)
        if sync_grads:
            gathered: torch.Tensor = _AllGather.apply(tensor, group)
            return gathered
        return _gathered(tensor.detach(), group)


def _sampler_of(dataloader: object) -> DistributedSampler[Any] | None:
    """That of a DataLoader. A BatchSampler of the user's own class has it inside."""
    if isinstance(dataloader, DataLoader):
        for holder in (dataloader, dataloader.batch_sampler):
            if isinstance(sampler := getattr(holder, "sampler", None), DistributedSampler):
                return sampler
    return None


class _AllGather(torch.autograd.Function):
    """all_gather whose backward pass sums the gradients of a rank's part over all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].contiguous().clone()
        ctx.group.all_reduce(total).wait()
        return total[ctx.group.rank], None


def _gathered(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    mine = tensor.to(group.device).contiguous()
    everybody = mine.new_empty(group.size * mine.numel())
    group.all_gather(everybody, mine.view(-1)).wait_on_host()
    return everybody.view(group.size, *mine.shape).to(tensor.device)


def _op(name: Any) -> ReduceOp:
    if name is None:
        return ReduceOp.AVG
    if isinstance(name, ReduceOp):
        return name
    if not isinstance(name, str):
        name = str(name)  # a torch ReduceOp: "RedOpType.SUM"
    word = name.rpartition(".")[2].upper()
    return ReduceOp.AVG if word == "MEAN" else ReduceOp[word]


# -- metrics of torchmetrics ---------------------------------------------------------------------


def _synchronise_metrics(module: torch.nn.Module | None) -> None:
    """Make the module's metrics gather over the session; by default they use torch.distributed.
    Metrics that have a function of their own keep it."""
    for metric in module.modules() if module is not None else ():
        # Metrics of the user's own synchronisation are left alone.
        if isinstance(metric, torchmetrics.Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = _gather_from_all
            metric.distributed_available_fn = _in_a_session


_sync_of_torchmetrics = torchmetrics.Metric.sync


def _sync_over_session(
    metric: torchmetrics.Metric,
    dist_sync_fn: Callable[..., Any] | None = None,
    process_group: Any = None,
    should_sync: bool = True,
    distributed_available: Callable[[], bool] | None = None,
) -> None:
    """`Metric.sync` while a strategy is set up: metrics outside of the module, such as those of
    callbacks, gather over the session as well."""
    if dist_sync_fn is None and metric.distributed_available_fn is jit_distributed_available:
        dist_sync_fn = _gather_from_all
        distributed_available = distributed_available or _in_a_session
    _sync_of_torchmetrics(metric, dist_sync_fn, process_group, should_sync, distributed_available)


def _in_a_session() -> bool:
    try:
        return current().world_size > 1
    except RuntimeError:
        return False  # The module is used outside a session, and its metrics are local.


@torch.inference_mode(False)
def _gather_from_all(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all ranks, by rank; shapes may differ."""
    everybody = current().group
    shapes = all_gather_object(everybody, tuple(tensor.shape))
    sizes = [math.prod(shape) for shape in shapes]
    padded = tensor.new_zeros(max(*sizes, 1))
    padded[: tensor.numel()] = tensor.reshape(-1)
    rows = _gathered(padded, everybody)
    return [row[:size].view(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]


if NAME not in StrategyRegistry:
    StrategyRegistry.register(
        NAME, ChoruslineStrategy, description="Data parallelism over a session of chorusline"
    )
    for finds in (False, True):
        StrategyRegistry.register(
            f"{NAME}_find_unused_parameters_{finds}".lower(),
            ChoruslineStrategy,
            description="The same: unused parameters need no flag",
            find_unused_parameters=finds,
        )
