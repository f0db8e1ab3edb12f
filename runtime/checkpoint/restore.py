"""Loads the state of registered objects from a checkpoint; each rank reads what it needs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE
from torch.nn.parameter import is_lazy

from chorusline.collectives.contract.errors import with_article

from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..process.registry import Registered
from ..zero.shards.parameter_bucket import in_format_of
from ..zero.shards.shard_state import MASTER
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer, optimizer_engine_of
from .contents import (
    PER_RANK,
    ZERO,
    classes_of,
    is_dense,
    kind_of,
    loads_itself,
    optimizers_within,
    tree_of,
)
from .format.errors import CheckpointCorrupted, CheckpointMismatch
from .format.manifest import ManifestEntry, dtype_name, name_of
from .format.reader import CheckpointReader
from .sharded_state import GROUPS, MAX_NORM, NUM_STEPS, STATE, SavedOptimizer

_NAMED = 3
"""The number of differences that an error lists."""


def restore(entry: Registered, reader: CheckpointReader, rank: int) -> None:
    """Load the object's state. The object is unchanged if this raises CheckpointMismatch.

    If each rank has a state, and the checkpoint was saved by fewer ranks, then the objects of the
    additional ranks stay as they are.
    """
    kind = reader.manifest.kinds.get(entry.name)
    if kind is None:
        raise CheckpointMismatch(
            reader.path,
            f"it has nothing that was registered as {entry.name!r}, only "
            f"{', '.join(map(repr, reader.names())) or 'nothing'}; register the object under the "
            "name that was saved, or pass required=False for a new object",
        )
    # Each rank would load its own, and the ranks would differ without a word.
    if kind == PER_RANK != kind_of(entry):
        is_sharded = isinstance(entry.object, ZeroRedundancyOptimizer)
        raise CheckpointMismatch(
            reader.path,
            f"{entry.name!r} was saved with per_rank=True, and here all ranks have the same state; "
            f"register it {'' if is_sharded else 'with per_rank=True, or '}under another name with "
            "required=False",
        )
    stateful = entry.object
    # Sharded optimizers and those of torch read each other's state.
    if isinstance(stateful, ZeroRedundancyOptimizer):
        _restore_sharded(entry.name, stateful, reader, by_number=kind != ZERO)
    elif kind == ZERO:
        if not isinstance(stateful, torch.optim.Optimizer):
            raise CheckpointMismatch(
                reader.path,
                f"{entry.name!r} is an optimizer in it, and {with_article(type(stateful))} here",
            )
        _load_plain(entry.name, stateful, plain_optimizer_state(entry.name, reader), reader)
    # A rank that the run did not have then keeps what it has made.
    elif kind == PER_RANK:
        if rank < reader.manifest.world_size:
            # It has the names of the module, wrapped or not.
            if isinstance(stateful, DistributedDataParallel):
                stateful = stateful.module
            state = read_tree(reader, entry.name, rank)
            if isinstance(stateful, torch.nn.Module):
                state = _with_versions(state, stateful.state_dict())
            if isinstance(stateful, torch.optim.Optimizer):
                _check_kind(entry.name, stateful, reader)
            stateful.load_state_dict(state)
    elif isinstance(stateful, torch.nn.Module):
        # A checkpoint has the names of the module, wrapped or not. torch would load what fits
        # before it raises for the rest.
        module = stateful.module if isinstance(stateful, DistributedDataParallel) else stateful
        here = module.state_dict()
        _check_same_tensors(entry.name, module, here, reader)
        module.load_state_dict(_with_versions(read_tree(reader, entry.name), here))
    elif isinstance(stateful, torch.optim.Optimizer):
        _load_plain(entry.name, stateful, read_tree(reader, entry.name), reader)
    else:
        stateful.load_state_dict(read_tree(reader, entry.name))


def _with_versions(state: Any, here: Mapping[str, Any]) -> Any:
    """The state of a module with the versions that `here` has of its parts: for a state without
    them a module converts, once more, what an earlier version of it would have saved."""
    if isinstance(state, dict) and hasattr(here, "_metadata"):
        state = OrderedDict(state)
        state._metadata = here._metadata
    return state


def options_of(stateful: object) -> list[dict[str, Any]]:
    """The options of each parameter group that a person gives: none for what is no optimizer. The
    learning rate is the one that a schedule has begun with. At the end the max_norm, if it has
    one."""
    if not isinstance(stateful, torch.optim.Optimizer):
        return []
    of_all: list[dict[str, Any]] = []
    if isinstance(stateful, ZeroRedundancyOptimizer):
        of_all = [{MAX_NORM: stateful.max_norm}]
    return [
        {
            key: group.get("initial_lr", value) if key == "lr" else value
            for key, value in group.items()
            if key != "initial_lr" and isinstance(value, bool | int | float | tuple)
        }
        for group in stateful.param_groups
    ] + of_all


def changes_in_words(given: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> tuple[str, str]:
    """For example `lr 0.1, not 0.01`, and the line that undoes the first of these changes; both
    empty if no option has another value. Pure."""
    changes = {
        f"{key} {after[key]}, not {value}": (
            f"{key} = {value!r}"
            if key == MAX_NORM
            else f"param_groups[{number}][{key!r}] = {value!r}"
        )
        for number, (before, after) in enumerate(zip(given, loaded, strict=False))
        for key, value in before.items()
        if key in after and after[key] != value
    }
    return "; ".join(list(changes)[:_NAMED]), next(iter(changes.values()), "")


def _check_kind(name: str, optimizer: torch.optim.Optimizer, reader: CheckpointReader) -> None:
    """Raise CheckpointMismatch if an optimizer of another class was saved, with whose state this
    one would fail in its first step, or would continue with a part of it."""
    saved, here = reader.manifest.optimizers.get(name), classes_of(optimizer)
    # Earlier saves do not say it; a class that extends the other reads its state; and a hook may
    # convert that of a plain one: a sharded one resumes without its hooks.
    if not saved or saved[0] in here or here[0] in saved:
        return
    is_plain = not isinstance(optimizer, ZeroRedundancyOptimizer)
    hooks = "_optimizer_load_state_dict_pre_hooks"
    if is_plain and any(getattr(one, hooks, None) for one in optimizers_within(optimizer)):
        return
    convert = ", or convert its state (optimizer.register_load_state_dict_pre_hook)"
    raise CheckpointMismatch(
        reader.path,
        f"{name!r} was saved by {with_article(saved[0])}, and is {with_article(here[0])} here. "
        "Make the optimizer that was saved, or register the new one under another name with "
        f"required=False{convert if is_plain else ''}",
    )


def _load_plain(
    name: str, optimizer: torch.optim.Optimizer, state: dict[str, Any], reader: CheckpointReader
) -> None:
    _check_kind(name, optimizer, reader)
    # It casts each tensor to its parameter's dtype; the format of its memory is set after it.
    optimizer.load_state_dict(state)
    for parameter, kept in optimizer.state.items():
        if isinstance(parameter, torch.Tensor) and isinstance(kept, dict):
            kept.update({key: in_format_of(parameter, value) for key, value in kept.items()})


def read_tree(reader: CheckpointReader, *path: str | int) -> Any:
    """The whole state below a path, as the dictionaries that were saved."""
    return tree_of((entry.path[len(path) :], reader.value(entry)) for entry in reader.below(*path))


def _check_same_tensors(
    name: str, module: torch.nn.Module, state: Mapping[str, Any], reader: CheckpointReader
) -> None:
    """Raise CheckpointMismatch, naming the first tensors that differ from the saved ones.

    What may have another shape in each save is left to load_state_dict, which is strict: extra
    state, and the buffers of a module that loads its state itself, as torch's FakeQuantize does.
    The dtype of these buffers is compared: torch would round what is loaded.

    state: the module's state_dict().
    """
    parts = dict(module.named_modules(remove_duplicate=False))
    named = dict(module.named_parameters(remove_duplicate=False))
    parameters = {key for key, parameter in named.items() if not is_lazy(parameter)}
    own = {*named, *(key for key, _ in module.named_buffers(remove_duplicate=False))}

    def is_fixed(key: str) -> bool:
        part = parts.get(key.rpartition(".")[0])
        is_left = key.endswith(EXTRA_STATE) or (part is not None and loads_itself(part))
        return key in parameters or not is_left

    here = {
        key: value
        for key, value in state.items()
        if (is_fixed(key) or key in own) and isinstance(value, torch.Tensor)
    }
    # Below a key are the tensors of a dictionary, which is no parameter or buffer.
    saved = {str(e.path[1]): e for e in reader.below(name) if len(e.path) == 2}
    differences = []
    # In the order of the model, and then what only the checkpoint has: the first are named.
    for key in [*here, *(key for key in saved if key not in here and is_fixed(key))]:
        tensor, entry = here.get(key), saved.get(key)
        if tensor is None or is_fixed(key):
            # A tensor without elements is saved as an object, or within one.
            ours = _text(tensor) if is_dense(tensor) else "an object"
            is_same = str(entry or "an object") == ours
        else:
            is_same = entry is None or entry.dtype in (None, dtype_name(tensor.dtype))
        if not is_same:
            differences.append(
                f"{name}.{key} is {entry or 'missing'} in it, and {_text(tensor)} here"
            )
    _raise_differences(reader, differences, "the models differ")


def _text(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{'' if is_lazy(tensor) else f'{tuple(tensor.shape)} '}{dtype_name(tensor.dtype)}"


def _raise_differences(reader: CheckpointReader, differences: list[str], what: str) -> None:
    if not differences:
        return
    more = len(differences) - _NAMED
    text = "; ".join(differences[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
    raise CheckpointMismatch(
        reader.path,
        f"{what}: {text}. Build the same objects as in the run that saved it, or use another "
        "storage_path",
    )


# -- Sharded optimizers ----------------------------------------------------------------------------


def _restore_sharded(
    name: str, optimizer: ZeroRedundancyOptimizer, reader: CheckpointReader, *, by_number: bool
) -> None:
    """1. Compare the groups. 2. Lay out parameters that are frozen here, and have saved state.
    3. Read this rank's ranges, and hand them to its optimizer.

    by_number: a plain optimizer saved the state, by the numbers of the parameters.
    """
    here = SavedOptimizer.of(name, optimizer)
    groups = _checked_groups(here, reader, by_number)  # 1
    _check_kind(name, optimizer, reader)
    saved_names = {
        ours: theirs
        for mine, saved in zip(here.groups, groups, strict=True)
        for ours, theirs in zip(mine["params"], saved["params"], strict=True)
    }
    engine = optimizer_engine_of(optimizer)
    have_state = {entry.path[2] for entry in reader.below(name, STATE) if len(entry.path) > 3}
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    theirs = [key for saved in groups for key in saved["params"]]
    engine.take_up(p for p, key in zip(ours, theirs, strict=True) if key in have_state)  # 2
    here = SavedOptimizer.of(name, optimizer)
    states = here.read(reader, engine.shard.kept(), saved_names)  # 3
    options = [{**mine, **saved} for mine, saved in zip(here.groups, groups, strict=True)]
    engine.shard.load(states, options)
    steps = reader.find((name, NUM_STEPS))
    if steps is not None:
        num_steps = reader.value(steps)
        if type(num_steps) is not int or num_steps < 0:
            raise _unlike(reader, steps)
        optimizer.num_steps = num_steps
    norm = reader.find((name, MAX_NORM))
    if norm is not None:
        try:
            optimizer.max_norm = reader.value(norm)
        except (TypeError, ValueError):
            raise _unlike(reader, norm) from None
    engine.take_options(groups)


def _checked_groups(
    here: SavedOptimizer, reader: CheckpointReader, by_number: bool
) -> list[dict[str, Any]]:
    """The saved groups. Raises CheckpointMismatch if they hold other parameters."""
    saved, ours = _saved_groups(here.name, reader), here.groups
    differences = []
    if len(saved) != len(ours):
        differences.append(f"it has {len(saved)} parameter groups, and there are {len(ours)} here")
    for number, (mine, theirs) in enumerate(zip(ours, saved, strict=False)):
        if len(mine["params"]) != len(theirs["params"]):
            differences.append(
                f"group {number} has {len(theirs['params'])} parameters in it, and "
                f"{len(mine['params'])} here"
            )
        elif not by_number:
            differences += [
                f"parameter {at} of group {number} is {there} in it, and {here} here"
                for at, (here, there) in enumerate(
                    zip(mine["params"], theirs["params"], strict=True)
                )
                if here != there
            ]
    _raise_differences(reader, differences, f"the parameters of optimizer {here.name!r} differ")
    return saved


def _saved_groups(name: str, reader: CheckpointReader) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer. Raises CheckpointCorrupted for what no optimizer has,
    by which no other state may be looked up."""
    entry, plain = reader.find((name, GROUPS)), reader.find((name,))
    if entry is not None:
        groups = reader.value(entry)
    elif plain is not None:  # An optimizer without state was saved as one leaf.
        state = reader.value(plain)
        groups = state.get(GROUPS) if isinstance(state, dict) else None
    else:
        return []
    if isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(type(parameter) in (int, str) for parameter in group["params"])
        for group in groups
    ):
        return groups
    raise _unlike(reader, entry or plain)


def _unlike(reader: CheckpointReader, entry: ManifestEntry | None) -> CheckpointCorrupted:
    what = name_of(entry.path) if entry is not None else "it"
    return CheckpointCorrupted(reader.path, f"{what} is not what an optimizer saves")


def plain_optimizer_state(name: str, reader: CheckpointReader) -> dict[str, Any]:
    """The whole state of a sharded optimizer, in the format of the plain optimizer."""
    groups = _saved_groups(name, reader)
    numbers: dict[str, int] = {}
    for options in groups:
        for parameter in options["params"]:
            numbers[parameter] = len(numbers)
    saved = read_tree(reader, name, STATE)
    if not isinstance(saved, dict):
        raise _unlike(reader, reader.find((name, STATE)))
    found = {n: saved[parameter] for parameter, n in numbers.items() if parameter in saved}
    return {
        # With the float32 copy alone in it, a state would be taken for begun.
        "state": {
            number: state
            for number, state in found.items()
            if not isinstance(state, dict) or state.keys() != {MASTER}
        },
        "param_groups": [
            {**options, "params": [numbers[parameter] for parameter in options["params"]]}
            for options in groups
        ],
    }
