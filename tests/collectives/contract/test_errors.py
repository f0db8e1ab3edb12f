"""Errors cross processes: by pickle between actors, as JSON between ranks."""

from __future__ import annotations

import pickle

import pytest

from chorusline.collectives.contract.errors import (
    ChoruslineError,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PayloadUnreadable,
    PeerLost,
    SecretMismatch,
    StaleStore,
    StoreLost,
    StoreTimeout,
    UnsupportedOperation,
    error_from_json,
    error_to_json,
    fresh_copy,
)
from chorusline.collectives.group import Group
from chorusline.collectives.stores.store import HashStore

COLLECTIVE_ERRORS: list[CollectiveError] = [
    CollectiveTimeout("all_reduce #118 (4 float32)", 3, [2], 30.0, "rank 2 is at barrier #7"),
    CollectiveTimeout("barrier #0", 0, (0, 1), 0.5),
    CollectiveMismatch("barrier #4", 1, [1], "ranks [0, 2] issued this, rank 1 issued that"),
    PeerLost("all_gather #9 (8 int64)", 2, [0, 3], "process 41 ended"),
    GroupAborted(5, [1], "ValueError: grüß\n", "Traceback …\n  in explode"),
    GroupAborted(5, [], "the driver said so"),
    GroupClosed("close", 7),
    PayloadUnreadable("gather_object #2", 1, [2], "rank 2 cannot unpickle", "Traceback …"),
    UnsupportedOperation("tensor of dtype torch.bool", "nccl", "use another"),
]
ERRORS: list[ChoruslineError] = [
    *COLLECTIVE_ERRORS,
    StoreTimeout(["card/1", "card/2"], 30.0, "ranks [1, 2] did not come"),
    StoreLost("set", "the actor that holds the store is gone"),
    StaleStore("/tmp/it's", "process 4 on 2026-11-21"),
    SecretMismatch("card/1", "has no signature"),
]


def _same(one: ChoruslineError, other: ChoruslineError) -> bool:
    return type(one) is type(other) and vars(one) == vars(other) and str(one) == str(other)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_survives_pickle(error: ChoruslineError) -> None:
    assert _same(pickle.loads(pickle.dumps(error)), error)


@pytest.mark.parametrize("error", COLLECTIVE_ERRORS, ids=lambda error: type(error).__name__)
def test_every_collective_error_survives_json_and_is_raised_anew_without_a_traceback(
    error: CollectiveError,
) -> None:
    with pytest.raises(type(error)) as caught:
        raise error
    for copy in (error_from_json(error_to_json(caught.value)), fresh_copy(caught.value)):
        assert _same(copy, error)
        assert copy.__traceback__ is None


@pytest.mark.parametrize("error", COLLECTIVE_ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_that_blames_no_rank_prints_no_empty_list(error: CollectiveError) -> None:
    blames_nobody = type(error)(*([] if isinstance(v, list | tuple) else v for v in error.args))
    assert "[]" not in str(blames_nobody)
    assert blames_nobody.operation in str(blames_nobody) or isinstance(error, GroupAborted)


def test_every_error_is_there_to_be_tested() -> None:
    def kinds(root: type) -> set[type]:
        found = set(root.__subclasses__())
        return found.union(*map(kinds, found)) if found else found

    ours = {
        kind
        for kind in kinds(ChoruslineError)
        if kind.__module__ == "chorusline.collectives.contract.errors"
    }
    assert ours - {type(error) for error in ERRORS} == {CollectiveError}


def test_every_collective_error_says_operation_generation_and_ranks() -> None:
    for error in COLLECTIVE_ERRORS:
        assert isinstance(error.operation, str)
        assert isinstance(error.generation, int)
        assert all(isinstance(rank, int) for rank in error.ranks)


def test_a_timeout_names_ranks_whereabouts_and_remedy() -> None:
    assert str(COLLECTIVE_ERRORS[0]) == (
        "all_reduce #118 (4 float32) in generation 3: rank 2 did not arrive within 30 s; rank 2 "
        "is at barrier #7. If ranks may run out of data at different steps, put the loop inside "
        "Join(); if steps are only slow, raise the timeout (timeout_s)."
    )


def test_an_error_of_a_higher_layer_reaches_the_ranks_as_its_base() -> None:
    class LostForGood(PeerLost):
        pass

    told = error_from_json(error_to_json(LostForGood("group", 1, [2], "gone")))
    assert _same(told, PeerLost("group", 1, [2], "gone"))


def test_a_text_too_long_for_the_shared_record_is_cut_in_the_middle() -> None:
    with Group.create(HashStore(), 0, 1) as group:
        trace = "first line\n" + "…" * 1_000_000 + "\nlast line"
        group.abort(GroupAborted(0, [0], "too much to tell", trace))
        with pytest.raises(GroupAborted) as caught:
            group.barrier().wait()
    assert caught.value.reason == "too much to tell"
    assert caught.value.ranks == [0]
    assert caught.value.traceback.startswith("first line\n…")
    assert caught.value.traceback.endswith("…\nlast line")
    assert "[... cut ...]" in caught.value.traceback
