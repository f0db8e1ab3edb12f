"""What the kernel says of processes that it has killed for lack of memory, on the machine of this
process.

Ray reports only that a killed process is gone, and the kernel names it in a log that a container
does not see. What any process may read is how many such kills there were, so they are counted once
a second: a worker that is gone was perhaps among those of the last seconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

_PERIOD_S, RECENT_S = 1.0, 5
"""Between two counts, each of which costs 30 us; and how long a kill counts as recent. A process
that held much memory may need seconds to end."""

_COUNTS = Path("/proc/vmstat")  # `oom_kill`: since Linux 4.13, kills in containers included.


class MemoryKills:
    """Counts as long as this process lives."""

    def __init__(self) -> None:
        self._counts = deque([_count()], round(RECENT_S / _PERIOD_S))
        threading.Thread(target=self._main, name="memory-kills", daemon=True).start()

    def recent(self) -> int:
        """Processes that were killed within RECENT_S; 0 where the kernel does not count them."""
        return _count() - self._counts[0]

    def _main(self) -> None:
        while True:
            time.sleep(_PERIOD_S)
            self._counts.append(_count())


def _count() -> int:
    try:
        words = _COUNTS.read_text().split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError):  # A sandbox, or another kernel.
        return 0
