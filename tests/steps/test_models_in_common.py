"""Which models take the steps of `ctx.steps` together."""

from __future__ import annotations

from chorusline.runtime.process.micro_batches import in_common


def names(signatures: list[list[str]]) -> list[list[str]]:
    return [
        [signatures[rank][place] for place in in_common(signatures, rank)]
        for rank in range(len(signatures))
    ]


def test_models_that_all_ranks_have_come_in_one_order() -> None:
    assert names([["a", "b"], ["b", "a"]]) == [["a", "b"], ["a", "b"]]
    assert names([["a"], ["a"], ["a"]]) == [["a"]] * 3
    assert names([["a", "b"], ["b"]]) == [["b"], ["b"]]
    assert names([["a"], []]) == [[], []]


def test_of_equal_ones_the_latest_made_belong_together() -> None:
    # Rank 0 still holds one of a function that has failed.
    assert in_common([["a", "a"], ["a"]], 0) == [1]
    assert in_common([["a", "a"], ["a"]], 1) == [0]
    assert in_common([["a", "b", "a"], ["a", "a", "b"]], 0) == [2, 0, 1]
    assert in_common([["a", "b", "a"], ["a", "a", "b"]], 1) == [1, 0, 2]
