"""Any body of a loop, over uneven data, is what it is in one process: a step is made of what the
ranks with data have done with their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, strategies as st

from tests.harness.combinations import combinations
from tests.references.random_bodies import (
    CLEARS,
    COLLECTIVE,
    EDITS,
    FREEZES,
    PARTIAL_CLEARS,
    PARTIAL_PASSES,
    WRITES,
    Act,
    in_one_process,
    on_ranks,
)

PASS, QUIET, BOTH, STEP, CLEAR = "pass", "pass in no_sync", "pass through both", "step", "optimizer"

REFUSED = (
    # Known by name, on all ranks, and with the remedy.
    "a backward pass in no_sync() was added to gradients that an earlier pass had reduced",
    "was changed after the backward pass",  # zeros between a pass and its step
    "changed some gradients between two backward passes",
    # Where a hook of a rank without data may have read what the body had not written yet there.
    "the loop's body has written parameter",
)
PLAIN_WRITES = [written for written in WRITES if written != "max_norm"]
REFUSED_ALONG = (
    # What the body writes beside the optimizer, which alone is in step_along.
    " differs between rank",
    "so the parameters of the ranks drift apart",
)

BODIES: dict[str, tuple[int, list[Act]]] = {
    "cleared before the next pass": (1, [Act(CLEAR), Act(PASS), Act(STEP), Act(PASS)]),
    "cleared, from no_sync": (1, [Act(CLEAR), Act(PASS), Act(STEP), Act(QUIET)]),
    "no step": (1, [Act(CLEAR), Act(PASS)]),
    "cleared by hand": (1, [Act("by hand"), Act(PASS), Act(STEP)]),
    "cleared by hand, to zeros": (1, [Act("by hand, to zeros"), Act(PASS), Act(STEP), Act(PASS)]),
    "zeros in .data": (1, [Act("by hand, zeros in .data"), Act(PASS), Act(STEP), Act(PASS)]),
    "cleared by a product before what stays": (
        1,
        [
            *(Act(PASS, 0, 2), Act(STEP, 0, 2), Act("by hand, zeros by a product")),
            Act(PASS, 0, 2, 1),
        ],
    ),
    "never cleared": (1, [Act(PASS), Act(STEP)]),
    "accumulated": (1, [Act(PASS), Act(STEP, 0, 2, 1), Act(CLEAR, 0, 2, 1)]),
    "accumulated in no_sync": (
        1,
        [Act(QUIET, 0, 2), Act(PASS, 0, 2, 1), Act(STEP, 0, 2, 1), Act(CLEAR, 0, 2, 1)],
    ),
    "two losses, two steps": (
        2,
        [Act(CLEAR), Act(CLEAR, 1), Act(PASS), Act(PASS, 1), Act(STEP), Act(STEP, 1)],
    ),
    "critic and generator": (
        2,
        [Act(CLEAR), Act(PASS), Act(STEP), Act(CLEAR, 1), Act(BOTH, 1), Act(STEP, 1)],
    ),
    "critic and generator, to zeros": (
        2,
        [
            *(Act("optimizer, to zeros"), Act(PASS), Act(STEP)),
            *(Act("optimizer, to zeros", 1), Act(BOTH, 1), Act(STEP, 1)),
        ],
    ),
}


def check(
    ranks_of: object,
    body: Sequence[Act],
    lengths: Sequence[int],
    way: str,
    *,
    num_models: int = 1,
    epochs: int = 2,
    momentum: float = 0.0,
    joins: bool = True,
    follows: bool = False,
    hooks: bool = False,
    refused: Sequence[str] = REFUSED,
) -> None:
    whole = in_one_process(body, lengths, num_models, epochs, momentum, hooks)
    args = body, lengths, num_models, epochs, momentum, way, joins, follows, hooks
    results = ranks_of(len(lengths)).run(on_ranks, *args)  # type: ignore[operator]
    if all(isinstance(told, str) for told in results):
        known = [text for text in refused if all(text in told for told in results)]
        assert known, results
        return
    for rank, told in enumerate(results):
        assert not isinstance(told, str), (rank, told)
        *parameters, num_steps = told
        for one, other in zip(parameters, whole, strict=False):
            assert torch.allclose(one, other, rtol=0, atol=1e-11), (rank, one - other)
        if way == "zero":  # A joined rank's plain optimizer takes no steps.
            assert torch.equal(num_steps, whole[-1]), (rank, num_steps, whole[-1])


@combinations(4, body=BODIES, lengths=[(4, 4), (5, 3), (1, 4), (0, 3)])
def test_a_step_is_what_the_ranks_with_data_did(ranks_of, lengths, body):
    num_models, acts = BODIES[body]
    check(ranks_of, acts, lengths, "zero", num_models=num_models, momentum=0.9)
    # In a Join without groups that it follows, passes of plain models come in the listed order.
    if num_models == 1:
        check(ranks_of, acts, lengths, "plain")
    check(ranks_of, acts, (4, 4), "zero", num_models=num_models, joins=False)


@combinations(2, lengths=[(0, 3), (2, 4, 0)], written=["rate", "state"])
def test_what_the_last_batch_writes_is_there_in_the_next_epoch(ranks_of, lengths, written):
    body = [Act(PASS), Act(STEP), Act(CLEAR), Act(PASS), Act(written)]
    check(ranks_of, body, lengths, "zero", momentum=0.9)


@combinations(
    3, lengths=[(2, 1), (1, 3), (4, 2, 1)], written=["rate", "decay"], at=["begin", "end"]
)
def test_a_plain_optimizer_that_missed_steps_has_the_options_of_the_others(
    ranks_of, lengths, written, at
):
    body = [Act(PASS), Act(STEP), Act(CLEAR)]
    body.insert(0 if at == "begin" else 3, Act(written))
    check(ranks_of, body, lengths, "plain", epochs=3, refused=())


@combinations(1, lengths=[(5, 4), (4, 2, 5)], written=["weights, replaced", "state"])
def test_where_ranks_run_on_after_the_last_step_the_one_with_most_batches_counts(
    ranks_of, lengths, written
):
    # Each third batch steps. With (5, 4) the fifth one alone drops the state.
    write = Act(written, 0, 5, 4) if written == "state" else Act(written)
    body = [Act(PASS), Act(STEP, 0, 3, 2), Act(CLEAR, 0, 3, 2), write]
    check(ranks_of, body, lengths, "zero", momentum=0.9, refused=())


@combinations(1, lengths=[(0, 3), (0, 2, 4)], clears=[[], ["module"], CLEARS[:2]])
def test_a_step_may_come_before_the_first_pass_of_an_epoch(ranks_of, lengths, clears):
    for every in (1, 2):
        body = [*(Act(clear, 0, every) for clear in clears), Act(STEP), Act(PASS)]
        check(ranks_of, body, lengths, "zero", epochs=3, momentum=0.9, refused=())


@combinations(1, lengths=[(0, 3), (3, 0, 1)], clear=CLEARS)
def test_what_no_sync_leaves_on_the_last_rank_is_cleared_in_the_next_epoch(
    ranks_of, lengths, clear
):
    body = [Act(clear), Act(QUIET), Act(PASS, 0, 3), Act(STEP, 0, 3), Act(PASS, 0, 2, 1)]
    check(ranks_of, body, lengths, "plain", epochs=3, refused=())


@combinations(
    2,
    lengths=[(2, 1), (1, 3), (1, 2, 3)],
    clear=CLEARS[:3],
    part=["one layer", "one layer, to zeros"],
    every=[1, 2],
)
def test_a_part_that_is_cleared_in_another_way_than_the_rest_changes_no_frozen_parameter(
    ranks_of, lengths, clear, part, every
):
    # What is frozen when it is cleared to zeros, is stepped by them, and else not.
    step = [Act(PASS, 0, every), Act(STEP, 0, every)]
    for body in (
        [Act(clear), Act(PASS), Act(part), Act("freeze the first"), *step[every == 1 :]],
        [Act(clear, 0, every), Act(PASS), Act(part), Act("freeze the first", 0, every), *step],
    ):
        check(ranks_of, body, lengths, "zero", epochs=3, momentum=0.9)


@combinations(2, lengths=[(2, 1), (1, 2)], acts=["by hand, zeros in .data", QUIET])
def test_a_batch_without_a_sent_pass_may_change_what_ranks_without_data_hold(
    ranks_of, lengths, acts
):
    body = [Act(acts, 0, 2, 1), Act(PASS, 0, 2), Act(STEP, 0, 2)]
    check(ranks_of, body, lengths, "plain", refused=REFUSED[:1] if acts == QUIET else ())


def test_means_that_only_the_last_ranks_have_added_to_are_refused_in_the_next_epoch(
    ranks_of,
):
    body = [Act("optimizer, to zeros", 0, 2, 1), Act(PASS), Act(STEP), Act(QUIET)]
    for epochs in (1, 2):
        check(ranks_of, body, (1, 2), "plain", epochs=epochs, refused=REFUSED[: epochs - 1])


@st.composite
def acts(draw: st.DrawFn, kinds: Sequence[str], models: Sequence[int], most: int) -> list[Act]:
    every = st.sampled_from([1, 1, 1, 2, 3])
    act = st.builds(Act, st.sampled_from(kinds), st.sampled_from(models), every, st.integers(0, 2))
    return draw(st.lists(act, max_size=most))


LENGTHS = st.lists(st.integers(0, 5), min_size=2, max_size=3).filter(any).map(tuple)


@given(acts([PASS, PASS, QUIET, STEP, STEP, *CLEARS], [0], 8), LENGTHS, st.integers(1, 3))
def test_any_body_over_any_lengths_is_exact_where_the_optimizer_is_sharded(
    ranks_of, body, lengths, epochs
):
    check(ranks_of, body, lengths, "zero", epochs=epochs, momentum=0.9)


@given(acts([PASS, PASS, QUIET, *CLEARS], [0], 6), LENGTHS, st.integers(1, 3), st.integers(1, 3))
def test_any_body_over_any_lengths_is_exact_with_a_plain_optimizer(
    ranks_of, body, lengths, epochs, every
):
    # A step in a batch without a pass is seen by no other rank.
    body = [*body, Act(PASS, 0, every), Act(STEP, 0, every), *body[:1]]
    check(ranks_of, body, lengths, "plain", epochs=epochs)


@given(
    acts([QUIET, *CLEARS], [0], 4),
    acts(CLEARS, [0], 2),
    st.none() | st.sampled_from(PLAIN_WRITES),
    LENGTHS,
    st.integers(1, 3),
)
def test_any_body_whose_plain_optimizer_is_stepped_along_is_exact_or_told(
    ranks_of, before, after, write, lengths, epochs
):
    """With momentum: a rank without data has to have the state of the others, too."""
    writes = [] if write is None else [Act(write)]
    body = [*before, Act(PASS), Act(STEP), *writes, *after]
    refused = (*REFUSED, *REFUSED_ALONG) if writes else REFUSED
    check(ranks_of, body, lengths, "along", epochs=epochs, momentum=0.9, refused=refused)
    if write is None:
        check(ranks_of, body, (3, 3), "plain", joins=False, epochs=epochs, momentum=0.9)


@given(
    acts([PASS, PASS, PASS, STEP, STEP, STEP, CLEAR, *WRITES], [0], 9),
    LENGTHS,
    st.integers(1, 2),
    st.booleans(),
)
def test_what_any_body_and_its_hooks_write_is_that_of_one_process(
    ranks_of, body, lengths, epochs, hooks
):
    # A Join in which no rank takes a step does not know which of them has had data.
    body = [Act(PASS), Act(STEP), Act(CLEAR), *body]
    check(ranks_of, body, lengths, "zero", epochs=epochs, momentum=0.9, hooks=hooks)


PARTS = [PASS, *PARTIAL_PASSES, *PARTIAL_PASSES, *PARTIAL_CLEARS, *FREEZES]


@given(acts([*PARTS, *[STEP] * 3, *CLEARS[:2], "decay", "max_norm"], [0], 8), LENGTHS)
def test_any_use_of_parts_of_a_model_is_exact_where_the_optimizer_is_sharded(
    ranks_of, body, lengths
):
    # A change of what is frozen in a batch without a pass is known to no other rank.
    check(ranks_of, [Act(PARTIAL_PASSES[0]), *body], lengths, "zero", epochs=3, momentum=0.9)


@given(
    acts([*PARTS, CLEAR, *EDITS, "rate", "decay"], [0], 6),
    # A rank without any batch has an optimizer that nobody has seen.
    st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple),
    st.integers(1, 3),
)
def test_any_use_of_parts_of_a_model_is_exact_with_a_plain_optimizer(
    ranks_of, body, lengths, every
):
    # A batch without a pass tells no other rank what it has changed.
    body = [Act(PARTIAL_PASSES[1]), *body, Act(STEP, 0, every)]
    check(ranks_of, body, lengths, "plain", epochs=3)


@st.composite
def two_models(draw: st.DrawFn) -> list[Act]:
    """Each model is stepped once in a batch, in the order of the list."""
    between = acts([PASS, QUIET, BOTH, *CLEARS[:3]], [0, 1], 3)
    last = [Act(draw(st.sampled_from([PASS, BOTH])), model) for model in (0, 1)]
    return [
        *(*draw(between), last[0], Act(STEP)),
        *(*draw(between), last[1], Act(STEP, 1)),
        *draw(between),
    ]


@given(two_models(), LENGTHS, st.integers(1, 2))
def test_any_body_of_two_models_is_exact(ranks_of, body, lengths, epochs):
    check(ranks_of, body, lengths, "zero", num_models=2, epochs=epochs)


MODELS_IN_ANY_ORDER: dict[str, list[Act]] = {
    "the second one first": [
        *(Act(CLEAR, 1), Act(PASS, 1), Act(STEP, 1)),
        *(Act(CLEAR), Act(BOTH), Act(STEP)),
    ],
    "in turn": [
        *(Act(CLEAR, 0, 2), Act(PASS, 0, 2), Act(STEP, 0, 2)),
        *(Act(CLEAR, 1, 2, 1), Act(PASS, 1, 2, 1), Act(STEP, 1, 2, 1)),
    ],
    "the second one three times": [
        *[Act(CLEAR, 1), Act(PASS, 1), Act(STEP, 1)] * 3,
        *(Act(CLEAR), Act(BOTH), Act(STEP)),
    ],
}


@combinations(2, lengths=[(5, 3), (0, 3)], body=MODELS_IN_ANY_ORDER, way=["zero", "plain"])
def test_where_a_group_is_followed_models_come_in_any_order(ranks_of, lengths, body, way):
    check(ranks_of, MODELS_IN_ANY_ORDER[body], lengths, way, num_models=2, follows=True)


@given(
    acts(
        [PASS, PASS, BOTH, STEP, STEP, STEP, *CLEARS[:3], *PARTIAL_PASSES, *FREEZES, COLLECTIVE],
        [0, 1],
        8,
    ),
    LENGTHS,
    st.sampled_from(["zero", "plain"]),
)
def test_any_body_of_two_models_is_exact_where_a_group_is_followed(ranks_of, body, lengths, way):
    # In each batch some pass begins it, and shows the steps before to the other ranks.
    body = [Act(PASS), Act(PASS, 1), *body]
    check(ranks_of, body, lengths, way, num_models=2, follows=True)
