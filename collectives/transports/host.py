"""The choice of transport between CPU ranks: shared memory on one host, Gloo between hosts."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from ..contract.communicator import Communicator
from ..contract.errors import PeerLost, StoreLost, StoreTimeout
from ..shared_memory.algorithms import SLOT_BYTES, connect_shared_memory
from ..shared_memory.layout import make_memory, open_memory
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
    card: dict[str, str | int] = {"host": host_identity(), "pid": os.getpid()}
    descriptor = -1
    # One rank makes the memory; the others open it by its process and descriptor.
    if rank == 0:
        try:
            descriptor = make_memory(size, SLOT_BYTES)
        except OSError as error:
            # The other ranks must not wait for this rank's memory.
            store.set("card/0", json.dumps({**card, "failed": str(error)}))
            raise
        card["descriptor"] = descriptor
    try:
        cards = [json.loads(c) for c in store.gather("card", rank, size, json.dumps(card))]
        if "failed" in cards[0]:
            raise PeerLost("rendezvous", generation, [0], cards[0]["failed"])
        # One rank elsewhere is enough: a communicator has one transport.
        if len({c["host"] for c in cards}) == 1:
            if rank != 0:
                descriptor = _open_memory(cards[0]["pid"], cards[0]["descriptor"], generation)
            pids = [c["pid"] for c in cards]
            ours, descriptor = descriptor, -1

            look_at = time.monotonic() + _LOOK_S

            def look() -> None:
                nonlocal look_at
                if time.monotonic() < look_at:
                    return
                # A wait raises if the rendezvous is over. The ranks have all that they need of the
                # store, so they can do without it.
                with contextlib.suppress(StoreTimeout, StoreLost):
                    store.wait(["never"], 0)
                look_at = time.monotonic() + _LOOK_S

            return connect_shared_memory(ours, pids, rank, generation, store.timeout_s, look)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if not between_hosts:
        raise ValueError(
            "backend 'shared-memory' connects ranks of one host, process namespace and user, but "
            f"the ranks have {[c['host'] for c in cards]}, in rank order; choose backend='gloo', "
            "or None"
        )
    from .gloo import GlooCommunicator

    return GlooCommunicator(store, rank, size, generation)


def _open_memory(pid: int, descriptor: int, generation: int) -> int:
    try:
        return open_memory(pid, descriptor)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerLost("rendezvous", generation, [0], f"process {pid} ended") from error
