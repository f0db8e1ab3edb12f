"""The ballot: the one small all-reduce by which all ranks agree on a sharded step.

A rank casts its vote when its own reduction is complete, so a rank that sees the result knows that
all ranks have finished theirs. The sum is taken in float64 and in rank order, so every rank reads
the same bits and makes the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chorusline.collectives.contract.errors import CollectiveMismatch
from chorusline.collectives.group import Group
from chorusline.collectives.operations.host_reads import device_numbers

from ..join.error_notes import IN_JOIN, check_same_joins
from ..process.agreement import (
    MAX_ITERATIONS,
    NOTES_AT,
    Agreement,
    Note,
    Vote,
    check_votes,
    joins_in,
    leftovers_in,
    read_agreement,
)
from ..process.leftovers import LeftoverVote, newest_ranks, sends_again
from ..process.option_numbers import entries, is_number, texts_of, told_apart
from .shards.exact_norm import total_of

_STEP, _STEP_SQUARED, _SQUARED_NORM, _PER_RANK = range(4)
_LOSS_SCALE, _NUM_SAMPLES = range(2)  # of each rank
_OPTIONS = _NUM_SAMPLES + MAX_ITERATIONS

_FARTHEST = 1 << 18
"""Steps travel modulo this: a float64 has the exact sum of their squares over 65,536 ranks."""

_STEPS = "Every rank must call step() equally often"
_BELONG_IN_JOIN = "ranks that may run out of data at different steps belong inside Join()"


@dataclass(frozen=True, slots=True)
class ShardedVote:
    """One rank's vote on a step of a sharded optimizer.

    step: number of the step.
    vote: as on any step.
    add_squared_norm: adds that of the rank's reduced shard to a tensor of shape (), in float64;
        None where nobody needs the norm.
    exact_norm: the same as exact_norm.partial_sum, where its bits must not depend on the cuts.
    loss_scale: of the rank's losses, or 0.0; on a GPU the host does not know it.
    options: the optimizer's numeric options.
    num_samples: lengths of the datasets that the rank iterates, the outermost first; 0: unknown.
    digests: of what this rank keeps (digest_checks.py); None where they are not compared.
    """

    step: int
    vote: Vote
    add_squared_norm: Callable[[torch.Tensor], object] | None
    loss_scale: torch.Tensor | float
    options: Sequence[float]
    num_samples: Sequence[int] = ()
    exact_norm: Sequence[float] = ()
    digests: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result that all ranks read. squared_norm: of the whole summed gradient. loss_scales: of
    the live ranks, 0.0 if they do not scale. options, digests: by rank."""

    agreement: Agreement
    squared_norm: float
    loss_scales: tuple[float, ...]
    options: tuple[tuple[float, ...], ...]
    digests: tuple[tuple[float, ...], ...]


