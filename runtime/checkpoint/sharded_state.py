"""A `ZeroRedundancyOptimizer` in a checkpoint: every rank writes and reads ranges of its state.

    name/state/<parameter>/<tensor>    a tensor of the optimizer's plain state, by parameter name
    name/state/<parameter>/master      the float32 copy of a parameter in half precision
    name/param_groups, name/num_steps  leaves
    name/max_norm                      a leaf, which older checkpoints do not have

torch.distributed.checkpoint also uses names, not numbers, for the parameters of optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from ..partition.resharding import Range
from ..zero.shards.optimizer_trial import Shardability
from ..zero.shards.shard_state import MASTER, Layout, ShardState, is_per_element
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer, optimizer_engine_of
from .contents import add_leaf, leaf_of
from .format.errors import CheckpointCorrupted, CheckpointMismatch
from .format.manifest import ManifestEntry, name_of
from .format.pieces import Contents, Path, TensorRange
from .format.reader import CheckpointReader

STATE, GROUPS, NUM_STEPS, MAX_NORM = "state", "param_groups", "num_steps", "max_norm"


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """The facts on a sharded optimizer that a checkpoint needs; they outlive the optimizer.

    name: the registered name of the optimizer.
    parameters: the names of the parameters, by number in the layout; numbers for unnamed ones.
    layout: where the elements of the parameters lie.
    groups: the user's parameter groups, with the names of their parameters.
    verdict: how finely the state may be cut.
    """

    name: str
    parameters: Sequence[str]
    layout: Layout
    groups: list[dict[str, Any]]
    verdict: Shardability

    @classmethod
    def of(cls, name: str, optimizer: ZeroRedundancyOptimizer) -> Self:
        numbered = [p for options in optimizer.param_groups for p in options["params"]]
        names = {id(parameter): str(number) for number, parameter in enumerate(numbered)}
        names |= optimizer._names()
        groups = [
            {
                **{key: value for key, value in options.items() if key != "param_names"},
                "params": [names[id(p)] for p in options["params"]],
            }
            for options in optimizer.param_groups
        ]
        shard = optimizer_engine_of(optimizer).shard
        parameters = [names[id(p)] for p in shard.parameters]
        return cls(name, parameters, shard.layout, groups, shard.verdict)

    def collect(self, state: ShardState, ranges: Iterable[Range], found: Contents) -> None:
        """Add the state of these ranges, all of which `state` holds, to `found`."""
        for written in ranges:
            for number, start, where in self.layout.parameters_in(written):
                described, shape = state.described.get(number), self.layout.shapes[number]
                # A parameter without elements has state nevertheless, of no elements.
                if not where.numel and described is not None:
                    for key, dtype in described.elements.items():
                        add_leaf(self._path(number, key), torch.empty(shape, dtype=dtype), found)
                for key in self.layout.saved(where.bucket, described) if where.numel else ():
                    parts = state.views(where, key)
                    found.ranges.append(
                        TensorRange(
                            self._path(number, key),
                            shape,
                            parts[0].dtype,
                            start,
                            start + where.numel,
                            parts,
                        )
                    )
                # Equal on all ranks with a piece; the rank with the beginning writes it.
                for key, value in described.whole.items() if described and start == 0 else ():
                    add_leaf(self._path(number, key), value, found)

    def collect_leaves(self, num_steps: int, max_norm: float | None, found: Contents) -> None:
        """Add the parameter groups, step count and max_norm, which are equal on all ranks."""
        leaves = {GROUPS: self.groups, NUM_STEPS: num_steps, MAX_NORM: max_norm}
        for key, value in leaves.items():
            found.leaves[self.name, key] = leaf_of((self.name, key), value)

    def read(
        self, reader: CheckpointReader, ranges: Sequence[Range], saved_names: Mapping[str, str]
    ) -> Iterator[ShardState]:
        """The state of these ranges, by bucket. saved_names: the saved names, by the names here.

        Raises CheckpointMismatch if the shape or dtype of a parameter was another one.
        """
        below: dict[str | int, list[ManifestEntry]] = {}
        for entry in reader.below(self.name, STATE):
            # The name, "state", the parameter and the key.
            if len(entry.path) < 4:
                raise CheckpointCorrupted(
                    reader.path, f"{name_of(entry.path)} is not what an optimizer saves"
                )
            below.setdefault(entry.path[2], []).append(entry)
        for bucket in range(len(self.layout.plans)):
            held = ShardState()
            for wanted in (one for one in ranges if one.bucket == bucket):
                for number, start, where in self.layout.parameters_in(wanted):
                    entries = below.get(saved_names[self.parameters[number]], [])
                    self._read_piece(reader, entries, number, start, where, held)
            yield held

    def _read_piece(
        self,
        reader: CheckpointReader,
        entries: Sequence[ManifestEntry],
        number: int,
        start: int,
        where: Range,
        held: ShardState,
    ) -> None:
        """Read the state of a parameter's elements from `start` on, which lie at `where`."""
        shape, has_master = self.layout.shapes[number], self.layout.has_masters[where.bucket]
        elements, whole = {}, {}
        for entry in entries:
            key = str(entry.path[3])
            if entry.dtype is not None and is_per_element(key, entry.shape, shape):
                # A saved master is skipped if the parameter is not in half precision here.
                if key != MASTER or has_master:
                    elements[key] = reader.tensor(entry, start, start + where.numel)
                continue
            value = None if where.numel else reader.value(entry)
            if isinstance(value, torch.Tensor) and is_per_element(key, value.shape, shape):
                elements[key] = value.reshape(-1)
                continue
            is_large = entry.dtype is not None and entry.numel > 1
            if is_large and (key == MASTER or not self.verdict.has_any_shape(key)):
                raise CheckpointMismatch(
                    reader.path,
                    f"{name_of(entry.path)} is {entry} in it, and the parameter is {shape} here",
                )
            whole[key] = reader.value(entry)
        held.put(number, where, elements, whole)

    def _path(self, number: int, key: str) -> Path:
        return (self.name, STATE, self.parameters[number], key)
