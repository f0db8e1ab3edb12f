"""Calls to actors whose end is always known: a value, a dead actor, or silence.

Calls between our actors are awaited here. A caller that leaves early (by a cancellation or a
timeout) does not stop the remote method: it has to tell the actor so with another call.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import threading
import time
from collections.abc import Awaitable, Hashable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import ray
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

Key = TypeVar("Key", bound=Hashable)

HEAD_S, HEAD_ANSWER_S = 30.0, 2.0
"""Seconds after which the cluster's head is taken for dead, and within which it takes a connection.
A head that is restarted by a supervisor is back earlier."""

HEAD_WATCH_S = 5.0  # between two questions

_PARENT_WATCH_S = 0.2


_ASKED_AGAIN = 3
_OF_THIS_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Reasons why a connection cannot be made that say nothing about the other side."""

Actor: TypeAlias = Any
"""A Ray actor's handle. Its methods exist only remotely: no type checker sees them."""


def actor_class(kind: type, **options: Any) -> Any:
    """The Ray class of `kind`. Ray never restarts its actors: a restart would lose their state in
    silence, and a death would be noticed only seconds later."""
    return ray.remote(max_restarts=0, **options)(kind)


GONE: tuple[type[RayError], ...] = (
    RayActorError,  # It died, or its node does not answer.
    OutOfMemoryError,  # Ray's memory monitor killed it. This is not a RayActorError.
    ActorUnschedulableError,  # It never started, and never will; so are the next two.
    ActorPlacementGroupRemoved,
    RuntimeEnvSetupError,
    NodeDiedError,
    LocalRayletDiedError,
    WorkerCrashedError,
    ObjectLostError,  # The method has returned, and its value was lost with the node.
)
"""Ray's errors of a call that mean that the actor is gone. Ray keeps one cause of an actor's death,
and makes the error of every later call from it."""


_ERROR = re.compile(r"[\w.]+(?:Error|Exception): ")
_WITHOUT_A_WORD = "connection error code 2. End of file"
"""What Ray says of a process that has closed its connection and said nothing (2.50 to 2.60)."""

KILLED = "its process was killed, or crashed in native code"
"""Why a process is gone that said nothing: nobody but its parent, Ray, could know the signal."""

ENDED = "its process has ended"
"""Of a death that another rank has seen, before Ray says why."""

FOR_MEMORY = (
    ", perhaps for lack of memory: the kernel of its machine has just killed a process for that"
)
"""Added to KILLED where the kernel says so (memory_kills.py). It does not say which process."""


class ActorGone(Exception):
    """The actor's process has died, or its node does not answer, which counts as the same.

    detail: what Ray says of the reason, in one line if one line says it.
    had_no_place: it never started, because no node may take it that it was meant for.
    """

    def __init__(self, detail: str, had_no_place: bool = False) -> None:
        super().__init__(detail, had_no_place)
        self.detail = detail
        self.had_no_place = had_no_place


class NoAnswer(Exception):
    """The actor did not answer in time, and lives as far as Ray knows."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.detail = f"did not answer within {timeout_s:g} s"


async def answer(call: Awaitable[Any], timeout_s: float | None = None) -> Any:
    """The value of one remote call. Raises ActorGone, NoAnswer, or what the method raised."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except GONE as error:
        had_no_place = isinstance(error, ActorUnschedulableError)
        raise ActorGone(why_gone(error), had_no_place) from None
    except TimeoutError as error:
        # A TimeoutError that the method itself has raised.
        if isinstance(error, RayTaskError) or timeout_s is None:
            raise
        raise NoAnswer(timeout_s) from None


async def answers(
    calls: Mapping[Key, Awaitable[Any]], timeout_s: float
) -> dict[Key, Any | ActorGone | NoAnswer]:
    """How calls that run side by side have ended, by key. A dead or silent actor does not hide the
    answers of the others."""

    async def settle(call: Awaitable[Any]) -> Any | ActorGone | NoAnswer:
        try:
            return await answer(call, timeout_s)
        except (ActorGone, NoAnswer) as error:
            return error

    async with asyncio.TaskGroup() as tasks:
        settled = {
            key: tasks.create_task(settle(call), name=f"call-{key}") for key, call in calls.items()
        }
    return {key: task.result() for key, task in settled.items()}


async def answers_or_why(
    calls: Mapping[Key, Awaitable[Any]], timeout_s: float
) -> dict[Key, Any | str]:
    """As `answers`, with a text in place of an answer that did not come, which says why."""
    replies = await answers(calls, timeout_s)
    return {
        key: one.detail if isinstance(one, ActorGone | NoAnswer) else one
        for key, one in replies.items()
    }


