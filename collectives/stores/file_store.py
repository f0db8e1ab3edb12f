"""A store in a file, for processes of one host."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from ..contract.argument_kinds import check_kinds
from ..contract.errors import StaleStore, StoreLost
from ..contract.torch_hints import TOO_MANY, says
from .store import DictStore, Polling

_TURN_S = 10.0  # A write takes microseconds; a process may be stopped during one.
_LIFE, _TURN = 0, 1  # the bytes that are locked
_OPEN = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LOCK = struct.Struct("hhqqi0q")  # struct flock: type, whence, start, bytes, pid (0 here)


class FileStore(DictStore):
    """A store in a file, for processes of one host. No server is needed.

        with cl.FileStore(folder + "/store") as store:  # In a folder that is there.
            store.set("key", "value")

    The file is a log of writes. The process that closes it last (by `close`, a with-block, or its
    ordinary end) removes it. If a file still exists after all its users are gone, their run was
    killed: opening the file raises StaleStore at once. Every process makes its own FileStore; one
    inherited by fork raises ValueError.

    Ranks act on what a store says, so only the user who runs them may read and write it (mode
    0600). A file of another user, or one with content that is open to others, raises
    PermissionError; a link, or anything that is not a regular file, raises ValueError. An empty
    file that is open to others, as `touch` makes it, is removed, and a new one made.

    Each open store holds two kernel locks, on bytes of the file:
    - _LIFE, shared, while the store is open. The kernel releases it when the process ends, however
      it ends. So no pids are compared, which are reused after a while, after a reboot, and in
      another container.
    - _TURN, exclusive, for one write.
    """

    _MAGIC = b"chorusline store 1 "  # followed by JSON, which process made the file, on one line
    _HEADER_BYTES = 4096  # at most
    _ENTRY = struct.Struct("<Iq")  # bytes of key, bytes of value (-1: deleted)

    @says(
        world_size="the file knows its users; leave it out",
        file_name="write path=",
        **{TOO_MANY: "a FileStore knows its users; leave out their number"},
    )
    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        check_kinds(FileStore.__init__, locals())
        if not str(path):
            raise ValueError("path must name a file, and is empty")
        self.path = Path(path).absolute()
        self._pid = os.getpid()
        self._seen = 0  # bytes of the log that are in the dictionary
        self._file = self._open()
        self._closing = weakref.finalize(self, _close, self._file, self.path, self._pid)
        self._closing.atexit = False  # _close_all does it, after later exit handlers wrote here.
        _open_files.add(self)

    def close(self) -> None:
        """Close the file, and remove it if no other process has it open."""
        with self._changed:
            self._closing()

    def __enter__(self) -> FileStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        is_removed = False
        while True:
            try:
                file = os.open(self.path, _OPEN, 0o600)
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    raise ValueError(
                        f"path has {len(str(self.path))} characters, too many"
                    ) from None
                if error.errno != errno.ELOOP:
                    raise
                raise ValueError(
                    f"path {str(self.path)!r} is a symbolic link, which a FileStore does not "
                    "follow, because another user may have put it there; name the file itself"
                ) from None
            try:
                # Of the open file, as the path may name another one by now.
                found = os.fstat(file)
                self._check_owner(found)
                with _turn(file, self.path):
                    if _is_at(file, self.path):  # False if its last user has removed it in between.
                        if found.st_size or is_removed or not found.st_mode & _OF_OTHERS:
                            self._join(file)
                            return file
                        # Others may have it open already, so another mode would be too late.
                        self.path.unlink()
                        is_removed = True  # Once: some file systems know no modes.
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _check_owner(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(
                f"path {str(self.path)!r} is not a regular file; a FileStore needs a path of its "
                "own"
            )
        if found.st_uid != os.geteuid():
            raise PermissionError(
                f"path {str(self.path)!r} belongs to user {found.st_uid}, and this process runs as "
                f"user {os.geteuid()}; a FileStore uses only files of its own user, since ranks "
                "act on what the file says. Choose a path in a folder of your own"
            )

    def _join(self, file: int) -> None:
        """Become a user of the file, if it belongs to this run."""
        start = os.pread(file, self._HEADER_BYTES, 0)
        header, newline, entries = start.partition(b"\n")
        # The start may be cut off: a process was killed as it wrote it.
        if not header.startswith(self._MAGIC) and not self._MAGIC.startswith(start):
            raise ValueError(
                f"path {str(self.path)!r} is a file of another kind (it begins with "
                f"{start[:20]!r}); a FileStore needs a path of its own"
            )
        mode = stat.S_IMODE(os.fstat(file).st_mode)
        if mode & _OF_OTHERS:
            raise PermissionError(
                f"path {str(self.path)!r} is open to other users (mode {mode:o}): they may read "
                "what ranks write, or write what ranks act on. Remove it, take their permission "
                "away (chmod go=), or choose a path on a file system that keeps permissions"
            )
        # All users hold it shared, so that it can be had exclusively only if there are none.
        is_alone = _lock(file, _LIFE, fcntl.F_WRLCK)
        if is_alone and entries:
            # Unlock before the turn ends: the next process must not count this one as a user.
            _lock(file, _LIFE, fcntl.F_UNLCK)
            raise StaleStore(str(self.path), json.loads(header.removeprefix(self._MAGIC)))
        _lock(file, _LIFE, fcntl.F_RDLCK)
        if is_alone:
            os.ftruncate(file, 0)  # Removes the header of a process that then wrote nothing.
            header, newline = self._MAGIC + json.dumps(_this_process()).encode(), b"\n"
            _write_whole(file, header + newline)
        self._seen = len(header + newline)
        self._made_by = json.loads(header.removeprefix(self._MAGIC))

    def _check_usable(self) -> None:
        if not self._closing.alive:
            raise ValueError(f"this FileStore of {self.path} is closed; make a new one")
        # Locks are of the open file, which a fork shares: the parent's end would not be seen.
        if os.getpid() != self._pid:
            raise ValueError(
                f"this FileStore of {self.path} belongs to process {self._pid}; a forked process "
                "must make its own"
            )

    def _hint(self) -> str:
        if os.fstat(self._file).st_nlink == 0:
            return (
                f"{self.path} was removed while this store was open; a FileStore that opens it "
                "now is another store"
            )
        return f"the store is {self.path}, made by {self._made_by}"

    def _refresh(self) -> None:
        self._check_usable()
        end = os.fstat(self._file).st_size
        # The usual case, at the cost of one system call.
        if end == self._seen:
            return
        log = os.pread(self._file, end - self._seen, self._seen)
        at = 0
        while at + self._ENTRY.size <= len(log):
            key_bytes, value_bytes = self._ENTRY.unpack_from(log, at)
            key_at = at + self._ENTRY.size
            value_at = key_at + key_bytes
            next_at = value_at + max(value_bytes, 0)
            if next_at > len(log):
                break  # The writer of this entry is not done yet, or was killed.
            key = log[key_at:value_at]
            if value_bytes < 0:
                self._data.pop(key, None)
            else:
                self._data[key] = log[value_at:next_at]
            at = next_at
        self._seen += at

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._check_usable()
        with _turn(self._file, self.path):
            self._refresh()
            # Nobody else writes in this turn, so what is left over will not be completed.
            if os.fstat(self._file).st_size > self._seen:
                os.ftruncate(self._file, self._seen)  # Half an entry: the writer was killed.
            yield

    def _write(self, key: bytes, value: bytes | None) -> None:
        size = -1 if value is None else len(value)
        _write_whole(self._file, self._ENTRY.pack(len(key), size) + key + (value or b""))
        self._refresh()
        self._changed.notify_all()


def _lock(file: int, byte: int, kind: int) -> bool:
    """Change this open file's lock on a byte; False if another lock excludes that now.

    The lock belongs to the open file, not to the process: closing another descriptor keeps it.
    """
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


@contextlib.contextmanager
def _turn(file: int, path: Path, patience_s: float = _TURN_S) -> Iterator[None]:
    polling = Polling(patience_s)
    while not _lock(file, _TURN, fcntl.F_WRLCK):
        pause_s = polling.next_pause_s()
        if pause_s is None:
            raise StoreLost(
                "write",
                f"another process has held the lock of {path} for {patience_s:g} s, so it must "
                f"have been stopped during a write. `fuser {path}` shows who has it open",
            )
        time.sleep(pause_s)
    try:
        yield
    finally:
        _lock(file, _TURN, fcntl.F_UNLCK)


def _close(file: int, path: Path, pid: int) -> None:
    if os.getpid() == pid:  # A forked process shares the locks of its parent.
        with contextlib.suppress(OSError, StoreLost), _turn(file, path, 1.0):
            if _lock(file, _LIFE, fcntl.F_WRLCK) and _is_at(file, path):
                path.unlink()
            _lock(file, _LIFE, fcntl.F_UNLCK)  # Still in this turn: the next one may be the last.
    os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _write_whole(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]  # On a full disk, the second write raises.


def _this_process() -> str:
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} ({program}) on {os.uname().nodename} at {now}"


_open_files: weakref.WeakSet[FileStore] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for store in list(_open_files):
        store.close()
