"""Ray actors: one driver, and workers that own a device each. Nothing here knows of training."""

from .actor_store import ActorStore
from .errors import DriverLost, Interrupted, RankFailed, StartupError, WorkerLost
from .messages import Report

__all__ = [
    "ActorStore",
    "Report",
    "DriverLost",
    "Interrupted",
    "RankFailed",
    "StartupError",
    "WorkerLost",
]
