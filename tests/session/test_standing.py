"""What anybody on the cluster is told of a detached session."""

from __future__ import annotations

import pickle
import time
from typing import Any

from chorusline.runtime.session.detached.keeper import Keeper


class _Session:
    num_spares = 0

    async def _ask_workers(self, timeout_s: float) -> tuple[()]:
        return ()


async def test_a_status_has_no_argument_of_the_session_in_which_a_secret_may_stand() -> None:
    keeper: Any = object.__new__(Keeper)
    keeper._name, keeper._run, keeper._session, keeper._clients = "night", None, _Session(), {}
    keeper._idle_timeout_s, keeper._restarts, keeper._ended, keeper._busy_at = 1.0, 0, "", 0.0
    keeper._ended_at, keeper._again = time.monotonic(), None
    secrets = {name: {"HF_TOKEN": "hunter2"} for name in ("env_vars", "runtime_env", "trackers")}
    keeper._arguments = {"checkpoint": None, "seed": 5, "address": "hunter2"} | secrets
    standing = await keeper.standing()
    assert standing.seed == 5 and b"hunter2" not in pickle.dumps(standing)
