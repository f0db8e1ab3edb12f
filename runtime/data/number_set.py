"""Numbers of samples, of which an epoch may give more than a list of them has room for.

`Numbers` has an order, that in which samples were given. It keeps stretches of consecutive numbers,
16 bytes for each: a stream is dealt in such stretches, one for a batch, where a list takes 40 bytes
for each row. `NumberSet` has no order, and a bit for each number up to the largest one; so has its
text in a checkpoint, which is compressed.
"""

from __future__ import annotations

import base64
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Self, overload

MOST = 1 << 33
"""No number of a row of a stream is as large as that: 10,000 rows a second take ten days in one
epoch to come so far, and a set of all of them takes 1 GiB."""


class Numbers(Sequence[int]):
    """Sample numbers in the order in which they were given."""

    __slots__ = ("_ends", "_firsts")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._firsts = array("q")  # the first number of each stretch
        self._ends = array("q")  # how many numbers there are up to the stretch's end
        self.extend(numbers)

    def extend(self, numbers: Iterable[int]) -> None:
        for stretch in numbers.stretches() if isinstance(numbers, Numbers) else map(_one, numbers):
            self._append(stretch)

    def __iadd__(self, numbers: Iterable[int]) -> Self:
        self.extend(numbers)
        return self

    def _append(self, stretch: range) -> None:
        if not stretch:
            return
        length = len(self)
        if self._ends:
            start = self._ends[-2] if len(self._ends) > 1 else 0
            # It continues the last stretch: numbers that come one by one stay one stretch.
            if self._firsts[-1] + length - start == stretch.start:
                self._ends[-1] += len(stretch)
                return
        self._firsts.append(stretch.start)
        self._ends.append(length + len(stretch))

    def stretches(self) -> Iterator[range]:
        start = 0
        for first, end in zip(self._firsts, self._ends, strict=True):
            yield range(first, first + end - start)
            start = end

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        for stretch in self.stretches():
            yield from stretch

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Numbers: ...
    def __getitem__(self, index: int | slice) -> int | Numbers:
        if not isinstance(index, slice):
            place = range(len(self))[index]
            return self._stretch_of(place)[0]
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError("numbers are sliced with a step of 1")
        found = Numbers()
        while start < stop:
            stretch = self._stretch_of(start)[: stop - start]
            found._append(stretch)
            start += len(stretch)
        return found

    def _stretch_of(self, place: int) -> range:
        """What is left of a stretch from a place on."""
        at = bisect_right(self._ends, place)
        begin = self._ends[at - 1] if at else 0
        first = self._firsts[at]
        return range(first + place - begin, first + self._ends[at] - begin)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(
            one == another for one, another in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Numbers({list(self)!r})"


def _one(number: int) -> range:
    return range(number, number + 1)


class NumberSet:
    """A set of sample numbers, none of which is negative. numbers: in any order."""

    __slots__ = ("_bits", "_count")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._bits = _bits_of(numbers)
        self._count: int | None = None  # None: not counted yet

    @classmethod
    def _of(cls, bits: bytes) -> Self:
        made = cls()
        made._bits = bits.rstrip(b"\0")
        return made

    @classmethod
    def from_text(cls, text: str, most: int = MOST) -> Self:
        """The set in a text. most: no number is as large as that. Raises ValueError for a text that
        is none of such a set: a few of its characters may stand for very many numbers."""
        # No more is inflated than a set can have: a short text may stand for gigabytes.
        limit = -(-most // 8)
        inflating = zlib.decompressobj()
        try:
            packed = base64.b64decode(text, validate=True)
            bits = inflating.decompress(packed, limit + 1) if packed else b""
        except (ValueError, zlib.error) as error:
            raise ValueError(f"it is not the text of a set of numbers ({error})") from error
        # The last byte may have bits of numbers that are too large.
        if len(bits) > limit or (len(bits) == limit and most % 8 and bits[-1] >> most % 8):
            raise ValueError(f"it has numbers that are not below {most}")
        if packed and not inflating.eof:
            raise ValueError("it is not the text of a set of numbers (its end is missing)")
        return cls._of(bits)

    def text(self) -> str:
        return base64.b64encode(zlib.compress(self._bits, 1)).decode() if self._bits else ""

    def __or__(self, other: NumberSet) -> NumberSet:
        size = max(len(self._bits), len(other._bits))
        return NumberSet._of((_number(self._bits) | _number(other._bits)).to_bytes(size, "little"))

    def __sub__(self, other: NumberSet) -> NumberSet:
        left = _number(self._bits) & ~_number(other._bits)
        return NumberSet._of(left.to_bytes(len(self._bits), "little"))

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (number & 7) & 1)

    def has_all_below(self, stop: int) -> bool:
        """Whether each number from 0 to `stop` - 1 is in it."""
        whole, rest = divmod(stop, 8)
        if self._bits[:whole] != b"\xff" * whole:
            return False
        return all(number in self for number in range(stop - rest, stop))

    def __len__(self) -> int:
        if self._count is None:
            self._count = _number(self._bits).bit_count()
        return self._count

    def __iter__(self) -> Iterator[int]:
        """The numbers, ascending."""
        for place, byte in enumerate(self._bits):
            if byte:
                yield from (8 * place + bit for bit in range(8) if byte >> bit & 1)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberSet):
            return self._bits == other._bits
        return set(self) == other if isinstance(other, set | frozenset) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bits)

    def __repr__(self) -> str:
        return f"NumberSet({list(self)!r})"


def _number(bits: bytes) -> int:
    return int.from_bytes(bits, "little")


def _bits_of(numbers: Iterable[int]) -> bytes:
    """A bit for each number up to the largest one. All ranks wait for this at a checkpoint."""
    stretches = numbers if isinstance(numbers, Numbers) else None
    found = stretches._firsts if stretches is not None else array("q", numbers)
    if not found:
        return b""
    import numpy  # A stream's reader mostly does without.

    firsts = numpy.frombuffer(found, dtype=numpy.int64)
    if (least := int(firsts.min())) < 0:
        raise ValueError(f"a sample has the number {least}")
    # The rows that a reader keeps of a long stream are few, and have large numbers.
    whole = least // 8
    firsts = firsts - 8 * whole
    if stretches is None:
        mask = numpy.zeros(int(firsts.max()) + 1, dtype=bool)
        mask[firsts] = True
    else:  # How many stretches begin before a number and do not end before it.
        lengths = numpy.array(stretches._ends, dtype=numpy.int64)
        lengths[1:] -= lengths[:-1].copy()
        ends = firsts + lengths
        steps = numpy.zeros(int(ends.max()) + 1, dtype=numpy.int32)
        numpy.add.at(steps, firsts, 1)
        numpy.add.at(steps, ends, -1)
        mask = steps.cumsum(dtype=numpy.int32) > 0
    return bytes(whole) + numpy.packbits(mask, bitorder="little").tobytes().rstrip(b"\0")
