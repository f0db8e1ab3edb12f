"""`RowReader`: an actor that reads a stream once for all ranks, and deals its rows out.

The reader numbers the rows as it reads them. A rank asks for some rows, gets the next ones, and
asks again, so a faster rank gets more rows. The reader keeps a row until it belongs to a step that
counts. When a rank is lost, the reader hands out that rank's kept rows again before it reads any
new ones. So the source need not be able to give a row twice.

    read ──> waiting ──> hand of a rank ──> counted: dropped
                ^              │
                └── it is lost ┘

A *reading* is one iteration of all ranks. The first rank that calls begins it. When a function runs
again from the top, it begins a reading of the same name, which continues with the remaining rows of
the former one.

If the reader's process dies, Ray starts another, which knows neither the rows that were handed out
nor the readings that had begun. If it began such a reading a second time, or took it for over, rows
would be given twice or lost. So the new reader refuses the first generation that calls it, and
earlier ones, with `ReaderDied`: only these can have begun a reading before. The ranks then run
again from the top in a later generation, and begin a reading without the rows that count.

`RowReader` has no clock, and no Ray: the ranks' calls come one after another, in any
order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from .number_set import Numbers, NumberSet

Row = tuple[int, Any]
"""The row's number, and its value."""

ReadingKey = tuple[str, int, int]
"""The run, the generation in which its function began, the iteration's number in that function."""

WindowKey = tuple[str, int, str]
"""The run, the generation in which its function began, the iteration's name in that run."""


class ReaderDied(Exception):
    """The reader has died since this generation began, and has lost this generation's readings."""


class _Source:
    """The rows of one iteration over the source. failure: the error that has ended it, if any."""

    def __init__(self, rows: Iterator[Any]) -> None:
        self._rows = rows
        self.failure: Exception | None = None  # None: it has not failed

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # Each rank that asks has to hear of it: after an error a generator looks as if it had
        # ended.
        if self.failure is not None:
            raise self.failure
        try:
            return next(self._rows)
        except StopIteration:
            # Each rank asks, and after its end some iterators give their next epoch.
            self._rows = iter(())
            raise
        except Exception as error:
            self.failure = error
            raise


@dataclass(slots=True)
class _Hand:
    """The rows that a rank was given, in order. numbers: of all of them. rows: the last ones, which
    are still kept."""

    numbers: Numbers = field(default_factory=Numbers)
    rows: deque[Any] = field(default_factory=deque)

    @property
    def num_dropped(self) -> int:
        return len(self.numbers) - len(self.rows)

    def drop(self, up_to: int) -> None:
        while self.rows and self.num_dropped < up_to:
            self.rows.popleft()

    def kept(self) -> list[Row]:
        return list(zip(self.numbers[self.num_dropped :], self.rows, strict=True))


@dataclass(slots=True)
class _Reading:
    """One iteration of all ranks over the source.

    name: identifies the reading when the function runs again; None: it cannot be continued.
    given: row numbers that are left out, since earlier runs have used them.
    waiting: rows that were read and are in no hand, by ascending number.
    hands: by holder (see dealer.py), for the holders that are not gone.
    gone, ended: the holders that were lost; those whose iteration is over.
    lost_ids: row numbers that lost holders have used in steps that count.
    """

    source: _Source
    name: str | None
    num_holders: int
    given: NumberSet
    next_number: int = 0
    waiting: deque[Row] = field(default_factory=deque)
    hands: dict[int, _Hand] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    lost_ids: Numbers = field(default_factory=Numbers)

    def read(self) -> Row | None:
        """The next row that was not given before; None at the end."""
        for row in self.source:
            # Every row has its number, also one that is left out: it must mean the same row next
            # time.
            number = self.next_number
            self.next_number += 1
            if number not in self.given:
                return number, row
        return None

    def take(self, count: int) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count:
            # First what lost ranks had: else a short stream would end before they are given again.
            row = self.waiting.popleft() if self.waiting else self.read()
            if row is None:
                break
            rows.append(row)
        return rows

    def put_back(self, rows: Iterable[Row]) -> None:
        self.waiting = deque(sorted([*self.waiting, *rows], key=lambda row: row[0]))

    def left(self) -> list[Row]:
        """All rows that the reader keeps: the waiting ones, and those in hands."""
        return [*self.waiting, *(row for hand in self.hands.values() for row in hand.kept())]


