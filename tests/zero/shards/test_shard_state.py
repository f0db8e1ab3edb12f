"""State by ranges: cut anywhere and put together again, it is what it was."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from chorusline.runtime.partition.buckets import BucketPlan
from chorusline.runtime.partition.resharding import Range
from chorusline.runtime.zero.shards.shard_state import (
    MASTER,
    BucketSlice,
    Layout,
    ShardState,
    divided,
)

SHAPES = [(5, 13), (7,), (), (3, 0)]
"""Parameter 2 has one element and no dimension, parameter 3 no element."""

LAYOUT = Layout(
    SHAPES,
    [BucketPlan(((0, 0, 65), (3, 128, 0), (2, 128, 1)), 192), BucketPlan(((1, 0, 7),), 64)],
    [torch.float32, torch.float32],
    [False, True],
)


def state_of(parameter: int) -> dict[str, object]:
    torch.manual_seed(parameter)
    shape = SHAPES[parameter]
    return {"step": torch.tensor(3.0), "exp_avg": torch.randn(shape), "rate": 0.5}


def pieces(cuts: list[int]) -> list[tuple[int, int, Range]]:
    """All parameters' elements, cut at these places of each bucket."""
    found = []
    for everything in LAYOUT.everything():
        places = sorted({0, everything.stop, *(cut for cut in cuts if cut < everything.stop)})
        for start, stop in itertools.pairwise(places):
            found += LAYOUT.parameters_in(Range(everything.bucket, start, stop))
    return found


def test_a_layout_finds_each_element_of_each_parameter_once() -> None:
    assert pieces([]) == [
        (0, 0, Range(0, 0, 65)),
        (3, 0, Range(0, 128, 128)),
        (2, 0, Range(0, 128, 129)),
        (1, 0, Range(1, 0, 7)),
    ]
    assert pieces([10, 64])[:3] == [
        (0, 0, Range(0, 0, 10)),
        (0, 10, Range(0, 10, 64)),
        (0, 64, Range(0, 64, 65)),
    ]


@given(st.lists(st.integers(1, 191)), st.randoms(use_true_random=False))
def test_state_that_was_cut_anywhere_is_whole_again(cuts: list[int], random) -> None:
    held = ShardState()
    cut = pieces(cuts)
    random.shuffle(cut)
    for parameter, start, where in cut:
        state = state_of(parameter)
        elements, whole = divided(state, SHAPES[parameter])
        mine = {name: tensor[start : start + where.numel] for name, tensor in elements.items()}
        held.put(parameter, where, mine, whole)
    for parameter, _, everything in pieces([]):
        expected = state_of(parameter)
        joined = held.state_of(parameter, everything, torch.empty(SHAPES[parameter]))
        assert joined.keys() == expected.keys() and joined["rate"] == 0.5
        assert torch.equal(joined["step"], expected["step"])
        assert torch.equal(joined["exp_avg"], expected["exp_avg"])
        views = held.views(everything, "exp_avg") or (torch.empty(0),)
        assert torch.equal(torch.cat(views), expected["exp_avg"].reshape(-1))


def test_a_step_is_kept_whole_also_for_a_parameter_of_one_element() -> None:
    elements, whole = divided(state_of(2), SHAPES[2])
    assert list(elements) == ["exp_avg"]
    assert list(whole) == ["step", "rate"]


def test_the_numbers_that_are_stepped_are_no_state_and_are_saved_where_they_are_copies() -> None:
    held = ShardState()
    where = Range(1, 0, 7)
    held.put(1, where, {MASTER: torch.arange(7.0)}, {})
    assert held.state_of(1, where, torch.empty(7)) == {}
    assert LAYOUT.saved(1, None) == {MASTER: torch.float32}
    assert LAYOUT.saved(0, None) == {}
    assert LAYOUT.travelling(held.described) == [{MASTER: torch.float32}] * 2


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.float32, torch.float32),
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.float32),
        (torch.float8_e4m3fn, torch.float64, torch.float64),
        (torch.float8_e4m3fn, torch.int32, torch.float64),
        (torch.int64, torch.float32, torch.float64),
        (torch.int32, torch.uint8, torch.int64),
        (torch.uint64, torch.int8, torch.int64),
        (torch.uint8, torch.uint8, torch.uint8),
        (torch.complex64, torch.complex128, torch.complex128),
    ],
)
def test_a_state_of_two_dtypes_in_a_bucket_travels_in_one_that_loses_nothing(
    one, other, common, turned
) -> None:
    held = ShardState()
    dtypes = (other, one) if turned else (one, other)
    for (parameter, _, where), dtype in zip(pieces([])[::2], dtypes, strict=True):
        held.put(parameter, where, {"exp_avg": torch.ones(where.numel, dtype=dtype)}, {})
    first, _ = LAYOUT.travelling(held.described)
    assert first == {MASTER: torch.float32, "exp_avg": common}
    for dtype in dtypes:
        if dtype.is_floating_point or dtype.is_complex:
            numbers = [torch.finfo(dtype).max, 1 + torch.finfo(dtype).eps]
            values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
        else:  # A float64 has 53 bits.
            largest = torch.iinfo(dtype).max
            numbers = [min(largest, 2**53 - 1) if common.is_floating_point else largest, 1]
            values = torch.tensor(numbers, dtype=dtype)
        passed = values.to(common).to(dtype)
        assert torch.equal(passed.view(torch.uint8), values.view(torch.uint8))


def test_what_a_rank_lacks_stays_as_it_is_and_what_arrives_is_added() -> None:
    held = ShardState([Range(1, 0, 2)])
    held.put(1, Range(1, 0, 2), {MASTER: torch.ones(2)}, {})
    other = held.copy()
    other.add(BucketSlice(Range(1, 2, 64), {MASTER: torch.full((62,), 2.0)}))
    everything = Range(1, 0, 4)
    for state, expected in ((held, [1, 1, 0, 0]), (other, [1, 1, 2, 2])):
        assert state.cut(everything, MASTER, torch.zeros(4)).tolist() == expected
    assert other.inventory.ranges == [Range(1, 0, 2), Range(1, 2, 64)]
    with pytest.raises(KeyError):
        held.views(Range(1, 0, 2), "exp_avg")
