"""What a worker does for a session that outlives its program (crew/lasting.py)."""

from __future__ import annotations

import ray

from ..lasting import end_without
from ..parcels.parcel import Parcel
from .run_here import RunHere
from .standing_by import StandingBy


class Outliving(StandingBy):
    """The part of a worker that a keeper asks which was started again."""

    def __init__(self, session: str, is_lasting: bool) -> None:
        """session: its name. is_lasting: it has a keeper, without which this worker ends."""
        super().__init__()
        if is_lasting:
            end_without(session)

    def _in_run(self, run: int) -> RunHere | None:
        raise NotImplementedError

    @ray.method(concurrency_group="control")
    async def program_of(self, run: int) -> Parcel | None:
        """The program of a run in progress, for workers that come to it later; else None. The
        keeper that had it is gone, and its objects with it."""
        here = self._in_run(run)
        return here.program if here is not None else None
