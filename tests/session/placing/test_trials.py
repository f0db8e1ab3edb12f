"""A session inside a Ray Tune trial: its workers are in the bundles that the trial has reserved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group_table
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from chorusline.runtime.session.placing.trials import suitable
from tests import ROOT
from tests.harness.programs import output_of


@pytest.mark.parametrize(
    ("bundles", "num_taken", "indices"),
    [
        ([{"CPU": 1}], 1, ()),
        ([{"CPU": 1}, {"CPU": 1}, {"CPU": 1}], 1, (1, 2)),
        ([{"CPU": 1}, {"CPU": 0.5}, {"CPU": 2, "GPU": 1}], 1, (2,)),
        ([{"CPU": 1}, {"CPU": 1}], 0, (0, 1)),
        ([{"CPU": 1}, {"GPU": 1}, {}], 1, ()),
    ],
)
def test_workers_fit_in_bundles_that_have_what_they_ask_for(
    bundles: list[dict[str, float]], num_taken: int, indices: tuple[int, ...]
) -> None:
    assert suitable(bundles, {"CPU": 1.0}, num_taken) == indices


class Trial:
    """What Tune's actor of a trial does: opens a session in its thread."""

    def told(self, num_workers: Any, spares: int, cpus: float) -> dict[str, Any]:
        import asyncio
        import logging
        import os

        import ray

        import chorusline as cl

        warnings: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("chorusline").addHandler(handler)

        def group_of_worker(ctx: cl.Context) -> tuple[str, int]:
            return ray.get_runtime_context().get_placement_group_id(), os.getpid()

        async def main() -> dict[str, Any]:
            few = {"CPU": cpus}
            async with cl.Session(
                num_workers,
                spares=spares,
                resources_per_worker=few,
                startup_timeout_s=120,
                progress=False,
            ) as session:
                groups = [group for group, _ in await session.run(group_of_worker)]
                return {"groups": groups, "spares": session.num_spares, "warnings": warnings}

        return asyncio.run(main())


def in_trial(bundles: list[dict[str, float]], *args: Any) -> tuple[str, dict[str, Any]]:
    """The id of a trial's placement group, and what a session in it says."""
    group = placement_group(bundles)
    ray.get(group.ready(), timeout=60)
    try:
        strategy = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        )
        actor = ray.remote(Trial).options(num_cpus=0.1, scheduling_strategy=strategy).remote()
        told = ray.get(actor.told.remote(*args), timeout=200)
        state = placement_group_table(group)["state"]
        assert state == "CREATED", "the session has left the trial's group to its owner"
        ray.kill(actor)
    finally:
        remove_placement_group(group)
    return group.id.hex(), told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sessions_workers_are_in_the_trials_bundles_and_no_more_than_these(
    cluster: None,
) -> None:
    bundles = [{"CPU": 0.1}, *([{"CPU": 0.2}] * 3)]
    group, told = in_trial(bundles, (1, 8), 1, 0.2)
    assert told["groups"] == [group] * 2, "three bundles, of which one is for a spare worker"
    assert [one for one in told["warnings"] if "placement group" in one] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trial_with_too_few_bundles_is_told_what_to_reserve(cluster: None) -> None:
    group, told = in_trial([{"CPU": 0.1}], 2, 0, 0.2)
    assert group not in told["groups"] and len(told["groups"]) == 2
    (warning,) = [one for one in told["warnings"] if "placement group" in one]
    assert "with 0 bundles for workers, and the session needs 2" in warning
    assert 'tune.PlacementGroupFactory([{"CPU": 1}] + [{"CPU": 0.2}] * 2)' in warning


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_tune_searches_with_sessions_in_its_trials(
    on_cluster: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("ray.tune", reason="ray[tune] is not installed (extra tune)")
    flags = ("--rates", "0.001", "0.2", "--epochs", "4", "--storage-path", str(tmp_path))
    script = ROOT / "examples" / "tune_sessions.py"
    said = output_of(script, *flags, timeout_s=500, environment=on_cluster)
    losses = {
        float(rate): float(loss)
        for rate, loss in re.findall(r"^lr (\S+) +\d+ epochs, loss (\S+)$", said, re.MULTILINE)
    }
    assert losses.keys() == {0.001, 0.2}
    best = min(losses, key=lambda rate: losses[rate])
    assert best == 0.2
    assert f"best: lr {best:g}, loss {losses[best]:.5f}" in said
