"""What the ranks report right before their function ends has been heard when the run is over."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

import chorusline as cl

received: list[cl.Report] = []
MANY = 700


def hear(report: cl.Report) -> None:
    received.append(report)
    if len(received) % 50 == 0:
        time.sleep(0.01)  # Slower than the ranks report.


@pytest.fixture(scope="module")
async def session(cluster: None) -> AsyncIterator[cl.Session]:
    few = {"CPU": 0.1}
    async with cl.Session(2, resources_per_worker=few, timeout_s=30, on_report=hear) as session:
        yield session


def report_to_the_end(ctx: cl.Context, run: int, failing: int | None) -> int:
    """failing: the rank that fails then; None: both return."""
    for number in range(MANY):
        ctx.report(run=run, number=number)
    ctx.barrier()
    if ctx.rank == failing:
        raise LookupError("a slip of the user's")
    ctx.report(run=run, number=MANY)
    return ctx.rank


@pytest.mark.parametrize("failing", [None, 0, 1], ids=str)
async def test_all_reports_are_heard_before_a_run_is_over(
    session: cl.Session, failing: int | None
) -> None:
    received.clear()
    run = time.monotonic_ns()
    if failing is None:
        assert await session.run(report_to_the_end, run=run, failing=None) == [0, 1]
    else:
        with pytest.raises(LookupError, match="a slip"):
            await session.run(report_to_the_end, run=run, failing=failing)
    heard = list(received)
    assert {report.values["run"] for report in heard} == {run}, "none is of the run before"
    for rank in range(2):
        numbers = [report.values["number"] for report in heard if report.rank == rank]
        # The other rank may have reported once more before it was stopped.
        expected = [*range(MANY + 1)]
        assert numbers == expected or (failing is not None and numbers == expected[:-1])


async def test_the_only_report_of_a_short_run_is_heard(session: cl.Session) -> None:
    for number in range(10):
        received.clear()
        await session.run(lambda ctx, number=number: ctx.report(number=number))
        assert [(one.rank, one.values) for one in sorted(received, key=lambda one: one.rank)] == [
            (rank, {"number": number}) for rank in range(2)
        ]
