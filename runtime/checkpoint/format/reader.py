"""Reads ranges of tensors and objects from a checkpoint, and verifies each piece before use."""

from __future__ import annotations

import hashlib
import io
import pickle
import zlib
from typing import Any

import torch

from .errors import CheckpointCorrupted, CheckpointUntrusted
from .manifest import (
    METADATA,
    Entry,
    Item,
    Manifest,
    dtype_of,
    name_of,
    read_manifest,
    within,
)
from .pieces import Path
from .plain_values import beyond_plain, load_plain
from .storage import Storage


class CheckpointReader:
    """One checkpoint. folder: its name within the storage. bytes_read: from data files so far.

    weights_only: as in torch.load: objects other than tensors and plain values are refused
        (CheckpointUntrusted), because loading them runs code that the checkpoint names.

    The constructor and every method that reads raise CheckpointCorrupted with the file's name.
    """

    def __init__(self, storage: Storage, folder: str, *, weights_only: bool = True) -> None:
        self.storage = storage
        self.folder = folder
        self._weights_only = weights_only
        self.path = storage.path_of(folder)
        self.manifest: Manifest = read_manifest(storage, folder)
        self.bytes_read = 0
        self._entries = {entry.path: entry for entry in self.manifest.entries}
        self._last: tuple[Item, torch.Tensor] | None = None

    def find(self, path: Path) -> Entry | None:
        return self._entries.get(path)

    def below(self, *path: str | int) -> list[Entry]:
        return self.manifest.below(*path)

    def verify(self, part: int = 0, num_parts: int = 1) -> None:
        """Read every `num_parts`-th piece from `part` on, and compare sizes and checksums."""
        for number, (file, size) in enumerate(sorted(self.manifest.files.items())):
            if number % num_parts == part:
                self._verify_size(file, size)
        if part == 0:
            name = within(self.folder, METADATA)
            try:
                digest = hashlib.sha256(self.storage.read(name)).hexdigest()
            except FileNotFoundError:
                digest = "that of no file"
            if digest != self.manifest.metadata_sha256:
                raise CheckpointCorrupted(
                    self.storage.path_of(name), "it does not match its checksum in the manifest"
                )
        for item in self.manifest.items()[part::num_parts]:
            self._bytes(item)

    def _verify_size(self, file: str, size: int) -> None:
        name = within(self.folder, file)
        try:
            found = self.storage.size(name)
        except FileNotFoundError:
            raise CheckpointCorrupted(self.storage.path_of(name), "it is missing") from None
        if found != size:
            raise CheckpointCorrupted(self.storage.path_of(name), f"it has {found} bytes of {size}")

    def tensor(self, entry: Entry, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """(stop - start,) elements [start, stop) of the flattened tensor, on the CPU. Reads only
        the pieces that hold them."""
        assert entry.dtype is not None
        stop = entry.numel if stop is None else stop
        result = torch.empty(stop - start, dtype=dtype_of(entry.dtype))
        for item in entry.items:
            first, last = max(start, item.start), min(stop, item.stop)
            if first < last:
                piece = self._piece(item).reshape(-1)
                result[first - start : last - start] = piece[first - item.start : last - item.start]
        return result

    def object(self, entry: Entry) -> Any:
        data = self._bytes(entry.items[0])
        if not self._weights_only:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        try:
            return load_plain(data)
        except pickle.UnpicklingError as error:
            of = ", ".join(beyond_plain(data)) or f"more than plain values ({error})"
            raise CheckpointUntrusted(self.path, f"{name_of(entry.path)} is made of {of}") from None

    def value(self, entry: Entry) -> Any:
        """The tensor in its shape, or the object."""
        if entry.dtype is None:
            return self.object(entry)
        return self.tensor(entry).view(entry.shape)

    def _piece(self, item: Item) -> torch.Tensor:
        # Neighbouring ranges often share a piece, so the last one is kept.
        if self._last is None or self._last[0] != item:
            loaded = torch.load(io.BytesIO(self._bytes(item)), weights_only=True)
            self._last = (item, loaded)
        return self._last[1]

    def _bytes(self, item: Item) -> bytes:
        name = within(self.folder, item.file)
        try:
            data = self.storage.read(name, item.at, item.length)
        except FileNotFoundError:
            raise CheckpointCorrupted(self.storage.path_of(name), "it is missing") from None
        self.bytes_read += len(data)
        if len(data) != item.length or zlib.crc32(data) != item.crc32:
            raise CheckpointCorrupted(
                self.storage.path_of(name),
                f"bytes {item.at} to {item.at + item.length} do not match their checksum"
                if len(data) == item.length
                else f"it ends within bytes {item.at} to {item.at + item.length}",
            )
        return data

    def names(self) -> list[str]:
        return list(self.manifest.kinds)

    def described(self, entry: Entry) -> str:
        return f"{name_of(entry.path)} is {entry}"
