"""How a call to an actor has ended: what counts as a death, and what is said of it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayError,
    RaySystemError,
    WorkerCrashedError,
)

from chorusline.actors.ray_calls.calls import (
    ActorGone,
    NoAnswer,
    answer,
    answers,
    refuses,
    stays_refused,
)


async def _ends_with(error: Exception | None) -> str:
    if error is not None:
        raise error
    return "a value"


DEATHS = [
    ActorDiedError(),
    ActorUnavailableError("its node does not answer", None),
    OutOfMemoryError("1 worker(s) were killed"),
    ActorUnschedulableError("its node is gone"),
    NodeDiedError("the node is gone"),
    WorkerCrashedError(),
    ObjectLostError("00" * 28, None, ""),
]


@pytest.mark.parametrize("error", DEATHS, ids=lambda error: type(error).__name__)
def test_a_death_does_not_hide_the_answers_of_the_others(error: RayError):
    said = asyncio.run(answers({0: _ends_with(None), 1: _ends_with(error)}, 5.0))
    assert said[0] == "a value"
    assert isinstance(said[1], ActorGone) and said[1].detail


def test_what_ray_says_of_a_lost_node_is_one_line():
    said = (
        "The actor died because its node has died. Node Id: 57ad\n\tthe actor's node was "
        "terminated unexpectedly: health check failed due to missing too many heartbeats"
    )
    context = ActorDiedErrorContext(actor_id=bytes(16), error_message=said)
    with pytest.raises(ActorGone) as gone:
        asyncio.run(answer(_ends_with(ActorDiedError(context))))
    assert gone.value.detail == said.replace("\n\t", " ")


def test_an_actor_that_could_not_be_imported_is_told_with_the_error_and_without_frames():
    said = (
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        "Worker exit detail: Worker exits unexpectedly. Traceback (most recent call last):\n"
        '  File "function_manager.py", line 657\n'
        "RuntimeError: The actor with name Driver failed to import on the worker.\n\n"
        "AttributeError: Can't get attribute 'Driver.f' on <module 'driver'>\n\n"
        "An unexpected internal error occurred while the worker was executing a task."
    )
    context = ActorDiedErrorContext(actor_id=bytes(16), error_message=said)
    with pytest.raises(ActorGone) as gone:
        asyncio.run(answer(_ends_with(ActorDiedError(context))))
    assert gone.value.detail.endswith(
        "exits unexpectedly: AttributeError: Can't get attribute 'Driver.f' on <module 'driver'>"
    )


def test_other_errors_of_ray_are_no_death():
    with pytest.raises(RaySystemError):
        asyncio.run(answer(_ends_with(RaySystemError("this process is not connected"))))


def test_silence_is_no_death():
    with pytest.raises(NoAnswer):
        asyncio.run(answer(asyncio.sleep(5.0), 0.01))


CHILD = """
import os, sys, time
from chorusline.actors.ray_calls.calls import end_with_parent

if os.fork():
    time.sleep(60)
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_an_actor_ends_with_its_raylet_before_it_takes_others_for_dead() -> None:
    parent = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == "", "this ends when the child does, which has the other end"


async def test_one_refused_connection_does_not_say_that_the_head_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    address = f"127.0.0.1:{port}"
    assert refuses(address, 1.0)
    asked = asyncio.create_task(stays_refused(address, 1.0))
    await asyncio.sleep(0.3)
    with socket.create_server(("127.0.0.1", port)):
        assert not await asked
    began_at = time.monotonic()
    assert await stays_refused(address, 1.0)
    assert time.monotonic() - began_at > 0.9


def test_without_a_cluster_the_head_is_gone_and_none_is_started() -> None:
    program = (
        "import ray\nfrom chorusline.actors.ray_calls.calls import head_is_gone\n"
        "assert head_is_gone(1.0)\nassert not ray.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
