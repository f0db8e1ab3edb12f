"""A program in which Ray's memory monitor kills an actor; it prints what the others are told.

python -m tests.references.low_memory actor|session
"""

from __future__ import annotations

import asyncio
import json
import os
import time

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"

import ray

from chorusline.actors.calls import ActorGone, actor_class, answer


class Waiting:
    def wait(self) -> None:
        time.sleep(60)


def actor() -> str:
    """On a node whose memory is full from the beginning."""
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _system_config={"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 100},
    )

    async def told() -> str:
        try:
            await answer(actor_class(Waiting).remote().wait.remote())
        except ActorGone as gone:
            return gone.detail
        raise AssertionError("it was not killed")

    return asyncio.run(told())


if __name__ == "__main__":
    print(json.dumps(actor()))
    ray.shutdown()
