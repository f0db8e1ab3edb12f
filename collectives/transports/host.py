"""The choice of transport between CPU ranks: shared memory on one host, Gloo between hosts."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from ..contract.communicator import Communicator
from ..contract.endpoint import Endpoint
from ..contract.errors import PeerLost, StoreLost, StoreTimeout
from ..shared_memory.algorithms import SLOT_BYTES, SharedMemoryCommunicator
from ..shared_memory.layout import key_of, make_memory, open_memory
from ..shared_memory.segment import OWN_LIMITS, SharedSegment
from ..stores.store import Store

_LOOK_S = 0.05
"""Seconds between two looks into the store, while ranks wait for each other in the memory. All of
them have come before the first look, usually."""


def host_identity() -> str:
    """A string that is equal for two processes exactly if they can open each other's memory.

    It consists of the kernel's boot id, the process namespace and the user. CHORUSLINE_HOST_ID
    overrides it, for different hosts that appear to be one.
    """
    override = os.environ.get("CHORUSLINE_HOST_ID")
    if override:
        return override
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}/{os.getuid()}"


class PreparedEndpoint:
    """Where the others of its host can meet this process, with memory for their group: until
    `connect` or `close`. size: ranks that the memory has room for; 0: it makes none."""

    def __init__(self, size: int) -> None:
        """Raises OSError."""
        host = host_identity()  # First, as it may raise: the memory would stay open.
        self._descriptor = make_memory(size, SLOT_BYTES) if size else -1
        key = key_of(self._descriptor) if size else 0
        self.endpoint = Endpoint(host, os.getpid(), self._descriptor, key, size)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def connect(
        self,
        endpoints: Sequence[Endpoint],
        rank: int,
        generation: int,
        timeout_s: float,
        look: Callable[[], None],
    ) -> Communicator:
        """Meet the ranks of these endpoints, in the memory of rank 0. look: called while this rank
        waits; raises if the rendezvous is over. Raises PeerLost if rank 0 is gone."""
        if rank != 0:
            self.close()
            self._descriptor = _opened(endpoints[0], generation)
        descriptor, self._descriptor = self._descriptor, -1
        pids = [endpoint.pid for endpoint in endpoints]
        segment = SharedSegment(descriptor, pids, rank, generation, SLOT_BYTES)
        return SharedMemoryCommunicator(segment, timeout_s, look)


def connect(
    store: Store,
    rank: int,
    size: int,
    generation: int,
    between_hosts: bool = True,
) -> Communicator:
    """Meet in `store`, choose a transport, the same on every rank, and connect.

    between_hosts: whether ranks may be on different hosts. Raises ValueError on all ranks if they
    are and may not, StoreTimeout if a rank does not come, PeerLost if rank 0 fails.
    """
    try:
        # One rank makes the memory; the others open it by its process and descriptor.
        prepared = PreparedEndpoint(size if rank == 0 else 0)
    except OSError as error:
        # The other ranks must not wait for this rank's memory.
        store.set(f"card/{rank}", json.dumps({"failed": str(error)}))
        raise
    try:
        card = json.dumps(asdict(prepared.endpoint))
        cards = [json.loads(c) for c in store.gather("card", rank, size, card)]
        for other, one in enumerate(cards):
            if "failed" in one:
                raise PeerLost("rendezvous", generation, [other], one["failed"])
        endpoints = [Endpoint(**one) for one in cards]
        # One rank elsewhere is enough: a communicator has one transport.
        if len({endpoint.host for endpoint in endpoints}) == 1:
            look = _looking_into(store)
            return prepared.connect(endpoints, rank, generation, store.timeout_s, look)
    finally:
        prepared.close()
    if not between_hosts:
        raise ValueError(
            "backend 'shared-memory' connects ranks of one host, process namespace and user, but "
            f"the ranks have {[one.host for one in endpoints]}, in rank order; choose "
            "backend='gloo', or None"
        )
    from .gloo import GlooCommunicator

    return GlooCommunicator(store, rank, size, generation)


def _looking_into(store: Store) -> Callable[[], None]:
    """Raises if a wait in the store does, since the rendezvous is over."""
    look_at = time.monotonic() + _LOOK_S

    def look() -> None:
        nonlocal look_at
        if time.monotonic() < look_at:
            return
        # The ranks have all that they need of the store, so they can do without it.
        with contextlib.suppress(StoreTimeout, StoreLost):
            store.wait(["never"], 0)
        look_at = time.monotonic() + _LOOK_S

    return look


def _opened(root: Endpoint, generation: int) -> int:
    try:
        return open_memory(root.pid, root.descriptor, root.key)
    except OSError as error:
        if error.errno in OWN_LIMITS:
            raise
        # Of a process that ends, the kernel refuses its descriptors before they are gone (EACCES),
        # and the number may be that of another file by now, which cannot be opened or read so.
        left = f"process {root.pid} ended, or has left the rendezvous ({error.strerror})"
        raise PeerLost("rendezvous", generation, [0], left) from error
