"""A worker needs more memory than its machine, or its container, has: the kernel kills it."""

from __future__ import annotations

import os

import pytest

import chorusline as cl
from tests.harness.memory_limits import memory_limit
from tests.references.low_memory import MB, steps_of_one_process, train


@pytest.mark.promise(
    "the kernel kills a worker, since its machine or its container is out of memory"
)
async def test_a_run_goes_on_without_a_worker_that_the_kernel_kills_and_says_that_it_was_for_memory(
    session: cl.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = await session.run(lambda ctx: os.getpid())
    with memory_limit(64 * MB) as group:

        def fill() -> None:
            group.write_text(str(os.getpid()))
            held = [bytearray(MB) for _ in range(256)]
            raise AssertionError(f"{len(held)} MB were not too much")

        results = await session.run(train, hog=pids[1], fill=fill)
    assert results and pids[1] not in [pid for pid, _, _ in results]
    for _, num_steps, weight in results:
        assert num_steps == 10 and weight == steps_of_one_process()
    told = capsys.readouterr().err
    assert f"rank 1 (pid {pids[1]}) was killed or crashed, perhaps for lack of memory: " in told
    assert "step 3: " in told and "no step is lost" in told, told
