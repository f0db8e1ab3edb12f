"""Collectives of ranks on one host, through shared memory.

Each body below is one algorithm: a rank writes into its own slot, calls `publish`, yields until all
ranks have published, and reads the others' slots. The top of shared_memory/segment.py has the rule
that makes this safe; work_queue.py waits. Every rank adds in rank order, so all get the same bits.
ticks.c has the same bodies in C: what an operation does in a tick changes in both, or in none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..contract.arithmetic import reduce_into
from ..contract.communicator import Communicator
from ..contract.errors import CollectiveError, GroupClosed, PeerLost
from ..contract.operation import Kind, Operation, ReduceOp
from ..contract.work import Work
from ..diagnosis.signature import pair_mismatch
from .compiled import Task
from .end_record import apart
from .in_place import IN_PLACE_BYTES, InPlace, Sharing
from .messages import Messages
from .segment import SharedSegment
from .symmetric_memory import empty_symmetric
from .work_queue import Body, Lane, LaneWork

SLOT_BYTES = 2 << 20
"""Each rank has two slots of this size. Pages that no operation has touched take no memory."""

DIRECT_BYTES = 512 << 10
"""Up to here every rank reduces the whole tensor: one tick, but `size` times the additions."""

_CHUNK_BYTES = 512 << 10
"""A chunk of an all_reduce of more than IN_PLACE_BYTES: the one that is copied in, the one that is
reduced and the one that is copied out stay in the processor's cache."""

_ALIGNMENT = 64  # elements; parts that start on a cache line are added and copied faster


