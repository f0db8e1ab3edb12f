"""Modules whose files change while a session's workers, which have imported them, stay.

A function of a module travels as the module's name, and each worker imports a module once. After an
edit and a reload (%autoreload, importlib.reload) the program has the new code, and the workers have
the old one. A worker that comes later has the new one, too.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ray import cloudpickle

from chorusline.collectives.contract.errors import listed

_INSTALLED = f"-packages{os.sep}"  # site-packages, or Debian's dist-packages
_MOST_NAMED = 3


class EditedModules:
    """What one session has seen of the files of the program's modules, run by run."""

    def __init__(self) -> None:
        self._changed_at: dict[str, int] = {}  # by module, when its file was written, in ns

    def look(self) -> str:
        """A sentence about modules whose files have changed since a run before; empty if there are
        none. It says each change once."""
        edited = {}
        for name, file in _files_of_modules():
            try:
                changed_at = Path(file).stat().st_mtime_ns
            except OSError:  # It is in an archive, or was removed.
                continue
            if self._changed_at.setdefault(name, changed_at) != changed_at:
                self._changed_at[name] = changed_at
                if not _is_sent(name):
                    edited[name] = file
        if not edited:
            return ""
        return (
            f"{listed([*edited.values()], _MOST_NAMED)} changed after an earlier run of this "
            "session, whose workers import a module once, and may run the old code: make a new "
            "Session, or have the module sent with each run, by "
            f"ray.cloudpickle.register_pickle_by_value({next(iter(edited))})"
        )


def _files_of_modules() -> Iterator[tuple[str, str]]:
    """Names and files of the modules in this process that are not installed ones."""
    of_python = sysconfig.get_path("stdlib") + os.sep
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__dict__", {}).get("__file__")  # Some import more for a getattr().
        if not isinstance(file, str) or _INSTALLED in file or file.startswith(of_python):
            continue
        if name != "__main__":
            yield name, file


def _is_sent(name: str) -> bool:
    """Whether a module travels with each run, by its own registration or by that of its package."""
    parts = name.split(".")
    parents = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return not cloudpickle.list_registry_pickle_by_value().isdisjoint(parents)
