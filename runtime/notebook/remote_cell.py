"""A notebook's cell on one rank: its variables stay there, its output and last value go back."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import linecache
from types import CodeType
from typing import Any

from ray import cloudpickle

from ..process.between_runs import between_runs
from ..program.context import Context

LEADS_TO_USERS_CODE = True  # Tracebacks leave out the frames of this file (actors/outcomes.py).

_KEPT_CHARACTERS = 100_000

# Names that every cell has besides `ctx`. It is run as text: this file cannot import chorusline.
_PRELUDE = "import torch\nimport chorusline as cl\n"

NAMESPACE_NAME = "__ranks__"
"""The `__name__` that a cell sees. No such module exists, so functions and classes that are made in
cells are pickled by value."""


class OfRank:
    """Stands for a value that cannot be pickled, and has the same repr."""

    def __init__(self, shown: str) -> None:
        self.shown = shown

    def __repr__(self) -> str:
        return self.shown


class _Printed(io.TextIOBase):
    """The last part of a cell's output, in bounded memory."""

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


def _printed() -> _Printed:
    """One stream for all cells: a logger that a cell has made goes on writing to it."""
    stay = between_runs()
    stay.printed = stay.printed or _Printed()
    stream: _Printed = stay.printed
    return stream


async def run_cell(ctx: Context, source: str, name: str) -> tuple[str, Any]:
    """The output of the cell, and the value of its last expression (None if a `;` ends it).

    source: may have `await` at the top level. name: the file's name in tracebacks.
    """
    names = ctx.kept
    names.setdefault("__name__", NAMESPACE_NAME)
    exec(_PRELUDE, names)
    names["ctx"] = ctx
    # linecache makes tracebacks show the cell's lines.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    printed = _printed()
    printed.take()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        value = None
        for code in _parts(source, name):
            value = eval(code, names)
            if code.co_flags & inspect.CO_COROUTINE:
                value = await value
    return printed.take(), None if source.rstrip().endswith(";") else _portable(value)


def take_printed(ctx: Context) -> str:
    """The output of a cell that did not end."""
    return _printed().take()


def _parts(source: str, name: str) -> list[CodeType]:
    """The cell without its last expression, then that expression, if there is one."""
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
    """Raise SyntaxError if the cell does not compile."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    _parts(source, name)


def _portable(value: Any) -> Any:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return OfRank(repr(value))
    return value