async def first_answer(calls: Iterable[Awaitable[Any]], timeout_s: float) -> None:
    """Return when one of these calls has ended, or none has in time."""
    tasks = [asyncio.ensure_future(answer(call, timeout_s)) for call in calls]
    if tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def why_gone(error: RayError) -> str:
    """Ray's sentence about the death, without the address block and the list of common causes.
    error: one of GONE."""
    text = str(error)
    if isinstance(error, OutOfMemoryError):
        # Its other lines are advice on tasks, and a list of processes.
        first = text.strip().partition("\n")[0].rstrip(". ")
        return (
            f"Ray killed it because its node ran low on memory ({first}). Give the node more "
            "memory, use fewer workers on it or smaller batches, or start Ray with a higher "
            "RAY_memory_usage_threshold"
        )
    if _WITHOUT_A_WORD in text:
        return KILLED
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("The actor is dead because"):
            why, _, trace = line.partition(" Traceback (most recent call last)")
            why = why.split(" Some common causes", 1)[0].rstrip(". ")
            # Frames of Ray follow, errors one after the other, and a line that says nothing.
            errors = [one for one in lines[number:] if trace and _ERROR.match(one)]
            return ": ".join([why, *errors[-1:]])
        # The next line says how its node has ended.
        if line.startswith("The actor died because its node"):
            return " ".join(map(str.strip, lines[number : number + 2])).rstrip(". ")
    if "error raised in its creation task" in text:
        # A traceback of Ray's and our own frames; its last line is the error.
        return text.strip().splitlines()[-1]
    return text.strip()


def end_with_parent() -> None:
    """End this actor's process soon after its raylet has died, which is its parent.

    Ray does not end it while it is busy. To an actor without its raylet all others seem dead, so
    what it then does to them would be a mistake.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="raylet-watch", daemon=True).start()


def head_is_gone(timeout_s: float) -> bool:
    """Whether the cluster's head takes no connections, as when it was killed, or this process has
    left the cluster.

    Ray's own calls do not say so: they wait for the head for a minute, and then Ray ends this
    process. Blocks for `timeout_s` at most.
    """
    # Else Ray would start another cluster for the question.
    return not ray.is_initialized() or refuses(_head_address(), timeout_s)


def _head_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def refuses(address: str, timeout_s: float) -> bool:
    """Whether nobody takes a connection at `address`, a host and a port."""
    try:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            return False
    # A process without a free descriptor says nothing of the head.
    except OSError as error:
        return error.errno not in _OF_THIS_PROCESS


async def head_stays_gone(timeout_s: float) -> bool:
    """`head_is_gone`, asked again for a second: a busy head may refuse one connection."""
    if not ray.is_initialized():
        return True
    return await stays_refused(_head_address(), timeout_s)


async def stays_refused(address: str, timeout_s: float) -> bool:
    """Whether nobody takes a connection at `address` for a second, or within `timeout_s`."""
    for _ in range(_ASKED_AGAIN):
        if not await asyncio.to_thread(refuses, address, timeout_s):
            return False
        await asyncio.sleep(1 / _ASKED_AGAIN)
    return await asyncio.to_thread(refuses, address, timeout_s)


class HeadWatch:
    """Whether the cluster's head has taken no connections for HEAD_S, asked again and again."""

    def __init__(self) -> None:
        self._gone_since: float | None = None  # None: it took the last connection

    def gives_up(self) -> bool:
        """Ask once more. Blocks for HEAD_ANSWER_S at most."""
        # It is back, restarted by its supervisor: the time is counted again from here.
        if not head_is_gone(HEAD_ANSWER_S):
            self._gone_since = None
            return False
        if self._gone_since is None:
            self._gone_since = time.monotonic()
        return time.monotonic() - self._gone_since > HEAD_S


async def until_head_is_gone() -> None:
    """Return when the head has taken no connections for HEAD_S."""
    watch = HeadWatch()
    while True:
        await asyncio.sleep(HEAD_WATCH_S)
        if await asyncio.to_thread(watch.gives_up):
            return


def nodes_leaving() -> dict[str, str]:
    """Nodes that were told to go, by id, with the reason. Blocks for one question to the cluster.

    Ray has no public call for this; its own trainer uses the same one.
    """
    draining: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return {
        node_id: f"it is drained, with {max(0.0, deadline_ms / 1000 - time.time()):.0f} s left"
        if deadline_ms
        else "it is drained"
        for node_id, deadline_ms in draining.items()
    }
