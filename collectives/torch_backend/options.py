"""The options of a process group of the backend `chorusline`."""

from __future__ import annotations

from dataclasses import dataclass

from ..group import Group


@dataclass(frozen=True)
class Options:
    """The `pg_options` of `dist.init_process_group` for this backend.

    parent: a group of the same ranks, in the same order. If the parent or the process group fails,
    both do. A session passes its own group. None: the process group stands alone.
    """

    parent: Group | None = None
