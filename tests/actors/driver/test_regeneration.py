"""No interleaving breaks a promise of recovery, and each known mistake is found."""

from __future__ import annotations

import pytest

from benchmarks.proofs.interleavings_model import MISTAKES, Broken, Search


@pytest.mark.parametrize(
    ("num_ranks", "num_steps", "kills"),
    [
        (2, 2, 2),
        (3, 2, 2),
        (4, 2, 1),
        pytest.param(3, 3, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_no_interleaving_breaks_a_promise(num_ranks: int, num_steps: int, kills: int) -> None:
    found = Search(num_ranks, num_steps, kills).run()
    assert found.worlds > 100 and found.moves > found.worlds and found.endings


@pytest.mark.slow
def test_no_interleaving_of_four_ranks_and_two_kills_breaks_a_promise() -> None:
    assert Search(4, 3, 2).run().worlds > 100_000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found_with_the_way_to_it(mistake: str) -> None:
    search = Search(3, 2, 2)
    MISTAKES[mistake](search)
    with pytest.raises(Broken, match=r"after \d+ moves") as broken:
        search.run()
    first, *_, last = str(broken.value).split("\n  0 generation 0\n")
    assert first and "reducing in generation 0" in last
