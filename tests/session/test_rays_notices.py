"""Ray's text about a death is left out for workers of a session, and for no other process."""

from __future__ import annotations

import pytest
import ray

from chorusline.runtime.session.showing import rays_notices

DEATH = (
    "A worker died or was killed while executing a task by an unexpected system error. To "
    "troubleshoot the problem, check the logs for the dead worker.\nWorker IP address: 10.0.0.1 "
    "Worker port: 43597 Worker PID: {} Worker exit type: SYSTEM_ERROR Worker exit detail: …"
)


def test_only_deaths_that_the_session_tells_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(rays_notices, "_pids", set())
    monkeypatch.setattr(
        ray._private.worker, "print_to_stdstream", lambda data, **_: printed.extend(data["lines"])
    )
    rays_notices.leave_out()
    rays_notices.leave_out()  # Of a second session.
    rays_notices.expect_deaths([25762])
    messages = [DEATH.format(25762), DEATH.format(2576), "A node died. Worker PID: 25762 "]
    for message in messages:
        ray._private.worker.print_to_stdstream({"lines": [message]}, ignore_prefix=False)
    assert printed == messages[1:]
