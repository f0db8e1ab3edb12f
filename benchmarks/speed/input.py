"""What data cost a step: samples that take 5 ms to make, fetched ahead and not, beside torch.

    python -m benchmarks.speed.input [--json] [--ranks 1] [--workers 2] [--sample-ms 5]
        [--step-ms 60] [--batch 8] [--steps 16] [--rounds 20]

One training process a rank takes the same step with batches from five sources, in alternation: no
data work (rows of a tensor) and slow samples fetched ahead, each by `ctx.shard` and by torch's
DataLoader alone; and slow samples made in the training thread by `ctx.shard`. A slow sample waits,
as for a disk or a network, and computes nothing: on a machine with few cores computing would take
them from the step. A step is timed from one batch to the next, without the first of each turn; the
time to the first batch, with loader processes that stay from turn to turn, stands beside it.

A ratio is taken within each round, of the median steps of two turns a second apart, and the median
of the rounds is told: a machine that is slower for some seconds is so for both. Every other round
goes through the sources backwards.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

import torch
from torch.utils.data import DataLoader, Dataset

import chorusline as cl
from benchmarks.alternation import attempt, finish, parser, quartiles, table

_WIDTH = 512
OURS, OURS_AHEAD = "ctx.shard, no data work", "ctx.shard, fetched ahead"
PEER, PEER_AHEAD = "DataLoader, no data work", "DataLoader, fetched ahead"
IN_THREAD = "ctx.shard, in the training thread"
_SKIPPED = 4  # steps of a turn, until as many batches are made ahead as there may be


class Rows(Dataset[torch.Tensor]):
    """Rows of a tensor, each of which takes `sample_s` seconds to make."""

    def __init__(self, num_samples: int, sample_s: float) -> None:
        self.rows = torch.randn(num_samples, _WIDTH)
        self.sample_s = sample_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> torch.Tensor:
        if self.sample_s:
            time.sleep(self.sample_s)
        return self.rows[number]


def stepper(step_s: float, batch_size: int) -> Callable[[torch.Tensor], None]:
    """A training step of about `step_s` seconds: as many passes as that takes."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(4)]
    model = cl.DistributedDataParallel(torch.nn.Sequential(*layers))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=1e-6)

    def step(batch: torch.Tensor, num_passes: int) -> None:
        with model.no_sync():
            for _ in range(num_passes - 1):
                model(batch).square().mean().backward()
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()

    batch = torch.randn(batch_size, _WIDTH)
    seconds = []
    for _ in range(12):
        began_at = time.perf_counter()
        step(batch, 10)
        seconds.append((time.perf_counter() - began_at) / 10)
    # Every rank takes as many, or the ranks would wait for each other.
    of_pass = model.group.all_reduce(
        torch.tensor([statistics.median(seconds)], dtype=torch.float64), cl.ReduceOp.MAX
    )
    of_pass.wait()
    num_passes = max(1, round(step_s / of_pass.result().item()))
    return lambda batch: step(batch, num_passes)


def timed(batches: Iterable[torch.Tensor], step: Callable[[torch.Tensor], None]) -> list[float]:
    """Seconds from the call to the first batch, and then of each step with its batch."""
    marks = [time.perf_counter()]
    for number, batch in enumerate(batches):
        if number == 0:
            marks.append(time.perf_counter())
        step(batch)
        marks.append(time.perf_counter())
    return [later - former for former, later in itertools.pairwise(marks)]


