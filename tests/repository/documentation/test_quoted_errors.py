"""docs/errors-and-mends.md quotes messages that are in the code, and the documentation's words."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests import ROOT

PAGE = (ROOT / "docs/errors-and-mends.md").read_text()
SHELLS_AND_PYTHON = {"chorusline: not found", "No module named 'chorusline'"}
"""What others say. The first is of sh, the second of Python."""


def quoted() -> list[str]:
    """The first quotation in each row of the tables."""
    return [found[1] for found in re.finditer(r"^\| `([^`]+)`", PAGE, re.MULTILINE)]


@cache
def texts_of_the_code() -> str:
    """Every string of the packages, one a line, with … for what is put into it."""
    lines = []
    for package in ("collectives", "actors", "runtime"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                lines.append(_text(node).replace("\n", " "))
    return "\n".join(filter(None, lines))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    return ""


@pytest.mark.parametrize("message", [m for m in quoted() if m not in SHELLS_AND_PYTHON])
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    pattern = pattern.replace("%g", ".*")
    assert re.search(pattern, texts_of_the_code()), f"no message of the code says {message!r}"


def test_the_page_quotes_messages() -> None:
    assert len(quoted()) > 45
    assert set(quoted()) >= SHELLS_AND_PYTHON
