"""A transport as a third party would write one: ranks are threads, memory is memory.

The last rank to come to an operation moves the data of all. Slow, small, and held to the same
contract as the others.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import torch

from collectives.arithmetic import reduce_into
from collectives.communicator import Communicator
from collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    GroupClosed,
    PeerLost,
    UnsupportedOperation,
)
from collectives.in_flight import InFlight, PendingWork
from collectives.operation import Operation
from collectives.reduce_op import ReduceOp
from collectives.signature import Signature, mismatch
from collectives.store import Store
from collectives.work import Work

IN_PROCESS = "in-process"

Parts = list[torch.Tensor]


@dataclass
class Deposit:
    """What a rank brings to an operation. finish: writes its outputs, given the parts by rank."""

    operation: Operation
    part: torch.Tensor
    finish: Callable[[Parts], object]


class Room:
    """Where the threads of one group meet. lock: guards everything in it."""

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()
        self.deposits: dict[int, dict[int, Deposit]] = {}  # by sequence, then rank
        self.ranks: dict[int, InProcessCommunicator] = {}
        self.sizes: dict[tuple[int, int], list[int]] = {}  # of an exchange, by sequence and rank
        self.size = size
        self.error: CollectiveError | None = None

    def end(self, error: CollectiveError) -> None:
        with self.lock:
            self.error = self.error or error
            for communicator in self.ranks.values():
                communicator.in_flight.fail(self.error)


_rooms: dict[str, Room] = {}


def connect(
    store: Store, rank: int, size: int, device: torch.device, generation: int
) -> Communicator:
    if rank == 0:
        key = str(uuid.uuid4())
        _rooms[key] = Room(size)
        store.set("room/0", key)
    room = _rooms[store.get("room/0").decode()]
    communicator = InProcessCommunicator(room, rank, generation)
    room.ranks[rank] = communicator
    store.set(f"entered/{rank}", "")
    store.wait([f"entered/{peer}" for peer in range(size)])
    return communicator


class InProcessCommunicator(Communicator):
    backend = IN_PROCESS

    def __init__(self, room: Room, rank: int, generation: int) -> None:
        self.room, self.rank, self.size = room, rank, room.size
        self.device = torch.device("cpu")
        self.generation = generation
        self.in_flight: InFlight[PendingWork] = InFlight(rank, self.abort)
        self.closed = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    def all_reduce(self, operation: Operation, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return self._deposit(operation, tensor, lambda parts: _reduce(tensor, parts, op))

    def reduce_scatter(
        self, operation: Operation, output: torch.Tensor, input: torch.Tensor, op: ReduceOp
    ) -> Work:
        def finish(parts: Parts) -> None:
            _reduce(output, [part.view(self.size, -1)[self.rank] for part in parts], op)

        return self._deposit(operation, input, finish)

    def all_gather(self, operation: Operation, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._deposit(operation, input, lambda parts: output.copy_(torch.cat(parts)))

    def broadcast(self, operation: Operation, tensor: torch.Tensor, root: int) -> Work:
        flat = tensor.view(-1)
        return self._deposit(operation, tensor, lambda parts: flat.copy_(parts[root]))

    def reduce(self, operation: Operation, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        def finish(parts: Parts) -> None:
            if self.rank == root:
                _reduce(tensor, parts, op)

        return self._deposit(operation, tensor, finish)

    def exchange(
        self, operation: Operation, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Work:
        sizes = [len(part) for part in inputs]
        room, key = self.room, (operation.sequence, self.rank)
        room.sizes[key] = sizes

        def finish(parts: Parts) -> None:
            for sender, part in enumerate(parts):
                pieces = part.split(room.sizes[operation.sequence, sender])
                outputs[sender].copy_(pieces[self.rank])

        return self._deposit(operation, torch.cat(inputs), finish)

    def send(self, operation: Operation, tensor: torch.Tensor) -> Work:
        raise UnsupportedOperation("send", IN_PROCESS, "this backend moves collectives only")

    def recv(self, operation: Operation, tensor: torch.Tensor) -> Work:
        raise UnsupportedOperation("recv", IN_PROCESS, "this backend moves collectives only")

    def barrier(self, operation: Operation) -> Work:
        return self._deposit(operation, torch.empty(0), lambda _: None)

    def abort(self, error: CollectiveError) -> None:
        self.room.end(error)

    def failure(self) -> CollectiveError | None:
        return self.room.error

    def close(self) -> None:
        with self.room.lock:
            self.in_flight.fail(GroupClosed("close", self.generation))
            self.closed.set()

    def _deposit(
        self, operation: Operation, tensor: torch.Tensor, finish: Callable[[Parts], object]
    ) -> Work:
        work = PendingWork(operation, self.in_flight)
        ended: list[PendingWork] = []
        with self.room.lock:
            self.in_flight.add(work)
            if not work.done:
                brought = self.room.deposits.setdefault(operation.sequence, {})
                brought[self.rank] = Deposit(operation, tensor.clone().view(-1), finish)
                if len(brought) == self.size:
                    ended = self._finish(self.room.deposits.pop(operation.sequence))
        for other in ended:
            other.call_back()
        return work

    def _finish(self, brought: dict[int, Deposit]) -> list[PendingWork]:
        deposits = [brought[rank] for rank in range(self.size)]
        error = mismatch(self.generation, [Signature.of(d.operation) for d in deposits])
        if error is not None:
            self.room.end(error)
            return []
        ended: list[PendingWork] = []
        for rank, deposit in enumerate(deposits):
            deposit.finish([d.part for d in deposits])
            if deposit.operation.finish is not None:
                deposit.operation.finish()
            in_flight = self.room.ranks[rank].in_flight
            with in_flight.changed:
                head = in_flight.head()
                assert head is not None
                ended.append(head)
                in_flight.settle_head()
        return ended

    def _watch(self) -> None:
        """Deadlines, and ranks that closed with this one still waiting."""
        while not self.closed.wait(0.02) and self.room.error is None:
            with self.room.lock:
                head = self.in_flight.head()
                if head is None:
                    continue
                operation = head.operation
                here = self.room.deposits[operation.sequence]
                late = [rank for rank in range(self.size) if rank not in here]
                gone = [rank for rank in late if self.room.ranks[rank].closed.is_set()]
                if gone:
                    how = "closed the group"
                    self.room.end(PeerLost(str(operation), self.generation, gone, how))
                elif time.monotonic() > operation.issued_at + operation.timeout_s:
                    self.room.end(
                        CollectiveTimeout(
                            str(operation), self.generation, late, operation.timeout_s
                        )
                    )


def _reduce(output: torch.Tensor, parts: Parts, op: ReduceOp) -> None:
    result = torch.empty_like(parts[0])
    reduce_into(result, parts, op)
    output.view(-1).copy_(result)
