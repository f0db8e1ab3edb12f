"""Buckets: the flat memory in which gradients travel, and the place of each gradient in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from chorusline.collectives.contract.errors import listed
from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group

from ...partition.buckets import BucketPlan, plan_buckets
from ...partition.shards import padded_numel, room_for, shard_numel

_FIRST_BUCKET_BYTES = 1 << 20
_ROW = 1024
_FACTORS = (0x3C6EF372FE94F82B, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179)
"""Odd and unlike, so that what moves along a row and along a column changes a sum."""


def ordered_sum(words: torch.Tensor) -> torch.Tensor:
    """(), int64: of whole numbers in one dimension, and of their order. Programs rotate and sort
    weights."""
    square = words[: words.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = words[square.numel() :].to(torch.int64)  # The last row is not full.
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    by_column, by_row = (square.sum(of, dtype=torch.int64) for of in (0, 1))
    for sums, factor in zip((by_column, by_row, rest), _FACTORS, strict=True):
        total += ((torch.arange(sums.numel(), device=sums.device) * 2 + 1) * sums).sum() * factor
    return total


class GradientBucket:
    """Gradients that travel together. The work and the memory that it uses are kept side by side.

    flat: the local gradients, and room after them.
    padded: the number of its elements that a reduce-scatter takes.
    shard: (n,) the reduced part of this rank; empty where no optimizer shards the gradients.
    missing: the gradients that the pass still has to bring; frozen parameters get none.
    launched_at: time.monotonic() of the last launch.
    launched_version: torch's counter of writes to `flat`, and to all views of it, at that time.
    launched_sum: a sum of the bits of the gradients at that time; None where it was not taken.
    held_version: the same when a pass last brought a gradient.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        vote_numel: int,
    ) -> None:
        """vote_numel: elements that the vote takes after the content."""
        first = parameters[plan.spans[0][0]]
        self.plan = plan
        self.padded = padded_numel(plan.content, group.size)
        room = max(room_for(plan.content, group.size), plan.content + vote_numel)
        self._group = group
        self.flat = self._zeros(room, first)
        self._parameters = parameters
        self.views = self.views_of(self.flat)
        self.shard = torch.empty(0, dtype=first.dtype, device=first.device)
        self.missing = 0
        self.launched_at = 0.0
        self.launched_version = self.held_version = 0
        self.launched_sum: torch.Tensor | None = None
        self.work: Work | None = None  # None: not launched, or waited for
        self.future: torch.futures.Future[Any] | None = None
        """The future that a communication hook returned; None: none is under way."""

    def another_flat(self) -> torch.Tensor:
        """Zeros, as long as `flat`, for gradients that travel in its place."""
        return self._zeros(self.flat.numel(), self.flat)

    def _zeros(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        if like.device == self._group.device:  # The other ranks read them in place, if they can.
            return self._group.empty_symmetric(numel, like.dtype).zero_()
        return torch.zeros(numel, dtype=like.dtype, device=like.device)

    def views_of(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """By number, the place of each gradient in `flat`, which is as long as this bucket's."""
        return {
            number: flat[offset : offset + numel].view_as(self._parameters[number])
            for number, offset, numel in self.plan.spans
        }

    def content(self) -> torch.Tensor:
        """The gradients, with zeros in the gaps: a hook may have written there."""
        ends = [offset + numel for _, offset, numel in self.plan.spans]
        begins = [offset for _, offset, _ in self.plan.spans[1:]]
        for end, begin in zip(ends, [*begins, self.plan.content], strict=True):
            if begin > end:
                self.flat[end:begin] = 0
        return self.flat[: self.plan.content]

    def prepare_shard(self, group: Group) -> None:
        # What comes after the content is reduced with it, into the last shards: the vote of an
        # ended step there would count in the norm of the gradient.
        self.flat[self.plan.content :] = 0
        self.shard = self.flat.new_zeros(shard_numel(self.plan.content, group.size))

    def change_group(self, group: Group) -> None:
        """Undo the launch, for another number of ranks; the local gradients stay."""
        self._group = group
        self.work = None
        self.padded = padded_numel(self.plan.content, group.size)
        assert self.padded <= self.flat.numel()
        self.prepare_shard(group)
        self.note_content()

    def note_content(self, *, sums: bool = False) -> None:
        """What `flat` holds now is sent; later writes are noticed. sums: also those that torch does
        not count, by `.data` or numpy; that reads the memory, and is left out on a GPU, for which
        the host would wait."""
        self.launched_version = self.flat._version
        self.launched_sum = self._sum() if sums and self.flat.device.type == "cpu" else None

    def is_written(self) -> bool:
        """Whether the program has written to the gradients since `note_content`."""
        if self.flat._version != self.launched_version:
            return True
        return self.launched_sum is not None and bool(self._sum() != self.launched_sum)

    def _sum(self) -> torch.Tensor:
        # In words of 64 bits an even number of turned signs would add up to nothing.
        whole = torch.int16 if self.flat.element_size() == 2 else torch.int32
        return ordered_sum(self.flat[: self.plan.content].view(whole))


class Gradients:
    """All gradients of one model, in their buckets.

    Parameters are numbered in the order of registration. bucket_bytes: the size of a bucket.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.names: list[str] = []
        self.summed: set[int] = set()
        """The parameters whose gradients of earlier micro-batches of a step autograd adds to."""
        self.parameters: list[torch.nn.Parameter] = []
        self.order: list[int] = []
        """The numbers of the parameters, in the order in which their gradients are expected."""
        self.buckets: list[GradientBucket] = []
        """The buckets in the order of launching."""
        self.views: dict[int, torch.Tensor] = {}
        """By number, where a gradient has its place, in the parameter's shape: in its bucket, or in
        the steps of `ctx.steps` in a sum (micro_batch_sums.py)."""
        self._bucket_of: dict[int, GradientBucket] = {}
        self._bucket_bytes = bucket_bytes
        self._handed_out: list[int] = []
        self._given: dict[int, torch.Tensor] = {}

    def add(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], group: Group, vote_numel: int
    ) -> list[GradientBucket]:
        """Append parameters. Returns their buckets, which are launched after the others: layers
        that are unfrozen later are mostly deeper, and get their gradients later."""
        added = range(len(self.parameters), len(self.parameters) + len(named))
        self.names += [name for name, _ in named]
        self.parameters += [parameter for _, parameter in named]
        # Autograd comes from the end of a model to its beginning.
        self.order += reversed(added)
        fresh = self._made(added, None, group, vote_numel)
        self.buckets += fresh
        return fresh

    def lay_out(self, order: Sequence[int], group: Group, vote_numel: int) -> None:
        """Make all buckets again for gradients in this order; gradients that are there move."""
        self.order = list(order)
        self.buckets = self._made(range(len(self.parameters)), order, group, vote_numel)

    def _made(
        self, numbers: range, order: Sequence[int] | None, group: Group, vote_numel: int
    ) -> list[GradientBucket]:
        """Buckets of these parameters. order: indices within `numbers`; None: in reverse."""
        parameters = self.parameters[numbers.start : numbers.stop]
        plans = plan_buckets(
            [p.numel() for p in parameters],
            [(p.dtype, p.device) for p in parameters],
            [p.element_size() for p in parameters],
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=min(_FIRST_BUCKET_BYTES, self._bucket_bytes),
            order=order,
        )
        made = [
            GradientBucket(plan.numbered_from(numbers.start), self.parameters, group, vote_numel)
            for plan in plans
        ]
        for bucket in made:
            self.views.update(bucket.views)
            for number in bucket.views:  # It would keep the memory of the bucket before.
                self._given.pop(number, None)
            self._bucket_of.update(dict.fromkeys(bucket.views, bucket))
            for number, view in bucket.views.items():
                parameter = self.parameters[number]
                # Held by no_sync, or from before the buckets were made in another order.
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    view.copy_(parameter.grad)
                    parameter.grad = self.given(number)
        return made

    def given(self, number: int) -> torch.Tensor:
        """The tensor for `.grad`, with the memory of the view. The view itself is never given: a
        program may set the `data` of a gradient."""
        view, given = self.views[number], self._given.get(number)
        if given is None or given.data_ptr() != view.data_ptr():
            given = self._given[number] = view.detach()
        return given

    def bring_home(self, number: int) -> GradientBucket:
        """Make a parameter's gradient a view of its bucket, and return the bucket.

        Raises ValueError for a gradient that is not dense, RuntimeError for one that is gone.
        """
        parameter, view = self.parameters[number], self.views[number]
        gradient = parameter.grad
        if gradient is None:
            raise RuntimeError(
                f"the gradient of parameter {self.names[number]} was cleared in the backward pass "
                "that computed it, by a hook of the parameter, so it cannot be reduced. Step and "
                "clear gradients after loss.backward()"
            )
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"parameter {self.names[number]} of shape {tuple(parameter.shape)} has a "
                f"{gradient.layout} gradient; only dense gradients are reduced, as parts of a flat "
                "buffer. Make it dense (for nn.Embedding and nn.EmbeddingBag: sparse=False), or "
                "train with torch's DistributedDataParallel on Chorusline's groups "
                "(ctx.init_torch_distributed)"
            )
        # It would be cast, and no longer be what the program computed.
        if gradient.dtype != view.dtype:
            if parameter.dtype == view.dtype:
                raise RuntimeError(
                    f"parameter {self.names[number]} of shape {tuple(parameter.shape)} is "
                    f"{view.dtype}, and its gradient {gradient.dtype}, as the program has set "
                    "parameter.grad_dtype; gradients travel in the parameter's dtype. Leave "
                    "grad_dtype as it is, or keep the parameters in the dtype that the gradients "
                    "are to have, with torch.autocast around the forward pass"
                )
            raise RuntimeError(
                f"parameter {self.names[number]} of shape {tuple(parameter.shape)} is "
                f"{gradient.dtype} now, and was {view.dtype} when the model was wrapped; convert "
                "the module before DistributedDataParallel gets it"
            )
        # autograd makes a tensor of its own where `.grad` was None.
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = self.given(number)
        return self._bucket_of[number]

    def hand_out(self, numbers: Sequence[int]) -> None:
        """Give these parameters their gradients in memory of their own, in the memory format of the
        parameter: fused optimizers step tensors of several formats wrongly."""
        for number in numbers:
            parameter = self.parameters[number]
            made = torch.empty_like(parameter)
            # Most parameters are contiguous, and keep their view.
            if parameter.grad is not None and parameter.grad.stride() != made.stride():
                parameter.grad = made.copy_(parameter.grad)
        self._handed_out = list(numbers)

    def collect(self) -> None:
        """Undo `hand_out`, with what the program has made of the gradients since."""
        numbers, self._handed_out = self._handed_out, []
        for number in numbers:
            if self.parameters[number].grad is not None:
                self.bring_home(number)

    def lead_home(self) -> None:
        """Gradients have their place in the buckets, and in no other sum."""
        for bucket in self.buckets:
            self.views.update(bucket.views)

    def is_replaced(self, number: int) -> bool:
        """Whether the program has put another tensor in the place of a gradient."""
        gradient = self.parameters[number].grad
        if gradient is None or number in self._handed_out:
            return False
        return gradient.data_ptr() != self.views[number].data_ptr()

    def has_replaced(self) -> bool:
        """Whether the program has put another tensor in the place of any gradient."""
        return any(map(self.is_replaced, range(len(self.parameters))))

    def is_frozen(self, number: int) -> bool:
        return not self.parameters[number].requires_grad

    def why_changed(self) -> str:
        """Names what the program has changed since all buckets were launched; empty if nothing."""
        for bucket in self.buckets:
            # torch counts writes for a tensor and all its views, so that one number tells of all.
            if bucket.is_written():
                return "one of " + listed([self.names[n] for n in bucket.views], 3)
            for number, view in bucket.views.items():
                gradient = self.parameters[number].grad
                # A tensor of the program's; a view of the bucket's memory has the same values.
                if gradient is not None and gradient.data_ptr() != view.data_ptr():
                    return self.names[number]
        return ""

    def usage(self) -> list[bool]:
        """Per parameter, whether this rank holds a gradient for it."""
        return [parameter.grad is not None for parameter in self.parameters]

    def drop(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
