"""Checkpoints against torch.distributed.checkpoint.async_save, in alternation.

    python benchmarks/checkpoint.py [--json] [--rounds 7] [--parameters 10000000]

Two ranks on CPUs, a model and AdamW's two moments in float32, written to a temporary folder. Ours
has the moments sharded by ZeroRedundancyOptimizer; torch's has them on both ranks, as with
DistributedDataParallel and a plain optimizer, and its planner has each tensor written once. So both
write the same bytes, bring them to the disk, and end with the checkpoint whole.

pause: until training may go on. total: until the checkpoint is whole. The ranks start together.
"""

from __future__ import annotations

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
from actors.journal import Journal
from actors.messages import Assignment, RunRequest
from actors.run_status import RunStatus
from actors.worker.lifeline import Lifeline
from benchmarks.alternation import finish, parser, spawn, table
from runtime.program.program import Program

_WARM_UP = 2
_WIDTH = 1024


def make_model(num_parameters: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = max(1, num_parameters // (_WIDTH * _WIDTH))
    return torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))


def measure(
    rank: int, num_ranks: int, store_path: str, folder: str, num_parameters: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds by name, one for each round: pause and total of ours and of torch's."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store_path}-torch", rank=rank, world_size=num_ranks
    )
    group = cl.Group.create(cl.FileStore(store_path), rank, num_ranks)

    def train(ctx: cl.Context) -> dict[str, list[float]]:
        model = ctx.register("model", cl.DistributedDataParallel(make_model(num_parameters)))
        optim = ctx.register("optimizer", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW))
        model(torch.ones(1, _WIDTH)).sum().backward()
        optim.step()

        plain = make_model(num_parameters)
        adamw = torch.optim.AdamW(plain.parameters())
        plain(torch.ones(1, _WIDTH)).sum().backward()
        adamw.step()
        moments = {str(number): state for number, state in adamw.state_dict()["state"].items()}
        state = {"model": plain.state_dict(), "optimizer": moments}

        def ours(path: str) -> Callable[[], Any]:
            return ctx.save(path).wait

        def torchs(path: str) -> Callable[[], Any]:
            return dcp.async_save(state, checkpoint_id=path).result

        seconds: dict[str, list[float]] = {}
        for turn in range(_WARM_UP + rounds):
            for name, save in (("ours", ours), ("torch", torchs)):
                path = f"{folder}/{name}-{turn}"
                ctx.barrier()
                start = time.perf_counter()
                wait = save(path)
                paused = time.perf_counter()
                wait()
                ended = time.perf_counter()
                ctx.barrier()
                if rank == 0:
                    shutil.rmtree(path)
                if turn >= _WARM_UP:
                    seconds.setdefault(f"pause {name}", []).append(paused - start)
                    seconds.setdefault(f"total {name}", []).append(ended - start)
        return seconds

    assignment = Assignment(0, rank, num_ranks, rank, num_ranks, 0)
    request = RunRequest(0, group.timeout_s, keep_reports=False)
    driver: Any = None  # Nobody to tell of a loss: it ends the run.
    lifeline = Lifeline(request, driver, assignment, lambda: group)
    lifeline.begin()
    seconds = Program(train, {})(
        assignment, group, Journal(keep=False), lifeline, RunStatus(), None
    )
    group.close()
    dist.destroy_process_group()
    assert isinstance(seconds, dict)
    return seconds


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
    megabytes = 3 * 4 * args.parameters / 1e6
    table(
        f"a checkpoint of {megabytes:.0f} MB, 2 ranks, milliseconds",
        ("", "ours", "torch", "ours/torch"),
        [
            (
                what,
                f"{figures[f'{what} ours'] * 1e3:.1f}",
                f"{figures[f'{what} torch'] * 1e3:.1f}",
                f"{figures[f'{what} ours'] / figures[f'{what} torch']:.2f}",
            )
            for what in ("pause", "total")
        ],
    )
    ratios = {
        f"checkpoint_{what}": figures[f"{what} ours"] / figures[f"{what} torch"]
        for what in ("pause", "total")
    }
    finish(args, ratios, {**figures, "megabytes": megabytes, "rounds": args.rounds})


if __name__ == "__main__":
    main()
