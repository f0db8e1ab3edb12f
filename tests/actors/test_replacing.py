"""Who is to leave because it is far behind: decided from what the workers say, each second."""

from __future__ import annotations

from chorusline.actors.messages.messages import WorkerInfo, WorkerSnapshot, WorkerState
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.worker_group.replacing import note_stragglers


def word(seat: int, is_straggler: bool = False, incarnation: int = 0) -> WorkerSnapshot:
    info = WorkerInfo(f"worker-{seat}-{incarnation}", seat, "node", "host", 1, "cpu")
    status = RunStatus(is_straggler=is_straggler)
    return WorkerSnapshot(info, WorkerState.TRAINING, 0, status=status)


def test_a_straggler_is_to_leave_until_it_has_left() -> None:
    first: dict[int, str] = {}
    assert note_stragglers(first, [word(0), word(1)]) == {}
    (why,) = note_stragglers(first, [word(0), word(1, is_straggler=True)]).values()
    assert "much slower than the other ranks" in why
    # In the generation in which it hands over it is not measured.
    assert set(note_stragglers(first, [word(0), word(1)])) == {"worker-1-0"}
    assert note_stragglers(first, [word(0)]) == {}, "Ray will say what it is"
    assert note_stragglers(first, [word(0), word(1, incarnation=1)]) == {}, (
        "another one has the seat"
    )


def test_a_seat_is_cleared_once_in_a_run() -> None:
    first: dict[int, str] = {}
    assert note_stragglers(first, [word(0), word(1, is_straggler=True)])
    assert note_stragglers(first, [word(0), word(1, is_straggler=True, incarnation=1)]) == {}
    after = [word(0, is_straggler=True), word(1, incarnation=1)]
    assert set(note_stragglers(first, after)) == {"worker-0-0"}
