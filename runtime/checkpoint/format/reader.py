"""Reads ranges of tensors and objects from a checkpoint, and verifies each piece before use."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import zlib
from typing import Any

import torch

from .errors import CheckpointCorrupted, CheckpointUntrusted
from .manifest import (
    METADATA,
    Item,
    Manifest,
    ManifestEntry,
    dtype_name,
    dtype_of,
    name_of,
    read_manifest,
    within,
)
from .pieces import Path
from .plain_values import (
    MOST_DEEP,
    beyond_plain,
    check_archive,
    is_deeper,
    load_plain,
    load_tensor,
)
from .storage import Storage

_READ_BYTES = 16 << 20


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
        self._last: tuple[Item, torch.Tensor] | None = None  # None: nothing read yet

    def find(self, path: Path) -> ManifestEntry | None:
        return self._entries.get(path)

    def below(self, *path: str | int) -> list[ManifestEntry]:
        return self.manifest.below(*path)

    def verify(self, part: int = 0, num_parts: int = 1) -> None:
        """Read every `num_parts`-th piece from `part` on, and compare sizes, checksums, and what a
        piece holds."""
        pieces = [(item, entry) for entry in self.manifest.entries for item in entry.items]
        mine = pieces[part::num_parts]
        # First of all that is read here: a piece has no more bytes then than its file.
        files = {*sorted(self.manifest.files)[part::num_parts], *(item.file for item, _ in mine)}
        for file in sorted(files):
            self._verify_size(file, self.manifest.files[file])
        # One rank is enough for what is small.
        if part == 0:
            self._verify_metadata()
        for item, entry in mine:
            if entry.dtype is not None:
                self._piece(item, entry)
            else:
                self._archive(item, entry)

    def _verify_size(self, file: str, size: int) -> None:
        name = within(self.folder, file)
        try:
            found = self.storage.size(name)
        except FileNotFoundError:
            raise CheckpointCorrupted(self.storage.path_of(name), "it is missing") from None
        if found != size:
            raise CheckpointCorrupted(self.storage.path_of(name), f"it has {found} bytes of {size}")

    def _verify_metadata(self) -> None:
        name = within(self.folder, METADATA)
        digest, at = hashlib.sha256(), 0
        try:
            size = self.storage.size(name)  # It may have any.
            # S3 raises an error for a read that begins at the end of a file.
            while at < size and (data := self.storage.read(name, at, _READ_BYTES)):
                digest.update(data)
                at += len(data)
        except FileNotFoundError:
            raise CheckpointCorrupted(self.storage.path_of(name), "it is missing") from None
        if digest.hexdigest() != self.manifest.metadata_sha256:
            raise CheckpointCorrupted(
                self.storage.path_of(name), "it does not match its checksum in the manifest"
            )

    def tensor(self, entry: ManifestEntry, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """(stop - start,) elements [start, stop) of the flattened tensor, on the CPU. Reads only
        the pieces that hold them."""
        assert entry.dtype is not None
        stop = entry.numel if stop is None else stop
        result = torch.empty(stop - start, dtype=dtype_of(entry.dtype))
        for item in entry.items:
            first, last = max(start, item.start), min(stop, item.stop)
            if first < last:
                piece = self._piece(item, entry)
                result[first - start : last - start] = piece[first - item.start : last - item.start]
        return result

    def object(self, entry: ManifestEntry) -> Any:
        (item,) = entry.items
        data = self._archive(item, entry)
        value = self._loaded(data, item, entry)
        if is_deeper(value, MOST_DEEP + 1 - len(entry.path)):
            raise self._unlike(item, entry, f"they are nested more than {MOST_DEEP} deep")
        return value

    def _loaded(self, data: bytes, item: Item, entry: ManifestEntry) -> Any:
        if not self._weights_only:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        try:
            return load_plain(data)
        except pickle.UnpicklingError as error:
            of = ", ".join(beyond_plain(data)) or f"more than plain values ({error})"
            raise CheckpointUntrusted(self.path, f"{name_of(entry.path)} is made of {of}") from None
        except Exception as error:  # Of bytes that torch.save has not written, torch raises any.
            raise self._unlike(item, entry, f"{type(error).__name__}: {error}") from error

    def value(self, entry: ManifestEntry) -> Any:
        """The tensor in its shape, or the object."""
        if entry.dtype is None:
            return self.object(entry)
        return self.tensor(entry).view(entry.shape)

    def _piece(self, item: Item, entry: ManifestEntry) -> torch.Tensor:
        """(item.stop - item.start,) of the entry's dtype."""
        # Neighbouring ranges often share a piece, so the last one is kept.
        if self._last is None or self._last[0] != item:
            data = self._bytes(item)  # Outside: an error of the storage says nothing of the bytes.
            try:
                loaded = load_tensor(data)
            except Exception as error:  # Of bytes that torch.save has not written, any.
                raise self._unlike(item, entry, f"{type(error).__name__}: {error}") from error
            found = f"{loaded.numel()} elements of {dtype_name(loaded.dtype)}"
            if found != f"{item.stop - item.start} elements of {entry.dtype}":
                raise self._unlike(item, entry, f"they are {found}")
            self._last = (item, loaded.reshape(-1))
        return self._last[1]

    def _archive(self, item: Item, entry: ManifestEntry) -> bytes:
        data = self._bytes(item)
        try:
            check_archive(data)
        except ValueError as error:
            raise self._unlike(item, entry, str(error)) from error
        return data

    def _unlike(self, item: Item, entry: ManifestEntry, why: str) -> CheckpointCorrupted:
        what = f"elements {item.start} to {item.stop} of " if entry.dtype is not None else ""
        return CheckpointCorrupted(
            self.storage.path_of(within(self.folder, item.file)),
            f"bytes {item.at} to {item.at + item.length} are not {what}{name_of(entry.path)}, "
            f"{entry} ({why})",
        )

    def _bytes(self, item: Item) -> bytes:
        name = within(self.folder, item.file)
        try:
            data = self.storage.read(name, item.at, item.length)
        except FileNotFoundError:
            raise CheckpointCorrupted(self.storage.path_of(name), "it is missing") from None
        except (MemoryError, OverflowError) as error:
            # A file with holes has any size. What fits may be read a moment later, or elsewhere.
            if item.length <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise
            raise CheckpointCorrupted(
                self.storage.path_of(name), f"{item.length} bytes are too many for a piece"
            ) from error
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
