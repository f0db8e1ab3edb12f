"""Groups of ranks that move tensors together: no Ray in here, only tensors, ranks and time."""

from .backends import register_backend
from .communicator import Communicator
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
from .group import Group, GroupDescription
from .reduce_op import ReduceOp
from .rendezvous import Rendezvous, store_from_url
from .statistics import Statistics
from .store import HashStore, PrefixStore, Store
from .torch_backend import register as _register_with_torch
from .torch_store import StoreFromTorch, TorchStore
from .work import Work

_register_with_torch()

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
