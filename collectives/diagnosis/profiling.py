"""Collectives as named ranges: in torch.profiler, and in NVTX for Nsight on GPUs.

A range begins when the operation is issued and ends when the operation does, on whichever thread
sees that. Where no profiler runs and there is no GPU, the price is one look at a flag.
"""

from __future__ import annotations

import torch
from torch.autograd import profiler

from ..contract.operation import Operation, named


class _Spans:
    """The ranges of one operation."""

    def __init__(self, operation: Operation, with_nvtx: bool) -> None:
        full_name = f"chorusline::{named(operation)}"
        self._nvtx = torch.cuda.nvtx.range_start(full_name) if with_nvtx else None
        self._recorded = None
        if profiler._is_profiler_enabled:
            # Without the number, so that a table of averages has one line for a kind.
            name = f"chorusline::{operation.kind.name.lower()}"
            self._recorded = torch._C._profiler._RecordFunctionFast(name)
            self._recorded.__enter__()

    def end(self) -> None:
        if self._recorded is not None:
            self._recorded.__exit__(None, None, None)
        if self._nvtx is not None:
            # Not push and pop: those must be on one thread, and nest.
            torch.cuda.nvtx.range_end(self._nvtx)


def begin_span(operation: Operation, with_nvtx: bool) -> _Spans:
    """`chorusline::all_reduce`, from now on; in NVTX with its number and size."""
    return _Spans(operation, with_nvtx)
