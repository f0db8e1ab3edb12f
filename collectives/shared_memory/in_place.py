"""Collectives on symmetric memory: each rank reads the others' tensors where they lie.

The bodies are those of work_queue.py. An operation begins with one tick in which the ranks show
where their tensors lie; so all of them choose the same way, even where the tensors of some ranks
are ordinary. Ranks that all have ordinary tensors lose nothing: that tick is then the first one of
the way through the slots (algorithms.py).

A rank reads others' tensors after the tick in which they are ready and before it publishes the last
one, and its operation ends when all have published that. So no rank writes to a tensor that is
still read, unless the operation has failed: a rank that fails may overwrite its tensor at once. It
records the failure in the segment first, so a rank that still reads sees it (`_end`).

A broadcast has no way in place: while the root copies a piece into its slot, the others copy the
piece before, so that two cores share the work of one copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence

import torch

from ..contract.arithmetic import reduce_into
from ..contract.operation import ReduceOp
from .segment import SharedSegment
from .symmetric_memory import NOWHERE, MemoryPlace, mapped, place_of
from .work_queue import Body

_TILE_BYTES = 256 << 10
"""More than two tensors are added by pieces of this size, which stay in the processor's cache."""

IN_PLACE_BYTES = 4 << 20
"""Up to here the slots are quicker: they stay in the processor's cache, and take a tick less."""

_MOST_KNOWN = 256
"""Sets of tensors whose mapping a communicator keeps."""

Files = list[torch.Tensor | None]
"""By rank, the whole file of its tensor, (nbytes,) uint8; None for this rank, which needs none."""

Through = Callable[[int], Body]
"""Makes the body through the slots, from its first tick."""

InPlace = Callable[[int, list[torch.Tensor]], Body]
"""Makes the body in place, from its first tick and the tensors by rank."""


class Sharing:
    """How the ranks of one segment come to read each other's tensors."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self._rank = segment.rank
        self.pays = segment.size <= (os.cpu_count() or 1)
        """Whether reading in place is quicker. Where ranks share cores, what several of them read
        comes from the slots out of the processor's cache, and in place from memory each time."""
        # All ranks see the same places, so they agree on what is known, and on what cannot be
        # mapped by some rank.
        self._known: dict[tuple[int, ...], bool] = {}
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}  # by rank and inode

    # -- the choice ----------------------------------------------------------------------------

    def choose(
        self,
        tick: int,
        tensor: torch.Tensor,
        through: Through,
        in_place: InPlace,
    ) -> Body:
        """`in_place` if all ranks can map each other's tensors; otherwise `through`. tensor: this
        rank's, which the others would read."""
        segment = self._segment
        place = place_of(tensor) if self.pays else NOWHERE
        segment.show(tick, *place)
        # The places travel with a tick. A rank without one begins through the slots in that tick
        # already: if no rank has one, asking has cost nothing.
        if place.inode:
            segment.publish(tick)
            yield tick
            body = None
        else:
            body = through(tick)
            yield next(body)
        places = [MemoryPlace(*segment.shown(tick, r)) for r in range(segment.size)]
        # No rank has symmetric memory: what was begun in the first tick just continues.
        if body is not None and not any(p.inode for p in places):
            yield from body
            return
        tick += 1
        files: Files | None = None
        # One rank with an ordinary tensor is enough: nobody could read that one in place.
        if all(p.inode for p in places):
            tick, files = yield from self._files(tick, places)
        if files is None:
            yield from through(tick)
            return
        nbytes, dtype = tensor.nbytes, tensor.dtype
        tensors = [
            tensor if file is None else file[there.offset : there.offset + nbytes].view(dtype)
            for file, there in zip(files, places, strict=True)
        ]
        yield from in_place(tick, tensors)

    def _files(
        self, tick: int, places: Sequence[MemoryPlace]
    ) -> Generator[int, None, tuple[int, Files | None]]:
        """The next tick, and the files of all ranks; None if a rank cannot map them, which costs
        the tick in which they say so."""
        key = tuple(place.inode for place in places)
        # A set of tensors that was seen before: all ranks know the answer, and the tick is saved.
        if key not in self._known:
            segment = self._segment
            segment.show(tick, self._can_map(places), 0, 0)
            segment.publish(tick)
            yield tick
            can_all = all(segment.shown(tick, r)[0] for r in range(segment.size))
            self._known[key] = can_all
            tick += 1
        if not self._known[key]:
            return tick, None
        return tick, [self._mapped.get((r, inode)) for r, inode in enumerate(key)]

    def _can_map(self, places: Sequence[MemoryPlace]) -> bool:
        """Map the files of the other ranks that are not mapped yet."""
        # Tensors come and go: what is still used is mapped again when it is needed.
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
            self._mapped.clear()
        try:
            for rank, place in enumerate(places):
                if rank != self._rank and (rank, place.inode) not in self._mapped:
                    file = mapped(self._segment.pids[rank], place)
                    self._mapped[rank, place.inode] = file
        except OSError:
            return False  # A limit of this process, say on open files or on its address space.
        return True

    # -- the algorithms ------------------------------------------------------------------------

    def all_reduce(self, op: ReduceOp, part: int, tick: int, tensors: list[torch.Tensor]) -> Body:
        """Each rank reduces one part of all tensors into its own, then copies the others' parts.
        part: elements."""
        mine = tensors[self._rank]
        parts = [tensor.split(part) for tensor in tensors]  # by rank, then by part
        if self._rank < len(parts[0]):
            self._reduce(mine.split(part)[self._rank], [of[self._rank] for of in parts], op)
        self._segment.publish(tick)
        yield tick
        for r, piece in enumerate(mine.split(part)):
            if r != self._rank:
                piece.copy_(parts[r][r])
        yield from self._end(tick + 1)

    def reduce_scatter(
        self, output: torch.Tensor, op: ReduceOp, tick: int, tensors: list[torch.Tensor]
    ) -> Body:
        """tensors: (size * n,) each. output: (n,)."""
        n = output.numel()
        self._reduce(output, [tensor.narrow(0, self._rank * n, n) for tensor in tensors], op)
        yield from self._end(tick)

    def all_gather(self, output: torch.Tensor, tick: int, tensors: list[torch.Tensor]) -> Body:
        """tensors: (n,) each. output: (size * n,)."""
        n = tensors[0].numel()
        for r, tensor in enumerate(tensors):
            piece = output.narrow(0, r * n, n)
            # In-place, this rank's part is there already.
            if piece.data_ptr() != tensor.data_ptr():
                piece.copy_(tensor)
        yield from self._end(tick)

    def _reduce(self, output: torch.Tensor, parts: list[torch.Tensor], op: ReduceOp) -> None:
        """As `reduce_into`; `output` may be one of the parts."""
        if len(parts) <= 2:  # Element by element, without a part that is needed later.
            reduce_into(output, parts, op)
            return
        tile = _TILE_BYTES // output.element_size()
        summed = output.new_empty(min(tile, output.numel()))
        for start in range(0, output.numel(), tile):
            width = min(tile, output.numel() - start)
            here = summed[:width]
            reduce_into(here, [piece.narrow(0, start, width) for piece in parts], op)
            output.narrow(0, start, width).copy_(here)

    def _end(self, tick: int) -> Body:
        """The last tick: this rank has read all that it needs, and what it has read was right."""
        self._segment.fence()
        self._segment.raise_failure()
        self._segment.publish(tick)
        yield tick
