"""Epochs of Lightning's fit in which ranks have different numbers of batches.

Such an epoch runs inside a Join, which begins with the epoch and ends on each rank after its last
batch: after that batch's update of learning rates, before the epoch's update, validation and
checkpoints. There the rank shadows the steps of the other ranks, and all ranks leave the Join
together. What Lightning does with an optimizer step (clipping, counting, schedules per step) is
done with shadowed steps too. So all ranks have the same global step, the same learning rates, and
with a plain optimizer the same state.

Callbacks and hooks of the module are not called for shadowed steps, and nothing is logged in them.
Validation inside the epoch runs on all ranks, after the same step.

After a loss within a ZeroRedundancyOptimizer's step the other ranks continue in the next
generation. What the lost rank had left of the epoch is not trained; with the next epoch, and with
the next validation, Lightning sets up its loaders again, for the ranks that are left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
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
        self._most_batches = 0.0
        """Of the rank that has most in this epoch; 0 where all ranks have equally many."""
        self._num_steps = self._validated_at = 0
        """The number of this epoch's steps, shadowed ones included, and that of the steps before
        the last validation."""
        self._leaves_late = False
        """Whether this rank has had its last batch, and validates before it shadows other steps."""
        trainer.callbacks.insert(0, self)
        self._loop = trainer.fit_loop.epoch_loop
        # Lightning has no hook between its two updates of learning rates, and none for whether it
        # validates, so replace the methods.
        self._update_of_loop = self._loop.update_lr_schedulers
        self._loop.update_lr_schedulers = self._update_lr_schedulers
        self._decision_of_loop = self._loop._should_check_val_fx
        self._loop._should_check_val_fx = self._validates
        loops = trainer.fit_loop, self._loop.val_loop
        self._dealt_in = dict.fromkeys(loops, model.group.generation)
        """By loop, the generation of its loaders."""
        for loop in loops:
            loop.setup_data = functools.partial(self._set_up_data, loop, loop.setup_data)

    def close(self) -> None:
        self._trainer.callbacks.remove(self)
        del self._loop.update_lr_schedulers, self._loop._should_check_val_fx
        for loop in self._dealt_in:
            del loop.setup_data

    def _set_up_data(self, loop: Any, set_up_of_loop: Callable[[], None]) -> None:
        """Before each epoch, and before each validation."""
        generation = self._model.group.generation
        if self._dealt_in[loop] != generation:
            self._dealt_in[loop] = generation
            loop._combined_loader = None  # Lightning makes it again from what the user gave.
        set_up_of_loop()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        batches = all_gather_object(self._model.group, trainer.num_training_batches)
        self._most_batches, self._leaves_late = 0, False
        # With equally many batches on all ranks no Join is needed. A loader without a length needs
        # one, since its number is unknown; the Join costs one empty step at the end.
        if len(set(batches)) == 1 and batches[0] != float("inf"):
            return
        self._most_batches, self._num_steps, self._validated_at = max(batches), 0, 0
        # Without a length a rank may have any number; each has one at least.
        self._check(1 if max(batches) == float("inf") else min(batches))
        self._join = Join(
            [self._model, *self._sharded],
            step_along=[self],
            skew_warning=None,
            divide_by_initial_world_size=self._divides_by_all,
        )
        self._join.__enter__()

    def _check(self, fewest_batches: float) -> None:
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
        elif trainer.check_val_every_n_epoch is None or trainer.val_check_batch is None:
            reason = (
                "validation after a time, or after batches of all epochs together, which come at "
                "another step on each rank; give val_check_interval batches or a part of an epoch, "
                "and check_val_every_n_epoch a number"
            )
        elif self._validates_every < self._most_batches and (
            is_manual or self._most_batches == float("inf")
        ):
            reason = (
                "validation inside the epoch in manual optimization, or with a loader without a "
                "length; leave val_check_interval at its default"
            )
        elif any(config.interval == "step" and config.frequency != 1 for config in self._schedules):
            reason = "a schedule of every n-th step; give it interval step and frequency 1"
        else:
            reason = next(
                filter(
                    None, (self._why_not_called(one, fewest_batches) for one in trainer.callbacks)
                ),
                None,
            )
        if reason is not None:
            raise ValueError(
                "ranks have different numbers of batches in this epoch of fit, which does not work "
                f"with {reason}"
            )

    def _why_not_called(self, callback: Callback, fewest_batches: float) -> str:
        """Why ranks with data cannot call this callback alone after a batch; empty if they can."""
        if isinstance(callback, Timer) and callback._duration is not None:
            if callback._interval == "step":
                return (
                    "a time limit that all ranks look at after each batch; instead of max_time= "
                    'give callbacks=[Timer(…, interval="epoch")]'
                )
        elif isinstance(callback, ModelCheckpoint):
            if callback._train_time_interval is not None:
                return (
                    "ModelCheckpoint(train_time_interval=…), which asks all ranks after each "
                    "batch; save after epochs, every_n_epochs=1"
                )
            # After its last batch a rank is called when all have ended the epoch.
            trainer, every = self._trainer, callback._every_n_train_steps
            first, end = (
                trainer.global_step + (-(-number // trainer.accumulate_grad_batches))
                for number in (fewest_batches, self._most_batches)
            )
            if trainer.max_steps >= 0:
                end = min(end, trainer.max_steps)
            if every >= 1 and (step := -(-first // every) * every) < end:
                return (
                    f"ModelCheckpoint(every_n_train_steps={every}), which would save after step "
                    f"{step}, without the ranks that have no more batches by then; save after "
                    "epochs, every_n_epochs=1"
                )
        return ""

    @property
    def _schedules(self) -> Sequence[Any]:
        schedules: Sequence[Any] = self._trainer.lr_scheduler_configs
        return schedules

    def _update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        loop = self._loop
        ends_batch = interval == "step" and not update_plateau_schedulers
        if self._join is not None and ends_batch and not loop._should_accumulate():
            self._num_steps += 1
            self._leaves_late = loop._is_training_done and self._validates_inside
        if self._leaves_late and interval == "epoch":
            return
        self._update_of_loop(interval, update_plateau_schedulers=update_plateau_schedulers)
        if self._leaves_late and update_plateau_schedulers:  # It has validated.
            self._leaves_late = False
            self._leave()
            self._update_of_loop("epoch", update_plateau_schedulers=False)
            if self._validates():
                self._validate()
        elif ends_batch and loop._is_training_done and not self._leaves_late:
            self._leave()

    @property
    def _validates_every(self) -> float:
        """After how many batches of an epoch."""
        interval = self._trainer.val_check_interval
        if isinstance(interval, int) or self._most_batches == float("inf"):
            return float(self._trainer.val_check_batch)
        return float(max(1, int(self._most_batches * interval)))

    def _num_batches_of(self, num_steps: int) -> float:
        """How many batches the rank that has most has had in so many steps."""
        num_batches: int = num_steps * self._trainer.accumulate_grad_batches
        return min(num_batches, self._most_batches)

    @property
    def _is_due(self) -> bool:
        """Whether validation follows the last step, or came due in the batches that it sums."""
        if not self._loop._should_check_val_epoch() or self._validated_at == self._num_steps:
            return False
        if (every := self._validates_every) == float("inf"):
            return True
        num_before = self._num_batches_of(self._num_steps - 1)
        return self._num_batches_of(self._num_steps) // every > num_before // every

    @property
    def _validates_inside(self) -> bool:
        """Whether validation follows the last step, and other steps follow it."""
        has_more = self._num_batches_of(self._num_steps) < self._most_batches
        return has_more and self._validates_every != float("inf") and self._is_due

    def _validates(self, data_fetcher: object = None) -> bool:
        """Whether Lightning validates after this batch."""
        if not self._most_batches:
            is_due = bool(self._decision_of_loop(data_fetcher))
            # Where fit continues from a checkpoint, this decides whether the epoch is over; and the
            # numbers in the checkpoint are those of rank 0.
            if self._loop.restarting and self._loop.val_loop.restarting:
                is_due = self._trainer.strategy.broadcast(is_due)
            return is_due
        if self._loop._should_accumulate() or not self._is_due:
            return False
        return self._join is None or self._validates_inside

    def _validate(self) -> None:
        """As Lightning does after a batch."""
        trainer = self._trainer
        trainer.validating = True
        connector = trainer._logger_connector
        place = connector._first_loop_iter, connector._current_fx
        call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
        self._loop.val_loop.run()
        trainer.training = True
        connector._first_loop_iter, connector._current_fx = place

    def _leave(self) -> None:
        if self._join is not None:
            join, self._join = self._join, None
            engine = active_join()
            if engine is not None and engine.ledger.batch is not None:
                # The Shard counts a batch when the next one is asked for; Lightning asks for none.
                engine.ledger.batch += 1
            join.__exit__(None, None, None)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validated_at = self._num_steps

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
        trainer.strategy.set_world_ranks()
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
        self._num_steps += 1
        for config in self._schedules:
            if config.interval == "step" and not config.reduce_on_plateau:
                call._call_lightning_module_hook(
                    trainer, "lr_scheduler_step", config.scheduler, None
                )
        if self._validates_inside:
            self._validate()
        loop._batches_that_stepped += 1
