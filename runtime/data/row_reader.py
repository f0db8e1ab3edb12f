"""`RowReader`: an actor that reads a stream once for all ranks, and deals its rows out.

Rows are numbered as they are read. A rank asks for some, gets the next ones, and asks again:
whoever is faster gets more. What is handed out is kept here until it belongs to a step that counts;
of a rank that is lost, the rest is handed out again, before anything else is read. So the source
need not be able to give a row twice.

    read ──> waiting ──> hand of a rank ──> counted: dropped
                ^              │
                └── it is lost ┘

A *reading* is one iteration, of all ranks. Its first caller begins it. When a function runs again
from the top it begins a reading of the same name, which goes on with what the former one had left.

If its process dies, Ray starts another, which knows nothing: neither which rows were handed out,
nor which readings had begun. Taken for over, or begun a second time beside ranks that hold rows of
the first, a reading would lose rows, or give them twice. So it refuses the first generation that it
hears of, and earlier ones (`ReaderDied`): only those can have begun anything before. The ranks then
run again from the top in a later generation, and begin anew without the rows that count.

No clock, no Ray: calls come one after another, in any order that ranks may send them in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

Row = tuple[int, Any]
"""Its number, and what was read."""

ReadingKey = tuple[str, int, int]
"""Run, generation that its function began in, number of the iteration in that function."""


class ReaderDied(Exception):
    """The reader has died since this generation began, and what it knew of it is lost."""


@dataclass(slots=True)
class _Hand:
    """What a rank was given, in that order. rows: those that are kept, the last ones."""

    numbers: list[int] = field(default_factory=list)
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
    """name: of what goes on when the function runs again; None: nothing does. given: numbers that
    are left out. waiting: read and in nobody's hand, ascending. hands: by holder, of those that are
    not gone. lost_ids: rows of those that are gone, in steps that count."""

    source: Iterator[Any]
    name: str | None
    num_holders: int
    given: Collection[int]
    next_number: int = 0
    waiting: deque[Row] = field(default_factory=deque)
    hands: dict[int, _Hand] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    lost_ids: list[int] = field(default_factory=list)
    failure: Exception | None = None

    def read(self) -> Row | None:
        """The next row that was not given before; None at the end."""
        if self.failure is not None:
            raise self.failure
        while True:
            try:
                row = next(self.source)
            except StopIteration:
                return None
            except Exception as error:
                self.failure = error  # A generator that has raised would look as if it had ended.
                raise
            number = self.next_number
            self.next_number += 1
            if number not in self.given:
                return number, row

    def take(self, count: int) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count:
            row = self.waiting.popleft() if self.waiting else self.read()
            if row is None:
                break
            rows.append(row)
        return rows

    def put_back(self, rows: Iterable[Row]) -> None:
        self.waiting = deque(sorted([*self.waiting, *rows], key=lambda row: row[0]))

    def left(self) -> list[Row]:
        """All that is kept here: of nobody's hand, and of hands."""
        return [*self.waiting, *(row for hand in self.hands.values() for row in hand.kept())]


