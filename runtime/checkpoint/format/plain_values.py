"""Which objects a checkpoint may hold, if loading them is to run no code that the file names.

An object is stored as torch.save stores it, in a pickle. `torch.load(weights_only=True)` makes
tensors and plain values of it: numbers, strings, dtypes, and containers of them. Arrays and
scalars of numpy are plain values here, too, because the states of generators, schedules and metrics
often contain them.

The file that torch.save makes is a zip archive without compression. Loaders that decompress would
make gigabytes of kilobytes, so an archive of another kind is refused before torch sees it.

The checks read the archive with zipfile, and torch reads it again, with a reader of its own, miniz.
The two differ in where they look for the directory, in upper and lower case, and in records marked
as folders. An archive that they may read differently is refused, too: torch loads what was checked.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
import zipfile
from collections import deque
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import numpy
import torch

try:
    from numpy._core import multiarray  # from numpy 2 on
except ImportError:
    from numpy.core import multiarray  # type: ignore[no-redef]


class _Array:
    """Stands for numpy.ndarray in a pickle, which names it only for `_reconstruct`: called by
    itself, it would make an array of any size."""


def _reconstruct(kind: object, shape: object, code: object) -> Any:
    """As numpy's, whose pickles make an empty array and then set its state."""
    if kind is not _Array or shape != (0,):
        raise pickle.UnpicklingError(f"an array is not pickled as {kind!r} of the shape {shape!r}")
    return multiarray._reconstruct(numpy.ndarray, (0,), b"b")


def _of_numpy() -> dict[str, Any]:
    """What pickles of numpy arrays and scalars name. Both versions' names of a function are here,
    since the numpy that reads may not be the numpy that wrote."""
    # The array that `_reconstruct` has made takes its state only if its own type is allowed, too;
    # no name in a pickle leads to that entry.
    found: dict[str, Any] = {
        "numpy.ndarray": _Array,
        "numpy.dtype": numpy.dtype,
        "of what _reconstruct has made": numpy.ndarray,
    }
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        found[f"{module}.scalar"] = multiarray.scalar
        found[f"{module}._reconstruct"] = _reconstruct
    # An empty array, as any empty bytes, is pickled with bytes(); `_check_sizes` allows no more.
    found["builtins.bytes"] = bytes
    for name, kind in vars(numpy.dtypes).items():
        if name.endswith("DType") and name != "ObjectDType":
            found[f"numpy.dtypes.{name}"] = kind
    return found


_OF_NUMPY = tuple((kind, name) for name, kind in _of_numpy().items())
"""Each with its name: so it is another entry of torch's list than what the user has allowed, and
does not take that along when `safe_globals` ends."""


_OF_A_TENSOR = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_tensor_v[23]|torch \w+|"
    r"torch\.storage (Untyped|Typed)Storage"
)
"""What the pickle of a tensor names. Each is a class, a function or a dtype of torch."""

_RECORDS_OF_A_TENSOR = 16
"""torch.save writes seven: the pickle, the elements, and notes of a few bytes."""


def check_archive(data: bytes, max_records: int | None = None) -> zipfile.ZipFile:
    """Raise ValueError if `data` is no archive as torch.save writes it: what is in it takes no more
    memory than `data` itself."""
    # torch reads whatever else begins in another way, an older format without any limit.
    if not data.startswith(b"PK\x03\x04"):
        raise ValueError("it is not an archive of torch.save")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except Exception as error:  # zipfile raises more than BadZipFile.
        raise ValueError(f"it is not an archive of torch.save: {error}") from error
    records = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in records):
        raise ValueError("it is a compressed archive, and torch.save does not compress")
    if sum(one.file_size for one in records) > len(data):
        raise ValueError(f"its {len(data)} bytes claim to be more")
    # torch does not distinguish upper and lower case.
    if len({one.filename.lower() for one in records}) < len(records):
        raise ValueError("it has two records of one name")
    if not _is_at_the_end(archive, data) or any(map(_is_ambiguous, records)):
        raise ValueError("its directory is not as torch.save writes it")
    if max_records is not None and len(records) > max_records:
        raise ValueError(f"it has {len(records)} records, too many for a tensor")
    return archive


