"""A trial's own /dev/shm, and its own small disk: what it leaves is told from what others leave.

Both need mount namespaces, and so root. Without, the files of all programs in /dev/shm are compared
before and after, and disks do not fill up.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

_SHM = Path("/dev/shm")
_DISK = "64m"
_ENTER = (
    'mount --bind "$0" /dev/shm && mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'
)


@functools.cache
def why_not() -> str | None:
    """The reason why trials have no place of their own here; None if they have one."""
    try:
        command = ["unshare", "--mount", "--propagation", "private", "true"]
        tried = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return tried.stderr.strip() or f"status {tried.returncode}" if tried.returncode else None


class Enclosure:
    """disk: the folder in which a trial keeps its checkpoints."""

    def __init__(self, disk: Path) -> None:
        disk.mkdir()
        self._disk = disk
        self._is_own = why_not() is None
        self._shm = _SHM / f"trial-{uuid.uuid4().hex}" if self._is_own else _SHM
        if self._is_own:
            self._shm.mkdir(mode=0o777)
        self._before = self._files()

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs a command in here, in the process that is started."""
        if not self._is_own:
            return list(command)
        enter = ["sh", "-c", _ENTER, str(self._shm), _DISK, str(self._disk)]
        return ["unshare", "--mount", "--propagation", "private", *enter, *command]

    def left(self) -> list[str]:
        """The names of what has come into /dev/shm and is still there."""
        return sorted(self._files() - self._before)

    @contextlib.contextmanager
    def full_disk(self, pid: int) -> Iterator[None]:
        """No byte more goes onto the disk in here. pid: of a process in here."""
        filler = Path(f"/proc/{pid}/root{self._disk}/filler")
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        try:
            yield
        finally:
            # The process may be gone, and its namespace with it.
            with contextlib.suppress(OSError):
                filler.unlink()

    def close(self) -> None:
        if self._is_own:
            shutil.rmtree(self._shm, ignore_errors=True)

    def _files(self) -> set[str]:
        return {path.name for path in os.scandir(self._shm)}
