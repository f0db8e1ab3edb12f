"""The checker of trials sees what is lost, and strikes the same faults by the same seed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.trials.check import play, taken_again
from benchmarks.trials.faults import KINDS, Fault, draw
from benchmarks.trials.systems import SYSTEMS
from benchmarks.trials.workload import Ledger, Workload, judged


def trained(steps: list[list[int]], workload: Workload, forgets_at: int = -1) -> Ledger:
    """One process that takes steps over these samples, and loses its momentum before one."""
    ledger = Ledger(workload.num_samples)
    optim = torch.optim.SGD(ledger.groups())
    for number, samples in enumerate(steps):
        if number == forgets_at:
            optim = torch.optim.SGD(ledger.groups())
        ledger(torch.tensor(samples)).backward()
        optim.step()
        optim.zero_grad()
    return ledger


def state(ledger: Ledger) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in ledger.named_parameters()}


def test_the_parameters_say_what_counted(tmp_path: Path) -> None:
    workload = Workload(str(tmp_path), num_workers=1, num_samples=7, batch=3)
    whole = [[0, 1, 2], [3, 4, 5], [6]]
    right = state(trained(whole, workload))
    end = judged([right, right], workload)
    assert (end.never, end.again, end.num_steps, end.differ) == (0, 0, 3, False)
    end = judged([state(trained([[0, 1, 2], [2, 3, 4]], workload))], workload)
    assert (end.never, end.again, end.num_steps) == (2, 1, 2)
    assert judged([state(trained(whole, workload, forgets_at=1))], workload).num_steps is None
    other = {**right, "clock": right["clock"] + 1e-15}
    assert judged([right, other], workload).differ


def test_steps_of_several_workers_are_told_from_repeats(tmp_path: Path) -> None:
    workload = Workload(str(tmp_path), num_workers=3, num_samples=6, batch=2)
    ledger = Ledger(6)
    optim = torch.optim.SGD(ledger.groups())
    for samples, num_ranks in (([0, 1], 3), ([2, 3], 2), ([4, 5], 1)):
        (ledger(torch.tensor(samples)) / num_ranks).backward()
        ledger.clock.grad = torch.ones(1, dtype=torch.float64)
        optim.step()
        optim.zero_grad()
    end = judged([state(ledger)], workload)
    assert (end.never, end.again, end.num_steps) == (0, 0, 3)


def test_steps_that_are_taken_again_are_counted_once_each() -> None:
    def step(at: float, number: int) -> tuple[float, str, int, int, int]:
        return at, "step", 0, 1, number

    ahead = [step(float(n), n) for n in range(1, 6)]
    assert taken_again(ahead) == 0
    assert taken_again([*ahead, step(5.1, 4)]) == 0, "another rank is one step behind"
    back = [step(6.0 + n, n) for n in (3, 4, 5, 6)]
    assert taken_again([*ahead, *back]) == 1, "the one of two that certainly is"
    assert taken_again([*ahead, *back, *[step(20.0 + n, n) for n in (2, 3, 4)]]) == 3


def test_a_seed_draws_the_same_faults_again() -> None:
    for seed in range(50):
        faults = draw(seed, 5, list(KINDS))
        assert faults == draw(seed, 5, list(KINDS))
        assert [one.at for one in faults] == sorted(one.at for one in faults)
        assert all(0.05 <= one.at < 0.9 for one in faults)
    drawn = {one.kind for seed in range(50) for one in draw(seed, 5, list(KINDS))}
    assert drawn == set(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_trains_and_is_struck(name: str) -> None:
    args = argparse.Namespace(workers=2, samples=400, patience=90.0)
    trial = play(SYSTEMS[name], 0, [Fault("kill", 0.4, 0.9, 0.0, 0.0)], args)
    assert trial.num_struck == 1 and trial.is_over and trial.next_s
    assert trial.violations() == []
