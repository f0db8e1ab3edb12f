"""What ranks print and plot, shown in this process: in a notebook, in the cell that runs."""

from __future__ import annotations

import base64
import sys

from chorusline.actors.reporting.worker_logs import write_line

from .interrupt import shell


def show_line(line: str, is_error: bool) -> None:
    """Print a line of a rank; nowhere if the program has no such stream, or it is closed."""
    stream = sys.stderr if is_error else sys.stdout
    if stream is not None and not getattr(stream, "closed", False):
        write_line(stream, line)
        getattr(stream, "flush", bool)()


def show_figure(png: bytes, rank: int | None) -> None:
    """Show a picture of a rank, with a line that says whose it is."""
    show_line(f"[rank {rank}] a figure:", False)
    if getattr(shell(), "kernel", None) is not None:
        data = {"image/png": base64.b64encode(png).decode(), "text/plain": "<figure>"}
        sys.modules["IPython"].display.display(data, raw=True)
