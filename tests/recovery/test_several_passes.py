"""A worker is killed in a step that has several backward passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import chorusline as cl
from tests.references.killed_runs import SENT_AGAIN, Kind, assert_as_if_nothing_was, train
from tests.references.plain_runs import PlainKind, assert_as_one_process, train_plain
from tests.references.training_to_kill import BATCH_SIZE

PASSES = (1, 2, 2)
"""By step: of the second one the gradients are sent again, those of the third in `step()`."""

CASES = [
    pytest.param(step, phase, victim, marks=[] if victim == fast else pytest.mark.slow)
    for step, phase, fast in [
        *((1, phase, i if i in (0, 1) else -1) for i, phase in enumerate(SENT_AGAIN)),
        (1, "before it votes (3)", -1),
        (1, "when it has seen the ballot", 2),
        (2, "while gradients are reduced (1)", 1),
        (2, "before it votes (3)", -1),
    ]
    for victim in range(3)
]


@pytest.mark.parametrize(("step", "phase", "victim"), CASES)
async def test_a_sharded_step_of_several_passes_counts_with_all_of_them(
    session: cl.Session, tmp_path: Path, step: int, phase: str, victim: int
) -> None:
    kind = Kind(passes=PASSES)
    victims = {victim: (step, phase)}
    told = await session.run(train, kind=kind, folder=str(tmp_path), victims=victims)
    assert {one.world_size for one in told} == {2}
    assert_as_if_nothing_was(kind, str(tmp_path), told, victims)


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        ("before it has the result of the second pass", 1),
        pytest.param("between two passes", 0, marks=pytest.mark.slow),
        pytest.param("when it has the result", 2, marks=pytest.mark.slow),
        pytest.param("before it steps", 0, marks=pytest.mark.slow),
        pytest.param("after the step", 1, marks=pytest.mark.slow),
    ],
)
async def test_a_plain_step_of_several_passes_counts_with_all_of_them(
    session: cl.Session, tmp_path: Path, moment: str, victim: int
) -> None:
    # The passes are added rank by rank in the reference, and pass by pass here.
    kind = PlainKind(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, passes=(2,), tolerance=1e-12)
    told = await session.run(
        train_plain, kind=kind, folder=str(tmp_path), acts={(0, victim): (3, moment)}
    )
    assert {one.num_recoveries for one in told} >= {1}
    assert_as_one_process(kind, str(tmp_path), told)


async def test_a_plain_step_of_several_passes_is_known_when_functions_run_again(
    session: cl.Session, tmp_path: Path
) -> None:
    """The one rank that has data for the last step is lost: of the two that run again from the
    top, one begins with that step and the other joins at once."""
    kind = PlainKind(
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9},
        passes=(2,),
        num_samples=12 * BATCH_SIZE + 1,
        num_epochs=1,
        tolerance=1e-12,
    )
    told = await session.run(
        train_plain, kind=kind, folder=str(tmp_path), acts={(0, 0): (4, "before it has the result")}
    )
    assert {one.num_recoveries for one in told} >= {1}
    assert_as_one_process(kind, str(tmp_path), told)
