"""What somebody can put into a place of checkpoints who can write there, checksums and all: it is
refused by one kind of error, hides no other checkpoint, and takes no more memory than it has bytes.
"""

from __future__ import annotations

import codecs
import copy
import functools
import hashlib
import io
import json
import os
import re
import resource
import shutil
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st

import chorusline as cl
from chorusline.runtime.checkpoint.contents import PER_RANK, STATE, pickled, whole_of
from chorusline.runtime.checkpoint.export import described, plain_states
from chorusline.runtime.checkpoint.format.catalog import folder_name, listing, newest_whole
from chorusline.runtime.checkpoint.format.manifest import (
    Manifest,
    merged,
    read_manifest,
    write_manifest,
)
from chorusline.runtime.checkpoint.format.plain_values import MOST_DEEP, is_deeper, load_plain
from chorusline.runtime.checkpoint.format.reader import CheckpointReader
from chorusline.runtime.checkpoint.format.shard_file import write_part
from chorusline.runtime.checkpoint.format.storage import Folder
from tests.references.checkpoint_places import resume_and_listen, write_two
from tests.references.checkpoint_runs import Parts, in_run

WEIGHT = torch.arange(8, dtype=torch.float32).view(2, 4)


def _write(place: Path, step: int = 1) -> Path:
    """A checkpoint of a tensor, a state of two leaves, and a state of one rank."""
    storage, folder = Folder(place), folder_name(step, "0123abcd", 0)
    ranges = [whole_of(("model", "weight"), WEIGHT), whole_of(("own", 0, "buffer"), WEIGHT[0])]
    leaves = {("state", "count"): pickled(5), ("state", "name"): pickled("x")}
    part = write_part(storage, folder, 0, step, ranges, leaves)
    kinds = {"model": STATE, "state": STATE, "own": PER_RANK}
    progress = [{"boundaries": 1}]
    manifest = Manifest(step, 1, float(step), kinds, part.files, merged([part]), progress)
    write_manifest(storage, folder, manifest)
    return place / folder


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, and make its checksum that of the new text."""
    plain = json.loads((folder / "chorusline.json").read_bytes())["manifest"]
    change(plain)
    _put(folder, plain)


def _put(folder: Path, plain: Any) -> None:
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    text = json.dumps({"format": 1, "sha256": digest, "manifest": plain})
    (folder / "chorusline.json").write_text(text)


def _entry(manifest: dict[str, Any], name: str = "model") -> dict[str, Any]:
    return next(entry for entry in manifest["entries"] if entry["path"][0] == name)


def _item(manifest: dict[str, Any], name: str = "model") -> dict[str, Any]:
    return _entry(manifest, name)["items"][0]


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "'../secret' is not a data file": lambda m: _item(m).update(file="../secret"),
    "'/etc/hosts' is not a data file": lambda m: m["files"].update({"/etc/hosts": 1}),
    r"'rank-0.distcp\x00' is not a data file": lambda m: _item(m).update(file="rank-0.distcp\0"),
    "'rank-1.distcp', which is not among": lambda m: _item(m).update(file="rank-1.distcp"),
    "at is -1, and not a whole number": lambda m: _item(m).update(at=-1),
    "at is 0.5": lambda m: _item(m).update(at=0.5),
    "at is True": lambda m: _item(m).update(at=True),
    "lies after the end of": lambda m: _item(m).update(at=10**6),
    "'no_such_dtype' is not a dtype": lambda m: _entry(m).update(dtype="no_such_dtype"),
    "'save' is not a dtype": lambda m: _entry(m).update(dtype="save"),
    "the manifest lacks kinds": lambda m: m.pop("kinds"),
    "has 'more', which a save does not write": lambda m: m.update(more=1),
    "time is 'noon'": lambda m: m.update(time="noon"),
    "time is nan": lambda m: m.update(time=float("nan")),
    "time is 1e+300": lambda m: m.update(time=1e300),
    "step is None": lambda m: m.update(step=None),
    "1000000000 ranks cannot have": lambda m: m.update(world_size=10**9),
    "files is ['rank-0.distcp']": lambda m: m.update(files=["rank-0.distcp"]),
    "a key in ('model', ['weight']) is": lambda m: _entry(m).update(path=["model", ["weight"]]),
    "an entry has a path of 1000 keys": lambda m: _entry(m).update(path=["model"] * 1000),
    "an entry has an empty path": lambda m: _entry(m).update(path=[]),
    "a length of model.weight is '2'": lambda m: _entry(m).update(shape=["2", 4]),
    "a length of model.weight is -5": lambda m: _entry(m).update(shape=[-5]),
    "has a shape that no tensor has": lambda m: _entry(m).update(shape=[1 << 40, 1 << 40]),
    "elements 8 to 10000000000000 of model.weight are in no item": lambda m: _entry(m).update(
        shape=[10**13]
    ),
    "elements 0 to 8 of model.weight are in no item": lambda m: _entry(m).update(items=[]),
    "elements 0 to 8 of model.weight are not in one item after": lambda m: _item(m).update(start=1),
    "bytes are not elements 0 to 1000000000": lambda m: (
        _entry(m).update(shape=[10**9]),
        _item(m).update(stop=10**9),
    ),
    "neither a tensor nor an object": lambda m: _entry(m, "state").update(items=[]),
    "two items overlap": lambda m: m["entries"].append({**_entry(m), "path": ["other"]}),
    "model.weight is in it more than once": lambda m: m["entries"].append(_entry(m)),
    "model is in it more than once": lambda m: m["entries"].append(
        {**_entry(m), "path": ["model"]}
    ),
    "progress is {}": lambda m: m.update(progress={}),
    "kinds is ['model']": lambda m: m.update(kinds=["model"]),
    r"'\ud800', and not a string": lambda m: m["kinds"].update(model="\ud800"),
}


@pytest.mark.parametrize("text", FORGERIES)
def test_a_manifest_that_no_save_has_written_is_refused_and_hides_no_other(tmp_path, text):
    good, bad = _write(tmp_path, 1), _write(tmp_path, 2)
    _rewrite(bad, FORGERIES[text])
    with pytest.raises(cl.CheckpointCorrupted, match=re.escape(text)) as raised:
        CheckpointReader(Folder(tmp_path), bad.name)
    said = f"{bad}/chorusline.json is torn or corrupted: it is not a manifest ("
    assert said in str(raised.value)
    listed = listing(Folder(tmp_path))
    assert (listed.written, listed.broken) == ([good.name], [bad.name])
    assert newest_whole(Folder(tmp_path)).folder == good.name
    assert [line.split(": ")[0] for line in described(tmp_path)] == [bad.name, good.name]


TEXTS = {
    "brackets": b"[" * 200_000,
    "brackets in the manifest": b'{"format": 1, "sha256": "", "manifest": '
    + b"[" * 50_000
    + b"]" * 50_000
    + b"}",
    "a number": b"5",
    "a list": b'["manifest", "sha256", "format"]',
    "a number of too many digits": b'{"manifest": '
    + b"9" * 10_000
    + b', "sha256": 1, "format": 1}',
    "another format": b'{"manifest": {}, "sha256": "x", "format": [1]}',
    "no text": b"\xff\xfe\x00",
    "nothing": b"",
}


def test_a_manifest_of_before_optimizers_were_named_is_read(tmp_path):
    folder = _write(tmp_path)
    _rewrite(folder, lambda manifest: manifest.pop("optimizers"))
    assert read_manifest(Folder(tmp_path), folder.name).optimizers == {}


@pytest.mark.parametrize("what", TEXTS)
def test_a_text_that_is_no_manifest_is_refused_and_hides_no_other(tmp_path, what):
    good, bad = _write(tmp_path, 1), _write(tmp_path, 2)
    (bad / "chorusline.json").write_bytes(TEXTS[what])
    with pytest.raises(cl.CheckpointCorrupted):
        CheckpointReader(Folder(tmp_path), bad.name)
    assert newest_whole(Folder(tmp_path)).folder == good.name


def test_a_manifest_of_any_size_is_not_read(tmp_path):
    good, bad = _write(tmp_path, 1), _write(tmp_path, 2)
    with (bad / "chorusline.json").open("ab") as file:
        file.truncate(1 << 40)  # A hole: it takes no disk.
    assert newest_whole(Folder(tmp_path)).folder == good.name


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a tree of JSON."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*path, key))


@functools.cache
def _sound() -> tuple[Path, dict[str, Any]]:
    folder = _write(Path(tempfile.mkdtemp(prefix="chorusline-forgeries-")))
    return folder, json.loads((folder / "chorusline.json").read_bytes())["manifest"]


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    if _sound.cache_info().currsize:
        shutil.rmtree(_sound()[0].parent)
        _sound.cache_clear()


@given(st.data(), JSON)
def test_whatever_stands_in_a_manifest_it_is_read_as_written_or_refused(data, value):
    folder, sound = _sound()
    plain = copy.deepcopy(sound)
    *path, last = data.draw(st.sampled_from(sorted(_places(sound), key=repr)))
    at = functools.reduce(lambda inner, key: inner[key], path, plain)
    if data.draw(st.booleans()):
        at[last] = value
    else:
        del at[last]
    _put(folder, plain)
    storage = Folder(folder.parent)
    try:
        reader = CheckpointReader(storage, folder.name)
        reader.verify()
        states = plain_states(reader)
    except cl.CheckpointCorrupted:
        assert listing(storage).written in ([], [folder.name])
    else:  # Such as another step, or a kind that nobody knows.
        assert listing(storage).written == [folder.name] and list(described(folder.parent))
        for entry in reader.manifest.entries:
            if entry.path == ("model", "weight"):
                assert torch.equal(reader.value(entry).flatten(), WEIGHT.flatten())
        assert states.keys() == reader.manifest.kinds.keys()


# -- Pieces ----------------------------------------------------------------------------------------


def _replace(folder: Path, name: str, data: bytes) -> None:
    """Put other bytes in the place of a piece, with their checksums."""
    file = folder / "rank-0.distcp"
    at = file.stat().st_size
    with file.open("ab") as opened:
        opened.write(data)

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["rank-0.distcp"] += len(data)
        _item(manifest, name).update(at=at, length=len(data), crc32=zlib.crc32(data))

    _rewrite(folder, change)


def _records(value: Any) -> dict[str, bytes]:
    """What is in the archive of a value, by name."""
    with zipfile.ZipFile(io.BytesIO(pickled(value))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _archive(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return target.getvalue()


def _deflated(value: Any) -> bytes:
    return _archive(_records(value), zipfile.ZIP_DEFLATED)


def _short(claimed: int, kept: int, wrap: Callable[[torch.Tensor], Any]) -> bytes:
    """An archive of a tensor of `claimed` elements whose record has `kept`, as large as a whole."""
    records = _records(wrap(torch.zeros(claimed)))
    data = records["archive/data/0"]
    rest = {"archive/data/0": data[: 4 * kept], "archive/more": data[4 * kept :]}
    return _archive(records | rest)


def _twice(value: Any) -> bytes:
    """An archive with two records of one name."""
    target = io.BytesIO(pickled(value))
    with warnings.catch_warnings(), zipfile.ZipFile(target, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr(archive.infolist()[0], archive.read(archive.infolist()[0]))
    return target.getvalue()


def _with_another(name: str) -> bytes:
    """An archive of a tensor, and the pickle of another one under that name."""
    other = _records(-WEIGHT)["archive/data.pkl"]
    return _archive(_records(WEIGHT) | {name: other})


def _in_another_folder() -> bytes:
    """An archive of a tensor whose pickle is not where torch looks for it, where another one is."""
    records = _records(WEIGHT)
    sound = records.pop("archive/data.pkl")
    return _archive(records | {"archive/DATA.PKL": sound, "archive/other/data.pkl": sound})


def _as_a_folder(name: str) -> bytes:
    """An archive of a tensor with one record that is marked as a folder."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for one, data in _records(WEIGHT).items():
            info = zipfile.ZipInfo(one)
            info.external_attr = 0x10 * (one == name)
            archive.writestr(info, data)
    return target.getvalue()


