"""What depends on other ranks, and whether the host may read it.

Each allocation knows the collectives that it depends on, by the place of the last one in its
stream. A kernel gives what it reads to what it writes; a collective starts again, as whoever knows
that it has succeeded knows it of those before it. A wait on the host that returns tells that all
collectives up to a place have succeeded, and so does `is_completed`. In a strict process our own
code must read nothing that depends on a later one: if the collective is stopped, its kernel ends
all the same, with anything there. Whether it has ended when the host reads makes no difference.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from chorusline.collectives.transports.nccl_works import NcclWork

from . import streams
from .memory import Allocation

Places = dict[int, int]
"""By stream of a communicator, the place of a kernel in it."""

_succeeded: Places = {}


def write(what: Iterable[Allocation], places: Places) -> None:
    """Kernels that depend on `places` write to these allocations."""
    for allocation in what:
        for stream, place in places.items():
            allocation.heard[stream] = max(place, allocation.heard.get(stream, 0))


def of(what: Iterable[Allocation]) -> Places:
    """What these allocations depend on."""
    found: Places = {}
    for allocation in what:
        for stream, place in allocation.heard.items():
            found[stream] = max(place, found.get(stream, 0))
    return found


def check_read(places: Places, what: str) -> None:
    """The host is about to read what depends on `places`."""
    if not streams.machine().strict:
        return
    if all(place <= _succeeded.get(stream, 0) for stream, place in places.items()):
        return
    where = streams.place_of_ours()
    if where:
        streams.machine().misuses.append(
            f"{what} at {where} of what a collective has written, after no wait_on_host"
        )


def install() -> None:
    plain_wait, plain_await = NcclWork._block_host, NcclWork.__await__
    plain_ask = NcclWork.is_completed

    def wait_on_host(self: NcclWork) -> None:
        if not self.done:
            streams.note_wait("wait_on_host")
        plain_wait(self)
        _note(self)

    def awaited(self: NcclWork) -> Generator[object, None, Any]:
        result = yield from plain_await(self)
        _note(self)
        return result

    def is_completed(self: NcclWork) -> bool:
        found = plain_ask(self)
        if found and self.failure is None:
            _note(self)
        return found

    NcclWork._block_host = wait_on_host  # type: ignore[method-assign]
    NcclWork.is_completed = is_completed  # type: ignore[method-assign]
    NcclWork.__await__ = awaited  # type: ignore[method-assign]


def _note(work: NcclWork) -> None:
    stream, place = work.ended.at  # type: ignore[attr-defined]
    _succeeded[stream] = max(place, _succeeded.get(stream, 0))
