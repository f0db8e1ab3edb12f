"""numpy's side of reductions."""

from __future__ import annotations

from typing import Any

import numpy as np

from chorusline.collectives.contract.operation import ReduceOp

UFUNCS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
"""By reduction, the ufunc that reduces the ranks' tensors in rank order."""
