"""Collectives as named ranges: in torch.profiler, and in NVTX for Nsight on GPUs.

A range begins when the operation is issued and ends when the operation does, in the thread that
ends it. While nobody records, the only cost is the check of a flag. NVTX cannot be asked whether
anybody listens; the tools that do set a variable in the processes that they start.
"""

from __future__ import annotations

import os

import torch
from torch.autograd import profiler

from ..contract.operation import Operation, described

_SET_BY_TOOLS = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")


def nvtx_is_recorded(device: torch.device) -> bool:
    """Whether a tool that records NVTX has started this process, which uses a GPU."""
    return device.type == "cuda" and any(name in os.environ for name in _SET_BY_TOOLS)


def span_of(operation: Operation, with_nvtx: bool) -> RecordedSpan | None:
    """The range of `operation`; None while nobody records."""
    if profiler._is_profiler_enabled or with_nvtx:
        return RecordedSpan(operation, with_nvtx)
    return None


class RecordedSpan:
    """The range `chorusline::all_reduce` of one operation, from now until `end`. In NVTX its name
    has the number and the size."""

    def __init__(self, operation: Operation, with_nvtx: bool) -> None:
        full_name = f"chorusline::{described(operation)}"
        self._nvtx = torch.cuda.nvtx.range_start(full_name) if with_nvtx else None
        self._recorded = None
        if profiler._is_profiler_enabled:
            # The name has no number, so that a table of averages has one line for each kind.
            name = f"chorusline::{operation.kind.name.lower()}"
            self._recorded = torch._C._profiler._RecordFunctionFast(name)
            self._recorded.__enter__()

    def end(self) -> None:
        if self._recorded is not None:
            self._recorded.__exit__(None, None, None)
        if self._nvtx is not None:
            # Push and pop would have to be in one thread, and nest.
            torch.cuda.nvtx.range_end(self._nvtx)
