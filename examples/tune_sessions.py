"""Ray Tune looks for a learning rate; each of its trials trains on two workers of its own.

    pip install -e '.[tune]'
    python examples/tune_sessions.py

A trial reserves a small share of a CPU for itself and one bundle for each worker. The session that
it opens runs its workers in these bundles, so that Tune counts them, starts as many trials as fit,
and ends the workers with the trial. Each report of the workers is passed on to Tune, which stops
trials that do badly.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch.nn.functional import mse_loss

import chorusline as cl

NUM_WORKERS = 2
CPUS_OF_WORKER = 0.4


def train(ctx: cl.Context, lr: float, num_epochs: int) -> float:
    """Fit a line; the ranks take turns with the samples. Returns the last loss."""
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 96).reshape(-1, 1)
    dataset = torch.utils.data.TensorDataset(inputs, 3 * inputs + 1)
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1).to(ctx.device))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=lr)
    loss = torch.zeros(())
    for epoch in ctx.epochs(num_epochs):
        for x, y in ctx.shard(dataset, batch_size=8, epoch=epoch):
            loss = mse_loss(model(x), y)
            loss.backward()
            optim.step()
            optim.zero_grad()
        mean = ctx.reduce(loss.detach()).item()
        ctx.report(loss=mean, epoch=epoch)
    return loss.item()


def trial(config: dict[str, Any]) -> None:
    """One trial: a session, whose reports of rank 0 go to Tune."""

    def on_report(report: cl.Report) -> None:
        if report.rank == 0:
            tune.report({"loss": report.values["loss"], "epoch": report.values["epoch"]})

    async def main() -> None:
        async with cl.Session(
            NUM_WORKERS,
            resources_per_worker={"CPU": CPUS_OF_WORKER},
            on_report=on_report,
            startup_timeout_s=180,  # Several trials start their workers at the same time.
            progress=False,
        ) as session:
            await session.run(train, lr=config["lr"], num_epochs=config["num_epochs"])

    asyncio.run(main())


def search(rates: list[float], num_epochs: int, storage_path: str | None = None) -> tune.ResultGrid:
    bundles = [{"CPU": 0.1}, *({"CPU": CPUS_OF_WORKER} for _ in range(NUM_WORKERS))]
    tuner = tune.Tuner(
        tune.with_resources(trial, tune.PlacementGroupFactory(bundles)),
        param_space={"lr": tune.grid_search(rates), "num_epochs": num_epochs},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", scheduler=ASHAScheduler(grace_period=2, max_t=num_epochs)
        ),
        run_config=tune.RunConfig(storage_path=storage_path, verbose=0),
    )
    return tuner.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.001, 0.01, 0.1, 0.5])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--storage-path", default=os.path.abspath("out/tune"))  # noqa: PTH100
    args = parser.parse_args()
    found = search(args.rates, args.epochs, args.storage_path)
    for number in range(len(found)):
        result = found[number]
        assert result.config is not None
        if result.error is not None:
            raise SystemExit(f"lr {result.config['lr']:g} has failed: {result.error}")
        metrics = result.metrics
        assert metrics is not None
        print(
            f"lr {result.config['lr']:<6g} {metrics['training_iteration']} epochs, "
            f"loss {metrics['loss']:.5f}"
        )
    best = found.get_best_result()
    assert best.config is not None and best.metrics is not None
    print(f"best: lr {best.config['lr']:g}, loss {best.metrics['loss']:.5f}")