_END_BYTES = 22  # of an archive that zipfile writes


def _two_in_one(loaded: bytes, checked: bytes, has_locator: bool) -> bytes:
    """An archive with two directories of one size: torch finds the first, and zipfile the second.

    has_locator: the end of the archive has long numbers twice, and a locator of the first ones;
    otherwise it has short numbers, with the start of the first directory.
    """
    at, before = [zipfile.ZipFile(io.BytesIO(one)).start_dir for one in (loaded, checked)]
    # With short numbers, zipfile adds the distance of the directories to where a record is.
    records, directory = loaded[:at] + bytes(before), loaded[at:-_END_BYTES]
    count, size = struct.unpack_from("<HI", loaded, len(loaded) - 12)

    def long_end(start: int) -> bytes:
        numbers = (44, 45, 45, 0, 0, count, count, size, start)
        return struct.pack("<4sQHHIIQQQQ", b"PK\6\6", *numbers)

    first = records + directory + has_locator * long_end(len(records))
    second = bytearray(checked[:-_END_BYTES])
    position = before
    while position < len(second):
        lengths = struct.unpack_from("<HHH", second, position + 28)
        (offset,) = struct.unpack_from("<I", second, position + 42)
        offset += len(first) if has_locator else at
        struct.pack_into("<I", second, position + 42, offset)
        position += 46 + sum(lengths)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, size, len(records), 0)
    if has_locator:
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(records + directory), 1)
        end = long_end(len(first) + before) + locator + end
    return first + second + end


