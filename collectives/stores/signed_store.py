"""A shared secret: only processes that know it may write into a store and send objects.

A store of `tcp://` or `env://` is a port that everybody on the network may reach, and Gloo and NCCL
listen as well. What comes from there decides where a rank connects, and objects are unpickled,
which runs code. With a secret, every value that a rank writes into the store, and every object that
it sends over such a network, carries an HMAC-SHA256 of the content and of its place; a rank reads
nothing else.

What it does not do: it encrypts nothing, it does not sign tensors, and it cannot keep anybody who
reaches the port from deleting keys or filling the host's memory. Nor does it keep them from a
replay: an older value of a key may be put back under that key, and an object of a rank may be sent
again in its group, in the place of another one or to another rank.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Sequence

from ..contract.argument_kinds import check_kinds
from ..contract.deadlines import Seconds
from ..contract.errors import SecretMismatch
from .store import (
    Data,
    Store,
    as_number,
    checked_amount,
    encoded,
    encoded_keys,
    key_of_rank,
    paired,
    readable,
)

VARIABLE = "CHORUSLINE_SECRET"

_MAGIC = b"signed 1"
_FRAME = struct.Struct("<8s16sQ32s")  # magic, a random number, bytes of the value, the HMAC
_TAG_BYTES = 32
_NONCE_BYTES = 16
_SHORTEST = 16


def checked_secret(secret: object, argument: str = "secret") -> bytes:
    """The bytes of a secret. Raises TypeError or ValueError naming `argument`, not the secret."""
    if not isinstance(secret, str | bytes):
        raise TypeError(f"{argument} must be a string or bytes, got {type(secret).__name__}")
    try:
        known = secret.encode(errors="surrogateescape") if isinstance(secret, str) else secret
    except UnicodeEncodeError:
        raise ValueError(f"{argument} has half of a surrogate pair in it") from None
    if len(known) < _SHORTEST:
        raise ValueError(
            f"{argument} has {len(known)} bytes, and one of fewer than {_SHORTEST} can be guessed; "
            "`python -c 'import secrets; print(secrets.token_hex())'` prints a good one"
        )
    return known


def new_secret() -> bytes:
    """A secret for ranks that are handed it by another way than the store."""
    return os.urandom(32)


def signed(store: Store, secret: str | bytes | None = None) -> Store:
    """`store`, with values that are signed if there is a secret: the one passed, the store's own,
    or that in the environment variable CHORUSLINE_SECRET. All ranks need the same one."""
    if store.is_signed:
        return store
    if secret is not None:
        return SignedStore(store, secret)
    if store.secret is not None:
        return SignedStore(store, store.secret)
    if os.environ.get(VARIABLE):
        return SignedStore(store, checked_secret(os.environ[VARIABLE], VARIABLE))
    return store


class SignedStore(Store):
    """Another store, in which this one's values are signed with a secret, each for its key.

        store = cl.SignedStore(cl.HashStore(), secret="at least 16 bytes")
        store.set("address", "10.0.0.5")
        assert store.get("address") == b"10.0.0.5"

    A value is a sequence of frames, because `append` cannot read what is there already and sign it
    together with its addition. Reading a value that somebody without the secret wrote raises
    SecretMismatch.
    """

    is_signed = True

    def __init__(self, store: Store, secret: str | bytes) -> None:
        """secret: at least 16 bytes. Raises ValueError for a shorter one."""
        check_kinds(SignedStore.__init__, locals())
        self.store = store
        self.secret: bytes = checked_secret(secret)
        self.timeout_s = store.timeout_s

    def set(self, key: Data, value: Data) -> None:
        key = encoded(key, "key")
        self.store.set(key, self._signed(key, value))

    def post(self, key: Data, value: Data) -> None:
        key = encoded(key, "key")
        self.store.post(key, self._signed(key, value))

    def check(self, keys: Sequence[Data]) -> bool:
        return self.store.check(keys)

    def add(self, key: Data, amount: int) -> int:
        key, amount = encoded(key, "key"), checked_amount(amount)
        found = b""
        while True:
            before = as_number(key, self._opened(key, found)) if found else 0
            total = checked_amount(before + amount)
            wanted = self._signed(key, str(total).encode())
            now = self.store.compare_set(key, found, wanted)
            if now == wanted:
                return total
            found = b"" if now == found else now  # Equal: the key was deleted in between.

    def compare_set(self, key: Data, expected: Data, desired: Data) -> bytes:
        key, expected = encoded(key, "key"), encoded(expected, "expected")
        desired = encoded(desired, "desired")
        wanted = self._signed(key, desired)
        # A frame has a random number, so a new one of `expected` equals no value: this only reads.
        guess = self._signed(key, expected) if expected else b""
        while True:
            now = self.store.compare_set(key, guess, wanted)
            if now == wanted:
                return desired
            if now == guess:  # The key is absent.
                if expected:
                    return expected
                guess = b""
                continue
            found = self._opened(key, now)
            if found != expected:
                return found
            guess = now

    def append(self, key: Data, value: Data) -> None:
        key = encoded(key, "key")
        self.store.append(key, self._signed(key, value))

    def delete_key(self, key: Data) -> bool:
        return self.store.delete_key(key)

    def num_keys(self) -> int:
        """The number of keys in the whole underlying store."""
        return self.store.num_keys()

    def wait(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> None:
        self.store.wait(keys, self._seconds(timeout_s))

    def multi_get(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> list[bytes]:
        wanted = encoded_keys(keys)
        found = self.store.multi_get(wanted, self._seconds(timeout_s))
        return [self._opened(key, value) for key, value in zip(wanted, found, strict=True)]

    def gather(
        self, name: Data, rank: int, size: int, value: Data, timeout_s: Seconds | None = None
    ) -> list[bytes]:
        start = encoded(name, "name")
        mine = self._signed(key_of_rank(start, rank), value)
        found = self.store.gather(start, rank, size, mine, self._seconds(timeout_s))
        return [self._opened(key_of_rank(start, one), value) for one, value in enumerate(found)]

    def multi_set(self, keys: Sequence[Data], values: Sequence[Data]) -> None:
        pairs = paired(keys, values)
        signatures = [self._signed(key, value) for key, value in pairs]
        self.store.multi_set([key for key, _ in pairs], signatures)

    def _signed(self, key: bytes, value: Data) -> bytes:
        value, nonce = encoded(value, "value"), os.urandom(_NONCE_BYTES)
        return _FRAME.pack(_MAGIC, nonce, len(value), self._tag(key, nonce, value)) + value

    def _tag(self, key: bytes, nonce: bytes, value: bytes) -> bytes:
        lengths = struct.pack("<QQ", len(key), len(value))
        return _hmac(self.secret, lengths + key + nonce + value)

    def _opened(self, key: bytes, stored: bytes) -> bytes:
        """The value in frames; raises SecretMismatch unless all of them are signed for `key`."""
        at = 0
        values: list[bytes] = []
        # Values that were appended to one key have a signature each; an empty value has one, too.
        while at < len(stored) or not values:
            if len(stored) - at < _FRAME.size:
                raise SecretMismatch(readable(key), "has no signature")
            # The length is not signed by itself: a wrong one makes the tag wrong.
            magic, nonce, length, tag = _FRAME.unpack_from(stored, at)
            if magic != _MAGIC:
                raise SecretMismatch(readable(key), "has no signature")
            at += _FRAME.size
            value = stored[at : at + length]
            is_whole = len(value) == length
            if not is_whole or not hmac.compare_digest(tag, self._tag(key, nonce, value)):
                raise SecretMismatch(readable(key), "is signed with another secret")
            values.append(value)
            at += length
        return b"".join(values)


class Seal:
    """Signs the objects of one group, for a network that others may reach.

    Its key is made of the secret and of a random number of every rank, so what was sent in another
    group, or in an earlier run with the same secret, does not pass here. A rank takes its own
    number from its memory: the store could return that of an earlier run.
    """

    def __init__(self, secret: bytes, nonces: Sequence[bytes]) -> None:
        self._key = _hmac(secret, b"objects" + b"".join(nonces))

    def sealed(self, payload: bytes, rank: int) -> bytes:
        """`payload` with the signature of rank `rank`, its sender."""
        return payload + self._tag(payload, rank)

    def opened(self, sealed: bytes, rank: int) -> bytes:
        """The payload. Raises SecretMismatch if rank `rank` has not sealed it."""
        payload, tag = sealed[:-_TAG_BYTES], sealed[-_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(payload, rank)):
            raise SecretMismatch(
                f"the object from rank {rank}", "does not have this group's signature"
            )
        return payload

    def _tag(self, payload: bytes, rank: int) -> bytes:
        signature = hmac.new(self._key, struct.pack("<q", rank), "sha256")
        signature.update(payload)
        return signature.digest()


def looks_signed(value: bytes) -> bool:
    """Whether a rank with a secret wrote it, for ranks that have none and cannot read it."""
    return value.startswith(_MAGIC)


def new_nonce() -> bytes:
    return os.urandom(_NONCE_BYTES)


def _hmac(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")
