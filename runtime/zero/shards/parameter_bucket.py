"""Parameters that travel together: one flat tensor, and the ranges of it that a rank keeps.

The layout is that of the gradient bucket: elements in the order of their indices, on all ranks. A
parameter in another memory format (channels_last) keeps memory of its own beside `flat`: it is
copied there before a step, and back when the new values have been gathered.

For parameters in float16 and bfloat16 the optimizer steps a float32 copy of each range (the
master): in eight bits of mantissa most updates would round to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group

from ...partition.buckets import BucketPlan
from ...partition.resharding import guarded_ranks
from ...partition.shards import padded_numel, room_for, shard_numel

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Gather:
    """An all-gather of a bucket's parameters in flight. `wait` copies `staged` to `target`, then
    to parameters in another memory format. Where it gathers in place, both are None."""

    bucket: ParameterBucket
    work: Work
    staged: torch.Tensor | None = None
    target: torch.Tensor | None = None

    def wait(self) -> None:
        """Where it matters, `work.wait_on_host()` then tells how it has ended."""
        self.work.order_stream()
        if self.staged is not None and self.target is not None:
            self.target.copy_(self.staged)
        self.bucket.give_out()


def has_own_format(tensor: torch.Tensor) -> bool:
    """Whether the elements are in another order in memory than their indices, without gaps."""
    return not tensor.is_contiguous() and torch.empty_like(tensor).stride() == tensor.stride()


def in_format_of(parameter: torch.Tensor, value: Any) -> Any:
    """A value of a parameter's state, in the parameter's memory format if it has its shape, as the
    optimizer makes it: fused optimizers step tensors of several formats wrongly."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if not has_own_format(parameter):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


class ShardRange:
    """One shard's range of a bucket on this rank: its own shard, or a replica of another rank's.

    owner: the rank that owns the shard.
    values: (n,) view of the bucket's `flat`.
    master: (n,) stepped by the optimizer: `values` itself, or its float32 copy. A replica on a GPU
        is a copy, too: an all-gather that is aborted there leaves anything in the ranges that it
        receives, and nobody else may have what the lost rank had.
    reduced: (n,) receives the sum of the gradients; None if gradients are read from `.grad`.
    gradient: (n,) the mean gradient, in the master's dtype.
    """

    def __init__(
        self, owner: int, values: torch.Tensor, reduced: torch.Tensor | None, is_replica: bool
    ) -> None:
        self.owner = owner
        self.values = values
        self.has_master = values.dtype in _HALF
        # A half has its master as a copy already; on a CPU no collective leaves garbage.
        self._is_copy = is_replica and not self.has_master and values.device.type != "cpu"
        self.master = values.float() if self.has_master else values
        if self._is_copy:
            self.master = values.clone()
        self.reduced = reduced
        self.gradient = reduced.float() if self.has_master and reduced is not None else reduced

    def take_gradient(self, divisor: float, coefficient: float) -> None:
        """Set `gradient` to the received sum over the ranks, divided by `divisor`, and multiplied
        by `coefficient`."""
        if self.gradient is None or self.reduced is None:
            return
        if self.gradient is not self.reduced:
            self.gradient.copy_(self.reduced)
        if divisor != 1:
            self.gradient.div_(divisor)
        if coefficient != 1:
            self.gradient.mul_(coefficient)

    def take_parameters(self) -> None:
        """Copy parameters to the master where they were changed outside the optimizer (a loaded
        checkpoint, an average): there the master does not round to the parameter's value."""
        if self.has_master:
            is_ours = self.master.to(self.values.dtype) == self.values
            self.master.copy_(torch.where(is_ours, self.master, self.values.float()))
        elif self._is_copy:
            self.master.copy_(self.values)

    def publish_master(self) -> None:
        """Copy the master, rounded, into `values`, which are gathered."""
        if self.has_master or self._is_copy:
            self.values.copy_(self.master)


