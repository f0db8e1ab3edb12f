"""Storages in pickles: each one once, however many tensors are views of it.

torch pickles a tensor with the whole storage under it. So the list of samples that
`list(zip(X, Y))` makes of two tensors would become as many copies of both. Here every view that is
pickled by one pickler refers to the same storage, and is a view of one storage again when it is
unpickled: what is written through one is read through the other, as before.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage, _load_from_bytes

Reduced = tuple[Any, ...]
"""What `__reduce__` returns."""


class SharedStorages:
    """The storages that one pickler has met, for its `reducer_override`.

    as_buffers: storages of the CPU become buffers of pickle protocol 5, which the pickler may keep
        out of the pickle; else their bytes are in it.
    """

    def __init__(self, *, as_buffers: bool = False) -> None:
        self._as_buffers = as_buffers
        self._met: dict[int, _Storage] = {}  # by address; they also keep the storages alive

    def reduce(self, value: object) -> Reduced | None:
        """How to pickle `value`, a storage or a plain tensor; None for everything else."""
        if type(value) is torch.Tensor and _is_plain(value):
            # As torch does it, in a fifth of the time: small samples are many.
            storage = self._met_once(value.untyped_storage())
            place = value.storage_offset(), tuple(value.shape), value.stride()
            return _view, (storage, value.dtype, *place)
        if isinstance(value, TypedStorage):
            return _typed, (self._met_once(value._untyped_storage), value.dtype)
        if isinstance(value, UntypedStorage):
            return _untyped, (self._met_once(value),)
        if isinstance(value, _Storage):
            return value.reduced(self._as_buffers)
        return None

    def _met_once(self, storage: UntypedStorage) -> _Storage:
        return self._met.setdefault(storage._cdata, _Storage(storage))


class _Storage:
    """Stands for a storage in the pickler. The pickler knows it by its identity, so it pickles it
    once."""

    def __init__(self, storage: UntypedStorage) -> None:
        self._storage = storage

    def reduced(self, as_buffer: bool) -> Reduced:
        storage = self._storage
        if storage.device.type == "cpu":
            memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
            content = pickle.PickleBuffer(memory.data) if as_buffer else memory.tobytes()
            return from_buffer, (content,)
        return _load_from_bytes, (_saved(storage),)


def _saved(storage: UntypedStorage) -> bytes:
    """For torch.load."""
    content = io.BytesIO()
    # As a typed one: torch cannot read an UntypedStorage that it has written by itself.
    torch.save(_typed(storage, torch.uint8), content, _use_new_zipfile_serialization=False)
    return content.getvalue()


def mapped(storage: UntypedStorage, map_location: Any) -> TypedStorage:
    """A storage of the CPU where torch.load would have it."""
    saved = io.BytesIO(_saved(storage))
    moved: TypedStorage = torch.load(saved, map_location=map_location, weights_only=False)
    return moved


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its storage's elements, and nothing more."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        # Such views read their storage with another sign: the elements alone would be others.
        and not tensor.is_conj()
        and not tensor.is_neg()
        # Attributes that a program has set travel only with torch's own pickling.
        and not tensor.__dict__
        and not tensor._backward_hooks  # torch.load gives an empty dictionary.
    )


# What pickles name, so these names stay.


def _view(
    storage: TypedStorage | UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    untyped = _untyped(storage)
    tensor = torch.empty(0, dtype=dtype, device=untyped.device)
    return tensor.set_(untyped, offset, shape, stride)


def _typed(storage: TypedStorage | UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=_untyped(storage), dtype=dtype, _internal=True)


def _untyped(storage: TypedStorage | UntypedStorage) -> UntypedStorage:
    return storage._untyped_storage if isinstance(storage, TypedStorage) else storage


def from_buffer(buffer: Any) -> UntypedStorage:
    """The storage on this memory itself, if it stood outside the pickle and may be written."""
    content = memoryview(buffer)
    if not content.nbytes:
        return UntypedStorage(0)
    if isinstance(buffer, bytes | bytearray) or content.readonly:
        # As torch aligns its storages.
        whole = torch.empty(content.nbytes, dtype=torch.uint8, device="cpu")
        whole.numpy()[:] = content
    else:
        whole = torch.frombuffer(content, dtype=torch.uint8)
    return whole.untyped_storage()
