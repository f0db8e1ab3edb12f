"""The number of ranks is invisible in the steps of `ctx.steps`: one gives the bits of four."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data.cursor import Cursor
from chorusline.runtime.data.dealer import Dealer
from chorusline.runtime.data.steps.step_rows import DatasetRows
from chorusline.runtime.data.steps.steps import Steps
from chorusline.runtime.process.random_state import mixed
from tests.harness.combinations import combinations
from tests.references.stepped_training import stepped


def run(ranks_of: Any, size: int, options: dict[str, Any]) -> list[Any]:
    return ranks_of(size).run(_stepped, options)


def _stepped(group: Any, options: dict[str, Any]) -> Any:
    return stepped(group, **options)


CASES: dict[str, dict[str, Any]] = {
    "transformer": {"model_name": "transformer"},
    "buffers": {
        "model_name": "normalised",
        "optimizer_name": "sgd",
        "micro_batch_size": 4,
        "num_samples": 54,
    },
    "plain": {"sharded": False, "optimizer_name": "sgd"},
    "plain, clipped": {"sharded": False, "max_norm": 0.05},
    "clipped": {"max_norm": 0.05},
    "complex, clipped": {"model_name": "spectral", "optimizer_name": "sgd", "max_norm": 0.05},
    "complex, plain, clipped": {
        "model_name": "spectral",
        "optimizer_name": "sgd",
        "sharded": False,
        "max_norm": 0.05,
    },
    "weighed": {"weighs": True},
    "several passes of some micro-batches": {"num_passes": 3, "num_samples": 61},
    "some micro-batches without a pass": {"skips": True, "num_samples": 48},
    "the same, plain": {"skips": True, "num_samples": 48, "sharded": False},
    "changed in micro-batches": {"changes": True},
    "adafactor": {"optimizer_name": "adafactor"},
    "fewer micro-batches than ranks": {"global_batch_size": 6, "micro_batch_size": 3},
    "augmented samples": {"model_name": "augmented", "optimizer_name": "sgd"},
}


@combinations(3, case=CASES, size=[2, 3, 4])
def test_any_number_of_ranks_gives_the_bits_of_one(ranks_of: Any, case: str, size: int) -> None:
    alone = run(ranks_of, 1, CASES[case])[0]
    samples = sorted(x for batch in alone[2] for x in batch)
    results = run(ranks_of, size, CASES[case])
    assert {one[0] for one in results} == {alone[0]}
    assert results[0][1] == alone[1]
    assert sorted(x for one in results for batch in one[2] for x in batch) == samples


def _norms(group: Any, sharded: bool) -> list[float]:
    """The norm of each step's mean gradient, as clipping finds it: `grad_norm`, or what torch's
    function returns."""
    norms: list[float] = []

    def watch(optimizer: Any) -> None:
        optimizer.register_step_post_hook(lambda *_: norms.append(optimizer.grad_norm))

    clip = torch.nn.utils.clip_grad_norm_

    def clip_and_note(*args: Any) -> torch.Tensor:
        norms.append(float(norm := clip(*args)))
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_note)
        stepped(group, "spectral", "sgd", sharded=sharded, max_norm=0.05, watch=watch)
    return norms


def test_the_norm_of_complex_gradients_is_torchs(ranks_of: Any) -> None:
    """The imaginary parts count too."""
    torchs = ranks_of(1).run(_norms, False)[0]
    assert len(torchs) == 8
    for size in (1, 2, 3):
        assert ranks_of(size).run(_norms, True)[0] == pytest.approx(torchs, rel=1e-12)
        assert ranks_of(size).run(_norms, False)[0] == pytest.approx(torchs, rel=1e-12)


def draws_of_two_passes(group: Any, parts: list[dict[str, Any]] | None = None) -> Any:
    """What the micro-batches of two passes over one epoch's steps draw on this rank, by pass, step
    and first sample; and where the second pass is after its first step."""
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1), group)
    dealer, cursor, found, place = Dealer(group.rank, group.size), Cursor(), {}, None
    if parts is not None:
        cursor.resume(parts)
    for _ in cursor.epochs(1):
        for which in range(2):
            rows = DatasetRows(torch.arange(24.0)[:, None], epoch=0, seed=0, shuffle=False)
            steps = Steps(rows, 8, 2, key="24", group=lambda: group, dealer=dealer, cursor=cursor)
            for step in steps:
                for batch in step:
                    found[which, step.number, int(batch[0])] = float(torch.rand(()))
                    model(batch).sum().backward()
                model.zero_grad()
                if which == 1 and place is None:
                    place = cursor.state()
    return found, place


def test_two_passes_over_the_steps_of_an_epoch_draw_other_numbers(ranks_of: Any) -> None:
    [(alone, place)] = ranks_of(1).run(draws_of_two_passes)
    assert len(alone) == 24 and len({*alone.values()}) == 24
    # The first one draws what it has always drawn.
    torch.manual_seed(mixed(0, 0, 0, 0))
    assert alone[0, 0, 0] == float(torch.rand(()))
    for size in (2, 3):
        of_ranks = ranks_of(size).run(draws_of_two_passes)
        assert {key: one for found, _ in of_ranks for key, one in found.items()} == alone
    [(resumed, _)] = ranks_of(1).run(draws_of_two_passes, [place])
    assert resumed == {key: one for key, one in alone.items() if key > (1, 1)}
