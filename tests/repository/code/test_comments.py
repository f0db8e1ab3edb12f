"""Comments and docstrings name files that are there, and say when a nullable field is None; and a
function with many branches has a comment."""

from __future__ import annotations

import ast
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


ENTRY = re.compile(r"\n(?=\n|\w[\w, ]*: )")
"""Before an entry of a docstring, `name, other: what they are`, or a paragraph."""
SAYS = re.compile(r"\bNone\b|\bas in\b")


def unexplained(text: str) -> list[str]:
    """Nullable fields of classes of which no prose says when they are None: not the comment beside
    or above the field, nor the docstring below it, nor an entry of the class's docstring."""
    found, lines = [], text.splitlines()
    for one in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
        makers = [node for node in one.body if getattr(node, "name", "") == "__init__"]
        docstrings = [ast.get_docstring(node) or "" for node in (one, *makers)]  # type: ignore[arg-type]
        entries = [entry for told in docstrings for entry in ENTRY.split(told)]
        for field in (node for node in ast.walk(one) if isinstance(node, ast.AnnAssign)):
            name = ast.unparse(field.target).removeprefix("self.")
            is_field = field in one.body or isinstance(field.target, ast.Attribute)
            if not is_field or not ast.unparse(field.annotation).endswith(" | None"):
                continue
            above = lines[field.lineno - 2].strip()
            below = "\n".join(lines[field.end_lineno : field.end_lineno + 6]).strip()
            prose = [
                lines[field.lineno - 1].partition("  # ")[2],
                above if above.startswith("#") else "",
                below.split('"""')[1] if below.startswith('"""') else "",
                *(entry for entry in entries if re.search(rf"\b{name.lstrip('_')}\b", entry)),
            ]
            if not any(map(SAYS.search, prose)):
                found.append(f"{one.name}.{name}")
    return found


def test_a_nullable_field_says_when_it_is_none() -> None:
    assert [name for path in sources() for name in unexplained(path.read_text())] == []


def test_a_field_of_which_nothing_says_when_it_is_none_is_found() -> None:
    text = (
        'class One:\n    """told: None before.\n    mute: of it."""\n'
        "    told: int | None\n    mute: int | None\n"
        "    def __init__(self):\n        self.beside: int | None = None  # None: not yet\n"
        "        self._mute: int | None = None  # of it\n        here: int | None = None\n"
        '        self.below: int | None = None\n        """None without one."""\n'
    )
    assert unexplained(text) == ["One.mute", "One._mute"]


MOST = 8
"""Decisions of a function that may do without a comment."""
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


def uncommented(text: str) -> list[str]:
    """Functions with more decisions and no comment, which says why a branch is there."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [one.start[0] for one in tokens if one.type == tokenize.COMMENT]
    found = []
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [*ast.walk(function)]
            decisions = sum(isinstance(one, (*BRANCHES, ast.comprehension)) for one in parts)
            decisions += sum(len(one.values) - 1 for one in parts if isinstance(one, ast.BoolOp))
            end = function.end_lineno or 0
            if decisions > MOST and not any(function.lineno <= at <= end for at in comments):
                found.append(function.name)
    return found


def test_a_function_with_many_branches_has_a_comment() -> None:
    assert [name for path in sources() for name in uncommented(path.read_text())] == []


def test_a_function_with_many_branches_and_no_comment_is_found() -> None:
    text = "def much(x):\n    return " + " or ".join(["x"] * (MOST + 2)) + "\n"
    assert uncommented(text) == ["much"]
    assert uncommented(text.replace("or x\n", "or x  # At last.\n")) == []