class Ballot:
    """One optimizer's vector of float64: three sums over all ranks; for each rank its loss scale,
    its numbers of samples, its options and its digests; and the agreement.

    The vector is made on the host and goes up in one copy. On a GPU a ballot has at most four
    operations: that copy, the loss scale, the all-reduce, and the copy down; digests are a fifth.
    """

    def __init__(
        self, group: Group, num_options: int, *, counts_samples: bool, num_digests: int = 0
    ) -> None:
        """counts_samples: votes have cursors, since the run continues when a rank is lost."""
        self._group = group
        self.num_options = num_options
        self._num_cursors = MAX_ITERATIONS if counts_samples else 0
        self._digests_at = _OPTIONS + num_options
        self._own_numel = self._digests_at + num_digests
        self._vote_at = _PER_RANK + group.size * self._own_numel
        self._numel = self._vote_at  # Without the exact norm after the vote; see `hold`.

    def move_to(self, group: Group) -> None:
        self._group = group

    def hold(self, sharded: ShardedVote) -> tuple[float, ...]:
        """Cast this rank's vote; returns the sums, which `read` takes.

        Raises CollectiveMismatch, on all ranks, if the ranks are not at the same step, or iterate
        datasets of different lengths.
        """
        group = self._group
        scale = sharded.loss_scale
        own_at = _PER_RANK + group.rank * self._own_numel
        numbers = [0.0] * self._vote_at
        step = sharded.step % _FARTHEST
        numbers[_STEP], numbers[_STEP_SQUARED] = step, step**2
        numbers[own_at : own_at + self._digests_at] = [
            0.0 if isinstance(scale, torch.Tensor) else scale,
            *[*sharded.num_samples[:MAX_ITERATIONS], *[0] * MAX_ITERATIONS][:MAX_ITERATIONS],
            *sharded.options,
        ]
        numbers += sharded.vote.numbers(group.rank, group.size, self._num_cursors)
        self._numel = len(numbers)
        numbers += sharded.exact_norm
        vector = device_numbers(numbers, torch.float64, group.device)
        # Added where the gradients are, as is a scale on the GPU: the host would wait to read them.
        if sharded.add_squared_norm is not None:
            sharded.add_squared_norm(vector[_SQUARED_NORM])
        if isinstance(scale, torch.Tensor):
            vector[own_at + _LOSS_SCALE] = scale
        if sharded.digests is not None:
            vector[own_at + self._digests_at : own_at + self._own_numel] = sharded.digests
        seen: tuple[float, ...] = tuple(group.all_reduce_and_read(vector).tolist())
        # First of all: of a sum that was stopped nothing else may be read.
        check_votes(seen[self._vote_at :], group)
        check_same_joins("step()", joins_in(seen[self._vote_at :], group.size), group.generation)
        # The variance of the steps is zero if and only if all are equal. As floats, the two sides
        # would be rounded, and differ.
        if group.size * int(seen[_STEP_SQUARED]) != int(seen[_STEP]) ** 2:
            raise CollectiveMismatch(
                "step()",
                group.generation,
                list(range(group.size)),
                f"the ranks have taken different numbers of steps (this rank: {sharded.step})",
                f"{_STEPS}." if sharded.vote.join & IN_JOIN else f"{_STEPS}; {_BELONG_IN_JOIN}.",
            )
        self._check_lengths(seen)
        return seen

    def _check_lengths(self, seen: Sequence[float]) -> None:
        """Raise CollectiveMismatch if dataset lengths differ: samples would be lost or doubled."""
        # A rank that has run out of data is not in the iterations inside the loop's body.
        for place in range(_NUM_SAMPLES, _NUM_SAMPLES + MAX_ITERATIONS):
            own = enumerate(self._own(seen))
            lengths = {rank: int(numbers[place]) for rank, numbers in own if numbers[place]}
            # Zeros are left out: a stream has no length, and a rank without data no iteration.
            if len(set(lengths.values())) < 2:
                continue
            by_rank = ", ".join(f"rank {rank}: {length}" for rank, length in lengths.items())
            raise CollectiveMismatch(
                "step()",
                self._group.generation,
                list(lengths),
                f"the dataset has different numbers of samples on the ranks ({by_rank}), so "
                "ctx.shard gave some of them to no rank or to several",
                "Every rank must pass the same dataset to ctx.shard, even when it changes "
                "between two epochs.",
            )

    def says(self, note: Note, seen: Sequence[float]) -> bool:
        """Whether some rank notes it."""
        return seen[self._vote_at + NOTES_AT + note] > 0

    def sends_again(self, seen: Sequence[float]) -> tuple[LeftoverVote, ...] | None:
        """Whether the gradients of some rank have changed since they were sent, or those of a rank
        without data were taken for what they are not: then the leftover votes."""
        votes = self._leftovers(seen)
        is_live = any(one.is_live for one in votes)
        has_more = is_live and self.says(Note.HAS_MORE, seen)
        # Asked first: it raises the same error on all ranks.
        return votes if sends_again(votes) or has_more else None

    def live(self, seen: Sequence[float]) -> tuple[int, ...]:
        """The ranks with data."""
        return tuple(rank for rank, one in enumerate(self._leftovers(seen)) if one.is_live)

    def newest(self, seen: Sequence[float]) -> tuple[int, ...]:
        """The ranks with data, or those that have run the body most often since the last step."""
        return newest_ranks(self._leftovers(seen))

    def _leftovers(self, seen: Sequence[float]) -> tuple[LeftoverVote, ...]:
        return leftovers_in(seen[self._vote_at :], self._group.size)

    def max_norms(self, seen: Sequence[float]) -> list[tuple[float, bool]]:
        """By rank, its max_norm, and whether it has data."""
        votes = self._leftovers(seen)
        own = zip(self._own(seen), votes, strict=True)
        place = self._digests_at - len(OF_THE_STEP)
        return [(numbers[place], one.is_live) for numbers, one in own]

    def read(self, seen: Sequence[float]) -> Outcome:
        """Decode the sums, whether this rank took part in the all-reduce or received them."""
        vote, exact = seen[self._vote_at : self._numel], seen[self._numel :]
        agreement = read_agreement(vote, self._group.size, self._num_cursors)
        own = self._own(seen)
        return Outcome(
            agreement,
            total_of(exact) if exact else seen[_SQUARED_NORM],
            tuple(own[rank][_LOSS_SCALE] for rank in agreement.live),
            tuple(tuple(numbers[_OPTIONS : self._digests_at]) for numbers in own),
            self.digests(seen),
        )

    def digests(self, seen: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """By rank, the digests of its vote."""
        return tuple(tuple(numbers[self._digests_at :]) for numbers in self._own(seen))

    def _own(self, seen: Sequence[float]) -> list[Sequence[float]]:
        """By rank, the numbers that are its own."""
        places = range(_PER_RANK, self._vote_at, self._own_numel)
        return [seen[at : at + self._own_numel] for at in places]


GROWTH = ("growth_factor", "backoff_factor", "growth_interval")
"""Options of the GradScaler; 0 stands for none."""
OF_THE_STEP = ("max_norm", *GROWTH)
"""The last of the numbers that travel; 0 stands for None."""


def labels_of(groups: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """For each of the `numbers_of`, the option that it is of, as messages name it."""
    return [
        f"{name} of parameter group {number}" if len(groups) > 1 else name
        for number, options in enumerate(groups)
        for name in names
        for entry in entries(options.get(name))
        if is_number(entry)
    ]


def check_same_texts(
    agreement: Agreement, groups: Sequence[dict[str, Any]], names: Sequence[str], group: Group
) -> None:
    """Raise CollectiveMismatch, on all ranks, if ranks would step with different texts. They do not
    travel, so those of a rank without data are compared as well. groups, names: of the options."""
    digests = {rank: digest for rank, digest in enumerate(agreement.digests) if digest > 0}
    given = [digests[rank] for rank in agreement.live if rank in digests]
    different = [rank for rank, digest in digests.items() if given and digest != given[-1]]
    if different:
        raise CollectiveMismatch(
            "step()",
            group.generation,
            different,
            "options of the optimizer that are texts or None differ, so each rank would step its "
            f"shard with a different value; on rank {group.rank} they are "
            f"{', '.join(texts_of(groups, names))}",
            "Every rank must set the same options. Texts do not travel to a rank that has run out "
            "of data: set them in a function that Join(..., step_along=[function]) lists, and "
            "call it after the step.",
        )


def check_same_options(
    outcome: Outcome,
    groups: Sequence[dict[str, Any]],
    names: Sequence[str],
    generation: int,
    *,
    in_steps: bool,
) -> None:
    """Raise CollectiveMismatch, on all ranks, if live ranks step with different numbers. A rank
    votes NaN for what it cannot count. in_steps: the step is one of `ctx.steps`."""
    live = outcome.agreement.live
    # As in nearly every step: equal as they are, without a look at each.
    if len({outcome.options[rank] for rank in live}) < 2:
        return
    for number, label in enumerate([*labels_of(groups, names), *OF_THE_STEP]):
        by_rank = {rank: outcome.options[rank][number] for rank in live}
        # A rank without a GradScaler is told so with the scales (loss_scale.py).
        of_scale = label in GROWTH
        given = {r: v for r, v in by_rank.items() if not math.isnan(v) and (v or not of_scale)}
        different = [rank for rank, value in given.items() if value != next(iter(given.values()))]
        # The first one that differs is enough for the text; the others often follow from it.
        if different:
            is_of_step = label in OF_THE_STEP
            shown = told_apart([*given.values()])
            each = ", ".join(
                f"{text if value or not is_of_step else None} on rank {rank}"
                for text, (rank, value) in zip(shown, given.items(), strict=True)
            )
            effect = (
                "so the loss scales of the ranks would become different"
                if of_scale
                else "so each rank would step its shard with a different value"
            )
            raise CollectiveMismatch(
                "step()",
                generation,
                different,
                f"{label} is {each}, {effect}",
                "Every rank must set the same options. "
                + (
                    "A worker that comes later takes over what is registered, such as schedules "
                    'and GradScalers: ctx.register("schedule", schedule).'
                    if in_steps
                    else "A rank that has run out of data does not run the loop's body: list a "
                    "schedule in Join(..., step_along=[schedule]), and one that the body steps "
                    "with an argument as a function that the body calls, too."
                ),
            )
