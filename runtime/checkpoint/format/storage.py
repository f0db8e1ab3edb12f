"""The place of checkpoints: a folder, or any place that fsspec knows, with one interface.

Names are relative, with slashes; "" is the place itself. A file appears whole or not at all where
the place allows it. In a folder it is written under another name, synchronised to the disk, and
renamed. Most object stores show only complete objects; elsewhere the checksum finds a torn file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
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
    """The path or URL for people, as in errors."""

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A file to write. It appears when the with-block ends, and never if the block raises."""

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    @abstractmethod
    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """At most `length` bytes from `start` on; None: all of them."""

    @abstractmethod
    def size(self, name: str) -> int: ...

    @abstractmethod
    def children(self, name: str = "") -> list[str]:
        """The names of the files and folders directly in a folder; empty if it does not exist."""

    @abstractmethod
    def sizes(self, name: str = "") -> dict[str, int]:
        """The bytes of the files directly in a folder, by name; empty if it does not exist."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, or a folder with its contents; do nothing if it does not exist."""


class Folder(Storage):
    """A folder of a file system that this machine has mounted."""

    def __init__(self, path: str | Path) -> None:
        self._root = Path(path).expanduser().absolute()
        self.path = str(self._root)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self._root / name
        temporary = path.with_name(path.name + _TEMPORARY)
        _make_folder(path.parent)
        try:
            # What is there was left by a writer that was killed; or it is a link, through which
            # another user of the folder would have a file elsewhere overwritten.
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            # Only now the name is there: a reader finds the whole file or none.
            temporary.rename(path)
            _sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        path = self._root / name
        # To open a pipe would wait for its writer, and a device has no end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileNotFoundError(errno.ENOENT, "No regular file", str(path))
        with path.open("rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)

    def size(self, name: str) -> int:
        return (self._root / name).stat().st_size

    def children(self, name: str = "") -> list[str]:
        try:
            return sorted(path.name for path in (self._root / name).iterdir())
        # As in an object store, where a folder is there when something is in it.
        except FileNotFoundError:
            return []

    def sizes(self, name: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / name) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # Removed since it was listed.
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def delete(self, name: str) -> None:
        path = self._root / name
        # What a link in the place leads to is not in the place: only the link is deleted.
        if "/" in name and path.parent.is_symlink():
            return
        # Several ranks, or another run, may delete the same folder.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _as_os_error(what: str) -> Iterator[None]:
    """Make an OSError of whatever a backend of fsspec raises: each has errors of its own (gcsfs an
    HttpError, botocore a BotoCoreError, aiohttp a ClientError), derived from Exception."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {type(error).__name__}: {error}") from error


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
        with _as_os_error(self.path_of(name)):
            self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
            file = self._fs.open(full, "wb")
            try:
                yield file
            except BaseException:
                # Closing the file would publish an incomplete object, and a file of fsspec that is
                # not closed closes itself when it is collected.
                with contextlib.suppress(Exception):
                    file.discard()
                with contextlib.suppress(AttributeError):  # Of some files it is only to be read.
                    file.closed = True
                raise
            file.close()

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else start + length
        with _as_os_error(self.path_of(name)):
            return bytes(self._fs.cat_file(self._full(name), start=start, end=end))

    def size(self, name: str) -> int:
        with _as_os_error(self.path_of(name)):
            return int(self._fs.size(self._full(name)))

    def children(self, name: str = "") -> list[str]:
        return sorted(one["name"].rstrip("/").rpartition("/")[2] for one in self._list(name))

    def sizes(self, name: str = "") -> dict[str, int]:
        return {
            one["name"].rpartition("/")[2]: int(one["size"] or 0)
            for one in self._list(name)
            if one["type"] == "file"
        }

    def _list(self, name: str) -> list[dict[str, Any]]:
        with _as_os_error(self.path_of(name)), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()  # Other ranks write, too.
            return list(self._fs.ls(self._full(name), detail=True))
        return []

    def delete(self, name: str) -> None:
        with _as_os_error(self.path_of(name)), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._full(name), recursive=True)


def is_url(path: str | Path) -> bool:
    """Whether it has a scheme: a path may have :// in it, too."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.:-]*://", str(path)) is not None


def open_storage(path: str | Path) -> Storage:
    """A local path, or a URL of a scheme that fsspec knows.

    Raises CheckpointPlaceUnusable, with fsspec's advice, for a scheme unknown or not installed, and
    for a backend that cannot begin.
    """
    if not is_url(path):
        return Folder(path)
    import fsspec  # The import costs time, and a folder does not need it.
    from fsspec.implementations.local import LocalFileSystem

    try:
        filesystem, root = fsspec.core.url_to_fs(str(path))
    except (ValueError, ImportError) as error:
        raise CheckpointPlaceUnusable(str(path), str(error)) from error
    except Exception as error:  # A backend may ask for credentials here.
        raise CheckpointPlaceUnusable(str(path), f"{type(error).__name__}: {error}") from error
    # fsspec neither synchronises local files to the disk nor renames them.
    return (
        Folder(root)
        if isinstance(filesystem, LocalFileSystem)
        else Remote(filesystem, root, str(path))
    )


def _make_folder(path: Path) -> None:
    """Make a folder and those above it, so that they outlive a power cut: older checkpoints are
    deleted for what is in it."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with contextlib.suppress(PermissionError):  # A folder that others may only write to.
            _sync_folder(folder.parent)


def _sync_folder(path: Path) -> None:
    """Synchronise a folder to the disk: only then a rename in it outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
