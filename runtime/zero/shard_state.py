"""What a rank holds of the optimizer's state, by ranges of buckets, and how it gets what it lacks.

Only for elementwise optimizers: there a tensor of the state has one number for each of the
parameter's, or belongs to the parameter as a whole (`step`) and is equal wherever a piece of it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actors.errors import StateLost
from collectives import Group

from ..partition.resharding import Range, RangesLost, Transfer, kept_by, overlap, plan_transfers

VALUES = "values"
"""Beside the optimizer's own names: the numbers that are stepped, parameters or their masters."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some elements of a bucket. tensors: (range.numel,) each, by name."""

    range: Range
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Description:
    """What the state of one parameter consists of.

    elements: dtypes of the tensors with a number for each of the parameter's, by name.
    whole: the rest, itself.
    """

    elements: Mapping[str, torch.dtype]
    whole: Mapping[str, Any]


class HeldState:
    """ranges: what is held, whole shards of buckets with the gaps between their parameters.
    parts: the numbers, gaps left out. described: by parameter; on every rank the same, once told.
    """

    def __init__(
        self, ranges: Sequence[Range], parts: Sequence[Part], described: Mapping[int, Description]
    ) -> None:
        self.ranges = list(ranges)
        self.described = dict(described)
        self._parts: dict[int, list[Part]] = defaultdict(list)
        for part in parts:
            self._parts[part.range.bucket].append(part)

    def copy(self) -> HeldState:
        """Another list of the same tensors."""
        return HeldState(
            self.ranges, [part for parts in self._parts.values() for part in parts], self.described
        )

    def learn(self, theirs: Mapping[int, Description]) -> None:
        """What another rank says of parameters that this one has no piece of."""
        self.described = {**theirs, **self.described}

    def add(self, part: Part) -> None:
        self.ranges.append(part.range)
        self._parts[part.range.bucket].append(part)

    def overlapping(self, wanted: Range) -> Iterator[tuple[Range, Part]]:
        for part in self._parts[wanted.bucket]:
            common = overlap(wanted, part.range)
            if common is not None:
                yield common, part

    def cut(self, wanted: Range, name: str, into: torch.Tensor) -> torch.Tensor:
        """Copy what is there of `wanted` to `into`, (wanted.numel,); the gaps stay as they are."""
        for common, part in self.overlapping(wanted):
            tensor = part.tensors.get(name)
            if tensor is not None:
                start = common.start - part.range.start
                target = into[common.start - wanted.start : common.stop - wanted.start]
                target.copy_(tensor[start : start + common.numel])
        return into

    def state_of(self, parameter: int, wanted: Range, device: torch.device) -> dict[str, Any]:
        """The state of a piece of a parameter, in memory of its own; empty if it has none."""
        described = self.described.get(parameter)
        if described is None:
            return {}
        state: dict[str, Any] = {
            name: self.cut(wanted, name, torch.zeros(wanted.numel, dtype=dtype, device=device))
            for name, dtype in described.elements.items()
        }
        for name, value in described.whole.items():
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return state


Told = tuple[Sequence[Range], Mapping[int, Description]]
"""What a rank says of its HeldState: ranges, described."""


def complete(
    held: HeldState,
    told: Sequence[Told],
    contents: Sequence[int],
    replicas: int,
    tensors_of: Callable[[Mapping[int, Description]], Sequence[Mapping[str, torch.dtype]]],
    group: Group,
    leaving: Sequence[int] = (),
) -> int:
    """Bring `held` to all that this rank shall keep in `group`; returns the bytes that it sent.

    told: of all ranks. contents: of the buckets. tensors_of: by bucket the names and dtypes that
    travel, of such descriptions. leaving: ranks that hand over; the others get what they shall keep
    in a group without those, where they have the same order.

    Raises StateLost, on all ranks, if nobody has some of it any more.
    """
    for _, described in told:
        held.learn(described)
    staying = [rank for rank in range(group.size) if rank not in leaving]
    wanted = {
        rank: kept_by(number, len(staying), contents, replicas)
        for number, rank in enumerate(staying)
    }
    try:
        plan = plan_transfers({rank: ranges for rank, (ranges, _) in enumerate(told)}, wanted)
    except RangesLost as lost:
        raise StateLost(group.generation, replicas, str(lost)) from None
    return exchange(held, plan, tensors_of(held.described), group)


def exchange(
    held: HeldState,
    plan: Sequence[Transfer],
    tensors_of: Sequence[Mapping[str, torch.dtype]],
    group: Group,
) -> int:
    """Send and receive what `plan` says; returns the bytes that this rank has sent.

    tensors_of: by bucket, the names and dtypes that travel. Same plan and names on all ranks. What
    arrives is added to `held` when all of it is there.
    """
    dtypes = sorted({dtype for names in tensors_of for dtype in names.values()}, key=str)
    received: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    sent_bytes = 0
    for dtype in dtypes:
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
        incoming = [0] * group.size
        for transfer in plan:
            names = [n for n, d in sorted(tensors_of[transfer.range.bucket].items()) if d == dtype]
            numel = transfer.range.numel
            if transfer.source == group.rank:
                for name in names:
                    empty = torch.zeros(numel, dtype=dtype, device=group.device)
                    outgoing[transfer.target].append(held.cut(transfer.range, name, empty))
            elif transfer.target == group.rank:
                incoming[transfer.source] += numel * len(names)
        inputs = [_joined(tensors, dtype, group.device) for tensors in outgoing]
        outputs = [torch.zeros(n, dtype=dtype, device=group.device) for n in incoming]
        group.all_to_all(outputs, inputs).wait()
        sent_bytes += sum(tensor.nbytes for tensor in inputs)
        at = [0] * group.size
        for number, transfer in enumerate(plan):
            if transfer.target != group.rank:
                continue
            for name, kind in sorted(tensors_of[transfer.range.bucket].items()):
                if kind == dtype:
                    begin = at[transfer.source]
                    at[transfer.source] = begin + transfer.range.numel
                    arrived = outputs[transfer.source][begin : at[transfer.source]]
                    received[number][name] = arrived
    for number, tensors in received.items():
        held.add(Part(plan[number].range, tensors))
    return sent_bytes


def _joined(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.cat(list(tensors)) if tensors else torch.empty(0, dtype=dtype, device=device)
