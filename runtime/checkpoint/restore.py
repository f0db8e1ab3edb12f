"""Brings registered objects to the state of a checkpoint, each rank reading what it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..process.registry import Registered
from ..zero.optimizer_state import MASTER
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from .contents import PER_RANK, ZERO, is_dense, leaves_of, tree_of
from .format.errors import CheckpointMismatch
from .format.manifest import Entry, dtype_name, name_of
from .format.pieces import Path
from .format.reader import CheckpointReader
from .sharded_state import GROUPS, NUM_STEPS, STATE, Run, ShardedState, is_per_element

_NAMED = 3
"""Differences that an error lists; the first ones tell what is wrong."""


def restore(entry: Registered, reader: CheckpointReader, rank: int) -> None:
    """Load the object's state. Nothing of it is changed if this raises CheckpointMismatch.

    A state per rank of a run with fewer ranks has none for the ranks that came since: their
    objects stay as they are.
    """
    kind = reader.manifest.kinds.get(entry.name)
    if kind is None:
        raise CheckpointMismatch(
            reader.path,
            f"it has nothing that was registered as {entry.name!r}, only "
            f"{', '.join(map(repr, reader.names())) or 'nothing'}; register under the name that "
            "was saved, or pass required=False for what is new",
        )
    stateful = entry.object
    if isinstance(stateful, ZeroRedundancyOptimizer):
        _restore_sharded(ShardedState(entry.name, stateful), reader, by_number=kind != ZERO)
    elif kind == ZERO:
        if not isinstance(stateful, torch.optim.Optimizer):
            raise CheckpointMismatch(
                reader.path,
                f"{entry.name!r} was an optimizer, and is a {type(stateful).__name__} now",
            )
        stateful.load_state_dict(plain_optimizer_state(entry.name, reader))
    elif kind == PER_RANK:
        if rank < reader.manifest.world_size:
            stateful.load_state_dict(read_tree(reader, entry.name, rank))
    elif isinstance(stateful, torch.nn.Module):
        module = stateful.module if isinstance(stateful, DistributedDataParallel) else stateful
        check_same_tensors(reader, (entry.name,), module.state_dict())
        module.load_state_dict(read_tree(reader, entry.name))
    else:
        stateful.load_state_dict(read_tree(reader, entry.name))


def read_tree(reader: CheckpointReader, *path: str | int) -> Any:
    """All that was saved below a path, whole, as the dictionaries that it was."""
    return tree_of((entry.path[len(path) :], reader.value(entry)) for entry in reader.below(*path))


def check_same_tensors(reader: CheckpointReader, path: Path, state: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch, naming the first tensors that differ."""
    here = {
        below: (tuple(value.shape), dtype_name(value.dtype))
        for below, value in leaves_of(path, dict(state))
        if is_dense(value)
    }
    saved = {e.path: (e.shape, e.dtype) for e in reader.below(*path) if e.dtype is not None}
    differences = []
    for key in [*here, *(key for key in saved if key not in here)]:
        if here.get(key) != saved.get(key):
            differences.append(
                f"{name_of(key)} is {_told(saved.get(key))} in it, and {_told(here.get(key))} here"
            )
    _raise_differences(reader, differences, "the model is another one")


def _told(kind: tuple[tuple[int, ...], str | None] | None) -> str:
    return "missing" if kind is None else f"{kind[0]} {kind[1]}"


