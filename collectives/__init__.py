"""Groups of ranks that move tensors together, without Ray: `chorusline.collectives`.

Names that need torch are imported on first access: the driver's process only passes errors on and
keeps a store, and importing torch would delay its start, or its replacement, by 1.5 s.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if __name__ != "chorusline.collectives":  # A second copy would have classes of its own.
    raise ImportError(
        f"import chorusline.collectives, not {__name__}: it is a package of chorusline"
    )

from .contract.errors import (
    ChoruslineError,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PayloadUnreadable,
    PeerLost,
    SecretMismatch,
    StaleStore,
    StoreLost,
    StoreTimeout,
    UnsupportedOperation,
)
from .contract.operation import ReduceOp
from .diagnosis.debug import DebugLevel, get_debug_level, set_debug_level, set_debug_level_from_env
from .diagnosis.flight_recorder import FlightRecording, RecordedCollective
from .diagnosis.statistics import Statistics
from .stores.file_store import FileStore
from .stores.signed_store import SignedStore
from .stores.store import HashStore, PrefixStore, Store

if TYPE_CHECKING:
    from .contract.communicator import Communicator
    from .contract.work import Work
    from .group import Group, GroupDescription
    from .stores.rendezvous import Rendezvous, store_from_url
    from .stores.torch_store import StoreFromTorch, TorchStore
    from .transports.backends import register_backend

_WITH_TORCH = {
    "register_backend": "transports.backends",
    "Communicator": "contract.communicator",
    "Group": "group",
    "GroupDescription": "group",
    "Rendezvous": "stores.rendezvous",
    "store_from_url": "stores.rendezvous",
    "StoreFromTorch": "stores.torch_store",
    "TorchStore": "stores.torch_store",
    "Work": "contract.work",
}


def __getattr__(name: str) -> object:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_WITH_TORCH[name]}", __name__), name)
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
    "SignedStore",
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
    "SecretMismatch",
]
