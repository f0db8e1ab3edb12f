"""Storages whose backends raise errors of their own, as gcsfs, botocore and aiohttp do: no error of
a cloud store ends a training, and each rank hears the same."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

import chorusline as cl
from chorusline.runtime.checkpoint import opening
from chorusline.runtime.checkpoint.format.catalog import listing, newest_whole
from chorusline.runtime.checkpoint.format.errors import (
    CheckpointCorrupted,
    CheckpointPlaceUnusable,
)
from chorusline.runtime.checkpoint.format.reader import CheckpointReader
from chorusline.runtime.checkpoint.format.storage import Folder, Remote, Storage, open_storage
from tests.harness.combinations import combinations
from tests.references.checkpoint_places import resume_and_listen, write_two
from tests.references.checkpoint_runs import Parts, in_run

METHODS = sorted(Storage.__abstractmethods__)


class HttpError(Exception):
    """As backends have them: no OSError."""


FAILS: dict[str, Callable[[str], bool]] = {}
"""By method, for which names it raises."""


def _failing(method: str) -> Any:
    def call(self: Folder, name: str = "", *args: Any) -> Any:
        if method in FAILS and FAILS[method](name):
            raise HttpError(f"503 in {method}")
        return getattr(super(Failing, self), method)(name, *args)

    return call


class Failing(Folder):
    """A folder in which methods raise as FAILS says, errors that are no OSError."""


for _method in METHODS:
    setattr(Failing, _method, _failing(_method))


class FailingAsOSError(Failing):
    """As the backends of storage.py, which make OSErrors of all errors."""

    error: type[Exception] = OSError

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return super().read(name, start, length)
        except HttpError as error:
            raise self.error(str(error)) from error


class FailingForMemory(FailingAsOSError):
    error = MemoryError


def _in_failing_run(
    group: cl.Group, body: Callable[..., Any], config: cl.CheckpointConfig
) -> tuple[Any, list[str]]:
    """The result, and the warnings; storages fail as `body` lets them."""
    FAILS.clear()
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        patch.setattr("chorusline.runtime.checkpoint.checkpoints.open_storage", Failing)
        patch.setattr("chorusline.runtime.checkpoint.opening._PAUSES_S", (0.01, 0.01))
        result = in_run(group, body, config)
    return result, [str(one.message) for one in caught]


def _save_while_it_fails(
    group: cl.Group, place: Path, method: str, who: int, named: bool
) -> tuple[list[str], list[str]]:
    """Save, save while a method fails on one rank, and save again: what each wait raised."""
    said: list[str] = []

    def body(ctx: cl.Context) -> None:
        parts = Parts(ctx)
        for step in range(3):
            parts.step()
            if step == 1 and ctx.rank == who:
                FAILS[method] = lambda name: True
            try:
                ctx.save(place.parent / f"named-{step}" if named else None).wait()
                said.append("")
            except cl.CheckpointWriteFailed as error:
                said.append(str(error))
            FAILS.clear()

    config = cl.CheckpointConfig(place, num_to_keep=1, timeout_s=20)
    return said, _in_failing_run(group, body, config)[1]


@combinations(2, who=[0, 1], method=METHODS, named=[False, True])
def test_an_error_of_a_backend_is_told_to_all_ranks_alike_and_ends_no_run(
    ranks_of, tmp_path, method, who, named
):
    args = tmp_path / "place", method, who, named
    (first, warned), (second, _) = ranks_of(2).run(_save_while_it_fails, *args)
    assert first == second
    # What only lists or deletes old checkpoints is no part of a save, and rank 1 never does it.
    fails = {"create": (0, 1), "size": (0,), "children": (0, 1) if named else ()}.get(method, ())
    assert [bool(error) for error in first] == [False, who in fails, False]
    if who in fails:
        assert f"was not written, on rank {who}: HttpError: 503 in {method}" in first[1]
    elif who == 0 and not named:
        assert [word for word in warned if "old checkpoints in" in word and "HttpError" in word]


def _train_on(group: cl.Group, place: Path) -> tuple[int, list[str]]:
    def body(ctx: cl.Context) -> int:
        parts = Parts(ctx)
        for step in range(1, 6):
            if step in (2, 3):
                FAILS["create"] = lambda name: True
            parts.step()
            ctx.save()  # No caller waits for it.
            if step == 3:
                ctx.save()  # It waits for the one before, which has failed.
                FAILS.clear()
        return parts.ctx.step

    return _in_failing_run(group, body, cl.CheckpointConfig(place, resume="never"))


def test_a_failed_save_that_nobody_waits_for_is_a_warning_and_training_goes_on(ranks_of, tmp_path):
    ranks_of(2).run(_train_on, tmp_path)
    assert newest_whole(Folder(tmp_path)).manifest.step == 5


def _begin_while_it_fails(
    group: cl.Group, place: Path, method: str, who: int, times: int
) -> tuple[tuple[int, list[str]], list[str]]:
    """Resume while a method fails on one rank, so many times."""
    left = [times]

    def once_more(name: str) -> bool:
        left[0] -= 1
        return left[0] >= 0

    FAILS.clear()
    if group.rank == who:
        FAILS[method] = once_more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chorusline.runtime.checkpoint.checkpoints.open_storage", Failing)
        patch.setattr("chorusline.runtime.checkpoint.opening._PAUSES_S", (0.01, 0.01))
        return resume_and_listen(group, cl.CheckpointConfig(place))


@combinations(2, who=[0, 1], method=METHODS)
def test_a_place_that_does_not_answer_at_the_beginning_is_told_to_all_ranks_alike(
    ranks_of, tmp_path, method, who
):
    write_two(ranks_of, tmp_path)
    (step, words), (other_step, other_words) = ranks_of(2).run(
        _begin_while_it_fails, tmp_path, method, who, 10**6
    )
    assert step == other_step
    if step == -1:
        assert words == other_words
        assert words[0].startswith(("CheckpointPlaceUnusable: ", "CheckpointError: "))
        assert f"rank {who} " in words[0] and "HttpError: 503" in words[0]
    else:
        assert step == 4, "no older one is used in the place of one that cannot be read"
    is_used = {"create": True, "read": True, "size": True, "children": who == 0, "sizes": who == 0}
    assert (step == -1) is is_used.get(method, False)


def _resume_while_pieces_cannot_be_read(
    group: cl.Group, place: Path, times: int, failing: type[Failing]
) -> tuple[int, list[str]]:
    """Each rank's first `times` reads of data files fail."""
    left = [times]

    def in_a_data_file(name: str) -> bool:
        left[0] -= name.endswith(".distcp")
        return name.endswith(".distcp") and left[0] >= 0

    FAILS.clear()
    FAILS["read"] = in_a_data_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chorusline.runtime.checkpoint.checkpoints.open_storage", failing)
        patch.setattr("chorusline.runtime.checkpoint.opening._PAUSES_S", (0.01, 0.01))
        return resume_and_listen(group, cl.CheckpointConfig(place))


