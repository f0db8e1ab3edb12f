"""How a rank says which ranks were lost on its way from generation to generation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chorusline.actors.messages.messages import Assignment, FormerRanks, Resumption
from chorusline.actors.messages.run_status import GenerationChange, Gone
from chorusline.actors.worker.generation_changes import GenerationChanges


def assignment(generation: int, size: int, rank: int = 0) -> Assignment:
    return Assignment(generation, rank, size, rank, size, 0)


def resumption(generation: int, former: list[int], leaving: tuple[int, ...] = ()) -> Resumption:
    made = assignment(generation, len(former))
    return Resumption(made, FormerRanks.of(former), (), leaving=leaving)


def passed(
    num_ranks: int, attempts: list[tuple[list[int], tuple[int, ...]]]
) -> tuple[GenerationChange, GenerationChanges]:
    changes = GenerationChanges(num_ranks)
    assert changes.entered(assignment(0, num_ranks), 1.0, 0, runs_again=True) is None
    size = num_ranks
    for generation, (former, leaving) in enumerate(attempts, start=1):
        changes.left(generation + 1.0)
        changes.attempted(resumption(generation, former, leaving))
        size = len(former)
    change = changes.entered(assignment(len(attempts), size), 9.0, 7, runs_again=False)
    assert change is not None
    return change, changes


@pytest.mark.parametrize(
    ("num_ranks", "attempts", "lost", "left", "came"),
    [
        (3, [([0, 2], ())], (1,), (), ()),
        (3, [([0, 2, -1], ())], (1,), (), (2,)),
        (2, [([0, 1, -1], ())], (), (), (2,)),
        # Rank 1 is lost, and while the others meet, what was rank 3.
        (4, [([0, 2, 3], ()), ([0, 1], ())], (1, 3), (), ()),
        # Rank 1 hands its state over in a generation of its own, and goes.
        (3, [([0, 1, 2], (1,)), ([0, 2], ())], (1,), (1,), ()),
        # A newcomer is lost before the function has run on it: nobody knew it.
        (2, [([0, 1, -1], ()), ([0, 1], ())], (), (), ()),
        # Of two that leave, one dies first.
        (4, [([0, 1, 2, 3], (1, 3)), ([0, 1, 2], ()), ([0, 2], ())], (1, 3), (1, 3), ()),
    ],
)
def test_ranks_are_traced_back_through_all_attempts(
    num_ranks: int,
    attempts: list[tuple[list[int], tuple[int, ...]]],
    lost: tuple[int, ...],
    left: tuple[int, ...],
    came: tuple[int, ...],
) -> None:
    change, _ = passed(num_ranks, attempts)
    assert (change.lost, change.left, change.came) == (lost, left, came)
    assert (change.left_at, change.entered_at) == (2.0, 9.0), "it began with the first loss"
    assert (change.generation, change.num_workers) == (len(attempts), len(attempts[-1][0]))
    assert change.step == 7


def test_the_next_change_begins_anew() -> None:
    _, changes = passed(3, [([0, 2], ())])
    changes.left(20.0)
    changes.attempted(resumption(2, [1]))
    change = changes.entered(assignment(2, 1), 21.0, 9, runs_again=True)
    assert change == GenerationChange(2, 20.0, 21.0, 1, (0,), (), (), True, 9)


def test_a_rank_that_has_not_begun_has_left_nothing() -> None:
    changes = GenerationChanges(3)
    changes.left(1.0)
    changes.attempted(resumption(1, [0, 2]))
    assert changes.entered(assignment(1, 2), 2.0, 0, runs_again=True) is None


def test_a_change_names_processes_through_all_attempts_and_counts_repeated_steps() -> None:
    changes = GenerationChanges(3)
    changes.entered(assignment(0, 3), 1.0, 0, runs_again=True)
    changes.left(2.0, 9)
    first = replace(resumption(1, [0, 2, -1]), gone=(Gone(1, 11, "killed"),), pids=(14,))
    changes.attempted(first)
    # Of this attempt's ranks, rank 1 was rank 2 at first, and the newcomer stays.
    changes.attempted(replace(resumption(2, [0, 2]), gone=(Gone(1, 12, "killed too"),)))
    change = changes.entered(assignment(2, 2), 3.0, 7, runs_again=True, dealt_again=5)
    assert change is not None
    assert change.gone == (Gone(1, 11, "killed"), Gone(2, 12, "killed too"))
    assert (change.lost, change.came, change.pids) == ((1, 2), (1,), (14,))
    assert (change.repeated, change.dealt_again) == (2, 5)
