"""A cell of a notebook, run on one rank: its variables stay, its output and last value go back."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import linecache
from types import CodeType
from typing import Any

from ray import cloudpickle

from ..program.context import Context

LEADS_TO_USERS_CODE = True  # Tracebacks leave out the frames of this file (actors/outcomes.py).

_KEPT_CHARACTERS = 100_000

# What every cell finds, besides `ctx`. Run there as a part of the cell, since it stands above us.
_PRELUDE = "import torch\nimport chorusline as cl\n"

NAMESPACE_NAME = "__ranks__"
"""Of the module that a cell believes to be in. It does not exist, so that functions and classes
made in cells are pickled by value."""


class OfRank:
    """Stands for a value that cannot be pickled; shows what its rank would have shown."""

    def __init__(self, shown: str) -> None:
        self.shown = shown

    def __repr__(self) -> str:
        return self.shown


class _Printed(io.TextIOBase):
    """The last part of what was printed, in bounded memory."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._held = 0
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._pieces.append(text)
        self._held += len(text)
        if self._held > 2 * _KEPT_CHARACTERS:
            kept = "".join(self._pieces)[-_KEPT_CHARACTERS:]
            self._dropped += self._held - len(kept)
            self._pieces, self._held = [kept], len(kept)
        return len(text)

    def take(self) -> str:
        text = "".join(self._pieces)
        if self._dropped:
            text = f"… {self._dropped} characters before this were dropped\n{text}"
        self._pieces, self._held, self._dropped = [], 0, 0
        return text


_printed = _Printed()


async def run_cell(ctx: Context, source: str, name: str) -> tuple[str, Any]:
    """What was printed, and the value of the last expression (None where a `;` ends it).

    source: with `await` at the top level if need be. name: stands in tracebacks as the file.
    """
    names = ctx.kept
    names.setdefault("__name__", NAMESPACE_NAME)
    exec(_PRELUDE, names)
    names["ctx"] = ctx
    # Tracebacks show the lines of a source that linecache knows.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    _printed.take()
    with contextlib.redirect_stdout(_printed), contextlib.redirect_stderr(_printed):
        value = None
        for code in _parts(source, name):
            value = eval(code, names)
            if code.co_flags & inspect.CO_COROUTINE:
                value = await value
    return _printed.take(), None if source.rstrip().endswith(";") else _portable(value)


def take_printed(ctx: Context) -> str:
    """What a cell has printed that did not come to its end."""
    return _printed.take()


def _parts(source: str, name: str) -> list[CodeType]:
    """The cell without its last expression, whose value is wanted, and that."""
    awaiting = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(source, name, "exec", awaiting | ast.PyCF_ONLY_AST)
    assert isinstance(tree, ast.Module)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    parts = [compile(tree, name, "exec", awaiting)]
    if last is not None:
        assert isinstance(last, ast.Expr)
        parts.append(compile(ast.Expression(last.value), name, "eval", awaiting))
    return parts


def check_source(source: str, name: str) -> None:
    """Raises SyntaxError, before anything is sent."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    _parts(source, name)


def _portable(value: Any) -> Any:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return OfRank(repr(value))
    return value
