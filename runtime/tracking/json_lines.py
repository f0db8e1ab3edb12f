"""Runs as JSON lines: one object a line, appended to a file."""

from __future__ import annotations

import dataclasses
import json
import math
import time as clock
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from chorusline.collectives.contract.argument_kinds import check_kinds

from .tracker import TrackedEvent, TrackedRun, Tracker


class JSONLinesTracker(Tracker):
    """Appends each run to a file of JSON lines.

        cl.run(train, num_workers=2, trackers=cl.JSONLinesTracker("runs.jsonl"))

        {"run": "train", "id": "1f0c…", "time": 1763.2, "config": {"lr": 0.1}}
        {"step": 1, "time": 1764.1, "loss": 2.5}
        {"event": "ranks lost", "time": 1770.0, "step": 12, "lost": [1], "num_workers": 2, …}
        {"end": "finished", "time": 1790.3}

    path: the file; its folder is made. Default: `runs/<function>-<id>.jsonl`, a file for each run.

    A number that is not finite is the string "NaN", "Infinity" or "-Infinity", since JSON has no
    such numbers. A reported `step` or `time` is left out, since the object has its own. A run that
    resumes from a checkpoint continues in the same file, unless `path` is given.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        check_kinds(JSONLinesTracker.__init__, locals())
        self._path = Path(path) if path is not None else None
        self._file: TextIO | None = None  # None: between two runs

    def begin(self, run: TrackedRun) -> None:
        path = self._path or Path("runs") / f"{run.title}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        line = {"run": run.name, "id": run.id, "time": run.began_at, "config": dict(run.config)}
        if run.resumed_from is not None:
            line |= {"resumed_from": run.resumed_from, "resumed_step": run.resumed_step}
        self._write(line)
        self.flush()

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        own = {"step": step, "time": time}
        self._write({**own, **numbers, **own})

    def event(self, event: TrackedEvent) -> None:
        fields = dataclasses.asdict(event)
        self._write({"event": fields.pop("kind"), "time": fields.pop("ended_at"), **fields})

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def end(self, status: str, error: str) -> None:
        self._write({"end": status, "time": clock.time()} | ({"error": error} if error else {}))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(_finite(line), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    # JSON has no such numbers, and most readers refuse Python's.
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return value
