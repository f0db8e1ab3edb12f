"""Numbers of samples that take little room, and their texts in checkpoints."""

from __future__ import annotations

import base64
import pickle
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given, strategies as st

from chorusline.runtime.data.cursor import Cursor, check_parts
from chorusline.runtime.data.number_set import Numbers, NumberSet
from chorusline.runtime.data.row_reader import RowReader

MANY = list(range(3, 5000, 7))

NUMBERS = st.just(MANY) | st.lists(
    st.integers(0, 300)
    | st.tuples(st.integers(0, 300), st.integers(0, 40)).map(lambda p: range(*p))
).map(lambda parts: [n for part in parts for n in ([part] if isinstance(part, int) else part)])


@given(NUMBERS, NUMBERS, st.integers(0, 700), st.integers(0, 700))
def test_numbers_are_a_list_in_little_room(some, more, start, stop):
    numbers = Numbers(some)
    numbers.extend(Numbers(more))
    whole = [*some, *more]
    assert numbers == whole and whole == numbers and len(numbers) == len(whole)
    assert list(numbers) == whole == list(pickle.loads(pickle.dumps(numbers)))
    assert numbers[start:stop] == whole[start:stop]
    assert [numbers[place] for place in range(len(whole))] == whole


@given(NUMBERS, NUMBERS, st.integers(0, 400))
def test_a_set_of_numbers_is_a_set_and_survives_as_text(some, more, stop):
    for made in (NumberSet(some), NumberSet(Numbers(some))):
        assert made == set(some) and list(made) == sorted(set(some)) and len(made) == len(set(some))
        assert NumberSet.from_text(made.text()) == made == pickle.loads(pickle.dumps(made))
        assert (made | NumberSet(more)) == {*some, *more}
        assert made.has_all_below(stop) is (set(range(stop)) <= set(some))
        assert all((number in made) is (number in set(some)) for number in range(5000))


def text(bits: bytes) -> str:
    return base64.b64encode(zlib.compress(bits, 9)).decode()


WRONG: dict[str, str] = {
    "no base64": "*",
    "no zlib": base64.b64encode(b"text").decode(),
    "cut off": text(bytes(range(200)) * 9)[:-8],
    "beyond the dataset": text(b"\xff" * 2),
    "a bit beyond the dataset": text(b"\xff\x40"),
    "far beyond it": text(b"\xff" * (64 << 20)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_set_of_the_numbers_of_a_dataset_is_refused(what):
    tracemalloc.start()
    with pytest.raises(ValueError):
        NumberSet.from_text(WRONG[what], 14)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20, "a few characters become no more bytes"
    tracemalloc.stop()
    assert len(NumberSet.from_text(text(b"\xff\x3f"), 14)) == 14


def test_a_text_of_a_stream_takes_a_bit_for_each_row():
    tracemalloc.start()
    rows = NumberSet.from_text(text(b"\xff" * (1 << 20)))
    assert len(rows) == 8 << 20 and rows.has_all_below(8 << 20)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_reader_and_a_rank_keep_some_bytes_for_a_batch_and_not_for_each_row():
    rows, batch = 64_000, 32
    reader, key = RowReader(range(rows), lambda: False), ("run", 0, 1)
    for holder in (0, 1):
        reader.begin(key, None, 0, 2, NumberSet(), {}, holder, [1])
    tracemalloc.start()
    on_rank = Numbers()
    for number in range(rows // batch):
        given = reader.take(key, number % 2, batch, False, None)
        if number % 2 == 0:
            on_rank.extend(n for n, _ in given)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(on_rank) == rows // 2
    assert kept < 64 * rows // batch, "a list takes 40 bytes for each row, here and there"


SOUND = {
    "loop": 0,
    "epoch": 1,
    "iterations": {
        "14/1/0/True#0": {
            "runs": [[2, [3, 4]]],
            "given": 1,
            "ids": None,
            "again": "",
            "is_over": False,
            "num_ids": 0,
            "inner": {"9/0/0/True": 2},
        }
    },
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(
    st.sampled_from(
        [
            "loop",
            "epoch",
            "iterations",
            "runs",
            "given",
            "ids",
            "again",
            "is_over",
            "num_ids",
            "inner",
            "",
        ]
    ),
    JSON,
)
def test_whatever_a_checkpoint_says_of_a_place_in_the_data_is_taken_or_refused(field, value):
    (key,) = SOUND["iterations"]
    iteration = {**SOUND["iterations"][key]}
    part: Any = {**SOUND, "iterations": {key: iteration}}
    if field in iteration:
        iteration[field] = value
    elif field:
        part[field] = value
    else:
        part = value
    try:
        check_parts([part, part])
    except ValueError:
        return
    cursor = Cursor()
    cursor.resume([part, part])
    assert cursor.rest_of(key) is not None


@given(st.sets(st.integers(0, 300)), st.sets(st.integers(0, 300)))
def test_numbers_are_taken_out_of_a_set(one, other):
    assert NumberSet(one) - NumberSet(other) == one - other
