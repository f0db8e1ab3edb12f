"""Where a run is in its data: loops of epochs, and what each rank was given of a dataset.

One rank keeps its own part in a `Cursor`, as plain data that goes into a checkpoint. Of the parts
of all ranks, which may have been another number, `resume` makes every rank's new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Cut = tuple[int, tuple[int, ...]]
"""A world size, and how many samples of its hand each rank had been given when it ended."""


@dataclass(slots=True)
class Passage:
    """One pass over a dataset. cuts: of the runs before this one. given: samples of this rank's
    hand in this run."""

    cuts: list[Cut] = field(default_factory=list)
    given: int = 0


class Cursor:
    """Where this rank is.

    A pass over data without gradients (evaluation under `torch.no_grad`) is not counted: after a
    resume it is taken again, whole, so its result is that of all samples.
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
            if self._loop < resumed["loop"]:
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
            if not is_resumed_one:
                self._passages = {}
                self._resumed = resumed = None
            yield epoch

    def begin(self, key: str) -> Passage:
        """A pass over the data that `key` describes begins. The first pass of an epoch and the
        second have a passage each."""
        number = self._seen.get(key, 0)
        self._seen[key] = number + 1
        return self._passages.setdefault(f"{key}#{number}", Passage())

    def cuts_of(self, key: str) -> list[Cut]:
        """What is given of the coming pass already."""
        passage = self._passages.get(f"{key}#{self._seen.get(key, 0)}")
        return list(passage.cuts) if passage else []

    def told(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "loop": self._loop,
            "epoch": self._epoch or 0,
            "passages": {
                key: {"cuts": passage.cuts, "given": passage.given}
                for key, passage in self._passages.items()
            },
        }

    def resume(self, told: Sequence[dict[str, Any]]) -> None:
        """Go on from what all ranks told, by rank."""
        first = told[0]
        self._resumed = first
        self._passages = {}
        # A rank that was out of data before it began has no passage, and was given nothing.
        for key in sorted({key for rank in told for key in rank["passages"]}):
            parts = [rank["passages"].get(key) for rank in told]
            cuts = next(part["cuts"] for part in parts if part is not None)
            given = tuple(0 if part is None else part["given"] for part in parts)
            earlier = [(size, tuple(counts)) for size, counts in cuts]
            self._passages[key] = Passage([*earlier, (len(told), given)])
