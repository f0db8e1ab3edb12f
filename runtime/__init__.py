"""The job and its user: sessions, data parallelism, sharded optimizers, uneven inputs."""

from .context import Context
from .dealing import deal
from .distributed_data_parallel import DistributedDataParallel
from .grad_scaler import GradScaler
from .join import Join, Joinable, JoinHook
from .session import Session, SessionSnapshot, SessionState, run
from .sharding import Shard
from .zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = [
    "Context",
    "DistributedDataParallel",
    "GradScaler",
    "Join",
    "JoinHook",
    "Joinable",
    "Session",
    "SessionSnapshot",
    "SessionState",
    "Shard",
    "ZeroRedundancyOptimizer",
    "deal",
    "run",
]
