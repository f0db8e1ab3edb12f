"""Ray's text about a death is left out for workers of a session, and for no other process; its
warning of a blocked event loop, where there is no loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray

import chorusline as cl
from chorusline.runtime.session.showing import rays_notices
from tests.harness.programs import completed

DEATH = (
    "A worker died or was killed while executing a task by an unexpected system error. To "
    "troubleshoot the problem, check the logs for the dead worker.\nWorker IP address: 10.0.0.1 "
    "Worker port: 43597 Worker PID: {} Worker exit type: SYSTEM_ERROR Worker exit detail: …"
)


def test_only_deaths_that_the_session_tells_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that it tells a moment after Ray does."""
    printed: list[str] = []
    monkeypatch.setattr(rays_notices, "_HOLD_S", 0.2)
    monkeypatch.setattr(rays_notices, "_pids", set())
    monkeypatch.setattr(
        ray._private.worker, "print_to_stdstream", lambda data, **_: printed.extend(data["lines"])
    )
    rays_notices.leave_out()
    rays_notices.leave_out()  # Of a second session.
    rays_notices.expect_deaths([25762])
    messages = [DEATH.format(pid) for pid in (25762, 25763, 2576)] + ["A node died. PID: 25762 "]
    for message in messages:
        ray._private.worker.print_to_stdstream({"lines": [message]}, ignore_prefix=False)
    rays_notices.expect_deaths([25763])
    assert printed == messages[3:]
    wait_for_what_is_held()
    assert printed == [messages[3], messages[2]]


def test_no_warning_says_that_the_programs_own_cluster_asks_for_a_token(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = pytest.importorskip("ray._private.authentication.authentication_token_setup")
    if not hasattr(setup, "_warn_token_auth_enabled"):
        pytest.skip("this Ray starts local clusters without a token")
    monkeypatch.setattr(setup.logger, "filters", [])
    monkeypatch.setattr(logging.getLogger("ray"), "propagate", True)
    rays_notices.leave_out_tokens()
    rays_notices.leave_out_tokens()  # Of a second session.
    setup._warn_token_auth_enabled()
    setup._warn_token_auth_disabled()
    assert {record.getMessage()[:32] for record in caplog.records} == {
        "Token authentication is disabled"
    }
    assert len(setup.logger.filters) == 1


DIES_AT_ONCE = """
import torch
import chorusline as cl

def train(ctx, dataset):
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(8, 1)))
    sgd = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.01, replicas=2)
    optim = ctx.register("optim", sgd)
    with cl.Join([model, optim]):
        for batch in ctx.shard(dataset, batch_size=16):
            model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()

cl.run(train, num_workers=(1, 2), dataset=torch.ones(256, 8))
"""


def test_a_worker_that_dies_before_the_session_heard_of_it_is_told_in_one_line_too(
    on_cluster: dict[str, str],
) -> None:
    done = completed(
        "-c",
        DIES_AT_ONCE,
        timeout_s=100,
        environment=on_cluster | {"CHORUSLINE_FAULT_PLAN": "kill 1 at vote 2"},
    )
    assert "was killed or crashed" in done.stderr
    assert "A worker died" not in done.stdout + done.stderr


def wait_for_what_is_held() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


def gets_an_object(ctx: cl.Context, rows: cl.Stream) -> object:
    ray._private.worker.blocking_get_inside_async_warned = False  # Ray warns once in a process.
    return ray.get(ray.put(1))


async def reads_a_stream(ctx: cl.Context, rows: cl.Stream) -> object:
    ray._private.worker.blocking_get_inside_async_warned = False
    return sum(1 for _ in ctx.shard(rows, 2))


async def blocks_its_loop(ctx: cl.Context, rows: cl.Stream) -> object:
    return gets_an_object(ctx, rows)


@pytest.mark.parametrize(
    ("train", "is_told"),
    [(gets_an_object, False), (reads_a_stream, False), (blocks_its_loop, True)],
)
async def test_ray_warns_of_a_blocked_event_loop_only_where_the_function_has_one(
    session: cl.Session,
    capsys: pytest.CaptureFixture[str],
    train: Callable[..., Any],
    is_told: bool,
) -> None:
    with cl.Stream(range(8)) as rows:
        await session.run(train, rows=rows)
    assert ("blocking ray.get inside async actor" in capsys.readouterr().err) == is_told
