"""What the ranks tell each other once per step, in a vector that one sum shares with all ranks.

Each rank writes its vote: whether it took this step with data of its own, whether it may take
another step, whether it was asked to stop, and which parameters got a gradient. A rank that has run
out of data says whether it still holds gradients of its last batches (leftovers.py). If the run
continues after a death, the vote of a step also says how many samples the rank has taken
(dealer.py). All ranks read the same agreement from the sum.

The vote travels with a collective that a step needs anyway (the last gradient bucket, or ZeRO's
ballot), in float32 or wider: bfloat16 cannot count beyond 256.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from chorusline.collectives.contract.errors import name_ranks
from chorusline.collectives.group import Group

from .leftovers import HANDS_IN_NOW, LeftoverVote, read_leftovers

MAX_ITERATIONS = 4
"""The most iterations over shards that a rank can be in at once: the vote of a step whose samples
are counted has one cursor for each."""


class Note(enum.IntEnum):
    """What a rank notes, most of it about its backward passes; all ranks learn how many note it."""

    CONTINUES = 0
    """The pass adds to the mean of earlier passes of the same step."""
    MIXES = 1
    """The gradients of this rank were added to a mean before they were reduced."""
    UNSTEPPED = 2
    """No optimizer has stepped since the pass before."""
    HAS_MORE = 3
    """The gradients have changed since they were sent, so all ranks send theirs again."""
    SEVERAL = 4
    """The step has several passes; or, where no rank has data, a pass has had no step."""
    ADMITS = 5
    """A worker may join after this step (runtime/recovery/arrivals.py)."""
    BEGINS_INSIDE = 6
    """It MIXES, since its pass did not begin at an output of the model."""
    REPLACED = 7
    """It MIXES, since the program has set `.grad` to tensors of its own."""
    REFUSES = 8
    """It cannot take the sharded step, and has come to the vote to say so."""
    CHANGES_STATE = 9
    """The program has dropped or loaded state of the sharded optimizer since the last step."""
    PERTURBS = 10
    """It has changed the parameters between the passes of a sharded step (held_gradients.py)."""
    ZEROES = 11
    """It has data, and has cleared gradients to zeros the last time."""
    COMPARES = 12
    """It has data, and wants the ranks with data to compare their parameters in this step."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """One step as all ranks know it.

    live: ranks that took the step with data, ascending.
    may_continue: ranks that may take another step, ascending.
    used: per parameter, whether any rank had a gradient for it.
    kept: per parameter, how many live ranks add this pass to the mean of an earlier one; in a
        sharded step, how many ranks that have just run out of data hold its gradient.
    weight: sum of the weights of the live ranks; 0 if no rank weighted its loss.
    stop: whether all ranks stop after this step, as some rank was asked to.
    cursors: by rank, how many samples it has taken of each iteration; empty if not counted.
    notes: by Note, how many ranks note it; empty where nobody asked.
    leftovers: by rank, what it says of them; empty where nobody asked.
    joins: by rank, the Join of the step, as the bits of `JoinEngine.vote_flags_of`; outside of one
        the number of the model or sharded optimizer, in the place of a joinable's.
    epochs: by rank, the epoch of `ctx.epochs` that it is in, counted from 1; 0: none.
    digests: by rank. Above 0: of the steps of plain optimizers since the vote before
        (local_steps.py), or of the texts among a sharded optimizer's options. Below 0: of the
        generators with which its first forward pass has drawn random numbers, in a first vote,
        which comes after no step. 0: not to be compared.
    samples: by rank, of some bits of a parameter after the last step of a plain optimizer
        (local_steps.py). 0: not to be compared.
    """

    live: tuple[int, ...]
    may_continue: tuple[int, ...]
    used: tuple[bool, ...]
    kept: tuple[int, ...] = ()
    weight: float = 0.0
    stop: bool = False
    cursors: tuple[tuple[int, ...], ...] = ()
    notes: tuple[int, ...] = ()
    leftovers: tuple[LeftoverVote, ...] = ()
    joins: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    digests: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()

    @property
    def num_contributing(self) -> int:
        """How many ranks contributed gradients: the live ones, and those with leftovers."""
        return sum(one.contributes for one in self.leftovers) or len(self.live)

    def says(self, note: Note) -> int:
        """How many ranks note it."""
        return self.notes[note] if self.notes else 0


NOTES_AT = 4
"""Where the notes are in a vote."""

_VOTES, _WEIGHT, _WEIGHING, _ASKING = range(NOTES_AT)
_HEAD = NOTES_AT + len(Note)
_OF_RANK = 6
"""What a rank says of its leftovers, its outlook, its digest, and its sample. The outlook is one
number, whose lowest bit says whether the rank may continue, the next eight its Join, and the rest
its epoch."""
_LOW = 1 << 23
"""A cursor travels as two numbers, since float32 counts only to 2^24."""


def vote_numel(num_ranks: int, num_parameters: int, num_cursors: int = 0) -> int:
    """The length of a vote: the number of votes, the weight, the number of weighing ranks and of
    ranks that ask for a stop; the notes; leftovers, outlook, digest and sample per rank; used per
    parameter; two numbers per cursor and rank."""
    return _HEAD + _OF_RANK * num_ranks + num_parameters + 2 * num_cursors * num_ranks


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank says about a step.

    leftovers: whether this rank took the step with data, or hands in leftovers; in a second vote on
        a step HANDS_IN_NOW or ABSENT.
    has_next: whether this rank may take another step.
    used: per parameter, whether this rank has a gradient for it.
    weight: of this rank's loss; None if ranks do not weigh.
    stop: whether this rank was asked to stop.
    holds_cleared: whether it contributes nothing, and holds the used ones as the others have
        cleared them: optimizers step by zeros, and not by None.
    kept: the parameters that this rank counts among the `kept` of an Agreement.
    cursors: samples that the rank has taken of each iteration that it is in (dealer.py); each below
        2^47.
    notes: about the backward passes of the step.
    join, digest, sample: of this rank, as in an Agreement; below 2^8, 2^24 and 2^24.
    epoch: of this rank, as in an Agreement; of a larger one the lowest 15 bits travel.
    """

    leftovers: LeftoverVote | tuple[float, float, float]
    has_next: bool
    used: Sequence[bool]
    weight: float | None
    stop: bool
    holds_cleared: bool = False
    kept: Collection[int] = ()
    cursors: Sequence[int] = ()
    notes: Sequence[Note] = ()
    join: int = 0
    epoch: int = 0
    digest: int = 0
    sample: int = 0

    def numbers(self, rank: int, num_ranks: int, num_cursors: int = 0) -> list[float]:
        """vote_numel numbers. They are made on the host, and go up in one copy. num_cursors: where
        this rank has fewer cursors, the rest is 0."""
        leftovers, used = self.leftovers, self.used
        first = vote_numel(num_ranks, len(used))
        vote = [0.0] * vote_numel(num_ranks, len(used), num_cursors)
        vote[_VOTES] = 1.0
        own_at = _HEAD + 3 * rank
        if isinstance(leftovers, LeftoverVote):
            # Zeros are used too: an optimizer steps by them, and not by None.
            vote[own_at : own_at + 3] = leftovers.numbers
            hands_in = leftovers.is_live or leftovers.hands_in
        else:
            vote[own_at : own_at + 3], hands_in = leftovers, leftovers == HANDS_IN_NOW
        # Three counts of ranks are in one number, each smaller than `one_more`.
        one_more, uses = num_ranks + 1, slice(_HEAD + _OF_RANK * num_ranks, first)
        if self.holds_cleared:
            vote[uses] = [float(is_used * one_more**2) for is_used in used]
        if hands_in:  # A rank without data or leftovers uses no parameter, and weighs nothing.
            vote[uses] = map(float, used)
            # Beside the weights their number: a sum does not say whether all have given one.
            if self.weight is not None:
                vote[_WEIGHT] = self.weight
                vote[_WEIGHING] = 1.0
        for number in self.kept:
            vote[uses.start + number] += one_more
        if self.stop:
            vote[_ASKING] = 1.0
        for note in self.notes:
            vote[NOTES_AT + note] = 1.0
        outlook = float(self.has_next + 2 * self.join + 512 * (self.epoch % (1 << 15)))
        beside = slice(_HEAD + 3 * num_ranks + rank, _HEAD + _OF_RANK * num_ranks, num_ranks)
        vote[beside] = outlook, float(self.digest), float(self.sample)
        if self.cursors:
            halves = [float(half) for cursor in self.cursors for half in divmod(cursor, _LOW)]
            at = first + 2 * rank * num_cursors
            vote[at : at + len(halves)] = halves
        return vote


