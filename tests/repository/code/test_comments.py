"""Comments and docstrings name files that are there."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from pathlib import Path

from tests import ROOT

PACKAGES = ("collectives", "actors", "runtime", "chorusline")
FILE = re.compile(r"(?<![\w./~-])((?:[\w-]+/)*[\w-]+\.py)\b")
ELSEWHERE = re.compile(r"(ray|torch)/|(train|script)[.]py$")
"""Files of Ray and torch, and names in examples of what a user types."""


def sources() -> list[Path]:
    """Every file of the packages, once: links of chorusline/ are not followed."""
    folders = [ROOT / package for package in PACKAGES]
    found = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [path for path in found if path == path.resolve()]


@cache
def files() -> set[str]:
    """Every end of the path of a file of the repository: `a/b.py` and `b.py` of `x/a/b.py`."""
    ends = set()
    for top in (*PACKAGES[:3], "chorusline", "tests", "benchmarks", "docs", "examples"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            ends.update("/".join(parts[start:]) for start in range(len(parts)))
    return ends


def named_in(text: str) -> set[str]:
    """Files that comments and texts of a program name; both are prose here."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    prose = (t.string for t in tokens if t.type in (tokenize.COMMENT, tokenize.STRING))
    return {name for one in prose for name in FILE.findall(one)}


def test_a_file_that_a_comment_names_is_there() -> None:
    missing = {
        (str(path.relative_to(ROOT)), name)
        for path in sources()
        for name in named_in(path.read_text()) - files()
        if not ELSEWHERE.match(name)
    }
    assert missing == set()


def test_a_file_that_is_not_there_is_found_in_comments_and_docstrings() -> None:
    text = '"""As in join/join.py and join/gone.py."""\nx = 1  # see ../gone.py, not train.py\n'
    assert named_in(text) - files() == {"join/gone.py", "train.py"}
