"""A loop over accelerate in a plain script: its own state, written by any one rank.

accelerate has no callbacks, so its data loaders say when the body of a loop is over. It is imported
by the script, and never here. Private names are those of accelerate 1; a version without them gets
no state, and a line that says so.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.utils._pytree import tree_leaves

KINDS = (("accelerate.accelerator", "Accelerator"),)


class StepKeeper(Protocol):
    """`LastStep`, as a loop sees it.

    at_end: is closed when the script has ended.
    """

    at_end: contextlib.ExitStack

    @property
    def begun(self) -> int:
        """Steps of optimizers."""

    @property
    def is_kept(self) -> bool:
        """Whether the state is that of the last step that was kept."""

    def keep(self, written: AccelerateCheckpoint) -> None:
        """A step has ended."""


def why_not(accelerator: Any) -> str:
    """Why no checkpoint of this Accelerator can be written by one rank; empty if it can."""
    if accelerator.dataloader_config.use_stateful_dataloader:
        return "a StatefulDataLoader of accelerate may be further than the last step"
    return ""


def call_after_bodies(accelerator: Any, steps: StepKeeper) -> None:
    """Keep what this Accelerator could save, whenever the body of a loop over a prepared loader
    is over and has taken a step. It is written where the script saves and loads, if that is one
    folder."""
    is_named = accelerator.project_configuration.automatic_checkpoint_naming
    folders: dict[str, str] = {}  # by absolute path, as the script writes them
    numbers: list[int] | None = None
    has_changed = True

    def sees(*args: Any) -> None:
        folder = os.path.normpath(args[-1])
        folders.setdefault(str(Path(folder).absolute()), folder)

    def keep() -> None:
        nonlocal numbers, has_changed
        made = AccelerateCheckpoint(accelerator, None if is_named else next(iter(folders), None))
        before, numbers = numbers, made.numbers()
        had_changed, has_changed = has_changed, numbers != before
        if not is_named and (why := _why_unknown([*folders.values()])):
            made.why_not_yet = why
        elif not (had_changed and has_changed):  # One that counts epochs has changed only now.
            made.why_not_yet = "no object in register_for_checkpointing counts the steps"
        steps.keep(made)

    def followed(bodies: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        def __iter__(loader: Any) -> Iterator[Any]:
            nonlocal numbers
            numbers = AccelerateCheckpoint(accelerator).numbers() if numbers is None else numbers
            for batch in bodies(loader):
                begun = steps.begun
                yield batch
                # Not after the body of an evaluation, or of a part of a batch.
                if steps.begun != begun and not steps.is_kept:
                    keep()

        return __iter__

    AccelerateCheckpoint(accelerator)  # Raises if this version has other names.
    accelerator.register_save_state_pre_hook(sees)
    accelerator.register_load_state_pre_hook(sees)
    for name in ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader"):
        loader = getattr(sys.modules["accelerate.data_loader"], name)
        steps.at_end.callback(setattr, loader, "__iter__", loader.__iter__)
        loader.__iter__ = followed(loader.__iter__)


def _why_unknown(folders: list[str]) -> str:
    """Why nobody knows in which folder the last step belongs; empty if it is the only one."""
    if not folders:
        return "accelerate has not saved or loaded, so nobody knows where"
    for folder in reversed(folders):
        if any(map(str.isdigit, "".join(Path(folder).parts[-2:]))):
            return f"the number in {folder!r} may belong to another step"
    if len(folders) > 1:  # One may have the best weights so far.
        named = " and ".join(map(repr, sorted(folders)))
        return f"the script saves and loads in several folders, {named}"
    return ""


class AccelerateCheckpoint:
    """What `accelerator.save_state(*args, **kwargs)` would write now.

    What the loop may change in its next step, before a collective, is copied: the registered
    objects and the schedules.

    why_not_yet: why this one cannot be written; empty if it can.
    """

    why_not_yet = ""

    def __init__(self, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        self._accelerator = accelerator
        self._save = inspect.signature(accelerator.save_state).bind(*args, **kwargs)
        self._save.apply_defaults()
        changed = (*accelerator._custom_objects, *accelerator._schedulers)
        self._states = [(one, copy.deepcopy(one.state_dict())) for one in changed]
        self._micro_batches = accelerator.step

    def numbers(self) -> list[int]:
        """What of the registered objects may count the steps."""
        states = self._states[: len(self._accelerator._custom_objects)]
        return [one for one in tree_leaves([state for _, state in states]) if type(one) is int]

    def own_part(self) -> bytes:
        """The file with the generators of this rank, in accelerate's format."""
        save = sys.modules["accelerate.checkpointing"].save_accelerator_state
        with tempfile.TemporaryDirectory() as folder:
            save(folder, [], [], [], [], 0, self._micro_batches)
            (file,) = Path(folder).iterdir()
            return file.read_bytes()

    def write(self, parts: Mapping[int, bytes]) -> str:
        """A rank without a part gets this rank's."""
        if self.why_not_yet:
            raise RuntimeError(
                f"{self.why_not_yet}; write cl.before_restart(accelerator.save_state, folder) at "
                "the end of each step"
            )
        accelerator, given = self._accelerator, self._save.arguments
        own, num_ranks = parts[accelerator.process_index], accelerator.num_processes
        naming = accelerator.project_configuration
        folder = Path(given["output_dir"] or "").absolute()
        if naming.automatic_checkpoint_naming:
            folder = Path(accelerator.project_dir, "checkpoints", f"checkpoint_{naming.iteration}")
        # In its format: of both, accelerate loads safetensors, which later saves leave as they are.
        if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
            given["safe_serialization"] = False
        for one, state in self._states:
            one.load_state_dict(state)
        accelerator.step = self._micro_batches
        states = sys.modules["accelerate.state"]
        for kind in (states.PartialState, states.AcceleratorState):
            alone = {"num_processes": 1, "process_index": 0, "local_process_index": 0}
            kind._shared_state.update(alone, distributed_type=states.DistributedType.NO)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".chorusline-", dir=folder.parent) as beside:
            naming.automatic_checkpoint_naming = False
            given["output_dir"] = os.fspath(made := Path(beside) / folder.name)
            accelerator.save_state(*self._save.args, **self._save.kwargs)
            for rank in range(num_ranks):
                (made / f"random_states_{rank}.pkl").write_bytes(parts.get(rank, own))
            if folder.exists():  # What the script itself has put there stays.
                names = {one.name for one in made.iterdir()}
                ignored = shutil.ignore_patterns(*names)
                shutil.copytree(folder, made, dirs_exist_ok=True, ignore=ignored)
                folder.rename(Path(beside) / "before")
            made.rename(folder)
        return os.fspath(folder)
