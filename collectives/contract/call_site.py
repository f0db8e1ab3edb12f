"""The line of the user's code that issued a collective, found cheaply and formatted late.

A hot path keeps only a code object and an instruction's offset; the line number is computed when
an error or a recording needs it. Frames of Chorusline, torch and the standard library are skipped,
so a bucket that the backward pass launches is reported at the user's `loss.backward()`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType, TracebackType


def _folders(package: str) -> list[str]:
    found = importlib.util.find_spec(package)  # Not imported: the driver has no torch.
    return list((found and found.submodule_search_locations) or ())


_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_PASSED_OVER = (
    *(folder + os.sep for package in ("chorusline", "torch") for folder in _folders(package)),
    "<frozen ",
)


class _UsersFiles(dict[str, bool]):
    """Whether the user wrote a file, by file name; decided once for each file."""

    def __missing__(self, filename: str) -> bool:
        installed = "-packages" + os.sep in filename
        decided = self[filename] = not filename.startswith(_PASSED_OVER) and (
            installed or not filename.startswith(_STANDARD_LIBRARY)
        )
        return decided


is_users_file = _UsersFiles()


def users_frame(frame: FrameType) -> FrameType:
    """The innermost frame of user code, from `frame` outwards; `frame` if there is none."""
    found: FrameType | None = frame
    while found is not None:
        if is_users_file[found.f_code.co_filename]:
            return found
        found = found.f_back
    return frame


def users_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The entries of a traceback that are in the user's files; None if there are none."""
    found = []
    while trace is not None:
        if is_users_file[trace.tb_frame.f_code.co_filename]:
            found.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for one in reversed(found):
        kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept


def users_level() -> int:
    """The `stacklevel` of warnings.warn in the caller of this function for the user's own line."""
    level, found = 1, sys._getframe(1)
    while not is_users_file[found.f_code.co_filename] and found.f_back is not None:
        level, found = level + 1, found.f_back
    return level


def line_of(code: CodeType, offset: int) -> int:
    """The line of the instruction at `offset`; 0 if the code object does not record it."""
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return 0


SITE_BYTES = 64
"""Bytes that a call site takes in shared memory; a longer text loses its beginning."""

_known: dict[tuple[int, int], tuple[CodeType, str, bytes]] = {}  # by id of the code, and offset


def encoded(text: str) -> bytes:
    """As UTF-8. Where the locale cannot show a name of a file (LANG=C), Python holds its bytes as
    lone surrogates, which have no UTF-8, and are escaped."""
    return text.encode(errors="backslashreplace")


def short_site(code: CodeType | None, offset: int) -> str:
    """`train.py:41`; empty without a code."""
    return "" if code is None else _texts(code, offset)[1]


def padded_site(code: CodeType | None, offset: int) -> bytes:
    """`short_site` as SITE_BYTES bytes, padded with zeros."""
    if code is None:
        return bytes(SITE_BYTES)
    known = _known.get((id(code), offset))
    return (known or _texts(code, offset))[2]


def _texts(code: CodeType, offset: int) -> tuple[CodeType, str, bytes]:
    known = _known.get((id(code), offset))
    if known is None:
        if len(_known) > 4096:  # Code that is generated without end must not pile up here.
            _known.clear()
        text = f"{Path(code.co_filename).name}:{line_of(code, offset)}"
        padded = encoded(text)[-SITE_BYTES:].ljust(SITE_BYTES, b"\0")
        # The entry keeps the code object alive, so that no other object can take its id.
        known = _known[(id(code), offset)] = (code, text, padded)
    return known
