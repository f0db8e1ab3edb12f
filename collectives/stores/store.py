"""Key-value stores through which ranks find each other before they can move tensors.

The names and meanings are those of torch.distributed's Store. Keys and values are any bytes; a
string stands for its UTF-8 form. `get` and `wait` block until the keys exist or the timeout is
over. A store carries a few small messages per generation, never tensors.

file_store.py has the store for processes of one host; torch_store.py converts stores to torch's and
back; rendezvous.py finds a store by its URL; signed_store.py signs what is in a store.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from ..contract.argument_kinds import check_kinds
from ..contract.deadlines import Seconds, checked_seconds
from ..contract.errors import StoreTimeout

Data = bytes | str
"""A key or a value; a string stands for its UTF-8 form."""

DEFAULT_TIMEOUT_S = 300.0

_NUMBERS = range(-(2**63), 2**63)  # the numbers that `add` can count, as in torch


def encoded(data: object, argument: str) -> bytes:
    """The bytes of a key or a value. Raises TypeError or ValueError naming `argument`."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, str):
        try:
            return data.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{argument} {data!r} has no UTF-8 form; pass bytes") from None
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data)
    # bytes(n) would return n zeros, so numbers are refused.
    raise TypeError(f"{argument} must be bytes or str, got {type(data).__name__}")


def encoded_keys(keys: Sequence[Data]) -> list[bytes]:
    # A string is a sequence, too: of keys of one character.
    if isinstance(keys, (bytes, str)):
        raise TypeError(f"keys must be a list of keys, got one key; write [{keys!r}]")
    return [encoded(key, "key") for key in keys]


def key_of_rank(name: bytes, rank: int) -> bytes:
    """The key that `gather` uses for a rank."""
    return b"%b/%d" % (name, rank)


def as_number(key: bytes, value: bytes) -> int:
    """The number that `add` finds under `key`. Raises ValueError for any other value."""
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            f"add: the value of key {readable(key)!r} is {value[:40]!r}, which is not a decimal "
            "number; delete the key first, or count under another key"
        ) from None


def checked_amount(amount: int) -> int:
    amount = operator.index(amount)
    # As in torch, whose stores hold 64 bits.
    if amount not in _NUMBERS:
        raise ValueError(f"add: amount must fit 64 bits, got {amount}")
    return amount


def readable(key: bytes) -> str:
    """A key as text, for errors."""
    return key.decode(errors="backslashreplace")


def timed_out(missing: Sequence[bytes], waited_s: float, detail: str = "") -> StoreTimeout:
    return StoreTimeout([readable(key) for key in missing], waited_s, detail)


