"""Digests of an optimizer's state, in few operations.

A sum has a price of its own: 4 µs in a loop, and several times that in a step, whose other work has
taken the caches; the memory of a tile takes 25 µs. Optimizers make their state piece by piece. So
the state is laid side by side, memory that lies so is summed at once, and what there is to sum is
looked up again only when it has become something else.
"""

from __future__ import annotations

import operator
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..shards.parameter_shard import ParameterShard
from ..shards.shard_state import MASTER
from ..shards.shardable_optimizers import ELEMENTWISE
from .digests import WORD, as_int64, digest, factor_of, num_copies, total


@dataclass(frozen=True, slots=True)
class _DigestedState:
    """The parts of one shard's state that its digest reads, by name.

    tensors: in as few pieces as possible.
    counters: tensors without dimensions, of one dtype and device each.
    constant: the digest of everything that is not a tensor.
    """

    tensors: Mapping[str, Sequence[torch.Tensor]]
    counters: Sequence[tuple[str, list[torch.Tensor]]]
    constant: int

    def digest(self, device: torch.device) -> torch.Tensor:
        sums = [
            total([digest(tensor) for tensor in tensors], device) * factor_of(name)
            for name, tensors in self.tensors.items()
        ]
        sums += [digest(torch.stack(values)) * factor_of(name) for name, values in self.counters]
        return total(sums, device) + self.constant


class StateDigests:
    """Digests of the optimizer's state and of the masters that one rank keeps."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of the memory."""
        self._copies: list[_DigestedState] = []
        self._seen: tuple[int, int, list[tuple[Mapping[str, Any], list[Any]]]] = -1, 0, []
        """The shard's num_rewritten, the number of pieces with state, and each one's state."""

    def of(self, shard: ParameterShard) -> list[torch.Tensor]:
        """The digests of this rank's shard, then of its replicas."""
        if not self._is_as_seen(shard):
            self.forget()
            lay_side_by_side(shard)
            self._look_up(shard)
        return [copy.digest(shard.group.device) for copy in self._copies]

    def _is_as_seen(self, shard: ParameterShard) -> bool:
        num_rewritten, num_pieces, states = self._seen
        return (
            num_rewritten == shard.num_rewritten
            and num_pieces == _num_pieces(shard)
            and all(
                len(state) == len(values) and all(map(operator.is_, state.values(), values))
                for state, values in states
            )
        )

    def _look_up(self, shard: ParameterShard) -> None:
        tensors: list[dict[str, list[torch.Tensor]]] = [
            defaultdict(list) for _ in range(num_copies(shard))
        ]
        counters: list[dict[Any, list[torch.Tensor]]] = [defaultdict(list) for _ in tensors]
        constants = [0] * len(tensors)
        for distance, name, value in _entries(shard):
            # Numbers are digested once, here; they are replaced when they change, which is seen.
            if not isinstance(value, torch.Tensor):
                constants[distance] += factor_of(f"{name}={struct.pack('d', value).hex()}")
            elif value.dim():  # Those of one name are digested in one kernel, if they lie in a row.
                tensors[distance][name].append(value)
            else:
                counters[distance][name, value.dtype, value.device].append(value)
        self._copies = [
            _DigestedState(
                {name: list(runs(values)) for name, values in by_name.items()},
                [(name, values) for (name, _, _), values in by_kind.items()],
                as_int64(constant),
            )
            for by_name, by_kind, constant in zip(tensors, counters, constants, strict=True)
        ]
        states = shard.optimizer.state.values() if shard.optimizer is not None else ()
        seen = [(state, list(state.values())) for state in states]
        self._seen = shard.num_rewritten, _num_pieces(shard), seen


def _num_pieces(shard: ParameterShard) -> int:
    return len(shard.optimizer.state) if shard.optimizer is not None else 0


def _entries(shard: ParameterShard) -> Iterator[tuple[int, str, Any]]:
    """What is kept beside the parameters: distance to the owner, name, a tensor or a number."""
    if shard.optimizer is None:
        return
    state = shard.optimizer.state
    for bucket, pieces in zip(shard.buckets, shard.pieces, strict=True):
        distance_of = {id(kept): distance for distance, kept in enumerate(bucket.ranges)}
        for mine in pieces:
            distance = distance_of[id(mine.range)]
            if mine.range.has_master:
                yield distance, MASTER, mine.tensor
            for name, value in state.get(mine.tensor, {}).items():
                if isinstance(value, torch.Tensor | bool | int | float):
                    yield distance, str(name), value


def lay_side_by_side(shard: ParameterShard) -> None:
    """Move the state of all pieces of a range into one tensor for each name. Only of known
    optimizers, which update their state in place and keep it nowhere else."""
    if shard.optimizer is None or shard.optimizer_class not in ELEMENTWISE:
        return
    for pieces in shard.pieces:
        alike: dict[Any, list[dict[str, torch.Tensor]]] = defaultdict(list)
        for mine in pieces:
            state = shard.optimizer.state.get(mine.tensor, {})
            for name, value in state.items():
                # Scalars are counted apart, and a digest adds whole words.
                if isinstance(value, torch.Tensor) and value.dim() and _has_whole_words(value):
                    alike[id(mine.range), name, value.dtype].append(state)
        for (_, name, _), states in alike.items():
            values = [state[name] for state in states]
            flat = torch.cat([value.view(-1) for value in values])
            parts = flat.split([value.numel() for value in values])
            for state, value, part in zip(states, values, parts, strict=True):
                state[name] = part.view(value.shape)


def runs(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same memory in fewer tensors: those of whole words, each of which begins where the one
    before it ends, are one. The sum of their digests is the same."""
    run: list[torch.Tensor] = []
    end = 0
    for tensor in tensors:
        start, is_whole = tensor.data_ptr(), _has_whole_words(tensor)
        if run and not (is_whole and start == end and tensor.dtype == run[0].dtype):
            yield from _joined(run)
            run = []
        run.append(tensor)
        # Bytes beside whole words are added one by one, so such a tensor stays by itself.
        end = start + tensor.nbytes if is_whole else 0
    if run:
        yield from _joined(run)


def _joined(run: list[torch.Tensor]) -> list[torch.Tensor]:
    first, numel = run[0].detach(), sum(tensor.numel() for tensor in run)
    end = (first.storage_offset() + numel) * first.itemsize
    if len(run) == 1 or end > first.untyped_storage().nbytes():  # Neighbours by chance.
        return run
    return [first.as_strided((numel,), (1,))]


def _has_whole_words(tensor: torch.Tensor) -> bool:
    return tensor.nbytes % WORD == 0 and tensor.is_contiguous()
