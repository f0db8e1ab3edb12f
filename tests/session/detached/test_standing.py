"""What anybody on the cluster is told of a detached session."""

from __future__ import annotations

import pickle
import time
from typing import Any

import chorusline as cl
from chorusline.runtime.session.detached.session_host import SessionHost
from chorusline.runtime.session.holding.local_session import LocalSession


async def test_a_status_has_no_argument_of_the_session_in_which_a_secret_may_stand() -> None:
    secrets = {"env_vars": {"HF_TOKEN": "hunter2"}, "resources_per_worker": {"hunter2": 1.0}}
    options = cl.Session(seed=5, **secrets)._options
    host: Any = object.__new__(SessionHost)
    host._name, host._runs, host._clients = "night", [], {}
    host._options, host._local = options, LocalSession(options)
    host._idle_timeout_s, host._restarts, host._ended, host._busy_at = 1.0, 0, "", 0.0
    host._ended_at, host._again = time.time(), None
    status = await host.status()
    assert b"hunter2" in pickle.dumps(options), "the session host has it"
    assert status.seed == 5 and b"hunter2" not in pickle.dumps(status)