class Store(ABC):
    """Keys and values by which ranks agree on names and addresses. Any thread may call it.

    Example:

        store: cl.Store = cl.HashStore()
        store.set_timeout(30)
        assert store.add("arrivals", 1) == 1
        assert store.compare_set("leader", "", "rank 0") == b"rank 0"
        assert store.multi_get(["arrivals", "leader"]) == [b"1", b"rank 0"]
    """

    timeout_s: float = DEFAULT_TIMEOUT_S

    secret: bytes | None = None
    """What its users sign values and objects with (signed_store.py); None: nothing is signed."""

    is_signed: bool = False
    """Whether values are signed, and checked when they are read."""

    def set_timeout(self, timeout_s: Seconds) -> None:
        """Set the seconds that `get` and `wait` wait if the call passes no timeout_s."""
        self.timeout_s = checked_seconds(timeout_s)

    @abstractmethod
    def set(self, key: Data, value: Data) -> None:
        """Write `value`, replacing an earlier value."""

    def post(self, key: Data, value: Data) -> None:
        """As `set`, but may return before the value can be read, and may not raise if it never can
        be: for a key that others wait for, followed by a call that waits for others."""
        self.set(key, value)

    @abstractmethod
    def check(self, keys: Sequence[Data]) -> bool:
        """Whether all keys exist now."""

    @abstractmethod
    def add(self, key: Data, amount: int) -> int:
        """Add to the decimal number under `key` (absent: 0) atomically; returns the new number."""

    @abstractmethod
    def compare_set(self, key: Data, expected: Data, desired: Data) -> bytes:
        """Write `desired` if the value is `expected`, or if it is absent and `expected` is empty.

        Returns the value afterwards (`expected` if the key is still absent).
        """

    @abstractmethod
    def append(self, key: Data, value: Data) -> None:
        """Append `value` to the value of `key`, atomically."""

    @abstractmethod
    def delete_key(self, key: Data) -> bool:
        """Remove `key`; returns whether it existed."""

    @abstractmethod
    def num_keys(self) -> int: ...

    @abstractmethod
    def wait(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> None:
        """Block until all keys exist. Raises StoreTimeout with the missing ones."""

    @abstractmethod
    def multi_get(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> list[bytes]:
        """Block until all keys exist; their values, in one round trip. Raises StoreTimeout."""

    def get(self, key: Data, timeout_s: Seconds | None = None) -> bytes:
        """Block until the key exists; returns its value. Raises StoreTimeout."""
        return self.multi_get([key], timeout_s)[0]

    def gather(
        self, name: Data, rank: int, size: int, value: Data, timeout_s: Seconds | None = None
    ) -> list[bytes]:
        """Write `value` under the key name/rank, and block until all `size` ranks have written
        theirs; the values, by rank. A rank that timed out may call it again with the same value.

        A store with a server of its own should do it in one round trip, in which no list of keys
        travels: of n ranks each would send n keys. Raises StoreTimeout with the missing keys.
        """
        start = encoded(name, "name")
        self.post(key_of_rank(start, rank), value)
        return self.multi_get([key_of_rank(start, one) for one in range(size)], timeout_s)

    def multi_set(self, keys: Sequence[Data], values: Sequence[Data]) -> None:
        """Write several values; not necessarily atomically."""
        for key, value in paired(keys, values):
            self.set(key, value)

    def _seconds(self, timeout_s: Seconds | None) -> float:
        """Seconds that a call may wait; with 0 it checks once."""
        if timeout_s is None:
            return self.timeout_s
        return checked_seconds(timeout_s, may_be_zero=True)


def paired(keys: Sequence[Data], values: Sequence[Data]) -> list[tuple[bytes, bytes]]:
    """The pairs that `multi_set` writes."""
    if len(keys) != len(values):
        raise ValueError(f"multi_set got {len(keys)} keys and {len(values)} values")
    return list(zip(encoded_keys(keys), (encoded(value, "value") for value in values), strict=True))


class Polling:
    """Pauses between two polls, which start short and grow."""

    LONGEST_S = 0.02

    def __init__(self, timeout_s: float) -> None:
        self._give_up_at = time.monotonic() + timeout_s
        self._pause_s = 0.0005

    def next_pause_s(self) -> float | None:
        """Seconds to pause before the next poll; None when the time is over."""
        left_s = self._give_up_at - time.monotonic()
        if left_s <= 0:
            return None
        # The last poll is at the deadline, and not after it.
        pause_s = min(self._pause_s, left_s)
        self._pause_s = min(self._pause_s * 2, self.LONGEST_S)
        return pause_s


class DictStore(Store):
    """A store over a dictionary of this process; subclasses may share it with other processes."""

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: Data, value: Data) -> None:
        key, value = encoded(key, "key"), encoded(value, "value")
        with self._changed, self._exclusive():
            self._write(key, value)

    def check(self, keys: Sequence[Data]) -> bool:
        wanted = encoded_keys(keys)
        with self._changed:
            self._refresh()
            return all(key in self._data for key in wanted)

    def add(self, key: Data, amount: int) -> int:
        key, amount = encoded(key, "key"), checked_amount(amount)
        # Read and written in one turn: two ranks that add would lose one of the amounts.
        with self._changed, self._exclusive():
            total = checked_amount(as_number(key, self._data.get(key, b"0")) + amount)
            self._write(key, str(total).encode())
            return total

    def compare_set(self, key: Data, expected: Data, desired: Data) -> bytes:
        key, expected = encoded(key, "key"), encoded(expected, "expected")
        desired = encoded(desired, "desired")
        with self._changed, self._exclusive():
            current = self._data.get(key)
            # As in torch: an empty `expected` stands for an absent key.
            if current == expected or (current is None and not expected):
                self._write(key, desired)
            return self._data.get(key, expected)

    def append(self, key: Data, value: Data) -> None:
        key, value = encoded(key, "key"), encoded(value, "value")
        with self._changed, self._exclusive():
            self._write(key, self._data.get(key, b"") + value)

    def delete_key(self, key: Data) -> bool:
        key = encoded(key, "key")
        with self._changed, self._exclusive():
            existed = key in self._data
            # A file would get an entry that says nothing.
            if existed:
                self._write(key, None)
            return existed

    def forget(self, is_over: Callable[[bytes], bool]) -> None:
        """Remove the keys of which `is_over` says so."""
        with self._changed, self._exclusive():
            for key in [key for key in self._data if is_over(key)]:
                self._write(key, None)

    def num_keys(self) -> int:
        with self._changed:
            self._refresh()
            return len(self._data)

    def wait(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> None:
        with self._changed:
            self._await(encoded_keys(keys), self._seconds(timeout_s))

    def multi_get(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> list[bytes]:
        wanted = encoded_keys(keys)
        with self._changed:
            self._await(wanted, self._seconds(timeout_s))
            return [self._data[key] for key in wanted]

    def multi_set(self, keys: Sequence[Data], values: Sequence[Data]) -> None:
        pairs = paired(keys, values)
        with self._changed, self._exclusive():
            for key, value in pairs:
                self._write(key, value)

    def _await(self, keys: Sequence[bytes], timeout_s: float) -> None:
        """Return, with the condition held, when all keys are in the dictionary."""
        polling = Polling(timeout_s)
        while True:
            self._refresh()
            missing = [key for key in keys if key not in self._data]
            if not missing:
                return
            pause_s = polling.next_pause_s()
            if pause_s is None:
                raise timed_out(missing, timeout_s, self._hint())
            self._changed.wait(pause_s)  # Other processes cannot notify this condition.

    def _hint(self) -> str:
        """A detail about this store for the StoreTimeout."""
        return ""

    def _refresh(self) -> None:
        """Read what other processes wrote into the dictionary."""

    def _exclusive(self) -> AbstractContextManager[None]:
        """A block in which no other process writes and the dictionary is up to date."""
        return contextlib.nullcontext()

    def _write(self, key: bytes, value: bytes | None) -> None:
        """Write a value (None deletes), visible to all users of the store."""
        if value is None:
            del self._data[key]
        else:
            self._data[key] = value
        self._changed.notify_all()


class HashStore(DictStore):
    """A store for the threads of one process.

        store = cl.HashStore()
        store.set("address", "10.0.0.1")
        assert store.get("address") == b"10.0.0.1"

    Other processes cannot see it; they need a FileStore, or `store_from_url`.
    """


class PrefixStore(Store):
    """Part of another store: a prefix before every key, so that users of one store cannot collide.

        store = cl.HashStore()
        cl.PrefixStore("first", store).set("key", "1")
        cl.PrefixStore("second", store).set("key", "2")

    Each call is one call of the underlying store.
    """

    def __init__(self, prefix: Data, store: Store) -> None:
        check_kinds(PrefixStore.__init__, locals())
        self.prefix = prefix
        self.store = store
        self.timeout_s = store.timeout_s
        self.secret = store.secret
        self.is_signed = store.is_signed
        self._start = encoded(prefix, "prefix") + b"/"

    def _key(self, key: Data) -> bytes:
        return self._start + encoded(key, "key")

    def _keys(self, keys: Sequence[Data]) -> list[bytes]:
        return [self._start + key for key in encoded_keys(keys)]

    def set(self, key: Data, value: Data) -> None:
        self.store.set(self._key(key), value)

    def post(self, key: Data, value: Data) -> None:
        self.store.post(self._key(key), value)

    def check(self, keys: Sequence[Data]) -> bool:
        return self.store.check(self._keys(keys))

    def add(self, key: Data, amount: int) -> int:
        return self.store.add(self._key(key), amount)

    def compare_set(self, key: Data, expected: Data, desired: Data) -> bytes:
        return self.store.compare_set(self._key(key), expected, desired)

    def append(self, key: Data, value: Data) -> None:
        self.store.append(self._key(key), value)

    def delete_key(self, key: Data) -> bool:
        return self.store.delete_key(self._key(key))

    def num_keys(self) -> int:
        """The number of keys in the whole underlying store, as in torch."""
        return self.store.num_keys()

    def wait(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> None:
        self.store.wait(self._keys(keys), self._seconds(timeout_s))

    def multi_get(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> list[bytes]:
        return self.store.multi_get(self._keys(keys), self._seconds(timeout_s))

    def gather(
        self, name: Data, rank: int, size: int, value: Data, timeout_s: Seconds | None = None
    ) -> list[bytes]:
        return self.store.gather(self._key(name), rank, size, value, self._seconds(timeout_s))

    def multi_set(self, keys: Sequence[Data], values: Sequence[Data]) -> None:
        self.store.multi_set(self._keys(keys), values)
