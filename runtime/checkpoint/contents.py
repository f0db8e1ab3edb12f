"""The part that a rank writes: its ranges of tensors, and small objects, copied to the host.

    collect…   find the tensors and objects of the registered objects, without a copy
    HostCopy   copies the collected tensors while training is paused

A state is a tree of dictionaries. Dense tensors in it are cut into ranges. Every other value (a
number, a list, a pickled object) is a leaf, one small object. The path through the tree names a
tensor in the checkpoint, as in torch.distributed.checkpoint.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Self

import torch
from torch.optim.lr_scheduler import LRScheduler

from chorusline.collectives.contract.errors import with_article

from ..data_parallel.distributed_data_parallel import DistributedDataParallel, engine_of
from ..process.between_runs import between_runs
from ..process.registry import Registered, Registry
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer, optimizer_engine_of
from .format.boxes import split_evenly
from .format.manifest import can_hold, name_of
from .format.pieces import Contents, Path, TensorRange
from .format.plain_values import MOST_DEEP, is_deeper

MODEL, ZERO, STATE, PER_RANK = "model", "zero", "state", "per-rank"
"""Kinds of objects: a DistributedDataParallel; a sharded optimizer; any other object with the same
state on all ranks; an object with a state per rank."""


def kind_of(entry: Registered) -> str:
    if isinstance(entry.object, ZeroRedundancyOptimizer):
        return ZERO
    if entry.per_rank:
        return PER_RANK
    return MODEL if isinstance(entry.object, DistributedDataParallel) else STATE


def is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() > 0


def leaves_of(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """The leaves of a tree with their paths. A dictionary without tensors is one leaf."""
    if isinstance(value, dict) and value and _has_tensors(value):
        for key, below in value.items():
            yield from leaves_of((*path, key), below)
    else:
        yield path, value


def _leaves_of_state(path: Path, state: Any) -> list[tuple[Path, Any]]:
    """`leaves_of` a state that can be read again. Raises ValueError for another one."""
    if is_deeper(state, MOST_DEEP + 1 - len(path)):
        raise ValueError(
            f"the state of {path[0]!r} is nested more than {MOST_DEEP} deep, so it cannot be "
            "saved; return a flat dictionary from its state_dict()"
        )
    try:
        return [*leaves_of(path, state)]
    except RecursionError:
        raise ValueError(
            f"the state of {path[0]!r} has a dictionary that contains itself, so it cannot be "
            "saved; return a flat dictionary from its state_dict()"
        ) from None


def _has_tensors(value: dict[Any, Any]) -> bool:
    if not all(type(key) in (str, int) for key in value):
        return False
    return any(
        is_dense(below) or (isinstance(below, dict) and _has_tensors(below))
        for below in value.values()
    )


def tree_of(leaves: Iterator[tuple[Path, Any]]) -> Any:
    """The tree with these leaves; the inverse of `leaves_of`."""
    tree: Any = {}
    for path, value in leaves:
        if not path:
            return value
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return tree


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def leaf_of(path: Path, value: Any) -> bytes:
    """`value` pickled. Raises TypeError, naming the part of it, for what no other process can
    read."""
    try:
        return pickled(value)
    except Exception as error:
        where, culprit = _not_pickled(path, value)
        raise TypeError(
            f"{name_of(where)}, {with_article(type(culprit))}, cannot be saved ({error}). Return "
            "plain values from state_dict(): numbers, texts, tensors, and lists, tuples and "
            "dictionaries of them; of an Enum its value, of a dataclass dataclasses.asdict(it), of "
            "a namedtuple tuple(it)"
        ) from error


def _not_pickled(path: Path, value: Any) -> tuple[Path, Any]:
    """The innermost part of `value` that cannot be pickled, with its path."""
    entered = set[int]()  # A state may contain itself.
    while id(value) not in entered:
        entered.add(id(value))
        is_container = isinstance(value, dict | list | tuple)
        parts = value if isinstance(value, dict) else dict(enumerate(value if is_container else ()))
        for key, part in parts.items():
            if id(part) not in entered and not _can_be_pickled(part):
                path, value = (*path, key), part
                break
    return path, value


def _can_be_pickled(value: Any) -> bool:
    try:
        pickled(value)
    except Exception:
        return False
    return True


def state_of(entry: Registered) -> dict[str, Any]:
    """The state of an object; for a wrapped model that of its module, for a plain module."""
    if isinstance(entry.object, DistributedDataParallel):
        return entry.object.module.state_dict()
    state = entry.object.state_dict()
    return without_functions(state) if isinstance(entry.object, LRScheduler) else state


def apart_in(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of a registered module that each rank may have trained by itself."""
    averaged, is_apart = between_runs().averaged, False
    if isinstance(module, DistributedDataParallel):
        is_apart, module = engine_of(module).reducer.trains_apart, module.module
    trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    return [(name, one) for name, one in trained if is_apart or one in averaged]


