"""How the elements of several ranks become one."""

from __future__ import annotations

import enum


class ReduceOp(enum.IntEnum):
    """Reduction of a collective, with torch.distributed's names.

    Host transports add in rank order, so every rank gets the same bits; float16 and bfloat16 are
    accumulated in float32 and rounded once. AVG of integers truncates toward zero, as NCCL does.

    BAND, BOR and BXOR are for integers and bool. Of bool, SUM is "or" and PRODUCT is "and"; it has
    no AVG. Complex numbers have SUM, AVG and PREMUL_SUM only. PREMUL_SUM multiplies what this rank
    brings by `factor`, an argument of the operation that may differ between ranks, and sums.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVG = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8
