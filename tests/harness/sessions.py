"""What the sessions of tests are asked, to see that they work, or that a rank blocks the others."""

from __future__ import annotations

import torch

from chorusline.runtime.program.context import Context
from chorusline.runtime.session.session import Session

WITHIN_S = 4.0  # "Within seconds": well below every deadline that a blocked rank would wait for.


def name_ranks(ctx: Context) -> tuple[int, int, int, int, int]:
    return ctx.rank, ctx.world_size, ctx.local_rank, ctx.node_rank, ctx.generation


def blocked_by_others(ctx: Context) -> None:
    ctx.barrier()
    ctx.group.all_reduce(torch.zeros(3)).wait()


async def assert_usable(session: Session) -> None:
    results = await session.run(name_ranks)
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