@combinations(2, times=[1, 10**6], failing=[FailingAsOSError, FailingForMemory])
def test_a_piece_that_cannot_be_read_now_is_not_taken_for_a_corrupted_one(
    ranks_of, tmp_path, times, failing
):
    write_two(ranks_of, tmp_path)
    for step, words in ranks_of(2).run(
        _resume_while_pieces_cannot_be_read, tmp_path, times, failing
    ):
        if times == 1:
            assert (step, words) == (4, [])
        else:
            assert step == -1 and words[0].startswith("CheckpointPlaceUnusable: ")
            assert f"{failing.error.__name__}: 503 in read" in words[0]


class LikeS3(Folder):
    """S3 answers a range that begins at the end of an object, or after it, with an error (416)."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if start >= self.size(name):
            raise OSError(errno.EINVAL, "The requested range is not satisfiable")
        return super().read(name, start, length)


@pytest.mark.parametrize("piece", [1 << 24, 100, 1])
def test_no_read_begins_at_the_end_of_a_file(alone, tmp_path, monkeypatch, piece):
    monkeypatch.setattr("chorusline.runtime.checkpoint.format.reader._READ_BYTES", piece)
    monkeypatch.setattr("chorusline.runtime.checkpoint.checkpoints.open_storage", LikeS3)

    def body(ctx: cl.Context) -> int:
        parts = Parts(ctx)
        parts.step()
        ctx.save().wait()
        return ctx.step

    assert [in_run(alone, body, cl.CheckpointConfig(tmp_path)) for _ in range(2)] == [1, 2]
    assert newest_whole(LikeS3(tmp_path)).manifest.step == 2
    (metadata,) = tmp_path.glob("step-00000002-*/.metadata")
    metadata.write_bytes(b"")
    assert newest_whole(LikeS3(tmp_path)).manifest.step == 1


@pytest.mark.parametrize("file", ["rank-0.distcp", "rank-1.distcp"])
def test_a_file_that_ends_before_a_piece_is_torn_and_no_error_of_the_storage(
    ranks_of, tmp_path, file
):
    """Each rank verifies pieces of both files."""
    write_two(ranks_of, tmp_path)
    (folder,) = tmp_path.glob("step-00000004-*")
    os.truncate(folder / file, 100)
    for part in range(2):
        with pytest.raises(CheckpointCorrupted, match=f"{file} is torn.*: it has 100 bytes of"):
            CheckpointReader(LikeS3(tmp_path), folder.name).verify(part, 2)


# -- fsspec ----------------------------------------------------------------------------------------


class FailingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    protocol = "failing"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    is_failing = False

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("open", "cat_file", "size", "ls", "rm", "makedirs") and type(self).is_failing:

            def fail(*args: Any, **kwargs: Any) -> Any:
                raise HttpError(f"503 in {name}")

            return fail
        return value


@pytest.fixture
def remote() -> Iterator[Storage]:
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    storage = open_storage("failing://bucket/run")
    storage.write("step/file", b"bytes")
    yield storage
    FailingFileSystem.is_failing = False
    FailingFileSystem.store.clear()


CALLS: dict[str, Callable[[Storage], Any]] = {
    "create": lambda storage: storage.write("step/other", b"x"),
    "read": lambda storage: storage.read("step/file"),
    "size": lambda storage: storage.size("step/file"),
    "children": lambda storage: storage.children("step"),
    "sizes": lambda storage: storage.sizes("step"),
    "delete": lambda storage: storage.delete("step/file"),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_error_of_a_backend_of_fsspec_is_an_os_error_that_names_it(remote, method):
    assert CALLS[method](remote) in (None, b"bytes", 5, ["file"], {"file": 5})
    FailingFileSystem.is_failing = True
    with pytest.raises(OSError, match=r"failing://bucket/run/step.*: HttpError: 503 in ") as raised:
        CALLS[method](remote)
    assert isinstance(raised.value.__cause__, HttpError)


class _Upload(AbstractBufferedFile):  # type: ignore[misc]
    """As those of object stores: it uploads what it has when it is closed."""

    def _initiate_upload(self) -> None:
        pass

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.fs.uploaded[self.path] = self.buffer.getvalue()
        return final


class _Uploading(fsspec.AbstractFileSystem):  # type: ignore[misc]
    uploaded: dict[str, bytes] = {}  # noqa: RUF012

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def _open(self, path: str, mode: str = "rb", **options: Any) -> _Upload:
        return _Upload(self, path, mode)


def test_an_object_whose_write_has_failed_does_not_come_later() -> None:
    storage = Remote(_Uploading(), "bucket/run", "uploading://bucket/run")

    def write(name: str, fails: bool) -> None:
        with storage.create(name) as file:
            file.write(b"a part")
            if fails:
                raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write("half", fails=True)
    write("whole", fails=False)
    gc.collect()
    assert _Uploading.uploaded == {"bucket/run/whole": b"a part"}


def test_a_backend_that_cannot_begin_makes_a_place_unusable(monkeypatch):
    def fail(*args: Any) -> Any:
        raise HttpError("no credentials")

    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    monkeypatch.setattr(FailingFileSystem, "_strip_protocol", fail)
    with pytest.raises(CheckpointPlaceUnusable, match="HttpError: no credentials"):
        open_storage("failing://bucket/run")


def test_a_folder_that_cannot_be_read_now_is_neither_used_nor_deleted_and_hides_no_other(
    ranks_of, tmp_path, monkeypatch
):
    write_two(ranks_of, tmp_path)
    (unread,) = tmp_path.glob("step-00000002-*")

    class Partly(Folder):
        def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
            if name.startswith(unread.name):
                raise PermissionError(name)
            return super().read(name, start, length)

    listed = listing(Partly(tmp_path))
    assert listed.unread == [unread.name] and len(listed.written) == 1
    assert newest_whole(Partly(tmp_path)).manifest.step == 4
    assert opening.catalog.sweep(Partly(tmp_path)) == [] and unread.exists()


def _keys_behind_saves(group: cl.Group, place: Path, saves_twice: bool) -> list[int]:
    """The keys in the group's store behind each of some saves, half of which fail on rank 1."""
    counts: list[int] = []

    def body(ctx: cl.Context) -> None:
        parts = Parts(ctx)
        for step in ctx.epochs(12):
            parts.step()
            if step % 2 == 0 and ctx.rank == 1:
                FAILS["create"] = lambda name: True
            with contextlib.suppress(cl.CheckpointWriteFailed):
                ctx.save().wait()
            FAILS.clear()
            if saves_twice:
                ctx.save().wait()
            ctx.barrier()
            counts.append(ctx.group._store.num_keys())
            ctx.barrier()
            torch.rand(1)  # So that no epoch ends with its save.

    for _ in range(2):
        _in_failing_run(group, body, cl.CheckpointConfig(place, resume="never"))
    return counts


