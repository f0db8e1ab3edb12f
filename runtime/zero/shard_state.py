"""The state of a sharded optimizer by ranges of buckets, and how a rank gets the ranges it lacks.

A tensor of the state either has a number for each element of its parameter (`exp_avg`), or is kept
for the parameter as a whole: `step`, which is equal wherever a piece of the parameter is, or, where
parameters are not cut, anything (Adafactor's row and column sums). The former is held by ranges,
the latter by parameter. A range is a piece of a parameter or all of it: what a rank steps, what it
receives, what a user loads and what a checkpoint holds are all a `ShardState`.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from actors.errors import StateLost
from collectives import Group

from ..partition.buckets import BucketPlan
from ..partition.resharding import Range, RangesLost, Transfer, kept_by, overlap, plan_transfers

MASTER = "master"
"""Beside the optimizer's own names: the numbers that are stepped. They are the parameters
themselves, or the float32 copies of parameters in half precision; only the copies are saved. Plain
optimizers carry them along and do not look at them."""


def is_per_element(name: str, shape: Sequence[int], parameter_shape: Sequence[int]) -> bool:
    """Whether a tensor of the state has a number for each element of the parameter, or piece.

    shape: of the tensor.
    """
    return tuple(shape) == tuple(parameter_shape) and name != "step"


def divided(
    state: Mapping[str, Any], shape: Sequence[int]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors with a number for each element, flat, and the rest of a parameter's state.

    shape: of the parameter, or of the piece that the state is of.
    """
    elements = {
        name: value.detach().reshape(-1)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and is_per_element(name, value.shape, shape)
    }
    return elements, {name: value for name, value in state.items() if name not in elements}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a sharded optimizer's parameters lie; alike on all ranks.

    shapes: of the parameters, by number.
    plans: of the buckets.
    dtypes: of the numbers that are stepped, by bucket.
    has_masters: whether these are copies of the parameters, by bucket.
    """

    shapes: Sequence[tuple[int, ...]]
    plans: Sequence[BucketPlan]
    dtypes: Sequence[torch.dtype]
    has_masters: Sequence[bool]

    @property
    def contents(self) -> list[int]:
        return [plan.content for plan in self.plans]

    def everything(self) -> list[Range]:
        return [Range(bucket, 0, n) for bucket, n in enumerate(self.contents) if n > 0]

    def parameters_in(self, wanted: Range) -> Iterator[tuple[int, int, Range]]:
        """The parameters that have elements in `wanted`: the number, which element of the parameter
        is the first of them, and the range of the bucket that they are."""
        for parameter, offset, numel in self.plans[wanted.bucket].spans:
            start, stop = max(wanted.start, offset), min(wanted.stop, offset + numel)
            if start < stop:
                yield parameter, start - offset, Range(wanted.bucket, start, stop)

    def saved(self, bucket: int, description: Description | None) -> dict[str, torch.dtype]:
        """Names and dtypes of the tensors by elements that are saved of a parameter."""
        elements = {} if description is None else dict(description.elements)
        if self.has_masters[bucket]:
            elements[MASTER] = self.dtypes[bucket]
        return elements

    def travelling(self, described: Mapping[int, Description]) -> list[dict[str, torch.dtype]]:
        """Names and dtypes of the tensors that go with a range, by bucket."""
        by_bucket = []
        for plan, dtype in zip(self.plans, self.dtypes, strict=True):
            names = {MASTER: dtype}
            for parameter, _, _ in plan.spans:
                if parameter in described:
                    names.update(described[parameter].elements)
            by_bucket.append(names)
        return by_bucket


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


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a rank tells the others of its ShardState: its ranges and descriptions, no tensors."""

    ranges: Sequence[Range] = ()
    described: Mapping[int, Description] = field(default_factory=dict)


