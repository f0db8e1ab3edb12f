"""Torch's dtypes by the numbers that operations use (operation.py imports no torch)."""

from __future__ import annotations

import torch

from .operation import DTYPE_NAMES

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in DTYPE_NAMES)
"""DTYPES[i] is torch's dtype of the name DTYPE_NAMES[i]."""

DTYPE_INDEX = {dtype: index for index, dtype in enumerate(DTYPES)}
