"""Pickles of the user's objects, with functions and classes that other processes do not have.

Each storage is in a pickle once (collectives/objects/storages.py). This file needs torch, so the
driver does not import it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
from ray import cloudpickle

from chorusline.collectives.objects.storages import SharedStorages

from .parcel import Parcel

LARGE_BYTES = 256 * 1024
"""Buffers from this size on stand beside the pickle. Ray sends
smaller objects along, and does not keep them in its store."""

_KeepsInPickle = Callable[[pickle.PickleBuffer], bool]


class _ParcelPickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, keeps_in_pickle: _KeepsInPickle | None = None) -> None:
        super().__init__(file, buffer_callback=keeps_in_pickle)
        self._storages = SharedStorages(as_buffers=True)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is numpy.memmap:
            # As an array: numpy gives buffers of its own class only.
            return value.view(numpy.ndarray).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        reduced = self._storages.reduce(value)
        return super().reducer_override(value) if reduced is None else reduced


def packed(value: object) -> Parcel:
    """`value` as a parcel, whose buffers are the memory of `value` itself. Raises what pickling
    raises."""
    buffers: list[numpy.ndarray] = []

    def keeps_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE_BYTES:
            return True
        buffers.append(numpy.frombuffer(raw, dtype=numpy.uint8))
        return False

    written = io.BytesIO()
    _ParcelPickler(written, keeps_in_pickle).dump(value)
    content = written.getbuffer()
    if content.nbytes < LARGE_BYTES:
        return Parcel(bytes(content), tuple(buffers))
    return Parcel(numpy.frombuffer(content, dtype=numpy.uint8), tuple(buffers))


def pickled(value: object) -> bytes:
    """`value` as one pickle."""
    written = io.BytesIO()
    _ParcelPickler(written).dump(value)
    return written.getvalue()
