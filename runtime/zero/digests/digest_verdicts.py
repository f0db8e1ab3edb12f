"""Which of several copies are wrong, by their digests: a decision without tensors. Pure.

The copies of one thing (the state of a shard on its owner and on its replicas; the parameters on
all ranks) must have the same digest. A copy also knows whether it is what its rank wrote last.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class CopyState(enum.IntEnum):
    """What has become of a copy since its rank wrote it."""

    UNKNOWN = 0
    """Nobody has noted what was written: a first step, another group, a loaded state."""
    STEADY = 1
    """It has the bits that its rank wrote."""
    CHANGED = 2
    """It has other bits."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One rank's copy of a thing."""

    rank: int
    digest: int
    rest: CopyState = CopyState.UNKNOWN


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one thing. sources: by rank with a wrong copy, a rank with the right one. undecided: the
    ranks that disagree, if nothing tells which are right."""

    sources: Mapping[int, int] = field(default_factory=dict)
    undecided: tuple[int, ...] = ()

    @property
    def is_fine(self) -> bool:
        return not self.sources and not self.undecided


FINE = Verdict()


def judge(copies: Sequence[Copy]) -> Verdict:
    """Which copies of one thing are wrong.

    1. Equal copies are right, whatever has become of them: a program may have changed all.
    2. If copies that are as they were written agree, they are right, and all others wrong: memory
       has changed where nobody wrote.
    3. Otherwise a rank has written something else than another, and more than half of the copies
       decide. Two copies that disagree leave it open.

    A single copy that has changed is wrong, and has no source.
    """
    if len({copy.digest for copy in copies}) == 1:  # 1
        is_lone = len(copies) == 1 and copies[0].rest is CopyState.CHANGED
        return Verdict(undecided=(copies[0].rank,)) if is_lone else FINE
    steady = {copy.digest for copy in copies if copy.rest is CopyState.STEADY}
    if len(steady) == 1:  # 2
        return _all_but(steady.pop(), copies)
    [(digest, count)] = Counter(copy.digest for copy in copies).most_common(1)
    if 2 * count > len(copies):  # 3
        return _all_but(digest, copies)
    return Verdict(undecided=tuple(copy.rank for copy in copies))


def _all_but(digest: int, copies: Sequence[Copy]) -> Verdict:
    source = min(copy.rank for copy in copies if copy.digest == digest)
    return Verdict({copy.rank: source for copy in copies if copy.digest != digest})


@dataclass(frozen=True, slots=True)
class Kept:
    """One rank's digests of one shard, its own or a replica.

    state: of the optimizer's state, and what has become of it. gradient: of the reduced gradient.
    written: of the parameters, as this rank's last update left them; None: it noted none.
    """

    state: int
    rest: CopyState
    gradient: int
    written: int | None


@dataclass(frozen=True, slots=True)
class Digests:
    """One rank's digests in a ballot.

    parameters: of all parameters. kept: by distance to the owner: its own shard, then replicas.
    """

    parameters: int
    kept: tuple[Kept, ...]

    @classmethod
    def read(cls, votes: Sequence[float]) -> Digests:
        """From `numel` numbers as `as_votes` makes them."""
        parameters, is_noted, *numbers = (
            int(low) % _HALF + (int(high) % _HALF << 32)
            for low, high in zip(votes[::2], votes[1::2], strict=True)
        )
        kept = []
        for at in range(0, len(numbers), _PER_SHARD):
            state, rest, gradient, written = numbers[at : at + _PER_SHARD]
            kept.append(Kept(state, CopyState(rest), gradient, written if is_noted else None))
        return cls(parameters, tuple(kept))

    @staticmethod
    def numel(num_copies: int) -> int:
        return 2 * (2 + _PER_SHARD * num_copies)


_PER_SHARD = 4
_HALF = 1 << 32


@dataclass(frozen=True, slots=True)
class Verdicts:
    """On the parameters; by owner, on what belongs to its shard: the state, the reduced gradient,
    and the parameters that the last update of each copy has written."""

    parameters: Verdict
    state: Mapping[int, Verdict]
    gradients: Mapping[int, Verdict]
    written: Mapping[int, Verdict]

    @property
    def are_fine(self) -> bool:
        by_owner = (self.state, self.gradients, self.written)
        return self.parameters.is_fine and all(v.is_fine for of in by_owner for v in of.values())


def judge_all(by_rank: Sequence[Digests]) -> Verdicts:
    """The verdicts on what all ranks keep. by_rank: equal on all ranks, and so is the result."""
    size = len(by_rank)
    state, gradients, written = {}, {}, {}
    for owner in range(size):
        holders = {
            (owner + distance) % size: by_rank[(owner + distance) % size].kept[distance]
            for distance in range(len(by_rank[owner].kept))
        }
        state[owner] = judge([Copy(r, one.state, one.rest) for r, one in holders.items()])
        gradients[owner] = judge([Copy(r, one.gradient) for r, one in holders.items()])
        written[owner] = judge([Copy(r, one.written or 0) for r, one in holders.items()])
    return Verdicts(_on_parameters(by_rank), state, gradients, written)


def written_by(by_rank: Sequence[Digests]) -> int | None:
    """The digest of all parameters, as the owners have written them; None if it was not noted."""
    written = [one.kept[0].written for one in by_rank]
    return None if None in written else sum(one or 0 for one in written) % (1 << 64)


def _on_parameters(by_rank: Sequence[Digests]) -> Verdict:
    """The parameters of all ranks are what the owners have written, before they were gathered."""
    expected = written_by(by_rank)
    if len(by_rank) == 1 or expected is None:
        # Before its first step a rank may have what it likes, if no model has sent it rank 0's.
        return FINE
    return judge(
        [
            Copy(
                rank,
                one.parameters,
                CopyState.STEADY if one.parameters == expected else CopyState.CHANGED,
            )
            for rank, one in enumerate(by_rank)
        ]
    )
