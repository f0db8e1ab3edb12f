"""Sessions whose workers share one stand-in GPU, which needs a GPU of Ray's that no other session
has: so they are not among the tests of test_on_a_stand_in_gpu.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import chorusline as cl
from tests.harness.stand_in_gpu.ranks import needs_stand_in
from tests.harness.stand_in_gpu.workers import stand_in_gpus
from tests.references.killed_runs import Kind, assert_as_if_nothing_was, train

pytestmark = needs_stand_in

KIND = Kind(num_epochs=1)


def backend_of(ctx: cl.Context) -> str:
    ctx.forget()
    return ctx.group.backend


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["22809", "23007"])
async def test_workers_that_share_a_gpu_train_with_any_version_of_nccl(
    cluster: None, tmp_path: Path, version: str
) -> None:
    half = {"CPU": 0.1, "GPU": 0.5}
    with stand_in_gpus() as env_vars:
        env_vars |= {"STAND_IN_GPU_BUS": "0000:01:00.0", "STAND_IN_NCCL": version}
        async with cl.Session(
            (1, 2), use_gpu=True, resources_per_worker=half, timeout_s=30, env_vars=env_vars
        ) as session:
            assert set(await session.run(backend_of)) == {"nccl"}
            victims = {1: (2, "before it votes (3)")}
            told = await session.run(train, kind=KIND, folder=str(tmp_path), victims=victims)
            assert {one.world_size for one in told} == {1}
            assert_as_if_nothing_was(KIND, str(tmp_path), told, victims)
