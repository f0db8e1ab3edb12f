"""Checkpoints beside torch.distributed.checkpoint.async_save (DCP) and torch.save, in alternation.

    python benchmarks/checkpoint.py [--json] [--rounds 7] [--parameters 10000000]

Two ranks on CPUs, a model and AdamW's two moments in float32, written to a temporary folder. Ours
has the moments sharded by ZeroRedundancyOptimizer; torch's has them on both ranks, as with
DistributedDataParallel and a plain optimizer: DCP's planner has each tensor written once, and with
torch.save rank 0 writes all. So all write the same state, bring it to the disk, and end with the
checkpoint whole. "a file" is the yardstick: each rank writes half of the bytes from memory.

pause: until training may go on. total: until the checkpoint is whole. memory: the most that a rank
has, until then, beyond what it had before. The ranks start together.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path[0] = str(Path(__file__).resolve().parents[1])

import chorusline as cl
from benchmarks.alternation import finish, parser, spawn, table
from chorusline.actors.journal import Journal
from chorusline.actors.messages import Assignment, RunRequest
from chorusline.actors.run_status import RunStatus
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.runtime.program.program import Program

_WARM_UP = 2
_WIDTH = 1024
_FORGET_PEAK = "5"  # proc(5): /proc/PID/clear_refs
_WAYS = ("ours", "DCP", "torch.save", "a file")


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
) -> dict[str, list[float]]:
    """By name, one for each round: seconds of pause and total, and MB of memory and on the disk."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store_path}-torch", rank=rank, world_size=num_ranks
    )
    group = cl.Group.create(cl.FileStore(store_path), rank, num_ranks)

    def train(ctx: cl.Context) -> dict[str, list[float]]:
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

        def dcps(path: str) -> Callable[[], Any]:
            return dcp.async_save(state, checkpoint_id=path).result

        def to_disk(path: Path, write: Callable[[Any], object]) -> None:
            with path.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())

        def plain_torchs(path: str) -> Callable[[], Any]:
            if rank == 0:
                Path(path).mkdir()
                to_disk(Path(path) / "state.pt", lambda file: torch.save(state, file))
            ctx.barrier()
            return lambda: None

        def a_file(path: str) -> Callable[[], Any]:
            Path(path).mkdir(exist_ok=True)
            to_disk(Path(path) / str(rank), lambda file: file.write(half))
            ctx.barrier()
            return lambda: None

        found: dict[str, list[float]] = {}
        ways = {"ours": ours, "DCP": dcps, "torch.save": plain_torchs, "a file": a_file}
        for turn in range(_WARM_UP + rounds):
            for name, save in ways.items():
                path = f"{folder}/{name}-{turn}"
                step()
                ctx.barrier()
                before = _resident("VmRSS")
                Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
                start = time.perf_counter()
                wait = save(path)
                paused = time.perf_counter()
                wait()
                ended = time.perf_counter()
                memory = _resident("VmHWM") - before
                ctx.barrier()
                written = sum(f.stat().st_size for f in Path(path).rglob("*") if f.is_file())
                ctx.barrier()
                if rank == 0:
                    shutil.rmtree(path)
                if turn >= _WARM_UP:
                    found.setdefault(f"pause {name}", []).append(paused - start)
                    found.setdefault(f"total {name}", []).append(ended - start)
                    found.setdefault(f"memory {name}", []).append(memory / 1e6)
                    found.setdefault(f"written {name}", []).append(written / 1e6)
        return found

    assignment = Assignment(0, rank, num_ranks, rank, num_ranks, 0)
    request = RunRequest(0, group.timeout_s, keep_reports=False)
    driver: Any = None  # Nobody to tell of a loss: it ends the run.
    lifeline = Lifeline(request, driver, assignment, lambda: group)
    lifeline.begin()
    found = Program(train, {})(assignment, group, Journal(keep=False), lifeline, RunStatus(), None)
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
    # The slower rank of each round: nobody goes on before it, and nothing is whole.
    figures = {
        name: statistics.median(map(max, zip(*(rank[name] for rank in by_rank), strict=True)))
        for name in by_rank[0]
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
