"""A session in a notebook: a live view, interrupts that are heard, `%%ranks`.

Nothing here is needed elsewhere: outside a kernel these do nothing. IPython is imported by nobody
but a notebook.
"""

from .cells import close_earlier_session, hint_at_other_sessions
from .interrupt import in_kernel, waking
from .magics import load_ipython_extension, unload_ipython_extension
from .tracebacks import show_once
from .view import LiveView, session_as_html

__all__ = [
    "LiveView",
    "close_earlier_session",
    "hint_at_other_sessions",
    "in_kernel",
    "load_ipython_extension",
    "session_as_html",
    "show_once",
    "unload_ipython_extension",
    "waking",
]
