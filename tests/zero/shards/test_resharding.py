"""From one shard map to another: nothing is lost, and nothing travels that need not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from chorusline.runtime.partition.resharding import (
    Range,
    RangesLost,
    Transfer,
    guarded_ranks,
    kept_by,
    merged,
    overlap,
    plan_transfers,
    shard_of,
)

CONTENTS = [10 * 64, 64, 3 * 64, 1000 * 64]  # The second is smaller than one element per rank.


def kept(rank: int, num_ranks: int, replicas: int, contents: list[int]) -> list[Range]:
    return [
        mine
        for owner in guarded_ranks(rank, num_ranks, replicas)
        for mine in shard_of(owner, num_ranks, contents)
    ]


def plan_for(
    held: dict[int, list[Range]], num_ranks: int, contents: list[int], replicas: int
) -> list[Transfer]:
    """Until each of `num_ranks` ranks has its shard and its replicas; ranks beyond them leave."""
    wanted = {rank: kept_by(rank, num_ranks, contents, replicas) for rank in range(num_ranks)}
    return plan_transfers(held, wanted)


def elements(ranges: list[Range]) -> set[tuple[int, int]]:
    """In units of 64 elements: cuts never fall between."""
    return {(r.bucket, at) for r in ranges for at in range(r.start // 64, r.stop // 64)}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_shards_cover_every_bucket_once(num_ranks: int) -> None:
    shards = [shard_of(rank, num_ranks, CONTENTS) for rank in range(num_ranks)]
    everything = [mine for shard in shards for mine in shard]
    assert sum(mine.numel for mine in everything) == sum(CONTENTS)
    assert merged(everything) == [Range(i, 0, content) for i, content in enumerate(CONTENTS)]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), list(itertools.product([1, 2, 3, 4], repeat=2)))
def test_any_membership_is_reached_from_any_other(before: int, after: int, replicas: int) -> None:
    # The survivors are the first ranks, newcomers the last; which ranks left is tested below.
    held = {r: kept(r, before, replicas, CONTENTS) if r < before else [] for r in range(after)}
    missing = set(range(after, before))
    if any(
        not {r for r in range(before) if owner in guarded_ranks(r, before, replicas)} - missing
        for owner in range(before)
    ):
        with pytest.raises(RangesLost):
            plan_for(held, after, CONTENTS, replicas)
        return
    plan = plan_for(held, after, CONTENTS, replicas)
    for rank in range(after):
        received = [transfer.range for transfer in plan if transfer.target == rank]
        wanted = elements(kept(rank, after, replicas, CONTENTS))
        assert elements(held[rank]) | elements(received) >= wanted
        # Not one element that was there already, or is not wanted, and none of them twice.
        assert not elements(received) & elements(held[rank])
        assert elements(received) <= wanted
        assert sum(r.numel for r in received) == 64 * len(elements(received))
    for transfer in plan:
        assert transfer.source != transfer.target
        assert elements([transfer.range]) <= elements(held[transfer.source])


def test_the_same_membership_moves_nothing() -> None:
    held = {rank: kept(rank, 4, 2, CONTENTS) for rank in range(4)}
    assert plan_for(held, 4, CONTENTS, 2) == []


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_one_death_loses_nothing_where_there_are_two_replicas(num_ranks: int) -> None:
    for dead in range(num_ranks):
        survivors = [rank for rank in range(num_ranks) if rank != dead]
        held = {new: kept(old, num_ranks, 2, CONTENTS) for new, old in enumerate(survivors)}
        plan_for(held, len(survivors), CONTENTS, 2)


@pytest.mark.parametrize("first", [0, 2, 4])
def test_a_lost_node_takes_shards_along_unless_there_are_more_replicas_than_its_ranks(
    first: int,
) -> None:
    """Of six ranks on three nodes: ranks of one node are adjacent (run_state.py)."""
    survivors = [rank for rank in range(6) if rank not in (first, first + 1)]
    held = {
        replicas: [kept(old, 6, replicas, CONTENTS) for old in survivors] for replicas in (2, 3)
    }
    plan_for(dict(enumerate(held[3])), 4, CONTENTS, 3)
    with pytest.raises(RangesLost):
        plan_for(dict(enumerate(held[2])), 4, CONTENTS, 2)


def test_a_shard_whose_owner_and_replica_are_gone_is_named() -> None:
    held = {0: kept(0, 4, 2, [256]), 1: kept(3, 4, 2, [256])}
    # Rank 1's shard was held by ranks 1 and 2.
    with pytest.raises(RangesLost, match=r"no rank holds bucket 0\[64:128\]"):
        plan_for(held, 2, [256], 2)


def test_a_move_that_was_interrupted_goes_on_from_what_is_there() -> None:
    """Some hold the old ranges, some the new; then another rank dies."""
    held = {
        0: kept(0, 4, 2, CONTENTS) + kept(0, 3, 2, CONTENTS),
        1: kept(1, 3, 2, CONTENTS),
    }
    plan = plan_for(held, 2, CONTENTS, 2)
    for rank in range(2):
        received = [transfer.range for transfer in plan if transfer.target == rank]
        assert elements(held[rank]) | elements(received) == elements(
            [Range(i, 0, content) for i, content in enumerate(CONTENTS)]
        )


def test_what_nobody_holds_is_left_out_where_that_is_asked_for() -> None:
    everything = [Range(0, 0, 256)]
    held = {0: [Range(0, 0, 64)], 1: [Range(0, 0, 128)]}
    plan = plan_transfers(held, {0: everything, 1: everything}, missing_ok=True)
    assert plan == [Transfer(1, 0, Range(0, 64, 128))]


def test_of_what_goes_to_no_rank_every_element_is_sent_once() -> None:
    held = {rank: kept(rank, 4, 2, CONTENTS) for rank in range(4)}
    everything = [Range(i, 0, content) for i, content in enumerate(CONTENTS)]
    plan = plan_transfers(held, {-1: everything})
    assert merged([transfer.range for transfer in plan]) == everything
    assert sum(transfer.range.numel for transfer in plan) == sum(CONTENTS)
    for transfer in plan:
        assert elements([transfer.range]) <= elements(held[transfer.source])


def test_those_who_hold_the_same_share_the_sending() -> None:
    everything = [Range(0, 0, 64 * 64)]
    held = {0: everything, 1: everything, 2: [], 3: []}
    plan = plan_for(held, 4, [64 * 64], 1)
    by_source = {s: sum(t.range.numel for t in plan if t.source == s) for s in (0, 1)}
    assert by_source[0] == by_source[1] == 16 * 64


@given(st.data())
def test_every_element_arrives_from_somebody_who_has_it(data: st.DataObject) -> None:
    contents = [64 * n for n in data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))]
    before, after = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    replicas = data.draw(st.integers(1, 3))
    olds = data.draw(st.permutations(range(before)))
    held = {
        new: kept(olds[new], before, replicas, contents) if new < len(olds) else []
        for new in range(after)
    }
    there = set().union(*(elements(ranges) for ranges in held.values()))
    wanted = elements([Range(i, 0, content) for i, content in enumerate(contents)])
    if there != wanted:
        with pytest.raises(RangesLost) as raised:
            plan_for(held, after, contents, replicas)
        assert elements(raised.value.ranges) == wanted - there
        return
    plan = plan_for(held, after, contents, replicas)
    for rank in range(after):
        received = elements([transfer.range for transfer in plan if transfer.target == rank])
        assert elements(kept(rank, after, replicas, contents)) <= elements(held[rank]) | received


def test_overlap_is_within_one_bucket() -> None:
    assert overlap(Range(0, 0, 10), Range(0, 5, 20)) == Range(0, 5, 10)
    assert overlap(Range(0, 0, 10), Range(0, 10, 20)) is None
    assert overlap(Range(0, 0, 10), Range(1, 0, 10)) is None


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("leaving", [{0}, {3}, {1, 2}])
def test_ranks_that_leave_send_what_only_they_hold_and_get_nothing(
    leaving: set[int], replicas: int
) -> None:
    before = 4
    staying = [rank for rank in range(before) if rank not in leaving]
    order = [*staying, *sorted(leaving)]  # Those beyond the new map leave.
    held = {number: kept(rank, before, replicas, CONTENTS) for number, rank in enumerate(order)}
    plan = plan_for(held, len(staying), CONTENTS, replicas)
    assert {transfer.target for transfer in plan} <= set(range(len(staying)))
    for number in range(len(staying)):
        received = [transfer.range for transfer in plan if transfer.target == number]
        wanted = elements(kept(number, len(staying), replicas, CONTENTS))
        assert wanted <= elements([*held[number], *received])
        assert not elements(held[number]) & elements(received), "what is there does not travel"
