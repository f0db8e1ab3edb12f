"""The random generators of this process: as an object with a state, and seeded for a rank."""

from __future__ import annotations

import hashlib
import random
import zlib
from typing import Any

import numpy
import torch

from chorusline.collectives.contract.plain_numbers import whole


class RandomState:
    """Python's, numpy's and torch's global generators, and that of the current CUDA device.

        generators = ctx.register("generators", cl.RandomState(), per_rank=True)

    Register it last, right before the loop, since models and data that are built before it draw
    numbers too. Each rank has its own state; after a resume with more ranks the added ranks keep
    the state of their own seeds.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state of each generator, by the name of its library."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": _plain(numpy.random.get_state()),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_initialized():  # A rank on a CPU must open no context on a GPU.
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators to a state that `state_dict` has returned."""
        random.setstate(state_dict["python"])
        numpy.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        if "cuda" in state_dict and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state_dict["cuda"])


class RankSeed:
    """What `ctx.seed` registers: generators that are alike on all ranks while the function makes
    its objects, and a rank's own from the first step on.

    seed: at least 0. rank: of this process.

    A state that is loaded belongs to a step, so it is set at the first step of this call.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.seed, self._rank = seed, rank
        self._loaded: dict[str, Any] | None = None  # None: nothing is left to load
        self._is_by_rank = False
        seed_all(seed)

    def begin_steps(self, steps_taken: int) -> None:
        """Called at the first step. steps_taken: of the run so far; a worker that comes later does
        not repeat the numbers of the rank whose place it takes."""
        if self._is_by_rank:
            return
        self._is_by_rank = True
        if self._loaded is not None:
            RandomState().load_state_dict(self._loaded)
            self._loaded = None
        else:
            seed_all(mixed(self.seed, self._rank, steps_taken))

    def state_dict(self) -> dict[str, Any]:
        """The state of the generators, or what was loaded; empty before the first step."""
        return {"generators": RandomState().state_dict() if self._is_by_rank else self._loaded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the generators' state, for the first step."""
        self._loaded = state_dict["generators"]


def digest_of_generators() -> int:
    """A digest, from 1 to 2^23, of the generators of torch from which layers draw."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return zlib.crc32(b"".join(state.numpy().tobytes() for state in states)) % (1 << 23) + 1


def mixed(*numbers: object) -> int:
    """A seed of 32 bits, of which torch's CPU generator uses no more, made of several numbers."""
    text = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def checked_seed(seed: object) -> int:
    """Raises ValueError for what is not a seed."""
    number = whole(seed)
    if number is None or number < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
    if number >= 2**64:
        raise ValueError(f"seed must be below 2**64, of which torch takes no more, got {seed!r}")
    return number


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, on all devices."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # Without a device torch.manual_seed keeps the stack of its caller each time, for the day
        # when one comes, and takes 0.1 to 0.5 ms: of a step of 20 ms, several times.
        torch.default_generator.manual_seed(seed)


def _plain(state: Any) -> Any:
    """numpy's state with a list in place of the array, so that torch.load reads it by default."""
    if not isinstance(state, tuple):  # The user has chosen another generator.
        return state
    return tuple(part.tolist() if isinstance(part, numpy.ndarray) else part for part in state)
