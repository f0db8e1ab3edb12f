"""What steps of a fixed global batch cost, and what they gain with a slow rank.

    python -m benchmarks.speed.steps_cost [--json] [--ranks 2] [--rounds 9]
        [--only bits,shard,throttled]

`deterministic/2M`: `ctx.steps` with the same bits on any number of ranks over the same steps
without, four micro-batches to a rank. `steps_vs_shard/2M`: `ctx.steps` with one micro-batch to a
rank over a loop over `ctx.shard` with equal batches, outside Join. Linear layers of 2 M parameters,
micro-batches of 16, ZeRO with AdamW, and plain DDP, one thread a rank; all ways in turns in the
same processes.

`throttled`: one of two ranks is stopped for half of each 20 ms, from outside. What the two can do
together then is measured as well: each computes micro-batches alone, and waits for nobody. How much
of that is done by `ctx.steps`, which deals micro-batches by speed, and by torch's
DistributedDataParallel; and how much whole micro-batches allow, if the speeds are known.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import chorusline as cl
from benchmarks.alternation import finish, parser, spawn, table
from benchmarks.speed.step import make_model
from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.data.dealer import Dealer
from chorusline.runtime.data.fetching.options import FetchOptions
from chorusline.runtime.data.steps.step_rows import DatasetRows
from chorusline.runtime.data.steps.steps import Steps
from chorusline.runtime.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer

WIDTH, BATCH = 512, 16
NUM_STEPS = 50
"""Of an epoch: of fewer, its beginning would be a good part, which costs a training nothing."""

MICRO_BATCHES = 4
"""Of each rank in a step, in the case of the bits."""

PERIOD_S = 0.02
THROTTLED_BATCH, THROTTLED_MICRO_BATCHES, THROTTLED_STEPS = 256, 16, 12


Way = Callable[[], float | None]
"""Trains for some steps; may return the seconds that count."""


class Rows:
    """(WIDTH,) each."""

    def __init__(self, length: int) -> None:
        self._rows = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._rows[number]


class Rank:
    """One rank, and the ways it trains. A way is an epoch of NUM_STEPS steps.

    Each way has a group of its own, as `ctx.steps` takes a step with all models of its group.
    """

    def __init__(self, rank: int, num_ranks: int, path: str) -> None:
        torch.set_num_threads(1)
        self.rank, self.num_ranks, self._path = rank, num_ranks, path
        self._groups: list[cl.Group] = []
        self.group = self.new_group()

    def new_group(self) -> cl.Group:
        store = cl.FileStore(f"{self._path}-{len(self._groups)}")
        self._groups.append(cl.Group.create(store, self.rank, self.num_ranks))
        return self._groups[-1]

    def close(self) -> None:
        self.group.barrier().wait()
        for group in reversed(self._groups):
            group.close()

    def trained(self, group: cl.Group, sharded: bool) -> tuple[cl.DistributedDataParallel, Any]:
        model = cl.DistributedDataParallel(make_model("2M"), group)
        if sharded:
            return model, ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-4)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def steps(
        self,
        per_rank: int,
        *,
        sharded: bool = True,
        deterministic: bool = True,
        batch: int = BATCH,
        num_steps: int = NUM_STEPS,
    ) -> Callable[[], None]:
        """A way: the steps of `ctx.steps`, with `per_rank` micro-batches for each rank."""
        group = self.new_group()
        model, optim = self.trained(group, sharded)
        global_batch_size = batch * per_rank * self.num_ranks
        rows = Rows(global_batch_size * num_steps)

        def run() -> None:
            steps = Steps(
                DatasetRows(
                    rows,
                    epoch=0,
                    seed=0,
                    shuffle=True,
                    options=FetchOptions(collate_fn=torch.stack),
                ),
                global_batch_size,
                batch,
                key="",
                group=lambda: group,
                dealer=Dealer(self.rank, self.num_ranks),
                deterministic=deterministic,
            )
            for step in steps:
                for micro_batch in step:
                    model(micro_batch).square().mean().backward()
                optim.step()
                optim.zero_grad()

        return run

    def shard(self, *, sharded: bool = True) -> Callable[[], None]:
        """A way: a loop over `ctx.shard` with equal batches, which needs no Join."""
        model, optim = self.trained(self.new_group(), sharded)
        rows = Rows(BATCH * self.num_ranks * NUM_STEPS)

        def run() -> None:
            batches = Shard(
                rows, BATCH, rank=self.rank, world_size=self.num_ranks, collate_fn=torch.stack
            )
            for batch in batches:
                model(batch).square().mean().backward()
                optim.step()
                optim.zero_grad()

        return run

    def seconds_of(self, ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
        """Of each way, by round; the ways in turns, each begun by all ranks at once."""
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        # With several models in a process, an epoch begins with a collection of garbage, which
        # would look at all that was imported. A training has one model.
        gc.freeze()
        for turn in range(2 + rounds):
            # In the other order each second time: neither way always follows the same one.
            for name in sorted(ways, reverse=turn % 2 == 1):
                self.group.barrier().wait()
                began_at = time.perf_counter()
                took_s = ways[name]()
                if turn >= 2:
                    seconds[name].append(took_s or time.perf_counter() - began_at)
        return seconds


def measure_bits(rank: int, num_ranks: int, path: str, rounds: int) -> dict[str, list[float]]:
    one = Rank(rank, num_ranks, path)
    ways = {
        f"{name}{'' if sharded else ', plain'}": one.steps(
            MICRO_BATCHES, sharded=sharded, deterministic=name == "the same bits"
        )
        for name in ("the same bits", "any bits")
        for sharded in (True, False)
    }
    seconds = one.seconds_of(ways, rounds)
    one.close()
    return seconds


def measure_shard(rank: int, num_ranks: int, path: str, rounds: int) -> dict[str, list[float]]:
    one = Rank(rank, num_ranks, path)
    ways = {
        "steps": one.steps(1),
        "shard": one.shard(),
        "steps, plain": one.steps(1, sharded=False),
        "shard, plain": one.shard(sharded=False),
    }
    seconds = one.seconds_of(ways, rounds)
    one.close()
    return seconds


# -- a rank that is throttled ----------------------------------------------------------------------


class Throttle:
    """Stops a process for half of each period, from a thread of another one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle")

    def _run(self) -> None:
        while not self._ends.is_set():
            os.kill(self._pid, signal.SIGSTOP)
            time.sleep(PERIOD_S / 2)
            os.kill(self._pid, signal.SIGCONT)
            time.sleep(PERIOD_S / 2)

    def __enter__(self) -> Throttle:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def measure_throttled(rank: int, num_ranks: int, path: str, rounds: int) -> dict[str, list[float]]:
    """Each way undisturbed and, while rank 0 throttles the last rank, again."""
    one = Rank(rank, num_ranks, path)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(path + "-gloo", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    per_rank = THROTTLED_MICRO_BATCHES // num_ranks
    model = TorchDDP(make_model("2M"), gradient_as_bucket_view=True)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = Rows(THROTTLED_BATCH * per_rank)._rows.split(THROTTLED_BATCH)

    def torch_ddp() -> None:
        for _ in range(THROTTLED_STEPS):
            with model.no_sync():
                for batch in batches[:-1]:
                    model(batch).square().mean().backward()
            model(batches[-1]).square().mean().backward()
            optim.step()
            optim.zero_grad()

    free = make_model("2M")

    def alone() -> float:
        began_at = time.perf_counter()
        for _ in range(THROTTLED_STEPS):
            for batch in batches:
                free(batch).square().mean().backward()
        took_s = time.perf_counter() - began_at
        one.group.barrier().wait()  # Rank 0 throttles the other until that is done, too.
        return took_s

    ways: dict[str, Way] = {
        "alone": alone,
        "steps": one.steps(per_rank, batch=THROTTLED_BATCH, num_steps=THROTTLED_STEPS),
        "torch ddp": torch_ddp,
    }
    # The last rank's process, for rank 0.
    pids = torch.tensor([os.getpid() * (rank == num_ranks - 1)])
    one.group.all_reduce(pids).wait()

    def disturbed(way: Way) -> Way:
        def run() -> float | None:
            with Throttle(int(pids[0])) if rank == 0 else contextlib.nullcontext():
                return way()

        return run

    ways |= {f"{name}, throttled": disturbed(way) for name, way in ways.items()}
    seconds = one.seconds_of(ways, rounds)
    one.close()
    dist.destroy_process_group()
    return seconds


# -- figures ---------------------------------------------------------------------------------------


def slowest(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """By way and round, the seconds of the rank that took longest."""
    return {
        name: [max(of_round) for of_round in zip(*(one[name] for one in by_rank), strict=True)]
        for name in by_rank[0]
    }


def possible(by_rank: list[dict[str, list[float]]]) -> list[float]:
    """By round, what the ranks can do together while one is throttled; 1: what they do else."""
    speeds = [of_rounds(one["alone"], one["alone, throttled"]) for one in by_rank]
    return [statistics.mean(of_round) for of_round in zip(*speeds, strict=True)]


def allowed_by_dealing(by_rank: list[dict[str, list[float]]]) -> list[float]:
    """By round, the part of it that the best deal of whole micro-batches allows, of two ranks."""
    num, allowed = THROTTLED_MICRO_BATCHES, []
    for paces in zip(*(one["alone, throttled"] for one in by_rank), strict=True):
        first, second = paces
        best = min(max(k * first, (num - k) * second) for k in range(num + 1))
        allowed.append(num / (1 / first + 1 / second) / best)
    return allowed


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def of_rounds(ours: list[float], theirs: list[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--only", default="bits,shard,throttled")
    args = flags.parse_args()
    only = args.only.split(",")
    step_ms: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, float]] = {}

    def take(by_rank: list[dict[str, list[float]]], num_steps: int) -> dict[str, list[float]]:
        seconds = slowest(by_rank)
        for name, values in seconds.items():
            case = f"{name} ({num_steps} steps)"
            step_ms[case] = spread([value / num_steps * 1e3 for value in values])
        return seconds

    if "bits" in only:
        seconds = take(spawn(measure_bits, args.ranks, args.rounds), NUM_STEPS)
        for more, case in (("", "deterministic/2M"), (", plain", "deterministic_plain/2M")):
            pairs = seconds[f"the same bits{more}"], seconds[f"any bits{more}"]
            ratios[case] = spread(of_rounds(*pairs))
    if "shard" in only:
        seconds = take(spawn(measure_shard, args.ranks, args.rounds), NUM_STEPS)
        for more, case in (("", "steps_vs_shard/2M"), (", plain", "steps_vs_shard_plain/2M")):
            pairs = seconds[f"steps{more}"], seconds[f"shard{more}"]
            ratios[case] = spread(of_rounds(*pairs))
    if "throttled" in only:
        by_rank = spawn(measure_throttled, 2, args.rounds)
        seconds, can = take(by_rank, THROTTLED_STEPS), possible(by_rank)
        for name, case in (("steps", "throttled"), ("torch ddp", "throttled_torch")):
            done = of_rounds(seconds[name], seconds[f"{name}, throttled"])
            ratios[f"{case}/of_possible"] = spread(of_rounds(done, can))
            # If the throttled rank had exactly half its speed, and the other one all of it.
            ratios[f"{case}/of_three_quarters"] = spread([one / 0.75 for one in done])
        ratios["throttled/allowed_by_dealing"] = spread(allowed_by_dealing(by_rank))
    for title, rows, places in (("ms a step", step_ms, 2), ("ratios, by round", ratios, 3)):
        cells = [
            (name, *(f"{one[of]:.{places}f}" for of in ("median", "low", "high")))
            for name, one in rows.items()
        ]
        table(title, ("case", "median", "quartile", "quartile"), cells)
    medians = {name: one["median"] for name, one in ratios.items()}
    finish(args, medians, {"step_ms": step_ms, "ratios": ratios})


if __name__ == "__main__":
    main()
