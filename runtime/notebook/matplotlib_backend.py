"""A backend of matplotlib for ranks: `plt.show()` sends the open figures to the notebook.

Only matplotlib imports this file, by the name that figures.py gives it. It draws as agg does, into
memory.
"""

from __future__ import annotations

import io
from typing import Any

from matplotlib import pyplot
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ..process.running import current

FigureCanvas, FigureManager = FigureCanvasAgg, FigureManagerBase  # Names that matplotlib asks for.


def show(*args: Any, **kwargs: Any) -> None:
    """Show all open figures, and close them. pyplot calls it; blocking means nothing here."""
    errors = []
    for number in pyplot.get_fignums():
        try:
            buffer = io.BytesIO()
            pyplot.figure(number).savefig(buffer, format="png", bbox_inches="tight")
            current().show(buffer.getvalue())
        except Exception as error:
            errors.append(error)
        finally:  # One that cannot be drawn would raise in each later cell again.
            pyplot.close(number)
    if errors:
        raise errors[0]
