"""A group without peers gives a rank what the others have kept of their beginning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import GroupAborted
from chorusline.collectives.dry_run import DryRunGroup, DryRunRefused
from chorusline.collectives.group import Group
from chorusline.collectives.kept_results import MOST_BYTES, KeptResult, KeptResults
from chorusline.collectives.stores.store import HashStore


def begins(group: Any, rank: int) -> list[Any]:
    """What a function asks for before its first step; the same on all ranks."""
    total = torch.tensor([float(rank + 1), 2.0])
    group.all_reduce(total).wait()
    chosen = torch.full((3, 2), rank, dtype=torch.int64).T  # Not contiguous: it is copied back.
    group.broadcast(chosen, 1).wait()
    group.barrier().wait()
    everybody = torch.empty(group.size)
    group.all_gather(everybody, torch.tensor([float(rank)])).wait()
    return [total.tolist(), chosen.tolist(), everybody.tolist()]


def _keeps(group: Any) -> Any:
    kept = KeptResults()
    group.keep_results(kept)
    told = begins(group, group.rank)
    with group.unkept():  # Of the runtime's own.
        group.all_reduce(torch.ones(5)).wait()
    kept.begin_body()
    in_body = torch.tensor([group.rank])
    group.all_reduce(in_body).wait()
    group.keep_results(None)
    group.all_reduce(torch.ones(7)).wait()
    return told, in_body.tolist(), kept.results(), kept.why_not


def alone(size: int, answers: list[KeptResult], rank: int) -> DryRunGroup:
    group = DryRunGroup(
        rank, size, torch.device("cpu"), generation=0, timeout_s=1.0, store=HashStore()
    )
    group.answer_with(answers)
    return group


def test_what_all_ranks_got_at_their_beginning_a_rank_gets_that_comes_later(ranks_of: Any) -> None:
    results = ranks_of(3).run(_keeps)
    for rank, (told, in_body, (outside, body), why_not) in enumerate(results):
        assert not why_not and len(outside) == 3 and len(body) == 1
        group = alone(3, [*outside, *body], rank)
        # In the place of rank 1 too, which had sent: what it has itself is another value.
        assert begins(group, rank + 5) == told
        mine = torch.tensor([7])
        group.all_reduce(mine).wait()
        assert mine.tolist() == in_body
        assert not group.refusal


def test_an_answer_of_another_number_of_ranks_is_none(ranks_of: Any) -> None:
    _, _, (outside, body), _ = ranks_of(3).run(_keeps)[0]
    group = alone(4, [*outside, *body], 3)
    with pytest.raises(DryRunRefused, match=r"all_gather \(4 .* theirs was of all_gather \(3"):
        begins(group, 3)
    assert group.refusal


ASKS: dict[str, Callable[[Group], object]] = {
    "reduce_scatter": lambda group: group.reduce_scatter(torch.zeros(1), torch.zeros(2)),
    "send": lambda group: group.send(torch.zeros(1), 0),
    "all_to_all": lambda group: group.all_to_all([torch.zeros(1)] * 2, [torch.zeros(1)] * 2),
    "objects": lambda group: group.all_gather_object("mine"),
    "a list of objects": lambda group: group.send_object_list(["mine"], 0),
    "a group": lambda group: group.new_group([0, 1]),
    "what nobody has kept": lambda group: group.all_reduce(torch.zeros(1)),
}


@pytest.mark.parametrize("what", ASKS)
def test_what_cannot_be_answered_ends_the_dry_run_with_a_sentence(what: str) -> None:
    group = alone(2, [], 1)
    with pytest.raises(DryRunRefused, match="before its first step"):
        ASKS[what](group)
    assert "before its first step" in group.refusal


def test_a_dry_run_that_is_called_off_ends_at_its_next_operation() -> None:
    group = alone(2, [], 1)
    group.abort("the dry run is over")
    with pytest.raises(GroupAborted, match="the dry run is over"):
        group.barrier().wait()


def _keeps_too_much(group: Any) -> Any:
    kept = KeptResults()
    group.keep_results(kept)
    for _ in range(3):
        group.all_reduce(torch.zeros(MOST_BYTES // 10)).wait()
    return kept.why_not, kept.results()


def test_what_is_kept_is_bounded(ranks_of: Any) -> None:
    for why_not, (outside, body) in ranks_of(2).run(_keeps_too_much):
        assert "more than 16 MiB" in why_not
        assert outside == body == []


def _sends_objects(group: Any) -> Any:
    kept = KeptResults()
    group.keep_results(kept)
    group.all_gather_object(group.rank).wait()
    return kept.why_not


def test_objects_are_not_kept(ranks_of: Any) -> None:
    for why_not in ranks_of(2).run(_sends_objects):
        assert "objects" in why_not
