"""Python imports this at its start where PYTHONPATH has this folder. It gives a stand-in GPU.

For processes that others start, as Ray does its workers (workers.py). The library has to be loaded
before torch, and the rest comes after it, so both wait until something imports torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _BesideTorch(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            from tests.harness.stand_in_gpu import guard

            library, hub, seed, jitter_s = os.environ["STAND_IN_GPU"].split("|")
            loaded = guard.load(guard.Path(library))
            run(module)
            from tests.harness.stand_in_gpu.installing import install

            install(loaded, hub, int(seed), float(jitter_s))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _BesideTorch())
