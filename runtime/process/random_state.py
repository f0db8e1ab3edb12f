"""`RandomState`: the random generators of this process as an object with a state."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


class RandomState:
    """Python's, numpy's and torch's global generators, and that of the current CUDA device.

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
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators to a state that `state_dict` has returned."""
        random.setstate(state_dict["python"])
        numpy.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])


def _plain(state: Any) -> Any:
    """numpy's state with a list in place of the array, so that torch.load reads it by default."""
    if not isinstance(state, tuple):  # The user has chosen another generator.
        return state
    return tuple(part.tolist() if isinstance(part, numpy.ndarray) else part for part in state)
