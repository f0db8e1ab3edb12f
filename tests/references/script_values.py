"""Values of classes that only a script has: on a worker no module has them by their name."""

from __future__ import annotations

import dataclasses
import enum
from collections import namedtuple
from typing import Any

Mode = enum.Enum("Mode", "TRAIN EVAL", module="__main__")
Point = namedtuple("Point", "x y", module="__main__")
Options = dataclasses.make_dataclass("Options", ["rate"])
Options.__module__ = "__main__"


class ScriptState:
    """A registered object with such values. changes: how often `change` was called."""

    def __init__(self) -> None:
        self.changes = 0
        self.values: list[Any] = [Mode.TRAIN, Point(0, 0), Options(0)]

    def change(self) -> None:
        self.changes += 1
        self.values = [Mode.EVAL, Point(self.changes, 2), Options(self.changes)]

    def state_dict(self) -> dict[str, Any]:
        return {"changes": self.changes, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.changes, self.values = state["changes"], state["values"]

    def told(self) -> str:
        return f"{self.changes} {self.values}"


def told_after(changes: int) -> str:
    """By their texts: where a class travels by its value, another process makes a class of it."""
    return f"{changes} [<Mode.EVAL: 2>, Point(x={changes}, y=2), Options(rate={changes})]"