@pytest.mark.parametrize("saves_twice", [False, True])
def test_saves_leave_nothing_in_the_store_that_grows_with_their_number(
    ranks_of, tmp_path, saves_twice
):
    counts, _ = ranks_of(2).run(_keys_behind_saves, tmp_path, saves_twice)
    assert max(counts[6:12]) <= max(counts[:6])
    assert max(counts[18:]) <= max(counts[12:18]) <= max(counts[:12]) + 6


@pytest.mark.parametrize("left", ["a link", "a link to nothing", "half a file"])
def test_what_is_left_under_a_temporary_name_is_removed_and_no_link_followed(tmp_path, left):
    victim, target = tmp_path / "victim", tmp_path / "place" / "model.pt"
    target.parent.mkdir()
    temporary = target.with_name("model.pt.tmp")
    if left == "half a file":
        temporary.write_bytes(b"much more than is written now")
    else:
        temporary.symlink_to(victim)
    if left == "a link":
        victim.write_bytes(b"precious")
    Folder(target.parent).write(target.name, b"whole")
    assert target.read_bytes() == b"whole" and not target.is_symlink()
    assert list(target.parent.iterdir()) == [target]
    assert victim.exists() == (left == "a link")
    assert not victim.exists() or victim.read_bytes() == b"precious"


class SlowToDelete(Folder):
    def delete(self, name: str) -> None:
        if name.startswith("step-"):
            time.sleep(2.5)
        super().delete(name)


def _save_twice_slowly(group: cl.Group, config: cl.CheckpointConfig) -> int:
    def body(ctx: cl.Context) -> int:
        parts = Parts(ctx)
        for _ in range(2):
            parts.step()
            ctx.save().wait()
        return ctx.step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chorusline.runtime.checkpoint.checkpoints.open_storage", SlowToDelete)
        return in_run(group, body, config)


def test_a_checkpoint_is_whole_on_all_ranks_while_old_ones_are_still_deleted(ranks_of, tmp_path):
    config = cl.CheckpointConfig(tmp_path, num_to_keep=1, timeout_s=4)
    assert ranks_of(2).run(_save_twice_slowly, config) == [2, 2]