def _raise_differences(reader: CheckpointReader, differences: list[str], what: str) -> None:
    if not differences:
        return
    more = len(differences) - _NAMED
    told = "; ".join(differences[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
    raise CheckpointMismatch(
        reader.path, f"{what}: {told}. Build the one that was saved, or start in another place"
    )


# -- Sharded optimizers ----------------------------------------------------------------------------


def _restore_sharded(state: ShardedState, reader: CheckpointReader, *, by_number: bool) -> None:
    """by_number: it was saved by a plain optimizer, which counts its parameters.

    1. Compare the groups. 2. Read this rank's pieces. 3. Hand them to the rank's optimizer.
    """
    groups = _checked_groups(state, reader, by_number)  # 1
    saved_name = {
        ours: theirs
        for mine, saved in zip(state.named_groups(), groups, strict=True)
        for ours, theirs in zip(mine["params"], saved["params"], strict=True)
    }
    below: dict[Any, list[Entry]] = {}
    for entry in reader.below(state.name, STATE):
        below.setdefault(entry.path[2], []).append(entry)
    pieces: dict[int, dict[str, Any]] = {}  # 2, by id of the piece's tensor
    masters: list[tuple[Run, torch.Tensor]] = []
    for run in state.runs:
        name = state.name_of(run)
        for tensor, loaded in _read_run(state, run, reader, below.get(saved_name[name], [])):
            pieces[id(tensor)] = loaded
        if state.has_master(run):
            copy = reader.find((state.name, STATE, saved_name[name], MASTER))
            if copy is None:
                raise CheckpointMismatch(
                    reader.path,
                    f"it has no float32 copy of {name}, which is in half precision here; the "
                    "optimizer that saved it stepped another dtype",
                )
            masters.append((run, reader.tensor(copy, run.start, run.stop)))
    steps = reader.find((state.name, NUM_STEPS))  # 3
    if steps is not None:
        state.optimizer.num_steps = reader.object(steps)
    for options, saved in zip(state.optimizer.param_groups, groups, strict=True):
        options.update({key: value for key, value in saved.items() if key != "params"})
    with torch.no_grad():
        for run, master in masters:
            for owned in run.pieces:
                at = owned.piece.parameter_start - run.start
                flat = master[at : at + owned.piece.numel]
                owned.tensor.copy_(flat.view(owned.tensor.shape))
    inner = state.inner
    if inner is None:
        return
    tensors = [p for options in inner.param_groups for p in options["params"]]
    plain = inner.state_dict()["param_groups"]
    for ours, options in zip(plain, state.optimizer.param_groups, strict=True):
        ours.update({k: v for k, v in options.items() if k not in ("params", "param_names")})
    inner.load_state_dict(
        {
            "state": {
                number: pieces[id(tensor)]
                for number, tensor in enumerate(tensors)
                if pieces.get(id(tensor))
            },
            "param_groups": plain,
        }
    )


def _checked_groups(
    state: ShardedState, reader: CheckpointReader, by_number: bool
) -> list[dict[str, Any]]:
    """The saved groups. Raises CheckpointMismatch where they hold other parameters."""
    entry = reader.find((state.name, GROUPS))
    if entry is None:
        plain = reader.find((state.name,))  # Without any state the whole of it is one leaf.
        saved = reader.object(plain)["param_groups"] if plain is not None else []
    else:
        saved = reader.object(entry)
    ours = state.named_groups()
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
    _raise_differences(reader, differences, f"{state.name!r} steps other parameters")
    result: list[dict[str, Any]] = saved
    return result


def _read_run(
    state: ShardedState, run: Run, reader: CheckpointReader, entries: Iterable[Entry]
) -> Iterable[tuple[torch.Tensor, dict[str, Any]]]:
    """The state of every piece of a run, in memory of its own."""
    shape = state.shape_of(run)
    loaded: list[dict[str, Any]] = [{} for _ in run.pieces]
    for entry in entries:
        key = str(entry.path[3])
        if key == MASTER and state.has_master(run):
            continue
        if entry.dtype is None or key == "step" or entry.shape != shape:
            if entry.numel > 1 and entry.dtype is not None and not _fits(entry.shape, shape):
                raise CheckpointMismatch(
                    reader.path,
                    f"{name_of(entry.path)} is {entry} in it, and the parameter is {shape} here",
                )
            for into in loaded:
                into[key] = reader.value(entry)
            continue
        whole = reader.tensor(entry, run.start, run.stop)
        for owned, into in zip(run.pieces, loaded, strict=True):
            at = owned.piece.parameter_start - run.start
            part = whole[at : at + owned.piece.numel].view(owned.tensor.shape)
            assert is_per_element(key, part, owned.tensor.shape)
            into[key] = part
    return [(owned.tensor, into) for owned, into in zip(run.pieces, loaded, strict=True)]


def _fits(summary: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor can sum a parameter up: its shape, with some lengths made 1."""
    return len(summary) == len(shape) and all(
        ours in (1, whole) for ours, whole in zip(summary, shape, strict=True)
    )


def plain_optimizer_state(name: str, reader: CheckpointReader) -> dict[str, Any]:
    """The state of a sharded optimizer in the format of the plain one, whole."""
    entry = reader.find((name, GROUPS))
    assert entry is not None
    groups = reader.object(entry)
    numbers: dict[str, int] = {}
    for options in groups:
        for parameter in options["params"]:
            numbers[parameter] = len(numbers)
    saved = read_tree(reader, name, STATE)
    return {
        "state": {
            number: saved[parameter] for parameter, number in numbers.items() if parameter in saved
        },
        "param_groups": [
            {**options, "params": [numbers[parameter] for parameter in options["params"]]}
            for options in groups
        ],
    }
