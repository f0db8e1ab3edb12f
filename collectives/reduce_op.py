"""How the elements of several ranks become one."""

from __future__ import annotations

import enum


class ReduceOp(enum.IntEnum):
    """Reduction of a collective, with torch.distributed's names.

    Host transports add in rank order, so every rank gets the same bits; float16 and bfloat16 are
    accumulated in float32 and rounded once. AVG of integers truncates toward zero, as NCCL does.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVG = 4
