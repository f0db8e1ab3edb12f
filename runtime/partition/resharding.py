"""From one shard map to another: which elements a rank must receive, and from which rank. Pure.

Buckets have the same content for any number of ranks (buckets.py), so a range of a bucket means
the same elements before and after. A rank *holds* ranges: its shard, and its replicas of the
shards of the ranks before it. When a rank is lost or added, the new map gives every rank ranges to
hold; ranges that it holds already stay where they are, and only the others travel.

The plan is based on the ranges that ranks report, not on the map that they should have had: after
a failure in the middle of a move, some ranks hold the old ranges and some the new ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .shards import shard_numel


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Elements [start, stop) of the content of a bucket; none for a parameter without elements."""

    bucket: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a range needs 0 <= start <= stop, got [{self.start}, {self.stop})")

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rank `source` sends a range to `target`; a rank never sends to itself."""

    source: int
    target: int
    range: Range


class RangesLost(Exception):
    """No rank holds these elements any more: the owner and all replicas are gone."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__(list(ranges))
        self.ranges = list(ranges)

    def __str__(self) -> str:
        ranges = ", ".join(f"bucket {r.bucket}[{r.start}:{r.stop}]" for r in self.ranges)
        return f"no rank holds {ranges}"


def shard_of(rank: int, num_ranks: int, contents: Sequence[int]) -> list[Range]:
    """The ranges that `rank` owns: its shard of each bucket, without the slack.

    contents: number of elements of each bucket's content.
    """
    ranges = []
    for bucket, content in enumerate(contents):
        length = shard_numel(content, num_ranks)
        start, stop = rank * length, min((rank + 1) * length, content)
        # A bucket without elements is one rank's, so that its state has a holder.
        if start < stop or (content == 0 and rank == 0):
            ranges.append(Range(bucket, start, stop))
    return ranges


def guarded_ranks(rank: int, num_ranks: int, replicas: int) -> list[int]:
    """The ranks whose shards `rank` keeps: itself, then the `replicas - 1` ranks before it."""
    return [(rank - distance) % num_ranks for distance in range(min(replicas, num_ranks))]


def kept_by(rank: int, num_ranks: int, contents: Sequence[int], replicas: int) -> list[Range]:
    """The ranges that `rank` keeps: its shard, and its replicas of other ranks' shards."""
    return [
        mine
        for owner in guarded_ranks(rank, num_ranks, replicas)
        for mine in shard_of(owner, num_ranks, contents)
    ]


def plan_transfers(
    held: Mapping[int, Sequence[Range]],
    wanted: Mapping[int, Sequence[Range]],
    *,
    missing_ok: bool = False,
) -> list[Transfer]:
    """The transfers after which every target holds its wanted ranges; equal on every rank.

    held: by rank, the ranges that it holds; none for a newcomer.
    wanted: by target, the ranges that it needs. A rank without an entry only sends. A target may
        also be a file: it holds nothing, so all its ranges are sent.
    missing_ok: leave out ranges that no rank holds, instead of raising.

    A range is cut where its set of holders changes. If several ranks hold it, the one with the
    fewest elements to send so far sends it, or the lowest rank of those with equally few.

    Raises RangesLost naming every range that no rank holds.
    """
    sent = dict.fromkeys(held, 0)
    plan: list[Transfer] = []
    lost: list[Range] = []
    for target, ranges in wanted.items():
        for part, holders in (cut for one in ranges for cut in by_holders(one, held)):
            if not holders:
                lost.append(part)
            # What a target holds itself is never sent.
            elif target not in holders:
                source = min(holders, key=lambda rank: (sent[rank], rank))
                sent[source] += part.numel
                plan.append(Transfer(source, target, part))
    if lost and not missing_ok:
        raise RangesLost(merged(lost))
    return plan


def by_holders(
    wanted: Range, held: Mapping[int, Sequence[Range]]
) -> list[tuple[Range, frozenset[int]]]:
    """Cut a range where the set of ranks that hold it changes."""
    cuts = {wanted.start, wanted.stop}
    of_bucket = [
        (rank, mine)
        for rank, ranges in held.items()
        for mine in ranges
        if mine.bucket == wanted.bucket
    ]
    for _, mine in of_bucket:
        cuts.update(at for at in (mine.start, mine.stop) if wanted.start < at < wanted.stop)
    parts: list[tuple[Range, frozenset[int]]] = []
    for start, stop in itertools.pairwise(sorted(cuts)):
        holders = frozenset(
            rank for rank, mine in of_bucket if mine.start <= start and stop <= mine.stop
        )
        # A cut where one rank's two ranges meet changes nothing.
        if parts and parts[-1][1] == holders:
            before = parts.pop()[0]
            start = before.start
        parts.append((Range(wanted.bucket, start, stop), holders))
    return parts


def merged(ranges: Sequence[Range]) -> list[Range]:
    """The same elements in the fewest ranges, ascending."""
    result: list[Range] = []
    for mine in sorted(ranges):
        if result and result[-1].bucket == mine.bucket and mine.start <= result[-1].stop:
            before = result.pop()
            mine = Range(mine.bucket, before.start, max(before.stop, mine.stop))
        result.append(mine)
    return result


def overlap(one: Range, other: Range) -> Range | None:
    """The elements that are in both."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return Range(one.bucket, start, stop) if one.bucket == other.bucket and start < stop else None
