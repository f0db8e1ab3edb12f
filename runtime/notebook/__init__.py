"""A session in a notebook: a live view, prompt interrupts, `%%ranks`.

Outside a notebook's kernel these functions do nothing. Chorusline never imports IPython unless it
runs in a notebook.
"""

from .cells import (
    close_earlier_session,
    forget_session,
    hint_at_other_sessions,
    open_sessions,
)
from .interrupt import in_kernel, waking
from .magics import load_ipython_extension, unload_ipython_extension
from .rank_output import show_figure, show_line
from .tracebacks import show_once
from .view import LiveView, session_as_html

__all__ = [
    "LiveView",
    "close_earlier_session",
    "forget_session",
    "hint_at_other_sessions",
    "in_kernel",
    "load_ipython_extension",
    "open_sessions",
    "session_as_html",
    "show_figure",
    "show_line",
    "show_once",
    "unload_ipython_extension",
    "waking",
]
