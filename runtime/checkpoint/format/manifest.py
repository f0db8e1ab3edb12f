"""The manifest: lists the pieces of a checkpoint with their checksums; written last.

A checkpoint without a whole manifest does not exist. The file `.metadata` beside it holds the same
in the format of torch.distributed.checkpoint, which can read the data files. Chorusline reads only
the manifest, which is plain JSON and has the checksums.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from .boxes import boxes_of
from .errors import CheckpointCorrupted
from .pieces import Path
from .storage import Storage

MANIFEST = "chorusline.json"
METADATA = ".metadata"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes [at, at + length) of a file, which torch.load reads, and their crc32.

    start, stop: the range of the flattened tensor in these bytes; 0, 0 for an object.
    """

    file: str
    at: int
    length: int
    crc32: int
    start: int = 0
    stop: int = 0


@dataclass(slots=True)
class Entry:
    """A tensor; or, if dtype is None, an object of one item."""

    path: Path
    dtype: str | None
    shape: tuple[int, ...]
    items: list[Item] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}" if self.dtype else "an object"


@dataclass(slots=True)
class Part:
    """The entries and files that one rank has written. files: their sizes in bytes."""

    rank: int
    step: int
    entries: list[Entry]
    files: dict[str, int]


@dataclass(slots=True)
class Manifest:
    """kinds: the kind of each registered object, by name.
    files: the size of each file, in bytes.
    progress: of each rank, small and opaque.
    metadata_sha256: of `.metadata`.
    tied: by name of a registered module, which of its tensors are another one of it: the name of
        each such tensor, and the name of the one that it is.
    """

    step: int
    world_size: int
    time: float
    kinds: dict[str, str]
    files: dict[str, int]
    entries: list[Entry]
    progress: list[Any]
    metadata_sha256: str = ""
    torch: str = torch.__version__
    tied: dict[str, dict[str, str]] = field(default_factory=dict)

    def below(self, *path: str | int) -> list[Entry]:
        return [entry for entry in self.entries if entry.path[: len(path)] == path]

    def find(self, path: Path) -> Entry | None:
        return next((entry for entry in self.entries if entry.path == path), None)

    def items(self) -> list[Item]:
        return [item for entry in self.entries for item in entry.items]


def merged(parts: Sequence[Part]) -> list[Entry]:
    """The entries of all ranks in one list, with items in order. Raises ValueError if ranks
    disagree on a tensor, or have not written each element once."""
    entries: dict[Path, Entry] = {}
    for part in parts:
        for theirs in part.entries:
            ours = entries.setdefault(
                theirs.path, Entry(theirs.path, theirs.dtype, tuple(theirs.shape))
            )
            if (ours.dtype, ours.shape) != (theirs.dtype, tuple(theirs.shape)):
                raise ValueError(
                    f"{name_of(theirs.path)} is {theirs} on rank {part.rank}, but {ours} on "
                    "another rank; all ranks must register the same objects"
                )
            ours.items += theirs.items
    for entry in entries.values():
        entry.items.sort(key=lambda item: item.start)
        at = 0
        for item in entry.items:
            if entry.dtype is not None and item.start != at:
                raise ValueError(
                    f"{name_of(entry.path)}: elements {at} to {item.start} of {entry.numel} were "
                    "written by no rank, or by two; all ranks must register the same objects"
                )
            at = item.stop
        if entry.dtype is not None and at != entry.numel:
            raise ValueError(
                f"{name_of(entry.path)}: elements {at} to {entry.numel} were written by no rank; "
                "all ranks must register the same objects"
            )
    return sorted(entries.values(), key=lambda entry: [str(key) for key in entry.path])


def name_of(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def write_manifest(storage: Storage, folder: str, manifest: Manifest) -> None:
    """Write `.metadata` and then the manifest, with which the checkpoint exists."""
    metadata = _metadata_for_torch(manifest)
    manifest.metadata_sha256 = hashlib.sha256(metadata).hexdigest()
    storage.write(within(folder, METADATA), metadata)
    plain = asdict(manifest)
    text = json.dumps({"format": _FORMAT, "sha256": _digest(plain), "manifest": plain})
    storage.write(within(folder, MANIFEST), text.encode())


def is_whole(storage: Storage, folder: str) -> bool:
    """Whether the manifest is there, which is written last."""
    try:
        return storage.size(within(folder, MANIFEST)) > 0
    except OSError:
        return False


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Raises FileNotFoundError if there is no manifest, CheckpointCorrupted if it is damaged."""
    name = within(folder, MANIFEST)
    data = storage.read(name)
    try:
        saved = json.loads(data)
        plain, digest, version = saved["manifest"], saved["sha256"], saved["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupted(
            storage.path_of(name), f"its {len(data)} bytes are not a manifest"
        ) from error
    if version != _FORMAT:
        raise CheckpointCorrupted(
            storage.path_of(name),
            f"it has format {version}, and this version of chorusline reads {_FORMAT}",
        )
    if _digest(plain) != digest:
        raise CheckpointCorrupted(storage.path_of(name), "its text does not match its checksum")
    try:
        plain["entries"] = [
            Entry(
                tuple(entry["path"]),
                entry["dtype"],
                tuple(entry["shape"]),
                [Item(**item) for item in entry["items"]],
            )
            for entry in plain["entries"]
        ]
        manifest = Manifest(**plain)
        _check_entries(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise CheckpointCorrupted(
            storage.path_of(name), f"it is not a manifest ({error})"
        ) from error
    return manifest


def _check_entries(manifest: Manifest) -> None:
    """Raise ValueError for what no save writes. The checksum of a manifest finds faults of disks;
    anybody can compute it for a manifest that they have written."""
    for file in (*manifest.files, *(item.file for item in manifest.items())):
        if "/" in file or "\\" in file or file in ("", ".", ".."):
            raise ValueError(f"{file!r} is outside of its folder")
    for entry in manifest.entries:
        if entry.dtype is not None:
            dtype_of(entry.dtype)
        if any(item.at < 0 or item.length < 0 for item in entry.items):
            raise ValueError(f"{name_of(entry.path)} lies before the beginning of a file")


def within(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _digest(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _metadata_for_torch(manifest: Manifest) -> bytes:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    planned: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for entry in manifest.entries:
        name = name_of(entry.path)
        planned[name] = tuple(map(str, entry.path))  # torch reads a number as an index of a list.
        if entry.dtype is None:
            described[name] = BytesStorageMetadata()
            item = entry.items[0]
            stored[MetadataIndex(name)] = _StorageInfo(item.file, item.at, item.length)
            continue
        chunks = []
        for number, item in enumerate(entry.items):
            ((_, _, (offsets, lengths)),) = boxes_of(entry.shape, item.start, item.stop)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)))
            stored[MetadataIndex(name, offsets, number)] = _StorageInfo(
                item.file, item.at, item.length
            )
        properties = TensorProperties(dtype=dtype_of(entry.dtype))
        described[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    has_version = "version" in {field.name for field in fields(Metadata)}  # torch 2.8 has none.
    return pickle.dumps(
        Metadata(
            state_dict_metadata=described,
            planner_data=planned,
            storage_data=stored,
            storage_meta=StorageMeta(),
            **({"version": "1.0.0"} if has_version else {}),
        )
    )


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
