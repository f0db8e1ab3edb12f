"""What a worker group needs of the places of its workers (runtime/session/placing/seats.py)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol


class Seats(Protocol):
    """The seats of a session's workers, numbered from 0 to `most` - 1, and those after them in
    which spare workers wait."""

    most: int
    spare_seats: range

    @property
    def has_all(self) -> bool:
        """Whether there is, or was, room for all seats of workers. Asks nothing of the cluster."""

    def placed(self) -> list[int]:
        """The workers' seats that there is room for now. Blocks for some questions to the
        cluster."""

    def vacant(self, taken: Collection[int]) -> list[int]:
        """The workers' seats but `taken` that there is room for now, on nodes that stay. The other
        seats that had room before ask for it again. Blocks as `placed` does."""

    async def wait_for(self, seat: int) -> None:
        """Ask for room for a seat, unless that was done; return when it is there, and stays."""

    def is_here(self, seat: int) -> bool:
        """Whether there is room for a seat on the node of this process, as was last seen."""

    def options(self, seat: int) -> Mapping[str, Any]:
        """Ray's actor options of the worker in a seat that there is room for."""

    def swap(self, seat: int, other: int) -> None:
        """Exchange the places of two seats."""
