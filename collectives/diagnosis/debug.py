"""Debug levels: how much the collectives check and log.

    OFF      the flight recorder, and the comparison of operation, size and dtype: always on.
    INFO     also the reducer's choices, parameters without gradients and average times, through
             `logging`, logger "chorusline".
    DETAIL   also before each collective all ranks compare shapes, devices, group names and the
             rest, and an error gives the lines of all ranks. It costs a barrier per collective.

CHORUSLINE_DEBUG sets the level; if it is not set, TORCH_DISTRIBUTED_DEBUG does, as in torch.
`set_debug_level` overrides both, in this process. DETAIL applies to groups that are made after it
was set, and must be set on all ranks.
"""

from __future__ import annotations

import enum
import logging
import os

_VARIABLES = ("CHORUSLINE_DEBUG", "TORCH_DISTRIBUTED_DEBUG")

logger = logging.getLogger("chorusline")


class DebugLevel(enum.IntEnum):
    """OFF: errors only. INFO: choices and times are logged. DETAIL: ranks compare every collective
    in full before it touches a tensor.

        cl.set_debug_level(cl.DebugLevel.INFO)
        if cl.get_debug_level() >= cl.DebugLevel.INFO:
            print(group.describe())
    """

    OFF = 0
    INFO = 1
    DETAIL = 2


_level: DebugLevel | None = None  # None until it is first read or set


def get_debug_level() -> DebugLevel:
    """The level of this process, initially from the environment.

    Example:

        if cl.get_debug_level() is cl.DebugLevel.DETAIL:
            print("each collective is compared in full")
    """
    if _level is None:
        set_debug_level_from_env()
        assert _level is not None
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the level of this process. DETAIL applies to groups that are made from then on.

    Example:

        cl.set_debug_level(cl.DebugLevel.DETAIL)
        checked = cl.Group.create(cl.HashStore(), rank=0, size=1)
    """
    global _level
    if not isinstance(level, DebugLevel):
        raise TypeError(
            f"level must be a DebugLevel, such as DebugLevel.INFO, got {type(level).__name__}"
        )
    _level = level


def set_debug_level_from_env() -> None:
    """Read the level from the environment again. Raises ValueError for an unknown level.

    Example:

        os.environ["CHORUSLINE_DEBUG"] = "INFO"
        cl.set_debug_level_from_env()
        assert cl.get_debug_level() is cl.DebugLevel.INFO
    """
    for variable in _VARIABLES:
        name = os.environ.get(variable, "")
        if name:
            if name.upper() not in DebugLevel.__members__:
                raise ValueError(
                    f"{variable} must be one of {', '.join(DebugLevel.__members__)}, got {name!r}"
                )
            set_debug_level(DebugLevel[name.upper()])
            return
    set_debug_level(DebugLevel.OFF)


def inform(text: str, *arguments: object) -> None:
    """Log at INFO, even in a program that has not configured logging."""
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.info(text, *arguments)
