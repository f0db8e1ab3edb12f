"""Calls to actors whose end is always known: a value, a dead actor, or silence.

Every `.remote()` of ours is awaited, here. Leaving early (a cancellation, a timeout) does not
touch the remote method; whoever leaves tells the actor so with a call of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Hashable, Mapping
from typing import Any, TypeAlias, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

Key = TypeVar("Key", bound=Hashable)

Actor: TypeAlias = Any
"""A Ray actor's handle. Its methods exist only remotely: no type checker sees them."""


def actor_class(kind: type, **options: Any) -> Any:
    """The Ray class of `kind`, never restarted by Ray: a restart would lose the state in silence,
    and its death would be seen only after seconds."""
    return ray.remote(max_restarts=0, **options)(kind)


class ActorGone(Exception):
    """The actor's process has died, or its node does not answer, which we take for the same.

    detail: what Ray says of the reason, in one line where one line says it.
    """

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class NoAnswer(Exception):
    """The actor lives, as far as Ray knows, and did not answer in time."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.detail = f"did not answer within {timeout_s:g} s"


async def answer(call: Awaitable[Any], timeout_s: float | None = None) -> Any:
    """The value of one remote call. Raises ActorGone, NoAnswer, or what the method raised."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except (ActorDiedError, ActorUnavailableError) as error:
        raise ActorGone(why_gone(error)) from None
    except TimeoutError as error:
        if isinstance(error, RayTaskError) or timeout_s is None:
            raise
        raise NoAnswer(timeout_s) from None


async def answers(
    calls: Mapping[Key, Awaitable[Any]], timeout_s: float
) -> dict[Key, Any | ActorGone | NoAnswer]:
    """The ends of calls that run side by side; a dead or silent actor hides no other's answer."""

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


def why_gone(error: ActorDiedError | ActorUnavailableError) -> str:
    """Ray's sentence about the death, without the address block and the list of common causes."""
    text = str(error)
    for line in text.splitlines():
        if line.startswith("The actor is dead because"):
            return line.split(" Some common causes", 1)[0].rstrip(". ")
    return text.strip()


def nodes_leaving() -> dict[str, str]:
    """Nodes that were told to go, by id, with the reason. Blocks for one question to the cluster.

    Ray has no public way to ask; its own trainer asks like this.
    """
    draining: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return {
        node_id: f"it is drained, with {max(0.0, deadline_ms / 1000 - time.time()):.0f} s left"
        if deadline_ms
        else "it is drained"
        for node_id, deadline_ms in draining.items()
    }
