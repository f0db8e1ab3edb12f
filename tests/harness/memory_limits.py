"""A limit on the memory of one process, which the kernel kills when it needs more."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

_PLACES = {  # where control groups for memory are, and the file with the limit
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}


_PATIENCE_S = 20.0


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[Path]:
    """A control group with a limit: a process that writes its number into the file puts itself in,
    and what it allocates from then on counts. Skips where the kernel, or its owner, allows none."""
    group = _group(nbytes)
    if group is None:
        pytest.skip("this machine lets us make no control groups for memory")
    try:
        yield group / "cgroup.procs"
    finally:
        # The kernel may still take apart what was killed.
        give_up_at = time.monotonic() + _PATIENCE_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < give_up_at:
            time.sleep(0.02)
        group.rmdir()


def _group(nbytes: int) -> Path | None:
    for place, limit in _PLACES.items():
        group = place / f"chorusline-test-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(nbytes))
            except OSError:
                group.rmdir()
            else:
                return group
    return None
