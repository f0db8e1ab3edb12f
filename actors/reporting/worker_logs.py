"""What a worker prints: read from the files to which Ray has pointed its stdout and stderr.

Everything is in these files: lines of Python, of C code and of child processes, and what a worker
has printed right before a SIGKILL. The session reads them by way of the worker, or, when the worker
is gone, by itself. Ray's own way of showing them names processes instead of ranks, and merges equal
lines of several workers into one; an `Output` switches it off for its process.

Two files do not say in which order they were written. So whenever Python goes from one stream to
the other, a *mark* notes how long both files are. A mark also notes where the rank changed, and
where a figure was shown.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

OUT, ERR, FIGURE = 1, 2, 3
"""What a PrintedPiece holds: bytes of stdout, bytes of stderr, or a picture (PNG)."""

_MOST_BYTES = 1 << 20  # of one file in one answer; the rest comes with the next
_MOST_MARKS = 10_000  # Where nobody reads; the oldest are dropped, and with them an order.

_NOT_FOR_ANY_JOB = b":actor_name:Worker\n:job_id:chorusline-shows-the-rest-by-rank\n"
"""Ray's log monitor takes these lines of a log file for its own. The first one has it send what it
has read so far to the program. The second one names the job that the following lines belong to, and
no program has that name. Ray 2.50 to 2.60: ray/_private/log_monitor.py."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far the output of a worker was read: bytes of both files, and marks."""

    out: int = 0
    err: int = 0
    marks: int = 0


@dataclass(frozen=True, slots=True)
class PrintedPiece:
    """A part of a worker's output. kind: OUT, ERR or FIGURE. rank: of the worker at that time;
    None if it had none yet. mark: of a figure, the number of marks before it."""

    kind: int
    data: bytes
    rank: int | None
    mark: int = 0


@dataclass(frozen=True, slots=True)
class Printed:
    """What a worker has printed since some position. until: the position after it. rank: of the
    worker there; None as in PrintedPiece.

    has_more: there is more to read at once.
    files: of stdout and stderr, on the node of this id.
    is_notice: it is a line about the output, and in none of the files.
    """

    pieces: tuple[PrintedPiece, ...]
    until: Position
    rank: int | None
    has_more: bool
    files: tuple[str, str]
    node_id: str
    is_notice: bool = False


@dataclass(frozen=True, slots=True)
class _Mark:
    """out, err: the sizes of the files. rank: from here on; None as in PrintedPiece. figure: shown
    here; None: another rank begins here."""

    out: int
    err: int
    rank: int | None
    figure: bytes | None


class Output:
    """The output of this process, from now on, which Ray shows no more. The training thread writes,
    the control loop reads.

    node_id: of the node that the process runs on.
    """

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._lock = threading.Lock()
        self._marks: deque[_Mark] = deque()
        self._num_dropped = 0  # marks before the first one that is held
        self._rank_before: int | None = None  # at the first mark that is held; None: no rank yet
        self._rank: int | None = None  # None: before the first run
        self._kind = OUT  # of the stream that was written to last
        # None if Ray was told to write its workers' output to something else than plain files (to
        # rotate them, or to use the terminal): then it continues to show the output in its own way.
        self._files = _log_files()
        self._beginning = Position()  # for a reader that has no position
        self._streams: tuple[Any, ...] = ()
        if self._files is not None:
            for number in (OUT, ERR):
                os.write(number, _NOT_FOR_ANY_JOB)
            self._beginning = Position(*_sizes())
            self._streams = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = _Noted(sys.stdout, self, OUT), _Noted(sys.stderr, self, ERR)
        self._asked = self._beginning  # by the last reader, who has had all before

    def set_rank(self, rank: int) -> None:
        """What is printed from now on is the output of this rank."""
        if rank != self._rank:
            self._rank = rank
            self._mark()

    def begin_run(self) -> None:
        """Another run begins. A session host that is started again in it reads what was printed in
        it, and not once more what was heard of the runs before."""
        self._beginning = self._asked

    def show(self, figure: bytes) -> None:
        """Show a picture (PNG) between what was printed before and after."""
        self._mark(figure)

    def written_to(self, kind: int) -> None:
        """A stream is about to be written to."""
        # Between two writes to one stream the order is that of its file.
        if kind != self._kind:
            self._kind = kind
            self._mark()

    def _mark(self, figure: bytes | None = None) -> None:
        # Ray shows the output itself, and nobody asks for the order.
        if self._files is None:
            return
        with self._lock:
            self._marks.append(_Mark(*_sizes(), self._rank, figure))
            if len(self._marks) > _MOST_MARKS:
                self._drop()

    def _drop(self) -> None:
        self._rank_before = self._marks.popleft().rank
        self._num_dropped += 1

    def read(self, since: Position | None) -> Printed | None:
        """What was printed since a position; the marks before it are dropped. None if this process
        does not write to files, or they cannot be read now.

        since: None: from what nobody had read when the run began."""
        if self._files is None:
            return None
        for stream in self._streams:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()  # Bytes that were written to its `buffer` may wait in it.
        since = self._asked = since or self._beginning
        with self._lock:
            while self._marks and self._num_dropped < since.marks:
                self._drop()
            marks, rank, out, err = tuple(self._marks), self._rank_before, *_sizes()
            num_dropped, last = self._num_dropped, self._kind
        try:
            texts = {
                OUT: (since.out, _read(self._files[0], since.out, out)),
                ERR: (since.err, _read(self._files[1], since.err, err)),
            }
        except OSError:  # Too many open files, or one was removed: no run may fail for that.
            return None
        pieces, until, rank, is_whole = _in_order(texts, marks, rank, last, num_dropped)
        has_more = not is_whole or until.out < out or until.err < err
        return Printed(tuple(pieces), until, rank, has_more, self._files, self._node_id)


