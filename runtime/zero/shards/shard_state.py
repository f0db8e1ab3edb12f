"""The state of a sharded optimizer by ranges of buckets, and how a rank gets the ranges it lacks.

A tensor of the state either has a number for each element of its parameter (`exp_avg`), or belongs
to the parameter as a whole: `step`, which is equal for all pieces of the parameter, or, if
parameters are not cut, any tensor (Adafactor's row and column sums). The former is held by ranges,
the latter by parameter. A range is a piece of a parameter or all of it. A `ShardState` holds the
state that a rank steps, receives from other ranks, or loads from a user or a checkpoint.
"""

from __future__ import annotations

import copy
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chorusline.actors.errors import StateLost
from chorusline.collectives.group import Group

from ...partition.buckets import BucketPlan
from ...partition.resharding import Range, RangesLost, Transfer, kept_by, overlap, plan_transfers

MASTER = "master"
"""Name of the tensor that is stepped, beside the optimizer's own names. It is the parameter itself,
or the float32 copy of a parameter in half precision; only the copies are saved. Plain optimizers
load and save this entry, and do not use it."""


def is_per_element(name: str, shape: Sequence[int], parameter_shape: Sequence[int]) -> bool:
    """Whether a state tensor of shape `shape` has a number for each element of the parameter."""
    return tuple(shape) == tuple(parameter_shape) and name != "step"


def address_of(tensor: torch.Tensor) -> int:
    """Of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def divided(
    state: Mapping[str, Any], shape: Sequence[int]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split a parameter's state: tensors with a number for each element, flattened, and the rest.

    shape: of the parameter, or of the piece to which the state belongs.
    """
    elements = {
        name: value.detach().reshape(-1)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and is_per_element(name, value.shape, shape)
    }
    return elements, {name: value for name, value in state.items() if name not in elements}


