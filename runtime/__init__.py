"""The job and its user: sessions, data parallelism, sharded optimizers, uneven inputs."""

from .context import Context
from .session import Session, SessionSnapshot, SessionState, run

__all__ = ["Context", "Session", "SessionSnapshot", "SessionState", "run"]