class ParameterBucket:
    """Parameters that travel together, in the memory of one flat tensor.

    parameters: of the optimizer, by number; those that come later are appended to it.
    flat: all parameters of the plan, with room after them for slack when ranks come (`room_for`).
    ranges: the ranges that this rank keeps: its own shard first, then replicas.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        reduced: torch.Tensor | None,
        replicas: int,
    ) -> None:
        first = parameters[plan.spans[0][0]]
        self.plan = plan
        self.flat = torch.zeros(
            room_for(plan.content, group.size), dtype=first.dtype, device=first.device
        )
        self._parameters = parameters
        self._apart: dict[int, torch.Tensor] = {}
        """By number, the places in `flat` of parameters with memory of their own."""
        self._is_ahead = False
        """Whether `flat` was stepped, and these parameters were not brought into line yet."""
        for span in plan.spans:
            self._lay_out(*span)
        self._pointers = self._pointers_now()
        self.version = 0
        """Number of steps taken on this bucket since it was laid out."""
        self.cut(group, reduced, replicas)

    def cut(self, group: Group, reduced: torch.Tensor | None, replicas: int) -> None:
        """Lay out again the ranges that this rank keeps."""
        length = shard_numel(self.plan.content, group.size)
        self.ranges: list[ShardRange] = []
        for owner in guarded_ranks(group.rank, group.size, replicas):
            values = self.flat[owner * length : (owner + 1) * length]
            is_replica = bool(self.ranges)
            # The first range is this rank's own, whose memory the reducer has; replicas have their
            # own.
            if is_replica and reduced is not None:
                reduced = torch.zeros_like(reduced)
            self.ranges.append(ShardRange(owner, values, reduced, is_replica))

    def _lay_out(self, number: int, offset: int, numel: int) -> None:
        parameter = self._parameters[number]
        view = self.flat[offset : offset + numel].view(parameter.shape)
        view.copy_(parameter.detach())
        if has_own_format(parameter):
            self._apart[number] = view
            parameter.data = parameter.detach().clone()
            return
        self._apart.pop(number, None)
        strides = parameter.stride() if parameter.is_contiguous() else view.stride()
        # The same memory, as a storage of the parameter's size: a plain view would have
        # torch.save write the whole bucket, and libraries take parameters for tied ones.
        parameter.data = from_dlpack(view).as_strided(view.shape, strides)

    def _pointers_now(self) -> list[tuple[int, int]]:
        return [(n, self._parameters[n].data_ptr()) for n, _, numel in self.plan.spans if numel]

    def rebound(self) -> list[tuple[int, int, int]]:
        """The spans of parameters that the program has rebound (`p.data = …`), each of which then
        has its values to itself. Raises RuntimeError for another dtype, device or shape."""
        parameters = self._parameters
        if all(parameters[number].data_ptr() == pointer for number, pointer in self._pointers):
            return []
        known, spans = dict(self._pointers), []
        for number, offset, numel in self.plan.spans:
            parameter = parameters[number]
            there = (parameter.dtype, parameter.device, parameter.numel())
            if there != (self.flat.dtype, self.flat.device, numel):
                raise RuntimeError(
                    f"parameter {number} has {numel} elements of {self.flat.dtype} on "
                    f"{self.flat.device} in the optimizer's shards, but was replaced by "
                    f"{parameter.numel()} of {parameter.dtype} on {parameter.device}. Convert, "
                    "move or change the module before it is wrapped and the optimizer is made"
                )
            if numel and parameter.data_ptr() != known[number]:
                parameter.data = parameter.detach().clone()
                spans.append((number, offset, numel))
        return spans

    def bring_home(self, rebound: Sequence[tuple[int, int, int]]) -> None:
        """Take over the values of parameters that were rebound, or have memory of their own.
        rebound: their spans."""
        for span in rebound:
            self._lay_out(*span)
        if rebound:
            self._pointers = self._pointers_now()
        if not self._is_ahead:
            for number, view in self._apart.items():
                view.copy_(self._parameters[number].detach())

    def take(self, values: torch.Tensor) -> None:
        """Take these parameters in place of its own. values: flat."""
        self.flat[: self.plan.content].copy_(values)
        self.give_out()

    def give_out(self) -> None:
        """Copy `flat` to the parameters that have memory of their own."""
        self._is_ahead = False
        for number, view in self._apart.items():
            # By `.data`: a version counts what the program writes (digest_checks.py), and `_apply`
            # counts the step.
            self._parameters[number].data.copy_(view)

    def runs_ahead(self) -> None:
        """`flat` holds newer values than the parameters, until `give_out`."""
        self._is_ahead = True

    @property
    def own(self) -> ShardRange:
        return self.ranges[0]

    def start_replicating(self, group: Group) -> Work | None:
        """Start to send this rank's reduced gradient to the ranks with its replicas, and to receive
        the gradients of the replicas here; None without replicas."""
        replicas = self.ranges[1:]
        if not replicas or self.own.reduced is None:
            return None
        nothing = self.own.reduced.new_empty(0)
        # A rank's replicas are kept by the ranks after it.
        distances = [(rank - group.rank) % group.size for rank in range(group.size)]
        mine = [
            self.own.reduced if 0 < distance <= len(replicas) else nothing for distance in distances
        ]
        theirs = [nothing] * group.size
        for replica in replicas:
            assert replica.reduced is not None
            theirs[replica.owner] = replica.reduced
        return group.all_to_all(theirs, mine)

    def start_gather(self, group: Group) -> Gather:
        """Start the all-gather of `flat`."""
        padded = padded_numel(self.plan.content, group.size)
        flat, own = self.flat[:padded], self.own.values
        if flat.device == group.device:
            return Gather(self, group.all_gather(flat, own))
        # A group's operations take tensors on its device. A model may be spread over several
        # devices; its other parameters are staged on the group's device.
        staged = torch.empty_like(flat, device=group.device)
        return Gather(self, group.all_gather(staged, own.to(group.device)), staged, flat)

    def send_own(self, group: Group) -> None:
        """Take part in the all-gather of ranks that lack parameters. Returns when it has ended."""
        padded = padded_numel(self.plan.content, group.size)
        unused = torch.empty_like(self.flat[:padded], device=group.device)
        group.all_gather(unused, self.own.values.to(group.device)).wait_on_host()
