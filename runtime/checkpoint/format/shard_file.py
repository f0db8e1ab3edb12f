"""Writes one rank's data file: pieces in torch.save's format, in sequence, with checksums."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import IO, Any

import torch

from .boxes import items_of
from .manifest import Item, ManifestEntry, RankManifest, dtype_name, within
from .pieces import Path, TensorRange
from .storage import Storage


class _Checked:
    """Counts the bytes written to a file, and their crc32 since the caller last set it to 0."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.position = 0
        self.crc32 = 0
        self.failure: Exception | None = None  # None: writing has not failed

    def write(self, data: Any) -> int:
        # crc32 finds the faults of disks and copies; 4 GB/s here, where sha256 has 1.7.
        self.crc32 = zlib.crc32(data, self.crc32)
        self.position += len(data)
        try:
            self._file.write(data)
        except Exception as error:  # A backend of fsspec has errors of its own.
            self.failure = error  # torch.save replaces it by "unexpected pos 4096 vs 0".
            raise
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def write_part(
    storage: Storage,
    folder: str,
    rank: int,
    step: int,
    ranges: list[TensorRange],
    leaves: dict[Path, bytes],
    places: Mapping[Path, int] = {},
) -> RankManifest:
    """Write all to one file. ranges: each in one buffer, which must not change meanwhile. places:
    as in Contents."""
    file_name = f"rank-{rank}.distcp"
    entries: list[ManifestEntry] = []
    with storage.create(within(folder, file_name)) as opened:
        file = _Checked(opened)

        def item(data: torch.Tensor | bytes, start: int = 0, stop: int = 0) -> Item:
            at, file.crc32 = file.position, 0
            if isinstance(data, bytes):
                file.write(data)
            else:
                try:
                    torch.save(data, file)  # type: ignore[arg-type]
                except RuntimeError:
                    if file.failure is None:
                        raise
                    raise file.failure from None
            return Item(file_name, at, file.position - at, file.crc32, start, stop)

        for ranged in ranges:
            entry = ManifestEntry(ranged.path, dtype_name(ranged.dtype), ranged.shape)
            (buffer,) = ranged.parts
            pieces = items_of(ranged.shape, ranged.start, ranged.stop, ranged.dtype.itemsize)
            for start, stop, (_, lengths) in pieces:
                piece = buffer[start - ranged.start : stop - ranged.start]
                if piece.nbytes != buffer.untyped_storage().nbytes():
                    piece = piece.clone()  # torch.save writes the whole storage of a view.
                entry.items.append(item(piece.view(lengths), start, stop))
            entries.append(entry)
        for path, data in leaves.items():
            entries.append(ManifestEntry(path, None, (), [item(data)]))
        size = file.position
    of_entries = [places.get(entry.path, 0) for entry in entries]
    return RankManifest(rank, step, entries, {file_name: size}, of_entries)
