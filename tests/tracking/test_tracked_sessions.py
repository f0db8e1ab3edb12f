"""Sessions whose runs are recorded: a tracker has what the ranks report, whatever happens."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.runtime.tracking.tracker_names import checked_trackers


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(
    ctx: cl.Context,
    num_steps: int = 6,
    lr: float = 0.25,
    dies_at: int | None = None,
    died: Path = Path(),
    step_s: float = 0.0,
    save_at: int = 0,
) -> list[tuple[int, float]]:
    """Returns (step, loss) of each report. Rank 1 dies behind that of `dies_at`: `died` is made."""
    torch.manual_seed(1)
    model = cl.DistributedDataParallel(torch.nn.Linear(4, 1))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=lr, replicas=2)
    ctx.register("model", model)
    ctx.register("optim", optim)
    reported = []
    for number in range(ctx.step + 1, num_steps + 1):
        loss = model(torch.full((2, 4), float(number + ctx.rank))).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        ctx.report(loss=loss, samples=2)
        reported.append((number, loss.item()))
        time.sleep(step_s)
        if save_at == number:
            ctx.save().wait()
        if number == dies_at and ctx.rank == 1 and not died.exists():
            died.touch()
            time.sleep(0.7)  # Its reports are pulled meanwhile.
            os.kill(os.getpid(), signal.SIGKILL)
    return reported


async def test_a_tracker_has_the_mean_of_all_ranks_at_each_optimizer_step(
    cluster: None, tmp_path: Path
) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    file = tmp_path / "runs.jsonl"
    trackers = [f"jsonl:{file}", cl.OpenTelemetryTracker(2, tracer_provider=provider)]
    few = {"CPU": 0.1}
    async with cl.Session(2, resources_per_worker=few, trackers=trackers) as session:
        of_ranks = await session.run(train, lr=1e-3)
        with pytest.raises(ZeroDivisionError):
            await session.run(lambda ctx: 1 / 0)
    begin, *steps, end = read(file)[:8]
    assert begin["config"] == {"lr": 1e-3, "num_workers": 2, "seed": None}
    assert end["end"] == "finished"
    assert [one["step"] for one in steps] == [1, 2, 3, 4, 5, 6]
    for step, first, second in zip(steps, *of_ranks, strict=True):
        assert step["loss"] == pytest.approx((first[1] + second[1]) / 2, rel=1e-6)
        assert step["samples"] == 4
    assert [line.get("end") for line in read(file)[8:]] == [None, "failed"]
    names = [span.name for span in spans.get_finished_spans()]
    assert names.count("chorusline.step") == 3 and names.count("chorusline.run") == 2


async def test_a_killed_rank_is_an_event_with_its_rank_its_step_and_the_seconds(
    session: cl.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "runs.jsonl"
    monkeypatch.setattr(session, "_trackers", checked_trackers(f"jsonl:{file}"))
    began_at = time.time()
    await session.run(train, num_steps=12, lr=1e-4, dies_at=5, died=tmp_path / "died")
    lines = read(file)
    steps = [one for one in lines if "loss" in one]
    assert [one["step"] for one in steps] == [*range(1, 13)], "each step once"
    # Two of each rank; there are three again as soon as another worker has come.
    assert steps[0]["samples"] == 6 and {one["samples"] for one in steps[5:]} <= {4, 6}
    lost = next(one for one in lines if "event" in one)
    assert (lost["event"], lost["lost"], lost["left"]) == ("ranks lost", [1], [])
    assert lost["num_workers"] == 2 + len(lost["came"]) and lost["step"] == 5
    assert began_at < lost["began_at"] <= lost["time"] < time.time()
    assert lines.index(lost) < lines.index(steps[5]), "it stands before the first step behind it"


@pytest.mark.slow
async def test_a_run_that_resumes_goes_on_where_the_earlier_one_is_recorded(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = cl.CheckpointConfig(tmp_path / "place")
    few = {"CPU": 0.1}
    async with cl.Session(
        2, resources_per_worker=few, checkpoint=place, trackers="jsonl"
    ) as session:
        for num_steps in (4, 8, 12):
            # Two steps behind the checkpoint are lost each time, and taken again.
            await session.run(train, num_steps=num_steps, save_at=num_steps - 2, lr=1e-4)
        (file,) = (tmp_path / "runs").iterdir()
        fresh = cl.CheckpointConfig(tmp_path / "place", resume="never")
        options = dataclasses.replace(session._options, checkpoint=fresh)
        monkeypatch.setattr(session, "_options", options)
        await session.run(train, num_steps=2)
        assert len([*(tmp_path / "runs").iterdir()]) == 2, "what begins afresh has its own file"
    lines = read(file)
    begins = [one for one in lines if "run" in one]
    assert len({one["id"] for one in begins}) == 1
    assert [one.get("resumed_step") for one in begins] == [None, 2, 6]
    steps = [one["step"] for one in lines if "loss" in one]
    assert steps == [*range(1, 5), *range(3, 9), *range(7, 13)]


@pytest.mark.slow
async def test_tensorboard_and_mlflow_have_one_run_of_two_that_follow_each_other(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("tensorboard", "mlflow", "alembic"):
        pytest.importorskip(library, reason=f"{library} is not installed (extra trackers)")
    import mlflow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path}/runs.db"
    place = cl.CheckpointConfig(tmp_path / "place")
    trackers = ["tensorboard", cl.MLflowTracker("mine", store)]
    few = {"CPU": 0.1}
    async with cl.Session(
        2, resources_per_worker=few, checkpoint=place, trackers=trackers
    ) as session:
        for num_steps in (5, 8):
            await session.run(train, num_steps=num_steps, save_at=num_steps - 2, lr=1e-4)
    (folder,) = (tmp_path / "runs").iterdir()
    steps = [one.step for one in EventAccumulator(str(folder)).Reload().Scalars("loss")]
    assert steps == [*range(1, 9)]
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(one.step for one in history) == [1, 2, 3, 4, 4, 5, 5, 6, 7, 8]
    assert run.info.status == "FINISHED"
