"""Ranks that share a GPU: what NCCL must find in its environment to connect them (pure).

NCCL refuses two ranks on one device. It compares the hashes of their hosts and their devices
(init.cc, initTransportsRank). NCCL 2.30 and later skip the comparison if
NCCL_MULTI_RANK_GPU_ENABLE is 1. Earlier versions connect such ranks if the hashes differ, and
NCCL_HOSTID is what is hashed in place of the host's name (misc/utils.cc, getHostHashOnce): the
ranks then meet as if they were on different hosts, over sockets. That is slow, and it is NCCL from
end to end: good for tests, and for notebooks on one GPU.

Two properties of NCCL make these variables those of all ranks of a group, even of a rank that has
its GPU for itself, and in a session from the first group on:

- Each rank compares all pairs of ranks, and counts its channels by its own environment after the
  ranks have agreed on them (graph/connect.cc, ncclTopoPostset).
- NCCL reads a variable once in a process, and a rank that shares the GPU may come later.

Read in the sources of NCCL 2.28.9 and 2.30.7; seen with 2.28.9 on an H100.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

SHARES_GPUS = 23000
"""The first version of NCCL that connects ranks on one device by itself."""
_TURNS_NVLS_OFF = 23102
"""The first one that sees by itself that such ranks cannot have NVLS (nccl#2257)."""
MAY_SHARE = "CHORUSLINE_SHARES_GPU"
"""The variable of a process whose GPU is dealt in parts, so that ranks on it may come later."""


class GpuPlace(NamedTuple):
    """Where a rank runs.

    host: equal for ranks of one host.
    bus: PCI address of the GPU, which parts of one GPU (MIG) share.
    part: of the GPU, by its MIG identifier; empty for a whole GPU.
    process: text that no other process has.
    may_share: whether a rank on the same GPU may come later.
    """

    host: str
    bus: str
    part: str
    process: str
    may_share: bool = False


def environment_for(places: Sequence[GpuPlace], rank: int, version: int) -> dict[str, str]:
    """Variables that `rank` needs before its process first uses NCCL; empty if it needs none.

    places: of all ranks of the group. version: of NCCL, as it counts: 23007 is 2.30.7.
    """
    own = places[rank]
    may_share = any(place.may_share for place in places)
    on_gpu = Counter(place[:2] for place in places)
    on_part = Counter(place[:3] for place in places)
    if len(on_gpu) == len(places) and not may_share:
        return {}
    found = {}
    if len(on_part) < len(places) or may_share:
        # Kernels wait for those of the other ranks, so all of them must fit the GPU at once. Parts
        # of a GPU have processors of their own.
        found["NCCL_MAX_CTAS"] = "2"
    if version >= SHARES_GPUS:
        # For parts of a GPU as well: NCCL 2.31 sees the GPU that they are parts of (nccl#1716).
        found["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        if version < _TURNS_NVLS_OFF:
            found["NCCL_NVLS_ENABLE"] = "0"
        return found
    if on_gpu[own[:2]] > 1 or own.may_share:
        found["NCCL_HOSTID"] = own.process
    if len({place.host for place in places}) == 1:
        # Sockets of this host reach all ranks; network cards are not needed.
        found |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return found
