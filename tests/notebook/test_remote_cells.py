"""A cell of `%%ranks` in the process of a rank: no kernel and no Ray."""

from __future__ import annotations

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
