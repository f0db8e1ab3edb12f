"""Stand-in GPUs for the workers of sessions: `with stand_in_gpus() as env_vars: Session(…)`.

Ray must have been told of as many GPUs. Functions that the workers run find the stand-in by
`here()`: what they would import at the top of their file came to the workers as a copy.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import ROOT

from . import guard
from .hub import Hub

AT_START = Path(__file__).with_name("at_start")


@contextlib.contextmanager
def stand_in_gpus(seed: int = 0, jitter_s: float = 0.0005) -> Iterator[dict[str, str]]:
    """The environment of workers that have one each; as long as the block runs."""
    library = guard.build()
    with tempfile.TemporaryDirectory() as folder:
        hub = Hub(Path(folder) / "hub")
        try:
            yield {
                "PYTHONPATH": os.pathsep.join([str(AT_START), str(ROOT)]),
                # Each has one device only, so Ray hides those of the others.
                "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
                "STAND_IN_GPU": f"{library}|{folder}/hub|{seed}|{jitter_s}",
            }
        finally:
            hub.close()


def here(module: str = "streams") -> Any:
    """A module of the stand-in, in the process of a worker."""
    return importlib.import_module(f"tests.harness.stand_in_gpu.{module}")
