"""Torch's dtypes, as operations number them (operation.py, which does without torch)."""

from __future__ import annotations

import torch

from .operation import DTYPE_NAMES

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in DTYPE_NAMES)
"""By number."""

DTYPE_INDEX = {dtype: index for index, dtype in enumerate(DTYPES)}