def digest_of(compared: str | bytes) -> int:
    """Of what ranks compare, for a vote: above 0, and small enough for a vote in float32."""
    given = compared.encode() if isinstance(compared, str) else compared
    return zlib.crc32(given) % ((1 << 24) - 1) + 1


def leftovers_in(total: Sequence[float], num_ranks: int) -> tuple[LeftoverVote, ...]:
    """By rank, what it says of its leftovers. total: vote_numel numbers, the sum of all votes."""
    return read_leftovers(total[_HEAD : _HEAD + 3 * num_ranks])


def joins_in(total: Sequence[float], num_ranks: int) -> list[int]:
    """By rank, its Join, as in an Agreement. total: as above."""
    return [int(outlook) // 2 % 256 for outlook in _outlooks(total[_HEAD:], num_ranks)]


def _outlooks(values: Sequence[float], num_ranks: int) -> Sequence[float]:
    return values[3 * num_ranks : 4 * num_ranks]


def with_leftovers(total: Sequence[float], leftovers: Sequence[float]) -> list[float]:
    """The sum of the votes on a step whose leftovers came after it, in a vote of their
    own (HANDS_IN_NOW). Both are sums over all ranks."""
    both = [one + other for one, other in zip(total, leftovers, strict=True)]
    # Each vote was counted once in each sum.
    both[_VOTES] = total[_VOTES]
    return both


def check_votes(total: Sequence[float], group: Group) -> None:
    """Raise the error that ended the generation unless `total` has the vote of every rank.

    A collective that was stopped leaves anything in its output, and zeros first of all: its count
    of votes is not the number of ranks. The transports rule this out where they can; if one could
    not, this rank ends the generation, and the step is repeated or given up like any lost one.
    """
    # It counts itself, so that zeros are no agreement.
    if total[_VOTES] == group.size:
        return
    group.abort(
        f"the agreement on a step has {total[_VOTES]:g} votes of {group.size} ranks, although its "
        "sum went through: a collective was stopped, or another program wrote to its memory"
    )
    error = group.failure()
    assert error is not None
    raise error


def read_agreement(total: Sequence[float], num_ranks: int, num_cursors: int = 0) -> Agreement:
    """The agreement. total: vote_numel numbers, the sum of all votes.

    Raises RuntimeError, on all ranks alike, if some live ranks weighted their loss and others did
    not, or all weights are zero."""
    _, weight, num_weighing, num_asking = total[:NOTES_AT]
    values = total[_HEAD:]
    leftovers = read_leftovers(values[: 3 * num_ranks])
    live = tuple(rank for rank, one in enumerate(leftovers) if one.is_live)
    num_contributing = sum(one.contributes for one in leftovers)
    # At the end of a Join no rank is live: nothing is stepped, so there is nothing to weigh.
    if live and num_weighing not in (0, num_contributing):
        raise RuntimeError(
            f"{num_weighing:g} of the ranks {list(live)} weighted their loss for this step; either "
            "all of them must call model.weigh(loss, weight), or none"
        )
    if live and num_weighing and not weight > 0:
        raise RuntimeError(
            f"the weights of {name_ranks(live)} add up to {weight:g}; the sum must be above 0. "
            "Skip a batch whose samples all have weight 0, before its forward pass"
        )
    numbers = values[len(values) - 2 * num_cursors * num_ranks :] if num_cursors else []
    halves = zip(numbers[::2], numbers[1::2], strict=True)
    outlooks = [*map(int, _outlooks(values, num_ranks))]
    taken = [int(high) * _LOW + int(low) for high, low in halves]
    # Counts of ranks: those that have used a parameter, that keep a mean, and that hold it cleared.
    one_more = num_ranks + 1
    notes = tuple(map(int, total[NOTES_AT:_HEAD]))
    uses = [*map(int, values[_OF_RANK * num_ranks : len(values) - len(numbers)])]
    return Agreement(
        live=live,
        may_continue=tuple(rank for rank, outlook in enumerate(outlooks) if outlook % 2),
        used=tuple(
            use % one_more > 0 or (notes[Note.ZEROES] > 0 and use >= one_more**2) for use in uses
        ),
        kept=tuple(use // one_more % one_more for use in uses),
        weight=weight if live else 0.0,
        leftovers=leftovers,
        joins=tuple(joins_in(total, num_ranks)),
        epochs=tuple(outlook // 512 for outlook in outlooks),
        digests=tuple(map(int, values[4 * num_ranks : 5 * num_ranks])),
        samples=tuple(map(int, values[5 * num_ranks : _OF_RANK * num_ranks])),
        stop=num_asking > 0,
        notes=notes,
        cursors=tuple(
            tuple(taken[at : at + num_cursors]) for at in range(0, len(taken), num_cursors or 1)
        ),
    )