def _nested(depth: int) -> bytes:
    """An archive of so many lists in each other."""
    nested = b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."
    return _archive(_records(5) | {"archive/data.pkl": nested})


def _beyond() -> torch.Tensor:
    """A sparse tensor with an element after its end."""
    at = torch.full((1, 1), 10**9)
    return torch.sparse_coo_tensor(at, torch.ones(1), (5,), check_invariants=False)


def _legacy(value: Any) -> bytes:
    target = io.BytesIO()
    torch.save(value, target, _use_new_zipfile_serialization=False)
    return target.getvalue()


class _Call:
    """What a pickle calls in its place."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


HUGE = 1 << 40
CALLS = {
    "bytes of any number": _Call(bytearray, HUGE),
    "bytes of any number, again": [bytearray(b"abc"), _Call(bytearray, HUGE)],
    "bytes() of any number": [b"", _Call(bytes, HUGE)],
    "bytes that double": _Call(codecs.encode, _Call(codecs.encode, "x", "latin1"), "hex"),
    "an array of any size": _Call(numpy.ndarray, (HUGE,)),
    "an array that is reconstructed": _Call(
        numpy.empty(0).__reduce__()[0], numpy.ndarray, (HUGE,), b"b"
    ),
}


OBJECTS: dict[str, tuple[str, Callable[[], bytes]]] = {
    # Before torch 2.10 the rest was whatever lay in memory.
    "a storage longer than its record": ("not its record", lambda: _short(9, 2, lambda t: [1, t])),
    "200,000 lists in each other": ("200 deep", lambda: _nested(200_000)),
    "a sparse tensor with indices beyond its end": ("indices", lambda: pickled({"x": _beyond()})),
}


@pytest.mark.parametrize("what", OBJECTS)
def test_an_object_that_no_save_writes_is_refused(tmp_path, what):
    folder = _write(tmp_path, 1)
    said, made = OBJECTS[what]
    _replace(folder, "state", made())
    for weights_only in (True, False) if "lists" in what else (True,):
        reader = CheckpointReader(Folder(tmp_path), folder.name, weights_only=weights_only)
        with pytest.raises(cl.CheckpointCorrupted, match=said):
            plain_states_of_all(reader)


def test_storages_of_every_dtype_and_shared_ones_are_their_records():
    one = torch.arange(6, dtype=torch.float64)
    value = {"0": one, "again": one[2:4], "of one storage": one.view(2, 3).t(), "none": one[:0]}
    dtypes = "uint8 int8 int16 int64 uint16 uint64 bool bfloat16 float16 complex64 float8_e5m2"
    value |= {name: torch.ones(3).to(getattr(torch, name)) for name in dtypes.split()}
    loaded = load_plain(pickled(value))
    assert all(loaded[name].dtype == of.dtype for name, of in value.items())
    wide = torch.complex128  # torch compares no float8
    assert all(torch.equal(loaded[name].to(wide), of.to(wide)) for name, of in value.items())


@pytest.mark.parametrize("what", CALLS)
def test_an_object_that_is_made_by_a_call_with_any_size_is_refused(tmp_path, what):
    folder = _write(tmp_path, 1)
    _replace(folder, "state", pickled(CALLS[what]))
    with pytest.raises((cl.CheckpointCorrupted, cl.CheckpointUntrusted)):
        plain_states_of_all(CheckpointReader(Folder(tmp_path), folder.name))


def plain_states_of_all(reader: CheckpointReader) -> None:
    for entry in reader.manifest.entries:
        reader.value(entry)


def test_what_is_made_of_bytes_and_arrays_loads_as_it_was():
    value = [bytearray(b"abc"), bytearray(), bytearray(b"a"), bytearray(b"abc"), b"bytes", b"b"]
    value += [numpy.arange(6).reshape(2, 3), numpy.float32(1.5), numpy.array(["a", "bc"])]
    assert str(load_plain(pickled(value))) == str(value)


PIECES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "int64 over float32": ("model", lambda: pickled(torch.arange(4))),
    "int32 over float32": ("model", lambda: pickled(torch.arange(8, dtype=torch.int32))),
    "too few elements": ("model", lambda: pickled(torch.ones(7))),
    "too many elements": ("model", lambda: pickled(torch.ones(9))),
    "more storage than elements": ("model", lambda: pickled(torch.ones(12)[:8])[:-1]),
    "no tensor": ("model", lambda: pickled({"weight": WEIGHT})),
    "a sparse tensor": ("model", lambda: pickled(WEIGHT.to_sparse())),
    "an object that is called": ("model", lambda: pickled(_Call(bytearray, 8))),
    "a compressed tensor": ("model", lambda: _deflated(WEIGHT)),
    "a compressed object": ("state", lambda: _deflated(bytes(1 << 20))),
    "an older format": ("model", lambda: _legacy(WEIGHT)),
    "an object in an older format": ("state", lambda: _legacy(5)),
    "no archive": ("model", lambda: bytes(1000)),
    "not an archive of an object": ("state", lambda: b"PK\x03\x04" + bytes(1000)),
    "an empty object": ("state", lambda: b""),
    "a storage longer than its record": ("model", lambda: _short(8, 7, lambda one: one)),
    "a record of that name twice": ("model", lambda: _twice(WEIGHT)),
    "a pickle in upper case, too": ("model", lambda: _with_another("archive/DATA.PKL")),
    "a pickle in another folder": ("model", _in_another_folder),
    "elements that are marked as a folder": ("model", lambda: _as_a_folder("archive/data/0")),
    "a name beyond ASCII": ("model", lambda: _with_another("archive/dat\u00e4.pkl")),
    "two directories": (
        "model",
        lambda: _two_in_one(_deflated(-WEIGHT), _archive(_records(WEIGHT)), False),
    ),
    "two directories and a locator": (
        "model",
        lambda: _two_in_one(_deflated(-WEIGHT), _archive(_records(WEIGHT)), True),
    ),
}


@pytest.mark.parametrize("what", PIECES)
def test_a_piece_that_is_not_what_the_manifest_says_is_refused_and_hides_no_other(tmp_path, what):
    good, bad = _write(tmp_path, 1), _write(tmp_path, 2)
    name, made = PIECES[what]
    _replace(bad, name, made())
    with pytest.raises(cl.CheckpointCorrupted, match=re.escape(f"{bad}/")):
        plain_states(CheckpointReader(Folder(tmp_path), bad.name))
    with pytest.raises(cl.CheckpointCorrupted, match=re.escape(f"{bad}/")):
        CheckpointReader(Folder(tmp_path), bad.name).verify()
    assert newest_whole(Folder(tmp_path)).folder == good.name


@pytest.mark.parametrize("hidden_by", [None, "short numbers", "a locator"])
@pytest.mark.parametrize("name", ["model", "state"])
def test_a_few_bytes_do_not_become_many(tmp_path, name, hidden_by):
    good, bad = _write(tmp_path, 1), _write(tmp_path, 2)
    data = _deflated(torch.zeros(32 << 20))  # 128 MB
    if hidden_by is not None:
        data = _two_in_one(data, _archive(_records(WEIGHT)), hidden_by == "a locator")
    _replace(bad, name, data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(cl.CheckpointCorrupted):
        plain_states(CheckpointReader(Folder(tmp_path), bad.name))
    assert newest_whole(Folder(tmp_path)).folder == good.name
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60 << 10


def test_a_run_resumes_from_the_one_before_a_forged_one(ranks_of, tmp_path):
    write_two(ranks_of, tmp_path)
    (bad,) = tmp_path.glob("step-00000004-*")
    _rewrite(bad, lambda m: m.update(time="noon"))
    with warnings.catch_warnings():
        (step, (word,)), (other_step, _) = ranks_of(2).run(
            resume_and_listen, cl.CheckpointConfig(tmp_path)
        )
    assert (step, other_step) == (2, 2)
    assert "time is 'noon'" in word and ", of step 2, is used instead" in word


def test_a_length_beyond_all_memory_hides_no_other_from_any_rank(ranks_of, tmp_path):
    write_two(ranks_of, tmp_path)
    (bad,) = tmp_path.glob("step-00000004-*")
    size = 1 << 62

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["rank-1.distcp"] = size
        items = [one for entry in manifest["entries"] for one in entry["items"]]
        last = max(one["at"] + one["length"] for one in items if one["file"] == "rank-1.distcp")
        # Rank 0 reads the first piece, and rank 1 looks at the size of this file.
        manifest["entries"].sort(key=lambda entry: entry["path"] != ["schedule"])
        _item(manifest, "schedule").update(file="rank-1.distcp", at=last, length=size - last)

    _rewrite(bad, change)
    told = ranks_of(2).run(resume_and_listen, cl.CheckpointConfig(tmp_path))
    assert [step for step, _ in told] == [2, 2]
    with pytest.raises(cl.CheckpointCorrupted, match=r"rank-1\.distcp.* bytes are too many"):
        plain_states(CheckpointReader(Folder(tmp_path), bad.name))


@pytest.mark.parametrize("name", ["chorusline.json", "rank-0.distcp"])
def test_a_pipe_is_not_read(tmp_path, name):
    folder = _write(tmp_path)
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises((FileNotFoundError, cl.CheckpointCorrupted)):
        plain_states(CheckpointReader(Folder(tmp_path), folder.name))
    # A link is followed: a file may lie on another disk.
    (folder / name).unlink()
    (tmp_path / "elsewhere").write_bytes(data)
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert plain_states(CheckpointReader(Folder(tmp_path), folder.name)).keys()


GARBAGE = [5, None, [5], [{}], [{"params": 5}], [{"params": [[]]}], {"params": []}]


def _save_optimizer(group: cl.Group, place: Path) -> None:
    def body(ctx: cl.Context) -> None:
        Parts(ctx).step()
        ctx.save().wait()

    in_run(group, body, cl.CheckpointConfig(place))


@pytest.mark.parametrize("value", GARBAGE, ids=map(str, GARBAGE))
def test_groups_of_an_optimizer_that_no_optimizer_has_are_refused(ranks_of, tmp_path, value):
    ranks_of(1).run(_save_optimizer, tmp_path)
    (folder,) = tmp_path.iterdir()
    at = (folder / "rank-0.distcp").stat().st_size
    data = pickled(value)
    with (folder / "rank-0.distcp").open("ab") as file:
        file.write(data)

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["rank-0.distcp"] += len(data)
        (entry,) = [e for e in manifest["entries"] if e["path"] == ["optimizer", "param_groups"]]
        entry["items"][0].update(at=at, length=len(data), crc32=zlib.crc32(data))

    _rewrite(folder, change)
    with pytest.raises(cl.CheckpointCorrupted, match="param_groups is not what an optimizer saves"):
        plain_states(newest_whole(Folder(tmp_path)))
    ((step, (said,)),) = ranks_of(1).run(resume_and_listen, cl.CheckpointConfig(tmp_path))
    assert step == -1 and "param_groups is not what an optimizer saves" in said


# -- Depth: what is saved can be read, and what is read can be saved again -------------------------


class _State:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


WRAPS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "dictionaries around a tensor": (torch.ones(1), lambda one: {"x": one}),
    "dictionaries": (5, lambda one: {"x": one}),
    "lists": (5, lambda one: [one]),
    "tuples and dictionaries": ((5,), lambda one: (one,) if isinstance(one, dict) else {1: one}),
}


def _nested_state(what: str, depth: int) -> dict[str, Any]:
    value, wrap = WRAPS[what]
    for _ in range(depth - 1 - isinstance(value, tuple)):
        value = wrap(value)
    return {"outer": value}


def _save_again(group: cl.Group, place: Path, state: dict[str, Any], per_rank: bool) -> list[Any]:
    found = []

    def body(ctx: cl.Context, state: dict[str, Any]) -> None:
        own = _State(state)
        ctx.register("own", own, per_rank=per_rank)
        found.append(own.state)
        ctx.save().wait()

    for given_first in (state, {}):
        in_run(group, functools.partial(body, state=given_first), cl.CheckpointConfig(place))
    return found


@pytest.mark.parametrize("per_rank", [False, True])
@pytest.mark.parametrize("what", WRAPS)
def test_a_state_is_saved_as_deep_as_it_can_be_read(alone, tmp_path, what, per_rank):
    most = MOST_DEEP - per_rank  # Of which there is a list, by rank.
    state = _nested_state(what, most)
    given_first, resumed = _save_again(alone, tmp_path, state, per_rank)
    assert str(resumed) == str(given_first) != "{}"
    with pytest.raises(ValueError, match="the state of 'own' is nested more than 200 deep"):
        _save_again(alone, tmp_path / "more", _nested_state(what, most + 1), per_rank)


@pytest.mark.parametrize("per_rank", [False, True])
def test_a_dictionary_that_contains_itself_is_refused(alone, tmp_path, per_rank):
    state: dict[str, Any] = {"one": 1}
    state["below"] = {"again": state}
    with pytest.raises(ValueError, match="the state of 'own' has a dictionary that contains its"):
        _save_again(alone, tmp_path, state, per_rank)


def test_depth_is_what_pickle_goes_into_and_each_part_is_entered_once():
    shallow_first: list[Any] = [[]]
    for _ in range(300):
        shallow_first.append([shallow_first[-1]])
    assert is_deeper(shallow_first[::-1], 200) and not is_deeper(shallow_first, 200)
    twice: Any = (1,)
    for _ in range(60):
        twice = (twice, twice)  # 2**60 tuples
    itself: dict[str, Any] = {}
    itself["x"] = itself
    assert not is_deeper({"twice": twice, "itself": itself}, 62)
    assert is_deeper(twice, 60)
    assert is_deeper({frozenset([((),)]): 1}, 3) and not is_deeper([5, "x", torch.ones(3)], 1)
