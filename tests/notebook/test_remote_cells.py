"""A cell of `%%ranks` in the process of a rank: no kernel and no Ray."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from chorusline.runtime.notebook import figures
from chorusline.runtime.notebook.remote_cell import NAMESPACE_NAME, _parts, run_cell

DATACLASS = """
from dataclasses import dataclass, fields

@dataclass
class Sample:
    size: int

fields(Sample)[0].type
"""


def test_a_dataclass_of_a_cell_has_types_and_no_texts() -> None:
    names = {"__name__": NAMESPACE_NAME}
    *_, last = [eval(code, names) for code in _parts(DATACLASS, "<cell>")]
    assert last is int


@pytest.mark.parametrize("backend", ["agg", "Agg", "AGG"])
def test_a_backend_that_shows_nothing_is_replaced_however_it_is_spelled(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", backend)
    for name in ("matplotlib", "matplotlib.pyplot"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    figures.use()
    assert os.environ["MPLBACKEND"] == figures.NAME


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The figures that cells of this process show."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib import pyplot

    from chorusline.runtime.notebook import matplotlib_backend

    pngs: list[bytes] = []
    monkeypatch.setattr(matplotlib_backend, "current", lambda: SimpleNamespace(show=pngs.append))
    monkeypatch.setenv("MPLBACKEND", "agg")
    former = pyplot.get_backend()
    pyplot.switch_backend("agg")
    figures.use()
    yield pngs
    pyplot.switch_backend(former)


FIGURE = "from matplotlib import pyplot as plt\nplt.figure()\n"


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
async def test_the_figure_of_an_interrupted_cell_is_not_shown_in_the_next_one(
    shown: list[bytes], error: type[BaseException]
) -> None:
    ctx: Any = SimpleNamespace(kept={"error": error})
    with pytest.raises(error):
        await run_cell(ctx, FIGURE + "raise error", "<cell>")
    assert await run_cell(ctx, "1", "<cell>") == 1
    assert shown == []


async def test_figures_are_shown_beside_one_that_cannot_be_drawn(shown: list[bytes]) -> None:
    ctx: Any = SimpleNamespace(kept={})
    with pytest.raises(ValueError, match="unknown"):
        await run_cell(ctx, FIGURE + "plt.title(r'$\\unknown$')\n" + FIGURE, "<cell>")
    assert len(shown) == 1
    assert await run_cell(ctx, "1", "<cell>") == 1
    assert len(shown) == 1
