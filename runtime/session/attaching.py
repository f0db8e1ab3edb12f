"""`attach`: a session that another program has started."""

from __future__ import annotations

from collections.abc import Callable

from chorusline.actors.messages import Report

from .session import Session
from .showing.progress import Progress


def attach(
    name: str,
    *,
    address: str | None = None,
    on_report: Callable[[Report], None] | None = None,
    live_view: bool = True,
    progress: bool | Progress = True,
    log_to_driver: bool = True,
) -> Session:
    """The detached session of that name, which this program or another one has started.

        night = await cl.attach("night")
        results = await night.results()    # shows the run, with its history, until it has ended

    name: as in `Session(name=..., detached=True)`.
    address: of the session's cluster; default RAY_ADDRESS, or else the cluster of this machine.
    on_report, live_view, progress, log_to_driver: as in Session.

    `async with cl.attach("night") as night:` attaches, and detaches at the end;
    `await cl.attach("night")` only attaches. Both raise StartupError if there is no such session.
    """
    session = Session(
        address=address,
        on_report=on_report,
        live_view=live_view,
        progress=progress,
        log_to_driver=log_to_driver,
        name=name,
        detached=True,
    )
    session._is_attached = True
    return session
