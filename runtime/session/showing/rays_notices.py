"""What Ray prints of its own about deaths: left out where it is about a worker of a session.

Ray prints ten lines of possible causes for each process that dies, in the program. The session says
in one line which rank it was and what that costs. Other processes' deaths are shown as before.

A warning that needs no action is left out, too: that a cluster which starts with the program asks
for a token. It was the first line that a visitor saw. In a notebook, which shows warnings as if
they were errors, it is left out for other clusters as well.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

import ray

_DEATH = re.compile(r"A worker died or was killed .*Worker PID: (\d+) ", re.DOTALL)

_PRINTER = "print_to_stdstream"
"""The function of ray._private.worker that prints them (Ray 2.50 to 2.60). Its subscription has no
public filter, and is polled in a thread that waits already when `ray.init` returns."""

_TOKENS = "ray._private.authentication.authentication_token_setup"  # the logger (Ray 2.60)

_HOLD_S = 2.0
"""So long each death is held: of a worker that dies in its first step the session hears a moment
later than Ray, from the others."""

_pids: set[int] = set()


def expect_deaths(pids: Iterable[int]) -> None:
    """The session itself tells of the deaths of these processes."""
    _pids.update(pids)


def is_told_by_a_session(message: str) -> bool:
    found = _DEATH.match(message)
    return found is not None and int(found[1]) in _pids


def leave_out_tokens() -> None:
    """Leave out, from now on in this process, that a cluster asks for a token."""
    logging.getLogger(_TOKENS).addFilter(_needs_action)


def _needs_action(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Token authentication is enabled")


def leave_out() -> None:
    """From now on, in this process."""
    printing = getattr(ray._private.worker, _PRINTER, None)
    if printing is None or getattr(printing, "__module__", "") == __name__:
        return
    setattr(ray._private.worker, _PRINTER, _without_told(printing))


def _without_told(printing: Callable[..., None]) -> Callable[..., None]:
    def printed(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        lines = data.get("lines", ())

        def print_unless_told() -> None:
            if not any(map(is_told_by_a_session, lines)):
                printing(data, *args, **kwargs)

        if any(map(_DEATH.match, lines)):
            # Not a daemon: a program that ends meanwhile shows the deaths of others, too.
            threading.Timer(_HOLD_S, print_unless_told).start()
        else:
            printing(data, *args, **kwargs)

    return printed
