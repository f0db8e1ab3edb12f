"""The Trainer of transformers in a plain script: its own checkpoint, written by any one rank.

It is called after each step by a callback of its own kind. transformers is imported by the script,
and never here. Its private methods are those of transformers 5; a version without them gets no
checkpoint, and a line that says so.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

KINDS = (("transformers.trainer", "Trainer"),)


def why_not(trainer: Any) -> str:
    """Why no checkpoint of this Trainer can be written by one rank; empty if it can."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "the Trainer's state is in shards, of which the lost rank had one"
    if trainer.args.save_strategy == "no" or trainer.args.save_only_model:
        return "the Trainer saves nothing to resume from (save_strategy, save_only_model)"
    if trainer.hp_search_backend is not None:
        return "a hyperparameter search resumes from no checkpoint"
    return ""


def call_after_steps(trainer: Any, keep: Callable[[TrainerCheckpoint, int], None]) -> None:
    """Call `keep` whenever this Trainer could save: after a step, and after an evaluation, which
    draws from the generators."""
    TrainerCheckpoint(trainer)  # Raises if this version has other names.

    def on_event(_: object, args: object, state: Any, control: object, **__: object) -> None:
        if trainer.is_in_train:  # Later, the weights may be those of another step.
            keep(TrainerCheckpoint(trainer), state.global_step)

    base = sys.modules["transformers.trainer"].TrainerCallback
    events = dict.fromkeys(("on_step_end", "on_evaluate"), on_event)
    trainer.add_callback(type("KeepsLastStep", (base,), events)())


class TrainerCheckpoint:
    """The checkpoint of a Trainer as it stands; the next step counts tokens before its
    collectives."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._num_tokens = trainer.state.num_input_tokens_seen

    def own_part(self) -> bytes:
        """The file with the generators of this rank, in the Trainer's format."""
        with tempfile.TemporaryDirectory() as folder:
            self._trainer._save_rng_state(folder)
            (file,) = Path(folder).iterdir()
            return file.read_bytes()

    def write(self, parts: Mapping[int, bytes]) -> str:
        """A rank without a part gets this rank's: the Trainer seeds all ranks alike, and where they
        draw alike it is what the lost rank had."""
        trainer, num_ranks = self._trainer, self._trainer.args.world_size
        state = trainer.state
        state.num_input_tokens_seen = self._num_tokens
        own = parts[trainer.args.process_index]
        folder = Path(trainer.args.output_dir)
        # On the same file system, for a rename: the checkpoint is there as a whole, or not at all.
        with tempfile.TemporaryDirectory(prefix=".chorusline-", dir=folder) as beside:
            trainer.current_flos *= num_ranks  # It adds those of all ranks up, by a collective.
            args, trainer.args = trainer.args, _as_one_process(trainer.args, beside)
            trainer._save_checkpoint(trainer.model, trial=None)
            made = Path(beside) / f"checkpoint-{state.global_step}"
            if not [*made.rglob("*.safetensors"), *made.rglob("pytorch_model*.bin")]:
                raise RuntimeError("the Trainer has saved no weights")
            checkpoint = folder / made.name
            if state.best_model_checkpoint == os.fspath(made):
                state.best_model_checkpoint = os.fspath(checkpoint)
                state.save_to_json(os.fspath(made / "trainer_state.json"))
            torch.save(args, made / "training_args.bin")
            (made / "rng_state.pth").unlink()  # Of one process.
            for rank in range(num_ranks):
                (made / f"rng_state_{rank}.pth").write_bytes(parts.get(rank, own))
            if checkpoint.exists():  # The Trainer was about to write it, or has.
                checkpoint.rename(made.with_name("before"))
            made.rename(checkpoint)
        return os.fspath(checkpoint)


def _as_one_process(args: Any, folder: str) -> Any:
    """The Trainer's arguments, of a process that saves into `folder` and waits for no other."""
    kind = type(args)
    alone = {
        "should_save": True,
        "process_index": 0,
        "world_size": 1,
        "parallel_mode": None,
        "__reduce__": lambda self: (dict, ()),  # The checkpoint gets those of the script.
    }
    mine = copy.copy(args)
    mine.__class__ = type(kind.__name__, (kind,), alone)
    mine.output_dir, mine.push_to_hub = folder, False
    return mine
