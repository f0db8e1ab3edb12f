"""Groups of ranks that move tensors together: no Ray in here, only tensors, ranks and time.

What needs torch is imported when it is first asked for: the driver's process passes errors on and
keeps a store, and would take a second and a half longer to start, or to be replaced, with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .debug import DebugLevel, get_debug_level, set_debug_level, set_debug_level_from_env
from .errors import (
    ChoruslineError,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PayloadUnreadable,
    PeerLost,
    StaleStore,
    StoreLost,
    StoreTimeout,
    UnsupportedOperation,
)
from .file_store import FileStore
from .flight_recorder import FlightRecording, RecordedCollective
from .reduce_op import ReduceOp
from .statistics import Statistics
from .store import HashStore, PrefixStore, Store

if TYPE_CHECKING:
    from .backends import register_backend
    from .communicator import Communicator
    from .group import Group, GroupDescription
    from .rendezvous import Rendezvous, store_from_url
    from .torch_store import StoreFromTorch, TorchStore
    from .work import Work

_WITH_TORCH = {
    "register_backend": "backends",
    "Communicator": "communicator",
    "Group": "group",
    "GroupDescription": "group",
    "Rendezvous": "rendezvous",
    "store_from_url": "rendezvous",
    "StoreFromTorch": "torch_store",
    "TorchStore": "torch_store",
    "Work": "work",
}


def __getattr__(name: str) -> object:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_WITH_TORCH[name]}", __name__), name)
    if name == "Group":
        # A process that has groups has the backend "chorusline" of torch.distributed, too.
        importlib.import_module(".torch_backend", __name__).register()
    globals()[name] = found
    return found


__all__ = [
    "Group",
    "GroupDescription",
    "register_backend",
    "Communicator",
    "Work",
    "ReduceOp",
    "Statistics",
    "DebugLevel",
    "get_debug_level",
    "set_debug_level",
    "set_debug_level_from_env",
    "FlightRecording",
    "RecordedCollective",
    "Store",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "TorchStore",
    "StoreFromTorch",
    "Rendezvous",
    "store_from_url",
    "ChoruslineError",
    "CollectiveError",
    "CollectiveTimeout",
    "CollectiveMismatch",
    "PeerLost",
    "GroupAborted",
    "GroupClosed",
    "PayloadUnreadable",
    "UnsupportedOperation",
    "StoreTimeout",
    "StoreLost",
    "StaleStore",
]
