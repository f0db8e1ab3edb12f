"""What ranks print, whichever way and however late: all of it arrives, in order, with its rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import chorusline as cl
from chorusline.actors.reporting import worker_logs
from chorusline.actors.reporting.worker_logs import (
    ERR,
    FIGURE,
    OUT,
    Output,
    Position,
    Printed,
    PrintedPiece,
    _in_order,
    _Mark,
    read_rest,
    unseen,
)
from chorusline.runtime.session.showing.rank_output import RankLines

NUM_LINES = 500


def of_rank(text: str, rank: int) -> list[str]:
    prefix = f"[rank {rank}] "
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


def print_much(ctx: cl.Context) -> None:
    for number in range(NUM_LINES):
        print("line", number)  # Equal on both ranks: Ray would merge them.
        if number % 50 == 0:
            print("trouble", number, file=sys.stderr)
    sys.stdout.buffer.write(b"of bytes\n")
    sys.stdout.flush()
    os.write(1, b"of C code\n")
    subprocess.run(["echo", "of a child process"], check=True)
    print("a bar 50%\ra bar 100%")
    print(":actor_name:of Ray")
    print("ends without ", end="")
    sys.stdout.buffer.write(b"an end of line")


async def test_every_line_of_every_rank_arrives_in_order_before_run_returns(
    session: cl.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        await session.run(print_much)
        shown = capsys.readouterr()
        for rank in range(2):
            assert of_rank(shown.out, rank) == [
                *(f"line {number}" for number in range(NUM_LINES)),
                "of bytes",
                "of C code",
                "of a child process",
                "a bar 100%",
                "ends without an end of line",
            ]
            assert of_rank(shown.err, rank) == [f"trouble {n}" for n in range(0, NUM_LINES, 50)]


def print_and_die(ctx: cl.Context) -> None:
    """The dying rank has not printed before; as a new worker it may never have been heard."""
    if ctx.rank == 1:
        print("\n".join(f"last words {number}" for number in range(NUM_LINES)))
        print("and half a li", end="")
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.barrier()


async def test_what_a_rank_prints_before_a_sigkill_arrives(
    session: cl.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with pytest.raises(cl.WorkerLost):
            await session.run(print_and_die)
        shown = capsys.readouterr()
        expected = [f"last words {number}" for number in range(NUM_LINES)]
        who = "rank" if "[rank 1]" in shown.out else "worker in seat"  # Not heard as a rank yet.
        printed = [line.partition("] ") for line in shown.out.splitlines() if line[0] == "["]
        assert {begin for begin, _, _ in printed} == {f"[{who} 1"}
        assert [line for _, _, line in printed] == [*expected, "and half a li"]
    await session.run(lambda ctx: print("anew"))
    shown = capsys.readouterr()
    assert of_rank(shown.out, 0) == of_rank(shown.out, 1) == ["anew"]


def test_two_streams_are_shown_in_the_order_in_which_they_were_written() -> None:
    out, err = b"one\nthree\nfive", b"two\nfour\n"
    marks = [
        _Mark(0, 0, 0, None),  # rank 0 begins
        _Mark(4, 0, 0, None),  # went to stderr
        _Mark(4, 4, 0, None),  # and back
        _Mark(10, 4, 0, b"PNG"),
        _Mark(10, 4, 0, None),
        _Mark(10, 9, 0, None),
        _Mark(14, 9, 2, None),  # It is rank 2 from here on.
    ]
    texts = {OUT: (0, out), ERR: (0, err)}
    pieces, until, rank, is_whole = _in_order(texts, marks, None, OUT)
    assert is_whole and (until, rank) == (Position(14, 9, 7), 2)
    lines: list[str] = []
    shown = RankLines(
        lambda line, is_error: lines.append(line + "!" * is_error),
        lambda png, rank: lines.append(f"{rank} {png!r}"),
    )
    for begin in range(len(pieces)):  # However they arrive.
        shown.take(0, Printed(tuple(pieces[begin : begin + 1]), until, 2, False, ("", ""), ""))
    shown.end()
    assert lines == [
        "[rank 0] one",
        "[rank 0] two!",
        "[rank 0] three",
        "0 b'PNG'",
        "[rank 0] four!",
        "[rank 0] five",
    ]
    assert [piece.kind for piece in pieces] == [OUT, ERR, OUT, FIGURE, ERR, OUT]
    again, until, *_ = _in_order(texts, marks, None, OUT, 10)  # Of ten marks more.
    assert (pieces[3].mark, again[3].mark, until.marks) == (3, 13, 17)


def test_one_who_hears_of_another_reader_is_shown_what_is_new() -> None:
    pieces = (
        PrintedPiece(OUT, b"one\n", 0),
        PrintedPiece(FIGURE, b"a figure", 0, 1),
        PrintedPiece(ERR, b"trouble\n", 0),
        PrintedPiece(OUT, b"two\n", 0),
        PrintedPiece(FIGURE, b"another", 0, 4),
        PrintedPiece(OUT, b"three\n", 0),
    )
    answer = Printed(pieces, Position(114, 208, 6), 0, False, ("out", "err"), "node")
    assert unseen(answer, Position()) == answer
    assert unseen(answer, Position(100, 200, 1)) == answer

    def data(out: int, err: int, marks: int) -> list[bytes]:
        return [piece.data for piece in unseen(answer, Position(out, err, marks)).pieces]

    assert data(104, 200, 1) == [b"a figure", b"trouble\n", b"two\n", b"another", b"three\n"]
    assert data(104, 200, 2) == [b"trouble\n", b"two\n", b"another", b"three\n"]
    assert data(106, 208, 3) == [b"o\n", b"another", b"three\n"]
    assert data(108, 202, 2) == [b"ouble\n", b"another", b"three\n"]
    assert data(108, 208, 5) == [b"three\n"], "the figure was the last that was seen"
    assert data(114, 208, 6) == data(999, 999, 9) == []


def test_a_reader_that_begins_again_gets_the_output_of_the_run_and_not_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "out", tmp_path / "err"
    files[1].write_bytes(b"")
    output: Any = Output("node")
    output._files = tuple(map(str, files))
    output._beginning = output._asked = Position()
    monkeypatch.setattr(worker_logs, "_sizes", lambda: tuple(one.stat().st_size for one in files))

    def prints(text: bytes) -> None:
        with files[0].open("ab") as file:
            file.write(text)

    def read(since: Position | None) -> tuple[bytes, Position]:
        printed = output.read(since)
        return b"".join(piece.data for piece in printed.pieces), printed.until

    prints(b"before any run\n")
    output.begin_run()
    prints(b"first run\n")
    text, until = read(None)
    assert text == b"before any run\nfirst run\n"
    assert read(until) == (b"", until)
    output.begin_run()
    prints(b"second run\n")
    text, until = read(until)
    assert text == b"second run\n"
    prints(b"and its end\n")
    assert read(until)[0] == b"and its end\n"
    assert read(None)[0] == b"second run\nand its end\n"


def printed(data: bytes) -> Printed:
    return Printed((PrintedPiece(ERR, data, 0),), Position(), 0, False, ("", ""), "")


def test_of_a_progress_bar_that_never_ends_its_line_only_the_last_state_is_held() -> None:
    lines: list[str] = []
    shown = RankLines(lambda line, is_error: lines.append(line), lambda *_: None)
    tracemalloc.start()
    try:
        for number in range(200):  # 20 MB
            shown.take(0, printed(b"".join(b"\r%d %98d" % (number, n) for n in range(1000))))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000 and lines == []
    shown.take(0, printed(b"\rdone\r"))
    shown.take(0, printed(b"\r\nnext"))  # The end of a line as Windows writes it, in two parts.
    shown.take(0, printed(b"\r"))
    shown.take(0, printed(b"last"))
    shown.end()
    assert lines == ["[rank 0] done", "[rank 0] last"]


def test_a_line_that_a_lost_worker_has_begun_is_no_part_of_its_successors() -> None:
    lines: list[str] = []
    shown = RankLines(lambda line, is_error: lines.append(line), lambda *_: None)
    for files, data in ((("a", "b"), b"half a li"), (("c", "d"), b"anew\n")):
        pieces = (PrintedPiece(ERR, data, 1),)
        shown.take(0, Printed(pieces, Position(), 1, False, files, ""))
    assert lines == ["[rank 1] half a li", "[rank 1] anew"]


def test_a_line_of_megabytes_is_shown_in_parts_of_which_none_is_lost() -> None:
    lines: list[str] = []
    shown = RankLines(lambda line, is_error: lines.append(line), lambda *_: None)
    for letter in b"abcdefgh":
        shown.take(0, printed(bytes([letter]) * 300_000))
    shown.take(0, printed(b"\nshort\n"))
    *parts, short = (line.removeprefix("[rank 0] ") for line in lines)
    assert "".join(parts) == "".join(letter * 300_000 for letter in "abcdefgh")
    assert len(parts) == 2 + 1 and short == "short"


def test_what_is_read_in_parts_stops_at_a_mark_that_is_not_reached() -> None:
    marks = [_Mark(6, 0, 0, None), _Mark(6, 3, 0, None)]
    first = {OUT: (0, b"abc"), ERR: (0, b"xyz")}  # The limit cut "abcdef".
    pieces, until, _, is_whole = _in_order(first, marks, 0, OUT)
    assert (pieces, until, is_whole) == ([PrintedPiece(OUT, b"abc", 0)], Position(3, 0, 0), False)
    rest = {OUT: (3, b"defghi"), ERR: (0, b"xyz")}
    pieces, until, _, is_whole = _in_order(rest, marks, 0, OUT)
    assert [piece.data for piece in pieces] == [b"def", b"xyz", b"ghi"] and is_whole


def test_the_rest_of_a_worker_that_is_gone_is_read_where_its_files_are(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_bytes(b"known, and new\n")
    err.write_bytes(b"")
    files = (str(out), str(err))
    rest = read_rest(files, "node", Position(7, 0), 3)
    assert rest is not None and rest.pieces == (PrintedPiece(OUT, b"and new\n", 3),)
    assert read_rest((str(tmp_path / "none"), files[1]), "node", Position(), 3) is None
