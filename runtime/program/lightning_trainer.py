"""The Trainer of Lightning in a plain script: its own checkpoint, written by any one rank.

Lightning is imported by the script, and never here. Private names are those of Lightning 2.6; a
version without them gets no checkpoint, and a line that says so.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

KINDS = (("lightning.pytorch", "Trainer"), ("pytorch_lightning", "Trainer"))


def why_not(trainer: Any) -> str:
    """Why no checkpoint of this Trainer can be written by one rank; empty if it can."""
    strategy = type(trainer.strategy)
    # That of the base class lets rank 0 write; where state is in shards, all ranks have to.
    if not strategy.save_checkpoint.__module__.endswith(".strategies.strategy"):
        what = f"the Trainer's state is in shards ({strategy.__name__})"
        return f"{what}, of which the lost rank had one"
    saves = _that_saves(trainer)
    if saves is None:
        return "the Trainer saves nothing to resume from (no ModelCheckpoint, save_weights_only)"
    # Its own checkpoints after some steps have the same limits.
    if saves.every_n_epochs and (why := _why_not_within_an_epoch(trainer)):
        return f"the Trainer saves at the ends of epochs, and could not continue within one: {why}"
    return ""


def _why_not_within_an_epoch(trainer: Any) -> str:
    loop = trainer.fit_loop
    if not loop._combined_loader._state_dicts():
        # It would take the first rows of the epoch again, and leave as many of the last ones out.
        return (
            "its loader has no state_dict and load_state_dict (torchdata's StatefulDataLoader has)"
        )
    fetcher = loop._data_fetcher
    if fetcher.length is None and getattr(fetcher, "prefetch_batches", None):
        return "its loader has no length, so its place is a batch further than the last step"
    # They set the Trainer up in on_train_epoch_start, which a part of an epoch does not have.
    acting = {"GradientAccumulationScheduler", "StochasticWeightAveraging"}
    for kind in (kind for one in trainer.callbacks for kind in type(one).__mro__):
        if kind.__name__ in acting:
            return f"its {kind.__name__} acts when one begins"
    return ""


def call_after_steps(
    trainer: Any, keep: Callable[[LightningCheckpoint, int], None], keep_buffers: Callable[[], None]
) -> None:
    """Call `keep` after each batch with which this Trainer has ended a step, and `keep_buffers`
    after the module's own hook of that batch."""
    kept, is_new = trainer.global_step, False
    LightningCheckpoint(trainer)  # Raises if this version has other names.

    def on_train_batch_end(*_: object) -> None:
        nonlocal kept, is_new
        if trainer.global_step != kept:  # Otherwise it accumulates gradients, which are not saved.
            kept, is_new = trainer.global_step, True
            keep(LightningCheckpoint(trainer), kept)

    def at_next_hook(*_: object) -> None:
        nonlocal is_new
        # Only once: the batches of the next step change buffers as well.
        if is_new:
            is_new = False
            keep_buffers()

    kind = next(one for one in type(_that_saves(trainer)).__mro__ if one.__name__ == "Callback")
    keeps_step = type("KeepsLastStep", (kind,), {"on_train_batch_end": on_train_batch_end})()
    # Before those that save, the last ones in the list: while they do so, a rank may be lost.
    trainer.callbacks.insert(len(trainer.callbacks) - len(trainer.checkpoint_callbacks), keeps_step)
    hooks = ("on_train_batch_start", "on_validation_start", "on_train_epoch_end")
    # Before those that put averaged weights in place.
    keeps_buffers = type("KeepsBuffers", (kind,), dict.fromkeys(hooks, at_next_hook))()
    trainer.callbacks.insert(0, keeps_buffers)


class LightningCheckpoint:
    """The checkpoint of a Trainer, with its place in the data as of now: the next batch moves that
    before its collectives."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        as_of_now = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "loops": trainer._checkpoint_connector._get_loops_state_dict(),
        }
        self._as_of_step = copy.deepcopy(as_of_now)
        epoch = trainer.fit_loop.epoch_loop
        self._ends_by_validation = epoch.batch_progress.is_last_batch and (
            epoch._should_check_val_fx(trainer.fit_loop._data_fetcher)
        )

    def own_part(self) -> bytes:
        return b""  # Lightning's checkpoint has nothing of each rank.

    def write(self, parts: Mapping[int, bytes]) -> str:
        """As `last.ckpt` where the script looks for that, which ckpt_path="last" means."""
        trainer, callback, step = self._trainer, _that_saves(self._trainer), self._as_of_step
        loops = step["loops"]["fit_loop"]
        ended = trainer.fit_loop.epoch_progress.total.processed
        if self._ends_by_validation and ended == loops["epoch_progress"]["total"]["processed"]:
            # Otherwise Lightning takes its batch for the first one of the next epoch, and calls no
            # on_train_epoch_start for that.
            for counts in (loops["epoch_loop.batch_progress"][one] for one in ("total", "current")):
                counts["completed"] += 1
        name = callback.CHECKPOINT_NAME_LAST if callback.save_last else "{epoch}-{step}"
        numbers = {"epoch": step["epoch"], "step": step["global_step"]}
        path = callback.format_checkpoint_name(numbers, name)
        if callback.save_last:
            # It is a part of the state: the file is replaced when the callback saves again.
            path = callback.last_model_path = callback.last_model_path or path
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False) | step
        trainer.strategy.checkpoint_io.save_checkpoint(checkpoint, path)
        trainer.strategy.checkpoint_io.teardown()  # One that saves in a thread has ended then.
        return f"{os.fspath(path)}, step {step['global_step']}"


def _that_saves(trainer: Any) -> Any:
    """Its ModelCheckpoint that saves the whole state, rather one with save_last; None without."""
    callbacks = [
        one for one in trainer.checkpoint_callbacks if getattr(one, "save_weights_only", 1) is False
    ]
    return max(callbacks, key=lambda one: bool(one.save_last), default=None)
