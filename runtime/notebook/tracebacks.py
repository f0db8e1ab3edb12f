"""A failure in a notebook is shown once: as the rank saw it, without our own frames around it."""

from __future__ import annotations

import contextlib
import traceback
from typing import TypeVar

from .interrupt import in_kernel

Error = TypeVar("Error", bound=BaseException)


def show_once(error: Error, text: str | None = None) -> Error:
    """The same error, which IPython will show as `text`; without one, as its rank's traceback if
    it has one, and else as itself."""
    if not in_kernel():
        return error
    text = text or _as_the_rank_saw_it(error)
    if text is not None:
        # An error of the user's may have slots; then IPython shows it in its own way.
        with contextlib.suppress(AttributeError):
            error._render_traceback_ = text.rstrip("\n").splitlines  # type: ignore[attr-defined]
    return error


def _as_the_rank_saw_it(error: BaseException) -> str | None:
    # outcomes.raise_failure hangs the rank's traceback on the error as its cause.
    there = getattr(error.__cause__, "text", None)
    notes = getattr(error, "__notes__", [])
    if there is not None:
        return "\n".join([str(there).rstrip("\n"), *notes])
    if type(error).__module__.startswith(("actors.", "collectives.")):
        return "".join(traceback.format_exception_only(error))  # With its notes.
    return None
