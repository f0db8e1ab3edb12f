"""Counts of a group's operations and elements, by which two runs can be compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..contract.operation import Kind


@dataclass(slots=True)
class Statistics:
    """Counts of one group on one rank.

        before = group.statistics.snapshot()
        group.all_reduce(torch.ones(4)).wait()
        added = group.statistics.since(before)
        print(added.total_operations(), added.total_elements_sent())

    operations: operations issued, by kind; coalesced operations count one by one.
    elements_sent: elements that a bandwidth-optimal algorithm sends from this rank, by kind,
        whatever a transport copies. With n elements in the larger buffer and N ranks: all_reduce
        2n(N-1)/N, reduce_scatter and all_gather n(N-1)/N, broadcast n on the root and 0 elsewhere,
        reduce 0 on the root and n elsewhere. gather, scatter, all_to_all, send, and an all_gather
        or reduce_scatter in parts of different sizes: the elements that this rank passes to other
        ranks. A complex number is one element.
    """

    operations: Counter[str] = field(default_factory=Counter)
    elements_sent: Counter[str] = field(default_factory=Counter)

    def count(self, kind: Kind, elements: float) -> None:
        """Count one operation that sends `elements` elements."""
        name = _NAMES[kind]
        self.operations[name] += 1
        self.elements_sent[name] += elements  # type: ignore[assignment]

    def snapshot(self) -> Statistics:
        """A copy, which later operations do not change."""
        return Statistics(Counter(self.operations), Counter(self.elements_sent))

    def since(self, earlier: Statistics) -> Statistics:
        """The counts added since `earlier`; kinds without new operations are left out."""
        return Statistics(
            self.operations - earlier.operations, self.elements_sent - earlier.elements_sent
        )

    def total_operations(self) -> int:
        """The number of operations of all kinds."""
        return sum(self.operations.values())

    def total_elements_sent(self) -> float:
        """The number of elements sent by operations of all kinds."""
        return sum(self.elements_sent.values())


_NAMES = {kind: kind.name.lower() for kind in Kind}
