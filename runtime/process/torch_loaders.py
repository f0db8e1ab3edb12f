"""The processes of torch's DataLoaders end with the process that has started them."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
from typing import Any

from torch.utils.data._utils import worker

from .end_with import end_with

_torchs_loop = worker._worker_loop
_STATEFUL = "torchdata.stateful_dataloader"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with(parent.pid)


def _loop_that_ends_with_its_parent(*args: Any, **kwargs: Any) -> None:
    _end_with_parent()
    _torchs_loop(*args, **kwargs)


def _stateful_loop_that_ends_with_its_parent(*args: Any, **kwargs: Any) -> None:
    _end_with_parent()
    importlib.import_module(f"{_STATEFUL}.worker")._worker_loop(*args, **kwargs)


def end_loaders_with_this_process() -> None:
    """The processes of each DataLoader of torch that is iterated here from now on end with this
    process, and so do those of torchdata's StatefulDataLoader, which have a loop of their own. In a
    file without Ray: a process that is spawned imports it."""
    worker._worker_loop = _loop_that_ends_with_its_parent
    with contextlib.suppress(Exception):  # Where it is not installed, or does not fit this torch.
        stateful: Any = importlib.import_module(f"{_STATEFUL}.stateful_dataloader")
        stateful._worker_loop = _stateful_loop_that_ends_with_its_parent
