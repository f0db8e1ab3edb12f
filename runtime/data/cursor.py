"""Where a run is in its data: its loops of epochs, and the samples that each rank was given.

Each rank keeps its own part in a `Cursor`; as plain data it goes into a checkpoint. `resume` makes
a rank's new cursor from the parts of all ranks, whose number may have been another one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .dealing import Hands, left_of

Run = tuple[int, tuple[int, ...]]
"""A world size, and by rank how many samples of its hand the rank was given in that run."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of an iteration over data that earlier runs have begun.

    runs: the earlier runs, oldest first. given: further sample numbers that must not be given
    again; None: all of them. The default is an iteration that no run has begun.
    """

    runs: tuple[Run, ...] = ()
    given: frozenset[int] | None = frozenset()

    def dealt(
        self,
        whole: Callable[[int], Hands],
        world_size: int,
        keep_together: Sequence[Hashable] | None = None,
    ) -> Hands:
        """The hands of `world_size` ranks. whole: makes the hands of an iteration from its start,
        for a number of ranks."""
        if self.given is None:
            return [[] for _ in range(world_size)]
        # Repeat what the earlier runs did, each with its own number of ranks.
        hands = whole(self.runs[0][0] if self.runs else world_size)
        sizes = [*(size for size, _ in self.runs[1:]), world_size]
        for (_, counts), size in zip(self.runs, sizes, strict=False):
            left = [hand[count:] for hand, count in zip(hands, counts, strict=True)]
            hands = _dealt_again(left, size, keep_together)
        if self.given:
            hands = [[number for number in hand if number not in self.given] for hand in hands]
        return hands


def _dealt_again(
    hands: Sequence[Sequence[int]], world_size: int, keep_together: Sequence[Hashable] | None
) -> Hands:
    """The samples of `hands`, dealt out to `world_size` ranks."""
    if len(hands) == world_size:  # The ranks keep their hands.
        return [list(hand) for hand in hands]
    left = left_of(hands, [0] * len(hands))
    if keep_together is None:
        return [left[rank::world_size] for rank in range(world_size)]
    # Samples of one key stay in one hand.
    lots: dict[Hashable, list[int]] = {}
    for number in left:
        lots.setdefault(keep_together[number], []).append(number)
    dealt = list(lots.values())
    return [
        [number for lot in dealt[rank::world_size] for number in lot] for rank in range(world_size)
    ]


class Passing(Protocol):
    """What a passage follows: the iteration of a Shard or a StreamShard."""

    taken: int
    ids_of_the_lost: list[int]
    is_told_by_id: bool
    """Whether samples are recorded by number: a count says nothing, since hands of a stream cannot
    be computed again."""

    @property
    def taken_ids(self) -> list[int]: ...

    @property
    def committed_ids(self) -> list[int]: ...

    @property
    def num_committed(self) -> int:
        """The number of samples in steps that count, of all ranks and of lost ones."""
        ...


@dataclass(slots=True)
class Passage:
    """One iteration over a dataset.

    rest: what was left to give when the iteration began in this run.
    shard: the iteration, while it is in progress.
    over: how many samples of its hand the rank was given in the end; None until then.
    name: stays the same when the function runs again from the top; None before the first begin.
    """

    rest: Rest = field(default_factory=Rest)
    shard: Passing | None = None
    over: int | None = None
    name: str | None = None

    def end(self) -> None:
        self.over = self.shard.taken if self.shard is not None else 0
        self.shard = None

    def told(self, by_id: bool, committed: bool) -> dict[str, Any]:
        """As plain data. by_id: list the sample numbers, since hands were dealt again when ranks
        were lost, and a count does not identify samples. committed: only samples of steps that
        count."""
        given = self.over if self.over is not None else self.shard.taken if self.shard else 0
        ids: list[int] | None = None
        if by_id or self.rest.given or (self.shard is not None and self.shard.is_told_by_id):
            already = sorted(self.rest.given or ())
            mine: list[int] = []
            if self.shard is not None:
                taken = [*self.shard.taken_ids, *self.shard.ids_of_the_lost]
                mine = self.shard.committed_ids if committed else taken
            ids = already + mine
        is_counted = committed and self.shard is not None and self.shard.is_told_by_id
        return {
            "runs": self.rest.runs,
            "given": given,
            "ids": ids,
            "is_over": self.over is not None or self.rest.given is None,
            "num_ids": len(already) + self.shard.num_committed
            if is_counted and self.shard is not None
            else 0,
        }


class Cursor:
    """Where this rank is in its data.

    An iteration without gradients (evaluation under `torch.no_grad`) is not counted: a resumed run
    takes it again as a whole, so its result is that of all samples.
    """

    def __init__(self) -> None:
        self._loop = -1
        self._epoch: int | None = None
        self._passages: dict[str, Passage] = {}
        self._seen: dict[str, int] = {}
        self._resumed: dict[str, Any] | None = None

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs of one loop that are not over yet."""
        self._loop += 1
        resumed, first = self._resumed, 0
        if resumed is not None:
            if self._loop < resumed["loop"]:  # The whole loop is over.
                return
            if self._loop == resumed["loop"]:
                first = resumed["epoch"]
        for epoch in range(first, num_epochs):
            self._epoch = epoch
            self._seen = {}
            is_resumed_one = resumed is not None and (self._loop, epoch) == (
                resumed["loop"],
                resumed["epoch"],
            )
            if not is_resumed_one:  # Only the resumed epoch has iterations that are partly done.
                self._passages = {}
                self._resumed = resumed = None
            yield epoch

    def rest_of(self, key: str) -> Rest:
        """What is left of the coming iteration over the data that `key` identifies."""
        passage = self._passages.get(f"{key}#{self._seen.get(key, 0)}")
        return passage.rest if passage else Rest()

    def begin(self, key: str, shard: Passing | None = None) -> Passage:
        """Begin an iteration. Each iteration of an epoch over the same data has its own passage.

        Raises ValueError if the iteration had begun before the resume, over another number of
        samples.
        """
        number = self._seen.get(key, 0)
        self._check_length(key, number)
        self._seen[key] = number + 1
        passage = self._passages.setdefault(f"{key}#{number}", Passage())
        passage.shard = shard
        passage.name = f"{self._loop}/{self._epoch}/{key}#{number}"
        return passage

    def _check_length(self, key: str, number: int) -> None:
        length, _, rest = key.partition("/")
        for name, passage in self._passages.items():
            before = name.partition("/")[0]
            is_this = passage.name is None and name == f"{before}/{rest}#{number}"
            if is_this and before != length and passage.rest != Rest():
                raise ValueError(
                    f"the dataset has {length} samples, and had {before} when this epoch was "
                    "begun: which of them are left to give is not known. Go on with the dataset "
                    "as it was, and change it between two epochs"
                )

    def told(self, *, by_id: bool = False, committed: bool = False) -> dict[str, Any]:
        """As plain data. by_id: the run has lost ranks. committed: with by_id, only samples of
        steps that count."""
        return {
            "loop": self._loop,
            "epoch": self._epoch or 0,
            "passages": {
                key: passage.told(by_id, committed) for key, passage in self._passages.items()
            },
        }

    def resume(self, parts: Sequence[dict[str, Any]]) -> None:
        """Resume. parts: what `told` gave on each rank, by rank."""
        self._resumed = parts[0]
        self._passages = {}
        for key in sorted({key for part in parts for key in part["passages"]}):
            self._passages[key] = Passage(_rest([part["passages"].get(key) for part in parts]))


def _rest(parts: Sequence[dict[str, Any] | None]) -> Rest:
    """What is left of an iteration. parts: by rank; None: the rank has not begun it."""
    begun = [part for part in parts if part is not None]
    runs = tuple((size, tuple(counts)) for size, counts in begun[0]["runs"])
    if all(part["is_over"] for part in begun):
        return Rest(runs, None)
    if any(part["ids"] is not None for part in begun):  # Counts identify no samples.
        given = frozenset(n for part in begun for n in part["ids"] or ())
        missing = max(part.get("num_ids", 0) for part in begun) - len(given)
        if missing > 0:
            raise RuntimeError(
                f"{missing} rows of a Stream belong to steps that count, and which ones is not "
                "known any more: its reader died together with the rank that had used them. Run "
                "the epoch again, or go on from a checkpoint"
            )
        return Rest(runs, given)
    counts = tuple(0 if part is None else part["given"] for part in parts)
    return Rest((*runs, (len(parts), counts)))
