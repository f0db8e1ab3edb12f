"""NCCL's numbers for dtypes, reductions and versions, and what it lacks. Needs neither a GPU nor
CuPy."""

from __future__ import annotations

import torch

from ..contract.operation import ReduceOp

# The numbers of nccl.h never change; CuPy has added its names for them one release at a time.
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


def dotted(version: int) -> str:
    """23007 -> "2.30.7"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def described(error: BaseException, version: int) -> str:
    """An error that NCCL reported; what it means depends on NCCL's version."""
    return f"{type(error).__name__}: {error} (NCCL {dotted(version)})"


def lacks(op: ReduceOp, dtype: torch.dtype) -> str:
    """The remedy if NCCL cannot reduce `dtype` with `op`; "" if it can."""
    if op not in REDUCE_OP_CODES:
        return "NCCL has no bitwise operations; use all_gather and combine, or a group on cpu"
    if dtype not in DTYPE_CODES:
        return f"NCCL does not add {dtype}; convert to torch.int32 (moving it works)"
    if op is ReduceOp.AVG and dtype in (torch.int8, torch.uint8):
        return f"NCCL adds before it divides, and {dtype} overflows; convert to torch.int32"
    return ""


def as_moved(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address, count and NCCL's dtype to move (n,) unchanged; as bytes if NCCL lacks the dtype."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        return tensor.data_ptr(), tensor.nbytes, DTYPE_CODES[torch.uint8]
    return tensor.data_ptr(), tensor.numel(), code