def train(ctx: cl.Context, args: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    size, workers = args["batch"], args["workers"]
    num_mine = size * args["steps"]
    slow = Rows(num_mine * ctx.world_size, args["sample_s"])
    ready = Rows(num_mine * ctx.world_size, 0.0)
    step = stepper(args["step_s"], size)
    ahead = {"num_workers": workers, "persistent_workers": True}
    mine = Rows(num_mine, args["sample_s"])
    loader = DataLoader(mine, size, shuffle=True, multiprocessing_context="fork", **ahead)
    few = Rows(size * 6 * ctx.world_size, args["sample_s"])
    ways: dict[str, Callable[[], Iterable[torch.Tensor]]] = {
        OURS: lambda: ctx.shard(ready, size, epoch=turn),
        OURS_AHEAD: lambda: ctx.shard(slow, size, epoch=turn, **ahead),
        PEER: lambda: DataLoader(Rows(num_mine, 0.0), size, shuffle=True),
        PEER_AHEAD: lambda: loader,
        IN_THREAD: lambda: ctx.shard(few, size, epoch=turn),
    }
    failed: set[str] = set()

    def batches_of(name: str) -> Iterator[torch.Tensor]:
        """Those of the source. Once a peer has failed, rows of its size take their places: each
        step has every rank."""
        if name not in (PEER, PEER_AHEAD):
            yield from ways[name]()
            return
        given = (batch for make in [ways[name]] for batch in make())
        for _ in range(args["steps"]):
            batch = None if name in failed else attempt(name, lambda: next(given), None)
            if batch is None:
                failed.add(name)
            yield ready.rows[:size] if batch is None else batch

    told: dict[str, dict[str, list[list[float]]]] = {
        name: {"first": [], "steps": []} for name in ways
    }
    names = list(ways)
    for turn in range(args["rounds"] + 1):
        for name in reversed(names) if turn % 2 else names:
            ctx.barrier()
            first, *steps = timed(batches_of(name), step)
            if name in failed:
                told[name] = {"first": [], "steps": []}
            elif turn > 0:  # In turn 0 the loader processes start.
                told[name]["first"].append([first])
                told[name]["steps"].append(steps[_SKIPPED:])
    return told


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--ranks", type=int, default=1)
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--sample-ms", type=float, default=5.0)
    flags.add_argument("--step-ms", type=float, default=60.0)
    flags.add_argument("--batch", type=int, default=8)
    flags.add_argument("--steps", type=int, default=16)
    flags.add_argument("--rounds", type=int, default=20)
    args = flags.parse_args()
    asked = {
        "batch": args.batch,
        "workers": args.workers,
        "steps": args.steps,
        "rounds": args.rounds,
        "sample_s": args.sample_ms / 1e3,
        "step_s": args.step_ms / 1e3,
    }
    report(args, cl.run(train, num_workers=args.ranks, args=asked))


def report(
    args: argparse.Namespace, by_rank: Sequence[dict[str, dict[str, list[list[float]]]]]
) -> None:
    # Of rank 0: the others take each step with it. A peer has no times where any rank's has failed.
    told = {
        name: one if all(rank[name]["steps"] for rank in by_rank) else {"first": [], "steps": []}
        for name, one in by_rank[0].items()
    }
    quartiles_s = {name: quartiles([*itertools.chain(*one["steps"])]) for name, one in told.items()}
    first_s = {name: [*itertools.chain(*one["first"])] for name, one in told.items()}

    def ratio(of: str, over: str) -> float:
        rounds = zip(told[of]["steps"], told[over]["steps"], strict=False)
        return statistics.median(
            [statistics.median(one) / statistics.median(other) for one, other in rounds]
            or [math.nan]
        )

    table(
        f"One step of {args.ranks} rank(s), {args.batch} samples of {args.sample_ms:g} ms, "
        f"{args.workers} loader processes; quartiles, ms",
        ["", "25 %", "median", "75 %", "to the first batch"],
        [
            [
                name,
                *(f"{1e3 * part:.1f}" for part in quartiles_s[name]),
                f"{1e3 * statistics.median(first_s[name] or [math.nan]):.1f}",
            ]
            for name in told
        ],
    )
    ratios = {
        "fetched ahead / no data work": ratio(OURS_AHEAD, OURS),
        "the same of torch's DataLoader": ratio(PEER_AHEAD, PEER),
        "ours / DataLoader, fetched ahead": ratio(OURS_AHEAD, PEER_AHEAD),
        "ours / DataLoader, no data work": ratio(OURS, PEER),
        "in the training thread / no data work": ratio(IN_THREAD, OURS),
    }
    table(
        "Ratios, the median of the rounds",
        ["", ""],
        [[name, f"{r:.3f}"] for name, r in ratios.items()],
    )
    figures = {
        "quartiles_s": quartiles_s,
        "first_batch_s": {name: one["first"] for name, one in told.items()},
        "steps_s": {name: one["steps"] for name, one in told.items()},
        "args": vars(args),
    }
    finish(args, ratios, figures)


if __name__ == "__main__":
    main()
