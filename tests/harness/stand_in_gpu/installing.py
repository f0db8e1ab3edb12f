"""Makes the stand-in the GPU of this process, which has loaded its library before torch."""

from __future__ import annotations

import ctypes

from . import nccl, streams, torch_cuda


def install(library: ctypes.CDLL, hub: str, seed: int, jitter_s: float) -> None:
    """hub: path of its socket. seed, jitter_s: of the delays of kernels."""
    library.stand_in_install()
    streams.set_up(library, seed, jitter_s)
    torch_cuda.install()
    nccl.install(hub)
