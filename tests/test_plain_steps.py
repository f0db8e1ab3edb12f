"""A worker is killed while plain optimizers step: the others go on from the furthest of them.

What they end with is compared with one process that takes the same steps over the same samples.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from plain_runs import MOMENTS, PlainKind, assert_as_one_process, train_plain

import chorusline as cl

DEATHS = [moment for moment in MOMENTS if moment != "is left"]


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("moment", DEATHS)
async def test_a_death_costs_no_step_and_no_sample(
    session: cl.Session, tmp_path: Path, moment: str, victim: int
) -> None:
    kind = PlainKind()
    acts = {(0, victim): (2, moment)}
    told = await session.run(train_plain, kind=kind, folder=str(tmp_path), acts=acts)
    assert {one.num_recoveries for one in told} >= {1}
    assert_as_one_process(kind, str(tmp_path), told)
