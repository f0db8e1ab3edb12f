"""Checkpoints beside torch.distributed.checkpoint.async_save (DCP) and torch.save, in alternation.

    python -m benchmarks.speed.checkpoint [--json] [--rounds 7] [--parameters 10000000]

Two ranks on CPUs, a model and AdamW's two moments in float32, written to a temporary folder. Ours
has the moments sharded by ZeroRedundancyOptimizer; torch's has them on both ranks, as with
DistributedDataParallel and a plain optimizer: DCP's planner has each tensor written once, and with
torch.save rank 0 writes all. So all write the same state, bring it to the disk, and end with the
checkpoint whole. Before that each rank of DCP copies all of the state, and each of ours the half
that it writes; both keep the memory of the copy. "a file" is the yardstick: each rank writes half
of the bytes from memory.

pause: until training may continue.
total: until the checkpoint is whole.
memory: the most that a rank has, until then, beyond what it had before. The ranks start together.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import chorusline as cl
from benchmarks.alternation import attempt, finish, parser, spawn, table
from chorusline.actors.messages.messages import Assignment, RunRequest
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.reporting.report_buffer import ReportBuffer
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.runtime.program.program import Program

_WARM_UP = 2
_WIDTH = 1024
_FORGET_PEAK = "5"  # proc(5): /proc/PID/clear_refs
_WAYS = ("ours", "DCP", "torch.save", "a file")
_MEASURED = ("pause", "total", "memory", "written")


def _resident(field: str) -> int:
    """Bytes of this process's memory, by a field of /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) << 10


def make_model(num_parameters: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = max(1, num_parameters // (_WIDTH * _WIDTH))
    return torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))


def measure(
    rank: int, num_ranks: int, store_path: str, folder: str, num_parameters: int, rounds: int
) -> dict[str, list[list[float]]]:
    """By way, for each round: seconds of pause and total, MB of memory and on the disk. A peer that
    has failed on this rank has no rounds."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_path}-torch",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=30),  # The other ranks are there again before ours has passed.
    )
    group = cl.Group.create(cl.FileStore(store_path), rank, num_ranks)

    def train(ctx: cl.Context) -> dict[str, list[list[float]]]:
        model = ctx.register("model", cl.DistributedDataParallel(make_model(num_parameters)))
        optim = ctx.register("optimizer", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW))

        def step() -> None:
            model(torch.ones(1, _WIDTH)).sum().backward()
            optim.step()
            optim.zero_grad()

        step()
        plain = make_model(num_parameters)
        adamw = torch.optim.AdamW(plain.parameters())
        plain(torch.ones(1, _WIDTH)).sum().backward()
        adamw.step()
        moments = {str(number): state for number, state in adamw.state_dict()["state"].items()}
        state = {"model": plain.state_dict(), "optimizer": moments}

        numel = sum(parameter.numel() for parameter in plain.parameters())
        half = os.urandom(4 * 3 * numel // num_ranks)

        def ours(path: str) -> Callable[[], Any]:
            return ctx.save(path).wait

        # async_save's own, but one for all saves: without it each save has to allocate its copy.
        stager = DefaultStager(StagingOptions(False, False, False, False))

        def dcps(path: str) -> Callable[[], Any]:
            return dcp.async_save(state, checkpoint_id=path, async_stager=stager).result

        def to_disk(path: Path, write: Callable[[Any], object]) -> None:
            with path.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())

        def plain_torchs(path: str) -> Callable[[], Any]:
            if rank == 0:
                Path(path).mkdir()
                to_disk(Path(path) / "state.pt", lambda file: torch.save(state, file))
            return lambda: None

        def a_file(path: str) -> Callable[[], Any]:
            Path(path).mkdir(exist_ok=True)
            to_disk(Path(path) / str(rank), lambda file: file.write(half))
            return lambda: None

        def measured(save: Callable[[str], Callable[[], Any]], path: str) -> list[float]:
            before = _resident("VmRSS")
            Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
            start = time.perf_counter()
            wait = save(path)
            paused = time.perf_counter()
            wait()
            ended = time.perf_counter()
            return [paused - start, ended - start, (_resident("VmHWM") - before) / 1e6]

        found: dict[str, list[list[float]]] = {name: [] for name in _WAYS}
        failed: set[str] = set()
        ways = {"ours": ours, "DCP": dcps, "torch.save": plain_torchs, "a file": a_file}
        for turn in range(_WARM_UP + rounds):
            for name, save in ways.items():
                path = f"{folder}/{name}-{turn}"
                step()
                ctx.barrier()
                values: list[float] = []
                if name == "ours":
                    values = measured(save, path)
                elif name not in failed:
                    values = attempt(name, lambda s=save, p=path: measured(s, p), [])
                ctx.barrier()
                written = sum(f.stat().st_size for f in Path(path).rglob("*") if f.is_file())
                ctx.barrier()
                if rank == 0:
                    shutil.rmtree(path, ignore_errors=not values)
                if not values:
                    failed.add(name)
                    found[name].clear()
                elif turn >= _WARM_UP:
                    found[name].append([*values, written / 1e6])
        stager.close()
        return found

    assignment = Assignment(0, rank, num_ranks, rank, num_ranks, 0)
    request = RunRequest(0, group.timeout_s, keep_reports=False)
    driver: Any = None  # Nobody to tell of a loss: it ends the run.
    lifeline = Lifeline(request, driver, assignment, lambda: group)
    lifeline.begin()
    found = Program(train, {})(
        assignment, group, ReportBuffer(keep=False), lifeline, RunStatus(), None
    )
    group.close()
    dist.destroy_process_group()
    assert isinstance(found, dict)
    return found


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--parameters", type=int, default=10_000_000)
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        by_rank = spawn(measure, 2, folder, args.parameters, args.rounds)
    report(args, by_rank)


def report(args: argparse.Namespace, by_rank: list[dict[str, list[list[float]]]]) -> None:
    # The slower rank of each round: before it no rank continues, and nothing is whole. If a peer
    # has failed on a rank, there is no round that all ranks have.
    figures = {
        f"{what} {name}": statistics.median(
            [
                max(rank[number] for rank in of_ranks)
                for of_ranks in zip(*(rank[name] for rank in by_rank), strict=False)
            ]
            or [math.nan]
        )
        for name in _WAYS
        for number, what in enumerate(_MEASURED)
    }
    megabytes = figures["written a file"]
    table(
        f"a checkpoint of {megabytes:.0f} MB, 2 ranks",
        ("", "pause ms", "total ms", "memory MB", "written MB", "MB/s"),
        [
            (
                name,
                f"{figures[f'pause {name}'] * 1e3:.1f}",
                f"{figures[f'total {name}'] * 1e3:.1f}",
                f"{figures[f'memory {name}']:.1f}",
                f"{figures[f'written {name}']:.1f}",
                f"{megabytes / figures[f'total {name}']:.0f}",
            )
            for name in _WAYS
        ],
    )
    ratios = {
        f"checkpoint_{what}/{peer}": figures[f"{what} ours"] / figures[f"{what} {peer}"]
        for what in ("pause", "total")
        for peer in _WAYS[1:]
    }
    finish(args, ratios, {**figures, "megabytes": megabytes, "rounds": args.rounds})


if __name__ == "__main__":
    main()
