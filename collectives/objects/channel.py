"""How objects travel between the ranks of a group, beside its tensors.

An object takes several collectives, since the ranks must learn its length first. So that objects
and tensors may be in flight together, in an order that differs from rank to rank, objects have a
channel: a CPU group of the same ranks, made when the first object travels, and one thread that
runs the object collectives in the order of issue. Each of them has three phases:

1. All ranks exchange headers (kind, root, count, length); an error names ranks that disagree.
2. The payloads travel as int64, the widest dtype that every backend copies as bits.
3. Ranks unpickle, and exchange whether that succeeded. If it failed on one rank, all ranks raise
   PayloadUnreadable; the group stays usable.

A group on GPUs takes no part in this, because the host makes and reads pickles.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch

from ..contract.call_site import SITE_BYTES, users_frame
from ..contract.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PayloadUnreadable,
    PeerLost,
    fresh_copy,
)
from ..contract.in_flight import InFlight, PendingWork
from ..contract.operation import Kind, Operation
from ..contract.work import every_cuda_device
from ..diagnosis.blame import describe_issued, usual_and_blamed
from ..diagnosis.flight_recorder import FlightRecorder
from ..diagnosis.profiling import span_of
from ..stores.signed_store import Seal
from .blocking import BytesGroup, all_gather_row, broadcast_bytes
from .payloads import MapLocation, bytes_of, loads, opened, words_of


class Owner(Protocol):
    """The group whose objects travel through a channel. seal: as in BytesGroup, or None."""

    rank: int
    generation: int
    seal: Seal | None

    def abort(self, reason: CollectiveError) -> None: ...
    def end_with(self, error: CollectiveError) -> None: ...


class ObjectWork(PendingWork):
    """A collective of objects. `wait()`, `await` and `result()` return the objects.

    body: (the channel's group) -> the payloads that this rank reads, by sending rank.
    read: unpickled payloads, by sending rank -> the work's result.
    """

    def __init__(
        self,
        operation: Operation,
        in_flight: InFlight[ObjectWork],
        body: Callable[[BytesGroup], dict[int, bytes]],
        read: Callable[[dict[int, Any]], Any],
        map_location: MapLocation,
    ) -> None:
        super().__init__(operation, in_flight)
        self.body = body
        self.read = read
        self.map_location = map_location

    def _cuda_devices(self) -> list[torch.device]:
        return every_cuda_device()


class RecorderOnBehalf(FlightRecorder):
    """The recorder of the channel's group; it gives collectives the line of their objects."""

    on_behalf_of: Operation

    def record(self, operation: Operation, frame: FrameType) -> None:
        super().record(operation, frame)
        operation.caller = self.on_behalf_of.caller
        operation.caller_at = self.on_behalf_of.caller_at


class ObjectChannel:
    """One rank's end of the channel.

    connect: makes the channel's group and its recorder, for the first operation. It blocks.
    with_nvtx: operations are ranges in NVTX as well.
    """

    def __init__(
        self,
        owner: Owner,
        connect: Callable[[Operation], tuple[BytesGroup, RecorderOnBehalf]],
        with_nvtx: bool,
    ) -> None:
        self._with_nvtx = with_nvtx
        self._owner = owner
        self._connect = connect
        self._in_flight: InFlight[ObjectWork] = InFlight(owner.rank, owner.abort)
        self._next_sequence = 0
        self._group: BytesGroup | None = None  # made by the thread; None: not yet
        self._recorder: RecorderOnBehalf
        self._thread = threading.Thread(target=self._run, name="chorusline-objects", daemon=True)
        self._in_flight.workers = [self._thread]
        self._thread.start()

    def issue(
        self,
        kind: Kind,
        root: int,
        count: int,
        payload: bytes,
        timeout_s: float,
        body: Callable[[BytesGroup, list[int]], dict[int, bytes]],
        read: Callable[[dict[int, Any]], Any],
        map_location: MapLocation,
    ) -> ObjectWork:
        """Issue one object collective. kind, root and count must agree between ranks.

        root: -1 for none. count: of objects; -1 for any. payload: what this rank sends, or b"".
        body: (channel's group, lengths by rank) -> payloads by sending rank.
        """
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        generation = self._owner.generation
        operation = Operation(kind, sequence, generation, 0, -1, root, timeout_s)
        caller = users_frame(sys._getframe(1))
        operation.caller, operation.caller_at = caller.f_code, caller.f_lasti
        operation.span = span_of(operation, self._with_nvtx)
        header = (int(kind), root, count, len(payload))

        def exchange(group: BytesGroup) -> dict[int, bytes]:
            table = all_gather_row(group, header)
            self._compare(operation, group, [tuple(row[:3]) for row in table])
            return body(group, [row[3] for row in table])

        work = ObjectWork(operation, self._in_flight, exchange, read, map_location)
        self._in_flight.add(work)
        return work

    def fail(self, error: CollectiveError) -> None:
        """Fail all works with `error`, because the generation has ended."""
        self._in_flight.fail(error)

    def close(self, error: CollectiveError) -> None:
        self._in_flight.fail(error)
        # A callback, which this thread runs, may close the group.
        if self._thread is not threading.current_thread():
            self._thread.join(1)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (work := self._in_flight.next()) is not None:
                self._perform(work)
                del work  # An idle thread must not keep objects alive.
        # This rank has closed it: the others are told by that.
        except GroupClosed as error:
            self._in_flight.fail(error)
        except CollectiveError as error:
            # The channel shares the fate of its group, whose tensors wait for the same ranks.
            self._owner.end_with(error)
            self._in_flight.fail(error)
        except Exception as error:
            text = f"the objects' channel failed: {type(error).__name__}: {error}"
            trace = traceback.format_exc()
            self._owner.abort(GroupAborted(self._owner.generation, [self._owner.rank], text, trace))

    def _perform(self, work: ObjectWork) -> None:
        operation = work.operation
        # With the first operation: most groups never move an object.
        if self._group is None:
            self._group, self._recorder = self._connect(operation)
        group = self._group
        self._recorder.on_behalf_of = operation
        left_s = operation.issued_at + operation.timeout_s - time.monotonic()
        # What is left of the operation's own time, for all of its messages together.
        group.timeout_s = max(left_s, 0.001)
        try:
            payloads = work.body(group)  # 1, 2
        except (CollectiveTimeout, PeerLost) as error:
            _, _, ranks, *rest = error.args  # The error must name the caller's operation.
            raise type(error)(str(operation), operation.generation, ranks, *rest) from error
        seal = self._owner.seal
        payloads = {rank: opened(seal, payload, rank) for rank, payload in payloads.items()}
        values: dict[int, Any] = {}
        reason = trace = ""
        for rank, payload in payloads.items():  # 3
            try:
                values[rank] = loads(payload, work.map_location)
            except Exception as error:
                reason = (
                    f"rank {group.rank} cannot unpickle what rank {rank} sent: "
                    f"{type(error).__name__}: {error}"
                )
                trace = traceback.format_exc()
                break
        # Also after success: each rank has to know whether all could read.
        failure = self._unreadable(operation, group, reason, trace)
        output = None
        if failure is None:
            output = work.read(values)
        with self._in_flight.changed:
            # The generation has ended meanwhile, and the work has its error.
            if self._in_flight.failure is not None:
                raise fresh_copy(self._in_flight.failure)
            self._in_flight.works.popleft()
            work._output = output
            work.settle(failure)
            self._in_flight.changed.notify_all()
        work.call_back()

    def _compare(
        self, operation: Operation, group: BytesGroup, headers: list[tuple[int, ...]]
    ) -> None:
        _, blamed = usual_and_blamed(headers)
        if blamed:
            # All ranks see it, and so all of them take part.
            mine = words_of(operation.padded_site(), SITE_BYTES).tolist()
            sites = [torch.tensor(row, device="cpu") for row in all_gather_row(group, mine)]
            at = [bytes_of(row, SITE_BYTES).rstrip(b"\0").decode(errors="replace") for row in sites]
            issued = [_named(what) for what in headers]
            detail = describe_issued(
                [f"{what} at {site}" for what, site in zip(issued, at, strict=True)]
            )
            raise CollectiveMismatch(str(operation), operation.generation, blamed, detail)

    def _unreadable(
        self, operation: Operation, group: BytesGroup, reason: str, trace: str
    ) -> PayloadUnreadable | None:
        """The error, with the first failed rank's reason, equal on all ranks; None for success."""
        lengths = [row[0] for row in all_gather_row(group, (len(reason),))]
        ranks = [rank for rank, length in enumerate(lengths) if length]
        if not ranks:
            return None
        first = ranks[0]
        story = json.dumps([reason, trace]).encode() if group.rank == first else b""
        detail, where = json.loads(broadcast_bytes(group, story, first))
        return PayloadUnreadable(str(operation), operation.generation, ranks, detail, where)


def _named(what: tuple[int, ...]) -> str:
    kind, root, count = what
    of = f" of {count} objects" if count >= 0 else ""
    return f"{Kind(kind).name.lower()}{of}" + (f" with root {root}" if root >= 0 else "")
