"""Workers that come to a run in progress, and do not interrupt it. Pure; membership.py asks.

A worker that comes is READY until all ranks can admit it. Then it becomes DRY_RUN, with all
others that wait at that time, and they are admitted together:

    begin   give each of them its place among the ranks, and have it run the function by itself.
    ready   one waits at its first step. When all do, ask the ranks to admit them.
    enter   the ranks have ended their generation between two steps: the next one is formed with the
            workers (situation.py), which were given just those places.

What comes between ends the dry runs of all of them (call off), and they begin again, at most
MOST_ATTEMPTS times: one of them has died; a generation was formed without them, so their places are
others; the ranks have come to another epoch. A function without a dry run says so once: from then
on in this run the functions of all ranks run again from the top. If the ranks can never admit one
with what they have made, they run again once, and make it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chorusline.collectives.contract.endpoint import Endpoint
from chorusline.collectives.contract.errors import GroupAborted

from ..messages.admission import AdmissionRequest, ReadyToken
from ..messages.messages import Assignment, Frozen, MemberState, Waiting
from . import instructions
from .events import DryRunReady
from .instructions import Instruction
from .run_state import Member, assign, in_rank_order

MOST_ATTEMPTS = 5
"""DryRuns of the same workers, before the functions run again from the top."""


@dataclass(slots=True)
class DryRun:
    """A worker in its dry run.

    assignment: the place that it was given.
    token, endpoint: where it waits, and where ranks of its host can meet it; None before that.
    is_called_off: it was told to stop.
    """

    member: Member
    assignment: Assignment
    token: ReadyToken | None = None
    endpoint: Endpoint | None = None
    is_called_off: bool = False


@dataclass(slots=True)
class DryRuns:
    """The workers that come to one run.

    are_possible: False once the functions have to run again from the top.
    is_declined: they have to only because of what the ranks have made in this call of them.
    by_id: the dry runs under way, by worker.
    attempts: dry runs since workers came in last. number: of the last request to the ranks.
    """

    are_possible: bool = True
    is_declined: bool = False
    by_id: dict[str, DryRun] = field(default_factory=dict)
    attempts: int = 0
    number: int = 0

    def begin(
        self, members: Sequence[Member], come: Sequence[Member], generation: int
    ) -> list[Instruction]:
        """members: by rank. come: workers that wait."""
        self.attempts += 1
        order = in_rank_order([*members, *come])
        todo: list[Instruction] = []
        for member, assignment in zip(order, assign(order, generation), strict=True):
            if any(member is one for one in come):
                member.state = MemberState.DRY_RUN
                worker_id = member.info.worker_id
                self.by_id[worker_id] = DryRun(member, assignment)
                source = members[0].info.worker_id
                todo.append(instructions.BeginDryRun(worker_id, assignment, source))
        return todo

    def ready(
        self, ready: DryRunReady, members: Sequence[Member], generation: int
    ) -> list[Instruction]:
        """A worker waits at its first step. members: of the generation, by rank."""
        mine = self.by_id.get(ready.worker_id)
        # Its dry run has ended meanwhile, by its death for example.
        if mine is None:
            return []
        if mine.is_called_off:  # It was sent before the cancellation arrived.
            return [_stop(mine, "it was cancelled")]
        mine.token, mine.endpoint = ready.token, ready.endpoint
        tokens = [one.token for one in self.by_id.values()]
        # All in their dry runs are admitted together, in one round of all ranks.
        if None in tokens:
            return []
        if len(set(tokens)) > 1:
            return self.call_off("the new workers wait at different steps")
        self.number += 1
        request = AdmissionRequest(self.number, generation, ready.token)
        return [instructions.RequestAdmission(one.info.worker_id, request) for one in members]

    def declined(self, number: int, why: str, *, is_final: bool) -> list[Instruction]:
        # It is about a request before this one.
        if number != self.number or not self.by_id:
            return []
        self.number += 1  # What other ranks say about it comes too late.
        if is_final:
            self.are_possible, self.is_declined = False, True
        return self.call_off(why)

    def call_off(self, why: str) -> list[Instruction]:
        """End the dry runs that are under way."""
        todo: list[Instruction] = []
        for one in self.by_id.values():
            if not one.is_called_off:
                one.is_called_off = True
                todo.append(_stop(one, why))
        return todo

    def ended(
        self, worker_id: str, *, is_dead: bool, is_final: bool, counts: bool
    ) -> list[Instruction]:
        """A worker is not in its dry run any more, and was not admitted. is_final: the function can
        have no dry run. counts: as in DryRunEnded."""
        mine = self.by_id.pop(worker_id)
        if not counts and not mine.is_called_off:
            self.attempts -= 1
        if not is_dead:
            mine.member.state = MemberState.READY
        # A dry run that was called off ends with an error, too, which says nothing of the
        # function.
        if (is_final and not mine.is_called_off) or self.attempts >= MOST_ATTEMPTS:
            self.are_possible = False
        return self.call_off("another worker that was to join with it does not come")

    def abandon(self) -> None:
        """The workers in their dry runs have not stopped in time."""
        for one in self.by_id.values():
            one.member.state = MemberState.STUCK
        self.by_id.clear()

    def entering(
        self, survivors: Sequence[Member], frozen: Mapping[int, Frozen], generation: int
    ) -> list[Member]:
        """The workers that are admitted now; none if the ranks do not all wait for them, or their
        places would be others than those that they were given.

        survivors: by rank. frozen: of all of them. generation: the one that has ended."""
        # A rank that is inside a step has to finish it with those that were in it.
        if not self.by_id or any(one.waiting is not Waiting.AT_BOUNDARY for one in frozen.values()):
            return []
        # One that has not continued in this generation is on its way out of an earlier one.
        if any(one.entered != generation for one in frozen.values()):
            return []
        come = list(self.by_id.values())
        # They are admitted together: their places count one another.
        if any(one.token is None or one.is_called_off for one in come):
            return []
        order = in_rank_order([*survivors, *(one.member for one in come)])
        places = assign(order, generation)
        for one in come:
            rank = next(n for n, member in enumerate(order) if member is one.member)
            # The ranks have changed meanwhile: its dry run was for another place.
            if places[rank] != replace(one.assignment, generation=generation):
                return []
        return [one.member for one in come]

    def formed(self, members: Iterable[Member], *, restarts: bool) -> list[Instruction]:
        """A generation was formed of these members. restarts: as in Plan."""
        if restarts and self.is_declined:
            self.are_possible, self.is_declined, self.attempts = True, False, 0
        here = {member.info.worker_id for member in members}
        for worker_id in here & self.by_id.keys():
            del self.by_id[worker_id]
            self.attempts = 0
        return self.call_off("the ranks have changed")


def _stop(one: DryRun, why: str) -> Instruction:
    error = GroupAborted(one.assignment.generation, [], f"the dry run is over: {why}")
    return instructions.AbortRank(one.member.info.worker_id, error)
