"""The ranks go back to a checkpoint when they have lost state that no rank holds any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import chorusline as cl
from chorusline.actors.errors import StateLost
from chorusline.actors.messages.messages import Assignment, FormerRanks, Resumption
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.reporting.report_buffer import ReportBuffer
from chorusline.collectives.contract.errors import PeerLost
from chorusline.runtime.program.program import FunctionRun, Program


class Recovery:
    """What a rank does between two generations: it notes the error with which it leaves one."""

    def __init__(self, resumption: Resumption, group: cl.Group) -> None:
        self.arrivals = SimpleNamespace(is_dry_run=False)
        self.from_the_top = SimpleNamespace(connect=lambda: group)
        self.left_with: list[BaseException] = []
        self.has_forgotten = False
        self._resumption = resumption

    def leave(self, error: BaseException) -> Resumption:
        self.left_with.append(error)
        return self._resumption

    def forget(self) -> None:
        self.has_forgotten = True


class Checkpoints:
    """Of the first time that the ranks look for a checkpoint one of them is lost."""

    def __init__(self, failure: PeerLost) -> None:
        self._failures = [failure]

    def can_go_back(self, group: cl.Group, resume: str) -> bool:
        if self._failures:
            raise self._failures.pop()
        return True


def test_a_loss_while_the_ranks_look_for_a_checkpoint_leads_to_the_next_generation(
    alone: cl.Group,
) -> None:
    assignment = Assignment(2, 0, 1, 0, 1, 0)
    resumption = Resumption(assignment, FormerRanks.of([0]), (), entered=1, restarts=True)
    lifeline: Any = SimpleNamespace(survives_loss=False, group=alone, assignment=assignment)
    program = Program(lambda ctx: None, {}, cl.CheckpointConfig("unread"))
    run = FunctionRun(program, ReportBuffer(keep=False), lifeline, RunStatus(), is_newcomer=False)
    lost = PeerLost("broadcast", 1, [1], "the process has ended")
    recovery: Any = Recovery(resumption, alone)
    call: Any = SimpleNamespace(checkpoints=Checkpoints(lost))
    run._recovery = recovery
    run._call = call
    gone = StateLost(1, 2, "bucket 0")
    assert run._again(gone) == (assignment, alone, resumption)
    assert recovery.left_with == [lost] and not recovery.has_forgotten
    # The kept state is not whole in that generation either: all ranks raise StateLost again.
    assert run._again(gone) == (assignment, alone, None)
    assert recovery.has_forgotten
