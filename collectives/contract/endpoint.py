"""How processes of one host find each other's memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the other ranks find a process, and memory that it has made for a group.

    host: equal for two processes exactly if they can open each other's memory.
    descriptor: of the memory, in that process; -1 if it has made none.
    key: of the memory. A later one that gets the same descriptor has another.
    size: ranks that it has room for.
    """

    host: str
    pid: int
    descriptor: int
    key: int
    size: int
