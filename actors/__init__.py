"""Ray actors: one driver, and workers that own a device each. Nothing here knows of training."""

if __name__ != "chorusline.actors":  # A second copy would have classes of its own.
    raise ImportError(f"import chorusline.actors, not {__name__}, from that folder")

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
