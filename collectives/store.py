"""Key-value stores through which ranks find each other before they can move tensors.

The names and meanings are those of torch.distributed's Store. Keys are strings, values bytes (a
string is encoded as UTF-8). `get` and `wait` block until the keys exist or the timeout is over.
A store carries a few small messages per generation, never tensors.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from .errors import StoreTimeout

DEFAULT_TIMEOUT_S = 300.0


def _as_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class Store(ABC):
    """What ranks need to agree on names and addresses. All methods may be called by any thread."""

    timeout_s: float = DEFAULT_TIMEOUT_S

    def set_timeout(self, timeout_s: float) -> None:
        """Seconds that `get` and `wait` wait when the call itself says nothing."""
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.timeout_s = timeout_s

    @abstractmethod
    def set(self, key: str, value: bytes | str) -> None:
        """Write, over whatever is there."""

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist now."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number under `key` (absent: 0), in one step; the new number."""

    @abstractmethod
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write `desired` if the value is `expected`, or if absent and `expected` is empty.

        Returns the value that stands afterwards (`expected` if the key is absent still).
        """

    @abstractmethod
    def append(self, key: str, value: bytes | str) -> None:
        """Write `value` behind what is there, in one step."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Remove; whether it was there."""

    @abstractmethod
    def num_keys(self) -> int: ...

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Block until all keys exist. Raises StoreTimeout with the missing ones."""

    @abstractmethod
    def _read(self, key: str) -> bytes:
        """The value of a key that exists."""

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Block until the key exists; its value. Raises StoreTimeout."""
        self.wait([key], timeout_s)
        return self._read(key)

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        self.wait(keys, timeout_s)
        return [self._read(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set got {len(keys)} keys and {len(values)} values")
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


class _DictStore(Store):
    """The rules of a store over a dictionary in this process; subclasses say how it is shared."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes | str) -> None:
        with self._changed, self._exclusive():
            self._write(key, _as_bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            self._refresh()
            return all(key in self._data for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._changed, self._exclusive():
            total = int(self._data.get(key, b"0")) + amount
            self._write(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        expected = _as_bytes(expected)
        with self._changed, self._exclusive():
            current = self._data.get(key)
            if current == expected or (current is None and not expected):
                self._write(key, _as_bytes(desired))
            return self._data.get(key, expected)

    def append(self, key: str, value: bytes | str) -> None:
        with self._changed, self._exclusive():
            self._write(key, self._data.get(key, b"") + _as_bytes(value))

    def delete_key(self, key: str) -> bool:
        with self._changed, self._exclusive():
            existed = key in self._data
            if existed:
                self._write(key, None)
            return existed

    def num_keys(self) -> int:
        with self._changed:
            self._refresh()
            return len(self._data)

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        waited_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + waited_s
        pause_s = 0.0005
        with self._changed:
            while True:
                self._refresh()
                missing = [key for key in keys if key not in self._data]
                if not missing:
                    return
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise StoreTimeout(missing, waited_s)
                # Other processes cannot notify this condition: poll, ever more slowly.
                self._changed.wait(min(left_s, pause_s))
                pause_s = min(pause_s * 2, 0.02)

    def _read(self, key: str) -> bytes:
        with self._changed:
            self._refresh()
            return self._data[key]

    def _refresh(self) -> None:
        """Take in what other processes wrote."""

    def _exclusive(self) -> _Held:
        """Nobody else reads and writes until released; the dictionary is fresh."""
        return _Held(None)

    def _write(self, key: str, value: bytes | None) -> None:
        """Make a change (None deletes) and show it to everybody."""
        if value is None:
            del self._data[key]
        else:
            self._data[key] = value
        self._changed.notify_all()


class _Held:
    """A lock on a file, or none, for the length of a with-block."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class HashStore(_DictStore):
    """A store for the threads of one process."""


class FileStore(_DictStore):
    """A store in a file, for processes that share a file system.

    The file is a log of writes, each of which holds a lock (flock), so no server is needed. Give
    every run a path of its own, and remove the file when the run is over: the keys of an earlier
    run count. Every process makes its own; one that was inherited by fork shares the lock.
    """

    _ENTRY = struct.Struct("<IiQ")  # bytes of key, bytes of value (-1: deleted), reserved

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._seen = 0  # bytes of the log that are in the dictionary

    def _refresh(self) -> None:
        end = os.fstat(self._file).st_size
        if end == self._seen:
            return
        log = os.pread(self._file, end - self._seen, self._seen)
        at = 0
        while at + self._ENTRY.size <= len(log):
            key_bytes, value_bytes, _ = self._ENTRY.unpack_from(log, at)
            key_at = at + self._ENTRY.size
            value_at = key_at + key_bytes
            next_at = value_at + max(value_bytes, 0)
            if next_at > len(log):
                break  # Its writer is not done yet, or was killed.
            key = log[key_at:value_at].decode()
            if value_bytes < 0:
                self._data.pop(key, None)
            else:
                self._data[key] = log[value_at:next_at]
            at = next_at
        self._seen += at

    def _exclusive(self) -> _Held:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._refresh()
        if os.fstat(self._file).st_size > self._seen:
            os.ftruncate(self._file, self._seen)  # Half an entry: its writer was killed.
        return _Held(self._file)

    def _write(self, key: str, value: bytes | None) -> None:
        encoded = key.encode()
        size = -1 if value is None else len(value)
        os.write(self._file, self._ENTRY.pack(len(encoded), size, 0) + encoded + (value or b""))
        self._refresh()

    def close(self) -> None:
        os.close(self._file)


class PrefixStore(Store):
    """Another store with a prefix before every key, so that users of one store cannot collide."""

    def __init__(self, prefix: str, store: Store) -> None:
        self.prefix = prefix
        self.store = store
        self.timeout_s = store.timeout_s

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def set(self, key: str, value: bytes | str) -> None:
        self.store.set(self._key(key), value)

    def check(self, keys: Sequence[str]) -> bool:
        return self.store.check([self._key(key) for key in keys])

    def add(self, key: str, amount: int) -> int:
        return self.store.add(self._key(key), amount)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self.store.compare_set(self._key(key), expected, desired)

    def append(self, key: str, value: bytes | str) -> None:
        self.store.append(self._key(key), value)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(self._key(key))

    def num_keys(self) -> int:
        """Keys of the whole store below, as in torch."""
        return self.store.num_keys()

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        waited_s = self.timeout_s if timeout_s is None else timeout_s
        self.store.wait([self._key(key) for key in keys], waited_s)

    def _read(self, key: str) -> bytes:
        return self.store._read(self._key(key))
