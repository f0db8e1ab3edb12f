"""The manifest: lists the pieces of a checkpoint with their checksums; written last.

A checkpoint without a whole manifest does not exist. The file `.metadata` beside it holds the same
in the format of torch.distributed.checkpoint, which can read the data files. Chorusline reads only
the manifest, which is plain JSON and has the checksums.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import pickle
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from .boxes import boxes_of
from .errors import CheckpointCorrupted
from .pieces import Path
from .plain_values import MOST_DEEP
from .storage import Storage

MANIFEST = "chorusline.json"
METADATA = ".metadata"
_FORMAT = 1

MAX_MANIFEST_BYTES = 1 << 30
"""A checkpoint of 10 TB has a manifest of a third of this."""

MAX_OVERHEAD_BYTES = 1 << 16
"""The most that torch.save adds to the elements of one tensor; it is between 1 and 2 KB."""

_DATA_FILE = re.compile(r"rank-\d{1,10}\.distcp", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can have what no file and no terminal takes.
_MAX_DIMENSIONS = 64
_TOO_MANY = 1 << 63
_END_OF_TIME = 253_402_300_800  # the year 10000
_NAMED = 3


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
class ManifestEntry:
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
class RankManifest:
    """The entries and files that one rank has written. files: their sizes in bytes. places: of the
    entries, as in Contents."""

    rank: int
    step: int
    entries: list[ManifestEntry]
    files: dict[str, int]
    places: list[int]


@dataclass(slots=True)
class Manifest:
    """kinds: the kind of each registered object, by name.
    files: the size of each file, in bytes.
    progress: of each rank, small and opaque.
    metadata_sha256: of `.metadata`.
    tied: by name of each registered module, which of its tensors are another one of it: the name
        of each such tensor, and the name of the one that it is.
    optimizers: by name of a registered optimizer, its class and those that it extends (classes_of
        in contents.py).
    """

    step: int
    world_size: int
    time: float
    kinds: dict[str, str]
    files: dict[str, int]
    entries: list[ManifestEntry]
    progress: list[Any]
    metadata_sha256: str = ""
    torch: str = torch.__version__
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    optimizers: dict[str, list[str]] = field(default_factory=dict)

    def below(self, *path: str | int) -> list[ManifestEntry]:
        return [entry for entry in self.entries if entry.path[: len(path)] == path]

    def items(self) -> list[Item]:
        return [item for entry in self.entries for item in entry.items]


def merged(parts: Sequence[RankManifest]) -> list[ManifestEntry]:
    """The entries of all ranks in one list, with items in order; those of one object in the order
    of its state, however many ranks there are. Raises ValueError if ranks disagree on a tensor, or
    have not written each element once."""
    entries: dict[Path, ManifestEntry] = {}
    places: dict[Path, int] = {}
    for part in parts:
        for place, theirs in zip(part.places, part.entries, strict=True):
            places.setdefault(theirs.path, place)
            ours = entries.setdefault(
                theirs.path, ManifestEntry(theirs.path, theirs.dtype, tuple(theirs.shape))
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
            # Without a dtype it is a Python value, which is in one piece.
            if entry.dtype is not None and item.start != at:
                raise ValueError(
                    f"{name_of(entry.path)}: elements {at} to {item.start} of {entry.numel} were "
                    "not written by exactly one rank; all ranks must register the same objects"
                )
            at = item.stop
        if entry.dtype is not None and at != entry.numel:
            raise ValueError(
                f"{name_of(entry.path)}: elements {at} to {entry.numel} were not written by any "
                "rank; all ranks must register the same objects"
            )
    # A sharded optimizer's have no place: their order is that of their names.
    return sorted(
        entries.values(),
        key=lambda entry: (entry.path[0], places[entry.path], [str(key) for key in entry.path]),
    )


def name_of(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def write_manifest(storage: Storage, folder: str, manifest: Manifest) -> None:
    """Write `.metadata` and then the manifest, with which the checkpoint exists. Raises ValueError
    for a manifest that `read_manifest` would refuse."""
    metadata = _metadata_for_torch(manifest)
    manifest.metadata_sha256 = hashlib.sha256(metadata).hexdigest()
    plain = asdict(manifest)
    text = json.dumps({"format": _FORMAT, "sha256": _digest(plain), "manifest": plain}).encode()
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(
            f"the manifest would have {len(text)} bytes, and is read up to {MAX_MANIFEST_BYTES}"
        )
    _validated(json.loads(text)["manifest"])  # What could not be read later is not written.
    storage.write(within(folder, METADATA), metadata)
    storage.write(within(folder, MANIFEST), text)


def is_whole(storage: Storage, folder: str) -> bool:
    """Whether the manifest is there, which is written last."""
    try:
        return storage.size(within(folder, MANIFEST)) > 0
    except Exception:
        return False


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Raises FileNotFoundError if there is no manifest, CheckpointCorrupted if it is damaged, or
    is one that no save has written."""
    name = within(folder, MANIFEST)
    path = storage.path_of(name)
    if (size := storage.size(name)) > MAX_MANIFEST_BYTES:
        raise CheckpointCorrupted(path, f"it has {size} bytes, too many for a manifest")
    data = storage.read(name)
    try:
        saved = json.loads(data)
        plain, digest, version = saved["manifest"], saved["sha256"], saved["format"]
        found = _digest(plain)
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise CheckpointCorrupted(path, f"its {len(data)} bytes are not a manifest") from error
    # Before the checksum: another version may compute it in another way.
    if version != _FORMAT:
        raise CheckpointCorrupted(
            path, f"it has format {version!r}, and this version of chorusline reads {_FORMAT}"
        )
    if found != digest:
        raise CheckpointCorrupted(path, "its content does not match its checksum")
    try:
        return _validated(plain)
    except ValueError as error:
        raise CheckpointCorrupted(path, f"it is not a manifest ({error})") from error