class ShardState:
    """What one rank has of an optimizer's state, by ranges. It holds the tensors that it is given.

    ranges: of a rank's own state, what is held: whole shards of buckets, with the gaps between
        their parameters.
    described: by parameter; on every rank the same, once all have told what they hold.
    """

    def __init__(self, ranges: Sequence[Range] = ()) -> None:
        self.ranges = list(ranges)
        self.described: dict[int, Description] = {}
        # By bucket, in order and without overlaps: what is held already is never received.
        self._parts: dict[int, list[Part]] = defaultdict(list)

    def copy(self) -> ShardState:
        """Another list of the same tensors."""
        state = ShardState(self.ranges)
        state.described = dict(self.described)
        for bucket, parts in self._parts.items():
            state._parts[bucket] = list(parts)
        return state

    @property
    def inventory(self) -> Inventory:
        return Inventory(self.ranges, self.described)

    def put(
        self,
        parameter: int,
        where: Range,
        elements: Mapping[str, torch.Tensor],
        whole: Mapping[str, Any],
    ) -> None:
        """Hold the state of a piece of a parameter, or of all of it.

        where: its elements in the bucket. elements, whole: as `divided` makes them; the numbers
        that are stepped are among the elements, or are not held here.
        """
        names = {name: tensor.dtype for name, tensor in elements.items() if name != MASTER}
        if names or whole:
            self.described[parameter] = Description(names, whole)
        self._insert(Part(where, elements))

    def add(self, part: Part) -> None:
        """Hold what another rank has sent."""
        self.ranges.append(part.range)
        self._insert(part)

    def _insert(self, part: Part) -> None:
        insort(self._parts[part.range.bucket], part, key=lambda one: one.range.start)

    def overlapping(self, wanted: Range) -> Iterator[tuple[Range, Part]]:
        """What is there of `wanted`, in order, and the part that it is in."""
        parts = self._parts[wanted.bucket]
        first = bisect_right(parts, wanted.start, key=lambda one: one.range.stop)
        for number in range(first, len(parts)):
            common = overlap(wanted, parts[number].range)
            if common is None:
                return
            yield common, parts[number]

    def views(self, wanted: Range, name: str) -> tuple[torch.Tensor, ...]:
        """Views of the tensors that hold the elements of `wanted`, one behind the other."""
        return tuple(
            part.tensors[name][common.start - part.range.start : common.stop - part.range.start]
            for common, part in self.overlapping(wanted)
        )

    def cut(self, wanted: Range, name: str, into: torch.Tensor) -> torch.Tensor:
        """Copy what is there of `wanted` to `into`, of wanted.numel elements; the gaps stay as they
        are."""
        flat = into.view(-1)
        for common, part in self.overlapping(wanted):
            tensor = part.tensors.get(name)
            if tensor is not None:
                start = common.start - part.range.start
                target = flat[common.start - wanted.start : common.stop - wanted.start]
                target.copy_(tensor[start : start + common.numel])
        return into

    def state_of(self, parameter: int, wanted: Range, like: torch.Tensor) -> dict[str, Any]:
        """The optimizer's state of a piece of a parameter, in memory of its own; empty if it has
        none. like: the piece, for its device and shape."""
        description = self.described.get(parameter)
        if description is None:
            return {}
        state: dict[str, Any] = {
            name: self.cut(wanted, name, torch.zeros(like.shape, dtype=dtype, device=like.device))
            for name, dtype in description.elements.items()
        }
        for name, value in description.whole.items():
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return state


def complete(
    held: ShardState,
    inventories: Sequence[Inventory],
    layout: Layout,
    replicas: int,
    group: Group,
    leaving: Sequence[int] = (),
) -> int:
    """Bring `held` to all that this rank shall keep in `group`; returns the bytes that it sent.

    inventories: of all ranks.
    replicas: ranks that keep each shard.
    leaving: ranks that hand over; the others get what they shall keep in a group without those,
        where they have the same order.

    Raises StateLost, on all ranks, if nobody has some of it any more.
    """
    for one in inventories:  # Of parameters that this rank has no piece of, others know it.
        held.described = {**one.described, **held.described}
    staying = [rank for rank in range(group.size) if rank not in leaving]
    wanted = {
        rank: kept_by(number, len(staying), layout.contents, replicas)
        for number, rank in enumerate(staying)
    }
    try:
        plan = plan_transfers({rank: one.ranges for rank, one in enumerate(inventories)}, wanted)
    except RangesLost as lost:
        raise StateLost(group.generation, replicas, str(lost)) from None
    return exchange(held, plan, layout.travelling(held.described), group)


def exchange(
    held: ShardState,
    plan: Sequence[Transfer],
    tensors_of: Sequence[Mapping[str, torch.dtype]],
    group: Group,
) -> int:
    """Send and receive what `plan` says; returns the bytes that this rank has sent.

    tensors_of: by bucket, the names and dtypes that travel. Same plan and names on all ranks. What
    arrives is added to `held` when all of it is there.
    """
    received: dict[Range, dict[str, torch.Tensor]] = defaultdict(dict)
    sent_bytes = 0
    for dtype in sorted({dtype for names in tensors_of for dtype in names.values()}, key=str):
        moves = [
            (one, name)
            for one in plan
            for name, kind in sorted(tensors_of[one.range.bucket].items())
            if kind == dtype
        ]
        going = [move for move in moves if move[0].source == group.rank]
        coming = [move for move in moves if move[0].target == group.rank]
        inputs, views = _room([(one.target, one.range.numel) for one, _ in going], dtype, group)
        for (one, name), view in zip(going, views, strict=True):
            held.cut(one.range, name, view)
        outputs, views = _room([(one.source, one.range.numel) for one, _ in coming], dtype, group)
        group.all_to_all(outputs, inputs).wait()
        sent_bytes += sum(tensor.nbytes for tensor in inputs)
        for (one, name), view in zip(coming, views, strict=True):
            received[one.range][name] = view
    for where, tensors in received.items():
        held.add(Part(where, tensors))
    return sent_bytes


def _room(
    numels: Sequence[tuple[int, int]], dtype: torch.dtype, group: Group
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Zeros by rank, and views of them, one for each of (rank, elements), one behind the other."""
    totals = [0] * group.size
    places = []
    for rank, numel in numels:
        places.append((rank, totals[rank], totals[rank] + numel))
        totals[rank] += numel
    room = [torch.zeros(total, dtype=dtype, device=group.device) for total in totals]
    return room, [room[rank][start:stop] for rank, start, stop in places]
