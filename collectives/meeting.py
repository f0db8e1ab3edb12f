"""How the ranks of a group meet in a store, even after some of them have given up.

Each `Group.create` is an attempt with a number, which each rank counts for itself; so two groups
of one name and generation are distinguished. A rank that times out marks its attempt as given up.
A rank that comes to such an attempt, or waits in it, continues with the next one. So ranks that
call again meet, however often each of them has tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from .contract.communicator import Communicator
from .contract.deadlines import Seconds
from .contract.errors import SecretMismatch, StoreTimeout, listed, name_ranks
from .stores.signed_store import Seal, looks_signed, new_nonce
from .stores.store import Data, PrefixStore, Store
from .transports.backends import Backend

_SLICE_S = 0.2  # a wait in the store is split into slices, with a check for given_up between them

Result = TypeVar("Result")


class WatchedStore(PrefixStore):
    """A store that waits in slices and calls `look` between them; `look` raises to end a wait."""

    def __init__(self, prefix: str, store: Store, look: Callable[[], None]) -> None:
        super().__init__(prefix, store)
        self._look = look

    def wait(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> None:
        return self._in_slices(lambda s: super(WatchedStore, self).wait(keys, s), timeout_s)

    def multi_get(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> list[bytes]:
        return self._in_slices(lambda s: super(WatchedStore, self).multi_get(keys, s), timeout_s)

    def gather(
        self, name: Data, rank: int, size: int, value: Data, timeout_s: Seconds | None = None
    ) -> list[bytes]:
        return self._in_slices(
            lambda s: super(WatchedStore, self).gather(name, rank, size, value, s), timeout_s
        )

    def _in_slices(self, call: Callable[[float], Result], timeout_s: Seconds | None) -> Result:
        limit_s = self._seconds(timeout_s)
        give_up_at = time.monotonic() + limit_s
        while True:
            left_s = max(give_up_at - time.monotonic(), 0.0)
            try:
                return call(min(_SLICE_S, left_s))
            except StoreTimeout as error:
                self._look()
                # The words of the whole wait, and not those of its last slice.
                if left_s <= _SLICE_S:
                    raise StoreTimeout(error.keys, limit_s, error.detail) from error


_MOST_COMPARED = 256
"""So many of the missing ranks are asked for their backend at most: one that differs is enough for
the message, and the deadline is over."""


class _GivenUp(Exception):
    """Another rank has given up this attempt; that rank, or its replacement, may try again."""


def meet(
    backend: Backend,
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    *,
    generation: int,
    timeout_s: float,
    name: str,
) -> tuple[Communicator, PrefixStore, Seal | None]:
    """The communicator of the group, the part of `store` that only the group uses, and what signs
    the group's objects: None without a secret, and in the memory of one host, which only this user
    can write.

    Raises StoreTimeout naming the ranks that did not come, ValueError if ranks came with
    different backends, and what the backend raises.
    """
    give_up_at = time.monotonic() + timeout_s
    attempts = f"group/{name}/{generation}"
    earlier: list[PrefixStore] = []  # attempts that other ranks gave up while this rank waited
    while True:
        number = store.add(f"{attempts}/created_by/{rank}", 1)
        given_up = f"{attempts}/{number}/given_up"
        # Others have given it up before this rank came.
        if store.check([given_up]):
            continue

        def look(given_up: str = given_up) -> None:
            if store.check([given_up]):
                raise _GivenUp

        place = WatchedStore(f"{attempts}/{number}", store, look)
        place.set_timeout(max(give_up_at - time.monotonic(), 0.001))
        place.post(f"backend/{rank}", backend.name)
        nonce = new_nonce()
        if store.secret is not None:
            place.post(f"nonce/{rank}", nonce)
        try:
            communicator = backend.factory(place, rank, size, device, generation)
        except _GivenUp:
            _compare_backends(place, backend, rank, range(size))
            # Its ranks come again with the next number, and so does this one.
            earlier.append(place)
            continue
        except StoreTimeout as error:
            # First of all: a rank that comes from now on must not wait for this rank.
            store.set(given_up, str(rank))
            keys = {other: key for key in error.keys for other in ranks_of_keys([key])}
            # A rank that gave up an earlier attempt is blamed only if no other rank is missing.
            tired = [
                other
                for other in sorted(keys)
                if any(attempt.check([f"backend/{other}"]) for attempt in earlier)
                and not place.check([f"backend/{other}"])
            ]
            absent = [other for other in sorted(keys) if other not in tired] or tired
            _compare_backends(place, backend, rank, absent[:_MOST_COMPARED])
            who = f"ranks [{listed(absent)}]" if absent else "some ranks"
            if len(absent) == 1:
                who = name_ranks(absent)
            raise StoreTimeout(
                [keys[other] for other in absent] or error.keys,
                timeout_s,
                f"{who} of {size} did not come to generation {generation} of group {name!r}. "
                "Check that they run, and that all use the same store, size, name and "
                "generation; ranks that call again meet each other",
            ) from error
        except Exception as error:
            # Without the secret a signed value looks like garbage, and the error would not say why.
            _compare_secrets(place, rank, size, error)
            raise
        # From here on no rank gives up, so the store is no longer watched.
        own = own_part(store, name, generation, number, timeout_s)
        seal = None
        if store.secret is not None and size > 1 and communicator.backend != "shared-memory":
            try:
                # Every rank has connected, so every rank has posted its number.
                numbers = own.multi_get([f"nonce/{other}" for other in range(size)])
            # The others have their group by now, and would wait for this rank.
            except BaseException:
                communicator.close()
                raise
            # The store may return the signed numbers of an earlier run, whose objects somebody
            # could then send again. This rank's own number is new in any case.
            numbers[rank] = nonce
            seal = Seal(store.secret, numbers)
        return communicator, own, seal


def own_part(
    store: Store, name: str, generation: int, number: int, timeout_s: float
) -> PrefixStore:
    """The part of `store` that only a group uses. number: of the attempt in which its ranks have
    met, from 1 on; 0: they have met without a store, in the only attempt of the generation."""
    own = PrefixStore(f"group/{name}/{generation}/{number}", store)
    own.set_timeout(timeout_s)
    return own


def _compare_secrets(place: PrefixStore, rank: int, size: int, error: Exception) -> None:
    """Raise SecretMismatch if another rank signs and this one, which could not read that, does
    not. A rank that signs has noticed it already."""
    if place.is_signed:
        return
    for other in range(size):
        key = f"backend/{other}"
        if other != rank and place.check([key]) and looks_signed(place.get(key)):
            raise SecretMismatch(
                f"the value of rank {other}", f"is signed, and rank {rank} has no secret"
            ) from error


def ranks_of_keys(keys: Sequence[str]) -> list[int]:
    """The ranks that should have written `keys`: such a key ends in `/<rank>`."""
    numbers = {key.rsplit("/", 1)[-1] for key in keys}
    return sorted(int(number) for number in numbers if number.isdecimal())


def _compare_backends(
    place: PrefixStore, backend: Backend, rank: int, others: Sequence[int]
) -> None:
    """Raise ValueError if some of `others` came with another backend."""
    differ = [
        f"rank {other} came with {theirs!r}"
        for other in others
        if place.check([f"backend/{other}"])
        and (theirs := place.get(f"backend/{other}").decode()) != backend.name
    ]
    if differ:
        raise ValueError(
            f"backend is {backend.name!r} on rank {rank}, but {', '.join(differ)}; choose the same "
            "on all ranks"
        )
