"""What a rank counts in an iteration: in every order of events, and written by nobody else."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import fields

import pytest

from chorusline.runtime.data.dealer import Counts
from tests import ROOT
from tests.data.test_redealing import NUM_SAMPLES, Ranks

ALONE = ["num_taken", "num_agreed", "committed", "settled", "dealt_for", "awaits_step"]
"""The names that no other class has for what others write."""

EVENTS = ["take", "agree", "settled", "unsettled", "renumber"]


def test_counts_follow_from_their_events_in_any_order() -> None:
    for events in itertools.product(EVENTS, repeat=5):
        counts_after(events)


def counts_after(events: tuple[str, ...]) -> None:
    counts, taken, agreed, before = Counts(7, 2, (0, 1)), 0, 0, Counts(7, 2, (0, 1))
    recorded: list[tuple[tuple[int, int], bool]] = []
    for number, event in enumerate(events):
        if event == "take":
            counts.take(number + 1)
            taken += number + 1
        elif event == "agree":
            counts.agree()
            agreed = taken
        elif event == "renumber":
            counts.renumber((taken, number), (1, 2))
            recorded.append(((taken, number), True))
        else:
            counts.record((taken, number), is_settled=event == "settled")
            recorded.append(((taken, number), event == "settled"))
    # What only the last step says may be lost with this rank; the one before all ranks know.
    known = recorded if not recorded or recorded[-1][1] else recorded[:-1]
    assert (counts.num_taken, counts.num_agreed) == (taken, agreed)
    assert counts.committed == (recorded[-1][0] if recorded else None)
    assert counts.settled == (known[-1][0] if known else None)
    assert (counts.number, counts.dealt_for) == (before.number, before.dealt_for)
    assert counts.holders == ((1, 2) if "renumber" in events else (0, 1))


def histories() -> Iterator[tuple[tuple[int, int, frozenset[int]], ...]]:
    """Two losses: after which step, of which place, while which ranks are in the next step."""
    ranks = [frozenset(some) for n in range(4) for some in itertools.combinations(range(3), n)]
    first = [*itertools.product(range(4), range(3), ranks)]
    second = [*itertools.product(range(3), range(2), [one for one in ranks if 2 not in one])]
    yield from itertools.product(first, second)


@pytest.mark.parametrize("at", range(4))
def test_two_losses_at_any_moment_cost_no_sample_and_repeat_none(at: int) -> None:
    for losses in histories():
        if losses[0][0] != at:
            continue
        ranks = Ranks(3)
        within: set[int] = set()  # Those that are in the step that does not count yet.
        for num_steps, place, ahead in losses:
            for _ in range(num_steps):
                step(ranks, within)
            for rank in [ranks.alive[one] for one in sorted(ahead)]:
                take(ranks, rank, within)
            dead = ranks.alive[place]
            ranks.lose(dead)
            within.discard(dead)
        while any(ranks.shards[rank].has_more() for rank in ranks.alive):
            step(ranks, within)
        assert {ranks.shards[rank].num_used for rank in ranks.alive} == {NUM_SAMPLES}, losses
        assert ranks.finish() == list(range(NUM_SAMPLES)), losses


def take(ranks: Ranks, rank: int, within: set[int]) -> None:
    if rank not in within and ranks.shards[rank].has_more():
        ranks.take(rank)
        within.add(rank)


def step(ranks: Ranks, within: set[int]) -> None:
    """All ranks that have a batch take it, and the step counts."""
    for rank in ranks.alive:
        take(ranks, rank, within)
    ranks.count()
    within.clear()


def test_no_other_object_writes_counts() -> None:
    """Only the Dealer gives an iteration other counts."""
    own = {field.name for field in fields(Counts)}
    found = []
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        for top in ast.parse(path.read_text()).body:
            for node in ast.walk(top):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                    base = ast.unparse(node.value)
                    is_of_counts = base.endswith("counts") and node.attr in own
                    is_of_other = base != "self" and node.attr in {*ALONE, "counts"}
                    is_dealer = isinstance(top, ast.ClassDef) and top.name == "Dealer"
                    if is_of_counts or (is_of_other and not (is_dealer and node.attr == "counts")):
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {base}.{node.attr}")
    assert found == []
