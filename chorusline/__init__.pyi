"""The public names of Chorusline, and the only list of them: `__init__.py` imports each from the
module given here when it is used first, and type checkers read it."""

from .actors.errors import (
    DriverLost as DriverLost,
    Interrupted as Interrupted,
    RankFailed as RankFailed,
    StartupError as StartupError,
    StateLost as StateLost,
    StreamLost as StreamLost,
    WorkerLost as WorkerLost,
)
from .actors.messages.messages import Report as Report
from .actors.ray_calls.actor_store import ActorStore as ActorStore
from .collectives.contract.communicator import Communicator as Communicator
from .collectives.contract.errors import (
    ChoruslineError as ChoruslineError,
    CollectiveError as CollectiveError,
    CollectiveMismatch as CollectiveMismatch,
    CollectiveTimeout as CollectiveTimeout,
    GroupAborted as GroupAborted,
    GroupClosed as GroupClosed,
    PayloadUnreadable as PayloadUnreadable,
    PeerLost as PeerLost,
    SecretMismatch as SecretMismatch,
    StaleStore as StaleStore,
    StoreLost as StoreLost,
    StoreTimeout as StoreTimeout,
    UnsupportedOperation as UnsupportedOperation,
)
from .collectives.contract.operation import ReduceOp as ReduceOp
from .collectives.contract.work import Work as Work
from .collectives.diagnosis.debug import (
    DebugLevel as DebugLevel,
    get_debug_level as get_debug_level,
    set_debug_level as set_debug_level,
    set_debug_level_from_env as set_debug_level_from_env,
)
from .collectives.diagnosis.flight_recorder import (
    FlightRecording as FlightRecording,
    RecordedCollective as RecordedCollective,
)
from .collectives.diagnosis.statistics import Statistics as Statistics
from .collectives.group import Group as Group, GroupDescription as GroupDescription
from .collectives.stores.file_store import FileStore as FileStore
from .collectives.stores.rendezvous import (
    Rendezvous as Rendezvous,
    store_from_url as store_from_url,
)
from .collectives.stores.signed_store import SignedStore as SignedStore
from .collectives.stores.store import (
    HashStore as HashStore,
    PrefixStore as PrefixStore,
    Store as Store,
)
from .collectives.stores.torch_store import (
    StoreFromTorch as StoreFromTorch,
    TorchStore as TorchStore,
)
from .collectives.transports.backends import register_backend as register_backend
from .runtime.averaging.model_averaging import (
    HierarchicalModelAverager as HierarchicalModelAverager,
    ModelAverager as ModelAverager,
    PeriodicModelAverager as PeriodicModelAverager,
)
from .runtime.averaging.post_local_sgd import (
    PostLocalSGDOptimizer as PostLocalSGDOptimizer,
    PostLocalSGDState as PostLocalSGDState,
    post_localSGD_hook as post_localSGD_hook,
)
from .runtime.checkpoint.config import CheckpointConfig as CheckpointConfig
from .runtime.checkpoint.format.errors import (
    CheckpointCorrupted as CheckpointCorrupted,
    CheckpointError as CheckpointError,
    CheckpointMismatch as CheckpointMismatch,
    CheckpointNotFound as CheckpointNotFound,
    CheckpointPlaceUnusable as CheckpointPlaceUnusable,
    CheckpointUntrusted as CheckpointUntrusted,
    CheckpointWriteFailed as CheckpointWriteFailed,
)
from .runtime.checkpoint.saving import Saving as Saving, SavingTimes as SavingTimes
from .runtime.data.dataset_batches import Shard as Shard
from .runtime.data.dealing import deal as deal
from .runtime.data.steps.steps import Step as Step, Steps as Steps
from .runtime.data.streaming import Stream as Stream, StreamShard as StreamShard
from .runtime.data_parallel.distributed_data_parallel import (
    DistributedDataParallel as DistributedDataParallel,
)
from .runtime.data_parallel.gradients.comm_hooks import GradBucket as GradBucket
from .runtime.data_parallel.gradients.step_statistics import StepStatistics as StepStatistics
from .runtime.data_parallel.pure_distributed_data_parallel import (
    PureDistributedDataParallel as PureDistributedDataParallel,
)
from .runtime.data_parallel.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from .runtime.join.engine import Joinable as Joinable
from .runtime.join.join import Join as Join
from .runtime.join.join_hook import JoinHook as JoinHook
from .runtime.lightning.strategy import ChoruslineStrategy as ChoruslineStrategy
from .runtime.notebook import (
    load_ipython_extension as load_ipython_extension,
    unload_ipython_extension as unload_ipython_extension,
)
from .runtime.process.random_state import RandomState as RandomState
from .runtime.program.context import Context as Context
from .runtime.program.last_step import before_restart as before_restart
from .runtime.session.one_run import run as run
from .runtime.session.session import Session as Session, attach as attach
from .runtime.session.showing.progress import Progress as Progress
from .runtime.session.state import (
    SessionSnapshot as SessionSnapshot,
    SessionState as SessionState,
)
from .runtime.tracking.json_lines import JSONLinesTracker as JSONLinesTracker
from .runtime.tracking.mlflow import MLflowTracker as MLflowTracker
from .runtime.tracking.opentelemetry import OpenTelemetryTracker as OpenTelemetryTracker
from .runtime.tracking.tensorboard import TensorBoardTracker as TensorBoardTracker
from .runtime.tracking.tracker import (
    TrackedEvent as TrackedEvent,
    TrackedRun as TrackedRun,
    Tracker as Tracker,
)
from .runtime.tracking.wandb import WandbTracker as WandbTracker
from .runtime.zero.grad_scaler import GradScaler as GradScaler
from .runtime.zero.zero_redundancy_optimizer import (
    ZeroRedundancyOptimizer as ZeroRedundancyOptimizer,
)

__version__: str
