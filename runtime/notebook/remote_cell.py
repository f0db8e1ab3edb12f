"""A notebook's cell on one rank: its variables stay there, its last value goes back."""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
from types import CodeType
from typing import Any

from ray import cloudpickle

from ..program.context import Context
from . import figures

LEADS_TO_USERS_CODE = True  # Tracebacks leave out the frames of this file (outcomes.py).

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


async def run_cell(ctx: Context, source: str, name: str) -> Any:
    """The value of the cell's last expression; None if a `;` ends it.

    source: may have `await` at the top level. name: the file's name in tracebacks.
    """
    names = ctx.kept
    names.setdefault("__name__", NAMESPACE_NAME)
    exec(_PRELUDE, names)
    names["ctx"] = ctx
    # linecache makes tracebacks show the cell's lines.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    figures.use()
    value = None
    try:
        for code in _parts(source, name):
            value = eval(code, names)
            if code.co_flags & inspect.CO_COROUTINE:
                value = await value
        figures.show_open()
    except Exception:
        # What the cell has raised is what its user reads.
        with contextlib.suppress(Exception):
            figures.show_open()
        raise
    finally:
        figures.close_open()  # The next cell would show those of one that is interrupted.
    return None if source.rstrip().endswith(";") else _portable(value)


def _parts(source: str, name: str) -> list[CodeType]:
    """The cell without its last expression, then that expression, if there is one.

    dont_inherit: the __future__ statements of this file would make the cell's annotations texts."""
    awaiting = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(source, name, "exec", awaiting | ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    parts = [compile(tree, name, "exec", awaiting, dont_inherit=True)]
    if last is not None:
        assert isinstance(last, ast.Expr)
        value = ast.Expression(last.value)
        parts.append(compile(value, name, "eval", awaiting, dont_inherit=True))
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
