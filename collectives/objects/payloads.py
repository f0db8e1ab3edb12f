"""Python objects as bytes, and bytes as the tensors in which they travel."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.serialization import default_restore_location

from ..stores.signed_store import Seal
from .storages import SharedStorages, from_buffer, mapped

MapLocation = Any
"""As in torch.load: a device, a string, a dictionary, or a function of (storage, location)."""

_FROM_BUFFER = (from_buffer.__module__, from_buffer.__name__)


def dumps(value: Any, argument: str) -> bytes:
    """`value` pickled. Raises TypeError naming `argument`, before anything is sent."""
    try:
        return pickled(value)
    except Exception as error:
        # On a worker no module has what the script itself defines.
        remedy = (
            ". Put the class or function into a module that every rank can import, or send its "
            "fields; in a train function, ctx.broadcast() sends it as it is"
            if "__main__" in str(error)
            else ""
        )
        raise TypeError(
            f"{argument} cannot be pickled: {type(error).__name__}: {error}{remedy}"
        ) from error


def pickled(value: Any) -> bytes:
    """`value` pickled, each storage of its tensors once."""
    written = io.BytesIO()
    _ObjectPickler(written).dump(value)
    return written.getvalue()


class _ObjectPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._storages = SharedStorages()

    def reducer_override(self, value: Any) -> Any:
        reduced = self._storages.reduce(value)
        return NotImplemented if reduced is None else reduced


class GpusTo:
    """As map_location: what another process had on its GPU comes to this process's `device`, and
    makes no context on the other GPU. What was on the host stays there, uncopied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, storage: Any, location: str) -> Any:
        # Ranks without a GPU of their own may use several.
        if self._device.type == "cpu" or not location.startswith("cuda"):
            return None  # As without map_location.
        return default_restore_location(storage, str(self._device))


class _Unpickler(pickle.Unpickler):
    """Has the storages where torch.load would have them with `map_location`."""

    def __init__(self, payload: bytes, map_location: MapLocation) -> None:
        super().__init__(io.BytesIO(payload))
        self._map_location = map_location

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(
                io.BytesIO(data), map_location=self._map_location, weights_only=False
            )
        moves_host = not isinstance(self._map_location, GpusTo | None)
        if moves_host and (module, name) == _FROM_BUFFER:
            return lambda data: mapped(from_buffer(data), self._map_location)
        return super().find_class(module, name)


def loads(payload: bytes, map_location: MapLocation = None) -> Any:
    return _Unpickler(payload, map_location).load()


def sealed(seal: Seal | None, payload: bytes, rank: int) -> bytes:
    """What rank `rank` sends: signed, if the group has a seal."""
    return payload if seal is None else seal.sealed(payload, rank)


def opened(seal: Seal | None, received: bytes, rank: int) -> bytes:
    """The payload of rank `rank`. Raises SecretMismatch if another process has written it."""
    return received if seal is None else seal.opened(received, rank)


def words_of(payload: bytes, length: int) -> torch.Tensor:
    """`payload`, padded to `length` bytes, as (ceil(length / 8),) int64."""
    words = torch.zeros(-(-length // 8), dtype=torch.int64, device="cpu")
    if payload:
        source = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        words.view(torch.uint8)[: len(payload)] = source
    return words


def bytes_of(words: torch.Tensor, length: int) -> bytes:
    return words.cpu().view(torch.uint8)[:length].numpy().tobytes()
