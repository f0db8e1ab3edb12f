"""The memory of tensors, as operations of torch make and free them."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that operations inside make: `peak` at the most at a time, and `kept` of
    those that are there when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            t.untyped_storage().data_ptr()
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        self._forget()
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in known:
                    self._alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.kept)
        return result

    @property
    def kept(self) -> int:
        self._forget()
        return sum(nbytes for _, nbytes in self._alive.values())

    def _forget(self) -> None:
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
