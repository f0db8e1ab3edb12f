"""Where checkpoints lie: a folder, or any place that fsspec knows, behind one small interface.

Names are relative, with slashes; "" is the place itself. A file appears whole or not at all where
that can be had: in a folder it is written under another name, brought to the disk and renamed. Most
object stores show an object when it is complete; where one does not, its checksum tells.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from .errors import CheckpointPlaceUnusable

_TEMPORARY = ".tmp"


class Storage(ABC):
    """A place with files. Every method may raise OSError; a missing file is FileNotFoundError."""

    path: str
    """What a person calls it."""

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A file to write. It is there when the with-block ends, and not if that raises."""

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    @abstractmethod
    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """At most `length` bytes from `start` on."""

    @abstractmethod
    def size(self, name: str) -> int: ...

    @abstractmethod
    def children(self, name: str = "") -> list[str]:
        """Names of what is directly in a folder; empty if there is no such folder."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """A file, or a folder with all that is in it; nothing if it is not there."""


class Folder(Storage):
    """A folder of a file system that this machine has mounted."""

    def __init__(self, path: str | Path) -> None:
        self._root = Path(path).expanduser().absolute()
        self.path = str(self._root)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self._root / name
        temporary = path.with_name(path.name + _TEMPORARY)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            _sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        with (self._root / name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)

    def size(self, name: str) -> int:
        return (self._root / name).stat().st_size

    def children(self, name: str = "") -> list[str]:
        try:
            return sorted(path.name for path in (self._root / name).iterdir())
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        path = self._root / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class Remote(Storage):
    """A place that fsspec knows: object stores, HDFS, memory."""

    def __init__(self, filesystem: Any, root: str, url: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self.path = url.rstrip("/")

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        full = self._full(name)
        self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        file = self._fs.open(full, "wb")
        try:
            yield file
        except BaseException:
            # Closing it would publish what is half written.
            with contextlib.suppress(Exception):
                file.discard()
            raise
        file.close()

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else start + length
        return bytes(self._fs.cat_file(self._full(name), start=start, end=end))

    def size(self, name: str) -> int:
        return int(self._fs.size(self._full(name)))

    def children(self, name: str = "") -> list[str]:
        self._fs.invalidate_cache()  # Other ranks write too.
        try:
            found = self._fs.ls(self._full(name), detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._full(name), recursive=True)


def open_storage(path: str | Path) -> Storage:
    """A local path, or a URL of a scheme that fsspec knows.

    Raises CheckpointPlaceUnusable for an unknown scheme, and with fsspec's own advice where the
    package for it is missing.
    """
    scheme = urllib.parse.urlsplit(str(path)).scheme if "://" in str(path) else ""
    if not scheme:
        return Folder(path)
    import fsspec  # Costs time, and a folder needs none of it.
    from fsspec.implementations.local import LocalFileSystem

    try:
        filesystem, root = fsspec.core.url_to_fs(str(path))
    except (ValueError, ImportError) as error:
        raise CheckpointPlaceUnusable(str(path), str(error)) from error
    # fsspec's own local files are neither brought to the disk nor renamed.
    return (
        Folder(root)
        if isinstance(filesystem, LocalFileSystem)
        else Remote(filesystem, root, str(path))
    )


def _sync_folder(path: Path) -> None:
    """A rename outlives a power cut only once its folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