def _dtype_of_both(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """A dtype through which the values of both pass unchanged: all but integers above 2^53 beside
    fractions. torch.promote_types takes no float8, and a float32 for integers."""
    if one == other:
        return one
    if one.is_complex or other.is_complex:
        return torch.complex128
    if one.is_floating_point != other.is_floating_point:
        return torch.float64
    if one.is_floating_point:
        return max(torch.float32, one, other, key=lambda dtype: dtype.itemsize)
    return torch.int64  # A uint64 passes through it too, bit by bit.


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a sharded optimizer's parameters lie; equal on all ranks.

    shapes: of the parameters, by number.
    plans: of the buckets.
    dtypes: of the masters, by bucket.
    has_masters: whether the masters are copies of the parameters, by bucket.
    """

    shapes: Sequence[tuple[int, ...]]
    plans: Sequence[BucketPlan]
    dtypes: Sequence[torch.dtype]
    has_masters: Sequence[bool]

    @property
    def contents(self) -> list[int]:
        return [plan.content for plan in self.plans]

    def begins(self, other: Layout) -> bool:
        """Whether these are the first parameters and buckets of `other`."""
        parameters, buckets = len(self.shapes), len(self.plans)
        return (self.shapes, self.plans, self.dtypes) == (
            other.shapes[:parameters],
            other.plans[:buckets],
            other.dtypes[:buckets],
        )

    def everything(self) -> list[Range]:
        return [Range(bucket, 0, n) for bucket, n in enumerate(self.contents)]

    def parameters_in(self, wanted: Range) -> Iterator[tuple[int, int, Range]]:
        """The parameters that have elements in `wanted`, or none and lie there: for each its
        number, the first of these elements in the parameter, and their range in the bucket."""
        plan = self.plans[wanted.bucket]
        for parameter, offset, numel in plan.spans:
            start, stop = max(wanted.start, offset), min(wanted.stop, offset + numel)
            is_here = wanted.start <= offset < wanted.stop or offset == wanted.stop == plan.content
            if start < stop or (numel == 0 and is_here):
                yield parameter, start - offset, Range(wanted.bucket, start, stop)

    def saved(self, bucket: int, description: StateDescription | None) -> dict[str, torch.dtype]:
        """Names and dtypes of a parameter's saved tensors that have a number for each element."""
        elements = {} if description is None else dict(description.elements)
        if self.has_masters[bucket]:
            elements[MASTER] = self.dtypes[bucket]
        return elements

    def travelling(self, described: Mapping[int, StateDescription]) -> list[dict[str, torch.dtype]]:
        """Names and dtypes of the tensors that are sent with a range, by bucket."""
        by_bucket = []
        for plan, dtype in zip(self.plans, self.dtypes, strict=True):
            names = {MASTER: dtype}
            for parameter, _, _ in plan.spans:
                if parameter in described:
                    # One name may have several dtypes, and travels in one that loses nothing.
                    for name, own in described[parameter].elements.items():
                        names[name] = _dtype_of_both(names.get(name, own), own)
            by_bucket.append(names)
        return by_bucket


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """Some elements of a bucket. tensors: (range.numel,) each, by name."""

    range: Range
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateDescription:
    """The composition of one parameter's state.

    elements: dtypes of the tensors with a number for each element, by name.
    whole: the values of all other entries, by name.
    """

    elements: Mapping[str, torch.dtype]
    whole: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The ranges and descriptions of a rank's ShardState, without tensors, for other ranks."""

    ranges: Sequence[Range] = ()
    described: Mapping[int, StateDescription] = field(default_factory=dict)


class ShardState:
    """One rank's part of an optimizer's state, by ranges. It references tensors, without copies.

    ranges: the ranges that the rank keeps: whole shards of buckets, including the gaps between
        parameters.
    described: by parameter; equal on all ranks after they have exchanged inventories.
    """

    def __init__(self, ranges: Sequence[Range] = ()) -> None:
        self.ranges = list(ranges)
        self.described: dict[int, StateDescription] = {}
        # By bucket, in order and without overlaps: a rank never receives a range that it holds.
        self._parts: dict[int, list[BucketSlice]] = defaultdict(list)

    def copy(self) -> ShardState:
        """A shallow copy, which shares the tensors."""
        state = ShardState(self.ranges)
        state.described = dict(self.described)
        for bucket, parts in self._parts.items():
            state._parts[bucket] = list(parts)
        return state

    def apart_from(self, storages: Container[int]) -> ShardState:
        """A copy that shares no memory with these storages, which are given by their addresses."""
        state = self.copy()
        for parts in state._parts.values():
            parts[:] = [
                BucketSlice(
                    part.range,
                    {
                        name: tensor.clone() if address_of(tensor) in storages else tensor
                        for name, tensor in part.tensors.items()
                    },
                )
                for part in parts
            ]
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
        """Add the state of a parameter or of a piece of it.

        where: the range of the piece in the bucket.
        elements, whole: as from `divided`; MASTER may be one of the elements.
        """
        names = {name: tensor.dtype for name, tensor in elements.items() if name != MASTER}
        # A parameter without state is in the ranges, and described nowhere.
        if names or whole:
            self.described[parameter] = StateDescription(names, whole)
        if where.numel:
            self._insert(BucketSlice(where, elements))

    def add(self, part: BucketSlice) -> None:
        """Add a part that another rank has sent."""
        self.ranges.append(part.range)
        self._insert(part)

    def _insert(self, part: BucketSlice) -> None:
        insort(self._parts[part.range.bucket], part, key=lambda one: one.range.start)

    def overlapping(self, wanted: Range) -> Iterator[tuple[Range, BucketSlice]]:
        """The held ranges within `wanted`, in order, each with the part that contains it."""
        parts = self._parts[wanted.bucket]
        first = bisect_right(parts, wanted.start, key=lambda one: one.range.stop)
        for number in range(first, len(parts)):
            common = overlap(wanted, parts[number].range)
            # Parts are in order, so that no later one overlaps.
            if common is None:
                return
            yield common, parts[number]

    def views(self, wanted: Range, name: str) -> tuple[torch.Tensor, ...]:
        """Views of the held elements of `wanted`, in order."""
        return tuple(
            part.tensors[name][common.start - part.range.start : common.stop - part.range.start]
            for common, part in self.overlapping(wanted)
        )

    def cut(self, wanted: Range, name: str, into: torch.Tensor) -> torch.Tensor:
        """Copy the held elements of `wanted` to `into`, which has wanted.numel elements. Other
        elements of `into` stay unchanged."""
        flat = into.view(-1)
        for common, part in self.overlapping(wanted):
            tensor = part.tensors.get(name)
            # A parameter of the bucket may have no such state: those elements stay zero.
            if tensor is not None:
                start = common.start - part.range.start
                target = flat[common.start - wanted.start : common.stop - wanted.start]
                target.copy_(tensor[start : start + common.numel])
        return into

    def state_of(self, parameter: int, wanted: Range, like: torch.Tensor) -> dict[str, Any]:
        """A copy of the optimizer's state of a piece of a parameter; empty if there is none.
        like: the piece, for its device and shape."""
        description = self.described.get(parameter)
        if description is None:
            return {}
        state: dict[str, Any] = {
            name: self.cut(wanted, name, torch.zeros(like.shape, dtype=dtype, device=like.device))
            for name, dtype in description.elements.items()
        }
        for name, value in description.whole.items():
            # A counter is a tensor, which the optimizer would count up in all its pieces.
            state[name] = copy.deepcopy(value)
        return state


def complete(
    held: ShardState,
    inventories: Sequence[Inventory],
    layout: Layout,
    replicas: int,
    group: Group,
    leaving: Sequence[int] = (),
) -> int:
    """Add to `held` all ranges that this rank will keep in `group`; returns the bytes sent.

    inventories: of all ranks.
    replicas: number of ranks that keep each shard.
    leaving: ranks that hand over their shards. The other ranks get the ranges for a group without
        those, in the same order.

    Raises StateLost, on all ranks, if no rank holds some range any more.
    """
    for one in inventories:  # Other ranks describe parameters of which this rank has no piece.
        held.described = {**one.described, **held.described}
    # Numbered as they will be in the next generation, whose shards these are.
    staying = [rank for rank in range(group.size) if rank not in leaving]
    wanted = {
        rank: kept_by(number, len(staying), layout.contents, replicas)
        for number, rank in enumerate(staying)
    }
    try:
        plan = plan_transfers({rank: one.ranges for rank, one in enumerate(inventories)}, wanted)
    # All ranks plan the same, so all raise.
    except RangesLost as lost:
        raise StateLost(group.generation, replicas, str(lost)) from None
    return exchange(held, plan, layout.travelling(held.described), group)


def exchange(
    held: ShardState,
    plan: Sequence[Transfer],
    tensors_of: Sequence[Mapping[str, torch.dtype]],
    group: Group,
) -> int:
    """Carry out the transfers of `plan`; returns the bytes that this rank has sent.

    held: the state to send from. Received parts are added when all have arrived.
    tensors_of: by bucket, names and dtypes of the tensors to send; like `plan` equal on all ranks.
    """
    received: dict[Range, dict[str, torch.Tensor]] = defaultdict(dict)
    sent_bytes = 0
    # One exchange for each dtype, in an order that is equal on all ranks.
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
        group.all_to_all(outputs, inputs).wait_on_host()  # Before `held` claims to have it.
        sent_bytes += sum(tensor.nbytes for tensor in inputs)
        for (one, name), view in zip(coming, views, strict=True):
            received[one.range][name] = view
    for where, tensors in received.items():
        held.add(BucketSlice(where, tensors))
    return sent_bytes


def _room(
    numels: Sequence[tuple[int, int]], dtype: torch.dtype, group: Group
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Zero tensors, one per rank, and a view for each (rank, elements), in order and disjoint."""
    totals = [0] * group.size
    places = []
    for rank, numel in numels:
        places.append((rank, totals[rank], totals[rank] + numel))
        totals[rank] += numel
    room = [torch.zeros(total, dtype=dtype, device=group.device) for total in totals]
    return room, [room[rank][start:stop] for rank, start, stop in places]
