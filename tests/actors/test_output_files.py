"""The files to which a worker prints, in a folder that Ray makes writable by all users."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chorusline.actors.reporting.worker_logs import Position, read_rest


def _pair(folder: Path) -> tuple[str, str]:
    (folder / "err").write_bytes(b"of stderr")
    return str(folder / "out"), str(folder / "err")


def test_a_pipe_in_the_place_of_a_log_file_blocks_nobody(tmp_path: Path) -> None:
    files = _pair(tmp_path)
    os.mkfifo(files[0])
    printed = read_rest(files, "node", Position(0, 0, 0), 1)
    assert printed is not None and [piece.data for piece in printed.pieces] == [b"of stderr"]


def test_a_link_in_the_place_of_a_log_file_is_not_followed(tmp_path: Path) -> None:
    files = _pair(tmp_path)
    (tmp_path / "secret").write_text("a token")
    Path(files[0]).symlink_to(tmp_path / "secret")
    assert read_rest(files, "node", Position(0, 0, 0), 1) is None


@pytest.mark.parametrize("since", [0, 3])
def test_a_log_file_is_read_on_from_where_it_was(since: int, tmp_path: Path) -> None:
    files = _pair(tmp_path)
    Path(files[0]).write_bytes(b"abcdef")
    printed = read_rest(files, "node", Position(since, 9, 0), 1)
    assert printed is not None and printed.pieces[0].data == b"abcdef"[since:]
