"""`run`: a session for one function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chorusline.actors.messages.messages import Report
from chorusline.collectives.contract.deadlines import Seconds
from chorusline.collectives.contract.torch_hints import TOO_MANY, says

from ..checkpoint.config import CheckpointConfig
from ..program.packing import check_not_own
from ..tracking.tracker import Tracker
from .holding.options import DEFAULT, Default
from .session import ARGUMENTS_BY_NAME, Session
from .showing.progress import Progress


@says(**{TOO_MANY: ARGUMENTS_BY_NAME})
def run(
    train: Callable[..., Any],
    /,
    *,
    num_workers: int | tuple[int, int] = 1,
    spares: int = 0,
    replace_stragglers: bool = False,
    replica_size: int = 1,
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    placement_strategy: str = "PACK",
    timeout_s: Seconds = 60.0,
    startup_timeout_s: Seconds = 60.0,
    address: str | None = None,
    on_report: Callable[[Report], None] | None = None,
    progress: bool | Progress = True,
    trackers: str | Tracker | Sequence[str | Tracker] = (),
    checkpoint: CheckpointConfig | None = None,
    seed: int | None = None,
    max_failures: int | None | Default = DEFAULT,
    pause_s: Seconds = 300.0,
    env_vars: Mapping[str, str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    label_selector: Mapping[str, str] | None = None,
    accelerator_type: str | None = None,
    log_to_driver: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call `train(ctx, **kwargs)` on `num_workers` ranks; return the results, by rank.

        def train(ctx, lr):
            return ctx.rank, lr
        results = cl.run(train, num_workers=2, lr=0.1)  # [(0, 0.1), (1, 0.1)]

    A session for one function, for programs without asyncio. The keyword arguments listed here
    configure the Session; all others are passed to `train`, whose parameters must have other names.
    Wrong arguments raise before Ray is started. Raises what Session and `Session.run` raise.
    """
    options = {name: value for name, value in locals().items() if name not in ("train", "kwargs")}
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RuntimeError(
            "chorusline.run starts an event loop, and this thread runs one already (a notebook, an "
            "async function); use `async with Session(...) as session: await session.run(...)`"
        )
    session = Session(**options)
    check_not_own(train, seed)
    program = session._packed(train, kwargs)

    async def main() -> list[Any]:
        async with session:
            return await session._run(program, session._audience_of(train, kwargs))

    return asyncio.run(main())
