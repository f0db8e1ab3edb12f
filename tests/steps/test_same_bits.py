"""The number of ranks is invisible in the steps of `ctx.steps`: one gives the bits of four."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