# -- What a save can have written ------------------------------------------------------------------
#
# The checksum of a manifest finds faults of disks and copies; anybody who can write to the place
# can compute it. So every field is checked here, and what reads a Manifest relies on it: the types
# are those of the dataclasses, each element of a tensor lies in exactly one item, items do not
# overlap, and no piece is larger than what it holds.


def _validated(plain: Any) -> Manifest:
    """The manifest in `plain`, of parsed JSON. Raises ValueError for what no save writes."""
    if isinstance(plain, dict):
        plain.setdefault("optimizers", {})  # Earlier saves have none.
    given = _fields_of(plain, Manifest, "the manifest")
    files = _files(given["files"])
    world_size = _count(given["world_size"], "world_size", 1)
    if world_size > len(files):  # Each rank writes a file.
        raise ValueError(f"{world_size} ranks cannot have written {len(files)} files")
    manifest = Manifest(
        step=_count(given["step"], "step"),
        world_size=world_size,
        time=_time(given["time"]),
        kinds={name: _text(kind, "a kind") for name, kind in _mapping(given["kinds"], "kinds")},
        files=files,
        entries=[_entry(one, files) for one in _list(given["entries"], "entries")],
        progress=_list(given["progress"], "progress"),
        metadata_sha256=_text(given["metadata_sha256"], "metadata_sha256"),
        torch=_text(given["torch"], "torch"),
        tied={
            name: {one: _text(other, "a name") for one, other in _mapping(pairs, "tied")}
            for name, pairs in _mapping(given["tied"], "tied")
        },
        optimizers={
            name: [_text(one, "a class") for one in _list(classes, f"classes of {name}")]
            for name, classes in _mapping(given["optimizers"], "optimizers")
        },
    )
    _check_paths(manifest.entries)
    _check_overlaps(manifest.items())
    return manifest


def _fields_of(value: Any, kind: type, what: str) -> dict[str, Any]:
    """A dictionary with the fields of a dataclass, and no other one."""
    given, known = dict(_mapping(value, what)), [one.name for one in fields(kind)]
    # A field under another name is both missing and unknown: what is missing says more.
    if lacking := [name for name in known if name not in given]:
        raise ValueError(f"{what} lacks {', '.join(lacking)}")
    if unknown := [repr(name) for name in given if name not in known]:
        raise ValueError(f"{what} has {', '.join(unknown[:_NAMED])}, which a save does not write")
    return given


