"""What a group has done so far, in numbers that two runs can be compared by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..contract.operation import Kind


@dataclass(slots=True)
class Statistics:
    """Counts of one group on one rank.

    operations: operations issued, by kind; coalesced ones one by one.
    elements_sent: elements that a bandwidth-optimal algorithm sends from this rank, by kind. With
    n elements in the whole problem and N ranks: all_reduce 2n(N-1)/N, reduce_scatter and
    all_gather n(N-1)/N, broadcast n on the root and 0 elsewhere, reduce 0 on the root and n
    elsewhere. gather, scatter, all_to_all, send, and an all_gather or reduce_scatter in parts of
    different sizes: what this rank hands to others. It says what the caller asks of the network,
    not what a transport happens to copy. A complex number is one element.
    """

    operations: Counter[str] = field(default_factory=Counter)
    elements_sent: Counter[str] = field(default_factory=Counter)

    def count(self, kind: Kind, elements: float) -> None:
        """Add one operation that sends so many elements."""
        name = _NAMES[kind]
        self.operations[name] += 1
        self.elements_sent[name] += elements  # type: ignore[assignment]

    def snapshot(self) -> Statistics:
        """A copy, which later operations do not change."""
        return Statistics(Counter(self.operations), Counter(self.elements_sent))

    def since(self, earlier: Statistics) -> Statistics:
        """What was added after `earlier`; kinds with nothing new are left out."""
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
