"""What the hints for those who know torch.distributed tell them to write is there to be written."""

from __future__ import annotations

import re

from chorusline.collectives.contract.torch_hints import _METHODS
from chorusline.collectives.group import Group


def test_a_hint_has_brackets_after_a_method_of_a_group_and_none_after_an_attribute() -> None:
    for torchs, text in _METHODS.items():
        told = re.findall(r"\bwrite (\w+)(\(?)", text)
        for name, bracket in told:
            if hasattr(Group, name):
                assert callable(getattr(Group, name)) == bool(bracket), (torchs, text)
        for name in re.findall(r"(?<![.\w])(\w+)\(", text):
            if hasattr(Group, name):
                assert callable(getattr(Group, name)), (torchs, text)