def loads_itself(part: torch.nn.Module) -> bool:
    """Whether a module does more with its part of a state dictionary than torch's layers, which
    copy it: it may give its buffers other shapes."""
    load = type(part)._load_from_state_dict
    return bool(part._load_state_dict_pre_hooks) or not load.__module__.startswith("torch.nn.")


def without_functions(state: Any) -> Any:
    """The state of a schedule, and of those in it, without functions. SWALR has one, of its class:
    the schedule that the state is loaded into has it, too."""
    if isinstance(state, dict):
        plain = {key: without_functions(value) for key, value in state.items()}
        return {key: value for key, value in plain.items() if not isinstance(value, FunctionType)}
    return [*map(without_functions, state)] if type(state) is list else state


def tied_of(entries: Iterable[Registered]) -> dict[str, dict[str, str]]:
    """Of each module, which of its tensors are other ones of it, as in Manifest."""
    found: dict[str, dict[str, str]] = {}
    for entry in entries:
        if not isinstance(entry.object, torch.nn.Module):
            continue
        first: dict[tuple[Any, ...], str] = {}
        tied: dict[str, str] = {}
        for name, tensor in state_of(entry).items():
            if is_dense(tensor):
                # By memory and shape: a transposed view of a tied weight is another tensor.
                where = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
                if (one := first.setdefault((*where, tensor.dtype), name)) != name:
                    tied[name] = one
        found[entry.name] = tied
    return found


