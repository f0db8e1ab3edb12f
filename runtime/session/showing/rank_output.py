"""The ranks' output, in this process: whole lines, each with its rank."""

from __future__ import annotations

from collections.abc import Callable

from chorusline.actors.reporting.worker_logs import ERR, FIGURE, OUT, Printed, PrintedPiece

_OF_RAY = (":actor_name:", ":task_name:", ":job_id:")
"""Beginnings of lines that Ray writes into the files for itself."""

_LONGEST_HELD = 1 << 20
"""Bytes of a line that are held until its end comes. A longer line is shown in parts."""


class RankLines:
    """Makes lines of what arrives.

    show_line: called with each line, and with whether it comes from stderr.
    show_figure: called with a picture (PNG) and its rank.
    """

    def __init__(
        self,
        show_line: Callable[[str, bool], None],
        show_figure: Callable[[bytes, int | None], None],
    ) -> None:
        self._show_line = show_line
        self._show_figure = show_figure
        self._begun: dict[
            tuple[int, int], PrintedPiece
        ] = {}  # by seat and stream: a line without its end
        self._files: dict[int, tuple[str, str]] = {}  # by seat, of the worker that has printed last

    def take(self, seat: int, printed: Printed) -> None:
        if self._files.get(seat) != printed.files:  # Another worker has the seat now.
            self._files[seat] = printed.files
            for stream in (OUT, ERR):
                if (begun := self._begun.pop((seat, stream), None)) is not None:
                    self._show(seat, begun)
        for piece in printed.pieces:
            if piece.kind == FIGURE:
                self.end()  # The line that was begun before it comes before it.
                self._show_figure(piece.data, piece.rank)
            else:
                self._take(seat, piece)

    def _take(self, seat: int, piece: PrintedPiece) -> None:
        begun = self._begun.pop((seat, piece.kind), None)
        # The worker has another rank now: what it had begun to print keeps the old label.
        if begun is not None and begun.rank != piece.rank:
            self._show(seat, begun)
            begun = None
        *lines, rest = ((begun.data if begun else b"") + piece.data).split(b"\n")
        for line in lines:
            self._show(seat, PrintedPiece(piece.kind, line, piece.rank))
        # A progress bar may print for days without an end of line: only its last state is held.
        rest = _last_state(rest)
        if len(rest) > _LONGEST_HELD:
            self._show(seat, PrintedPiece(piece.kind, rest, piece.rank))
        elif rest:
            self._begun[seat, piece.kind] = PrintedPiece(piece.kind, rest, piece.rank)

    def end(self) -> None:
        """Show the lines that have no end yet."""
        begun, self._begun = self._begun, {}
        for (seat, _), piece in begun.items():
            self._show(seat, piece)

    def _show(self, seat: int, piece: PrintedPiece) -> None:
        text = _last_state(piece.data).rstrip(b"\r").decode(errors="replace")
        if not text.startswith(_OF_RAY):
            who = f"[worker in seat {seat}]" if piece.rank is None else label(piece.rank)
            self._show_line(f"{who} {text}", piece.kind == ERR)


def _last_state(line: bytes) -> bytes:
    """What a terminal shows of a line, where a carriage return begins it again. One at the end is
    kept: it does so when more comes."""
    text = line.rstrip(b"\r")
    return line[text.rfind(b"\r") + 1 : len(text) + 1]


def label(rank: int) -> str:
    return f"[rank {rank}]"
