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

if _typing.TYPE_CHECKING:
    from runtime.averaging.model_averaging import (
        HierarchicalModelAverager,
        ModelAverager,
        PeriodicModelAverager,
    )
    from runtime.averaging.post_local_sgd import (
        PostLocalSGDOptimizer,
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from runtime.checkpoint import (
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
    from runtime.data.dataset_batches import Shard
    from runtime.data.dealing import deal
    from runtime.data.steps import Step, Steps
    from runtime.data.streaming import Stream
    from runtime.data_parallel.distributed_data_parallel import DistributedDataParallel
    from runtime.data_parallel.gradients.comm_hooks import GradBucket
    from runtime.data_parallel.pure_distributed_data_parallel import (
        PureDistributedDataParallel,
    )
    from runtime.data_parallel.sync_batch_norm import SyncBatchNorm
    from runtime.join.join import Join, Joinable
    from runtime.join.join_hook import JoinHook
    from runtime.lightning.strategy import ChoruslineStrategy  # noqa: F401
    from runtime.notebook import load_ipython_extension, unload_ipython_extension  # noqa: F401
    from runtime.process.random_state import RandomState
    from runtime.program.context import Context
    from runtime.session.attaching import attach
    from runtime.session.one_run import run
    from runtime.session.session import Session, SessionSnapshot
    from runtime.session.showing.progress import Progress
    from runtime.tracking.json_lines import JSONLinesTracker
    from runtime.tracking.mlflow import MLflowTracker
    from runtime.tracking.opentelemetry import OpenTelemetryTracker
    from runtime.tracking.tensorboard import TensorBoardTracker
    from runtime.tracking.tracker import TrackedEvent, TrackedRun, Tracker
    from runtime.tracking.wandb import WandbTracker
    from runtime.zero.grad_scaler import GradScaler
    from runtime.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer

_WHEN_USED = {
    "HierarchicalModelAverager": "runtime.averaging.model_averaging",
    "ModelAverager": "runtime.averaging.model_averaging",
    "PeriodicModelAverager": "runtime.averaging.model_averaging",
    "PostLocalSGDOptimizer": "runtime.averaging.post_local_sgd",
    "PostLocalSGDState": "runtime.averaging.post_local_sgd",
    "post_localSGD_hook": "runtime.averaging.post_local_sgd",
    "CheckpointConfig": "runtime.checkpoint",
    "CheckpointCorrupted": "runtime.checkpoint",
    "CheckpointError": "runtime.checkpoint",
    "CheckpointMismatch": "runtime.checkpoint",
    "CheckpointNotFound": "runtime.checkpoint",
    "CheckpointPlaceUnusable": "runtime.checkpoint",
    "CheckpointUntrusted": "runtime.checkpoint",
    "CheckpointWriteFailed": "runtime.checkpoint",
    "Saving": "runtime.checkpoint",
    "SavingTimes": "runtime.checkpoint",
    "Shard": "runtime.data.dataset_batches",
    "deal": "runtime.data.dealing",
    "Step": "runtime.data.steps",
    "Steps": "runtime.data.steps",
    "Stream": "runtime.data.streaming",
    "DistributedDataParallel": "runtime.data_parallel.distributed_data_parallel",
    "GradBucket": "runtime.data_parallel.gradients.comm_hooks",
    "PureDistributedDataParallel": "runtime.data_parallel.pure_distributed_data_parallel",
    "SyncBatchNorm": "runtime.data_parallel.sync_batch_norm",
    "Join": "runtime.join.join",
    "Joinable": "runtime.join.join",
    "JoinHook": "runtime.join.join_hook",
    "load_ipython_extension": "runtime.notebook",
    "unload_ipython_extension": "runtime.notebook",
    "RandomState": "runtime.process.random_state",
    "Context": "runtime.program.context",
    "attach": "runtime.session.attaching",
    "run": "runtime.session.one_run",
    "Session": "runtime.session.session",
    "SessionSnapshot": "runtime.session.session",
    "Progress": "runtime.session.showing.progress",
    "JSONLinesTracker": "runtime.tracking.json_lines",
    "MLflowTracker": "runtime.tracking.mlflow",
    "OpenTelemetryTracker": "runtime.tracking.opentelemetry",
    "TensorBoardTracker": "runtime.tracking.tensorboard",
    "TrackedEvent": "runtime.tracking.tracker",
    "TrackedRun": "runtime.tracking.tracker",
    "Tracker": "runtime.tracking.tracker",
    "WandbTracker": "runtime.tracking.wandb",
    "GradScaler": "runtime.zero.grad_scaler",
    "ZeroRedundancyOptimizer": "runtime.zero.zero_redundancy_optimizer",
    "ChoruslineStrategy": "runtime.lightning.strategy",
}
"""Names that are imported when they are used first: all of them take 0.5 s of CPU time, and a
program and its workers need other parts of it."""


def __getattr__(name: str) -> object:
    if name in _WHEN_USED:
        found = getattr(_importlib.import_module(_WHEN_USED[name]), name)
        globals()[name] = found
        return found
    is_method = not name.startswith("_") and name in dir(Group)
    instead = _instead_of_function(name, is_method)
    raise AttributeError(f"module 'chorusline' has no attribute {name!r}{instead}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED} - {"ChoruslineStrategy"})


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
