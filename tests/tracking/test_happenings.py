"""What trackers are told about the workers, out of what the ranks say."""

from __future__ import annotations

from chorusline.actors.run_status import Passage, RunStatus
from chorusline.runtime.tracking.happenings import Happenings


def status(rank: int, generation: int, *passages: Passage) -> RunStatus:
    return RunStatus(rank=rank, generation=generation, passages=passages)


def test_a_loss_is_told_once_when_all_ranks_have_gone_on() -> None:
    happenings = Happenings()
    early = Passage(1, 10.0, 10.5, 2, (1,), step=21)
    late = Passage(1, 10.2, 11.5, 2, (1,), step=21)
    assert happenings.look([status(0, 1, early), status(1, 0)]) == []
    both = [status(0, 1, early), status(1, 1, late)]
    (event,) = happenings.look(both)
    assert (event.kind, event.lost, event.left, event.came) == ("ranks lost", (1,), (), ())
    assert (event.began_at, event.ended_at, event.seconds) == (10.0, 11.5, 1.5)
    assert (event.step, event.generation, event.num_workers) == (21, 1, 2)
    assert event.text == "rank 1 lost; the run goes on with 2 workers after 1.50 s"
    assert happenings.look(both) == happenings.look(both, is_over=True) == []


def test_leaving_and_coming_have_names_of_their_own() -> None:
    happenings = Happenings()
    leaves = Passage(2, 1.0, 2.0, 1, (1,), (1,))
    comes = Passage(3, 5.0, 6.0, 3, (), (), (1, 2), runs_again=True)
    told = happenings.look([status(0, 3, leaves, comes), status(1, 3), status(2, 3)])
    assert [one.kind for one in told] == ["ranks left", "workers came"]
    assert [one.text for one in told] == [
        "rank 1 left; the run goes on with 1 worker after 1.00 s",
        "ranks [1, 2] came; the run goes on with 3 workers after 1.00 s",
    ]
    assert (told[0].lost, told[0].left) == ((), (1,))


def test_a_passage_that_not_all_have_told_is_told_at_the_end() -> None:
    happenings = Happenings()
    passage = Passage(1, 10.0, 10.5, 1, (1,))
    assert happenings.look([status(0, 1, passage), status(1, 0)]) == []
    assert len(happenings.look([status(0, 1, passage)], is_over=True)) == 1
