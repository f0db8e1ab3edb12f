"""Which transport joins CPU ranks: shared memory on one host, Gloo between hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from ..contract.communicator import Communicator
from ..contract.errors import PeerLost
from ..shared_memory.algorithms import SLOT_BYTES, connect_shared_memory
from ..shared_memory.layout import make_memory, open_memory
from ..stores.store import Store


def host_identity() -> str:
    """What is equal for processes that can open each other's memory, and only for them.

    The kernel's boot, the process namespace and the user; CHORUSLINE_HOST_ID overrides it, for
    hosts that look like one and are not.
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
    device: torch.device,
    generation: int,
    between_hosts: bool = True,
) -> Communicator:
    """Meet in `store` and choose; every rank chooses the same. Raises StoreTimeout.

    between_hosts: whether ranks on different hosts may meet; ValueError on all of them if not.
    """
    card: dict[str, str | int] = {"host": host_identity(), "pid": os.getpid()}
    descriptor = -1
    if rank == 0:
        try:
            descriptor = make_memory(size, SLOT_BYTES)
        except OSError as error:
            # The others are on their way to a rank that will not come: they must not wait for it.
            store.set("card/0", json.dumps({**card, "failed": str(error)}))
            raise
        card["descriptor"] = descriptor
    try:
        store.set(f"card/{rank}", json.dumps(card))
        cards = [json.loads(c) for c in store.multi_get([f"card/{r}" for r in range(size)])]
        if "failed" in cards[0]:
            raise PeerLost("rendezvous", generation, [0], cards[0]["failed"])
        if len({c["host"] for c in cards}) == 1:
            if rank != 0:
                descriptor = _open_memory(cards[0]["pid"], cards[0]["descriptor"], generation)
            pids = [c["pid"] for c in cards]
            ours, descriptor = descriptor, -1
            return connect_shared_memory(ours, pids, rank, generation, store.timeout_s)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if not between_hosts:
        raise ValueError(
            "backend 'shared-memory' joins ranks of one host, process namespace and user, but "
            f"these are by rank {[c['host'] for c in cards]}; choose backend='gloo', or None"
        )
    from .gloo import GlooCommunicator

    return GlooCommunicator(store, rank, size, generation)


def _open_memory(pid: int, descriptor: int, generation: int) -> int:
    try:
        return open_memory(pid, descriptor)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerLost("rendezvous", generation, [0], f"process {pid} ended") from error
