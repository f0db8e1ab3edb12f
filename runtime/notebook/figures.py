"""A backend of matplotlib for ranks: `plt.show()` sends the open figures to the notebook.

A process chooses it by the name of this file, as matplotlib asks for (MPLBACKEND). The figures
travel with what the rank prints, in their order, and the cell shows them. As with Jupyter's own
backend, figures that are still open at the end of a cell are shown then, and shown figures are
closed.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from ..process.running import current

NAME = f"module://{__name__}"

_REPLACED = ("", "agg", "module://matplotlib_inline.backend_inline", "inline")
"""Backends that show nothing on a rank. Workers that a notebook's kernel has started have its
environment, and in it the backend of the kernel itself."""


def use() -> None:
    """Make this the backend of this process, if it has none that shows anything."""
    if os.environ.get("MPLBACKEND", "") in _REPLACED:
        os.environ["MPLBACKEND"] = NAME
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        if str(pyplot.get_backend()).lower() in _REPLACED:
            pyplot.switch_backend(NAME)
    elif "matplotlib" in sys.modules:
        sys.modules["matplotlib"].use(os.environ["MPLBACKEND"])


def are_open() -> bool:
    """Whether there are figures that `plt.show()` would show here."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    return pyplot is not None and pyplot.get_backend() == NAME and bool(pyplot.get_fignums())


def show(*args: Any, **kwargs: Any) -> None:
    """Show all open figures, and close them. pyplot calls it; blocking means nothing here."""
    pyplot = sys.modules["matplotlib.pyplot"]
    for number in pyplot.get_fignums():
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, format="png", bbox_inches="tight")
        current().show(buffer.getvalue())
    pyplot.close("all")


def __getattr__(name: str) -> Any:
    """What pyplot asks a backend for is agg's: it draws into memory."""
    if name not in ("FigureCanvas", "FigureManager"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from matplotlib.backends import backend_agg

    return getattr(backend_agg, f"{name}Agg" if name == "FigureCanvas" else "FigureManagerBase")