class SharedMemoryCommunicator(Communicator):
    """Ranks that map one `SharedSegment`. `connect` of host.py makes it."""

    backend = "shared-memory"

    def __init__(self, segment: SharedSegment, timeout_s: float, look: Callable[[], None]) -> None:
        """Blocks until all ranks have come. Leaves `segment` and raises if not. look: as in
        `SharedSegment.meet`."""
        self.rank = segment.rank
        self.size = segment.size
        self.device = torch.device("cpu")
        self._segment = segment
        try:
            segment.meet(timeout_s, look)
        except BaseException:
            segment.leave()
            raise
        self._lane = Lane(segment)
        compiled = self._lane.compiled
        self._task = _no_task if compiled is None else compiled.task
        self._nothing = torch.empty(0, device="cpu")
        self._sharing = Sharing(segment)
        self._messages = Messages(segment)
        self._closed = False

    # -- the contract --------------------------------------------------------------------------

    def all_reduce(self, operation: Operation, tensor: torch.Tensor, op: ReduceOp) -> Work:
        # Small ones wait for their ticks, and not for additions: one tick is best.
        if tensor.nbytes <= DIRECT_BYTES:
            task = self._task(operation, Kind.ALL_REDUCE, 1, tensor, tensor, 0, op)
            return self._issue(operation, 1, self._all_reduce_directly, tensor, op, task=task)
        # Half of a slot is for what comes in, half for what is reduced: one tick serves two chunks.
        room = self._segment.slot_bytes // 2
        if tensor.nbytes > IN_PLACE_BYTES:
            room = min(room, _CHUNK_BYTES)
        part = self._chunk_elements(tensor, room // self.size)
        ticks = -(-tensor.numel() // (part * self.size)) + 1
        task = self._task(operation, Kind.ALL_REDUCE, ticks, tensor, tensor, part, op)
        body = self._all_reduce_in_parts
        if tensor.nbytes <= IN_PLACE_BYTES:
            return self._issue(operation, ticks, body, tensor, op, part, task=task)
        in_place = partial(self._sharing.all_reduce, op, self._even_part(tensor))
        return self._share(operation, ticks, tensor, in_place, task, body, tensor, op, part)

    def reduce_scatter(
        self, operation: Operation, output: torch.Tensor, input: torch.Tensor, op: ReduceOp
    ) -> Work:
        chunk = self._chunk_elements(input, self._segment.slot_bytes // self.size)
        ticks = max(1, -(-output.numel() // chunk))
        task = self._task(operation, Kind.REDUCE_SCATTER, ticks, output, input, chunk, op)
        body, args = self._reduce_scatter, (output, input, op, chunk)
        if input.nbytes <= IN_PLACE_BYTES:
            return self._issue(operation, ticks, body, *args, task=task)
        in_place = partial(self._sharing.reduce_scatter, output, op)
        return self._share(operation, ticks, input, in_place, task, body, *args)

    def all_gather(self, operation: Operation, output: torch.Tensor, input: torch.Tensor) -> Work:
        chunk = self._chunk_elements(input, self._segment.slot_bytes)
        ticks = max(1, -(-input.numel() // chunk))
        task = self._task(operation, Kind.ALL_GATHER, ticks, output, input, chunk)
        body, args = self._all_gather, (output, input, chunk)
        if output.nbytes <= IN_PLACE_BYTES:
            return self._issue(operation, ticks, body, *args, task=task)
        in_place = partial(self._sharing.all_gather, output)
        return self._share(operation, ticks, input, in_place, task, body, *args)

    def broadcast(self, operation: Operation, tensor: torch.Tensor, root: int) -> Work:
        chunk = self._chunk_elements(tensor, self._segment.slot_bytes)
        chunks = max(1, -(-tensor.numel() // chunk))
        task = self._task(operation, Kind.BROADCAST, chunks, tensor, tensor, chunk, None, root)
        return self._issue(operation, chunks, self._broadcast, tensor, root, chunk, task=task)

    def reduce(self, operation: Operation, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        chunk = self._chunk_elements(tensor, self._segment.slot_bytes)
        chunks = max(1, -(-tensor.numel() // chunk))
        task = self._task(operation, Kind.REDUCE, chunks, tensor, tensor, chunk, op, root)
        return self._issue(operation, chunks, self._reduce, tensor, root, op, chunk, task=task)

    def exchange(
        self, operation: Operation, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Work:
        # 0: the number of ticks follows from the largest part of all, which the tables show.
        return self._issue(operation, 0, self._exchange, operation, outputs, inputs)

    def barrier(self, operation: Operation) -> Work:
        task = self._task(operation, Kind.BARRIER, 1, self._nothing, self._nothing, 0)
        return self._issue(operation, 1, self._barrier, task=task)

    def send(self, operation: Operation, tensor: torch.Tensor) -> Work:
        return self._messages.send(operation, tensor)

    def recv(self, operation: Operation, tensor: torch.Tensor) -> Work:
        return self._messages.recv(operation, tensor)

    def empty_symmetric(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return empty_symmetric(numel, dtype)

    def abort(self, error: CollectiveError) -> None:
        # After `close` the mapping may be gone.
        if not self._closed:
            # The works end with the error that stands, once it is written.
            if self._segment.is_interrupted_abort():
                apart(lambda: self.abort(error))
                return
            error = self._segment.abort(error)
            self._lane.end(error)
            self._messages.end(error)

    def show_waits(self, ranks: Sequence[int], since: float) -> None:
        self._segment.show_waits_elsewhere(ranks, since)

    def on_wait(self, callback: Callable[[Sequence[int], float], None]) -> None:
        self._segment.on_wait = callback

    def turn(self) -> None:
        self._segment.turn()

    def rest(self, operations: int) -> None:
        self._segment.rest()

    def failure(self) -> CollectiveError | None:
        return None if self._closed else self._segment.failure()

    def gone(self) -> dict[int, str]:
        return {} if self._closed else self._segment.gone()

    def ended_ranks(self) -> set[int]:
        return set() if self._closed else self._segment.ended_ranks()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._messages.is_interrupted() or self._lane.is_interrupted():
            apart(self._close)
        else:
            self._close()

    def _close(self) -> None:
        generation = self._segment.generation

        def lost(operation: Operation) -> PeerLost:
            how = "closed the group with this operation still to do"
            return PeerLost(str(operation), generation, [self.rank], how)

        try:
            self._messages.close(GroupClosed("close", generation))
        finally:
            try:
                self._lane.close(GroupClosed("close", generation), lost)
            finally:
                self._segment.leave()

    # -- the algorithms ------------------------------------------------------------------------

    def _barrier(self, tick: int) -> Body:
        self._segment.publish(tick)
        yield tick

    def _all_reduce_directly(self, tick: int, flat: torch.Tensor, op: ReduceOp) -> Body:
        parts = self._segment.slots(tick, 0, flat.numel(), flat.dtype)
        parts[self.rank].copy_(flat)
        self._segment.publish(tick)
        yield tick
        reduce_into(flat, parts, op)

    def _all_reduce_in_parts(self, tick: int, flat: torch.Tensor, op: ReduceOp, part: int) -> Body:
        """The tensor in chunks of (size * part,); a tick works on two chunks at once:

        1. copy the other ranks' parts of chunk i into this rank's slot;
        2. reduce this rank's part of chunk i-1 into the slot's second half, and into the tensor;
        3. publish, and wait for all ranks;
        4. copy the other ranks' parts of chunk i-1 out of their slots.
        """
        segment, rank = self._segment, self.rank
        half = segment.slot_bytes // 2
        part_bytes = part * flat.element_size()
        previous: tuple[torch.Tensor, ...] = ()  # the parts of chunk i-1, by rank
        # None: one tick more, in which the last chunk is handed out.
        for chunk in (*flat.split(part * self.size), None):
            pieces = () if chunk is None else chunk.split(part)
            for r, piece in enumerate(pieces):  # 1
                if r != rank:
                    at = r * part_bytes
                    segment.slots(tick, at, piece.numel(), flat.dtype)[rank].copy_(piece)
            if rank < len(previous):  # 2
                own = previous[rank]
                addends = list(segment.slots(tick - 1, rank * part_bytes, len(own), flat.dtype))
                addends[rank] = own
                reduced = segment.slots(tick, half, len(own), flat.dtype)[rank]
                reduce_into(reduced, addends, op)
                own.copy_(reduced)
            segment.publish(tick)  # 3
            yield tick
            for r, piece in enumerate(previous):  # 4
                if r != rank:
                    piece.copy_(segment.slots(tick, half, len(piece), flat.dtype)[r])
            previous = pieces
            tick += 1

    def _reduce_scatter(
        self, tick: int, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, chunk: int
    ) -> Body:
        """input: (size * n,). Each rank writes the other ranks' parts, then reduces its own."""
        segment, rank, dtype = self._segment, self.rank, input.dtype
        n = output.numel()
        for start in range(0, max(1, n), chunk):
            width = min(chunk, n - start)
            stride = -(-width // _ALIGNMENT) * _ALIGNMENT * dtype.itemsize
            # This rank's own part is read from `input`: it need not travel.
            for r in range(self.size):
                if r != rank:
                    slot = segment.slots(tick, r * stride, width, dtype)[rank]
                    slot.copy_(_part(input, r * n + start, width))
            segment.publish(tick)
            yield tick
            # An empty part takes its ticks, and adds nothing.
            if width:
                parts = list(segment.slots(tick, rank * stride, width, dtype))
                parts[rank] = _part(input, rank * n + start, width)
                reduce_into(_part(output, start, width), parts, op)
            tick += 1

    def _all_gather(self, tick: int, output: torch.Tensor, input: torch.Tensor, chunk: int) -> Body:
        """output: (size * n,); this rank's part of it may be `input` itself."""
        segment, rank = self._segment, self.rank
        n = input.numel()
        for start in range(0, max(1, n), chunk):
            width = min(chunk, n - start)
            slots = segment.slots(tick, 0, width, input.dtype)
            slots[rank].copy_(_part(input, start, width))
            segment.publish(tick)
            yield tick
            for r, slot in enumerate(slots):
                if r != rank:
                    _part(output, r * n + start, width).copy_(slot)
            tick += 1
        # In-place, `input` is that part of `output`.
        if output.data_ptr() + rank * input.nbytes != input.data_ptr():
            _part(output, rank * n, n).copy_(input)

    def _broadcast(self, tick: int, flat: torch.Tensor, root: int, chunk: int) -> Body:
        segment = self._segment
        for start in range(0, max(1, flat.numel()), chunk):
            piece = _part(flat, start, min(chunk, flat.numel() - start))
            slot = segment.slots(tick, 0, piece.numel(), flat.dtype)[root]
            if self.rank == root:
                slot.copy_(piece)
            segment.publish(tick)
            yield tick
            if self.rank != root:
                piece.copy_(slot)
            tick += 1

    def _reduce(self, tick: int, flat: torch.Tensor, root: int, op: ReduceOp, chunk: int) -> Body:
        """All ranks write a chunk; the root reduces."""
        segment = self._segment
        for start in range(0, max(1, flat.numel()), chunk):
            piece = _part(flat, start, min(chunk, flat.numel() - start))
            slots = segment.slots(tick, 0, piece.numel(), flat.dtype)
            slots[self.rank].copy_(piece)
            segment.publish(tick)
            yield tick
            if self.rank == root:
                reduce_into(piece, slots, op)
            tick += 1

    def _exchange(
        self,
        tick: int,
        operation: Operation,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> Body:
        """A slot has a table (elements to each rank, then from each) and a region for each rank.

        For each chunk, this rank must:

        1. copy a piece for each other rank into its region, and the first time write the table;
        2. publish, and wait for all ranks; the first time compare the tables, which also give the
           number of chunks;
        3. copy the pieces for this rank out of the others' slots.
        """
        segment, rank, size = self._segment, self.rank, self.size
        dtype = outputs[rank].dtype
        table = [part.numel() for part in (*inputs, *outputs)]
        table_bytes = -(-8 * len(table) // _ALIGNMENT) * _ALIGNMENT
        chunk = self._chunk_elements(outputs[rank], (segment.slot_bytes - table_bytes) // size)
        at = [table_bytes + r * chunk * dtype.itemsize for r in range(size)]
        # struct packs the table: for small parts, a tensor would cost more than the parts do.
        segment.write_numbers(tick, table)
        start = longest = 0
        while start == 0 or start < longest:
            for r, part in enumerate(inputs):  # 1
                count = min(table[r] - start, chunk)
                if r != rank and count > 0:
                    piece = part if count == table[r] else part[start : start + count]
                    segment.slots(tick, at[r], count, dtype)[rank].copy_(piece)
            segment.publish(tick)  # 2
            yield tick
            if start == 0:
                tables = [segment.read_numbers(tick, r, len(table)) for r in range(size)]
                error = pair_mismatch(operation, segment.generation, tables)
                if error is not None:
                    raise segment.abort(error)
                longest = max(max(sent[:size]) for sent in tables)
            for r, part in enumerate(outputs):  # 3
                count = min(table[size + r] - start, chunk)
                if r != rank and count > 0:
                    piece = part if count == table[size + r] else part[start : start + count]
                    piece.copy_(segment.slots(tick, at[rank], count, dtype)[r])
            start += chunk
            tick += 1
        if outputs[rank].data_ptr() != inputs[rank].data_ptr():
            outputs[rank].copy_(inputs[rank])

    # ------------------------------------------------------------------------------------------

    def _issue(
        self,
        operation: Operation,
        num_ticks: int,
        body: Callable[..., Body],
        *args: Any,
        task: Task | None = None,
    ) -> Work:
        if operation.finish is not None and task is None:
            body, args = _and_then, (body, operation.finish, *args)
        work = LaneWork(self._lane, operation, body, args, num_ticks, task)
        self._lane.submit(work)
        return work

    def _share(
        self,
        operation: Operation,
        num_ticks: int,
        tensor: torch.Tensor,
        in_place: InPlace,
        task: Task | None,
        body: Callable[..., Body],
        *args: Any,
    ) -> Work:
        """Issue an operation on tensors that may be symmetric. num_ticks, task, body: of the way
        through the slots."""
        if not self._sharing.pays:  # Nor on another rank, as all are on one host.
            return self._issue(operation, num_ticks, body, *args, task=task)
        compiled = self._lane.compiled

        def through(tick: int) -> Body:
            if compiled is None or task is None:
                return body(tick, *args)
            return compiled.body(tick, task, operation, num_ticks)

        choose = self._sharing.choose
        more = num_ticks + 2  # Those in which the ranks say what they have.
        return self._issue(operation, more, choose, tensor, through, in_place)

    def _even_part(self, tensor: torch.Tensor) -> int:
        """Elements of the part that each rank reduces."""
        lines = -(-tensor.numel() // _ALIGNMENT)
        return -(-lines // self.size) * _ALIGNMENT

    def _chunk_elements(self, tensor: torch.Tensor, nbytes: int) -> int:
        """Elements that fit into `nbytes`, rounded down to whole cache lines."""
        return max(1, nbytes // tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _part(flat: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """`count` elements from `start` on. A view takes as long as the copy of a small tensor, so that
    the whole is not a view."""
    return flat if count == flat.numel() else flat.narrow(0, start, count)


def _no_task(*_: object) -> None:
    """In place of `Compiled.task`, where the library is not there."""


def _and_then(tick: int, body: Callable[..., Body], finish: Callable[[], None], *args: Any) -> Body:
    yield from body(tick, *args)
    finish()