_END = struct.Struct("<4s28xQ8xQ4s4xQ4x4s6xH4xIH")
"""The last bytes of an archive: the end of the directory in long numbers, a locator of these, and
the end in short numbers. Of both ends the signature, the number of records, and where the directory
starts; of the locator the signature, and where the long numbers are; the bytes of a comment."""


def _is_at_the_end(archive: zipfile.ZipFile, data: bytes) -> bool:
    """Whether the directory that zipfile has read is the one that torch reads.

    zipfile takes the bytes before the end, and torch those where the end says that they are. Both
    take the end from the long numbers if there is a locator, which only torch follows. A comment
    could hold another end.
    """
    last = data[-_END.size :].rjust(_END.size)
    long, long_count, long_start, locator, long_at, short, count, start, comment = _END.unpack(last)
    if locator == b"PK\6\7":
        if long != b"PK\6\6" or long_at != len(data) - _END.size:
            return False
        count, start = long_count, long_start
    found = (len(archive.infolist()), archive.start_dir)
    return short == b"PK\5\6" and comment == 0 and (count, start) == found


def _is_ambiguous(record: zipfile.ZipInfo) -> bool:
    """Whether torch may read another record than zipfile: of other bytes under that name."""
    return (
        # zipfile decodes such names, and cuts them at a zero; torch compares their bytes.
        not record.orig_filename.isascii()
        or record.filename != record.orig_filename
        # torch returns memory as it is, without reading the record.
        or record.is_dir()
        or bool(record.external_attr & _FOLDER)
        or record.compress_size != record.file_size
        # Of several fields with long numbers, torch takes the first, and zipfile may take another.
        or len(record.extra) not in (0, 4 + int.from_bytes(record.extra[2:4], "little"))
    )


_FOLDER = 0x10  # the attribute of a folder, as DOS has it


def load_tensor(data: bytes) -> torch.Tensor:
    """The tensor in `data`, on the CPU. Raises any error if there is none."""
    archive = check_archive(data, _RECORDS_OF_A_TENSOR)
    _check_storages(archive)
    for opcode, named in _values_in(archive):
        if opcode == "GLOBAL" and not _OF_A_TENSOR.fullmatch(str(named)):
            raise ValueError(f"it names {named!r}, and a tensor does not")
    # Only now: by what the pickle names it cannot make anything but a tensor.
    loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if type(loaded) is not torch.Tensor or loaded.layout != torch.strided:
        raise ValueError(f"it is {type(loaded).__name__}, and not a tensor")
    return loaded


def _values_in(archive: zipfile.ZipFile) -> Iterator[tuple[str, Any]]:
    """What the pickle in an archive makes, in order: the opcode and its argument. A value that is
    named again comes again as it was."""
    known, last = {}, ("", None)
    for opcode, argument, _ in pickletools.genops(archive.read(f"{_root(archive)}/data.pkl")):
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            known[argument] = last
            continue
        last = (opcode.name, argument)
        if opcode.name in ("BINGET", "LONG_BINGET"):
            last = known.get(argument, ("", None))
        yield last


def _root(archive: zipfile.ZipFile) -> str:
    """The folder in which torch looks for all records: that of the first one."""
    return archive.namelist()[0].partition("/")[0]


