"""A store in a Ray actor, for ranks that share nothing but the cluster.

StoreActor holds the keys; the driver is one (driver.py). ActorStore is the client: it blocks the
thread that uses it, which is a training thread or a script's. The control loop frees such a thread
at once by `cancel`, which is how a rendezvous ends when a run is aborted.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from chorusline.collectives.contract.argument_kinds import check_kinds
from chorusline.collectives.contract.deadlines import Seconds
from chorusline.collectives.contract.errors import CollectiveError, StoreLost, fresh_copy
from chorusline.collectives.stores.signed_store import new_secret
from chorusline.collectives.stores.store import (
    Data,
    HashStore,
    Store,
    encoded,
    encoded_keys,
    key_of_rank,
    paired,
    timed_out,
)

from .calls import GONE, Actor, actor_class, why_gone

STORE_CONCURRENCY = {"store": 10_000}
"""Concurrency group for `ray.remote`. Each suspended waiter takes a place, so there are many."""

_OF_A_GENERATION = re.compile(rb"group/default/(\d+)/")
"""The keys of the group of a generation (collectives/meeting.py), and of all that it wrote."""

_OF_ONE_KEY = ("set", "add", "compare_set", "append", "delete_key")
_ANSWER_S = 10.0  # A live actor answers in milliseconds; on a machine that swaps, in seconds.


class _Gathering:
    """A `gather` in progress, which all its waiters share: a write costs the same however many
    there are.

    keys: by rank. missing: those that are not written yet, by rank. values: when all are.
    """

    def __init__(self, keys: Sequence[bytes], missing: Sequence[bytes]) -> None:
        self.keys = keys
        self.missing = dict.fromkeys(missing)
        self.is_complete = asyncio.Event()
        if not missing:
            self.is_complete.set()
        self.values: list[bytes] = []
        self.num_waiters = 0


class StoreActor:
    """A store with the rules of HashStore, whose waiters do not poll: they are suspended until the
    keys that they miss are written.

    All methods run on the loop of the concurrency group "store". So a rendezvous continues whatever
    else the actor does, and waiters never take the places of other calls.
    """

    def __init__(self) -> None:
        self._store = HashStore()
        # By key, an event of each waiter, which is set when the key is written.
        self._written: dict[bytes, set[asyncio.Event]] = {}
        self._gatherings: dict[tuple[bytes, int], _Gathering] = {}  # by name and size
        self._gatherings_of: dict[bytes, list[_Gathering]] = {}  # by a key that they miss

    @ray.method(concurrency_group="store")
    async def store_call(self, method: str, *arguments: Any) -> Any:
        """Call a method of HashStore that waits for nothing, and wake whoever waits for its keys.
        Its first argument, if it has one, is a key or several."""
        result = getattr(self._store, method)(*arguments)
        keys = arguments[:1] if method in _OF_ONE_KEY else arguments[0] if arguments else ()
        for key in keys:
            # A key may still be absent: nothing was compared equal, or it was deleted.
            if self._store.check([key]):
                self._wake(key)
        return result

    @ray.method(concurrency_group="store")
    async def store_forget(self, newest: int) -> None:
        """Forget what groups of the generations before `newest` have written."""

        def is_over(key: bytes) -> bool:
            found = _OF_A_GENERATION.match(key)
            return found is not None and int(found[1]) < newest

        self._store.forget(is_over)
        for key in [key for key in self._written if is_over(key)]:
            self._wake_waiters(key)  # They look again, until their own deadlines.

    @ray.method(concurrency_group="store")
    async def store_wait(
        self, keys: Sequence[Data], timeout_s: float
    ) -> tuple[list[bytes], list[bytes]]:
        """Suspend until all keys exist. Returns those that are missing after `timeout_s`, and none
        of the values."""
        return await self._until_written(encoded_keys(keys), timeout_s), []

    @ray.method(concurrency_group="store")
    async def store_multi_get(
        self, keys: Sequence[Data], timeout_s: float
    ) -> tuple[list[bytes], list[bytes]]:
        """As store_wait, with the values if no key is missing."""
        missing = await self._until_written(encoded_keys(keys), timeout_s)
        return missing, [] if missing else self._store.multi_get(keys, 0)

    @ray.method(concurrency_group="store")
    async def store_gather(
        self, name: bytes, rank: int, size: int, value: bytes, timeout_s: float
    ) -> tuple[list[bytes], list[bytes]]:
        """Write the value of a rank, and suspend until all have written theirs. Returns the missing
        keys, and if there are none, the values."""
        own = key_of_rank(name, rank)
        self._store.set(own, value)
        self._wake(own)
        gathering = self._gatherings.get((name, size))
        if gathering is None:
            gathering = self._begin_gathering(name, size)
        gathering.num_waiters += 1
        try:
            async with asyncio.timeout(timeout_s):
                await gathering.is_complete.wait()
        except TimeoutError:
            pass
        finally:
            gathering.num_waiters -= 1
            # The last one leaves, by its time or because all have come; others may have begun
            # another.
            if gathering.num_waiters == 0 and self._gatherings.get((name, size)) is gathering:
                del self._gatherings[name, size]
                for key in gathering.missing:
                    self._gatherings_of[key].remove(gathering)
                    if not self._gatherings_of[key]:
                        del self._gatherings_of[key]
        if gathering.missing:
            return list(gathering.missing), []
        # All who waited take the same list.
        gathering.values = gathering.values or self._store.multi_get(gathering.keys, 0)
        return [], gathering.values

    def _begin_gathering(self, name: bytes, size: int) -> _Gathering:
        keys = [key_of_rank(name, rank) for rank in range(size)]
        gathering = self._gatherings[name, size] = _Gathering(keys, self._missing(keys))
        for key in gathering.missing:
            self._gatherings_of.setdefault(key, []).append(gathering)
        return gathering

    async def _until_written(self, keys: list[bytes], timeout_s: float) -> list[bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                # One key after the other: whoever waits for many wakes once for each that was late.
                while missing := self._missing(keys):
                    await self._next_write(missing[0])
        except TimeoutError:
            pass
        return self._missing(keys)

    async def _next_write(self, key: bytes) -> None:
        is_written = asyncio.Event()
        waiters = self._written.setdefault(key, set())
        waiters.add(is_written)
        try:
            await is_written.wait()
        finally:
            waiters.discard(is_written)
            # The last one leaves, by its time or because it was cancelled; others may wait by now
            # for the next write.
            if not waiters and self._written.get(key) is waiters:
                del self._written[key]

    def _missing(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if not self._store.check([key])]

    def _wake(self, key: Data) -> None:
        key = encoded(key, "key")
        self._wake_waiters(key)
        for gathering in self._gatherings_of.pop(key, ()):
            gathering.missing.pop(key, None)
            if not gathering.missing:
                gathering.is_complete.set()

    def _wake_waiters(self, key: bytes) -> None:
        for is_written in self._written.pop(key, ()):
            is_written.set()


class ActorStore(Store):
    """A store in an actor, for the processes of a Ray cluster: `ActorStore.start()` makes one. It
    can be pickled; every copy is a client of its own.

        ray.init()
        store = cl.ActorStore.start()
        sums = ray.get([rank_of.remote(store, rank, 2) for rank in range(2)])  # Each makes a Group.

    actor: a StoreActor.
    secret: travels with every copy. Ranks that meet here use it to sign what they write, and the
        objects that they send between hosts, where others may reach the port of the transport.

    No call blocks longer than its timeout: a dead or silent actor raises StoreLost.
    """

    def __init__(self, actor: Actor, secret: bytes | None = None) -> None:
        check_kinds(ActorStore.__init__, locals())
        self._actor = actor
        self.secret = secret
        self._lock = threading.Lock()
        self._blocked: set[threading.Event] = set()
        self._cancelled_by: CollectiveError | None = None  # None: not cancelled

    @classmethod
    def start(cls, **options: Any) -> ActorStore:
        """A store in a new actor, which takes no CPU.

        options: Ray's options of the actor, such as `name`, or `lifetime="detached"`. Without them
            the actor ends with the last copy of the store, and with the process that started it.

        Raises RuntimeError if this process is not connected to Ray.
        """
        if not ray.is_initialized():
            raise RuntimeError(
                "ActorStore.start makes an actor, but this process is not connected to Ray; call "
                "ray.init() first, or take a FileStore (one host) or store_from_url (no Ray)"
            )
        made = actor_class(StoreActor, concurrency_groups=STORE_CONCURRENCY, num_cpus=0)
        return cls(made.options(**options).remote(), new_secret())

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorStore, (self._actor, self.secret), {"timeout_s": self.timeout_s}

    def cancel(self, error: CollectiveError) -> None:
        """Free every blocked thread: its call, and every later one, raises `error`. The first of
        several errors wins."""
        with self._lock:
            self._cancelled_by = self._cancelled_by or error
            # The threads look why they were woken.
            for event in self._blocked:
                event.set()

    def raise_if_cancelled(self) -> None:
        """As a call would, but without one."""
        with self._lock:
            if self._cancelled_by is not None:
                raise fresh_copy(self._cancelled_by)

    def move_to(self, actor: Actor) -> None:
        """Use another actor from now on, which does not have what was written to the first."""
        self._actor = actor

    def set(self, key: Data, value: Data) -> None:
        self._call("set", encoded(key, "key"), encoded(value, "value"))

    def post(self, key: Data, value: Data) -> None:
        # Not awaited: what follows waits for others, and fails if this has not arrived.
        self.raise_if_cancelled()
        self._actor.store_call.remote("set", encoded(key, "key"), encoded(value, "value"))

    def check(self, keys: Sequence[Data]) -> bool:
        return bool(self._call("check", encoded_keys(keys)))

    def add(self, key: Data, amount: int) -> int:
        return int(self._call("add", encoded(key, "key"), amount))

    def compare_set(self, key: Data, expected: Data, desired: Data) -> bytes:
        expected, desired = encoded(expected, "expected"), encoded(desired, "desired")
        return bytes(self._call("compare_set", encoded(key, "key"), expected, desired))

    def append(self, key: Data, value: Data) -> None:
        self._call("append", encoded(key, "key"), encoded(value, "value"))

    def delete_key(self, key: Data) -> bool:
        return bool(self._call("delete_key", encoded(key, "key")))

    def num_keys(self) -> int:
        """The number of keys in the store."""
        return int(self._call("num_keys"))

    def wait(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> None:
        self._suspended("wait", timeout_s, encoded_keys(keys))

    def multi_get(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> list[bytes]:
        return self._suspended("multi_get", timeout_s, encoded_keys(keys))

    def gather(
        self, name: Data, rank: int, size: int, value: Data, timeout_s: Seconds | None = None
    ) -> list[bytes]:
        own = encoded(name, "name"), rank, size, encoded(value, "value")
        return self._suspended("gather", timeout_s, *own)

    def multi_set(self, keys: Sequence[Data], values: Sequence[Data]) -> None:
        pairs = paired(keys, values)
        self._call("multi_set", [key for key, _ in pairs], [value for _, value in pairs])

    def _suspended(
        self, operation: str, timeout_s: Seconds | None, *arguments: object
    ) -> list[bytes]:
        """The values of a call that waits for keys."""
        waited_s = self._seconds(timeout_s)
        missing, values = self._call(operation, *arguments, waited_s, suspended_s=waited_s)
        if missing:
            raise timed_out(missing, waited_s)
        return list(values)

    def _call(self, operation: str, *arguments: object, suspended_s: float | None = None) -> Any:
        """Make one remote call from a thread that may block. suspended_s: how long the actor may
        wait; None: it answers at once.

        `ray.get` would not do: it cannot be left early, and inside an async actor it warns of
        blocking the loop, which a training thread does not block.
        """
        is_over = threading.Event()
        with self._lock:
            if self._cancelled_by is not None:
                raise fresh_copy(self._cancelled_by)
            self._blocked.add(is_over)
        try:
            if suspended_s is None:
                call = self._actor.store_call.remote(operation, *arguments)
            else:
                call = getattr(self._actor, f"store_{operation}").remote(*arguments)
            future = call.future()
            future.add_done_callback(lambda _: is_over.set())
            limit_s = (suspended_s or 0.0) + _ANSWER_S
            was_set = is_over.wait(limit_s)
        finally:
            with self._lock:
                self._blocked.discard(is_over)
        if future.done():
            return self._result(operation, future)
        ray.cancel(call)  # This thread leaves early, so the waiter in the actor has to end as well.
        if was_set:
            assert self._cancelled_by is not None
            raise fresh_copy(self._cancelled_by)
        raise StoreLost(
            operation, f"the actor that holds the store did not answer within {limit_s:g} s"
        )

    @staticmethod
    def _result(operation: str, future: Any) -> Any:
        try:
            return future.result()
        except GONE as error:
            raise StoreLost(
                operation, f"the actor that holds the store is gone: {why_gone(error)}"
            ) from None
        except RayTaskError as error:
            raise (error.cause or error) from None