def read_rest(
    files: tuple[str, str], node_id: str, since: Position, rank: int | None
) -> Printed | None:
    """What a process that is gone has printed since a position; None if the files are not here."""
    try:
        read = [
            _read(file, begin, None)
            for file, begin in zip(files, (since.out, since.err), strict=True)
        ]
    except OSError:
        return None
    pieces = [
        PrintedPiece(kind, data, rank) for kind, data in zip((OUT, ERR), read, strict=True) if data
    ]
    until = Position(since.out + len(read[0]), since.err + len(read[1]), since.marks)
    # It may be exactly that much: then the next answer is empty.
    has_more = max(map(len, read)) == _MOST_BYTES
    return Printed(tuple(pieces), until, rank, has_more, files, node_id)


def unseen(printed: Printed, since: Position) -> Printed:
    """The part of an answer that is new to one who has had all up to a position, of another
    reader's answers."""
    left_out = {}  # bytes of its beginning, by kind
    for kind, until, seen in (
        (OUT, printed.until.out, since.out),
        (ERR, printed.until.err, since.err),
    ):
        num_bytes = sum(len(piece.data) for piece in printed.pieces if piece.kind == kind)
        left_out[kind] = max(0, seen - (until - num_bytes))
    pieces = []
    for piece in printed.pieces:
        if piece.kind == FIGURE:
            if piece.mark >= since.marks:
                pieces.append(piece)
            continue
        num_bytes = min(len(piece.data), left_out[piece.kind])
        left_out[piece.kind] -= num_bytes
        if data := piece.data[num_bytes:]:
            pieces.append(replace(piece, data=data))
    return replace(printed, pieces=tuple(pieces))


def _in_order(
    texts: dict[int, tuple[int, bytes]],
    marks: Sequence[_Mark],
    rank: int | None,
    last: int,
    num_before: int = 0,
) -> tuple[list[PrintedPiece], Position, int | None, bool]:
    """The pieces, the position after them, the rank there, and whether all of the texts and marks
    were used.

    texts: by kind, where in its file the text begins, and the text.
    rank: before the first mark. last: the stream that was written to last.
    num_before: marks before the first one of these.
    """
    pieces: list[PrintedPiece] = []
    at = {kind: begin for kind, (begin, _) in texts.items()}

    def up_to(kind: int, end: int) -> bool:
        begin, data = texts[kind]
        end = max(at[kind], end)
        if part := data[at[kind] - begin : end - begin]:
            pieces.append(PrintedPiece(kind, part, rank))
            at[kind] += len(part)
        return at[kind] == end

    for number, mark in enumerate(marks, num_before):
        # `&`, so that both are read: an `and` would leave the second one out.
        if not (up_to(OUT, mark.out) & up_to(ERR, mark.err)):
            return pieces, Position(at[OUT], at[ERR], number), rank, False
        if mark.figure is not None:
            pieces.append(PrintedPiece(FIGURE, mark.figure, mark.rank, number))
        rank = mark.rank
    for kind in (last, OUT + ERR - last):
        up_to(kind, texts[kind][0] + len(texts[kind][1]))
    return pieces, Position(at[OUT], at[ERR], num_before + len(marks)), rank, True


def write_line(stream: TextIO, line: str) -> None:
    _write(stream, f"{line}\n")


def _write(stream: TextIO, text: str) -> Any:
    """What the stream's encoding has no bytes for is escaped: letters under LANG=C, and names of
    files that the locale cannot decode."""
    try:
        return stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        return stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


class _Noted:
    """A stream of Ray's that tells the Output before it is written to."""

    def __init__(self, stream: Any, output: Output, kind: int) -> None:
        self._stream = stream
        self._output = output
        self._kind = kind

    def write(self, text: str) -> Any:
        self._output.written_to(self._kind)
        return _write(self._stream, text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)


def _log_files() -> tuple[str, str] | None:
    try:
        if not all(stat.S_ISREG(os.fstat(number).st_mode) for number in (OUT, ERR)):
            return None
        out, err = (str(Path(f"/proc/self/fd/{number}").readlink()) for number in (OUT, ERR))
    except OSError:
        return None
    return (out, err) if out != err else None


def _sizes() -> tuple[int, int]:
    return os.fstat(OUT).st_size, os.fstat(ERR).st_size


def _read(file: str, begin: int, end: int | None) -> bytes:
    count = _MOST_BYTES if end is None else min(_MOST_BYTES, max(0, end - begin))
    if not count:
        return b""
    # Ray makes the folder writable by all users: a pipe in the file's place must block nobody.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(file, flags), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            return b""
        opened.seek(begin)
        return opened.read(count)
