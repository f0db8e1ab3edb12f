"""Leftovers: gradients that a rank still holds when it has run out of data.

They belong to the steps that the others take, as the gradients of the others from the same batches
do: until these are cleared. A body is the same on all ranks, so what a rank has done since the last
step is the beginning of what the others do until the next one. If since then the ranks with data
have called `zero_grad` more often, or have cleared their gradients after as many passes as this
rank has run or more, they did it after the batches of this rank, and its leftovers are cleared too.
Otherwise the leftovers are part of the step. A change of some gradients only is an *edit*, of which
other ranks cannot know what it was.

At the end of a Join no rank has data, and nothing is stepped. There the same rule says what each
rank continues to hold, as it would without a Join.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chorusline.collectives.contract.errors import name_ranks

_MOST_CALLS = 1 << 10  # A vote in float32 counts to 2^24.
MOST_EDITS = (1 << 12) - 2


@dataclass(frozen=True, slots=True)
class LeftoverVote:
    """The part of a rank's vote about the gradients that it holds: since the last step, or since
    the last pass if each pass has a vote.

    is_live: it has data, and takes the step.
    calls: the number of calls of `zero_grad`.
    passes: how many passes it has run, those in no_sync included.
    cleared_at: how many of them it had run when it last cleared all gradients; -1: it has not.
    edits: a digest of the changes of gradients since it last cleared them; 0: none. MOST_EDITS:
        others have made some at the end of an earlier loop, and this rank has not.
    holds: it has no data, and holds gradients.
    hands_in: it holds such gradients, and has contributed them to this sum.
    is_blank: what it hands in are zeros that stand for gradients of other ranks: no loss of its
        own, and no weight of one, is in them.
    """

    is_live: bool
    calls: int = 0
    passes: int = 0
    cleared_at: int = -1
    edits: int = 0
    holds: bool = False
    hands_in: bool = False
    is_blank: bool = False

    @property
    def contributes(self) -> bool:
        return self.is_live or (self.hands_in and not self.is_blank)

    @property
    def numbers(self) -> tuple[float, float, float]:
        """As three numbers, the first positive for a live rank and negative for another one."""
        calls = min(self.calls, _MOST_CALLS - 1)
        # Above 0 for all counts, so that the sign can say whether the rank is live.
        # A rank that hands in holds, which leaves a combination of these two for blank ones.
        flags = 1 if self.is_blank and self.hands_in else self.holds * 2 + self.hands_in
        packed = 1 + (calls * (MOST_EDITS + 1) + self.edits) * 4 + flags
        return (packed if self.is_live else -packed), self.passes, self.cleared_at

    @property
    def is_cleared(self) -> bool:
        """Whether it has cleared all gradients after its last pass."""
        return self.cleared_at >= self.passes

    def has_cleared_since(self, passes: int, calls: int) -> bool:
        """Whether it has cleared its gradients after another rank had run so many passes, with so
        many calls of `zero_grad`."""
        return self.calls > calls or self.cleared_at >= passes


HANDS_IN_NOW = (-1.0, 0.0, 0.0)
"""Added to the numbers of a rank that holds leftovers: now it has handed them in."""
ABSENT = (0.0, 0.0, 0.0)
"""Added to those of other ranks."""


def read_leftovers(numbers: Sequence[float]) -> tuple[LeftoverVote, ...]:
    """numbers: three for each rank."""
    return tuple(_read(*numbers[at : at + 3]) for at in range(0, len(numbers), 3))


def _read(number: float, passes: float, cleared_at: float) -> LeftoverVote:
    counts, flags = divmod(max(int(abs(number)) - 1, 0), 4)
    calls, edits = divmod(counts, MOST_EDITS + 1)
    return LeftoverVote(
        is_live=number > 0,
        calls=calls,
        passes=int(passes),
        cleared_at=int(cleared_at),
        edits=edits,
        holds=flags > 0,
        hands_in=bool(flags & 1),
        is_blank=flags == 1,
    )


def newest_ranks(votes: Sequence[LeftoverVote]) -> tuple[int, ...]:
    """The ranks with data; where none has, those that ran the body most often since the last step,
    which know best what it has done. Empty where no rank has run a pass since."""
    if live := tuple(rank for rank, one in enumerate(votes) if one.is_live):
        return live
    most = max((one.passes for one in votes), default=0)
    return tuple(rank for rank, one in enumerate(votes) if one.passes == most > 0)


def belongs(votes: Sequence[LeftoverVote], rank: int) -> bool:
    """Whether what `rank`, which has no data, holds is not cleared yet: then it is part of the
    step, if some rank has data.

    Raises RuntimeError, on all ranks that ask, if the ranks with data do not say the same.
    """
    own = votes[rank]
    live = [number for number, one in enumerate(votes) if one.is_live]
    cleared = [
        number
        for number, one in enumerate(votes)
        if (one.is_live or not live) and one.has_cleared_since(own.passes, own.calls)
    ]
    if not live:  # The end of a Join: what each rank continues to hold.
        return not cleared
    # All have cleared theirs, so this rank would have cleared its own.
    if len(cleared) == len(live):
        return False
    if cleared:
        kept = [number for number in live if number not in cleared]
        raise RuntimeError(
            f"rank {rank} has run out of data, and still holds gradients of its batches. Since "
            f"its last batch, {name_ranks(cleared, 'has', 'have')} cleared the gradients, and "
            f"{name_ranks(kept, 'has', 'have')} not, so it is not known whether these gradients "
            "are part of the step. Call zero_grad() in the same places of the loop's body on all "
            "ranks"
        )
    edited = [number for number in live if votes[number].edits != own.edits]
    if edited:
        raise RuntimeError(_why_not_edited(rank, name_ranks(edited, "has", "have")))
    return True


def _why_not_edited(rank: int, who: str) -> str:
    return (
        f"{who} changed some gradients between two backward passes when rank {rank} had no data, "
        "and the same change cannot be made on a rank without data. Clear all gradients of the "
        "model (zero_grad()), or change them after the last pass of a step"
    )


def sends_again(votes: Sequence[LeftoverVote]) -> bool:
    """Whether some rank has handed in leftovers that do not belong to the step, or has not handed
    in those that do.

    Raises RuntimeError, on all ranks alike, as `belongs` does, also for what a rank that has data
    again has left in an earlier loop."""
    # No step is taken, so nothing is missing in it.
    if not any(one.is_live for one in votes):
        return False
    for rank, one in enumerate(votes):
        if one.is_live and one.edits == MOST_EDITS:
            raise RuntimeError(
                "in an epoch before this one, " + _why_not_edited(rank, "another rank has")
            )
    return any(
        one.holds and one.hands_in != belongs(votes, rank)
        for rank, one in enumerate(votes)
        if not one.is_live
    )
