"""Groups of ranks that move tensors together: no Ray in here, only tensors, ranks and time."""

from .backends import register_backend
from .communicator import Communicator
from .errors import (
    ChoruslineError,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PayloadUnreadable,
    PeerLost,
    StoreTimeout,
    UnsupportedOperation,
)
from .group import Group, GroupDescription
from .reduce_op import ReduceOp
from .statistics import Statistics
from .store import FileStore, HashStore, PrefixStore, Store
from .work import Work

__all__ = [
    "Group",
    "GroupDescription",
    "register_backend",
    "Communicator",
    "Work",
    "ReduceOp",
    "Statistics",
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
    "PayloadUnreadable",
    "UnsupportedOperation",
    "StoreTimeout",
]
