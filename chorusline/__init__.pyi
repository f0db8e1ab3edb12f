"""The public names of Chorusline, and the only list of them: `__init__.py` imports each from the
module given here when it is used first, and type checkers read it."""

from .actors.actor_store import ActorStore as ActorStore
from .actors.errors import (
    DriverLost as DriverLost,
)
from .actors.errors import (
    Interrupted as Interrupted,
)
from .actors.errors import (
    RankFailed as RankFailed,
)
from .actors.errors import (
    StartupError as StartupError,
)
from .actors.errors import (
    StateLost as StateLost,
)
from .actors.errors import (
    StreamLost as StreamLost,
)
from .actors.errors import (
    WorkerLost as WorkerLost,
)
from .actors.messages import Report as Report
from .collectives import (
    ChoruslineError as ChoruslineError,
)
from .collectives import (
    CollectiveError as CollectiveError,
)
from .collectives import (
    CollectiveMismatch as CollectiveMismatch,
)
from .collectives import (
    CollectiveTimeout as CollectiveTimeout,
)
from .collectives import (
    Communicator as Communicator,
)
from .collectives import (
    DebugLevel as DebugLevel,
)
from .collectives import (
    FileStore as FileStore,
)
from .collectives import (
    FlightRecording as FlightRecording,
)
from .collectives import (
    Group as Group,
)
from .collectives import (
    GroupAborted as GroupAborted,
)
from .collectives import (
    GroupClosed as GroupClosed,
)
from .collectives import (
    GroupDescription as GroupDescription,
)
from .collectives import (
    HashStore as HashStore,
)
from .collectives import (
    PayloadUnreadable as PayloadUnreadable,
)
from .collectives import (
    PeerLost as PeerLost,
)
from .collectives import (
    PrefixStore as PrefixStore,
)
from .collectives import (
    RecordedCollective as RecordedCollective,
)
from .collectives import (
    ReduceOp as ReduceOp,
)
from .collectives import (
    Rendezvous as Rendezvous,
)
from .collectives import (
    SecretMismatch as SecretMismatch,
)
from .collectives import (
    SignedStore as SignedStore,
)
from .collectives import (
    StaleStore as StaleStore,
)
from .collectives import (
    Statistics as Statistics,
)
from .collectives import (
    Store as Store,
)
from .collectives import (
    StoreFromTorch as StoreFromTorch,
)
from .collectives import (
    StoreLost as StoreLost,
)
from .collectives import (
    StoreTimeout as StoreTimeout,
)
from .collectives import (
    TorchStore as TorchStore,
)
from .collectives import (
    UnsupportedOperation as UnsupportedOperation,
)
from .collectives import (
    Work as Work,
)
from .collectives import (
    get_debug_level as get_debug_level,
)
from .collectives import (
    register_backend as register_backend,
)
from .collectives import (
    set_debug_level as set_debug_level,
)
from .collectives import (
    set_debug_level_from_env as set_debug_level_from_env,
)
from .collectives import (
    store_from_url as store_from_url,
)
from .runtime.averaging.model_averaging import (
    HierarchicalModelAverager as HierarchicalModelAverager,
)
from .runtime.averaging.model_averaging import (
    ModelAverager as ModelAverager,
)
from .runtime.averaging.model_averaging import (
    PeriodicModelAverager as PeriodicModelAverager,
)
from .runtime.averaging.post_local_sgd import (
    PostLocalSGDOptimizer as PostLocalSGDOptimizer,
)
from .runtime.averaging.post_local_sgd import (
    PostLocalSGDState as PostLocalSGDState,
)
from .runtime.averaging.post_local_sgd import (
    post_localSGD_hook as post_localSGD_hook,
)
from .runtime.checkpoint import (
    CheckpointConfig as CheckpointConfig,
)
from .runtime.checkpoint import (
    CheckpointCorrupted as CheckpointCorrupted,
)
from .runtime.checkpoint import (
    CheckpointError as CheckpointError,
)
from .runtime.checkpoint import (
    CheckpointMismatch as CheckpointMismatch,
)
from .runtime.checkpoint import (
    CheckpointNotFound as CheckpointNotFound,
)
from .runtime.checkpoint import (
    CheckpointPlaceUnusable as CheckpointPlaceUnusable,
)
from .runtime.checkpoint import (
    CheckpointUntrusted as CheckpointUntrusted,
)
from .runtime.checkpoint import (
    CheckpointWriteFailed as CheckpointWriteFailed,
)
from .runtime.checkpoint import (
    Saving as Saving,
)
from .runtime.checkpoint import (
    SavingTimes as SavingTimes,
)
from .runtime.data.dataset_batches import Shard as Shard
from .runtime.data.dealing import deal as deal
from .runtime.data.steps import Step as Step
from .runtime.data.steps import Steps as Steps
from .runtime.data.streaming import Stream as Stream
from .runtime.data_parallel.distributed_data_parallel import (
    DistributedDataParallel as DistributedDataParallel,
)
from .runtime.data_parallel.gradients.comm_hooks import GradBucket as GradBucket
from .runtime.data_parallel.pure_distributed_data_parallel import (
    PureDistributedDataParallel as PureDistributedDataParallel,
)
from .runtime.data_parallel.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from .runtime.join.join import Join as Join
from .runtime.join.join import Joinable as Joinable
from .runtime.join.join_hook import JoinHook as JoinHook
from .runtime.lightning.strategy import ChoruslineStrategy as ChoruslineStrategy
from .runtime.notebook import (
    load_ipython_extension as load_ipython_extension,
)
from .runtime.notebook import (
    unload_ipython_extension as unload_ipython_extension,
)
from .runtime.process.random_state import RandomState as RandomState
from .runtime.program.context import Context as Context
from .runtime.session.attaching import attach as attach
from .runtime.session.one_run import run as run
from .runtime.session.session import Session as Session
from .runtime.session.showing.progress import Progress as Progress
from .runtime.session.state import SessionSnapshot as SessionSnapshot
from .runtime.tracking.json_lines import JSONLinesTracker as JSONLinesTracker
from .runtime.tracking.mlflow import MLflowTracker as MLflowTracker
from .runtime.tracking.opentelemetry import OpenTelemetryTracker as OpenTelemetryTracker
from .runtime.tracking.tensorboard import TensorBoardTracker as TensorBoardTracker
from .runtime.tracking.tracker import (
    TrackedEvent as TrackedEvent,
)
from .runtime.tracking.tracker import (
    TrackedRun as TrackedRun,
)
from .runtime.tracking.tracker import (
    Tracker as Tracker,
)
from .runtime.tracking.wandb import WandbTracker as WandbTracker
from .runtime.zero.grad_scaler import GradScaler as GradScaler
from .runtime.zero.zero_redundancy_optimizer import (
    ZeroRedundancyOptimizer as ZeroRedundancyOptimizer,
)

