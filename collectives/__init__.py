"""Groups of ranks that move tensors together: no Ray in here, only tensors, ranks and time."""

from .debug import DebugLevel, get_debug_level, set_debug_level, set_debug_level_from_env
from .errors import (
    ChoruslineError,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PeerLost,
    StoreTimeout,
    UnsupportedOperation,
)
from .flight_recorder import FlightRecording, RecordedCollective
from .group import Group
from .reduce_op import ReduceOp
from .statistics import Statistics
from .store import FileStore, HashStore, PrefixStore, Store
from .work import Work

__all__ = [
    "Group",
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
    "ChoruslineError",
    "CollectiveError",
    "CollectiveTimeout",
    "CollectiveMismatch",
    "PeerLost",
    "GroupAborted",
    "GroupClosed",
    "UnsupportedOperation",
    "StoreTimeout",
]
