"""NCCL's numbers for dtypes and reductions, and what it has none for. Needs no GPU, and no CuPy."""

from __future__ import annotations

import torch

from ..contract.operation import ReduceOp

# The numbers of nccl.h, which never change: CuPy's names for them came one release at a time.
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
REDUCE_OP_CODES: dict[ReduceOp, int] = {
    ReduceOp.SUM: 0,
    ReduceOp.PRODUCT: 1,
    ReduceOp.MAX: 2,
    ReduceOp.MIN: 3,
    ReduceOp.AVG: 4,
}


def lacks(op: ReduceOp, dtype: torch.dtype) -> str:
    """What to do instead, if NCCL cannot reduce `dtype` with `op`; else nothing."""
    if op not in REDUCE_OP_CODES:
        return "NCCL has no bitwise operations; use all_gather and combine, or a group on cpu"
    if dtype not in DTYPE_CODES:
        return f"NCCL does not add {dtype}; convert to torch.int32 (moving it works)"
    return ""


def as_moved(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address, count and NCCL's dtype to move (n,) as bits: what NCCL has no name for, as bytes."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        return tensor.data_ptr(), tensor.nbytes, DTYPE_CODES[torch.uint8]
    return tensor.data_ptr(), tensor.numel(), code