class RowReader:
    """source: iterable, again and again; or a Dataset of Ray Data. Its `set_epoch`, if it has one,
    is called before each reading. has_died: there was another one before, whose place this one
    takes.

    Whatever is asked with the key of a reading raises ReaderDied where that was begun by another.
    """

    def __init__(self, source: Any, has_died: bool = False) -> None:
        self._has_died = has_died
        self._died_in: tuple[str, int] | None = None
        """The run in which the other died, and the last generation that it can have been."""
        self._source = source
        self._readings: dict[ReadingKey, _Reading] = {}
        if hasattr(source, "iter_rows"):
            # So that a number means the same row when the data is read again.
            source.context.execution_options.preserve_order = True

    def begin(
        self,
        key: ReadingKey,
        name: str | None,
        epoch: int,
        num_holders: int,
        given: Collection[int],
        lost: Mapping[int, int | None],
        holder: int,
        inside: Collection[int],
    ) -> list[int]:
        """A rank begins a reading. given: numbers that are not to be given, as they count already.
        lost: as for `lose`, which also tells what comes back. inside: numbers of the iterations
        that the holder is in; others were left in their middle."""
        self._check(key)
        if key not in self._readings:
            former = next((k for k, r in self._readings.items() if _goes_on(k, r, key, name)), None)
            before = self._readings[former] if former is not None else None
            # Of another run, and of a function that runs again: nobody asks for those any more.
            self._readings = {k: r for k, r in self._readings.items() if k[:2] == key[:2]}
            self._readings[key] = self._begun(before, name, epoch, num_holders, given)
        for earlier in [k for k in self._readings if k != key and k[2] not in inside]:
            self.end(earlier, holder)
        return self.lose(key, lost)

    def _begun(
        self,
        before: _Reading | None,
        name: str | None,
        epoch: int,
        num_holders: int,
        given: Collection[int],
    ) -> _Reading:
        if before is not None and before.failure is None:
            left = before.left()
            numbers = {number for number, _ in left}
            read = range(before.next_number)
            # Otherwise the run has gone back to a checkpoint, and wants what is no more here.
            if all(number in numbers or number in given for number in read):
                reading = _Reading(before.source, name, num_holders, given, before.next_number)
                reading.put_back(row for row in left if row[0] not in given)
                return reading
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        rows = self._source.iter_rows() if hasattr(self._source, "iter_rows") else self._source
        return _Reading(iter(rows), name, num_holders, given)

    def take(
        self, key: ReadingKey, holder: int, count: int, drop_last: bool, counted: int | None
    ) -> list[Row]:
        """The next rows, at most `count`; fewer at the end, and none behind it. counted: how many
        of the holder's rows belong to steps that count; None: a loss ends the run, keep none."""
        self._check(key)
        reading = self._readings.get(key)
        if reading is None or holder in reading.gone:
            return []  # It was lost, or its function left, since it asked.
        rows = reading.take(count)
        if drop_last and len(rows) < count:
            reading.put_back(rows)  # With what a lost rank leaves they may fill a batch.
            return []
        hand = reading.hands.setdefault(holder, _Hand())
        hand.numbers += [number for number, _ in rows]
        hand.rows.extend(row for _, row in rows)
        hand.drop(len(hand.numbers) if counted is None else counted)
        return rows

    def lose(self, key: ReadingKey, lost: Mapping[int, int | None]) -> list[int]:
        """These holders are gone; deal again what they had. lost: how many of their rows belong to
        steps that count, None for all. All ranks say so; the first one is heard.

        Returns the numbers of those that count, of all holders that are gone."""
        self._check(key)
        reading = self._readings[key]
        for holder, counted in sorted(lost.items()):
            if holder in reading.gone:
                continue
            reading.gone.add(holder)
            hand = reading.hands.pop(holder, _Hand())
            keep = len(hand.numbers) if counted is None else counted
            if keep < hand.num_dropped:
                raise RuntimeError(
                    f"rows {hand.numbers[keep : hand.num_dropped]} of a rank that was lost are not "
                    "kept any more, so they cannot be dealt again; begin again from a checkpoint"
                )
            hand.drop(keep)
            reading.lost_ids += hand.numbers[:keep]
            reading.put_back(hand.kept())
        return reading.lost_ids

    def ids(self, key: ReadingKey, counts: Mapping[int, int]) -> list[int]:
        """The numbers of the first rows of some holders, so many of each."""
        self._check(key)
        reading = self._readings.get(key)
        hands = reading.hands if reading is not None else {}
        return [n for h, count in counts.items() if h in hands for n in hands[h].numbers[:count]]

    def end(self, key: ReadingKey, holder: int) -> None:
        """The reading is over for this holder. A holder whose function may run again in it does not
        say so."""
        self._check(key)
        reading = self._readings.get(key)
        if reading is None:
            return
        reading.ended.add(holder)
        if len(reading.ended | reading.gone) >= reading.num_holders:
            del self._readings[key]

    def _check(self, key: ReadingKey) -> None:
        if not self._has_died:
            return
        run, generation, _ = key
        if self._died_in is None:
            self._died_in = run, generation
        if run == self._died_in[0] and generation <= self._died_in[1]:
            raise ReaderDied(f"what it knew of generation {generation} is lost")


def _goes_on(key: ReadingKey, reading: _Reading, later: ReadingKey, name: str | None) -> bool:
    """Whether a reading is what `later` goes on with."""
    return name is not None and reading.name == name and key[0] == later[0] and key[1] < later[1]


def row_reader_class() -> Any:
    """The Ray class of RowReader, restarted by Ray. It waits most of the time, so it takes no CPU
    of the cluster."""

    class RowReaderActor(RowReader):
        def __init__(self, source: Any) -> None:
            runtime = ray.get_runtime_context()
            super().__init__(source, runtime.was_current_actor_reconstructed)

    return ray.remote(num_cpus=0, max_restarts=-1)(RowReaderActor)
