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

from chorusline.collectives.contract.arithmetic import reduce_into
from chorusline.collectives.contract.communicator import Communicator
from chorusline.collectives.contract.errors import (
    CollectiveError,
    CollectiveTimeout,
    GroupClosed,
    PeerLost,
)
from chorusline.collectives.contract.in_flight import InFlight, PendingWork
from chorusline.collectives.contract.operation import ANY_RANK, Operation, ReduceOp
from chorusline.collectives.contract.work import Work
from chorusline.collectives.diagnosis.signature import (
    Signature,
    message_mismatch,
    mismatch,
    pair_mismatch,
)
from chorusline.collectives.stores.store import Store

IN_PROCESS = "in-process"

Parts = list[torch.Tensor]


@dataclass
class Deposit:
    """What a rank brings to an operation. finish: writes its outputs, given the parts by rank."""

    operation: Operation
    part: torch.Tensor
    finish: Callable[[Parts], object]


@dataclass
class Message:
    """One that was sent and is not received yet."""

    source: int
    operation: Operation
    content: torch.Tensor


class Receive(PendingWork):
    """One that has no message yet. tensor: where it goes."""

    def __init__(
        self, operation: Operation, in_flight: InFlight[PendingWork], tensor: torch.Tensor
    ) -> None:
        super().__init__(operation, in_flight)
        self.tensor = tensor
        self.has_message = False

    def wants(self, message: Message) -> bool:
        mine = self.operation
        return mine.tag == message.operation.tag and mine.peer in (message.source, ANY_RANK)


class Room:
    """Where the threads of one group meet. lock: guards everything in it."""

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()
        self.deposits: dict[int, dict[int, Deposit]] = {}  # by sequence, then rank
        self.ranks: dict[int, InProcessCommunicator] = {}
        self.tables: dict[int, dict[int, list[int]]] = {}  # of an exchange, by sequence and rank
        self.messages: dict[int, list[Message]] = {rank: [] for rank in range(size)}  # by receiver
        self.size = size
        self.error: CollectiveError | None = None

    def end(self, error: CollectiveError) -> None:
        with self.lock:
            self.error = self.error or error
            for communicator in self.ranks.values():
                communicator.in_flight.fail(self.error)
                communicator.receiving.fail(self.error)


_rooms: dict[str, Room] = {}


def connect(
    store: Store, rank: int, size: int, device: torch.device, generation: int
) -> Communicator:
    return _join(InProcessCommunicator, store, rank, size, generation)


def connect_without_tags(
    store: Store, rank: int, size: int, device: torch.device, generation: int
) -> Communicator:
    return _join(WithoutTags, store, rank, size, generation)


def _join(
    kind: type[InProcessCommunicator], store: Store, rank: int, size: int, generation: int
) -> Communicator:
    if rank == 0:
        key = str(uuid.uuid4())
        _rooms[key] = Room(size)
        store.set("room/0", key)
    room = _rooms[store.get("room/0").decode()]
    communicator = kind(room, rank, generation)
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
        self.receiving: InFlight[PendingWork] = InFlight(rank, self.abort)  # messages
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
        # What goes to each rank, and what is expected of each, as signature.py compares them.
        table = [len(part) for part in (*inputs, *outputs)]
        with self.room.lock:
            tables = self.room.tables.setdefault(operation.sequence, {})
            tables[self.rank] = table

        def finish(parts: Parts) -> None:
            for sender, part in enumerate(parts):
                pieces = part.split(tables[sender][: self.size])
                outputs[sender].copy_(pieces[self.rank])

        return self._deposit(operation, torch.cat(inputs), finish)

    def send(self, operation: Operation, tensor: torch.Tensor) -> Work:
        """Done at once: the content is copied."""
        work = PendingWork(operation, self.receiving)
        with self.room.lock:
            self.receiving.add(work)
            if work.done:
                return work
            waiting = self.room.messages[operation.peer]
            waiting.append(Message(self.rank, operation, tensor.clone()))
        self.receiving.settle(work)
        self.room.ranks[operation.peer].take()
        return work

    def recv(self, operation: Operation, tensor: torch.Tensor) -> Work:
        work = Receive(operation, self.receiving, tensor)
        self.receiving.add(work)
        self.take()
        return work

    def take(self) -> None:
        """Give the messages that are there to those that wait for them, in order."""
        taken = []
        with self.room.lock:
            waiting = self.room.messages[self.rank]
            for work in list(self.receiving.works):
                if not isinstance(work, Receive) or work.has_message:
                    continue
                message = next((m for m in waiting if work.wants(m)), None)
                if message is None:
                    continue
                waiting.remove(message)
                work.has_message = True
                operation, sent = work.operation, message.operation
                operation.peer = message.source
                error = message_mismatch(
                    operation, self.generation, self.rank, sent.numel, sent.dtype
                )
                if error is not None:
                    self.room.end(error)
                    return
                work.tensor.copy_(message.content)
                if operation.finish is not None:
                    operation.finish()
                taken.append(work)
        for work in taken:
            self.receiving.settle(work)

    def barrier(self, operation: Operation) -> Work:
        return self._deposit(operation, torch.empty(0), lambda _: None)

    def abort(self, error: CollectiveError) -> None:
        self.room.end(error)

    def failure(self) -> CollectiveError | None:
        return self.room.error

    def close(self) -> None:
        with self.room.lock:
            self.in_flight.fail(GroupClosed("close", self.generation))
            self.receiving.fail(GroupClosed("close", self.generation))
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
        first = deposits[0].operation
        error = mismatch(self.generation, [Signature.of(d.operation) for d in deposits])
        tables = self.room.tables.pop(first.sequence, None)
        if error is None and tables is not None:
            error = pair_mismatch(first, self.generation, [tables[r] for r in range(self.size)])
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
                for head in (self.in_flight.head(), self.receiving.head()):
                    if head is not None:
                        self._look(head.operation)

    def _look(self, operation: Operation) -> None:
        if not operation.is_between_two:
            here = self.room.deposits[operation.sequence]
            late = [rank for rank in range(self.size) if rank not in here]
        elif operation.peer != ANY_RANK:
            late = [operation.peer]
        else:
            late = [rank for rank in range(self.size) if rank != self.rank]
        gone = [rank for rank in late if self.room.ranks[rank].closed.is_set()]
        if gone and (gone == late or not operation.is_between_two):
            self.room.end(PeerLost(str(operation), self.generation, gone, "closed the group"))
        elif time.monotonic() > operation.issued_at + operation.timeout_s:
            timeout_s = operation.timeout_s
            self.room.end(CollectiveTimeout(str(operation), self.generation, late, timeout_s))


class WithoutTags(InProcessCommunicator):
    """Of messages it can what NCCL can: in the order of issue, from a rank that is named."""

    receives_from_any = False
    has_tags = False


def _reduce(output: torch.Tensor, parts: Parts, op: ReduceOp) -> None:
    result = torch.empty_like(parts[0])
    reduce_into(result, parts, op)
    output.view(-1).copy_(result)