def _entry(value: Any, files: dict[str, int]) -> ManifestEntry:
    given = _fields_of(value, ManifestEntry, "an entry")
    path = tuple(_list(given["path"], "a path"))
    if not path:
        raise ValueError("an entry has an empty path")
    if len(path) > MOST_DEEP + 1:  # The first key is the object's name.
        raise ValueError(f"an entry has a path of {len(path)} keys")
    for key in path:
        if type(key) is not int:
            _text(key, f"a key in {_shown(path)}")
    name = name_of(path)
    shape = tuple(_count(length, f"a length of {name}") for length in _list(given["shape"], name))
    dtype = given["dtype"]
    entry = ManifestEntry(
        path,
        None if dtype is None else _text(dtype, f"the dtype of {name}"),
        shape,
        [_item(one, files, name) for one in _list(given["items"], f"items of {name}")],
    )
    # A pickled value: one item, which says nothing of elements.
    if entry.dtype is None:
        if len(entry.items) != 1 or shape or (entry.items[0].start, entry.items[0].stop) != (0, 0):
            raise ValueError(f"{name} is neither a tensor nor an object of one item")
        return entry
    itemsize = dtype_of(entry.dtype).itemsize
    if math.prod(
        length for length in shape[:_MAX_DIMENSIONS] if length
    ) * itemsize >= _TOO_MANY or (len(shape) > _MAX_DIMENSIONS):
        raise ValueError(f"{name} has a shape that no tensor has")
    at, numel = 0, math.prod(shape)
    for item in entry.items:
        if item.start != at or item.stop <= at:
            raise ValueError(
                f"elements {at} to {numel} of {name} are not in one item after another"
            )
        # The elements, and what torch.save writes around them.
        if not 0 <= item.length - (item.stop - at) * itemsize <= MAX_OVERHEAD_BYTES:
            raise ValueError(
                f"{item.length} bytes are not elements {at} to {item.stop} of {name}, {entry}"
            )
        at = item.stop
    if at != numel:
        raise ValueError(f"elements {at} to {numel} of {name} are in no item")
    return entry


def _item(value: Any, files: dict[str, int], name: str) -> Item:
    given = _fields_of(value, Item, f"an item of {name}")
    file = _text(given.pop("file"), f"a file of {name}")
    item = Item(_file_name(file), **{key: _count(one, key) for key, one in given.items()})
    if item.file not in files:
        raise ValueError(f"{name} lies in {file!r}, which is not among its files")
    if item.at + item.length > files[item.file]:
        raise ValueError(f"{name} lies after the end of {file!r}")
    if item.crc32 >= 1 << 32:
        raise ValueError(f"{item.crc32} is not a crc32")
    return item


def _check_paths(entries: Sequence[ManifestEntry]) -> None:
    """A path leads to one entry, and no path leads through another one."""
    # A text is not compared with a number.
    ordered = sorted([[(type(key) is int, key) for key in entry.path] for entry in entries])
    for one, other in itertools.pairwise(ordered):
        if other[: len(one)] == one:
            raise ValueError(f"{name_of(key for _, key in one)} is in it more than once")


def _check_overlaps(items: Sequence[Item]) -> None:
    for one, other in itertools.pairwise(sorted(items, key=lambda item: (item.file, item.at))):
        if one.file == other.file and one.at + one.length > other.at:
            raise ValueError(f"two items overlap in {one.file!r}, at {other.at}")


def _files(value: Any) -> dict[str, int]:
    return {
        _file_name(name): _count(size, f"the size of {name!r}")
        for name, size in _mapping(value, "files")
    }


def _file_name(name: str) -> str:
    if not _DATA_FILE.fullmatch(name):
        raise ValueError(f"{_shown(name)} is not a data file of a checkpoint (rank-0.distcp)")
    return name


def _count(value: Any, what: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _TOO_MANY:
        raise ValueError(f"{what} is {_shown(value)}, and not a whole number of at least {least}")
    return value


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < _END_OF_TIME:
        raise ValueError(f"time is {_shown(value)}, and not a time in seconds since 1970")
    return float(value)


def _text(value: Any, what: str) -> str:
    if type(value) is not str or _SURROGATE.search(value):
        raise ValueError(f"{what} is {_shown(value)}, and not a string")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{what} is {_shown(value)}, and not a list")
    return value


def _mapping(value: Any, what: str) -> Iterable[tuple[str, Any]]:
    """The items of a dictionary of JSON."""
    if type(value) is not dict:
        raise ValueError(f"{what} is {_shown(value)}, and not a dictionary")
    return [(_text(key, f"a key of {what}"), one) for key, one in value.items()]


def _shown(value: Any) -> str:
    return reprlib.repr(value)


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
        path = tuple(map(str, entry.path))  # torch reads a number as an index of a list.
        # A name with dots may be that of another path, too: of a module and its part, for example.
        while (name := name_of(path)) in planned:
            path = (*path[:-1], path[-1] + "'")
        planned[name] = path
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
    """Raises ValueError if no tensor of a checkpoint has this dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) != name or not can_hold(dtype):
        raise ValueError(f"{_shown(name)} is not a dtype of a tensor in a checkpoint")
    return dtype


def can_hold(dtype: torch.dtype) -> bool:
    """A quantized tensor is more than its elements, and torch copies no numbers of less than a
    byte."""
    name = dtype_name(dtype)
    return not name.startswith(("q", "bits")) and name.lstrip("uint") not in _LESS_THAN_A_BYTE


_LESS_THAN_A_BYTE = {*"1234567"}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
