"""A notebook shows a failure once: as the rank saw it, without Chorusline's frames around it."""

from __future__ import annotations

import contextlib
import traceback
from typing import TypeVar

from .interrupt import in_kernel

Error = TypeVar("Error", bound=BaseException)


def show_once(error: Error, text: str | None = None) -> Error:
    """The same error, which IPython then shows as `text`; by default as the rank's traceback if the
    error has one, else as usual."""
    if not in_kernel():
        return error
    text = text or _as_the_rank_saw_it(error)
    if text is not None:
        # A user's error class may have slots; then IPython shows the error as usual.
        with contextlib.suppress(AttributeError):
            error._render_traceback_ = text.rstrip("\n").splitlines  # type: ignore[attr-defined]
    return error


def _as_the_rank_saw_it(error: BaseException) -> str | None:
    # outcomes.raise_failure sets the rank's traceback as the cause of the error.
    there = getattr(error.__cause__, "text", None)
    notes = getattr(error, "__notes__", [])
    if there is not None:
        return "\n".join([str(there).rstrip("\n"), *notes])
    if type(error).__module__.startswith(("chorusline.actors.", "chorusline.collectives.")):
        return "".join(traceback.format_exception_only(error))  # with the error's notes
    return None