@dataclass(slots=True)
class _Window:
    """The rows that the ranks of `ctx.steps` may ask for, in a reading that all share by place.

    key: of the ranks that have asked last.
    first: the place of the first kept row.
    """

    key: WindowKey
    source: _Source
    first: int = 0
    rows: deque[Any] = field(default_factory=deque)

    def serves(self, key: WindowKey, first: int) -> bool:
        """Whether rows from place `first` on can come from this reading. When the function runs
        again from the top, the rows that it left are here: the source may not give them again."""
        run, generation, name = self.key
        # A source that has failed is read again from its beginning, by a function that runs again.
        is_sound = self.source.failure is None or generation == key[1]
        return (run, name) == (key[0], key[2]) and self.first <= first and is_sound

    def drop(self, before: int) -> None:
        """Keep the rows from place `before` on."""
        while self.first < before:
            if self.rows:
                self.rows.popleft()
            else:  # A reading that begins in the middle of an epoch.
                next(self.source, None)
            self.first += 1

    def read(self, first: int, count: int) -> Iterator[Any]:
        """The rows from place `first` on, at most `count`."""
        begin = first - self.first
        missing = begin + count - len(self.rows)
        self.rows.extend(itertools.islice(self.source, max(0, missing)))
        return itertools.islice(self.rows, begin, begin + count)


