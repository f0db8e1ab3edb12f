"""Who is there: the members of a session, as the driver's decisions know them. Pure."""

from __future__ import annotations

from .. import messages
from ..messages import MemberState
from . import instructions
from .arrivals import Arrivals
from .instructions import Instruction
from .run_state import Member, Phase, RunState
from .situation import newcomers_of


class Roster:
    """The part of Membership (membership.py) that every decision reads."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}  # by seat
        self._generation = -1
        self._formed: tuple[str, ...] = ()  # worker ids by rank, while the generation is healthy
        self._run: RunState | None = None
        self._arrivals = Arrivals()  # of the run

    def snapshot(self, incarnation: int) -> messages.DriverSnapshot:
        return messages.DriverSnapshot(
            incarnation,
            self._generation,
            self._run.number if self._run else None,
            tuple((member.info, member.state) for _, member in sorted(self._members.items())),
        )

    def _register(self, worker: messages.WorkerInfo, generation: int) -> bool:
        """Whether the worker is idle and new to the run in progress."""
        known = self._members.get(worker.seat)
        is_busy = known and known.state in (MemberState.RUNNING, MemberState.REHEARSING)
        # One that has left a run which is over is as idle as it says.
        if self._run is not None and known and known.info == worker and is_busy:
            return False  # It was asked twice, and has a rank, or rehearses, meanwhile.
        self._members[worker.seat] = Member(worker, MemberState.READY)
        if generation > self._generation:
            self._generation = generation
            self._formed = ()
        return True

    def _note_death(self, worker_id: str) -> None:
        for member in self._members.values():
            if member.info.worker_id == worker_id:
                member.state = MemberState.LOST
                self._formed = ()

    def _ask(self, run: RunState) -> list[Instruction]:
        """If workers wait, ask the ranks whether they could be taken in."""
        may_come = run.phase is Phase.RUNNING and run.goes_on and run.takes_newcomers
        if not may_come or not newcomers_of(run, self._members.values()):
            return []  # They wait for the next run.
        if self._arrivals.by_id:
            return []  # Others come, and these afterwards.
        if run.asked_in == self._generation:
            return []  # Another newcomer waits for the same answer.
        run.asked_in = self._generation
        return [instructions.AwaitReadiness(run.worker_ids, self._generation)]

    def _call_off(self) -> list[Instruction]:
        """The run ends: so do the rehearsals."""
        called_off = self._arrivals.call_off("the run ends")
        return [*called_off, instructions.StartGrace()] if called_off else []
