"""The job and its user: sessions, data parallelism, sharded optimizers, uneven inputs."""

from .checkpoint import (
    CheckpointConfig,
    CheckpointCorrupted,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointPlaceUnusable,
    CheckpointWriteFailed,
    Saving,
    SavingTimes,
)
from .context import Context
from .dealing import deal
from .distributed_data_parallel import DistributedDataParallel
from .grad_scaler import GradScaler
from .join import Join
from .joinable import Joinable, JoinHook
from .random_state import RandomState
from .session import Session, SessionSnapshot, SessionState, run
from .sharding import Shard
from .streaming import Stream
from .sync_batch_norm import SyncBatchNorm
from .zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = [
    "CheckpointConfig",
    "CheckpointCorrupted",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointPlaceUnusable",
    "CheckpointWriteFailed",
    "Context",
    "DistributedDataParallel",
    "GradScaler",
    "Join",
    "JoinHook",
    "Joinable",
    "RandomState",
    "Saving",
    "SavingTimes",
    "Session",
    "SessionSnapshot",
    "SessionState",
    "Shard",
    "Stream",
    "SyncBatchNorm",
    "ZeroRedundancyOptimizer",
    "deal",
    "run",
]
