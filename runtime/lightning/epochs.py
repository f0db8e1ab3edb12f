"""Epochs of Lightning's fit in which ranks have different numbers of batches.

Such an epoch runs inside a Join, which begins with the epoch and ends on each rank after its last
batch: after that batch's update of learning rates, before the epoch's update, validation and
checkpoints. There the rank shadows the steps of the other ranks, and all ranks leave the Join
together. What Lightning does with an optimizer step (clipping, counting, schedules per step) is
done with shadowed steps too. So all ranks have the same global step, the same learning rates, and
with a plain optimizer the same state.

Callbacks and hooks of the module are not called for shadowed steps, and nothing is logged in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer import call

from chorusline.collectives.objects.blocking import all_gather_object

from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..join.active import active_join
from ..join.join import Join
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer


class Epochs(Callback):
    """The Joins of one `fit` on one rank: a callback before the user's callbacks, until `close`."""

    def __init__(
        self,
        trainer: Any,
        model: DistributedDataParallel,
        sharded: Sequence[ZeroRedundancyOptimizer],
        *,
        divide_by_initial_world_size: bool,
    ) -> None:
        self._trainer = trainer
        self._model = model
        self._sharded = list(sharded)
        self._divides_by_all = divide_by_initial_world_size
        self._join: Join | None = None  # None: between two epochs
        trainer.callbacks.insert(0, self)
        self._loop = trainer.fit_loop.epoch_loop
        # Lightning has no hook between its two updates of learning rates, so replace the method.
        self._update_of_loop = self._loop.update_lr_schedulers
        self._loop.update_lr_schedulers = self._update_lr_schedulers

    def close(self) -> None:
        self._trainer.callbacks.remove(self)
        del self._loop.update_lr_schedulers

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        batches = all_gather_object(self._model.group, trainer.num_training_batches)
        # With equally many batches on all ranks no Join is needed. A loader without a length needs
        # one, since its number is unknown; the Join costs one empty step at the end.
        if len(set(batches)) == 1 and batches[0] != float("inf"):
            return
        self._check()
        self._join = Join(
            [self._model, *self._sharded],
            step_along=[self],
            skew_warning=None,
            divide_by_initial_world_size=self._divides_by_all,
        )
        self._join.__enter__()

    def _check(self) -> None:
        # A rank without data takes part in steps, and in nothing else that a batch does.
        trainer = self._trainer
        reason = None
        is_manual = not trainer.lightning_module.automatic_optimization
        if is_manual and (len(trainer.optimizers) != 1 or self._schedules):
            reason = (
                "manual optimization by several optimizers or with a schedule, whose steps a rank "
                "without data cannot know"
            )
        elif torch.distributed.is_initialized():
            reason = (
                "an initialised torch.distributed, over which Lightning communicates before every "
                "batch; do not call init_torch_distributed()"
            )
        elif getattr(trainer.precision_plugin, "scaler", None) is not None:
            reason = (
                "a GradScaler, which would decide differently on each rank; use "
                'precision="bf16-mixed"'
            )
        elif trainer.check_val_every_n_epoch is None or (
            trainer.val_check_batch not in (None, float("inf"))
            and trainer.val_check_batch < trainer.num_training_batches
        ):
            reason = (
                "validation inside the epoch, which ranks without data would miss; leave "
                "val_check_interval and check_val_every_n_epoch at their defaults"
            )
        elif any(config.interval == "step" and config.frequency != 1 for config in self._schedules):
            reason = "a schedule of every n-th step; give it interval step and frequency 1"
        if reason is not None:
            raise ValueError(
                "ranks have different numbers of batches in this epoch of fit, which does not work "
                f"with {reason}"
            )

    @property
    def _schedules(self) -> Sequence[Any]:
        schedules: Sequence[Any] = self._trainer.lr_scheduler_configs
        return schedules

    def _update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        self._update_of_loop(interval, update_plateau_schedulers=update_plateau_schedulers)
        if interval == "step" and not update_plateau_schedulers and self._loop._is_training_done:
            self._leave()

    def _leave(self) -> None:
        if self._join is not None:
            join, self._join = self._join, None
            engine = active_join()
            if engine is not None and engine.ledger.batch is not None:
                # The Shard counts a batch when the next one is asked for; Lightning asks for none.
                engine.ledger.batch += 1
            join.__exit__(None, None, None)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave()  # A hook may have cut the epoch short.

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._join is not None:
            join, self._join = self._join, None
            join.__exit__(type(exception), exception, exception.__traceback__)

    @torch.no_grad()
    def step(self) -> None:
        """After each shadowed step: do what Lightning does with a step of this rank."""
        trainer, loop = self._trainer, self._loop
        is_manual = not trainer.lightning_module.automatic_optimization
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                continue  # Its hook in the Join has stepped the shard.
            if not is_manual:
                call._call_lightning_module_hook(
                    trainer,
                    "configure_gradient_clipping",
                    optimizer,
                    gradient_clip_val=trainer.gradient_clip_val,
                    gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                )
            optimizer.step()
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        progress = (
            loop.manual_optimization.optim_step_progress
            if is_manual
            else loop.automatic_optimization.optim_progress.optimizer.step
        )
        progress.increment_ready()
        progress.increment_completed()
        loop._batches_that_stepped += 1
        for config in self._schedules:
            if config.interval == "step" and not config.reduce_on_plateau:
                call._call_lightning_module_hook(
                    trainer, "lr_scheduler_step", config.scheduler, None
                )