__version__: str

__all__ = [
    # A session and what a train function gets.
    "Session",
    "SessionSnapshot",
    "run",
    "attach",
    "Context",
    "Report",
    "Progress",
    # Where runs are recorded.
    "Tracker",
    "TrackedRun",
    "TrackedEvent",
    "JSONLinesTracker",
    "TensorBoardTracker",
    "MLflowTracker",
    "WandbTracker",
    "OpenTelemetryTracker",
    # Training.
    "DistributedDataParallel",
    "PureDistributedDataParallel",
    "ZeroRedundancyOptimizer",
    "GradScaler",
    "SyncBatchNorm",
    "Join",
    "Joinable",
    "JoinHook",
    "Shard",
    "Steps",
    "Step",
    "Stream",
    "deal",
    # Other ways to bring ranks together.
    "GradBucket",
    "ModelAverager",
    "PeriodicModelAverager",
    "HierarchicalModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "post_localSGD_hook",
    # Checkpoints.
    "CheckpointConfig",
    "Saving",
    "SavingTimes",
    "RandomState",
    # Collectives.
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
    "SignedStore",
    "ActorStore",
    "TorchStore",
    "StoreFromTorch",
    "Rendezvous",
    "store_from_url",
    # Diagnosis.
    "DebugLevel",
    "get_debug_level",
    "set_debug_level",
    "set_debug_level_from_env",
    "FlightRecording",
    "RecordedCollective",
    # Errors.
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
    "SecretMismatch",
    "StaleStore",
    "WorkerLost",
    "StateLost",
    "StreamLost",
    "StartupError",
    "RankFailed",
    "DriverLost",
    "Interrupted",
    "CheckpointError",
    "CheckpointWriteFailed",
    "CheckpointPlaceUnusable",
    "CheckpointUntrusted",
    "CheckpointNotFound",
    "CheckpointCorrupted",
    "CheckpointMismatch",
]
