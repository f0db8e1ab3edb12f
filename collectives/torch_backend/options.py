"""The name `chorusline` among torch's backends, and what a process group may be given."""

from __future__ import annotations

from dataclasses import dataclass

from ..group import Group

NAME = "chorusline"


@dataclass(frozen=True)
class Options:
    """What `dist.init_process_group(..., pg_options=...)` accepts for this backend.

    parent: a group of the same ranks, in the same order, whose fate the process group shares: if
    one of them fails, both do. A session passes its own.
    """

    parent: Group | None = None