class RowReader:
    """Reads `source` for all ranks.

    source: an iterable that can be iterated more than once, or a Dataset of Ray Data. If it has
        `set_epoch`, that is called before each reading.
    has_died: called where the reader is made; whether it replaces one that has died.

    Every method with a `key` raises ReaderDied if a reader before this one may have begun that
    reading.
    """

    def __init__(self, source: Any, has_died: Callable[[], bool]) -> None:
        self._has_died = has_died()
        self._died_in: tuple[str, int] | None = None
        """The run in which the former reader died, and the last generation that it can have met;
        None: no rank has asked since, or none has died."""
        self._source = source
        self._readings: dict[ReadingKey, _Reading] = {}
        self._windows: list[_Window] = []
        """That of the last iteration that was asked for, and of the one before it in the same run:
        some ranks are at the end of an epoch when others begin the next one."""
        if hasattr(source, "iter_rows"):
            # A number must mean the same row when the data is read again.
            source.context.execution_options.preserve_order = True

    def begin(
        self,
        key: ReadingKey,
        name: str | None,
        epoch: int,
        num_holders: int,
        given: NumberSet,
        lost: Mapping[int, int | None],
        holder: int,
        inside: Collection[int],
    ) -> Numbers:
        """Begin a reading for the rank of `holder`.

        name, given: as in _Reading.
        epoch: handed to the source's `set_epoch`.
        num_holders: the number of ranks that began the function.
        lost: as for `lose`, whose result is returned.
        inside: the numbers of this holder's iterations in progress; it has left all others.

        Raises what `lose` raises.
        """
        self._check(key)
        # The first of the ranks to ask begins the reading for all of them.
        if key not in self._readings:
            former = next(
                (k for k, r in self._readings.items() if _continues(k, r, key, name)), None
            )
            before = self._readings.pop(former) if former is not None else None
            # No rank asks any more for readings of other runs or of earlier calls of the function;
            # this function may have yet to continue some, but for those of epochs that are over.
            self._readings = {
                k: r
                for k, r in self._readings.items()
                if k[0] == key[0]
                and (k[1] == key[1] or (r.name is not None and not _is_past(r.name, name)))
            }
            self._readings[key] = self._begun(before, name, epoch, num_holders, given)
        # Not those that only faster ranks have begun.
        for earlier in [k for k in self._readings if k[:2] == key[:2] and k[2] < key[2]]:
            if earlier[2] not in inside:
                self.end(earlier, holder)
        return self.lose(key, lost)

    def _begun(
        self,
        before: _Reading | None,
        name: str | None,
        epoch: int,
        num_holders: int,
        given: NumberSet,
    ) -> _Reading:
        # A source that has failed is read again from its beginning.
        if before is not None and before.source.failure is None:
            left = before.left()
            there = NumberSet(number for number, _ in left) | given
            # If not, the run went back to a checkpoint, and needs rows that were dropped: read all
            # rows again.
            if there.has_all_below(before.next_number):
                reading = _Reading(before.source, name, num_holders, given, before.next_number)
                reading.put_back(row for row in left if row[0] not in given)
                return reading
        return _Reading(self._iterated(epoch), name, num_holders, given)

    def _iterated(self, epoch: int) -> _Source:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        rows = self._source.iter_rows() if hasattr(self._source, "iter_rows") else self._source
        return _Source(iter(rows))

    # -- by place, for ctx.steps -------------------------------------------------------------------

    def count_window(self, key: WindowKey, epoch: int, first: int, count: int) -> int:
        """How many rows there are from place `first` on, at most `count`: those of a step that is
        to begin.

        key: of the iteration; a new one begins again. Also a reader that replaces one that died
        can answer: it reads the rows again."""
        window = self._window_from(key, epoch, first)
        # Those of the step before are kept. It counts here, since a rank goes to the next one; if
        # all ranks that know it are lost, the functions run again before that step.
        window.drop(first - count)
        return sum(1 for _ in window.read(first, count))

    def window(self, key: WindowKey, epoch: int, first: int, count: int) -> list[Any]:
        """The rows from place `first` on, which `count_window` has counted."""
        return list(self._window_from(key, epoch, first).read(first, count))

    def _window_from(self, key: WindowKey, epoch: int, first: int) -> _Window:
        run, _, name = key
        others = [one for one in self._windows if one.key[0] == run and one.key[2] != name]
        served = next((one for one in self._windows if one.serves(key, first)), None)
        window = served or _Window(key, self._iterated(epoch))
        # Before a row is read: each rank has to hear of an error.
        self._windows = [window, *others[:1]]
        if served is None:
            window.drop(first)
        window.key = key
        return window

    def take(
        self, key: ReadingKey, holder: int, count: int, drop_last: bool, counted: int | None
    ) -> list[Row]:
        """The next rows, at most `count`; fewer at the end, then none. counted: how many of the
        holder's rows belong to steps that count; None: keep no rows, since a loss ends the run."""
        self._check(key)
        reading = self._readings.get(key)
        if reading is None or holder in reading.gone:
            return []  # The rank was lost, or its function left the reading, since it asked.
        rows = reading.take(count)
        if drop_last and len(rows) < count:
            reading.put_back(rows)  # Together with the rows of a lost rank they may fill a batch.
            return []
        hand = reading.hands.setdefault(holder, _Hand())
        hand.numbers.extend(number for number, _ in rows)
        hand.rows.extend(row for _, row in rows)
        # What belongs to steps that count is not given again, so it takes no memory.
        hand.drop(len(hand.numbers) if counted is None else counted)
        return rows

    def lose(self, key: ReadingKey, lost: Mapping[int, int | None]) -> Numbers:
        """Deal the kept rows of lost holders again. lost: by holder, how many of its rows belong to
        steps that count; None: all of them.

        Returns the row numbers that belong to steps that count, of all holders that are gone.
        Raises RuntimeError if rows to be dealt again are no longer kept."""
        self._check(key)
        reading = self._readings[key]
        for holder, counted in sorted(lost.items()):
            if holder in reading.gone:  # All ranks make this call, with the same `lost`.
                continue
            reading.gone.add(holder)
            hand = reading.hands.pop(holder, _Hand())
            keep = len(hand.numbers) if counted is None else counted
            if keep < hand.num_dropped:
                gone = list(hand.numbers[keep : hand.num_dropped])
                raise RuntimeError(
                    f"rows {gone} of a rank that was lost are no longer kept, so they cannot be "
                    "given to another rank; start again from a checkpoint"
                )
            hand.drop(keep)
            reading.lost_ids.extend(hand.numbers[:keep])
            reading.put_back(hand.kept())
        return reading.lost_ids

    def ids(self, key: ReadingKey, counts: Mapping[int, int]) -> Numbers:
        """The numbers of the first rows of some holders. counts: by holder, how many."""
        self._check(key)
        reading = self._readings.get(key)
        hands = reading.hands if reading is not None else {}
        found = Numbers()
        for holder, count in counts.items():
            # A rank that has taken nothing yet has no hand here.
            if holder in hands:
                found.extend(hands[holder].numbers[:count])
        return found

    def end(self, key: ReadingKey, holder: int) -> None:
        """The reading is over for this holder. It is not called while the holder's function may run
        again inside the reading."""
        self._check(key)
        reading = self._readings.get(key)
        if reading is None:
            return
        reading.ended.add(holder)
        # The last one: until then a rank may be lost, and its rows come back.
        if len(reading.ended | reading.gone) >= reading.num_holders:
            del self._readings[key]

    def _check(self, key: ReadingKey) -> None:
        # The usual case: it has known every generation.
        if not self._has_died:
            return
        run, generation, _ = key
        # All ranks of the generation that it died in have to hear of it, not the first to ask
        # alone.
        if self._died_in is None:
            self._died_in = run, generation
        if run == self._died_in[0] and generation <= self._died_in[1]:
            raise ReaderDied(
                f"it restarted, and no longer knows which rows were used in generation {generation}"
            )


def _continues(key: ReadingKey, reading: _Reading, later: ReadingKey, name: str | None) -> bool:
    """Whether the reading of `later` continues this reading."""
    return name is not None and reading.name == name and key[0] == later[0] and key[1] < later[1]


def _is_past(before: str, name: str | None) -> bool:
    """Whether the reading of the name `before` was of an earlier epoch of the loop in which the
    reading `name` begins. Names are those of Cursor.begin; outside all loops they have no epoch."""
    loop, epoch, *_ = [*before.split("/", 2), ""]
    of_loop, now, *_ = [*(name or "").split("/", 2), ""]
    return loop == of_loop and epoch.isdecimal() and now.isdecimal() and int(epoch) < int(now)


def is_restarted() -> bool:
    """Whether Ray has started this process in the place of one that has died."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)
