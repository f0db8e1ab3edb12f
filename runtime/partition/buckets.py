"""Which gradients travel together: pure arithmetic, no tensors.

Many small messages each pay the network's latency; one large message cannot overlap with the
backward pass. So gradients are grouped into buckets, in the order in which the backward pass makes
them: the measured order, and before a measurement the reverse of the order of registration. The
plan depends on the model and that order alone, never on the number of ranks, so that shards can be
re-cut when ranks come and go.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .shards import aligned


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket: parameters in sequence, at aligned offsets.

    spans: (parameter number, offset in elements, numel), ascending by offset.
    content: number of elements up to the aligned end of the last parameter.
    """

    spans: tuple[tuple[int, int, int], ...]
    content: int

    def numbered_from(self, first: int) -> BucketPlan:
        """The same bucket with parameter numbers that start at `first` instead of 0."""
        spans = tuple((number + first, offset, numel) for number, offset, numel in self.spans)
        return BucketPlan(spans, self.content)


def plan_buckets(
    numels: Sequence[int],
    kinds: Sequence[Hashable],
    element_bytes: Sequence[int],
    *,
    bucket_bytes: int,
    first_bucket_bytes: int,
    order: Sequence[int] | None = None,
) -> list[BucketPlan]:
    """Group parameters, given in the order of registration, into buckets in order of launch.

    numels: elements of each parameter.
    kinds: of each parameter (dtype and device); only parameters of equal kind share a bucket.
    element_bytes: bytes of one element of each parameter.
    bucket_bytes: a bucket is closed when it has this size.
    first_bucket_bytes: the same for the first bucket, smaller so that the network starts early.
    order: the numbers of all parameters in the order of their gradients; None: reversed.
    """
    plans: list[BucketPlan] = []
    open_spans: dict[Hashable, list[tuple[int, int, int]]] = {}
    filled: dict[Hashable, int] = {}

    def close(kind: Hashable) -> None:
        plans.append(BucketPlan(tuple(open_spans.pop(kind)), filled.pop(kind)))

    for parameter in reversed(range(len(numels))) if order is None else order:
        kind = kinds[parameter]
        spans = open_spans.setdefault(kind, [])
        offset = filled.get(kind, 0)
        spans.append((parameter, offset, numels[parameter]))
        filled[kind] = offset + aligned(numels[parameter])
        limit = bucket_bytes if plans else first_bucket_bytes
        if filled[kind] * element_bytes[parameter] >= limit:
            close(kind)
    # What is left is less than a bucket of each kind.
    for kind in list(open_spans):
        close(kind)
    return plans
