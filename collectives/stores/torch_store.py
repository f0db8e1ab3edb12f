"""Conversions between the stores of Chorusline and those of torch.

TorchStore(store)              for dist.init_process_group(store=...) and dist.PrefixStore
StoreFromTorch(torch_store)    for Group.create(...) through an existing TCPStore
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store as AnyTorchStore

from ..contract.argument_kinds import check_kinds
from ..contract.deadlines import Seconds
from ..contract.errors import StoreLost, StoreTimeout
from .store import (
    Data,
    Polling,
    Store,
    as_number,
    checked_amount,
    encoded,
    encoded_keys,
    paired,
    timed_out,
)

_ANSWER_S = 10.0  # A live server answers within a millisecond; a host that swaps takes longer.
_ABSENT = b"\0no value"  # What no user writes.

T = TypeVar("T")


class TorchStore(AnyTorchStore):
    """A `Store` as a torch.distributed.Store, for Python and for torch's C++.

        store = cl.TorchStore(cl.HashStore())
        store.set("address", "10.0.0.5")
        assert store.get("address") == b"10.0.0.5"
        store.release()

    Timeouts raise torch's DistStoreError. Values are any bytes, but torch passes keys to Python as
    strings, so keys must be UTF-8.

    Instances stay until `release`: C++ keeps only its own half of a store, and would call a Python
    half that is already collected.
    """

    _kept: ClassVar[set[TorchStore]] = set()

    def __init__(self, store: Store) -> None:
        super().__init__()
        check_kinds(TorchStore.__init__, locals())
        self.store = store
        # torch keeps the timeout in its half, where dist.PrefixStore changes it unseen.
        self.set_timeout(timedelta(seconds=store.timeout_s))
        TorchStore._kept.add(self)

    def release(self) -> None:
        """Let this instance be collected; call it after torch has released the store."""
        TorchStore._kept.discard(self)

    def clone(self) -> TorchStore:
        """This store itself, which any number of threads may use."""
        return self

    def set(self, key: str, value: Data) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        return self.store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = _seconds(self) if timeout is None else timeout.total_seconds()
        try:
            self.store.wait(keys, limit_s)
        except StoreTimeout as error:
            raise dist.DistStoreError(f"wait timeout: {error}") from error

    def compare_set(self, key: str, expected_value: Data, desired_value: Data) -> bytes:
        return self.store.compare_set(key, expected_value, desired_value)

    def append(self, key: str, value: Data) -> None:
        self.store.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        try:
            return self.store.multi_get(keys, _seconds(self))
        except StoreTimeout as error:
            raise dist.DistStoreError(f"wait timeout: {error}") from error

    def multi_set(self, keys: list[str], values: Sequence[Data]) -> None:
        self.store.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set exist."""
        return True

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)

    def num_keys(self) -> int:
        return self.store.num_keys()

    # C++ looks for the last two methods under these names.
    deleteKey = delete_key
    getNumKeys = num_keys


