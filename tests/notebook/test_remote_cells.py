"""A cell of `%%ranks` in the process of a rank: no kernel and no Ray."""

from __future__ import annotations

import os
import sys

import pytest

from chorusline.runtime.notebook import figures
from chorusline.runtime.notebook.remote_cell import NAMESPACE_NAME, _parts

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
