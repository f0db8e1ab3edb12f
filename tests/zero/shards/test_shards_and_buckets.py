"""The arithmetic of buckets and shards: every element has one owner, at any number of ranks."""

import pytest

from chorusline.runtime.partition.buckets import plan_buckets
from chorusline.runtime.partition.shards import (
    ALIGNMENT,
    padded_numel,
    pieces_of,
    room_for,
    shard_numel,
    whole_parameter_spans,
)

SIZES = [(1,), (10,), (64,), (65, 1), (7 * 13, 13, 13 * 5, 5), (1000, 1, 1, 3000)]


def plans_of(numels, bucket_bytes=1 << 20, kinds=None):
    return plan_buckets(
        numels,
        kinds or ["float32"] * len(numels),
        [4] * len(numels),
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=bucket_bytes,
    )


@pytest.mark.parametrize("numels", SIZES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("max_numel", [ALIGNMENT, 1 << 18])
def test_every_element_of_every_parameter_has_exactly_one_owner(numels, num_ranks, max_numel):
    owners = {(p, e): [] for p, numel in enumerate(numels) for e in range(numel)}
    for plan in plans_of(numels):
        for rank in range(num_ranks):
            for piece in pieces_of(rank, num_ranks, plan.content, plan.spans, max_numel):
                assert 0 < piece.numel <= max_numel
                assert piece.shard_start + piece.numel <= shard_numel(plan.content, num_ranks)
                for element in range(piece.numel):
                    owners[piece.parameter, piece.parameter_start + element].append(rank)
    assert all(len(ranks) == 1 for ranks in owners.values())


@pytest.mark.parametrize("num_ranks", [1, 2, 31, 33, 100])
def test_a_bucket_has_room_for_64_ranks_or_twice_as_many(num_ranks):
    for content in (1, 64, 65, 4096, 100_000, 1 << 20):
        room = room_for(content, num_ranks)
        assert all(padded_numel(content, n) <= room for n in range(1, max(64, 2 * num_ranks) + 1))


@pytest.mark.parametrize("numels", SIZES)
def test_parameters_and_cuts_are_aligned_whatever_the_number_of_ranks(numels):
    for plan in plans_of(numels):
        assert all(offset % ALIGNMENT == 0 for _, offset, _ in plan.spans)
        for num_ranks in (1, 2, 3, 7):
            assert shard_numel(plan.content, num_ranks) % ALIGNMENT == 0
            slack = padded_numel(plan.content, num_ranks) - plan.content
            assert 0 <= slack < ALIGNMENT * num_ranks


def test_buckets_follow_the_backward_pass_and_keep_dtypes_apart():
    plans = plans_of([100, 200, 300, 400], kinds=["a", "b", "a", "b"], bucket_bytes=4 * 128)
    assert [[number for number, _, _ in plan.spans] for plan in plans] == [[3], [2], [1], [0]]
    together = plans_of([100, 200, 300, 400], kinds=["a", "b", "a", "b"])
    assert [[number for number, _, _ in plan.spans] for plan in together] == [[3, 1], [2, 0]]


@pytest.mark.parametrize("numels", SIZES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_no_cut_goes_through_a_whole_parameter(numels, num_ranks):
    spans, content = whole_parameter_spans(numels, num_ranks)
    pieces = [p for r in range(num_ranks) for p in pieces_of(r, num_ranks, content, spans)]
    assert sorted(piece.parameter for piece in pieces) == list(range(len(numels)))
    assert all(piece.numel == numels[piece.parameter] for piece in pieces)
    assert content // num_ranks <= max(sum(map(_up, numels)) / num_ranks + _up(max(numels)), 64)


@pytest.mark.parametrize(
    ("numels", "num_ranks", "shard"),
    [((64, 64, 128), 2, 128), ((64,) * 3 + (192,), 2, 192), ((64, 128, 64, 256, 128), 3, 256)],
)
def test_whole_parameters_are_dealt_largest_first(numels, num_ranks, shard):
    assert whole_parameter_spans(numels, num_ranks)[1] == num_ranks * shard


def _up(numel):
    return -(-numel // ALIGNMENT) * ALIGNMENT
