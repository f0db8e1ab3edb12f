"""The peer of recovery.py: Ray Train, torch's DistributedDataParallel over Gloo, and a
checkpoint every few steps, from which it restarts when a worker is lost."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ray import cloudpickle

from benchmarks.speed.recovery_training import (
    NUM_WORKERS,
    PATIENCE_S,
    STEP_S,
    Log,
    batch_of,
    make_model,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def peer_train(config: dict[str, Any]) -> None:
    import ray.train
    import torch.distributed as dist

    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    log = Log(config["logs"], f"rank-{rank}-{os.getpid()}")
    model = torch.nn.parallel.DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as path:
            state = torch.load(Path(path) / "state.pt")
        model.module.load_state_dict(state["model"])
        optim.load_state_dict(state["optim"])
        step = state["step"]
    log.note("pid", os.getpid())
    log.note("begins-at", step)
    stop = torch.zeros(1)
    while True:
        stop.fill_(float(Path(config["stop"]).exists()))
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if stop.item():
            return
        time.sleep(STEP_S)
        model(batch_of(rank, step)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        step += 1
        log.note("step", step)
        if step % config["every"]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if rank == 0:
                state = {"model": model.module.state_dict(), "optim": optim.state_dict()}
                torch.save({**state, "step": step}, Path(folder) / "state.pt")
                kept = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step}, checkpoint=kept)


def peer(trials: int, seed: int, every: int, results: list[dict[str, float]]) -> None:
    """results: to which each trial is added when it is over."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        logs, stop = Path(folder) / "logs", Path(folder) / "stop"
        logs.mkdir()
        trainer = TorchTrainer(
            peer_train,
            train_loop_config={"logs": str(logs), "stop": str(stop), "every": every},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=NUM_WORKERS, resources_per_worker={"CPU": 0.5}
            ),
            run_config=RunConfig(
                storage_path=folder,
                failure_config=FailureConfig(max_failures=-1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        )
        failed: list[BaseException] = []

        def fit() -> None:
            try:
                trainer.fit()
            except BaseException as error:  # Told by the thread that waits for it.
                failed.append(error)

        thread = threading.Thread(target=fit, daemon=True)
        thread.start()

        def entries(since: float) -> list[tuple[float, str, int, str]]:
            told = Log.read(str(logs))
            return sorted((at, word, n, name) for name, at, word, n in told if at > since)

        def wait_for(since: float, is_there: Callable[[list[Any]], bool]) -> list[Any]:
            deadline = time.monotonic() + PATIENCE_S
            while not is_there(found := entries(since)):
                if failed:
                    raise failed[0]
                if time.monotonic() > deadline:
                    raise TimeoutError(f"Ray Train took no step in {PATIENCE_S:g} s")
                time.sleep(0.005)
            return found

        since = 0.0
        for trial in range(trials):
            found = wait_for(
                since, lambda told: sum(word == "step" for _, word, *_ in told) > 5 * NUM_WORKERS
            )
            pids = [n for _, word, n, _ in found if word == "pid"][-NUM_WORKERS:]
            time.sleep(draw.random() * 0.5)
            since = time.monotonic()
            os.kill(draw.choice(pids), signal.SIGKILL)
            before = max(n for at, word, n, _ in entries(0.0) if word == "step" and at <= since)
            begun = wait_for(since, lambda told: any(word == "begins-at" for _, word, *_ in told))
            begins_at = next(at for at, word, *_ in begun if word == "begins-at")
            found = wait_for(
                begins_at,
                lambda told, b=before: any(word == "step" and n > b for _, word, n, _ in told),
            )
            steps = [(at, n) for at, word, n, _ in found if word == "step"]
            again = min(at for at, _ in steps) - since
            back = min(at for at, n in steps if n > before) - since
            from_step = next(n for _, word, n, _ in begun if word == "begins-at")
            results.append({"seconds": again, "back": back, "steps_lost": before - from_step})
            print(f"Ray Train {trial}: {again:.3f} s, back after {back:.3f} s", flush=True)
        stop.touch()
        thread.join(PATIENCE_S)
