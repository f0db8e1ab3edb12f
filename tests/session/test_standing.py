"""What anybody on the cluster is told of a detached session."""

from __future__ import annotations

import pickle
import time
from typing import Any

import chorusline as cl
from chorusline.runtime.session.detached.keeper import Keeper
from chorusline.runtime.session.holding.holding import Holding


async def test_a_status_has_no_argument_of_the_session_in_which_a_secret_may_stand() -> None:
    secrets = {"env_vars": {"HF_TOKEN": "hunter2"}, "resources_per_worker": {"hunter2": 1.0}}
    options = cl.Session(seed=5, **secrets)._options
    keeper: Any = object.__new__(Keeper)
    keeper._name, keeper._run, keeper._clients = "night", None, {}
    keeper._options, keeper._holding = options, Holding(options)
    keeper._idle_timeout_s, keeper._restarts, keeper._ended, keeper._busy_at = 1.0, 0, "", 0.0
    keeper._ended_at, keeper._again = time.monotonic(), None
    status = await keeper.status()
    assert b"hunter2" in pickle.dumps(options), "the keeper has it"
    assert status.seed == 5 and b"hunter2" not in pickle.dumps(status)
