"""The figures of matplotlib that a cell makes on a rank: the notebook shows them.

They travel with what the rank prints, in their order. A process chooses its backend by a name, for
which matplotlib looks in MPLBACKEND when it is imported.
"""

from __future__ import annotations

import os
import sys

NAME = f"module://{__package__}.matplotlib_backend"

_REPLACED = ("", "agg", "module://matplotlib_inline.backend_inline", "inline")
"""Backends that show nothing on a rank. Workers that a notebook's kernel has started have its
environment, and in it the backend of the kernel itself."""


def use() -> None:
    """Make this the backend of this process, if it has none that shows anything."""
    if os.environ.get("MPLBACKEND", "").lower() in _REPLACED:  # matplotlib ignores the case.
        os.environ["MPLBACKEND"] = NAME
    pyplot = sys.modules.get("matplotlib.pyplot")
    # Imported already: it has chosen its backend, and does not read the variable again.
    if pyplot is not None:
        if str(pyplot.get_backend()).lower() in _REPLACED:
            pyplot.switch_backend(NAME)
    elif "matplotlib" in sys.modules:
        sys.modules["matplotlib"].use(os.environ["MPLBACKEND"])


def show_open() -> None:
    """Show the figures that are still open, as at the end of a notebook's own cells."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and pyplot.get_backend() == NAME and pyplot.get_fignums():
        pyplot.show()


def close_open() -> None:
    """Close the figures that are still open, and show none of them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and pyplot.get_backend() == NAME:
        pyplot.close("all")