class StoreFromTorch(Store):
    """A torch store (TCPStore, FileStore, HashStore, PrefixStore) as a `Store`.

        store = cl.StoreFromTorch(torch.distributed.HashStore())
        with cl.Group.create(store, rank=0, size=1) as alone:
            alone.barrier().wait()

    The instance keeps `torch_store`, so a TCPStore that hosts a server keeps hosting it. It uses
    a clone, which other users of `torch_store` do not block. It polls, because torch's waits cannot
    be interrupted, know only whole seconds (FileStore), and block other threads (TCPStore). A
    stopped server would block its clients forever, so a separate thread makes every call: no
    answer for 10 s, or a broken connection, raises StoreLost. After the late answer of a server
    that had paused, calls succeed again.
    """

    def __init__(self, torch_store: Any, server: Any = None) -> None:
        """server: the torch store that hosts what this one is a client of; it is kept as well."""
        self.torch_store: Any = torch_store
        self._server = server
        if not isinstance(torch_store, AnyTorchStore):
            raise TypeError(
                f"torch_store must be a torch.distributed.Store, got {type(torch_store).__name__}"
            )
        self.timeout_s = _seconds(torch_store)
        self._caller = Caller()
        self._appending = threading.Lock()
        # What is known of the loss, and the call without an answer, if that is it. None: no loss.
        self._lost: tuple[str, Future[Any] | None] | None = None
        self._clone: Any = self._call("clone", self.torch_store.clone)

    def set(self, key: Data, value: Data) -> None:
        self._call("set", self._clone.set, encoded(key, "key"), encoded(value, "value"))

    def check(self, keys: Sequence[Data]) -> bool:
        return bool(self._call("check", self._clone.check, encoded_keys(keys)))

    def add(self, key: Data, amount: int) -> int:
        key, amount = encoded(key, "key"), checked_amount(amount)
        # A TCPStore closes the connection if the value is not a number.
        if (found := self._value(key)) != _ABSENT:
            as_number(key, found)
        return int(self._call("add", self._clone.add, key, amount))

    def compare_set(self, key: Data, expected: Data, desired: Data) -> bytes:
        expected, desired = encoded(expected, "expected"), encoded(desired, "desired")
        function = self._clone.compare_set
        return bytes(self._call("compare_set", function, encoded(key, "key"), expected, desired))

    def append(self, key: Data, value: Data) -> None:
        key, value = encoded(key, "key"), encoded(value, "value")
        # TCPStore appends on its server; FileStore has nothing like it.
        if self._clone.has_extended_api():
            self._call("append", self._clone.append, key, value)
            return
        # For FileStore. torch's fallback loses a value that equals the whole earlier value. Here,
        # if two processes append equal values at the same instant, one of them is still lost.
        with self._appending:
            found = self._value(key)
            stands = b"" if found == _ABSENT else found
            while (found := self.compare_set(key, stands, stands + value)) != stands + value:
                stands = found

    def delete_key(self, key: Data) -> bool:
        key = encoded(key, "key")  # torch's FileStore reports success for absent keys.
        return self.check([key]) and bool(self._call("delete_key", self._clone.delete_key, key))

    def num_keys(self) -> int:
        """The number of keys, which may include one or two that torch uses."""
        return int(self._call("num_keys", self._clone.num_keys))

    def wait(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> None:
        waited_s = self._seconds(timeout_s)
        missing = encoded_keys(keys)
        polling = Polling(waited_s)
        while not self.check(missing):
            pause_s = polling.next_pause_s()
            if pause_s is None:
                # Only for the error: each question is a round trip.
                missing = [key for key in missing if not self.check([key])]
                if not missing:
                    return
                raise timed_out(missing, waited_s)
            time.sleep(pause_s)

    def multi_get(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> list[bytes]:
        wanted = encoded_keys(keys)
        self.wait(wanted, timeout_s)
        return list(self._call("multi_get", self._clone.multi_get, wanted)) if wanted else []

    def multi_set(self, keys: Sequence[Data], values: Sequence[Data]) -> None:
        pairs = paired(keys, values)
        names, contents = [key for key, _ in pairs], [value for _, value in pairs]
        self._call("multi_set", self._clone.multi_set, names, contents)

    def _value(self, key: bytes) -> bytes:
        """The value of a key; _ABSENT if there is none. A get would block until there is one, if
        another client deletes the key after a check."""
        return self.compare_set(key, _ABSENT, _ABSENT)

    def _call(self, operation: str, function: Callable[..., T], *arguments: object) -> T:
        if (lost := self._lost) is not None:
            detail, unanswered = lost
            # The thread is stuck in that call: what follows would wait for it.
            if unanswered is None or not unanswered.done():
                raise StoreLost(operation, detail)
            self._lost = None  # The server's host had only paused.
        unanswered = None
        kind = type(self.torch_store).__name__
        try:
            return self._caller.call(_ANSWER_S, function, *arguments)
        except CallTimedOut as error:
            unanswered = error.answer
            detail = f"torch's {kind} did not answer within {_ANSWER_S:g} s"
        except dist.DistNetworkError as error:
            reason = str(error).splitlines()[0]
            detail = f"the server of torch's {kind} can no longer be reached: {reason}"
        detail += ". Check that the process that hosts it, usually rank 0, still runs"
        self._lost = detail, unanswered
        raise StoreLost(operation, detail)


def _seconds(torch_store: Any) -> float:
    """The timeout of a torch store."""
    return float(torch_store.timeout.total_seconds())


class CallTimedOut(Exception):
    """A call of a Caller did not end in time, and may never end. answer: done if it does."""

    def __init__(self, answer: Future[Any]) -> None:
        super().__init__()
        self.answer = answer


class Caller:
    """Makes calls that cannot be interrupted, in its own thread, so that the caller can give up.

    After CallTimedOut the thread is still in that call, and later calls queue after it.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        serving = threading.Thread(
            target=_serve, args=(self._calls,), name="chorusline-torch-store", daemon=True
        )
        serving.start()
        # The thread refers to the queue alone, and ends with its owner.
        weakref.finalize(self, self._calls.put, None)

    def call(self, limit_s: float, function: Callable[..., T], *arguments: object) -> T:
        """What function(*arguments) returns. Raises its errors, or CallTimedOut after `limit_s`."""
        answer: Future[T] = Future()
        self._calls.put((answer, function, arguments))
        try:
            return answer.result(limit_s)
        except TimeoutError:
            # The function itself has raised it.
            if answer.done():
                raise
            raise CallTimedOut(answer) from None


_Call = tuple[Future[Any], Callable[..., Any], tuple[object, ...]]


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        answer, function, arguments = call
        try:
            answer.set_result(function(*arguments))
        except BaseException as error:
            answer.set_exception(error)
        del call, answer, function, arguments  # An idle thread must not keep objects alive.
