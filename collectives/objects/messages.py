"""Python objects from one rank to another: each list takes two messages, which are one work.

The receiver does not know the length of a pickle. So a header of three numbers precedes the
payload. Both travel as tensors do (`Communicator.send`), not on the objects' channel: all ranks
have to make the channel, and only two know of a message.

Many lists may be under way between two ranks. Where messages have tags, every payload has its own,
which its header names, so receives may ask for payloads in any order. Without tags (NCCL), messages
are matched in the order of issue, and `recv` blocks until it has issued both.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import torch

from ..contract.communicator import Communicator
from ..contract.dtypes import DTYPE_INDEX
from ..contract.errors import CollectiveError, CollectiveMismatch, GroupAborted, PayloadUnreadable
from ..contract.modes import outside_modes
from ..contract.operation import FIRST_OBJECT_TAG, STARTED, Kind, OnBehalf, Operation
from ..contract.work import SettledWork, Work, every_cuda_device
from ..stores.signed_store import Seal
from .payloads import MapLocation, bytes_of, loads, opened, words_of

_HEADER_TAG = FIRST_OBJECT_TAG
_NUM_PAYLOAD_TAGS = 1 << 20  # the tags after _HEADER_TAG, used in turn
_INT64 = DTYPE_INDEX[torch.int64]

Script = Generator[Work, None, Any]
"""Yields each work that it waits for; returns the result of the whole."""


class ScriptedWork(SettledWork):
    """Works that are issued one after the other, each when the one before has succeeded.

    The script runs in the thread that detects that it can continue; never in two threads at once.
    abort: ends the generation on all ranks.
    is_apart: a callback leaves the script to a thread of its own, because it waits for a GPU, and
        the thread that calls back watches the deadlines of all works.
    """

    def __init__(
        self,
        operation: Operation,
        communicator: Communicator,
        abort: Callable[[CollectiveError], None],
        script: Script,
        *,
        is_apart: bool = False,
    ) -> None:
        self._changed = threading.Condition()
        super().__init__(operation, self._changed)
        self._rank = communicator.rank
        self._device = communicator.device
        self._abort = abort
        self._script = script
        self._is_apart = is_apart
        self._awaited: Work | None = None  # None while the script runs, and after its end
        operation.state = STARTED
        self._resume()

    def step(self) -> bool:
        """Block until the awaited work has ended and the next work, if there is one, has been
        issued. Returns False if the script is over."""
        awaited = self._next_awaited()
        if awaited is None:
            return False
        with contextlib.suppress(CollectiveError):  # `_continue` handles the error.
            awaited.wait_on_host()
        self._continue()
        self._next_awaited()  # Another thread may be running the script.
        return True

    def _next_awaited(self) -> Work | None:
        """The awaited work; blocks while the script runs. None if the script is over."""
        try:
            with self._changed:
                while self._awaited is None and not self.done:
                    self._changed.wait()
                return self._awaited
        except BaseException as error:  # An interrupt: the other rank waits for this one.
            self._end_generation(f"{type(error).__name__} during {self.operation}")
            raise

    def _continue(self) -> None:
        awaited = self._awaited
        if awaited is None or not awaited.is_completed():
            return
        with self._changed:
            if self._awaited is not awaited:
                return  # Another thread has taken it.
            self._awaited = None
        error = awaited.error()
        # The script waits for a message that will not come.
        if isinstance(error, CollectiveError):
            self._script.close()
            self._end(error)
        else:
            self._resume()

    @outside_modes
    def _resume(self) -> None:
        try:
            following = next(self._script)
        except StopIteration as ended:
            self._output = ended.value
            self._end(None)
            return
        except CollectiveError as error:
            self._end(error)
            return
        except BaseException as error:
            reason = f"{type(error).__name__} during {self.operation}: {error}"
            failure = GroupAborted(self.operation.generation, [self._rank], reason)
            self._abort(failure)
            self._end(failure)
            # An interrupt is the caller's; the work has its own error.
            if not isinstance(error, Exception):
                raise
            return
        with self._changed:
            self._awaited = following
            self._changed.notify_all()
        following.add_done_callback(self._continue_apart if self._is_apart else self._continue)

    def _continue_apart(self) -> None:
        def continue_on_gpu() -> None:
            torch.cuda.set_device(self._device)
            self._continue()

        name = "chorusline-object-message"
        threading.Thread(target=continue_on_gpu, name=name, daemon=True).start()

    def _end(self, failure: CollectiveError | None) -> None:
        with self._changed:
            self.settle(failure)
            self._changed.notify_all()
        self.call_back()

    # -- a work ------------------------------------------------------------------------------------

    def _block(self) -> None:
        while self.step():
            pass
        self._raise_failure()

    def is_completed(self) -> bool:
        self._continue()
        return self.done

    def _end_generation(self, reason: str) -> None:
        self._abort(GroupAborted(self.operation.generation, [self._rank], reason))

    def _cuda_devices(self) -> list[torch.device]:
        return every_cuda_device()


class ObjectMessages:
    """The messages of one rank of a group. communicator, seal: the group's. abort: ends it."""

    def __init__(
        self,
        communicator: Communicator,
        abort: Callable[[CollectiveError], None],
        seal: Seal | None,
    ) -> None:
        self._communicator = communicator
        self._abort = abort
        self._seal = seal
        self._sent: Counter[int] = Counter()  # lists, by receiver
        # Of another priority than the communicator's: torch deals streams of one priority in turn.
        self._down: torch.cuda.Stream | None = None  # None: between CPUs
        if communicator.device.type != "cpu":
            self._down = torch.cuda.Stream(communicator.device, priority=-1)

    @outside_modes
    def send(self, operation: Operation, payload: bytes) -> ScriptedWork:
        number = self._sent[operation.peer]
        self._sent[operation.peer] += 1
        counts = [len(payload), operation.numel, number % _NUM_PAYLOAD_TAGS]
        header = torch.tensor(counts, device="cpu")
        words = words_of(payload, len(payload))
        device = self._communicator.device

        def script() -> Script:
            # Both are issued at once: without tags, messages of two lists must not interleave.
            parts = [
                self._send(operation, header.to(device), _HEADER_TAG),
                self._send(operation, words.to(device), _HEADER_TAG + 1 + int(header[2])),
            ]
            yield from parts

        return ScriptedWork(operation, self._communicator, self._abort, script())

    def recv(
        self, operation: Operation, objects: list[Any], map_location: MapLocation
    ) -> ScriptedWork:
        rank, device = self._communicator.rank, self._communicator.device

        def script() -> Script:
            header = torch.zeros(3, dtype=torch.int64, device=device)
            work = self._recv(operation, header, operation.peer, _HEADER_TAG)
            if self._communicator.has_tags:
                yield work
            else:
                # The receive of the payload has to be issued in its turn, and its length comes with
                # the header.
                work.wait_on_host()
            source = operation.peer = work.operation.peer
            length, count, number = header.tolist()
            # Before the payload is read: the lists were not meant for each other.
            if count != len(objects):
                raise self._mismatch(operation, count)
            words = words_of(b"", length).to(device)
            yield self._recv(operation, words, source, _HEADER_TAG + 1 + number)
            payload = opened(self._seal, self._bytes_of(words, length), source)
            try:
                received = loads(payload, map_location)
            except Exception as error:
                detail = (
                    f"rank {rank} cannot unpickle what rank {source} sent: "
                    f"{type(error).__name__}: {error}"
                )
                raise PayloadUnreadable(
                    str(operation), operation.generation, [rank], detail, traceback.format_exc()
                ) from error
            objects[:] = received
            return objects

        is_apart = self._down is not None
        return ScriptedWork(operation, self._communicator, self._abort, script(), is_apart=is_apart)

    def _bytes_of(self, words: torch.Tensor, length: int) -> bytes:
        if self._down is None:
            return bytes_of(words, length)
        # Not after what the program has launched, which may wait for other ranks.
        with torch.cuda.stream(self._down):
            return bytes_of(words, length)

    def _send(self, whole: Operation, tensor: torch.Tensor, tag: int) -> Work:
        part = self._part(whole, Kind.SEND, tensor, whole.peer, tag)
        return self._communicator.send(part, tensor)

    def _recv(self, whole: Operation, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        part = self._part(whole, Kind.RECV, tensor, peer, tag)
        return self._communicator.recv(part, tensor)

    def _part(
        self, whole: Operation, kind: Kind, tensor: torch.Tensor, peer: int, tag: int
    ) -> Operation:
        part = OnBehalf(
            kind,
            whole.sequence,
            whole.generation,
            tensor.numel(),
            _INT64,
            -1,
            whole.timeout_s,
            whole.issued_at,
            peer,
            tag if self._communicator.has_tags else 0,
        )
        part.whole, part.caller, part.caller_at = whole, whole.caller, whole.caller_at
        return part

    def _mismatch(self, operation: Operation, count: int) -> CollectiveMismatch:
        rank, source = self._communicator.rank, operation.peer
        detail = f"rank {source} sent {count} objects and rank {rank} expects {operation.numel}"
        remedy = "The lists of both ranks must have the same length."
        error = CollectiveMismatch(
            str(operation), operation.generation, sorted({rank, source}), detail, remedy
        )
        self._abort(error)
        return error