def optimizers_within(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """It, the optimizer that it has inside, as SAM, Lookahead and Accelerate's do, and so on."""
    found = [optimizer]
    for one in found:
        inside = [getattr(one, name, None) for name in ("optimizer", "base_optimizer")]
        found += [
            inner
            for inner in inside
            if isinstance(inner, torch.optim.Optimizer) and all(inner is not f for f in found)
        ][:1]
    return found


def classes_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of its class and of those that it extends; of a sharded one, of that of its
    shards. With another optimizer inside, first the same with that one, as `SAM of AdamW`."""
    classes: list[str] = []
    above = torch.optim.Optimizer.__mro__
    for one in reversed(optimizers_within(optimizer)):
        made = type(one)
        if isinstance(one, ZeroRedundancyOptimizer):
            made = optimizer_engine_of(one).shard.optimizer_class
        own = [each.__name__ for each in made.__mro__ if each not in above]
        classes = [f"{outer} of {inner}" for outer in own for inner in classes] + own
    return classes


@dataclass(frozen=True, slots=True)
class RegisteredObjects:
    """What a checkpoint says of the registered objects. kinds, optimizers, tied: as in Manifest."""

    kinds: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, list[str]] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, registry: Registry) -> Self:
        kinds = {entry.name: kind_of(entry) for entry in registry}
        found = [(entry.name, entry.object) for entry in registry]
        optimizers = {
            name: classes_of(one) for name, one in found if isinstance(one, torch.optim.Optimizer)
        }
        return cls(kinds, optimizers, tied_of(registry))


def collect_replicated(
    entries: Sequence[Registered], rank: int, writers: Sequence[int]
) -> Contents:
    """This rank's part of the state that is equal on all ranks: a share of the bytes; the first
    writer adds the leaves.

    writers: the ranks whose state is current; a rank that has joined may have missed steps.
    """
    found = Contents()
    # The parameters of a joined rank may be those of an earlier step.
    if rank not in writers:
        return found
    tensors: list[tuple[Path, torch.Tensor]] = []
    for entry in entries:
        leaves = _leaves_of_state((entry.name,), state_of(entry))
        for place, (path, value) in enumerate(leaves):
            found.places[path] = place
            if is_dense(value):
                _check_held(path, value)
                tensors.append((path, value.detach()))
            # Small values are equal on all ranks, and one of them writes them.
            elif rank == writers[0]:
                found.leaves[path] = leaf_of(path, value)
    ranges = split_evenly(
        [(tensor.numel(), tensor.element_size()) for _, tensor in tensors],
        list(writers).index(rank),
        len(writers),
    )
    for (path, tensor), (start, stop) in zip(tensors, ranges, strict=True):
        if start < stop:
            part = tensor.reshape(-1)[start:stop]
            found.ranges.append(
                TensorRange(path, tuple(tensor.shape), tensor.dtype, start, stop, (part,))
            )
    return found


def _check_held(path: Path, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise TypeError(
            f"{'.'.join(map(str, path))} is a nested tensor, which a checkpoint cannot hold. "
            "Return the list of its parts from state_dict(), list(tensor.unbind())"
        )
    if not can_hold(tensor.dtype):
        raise TypeError(
            f"{'.'.join(map(str, path))} is a tensor of {tensor.dtype}, which a checkpoint cannot "
            "hold. Keep its bytes, tensor.view(torch.uint8), or leave a buffer out of the state: "
            "register_buffer(..., persistent=False)"
        )


def whole_of(path: Path, tensor: torch.Tensor) -> TensorRange:
    _check_held(path, tensor)
    flat = tensor.detach().reshape(-1)
    return TensorRange(path, tuple(tensor.shape), tensor.dtype, 0, flat.numel(), (flat,))


def add_leaf(path: Path, value: Any, found: Contents) -> None:
    """Add a whole tensor, or any other object."""
    if is_dense(value):
        found.ranges.append(whole_of(path, value))
    else:
        found.leaves[path] = leaf_of(path, value)


def collect_own(path: Path, state: Any, found: Contents) -> None:
    """Add the whole of a state that only this rank has."""
    for place, (below, value) in enumerate(_leaves_of_state(path, state)):
        found.places[below] = place
        add_leaf(below, value, found)


class HostCopy:
    """Host buffers that are reused by the next checkpoint: new memory costs more than the copy.
    One set is enough, since only one checkpoint is in flight."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[Path, int, int, torch.dtype], torch.Tensor] = {}
        self.taken: list[TensorRange] = []
        """What the last call of `take` has returned."""

    def take(self, ranges: Sequence[TensorRange]) -> list[TensorRange]:
        """Copy each range to one host buffer, unchanged until the next call. Blocks until done."""
        is_cuda = self._device.type == "cuda"
        kept, copied = self._buffers, []
        self._buffers = {}
        for ranged in ranges:
            key = (ranged.path, ranged.start, ranged.stop, ranged.dtype)
            buffer = kept.get(key)
            # Pinned memory is slow to get, so the buffers of the save before are used again.
            if buffer is None:
                buffer = torch.empty(
                    ranged.stop - ranged.start, dtype=ranged.dtype, pin_memory=is_cuda
                )
            self._buffers[key] = buffer
            at = 0
            for part in ranged.parts:
                buffer[at : at + part.numel()].copy_(part, non_blocking=is_cuda)
                at += part.numel()
            copied.append(replace(ranged, parts=(buffer,)))
        if is_cuda:
            torch.cuda.synchronize(self._device)
        self.taken = copied
        return copied
