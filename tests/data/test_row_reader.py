"""How the rows of a stream are dealt: the reader by itself, with calls in every order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from chorusline.runtime.data.number_set import NumberSet
from chorusline.runtime.data.row_reader import ReaderDied, ReadingKey, RowReader

FIRST: ReadingKey = ("run", 3, 1)
NUM_ROWS = 23


class Rows:
    """Letters, not numbers, as a stream may be of anything. once: cannot be read again."""

    def __init__(self, once: bool = False) -> None:
        self.once = once
        self.num_readings = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[str]:
        self.num_readings += 1
        assert not (self.once and self.num_readings > 1)
        return iter([f"row {n}" for n in range(NUM_ROWS)])


def begin(reader: RowReader, key: ReadingKey = FIRST, **kwargs: Any) -> list[int]:
    given: dict[str, Any] = {
        "name": "epoch 0",
        "epoch": 0,
        "num_holders": 3,
        "given": NumberSet(),
        "lost": {},
        "holder": 0,
        "inside": [key[2]],
    }
    return reader.begin(key, **{**given, **kwargs})


@pytest.mark.parametrize("seed", range(50))
def test_every_row_counts_once_whoever_asks_and_whoever_is_lost(seed: int) -> None:
    chance = random.Random(seed)
    source = Rows(once=True)
    reader = RowReader(source, lambda: False)
    alive, taken, counted = [0, 1, 2, 3], {}, dict.fromkeys(range(4), 0)
    for holder in alive:
        begin(reader, num_holders=4, holder=holder)
        taken[holder] = []
    lost_ids: list[int] = []
    at_end: set[int] = set()
    while at_end != set(alive):
        what = chance.random()
        if what < 0.15 and len(alive) > 1:
            dead = chance.choice(alive)
            alive.remove(dead)
            told = [reader.lose(FIRST, {dead: counted[dead]}) for _ in alive]
            lost_ids += [number for number, _ in taken[dead][: counted[dead]]]
            assert all(one == lost_ids for one in told)
            assert reader.take(FIRST, dead, 2, False, 0) == [], "asked before it was lost"
            at_end.clear()
            continue
        holder = chance.choice(alive)
        if what < 0.4:
            counted[holder] = chance.randint(counted[holder], len(taken[holder]))
        rows = reader.take(FIRST, holder, chance.randint(1, 4), False, counted[holder])
        assert [number for number, _ in rows] == sorted(number for number, _ in rows)
        taken[holder] += rows
        if not rows:
            at_end.add(holder)
    of_the_living = [row for holder in alive for row in taken[holder]]
    assert all(row == f"row {number}" for number, row in of_the_living)
    assert sorted([*lost_ids, *(n for n, _ in of_the_living)]) == list(range(NUM_ROWS))
    counts = {holder: len(taken[holder]) for holder in alive}
    assert sorted(reader.ids(FIRST, counts)) == sorted(number for number, _ in of_the_living)
    for holder in alive:
        reader.end(FIRST, holder)
    assert not reader._readings, "nothing is kept of a pass that is over"


def test_a_function_that_runs_again_goes_on_with_what_is_here() -> None:
    reader = RowReader(Rows(once=True), lambda: False)
    begin(reader)
    used = reader.take(FIRST, 0, 4, False, 0)
    reader.take(FIRST, 1, 4, False, 0)
    reader.take(FIRST, 0, 4, False, 4)  # The first four count; these do not.
    again = ("run", 4, 1)
    assert begin(reader, again, given=NumberSet(n for n, _ in used), num_holders=2) == []
    rows = reader.take(again, 1, 100, False, 0)
    assert [number for number, _ in rows] == list(range(4, NUM_ROWS))
    assert reader.take(FIRST, 0, 4, False, 0) == [], "of a function that was left"


def test_two_readings_at_once_are_both_continued_when_the_functions_run_again() -> None:
    source = Rows()
    reader = RowReader(source, lambda: False)
    names = {1: "epoch 0", 2: "another"}
    for number, name in names.items():
        for holder in range(2):
            begin(
                reader, ("run", 3, number), name=name, num_holders=2, holder=holder, inside=[1, 2]
            )
        reader.take(("run", 3, number), 0, 5, False, 0)
    begin(reader, ("run", 3, 3), name=None, num_holders=2, inside=[1, 2, 3])
    for number, name in names.items():
        key = ("run", 4, number)
        for holder in range(2):
            begin(reader, key, name=name, num_holders=2, holder=holder, inside=range(1, number + 1))
        assert [n for n, _ in reader.take(key, 1, 100, False, 0)] == list(range(NUM_ROWS))
    assert source.num_readings == 3
    assert list(reader._readings) == [("run", 4, 1), ("run", 4, 2)]


def test_a_reading_that_no_function_continues_is_forgotten_in_the_next_epoch() -> None:
    """A rank was lost after all rows were taken: the function begins in the next epoch."""
    reader = RowReader(Rows(), lambda: False)
    begin(reader, name="1/9/rows#0", epoch=9)
    reader.take(FIRST, 0, 100, False, 0)
    begin(reader, ("run", 4, 1), name="1/10/rows#0", epoch=10)
    assert len(reader._readings) == 1


def test_a_reading_is_kept_while_its_epoch_is_not_over() -> None:
    reader = RowReader(Rows(), lambda: False)
    begin(reader, name="1/9/rows#0")
    for generation, name in enumerate((None, "1//rows#0", "1/9/others#0", "2/10/rows#0"), 4):
        begin(reader, ("run", generation, 1), name=name)
        assert FIRST in reader._readings, "it may have yet to be continued"
    begin(reader, ("run", 8, 1), name="1/10/rows#0")
    left = [reading.name for reading in reader._readings.values()]
    assert left == ["1//rows#0", "2/10/rows#0", "1/10/rows#0"]


def test_a_rank_that_begins_late_has_not_left_what_a_faster_one_has_begun() -> None:
    source = Rows()
    reader = RowReader(source, lambda: False)
    later = ("run", 3, 2)
    begin(reader, num_holders=2, holder=0)
    begin(reader, later, name="another", num_holders=2, holder=0, inside=[1, 2])
    begin(reader, num_holders=2, holder=1)
    assert len(reader.take(later, 0, 100, False, 0)) == NUM_ROWS
    reader.end(later, 0)
    begin(reader, later, name="another", num_holders=2, holder=1, inside=[1, 2])
    assert reader.take(later, 1, 100, False, 0) == []
    assert source.num_readings == 2


def test_a_run_that_goes_back_reads_the_rows_again() -> None:
    source = Rows()
    reader = RowReader(source, lambda: False)
    begin(reader)
    reader.take(FIRST, 0, 4, False, 0)
    reader.take(FIRST, 0, 4, False, 4)
    reader.take(FIRST, 0, 4, False, 8)
    begin(reader, ("run", 4, 1), given=NumberSet(range(4)))
    assert source.num_readings == 2
    rows = reader.take(("run", 4, 1), 0, 100, False, 0)
    assert [number for number, _ in rows] == list(range(4, NUM_ROWS))


def test_another_run_begins_anew_and_each_pass_is_told_its_epoch() -> None:
    source = Rows()
    reader = RowReader(source, lambda: False)
    begin(reader)
    reader.take(FIRST, 0, 4, False, 0)
    begin(reader, ("another", 3, 1), epoch=7)
    assert [n for n, _ in reader.take(("another", 3, 1), 0, 2, False, 0)] == [0, 1]
    assert source.epochs == [0, 7]


def test_a_pass_that_was_left_in_its_middle_is_forgotten_when_all_have_left_it() -> None:
    reader = RowReader(Rows(), lambda: False)
    begin(reader)
    later = ("run", 3, 2)
    begin(reader, later, inside=[2])
    begin(reader, later, holder=1, inside=[2])
    assert FIRST in reader._readings
    begin(reader, later, holder=2, inside=[2])
    assert list(reader._readings) == [later]


def test_what_does_not_fill_a_batch_waits_for_more() -> None:
    reader = RowReader(Rows(), lambda: False)
    begin(reader)
    assert len(reader.take(FIRST, 0, 20, True, 0)) == 20
    assert reader.take(FIRST, 1, 20, True, 0) == []
    reader.lose(FIRST, {0: 0})
    assert [n for n, _ in reader.take(FIRST, 1, 23, True, 0)] == list(range(23))


def test_rows_that_were_not_kept_are_not_dealt_again_in_silence() -> None:
    reader = RowReader(Rows(), lambda: False)
    begin(reader)
    reader.take(FIRST, 2, 3, False, None)
    with pytest.raises(RuntimeError, match=r"rows \[0, 1, 2\] of a rank that was lost are no"):
        reader.lose(FIRST, {2: 0})


def test_a_source_that_fails_has_not_ended() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise OSError("the disk is gone")

    reader = RowReader(Broken(), lambda: False)
    begin(reader)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            reader.take(FIRST, 0, 4, False, 0)


def test_a_reader_in_the_place_of_one_that_died_refuses_what_that_one_may_have_begun() -> None:
    asks = [
        lambda reader: begin(reader),
        lambda reader: reader.take(FIRST, 0, 4, False, 0),
        lambda reader: reader.lose(FIRST, {1: 0}),
        lambda reader: reader.ids(FIRST, {0: 4}),
        lambda reader: reader.end(FIRST, 0),
    ]
    for first in asks:
        source = Rows()
        reader = RowReader(source, lambda: True)
        for ask in (first, *asks):
            with pytest.raises(
                ReaderDied, match="no longer knows which rows were used in generation 3"
            ):
                ask(reader)
        with pytest.raises(ReaderDied):
            begin(reader, ("run", 3, 2))  # Another pass of that generation.
        assert source.num_readings == 0
        later = ("run", 5, 1)
        begin(reader, later, given=NumberSet({0, 2, 7}))
        rows = reader.take(later, 1, 100, False, 0)
        assert [n for n, _ in rows] == [n for n in range(NUM_ROWS) if n not in {0, 2, 7}]
        with pytest.raises(ReaderDied):
            reader.take(FIRST, 0, 4, False, 0)


def test_of_another_run_a_new_reader_refuses_nothing() -> None:
    reader = RowReader(Rows(), lambda: True)
    with pytest.raises(ReaderDied):
        reader.end(FIRST, 0)
    begin(reader, ("another", 0, 1))
    assert len(reader.take(("another", 0, 1), 0, 100, False, 0)) == NUM_ROWS


STEPS = ("run", 3, "0/0/stream/6/steps/0#0")


def rows_of_step(reader: RowReader, number: int, key: Any = STEPS) -> list[str]:
    count = reader.count_window(key, 0, 6 * number, 6)
    return reader.window(key, 0, 6 * number, count)


def test_steps_that_run_again_continue_with_the_rows_that_are_here() -> None:
    reader = RowReader(Rows(once=True), lambda: False)
    steps = [[f"row {n}" for n in range(NUM_ROWS)][at : at + 6] for at in range(0, NUM_ROWS, 6)]
    assert [rows_of_step(reader, number) for number in range(3)] == steps[:3]
    # Another rank has asked for step 2 already; whether step 1 counts was known to a lost rank.
    again = ("run", 4, STEPS[2])
    assert [rows_of_step(reader, number, again) for number in (1, 2, 3)] == steps[1:]
    assert reader.count_window(again, 0, 24, 6) == 0


def test_steps_that_go_further_back_or_are_of_another_run_read_the_rows_again() -> None:
    source = Rows()
    reader = RowReader(source, lambda: False)
    first = rows_of_step(reader, 0)
    for number in (1, 2):
        rows_of_step(reader, number)
    assert rows_of_step(reader, 0, ("run", 4, STEPS[2])) == first
    assert rows_of_step(reader, 0, ("another", 4, STEPS[2])) == first
    assert rows_of_step(reader, 0, ("another", 4, "0/1/stream/6/steps/1#0")) == first
    assert source.num_readings == 4


def test_a_rank_that_is_late_at_the_end_of_an_epoch_takes_no_rows_of_the_next_one() -> None:
    class Continues:
        """Each iteration gives the next twelve numbers of one iterator."""

        number = num_readings = 0

        def __iter__(self) -> Continues:
            self.num_readings += 1
            return self

        def __next__(self) -> int:
            self.number += 1
            if self.number % 13 == 0:
                raise StopIteration
            return self.number

    source = Continues()
    reader = RowReader(source, lambda: False)
    later = ("run", 3, "0/0/stream/6/steps/1#0")
    for _ in range(2):  # Of both ranks.
        assert reader.count_window(STEPS, 0, 0, 6) == 6
        assert reader.window(STEPS, 0, 0, 6) == [1, 2, 3, 4, 5, 6]
        assert reader.count_window(STEPS, 0, 6, 8) == 6
    assert reader.count_window(STEPS, 0, 12, 6) == 0
    assert reader.count_window(later, 1, 0, 6) == 6
    assert reader.count_window(STEPS, 0, 12, 6) == 0, "the rank that is late"
    for _ in range(2):
        assert reader.count_window(later, 1, 0, 6) == 6
        assert reader.window(later, 1, 0, 6) == [14, 15, 16, 17, 18, 19]
    assert source.num_readings == 2


def test_each_rank_hears_the_error_of_a_source_in_steps_and_what_came_before_it_is_kept() -> None:
    class Flaky:
        num_readings = 0

        def __iter__(self) -> Iterator[str]:
            self.num_readings += 1
            yield from [f"row {n}" for n in range(8)]
            if self.num_readings == 1:
                raise OSError("the disk is gone")

    reader = RowReader(Flaky(), lambda: False)
    step = rows_of_step(reader, 0)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            reader.count_window(STEPS, 0, 6, 6)
    assert reader.window(STEPS, 0, 0, 6) == step, "a rank that is a step late"
    assert rows_of_step(reader, 1, ("run", 4, STEPS[2])) == ["row 6", "row 7"]
