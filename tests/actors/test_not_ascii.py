"""Text that is not ASCII is shown, or escaped, and ends nothing."""

from __future__ import annotations

import io

import pytest

from chorusline.actors.reporting.metrics import in_ascii
from chorusline.actors.reporting.worker_logs import write_line

TEXTS = ["Verlust", "perte ñ", "損失", "😀", "a\ud800b"]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_line_that_a_stream_cannot_show_is_escaped(text: str, encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    write_line(stream, text)
    stream.flush()
    shown = raw.getvalue().decode(encoding)
    assert shown == text.encode(encoding, "backslashreplace").decode(encoding) + "\n"


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_tag_of_a_metric_is_ascii(text: str) -> None:
    assert in_ascii(text).isascii()
    assert (in_ascii(text) == text) == text.isascii()