def _check_storages(archive: zipfile.ZipFile) -> None:
    """Raise ValueError if the storage of a tensor is not exactly a record of the archive. torch
    before 2.10 does not compare the two, and takes what lies in memory after a short record."""
    root = _root(archive)
    before: deque[tuple[str, Any]] = deque(maxlen=7)
    for value in _values_in(archive):
        if value[0] == "BINPERSID":
            # As torch.save writes it: ("storage", type, name of the record, device, elements).
            names = [name for name, _ in before]
            _, _, kind, key, _, numel, _ = [argument for _, argument in before] or [None] * 7
            if names[:3] != ["MARK", "BINUNICODE", "GLOBAL"] or names[-1:] != ["TUPLE"]:
                raise ValueError("it has a storage that torch.save has not written")
            of = getattr(torch, kind.removeprefix("torch "), None)
            itemsize = of._dtype.itemsize if of else 1  # torch.storage.UntypedStorage
            record = archive.NameToInfo.get(f"{root}/data/{key}")
            if type(numel) is not int or record is None or record.file_size != numel * itemsize:
                raise ValueError(f"it has a storage of {numel} elements that is not its record")
        before.append(value)


def _check_sizes(archive: zipfile.ZipFile) -> None:
    """Raise ValueError if the pickle of an object calls `bytearray`, `bytes` or `_codecs.encode`
    otherwise than pickle does: with a number the first two make gigabytes, with its own result the
    last one."""
    wanted = frozenset[str]()
    for opcode, argument in _values_in(archive):
        last = str(argument) if opcode == "GLOBAL" else opcode
        if wanted and last not in wanted:
            raise ValueError(f"{last} turns it into bytes, and a pickle of plain values does not")
        wanted = _ARGUMENTS.get(last, frozenset())


_ARGUMENTS = {
    **dict.fromkeys(
        ("builtins bytearray", "__builtin__ bytearray"),
        frozenset({"_codecs encode", "EMPTY_TUPLE"}),
    ),
    **dict.fromkeys(("builtins bytes", "__builtin__ bytes"), frozenset({"EMPTY_TUPLE"})),
    "_codecs encode": frozenset({"BINUNICODE", "SHORT_BINUNICODE"}),
}
"""By the name of a function, what a pickle has next: what its first argument begins with."""


MOST_DEEP = 200
"""Levels of containers in a state. Far deeper ones could be read, and then neither copied nor
pickled again: that calls itself for each level, and Python allows about a thousand calls."""


def is_deeper(value: Any, levels: int) -> bool:
    """Whether more than so many containers lie in each other, in the order in which pickle enters
    them: each once."""
    entered, inside = set[int](), [iter((value,))]
    while inside:
        for one in inside[-1]:
            if isinstance(one, dict | list | tuple | set | frozenset) and id(one) not in entered:
                if len(inside) > levels:
                    return True
                entered.add(id(one))
                inside.append(chain(one, one.values()) if isinstance(one, dict) else iter(one))
                break
        else:
            inside.pop()
    return False


def load_plain(data: bytes) -> Any:
    """The object in `data`. Raises pickle.UnpicklingError if it is more than plain values, and any
    error if it is nothing that torch.save writes."""
    archive = check_archive(data)
    _check_storages(archive)
    _check_sizes(archive)
    with (
        torch.serialization.safe_globals(list(_OF_NUMPY)),
        # torch reads and writes wherever the indices of a sparse tensor say.
        torch.sparse.check_sparse_tensor_invariants(),
    ):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def beyond_plain(data: bytes) -> list[str]:
    """The classes and functions in `data` that `load_plain` refuses, by their full names."""
    try:
        values = [value for value in _values_in(check_archive(data)) if value[0] != "MARK"]
        # torch reads none of these, and no names either where it finds one.
        if any(opcode == "LONG4" for opcode, _ in values):
            return ["an int of more than 2,039 bits (as a text, hex(number), it is a plain value)"]
        named = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except (pickle.UnpicklingError, ValueError):
        return []
    found = set(named) - {name for _, name in _OF_NUMPY}
    # The type of an array of Python objects, which no name of a class stands for.
    if any(
        before == ("GLOBAL", "numpy dtype") and str(value[1]).startswith("O")
        for before, value in pairwise(values)
    ):
        found.add("numpy.dtypes.ObjectDType")
    return sorted(found)
