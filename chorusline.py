"""Chorusline: data-parallel training on Ray that keeps going. `import chorusline as cl`.

This module only re-exports names of `collectives` (groups of ranks, no Ray), `actors` (Ray actors)
and `runtime` (sessions and training).
"""

from __future__ import annotations

import importlib as _importlib
import importlib.util as _importlib_util
import logging as _logging
import pathlib as _pathlib
import typing as _typing
import warnings as _warnings


def _refuse_strangers() -> None:
    """Raise ImportError if another package of the same name comes before one of Chorusline's, whose
    names are everyday words."""
    home = _pathlib.Path(__file__).resolve().parent
    for name in ("collectives", "actors", "runtime"):
        spec = _importlib_util.find_spec(name)
        if spec is None:
            raise ImportError(
                f"chorusline's own package {name!r} is missing beside {__file__}; install "
                "chorusline again"
            )
        places = list(spec.submodule_search_locations or [])
        found = spec.origin or (places[0] if places else "nowhere")
        if not any(_pathlib.Path(place).resolve() == home / name for place in places):
            raise ImportError(
                f"import {name!r} finds {found}, which comes before chorusline's own {home / name} "
                "on sys.path. Rename that package, move it into another package, or take its "
                "folder off sys.path"
            )


def _import_ray() -> None:
    """Import Ray without its advice to install ipywidgets, which is the first thing that a notebook
    would show, in red."""
    widgets = _logging.getLogger("ray.widgets.util")
    before = widgets.level
    widgets.setLevel(_logging.WARNING)
    try:
        with _warnings.catch_warnings():
            _warnings.filterwarnings("ignore", message="IProgress not found")
            _importlib.import_module("ray")
    finally:
        widgets.setLevel(before)


_refuse_strangers()
_import_ray()

from actors.actor_store import ActorStore  # noqa: E402
from actors.errors import (  # noqa: E402
    DriverLost,
    Interrupted,
    RankFailed,
    StartupError,
    StateLost,
    StreamLost,
    WorkerLost,
)
from actors.messages import Report  # noqa: E402
from collectives import (  # noqa: E402
    ChoruslineError,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    Communicator,
    DebugLevel,
    FileStore,
    FlightRecording,
    Group,
    GroupAborted,
    GroupClosed,
    GroupDescription,
    HashStore,
    PayloadUnreadable,
    PeerLost,
    PrefixStore,
    RecordedCollective,
    ReduceOp,
    Rendezvous,
    StaleStore,
    Statistics,
    Store,
    StoreFromTorch,
    StoreLost,
    StoreTimeout,
    TorchStore,
    UnsupportedOperation,
    Work,
    get_debug_level,
    register_backend,
    set_debug_level,
    set_debug_level_from_env,
    store_from_url,
)
from collectives.contract.torch_words import (  # noqa: E402
    instead_of_function as _instead_of_function,
)
from runtime.averaging.model_averaging import (  # noqa: E402
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
)
from runtime.averaging.post_local_sgd import (  # noqa: E402
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)
from runtime.checkpoint import (  # noqa: E402
    CheckpointConfig,
    CheckpointCorrupted,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointPlaceUnusable,
    CheckpointUntrusted,
    CheckpointWriteFailed,
    Saving,
    SavingTimes,
)
from runtime.data.dataset_batches import Shard  # noqa: E402
from runtime.data.dealing import deal  # noqa: E402
from runtime.data.steps import Step, Steps  # noqa: E402
from runtime.data.streaming import Stream  # noqa: E402
from runtime.data_parallel.distributed_data_parallel import DistributedDataParallel  # noqa: E402
from runtime.data_parallel.gradients.comm_hooks import GradBucket  # noqa: E402
from runtime.data_parallel.pure_distributed_data_parallel import (  # noqa: E402
    PureDistributedDataParallel,
)
from runtime.data_parallel.sync_batch_norm import SyncBatchNorm  # noqa: E402
from runtime.join.join import Join, Joinable  # noqa: E402
from runtime.join.join_hook import JoinHook  # noqa: E402
from runtime.notebook import load_ipython_extension, unload_ipython_extension  # noqa: E402, F401
from runtime.process.random_state import RandomState  # noqa: E402
from runtime.program.context import Context  # noqa: E402
from runtime.session.attaching import attach  # noqa: E402
from runtime.session.one_run import run  # noqa: E402
from runtime.session.session import Session, SessionSnapshot  # noqa: E402
from runtime.session.showing.progress import Progress  # noqa: E402
from runtime.tracking.json_lines import JSONLinesTracker  # noqa: E402
from runtime.tracking.mlflow import MLflowTracker  # noqa: E402
from runtime.tracking.opentelemetry import OpenTelemetryTracker  # noqa: E402
from runtime.tracking.tensorboard import TensorBoardTracker  # noqa: E402
from runtime.tracking.tracker import TrackedEvent, TrackedRun, Tracker  # noqa: E402
from runtime.tracking.wandb import WandbTracker  # noqa: E402
from runtime.zero.grad_scaler import GradScaler  # noqa: E402
from runtime.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer  # noqa: E402

if _typing.TYPE_CHECKING:
    from runtime.lightning.strategy import ChoruslineStrategy  # noqa: F401


def __getattr__(name: str) -> object:
    # Of the extra `lightning`, and seconds to import.
    if name == "ChoruslineStrategy":
        from runtime.lightning.strategy import ChoruslineStrategy

        return ChoruslineStrategy
    is_method = not name.startswith("_") and name in dir(Group)
    instead = _instead_of_function(name, is_method)
    raise AttributeError(f"module 'chorusline' has no attribute {name!r}{instead}")


__version__ = "0.1.0"

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
