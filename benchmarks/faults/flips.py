"""Planted flips of single bits: how many are found, and what the digests cost a step.

    python -m benchmarks.faults.flips [--json] [--flips 1000] [--quiet-steps 1000] [--seed 0]
    python -m benchmarks.faults.flips --cost [--json] [--sizes 2M,25M] [--batches 16,128]
        [--every 1] [--rounds 15]

The first: each second step a seeded bit flips in a tensor of a seeded kind on a seeded rank: the
optimizer's state or the master of an owner or a replica, a reduced gradient before the vote, or
the parameters of any rank. A run with the same steps and no flip runs beside it: parameters and
state of both must be equal, bit by bit. Then come steps without a flip, which must find nothing.

The second: steps with `check_every` of each number of --every and without, in alternation in the
same processes; and the digests of one step by themselves.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import torch

import chorusline as cl
from benchmarks.alternation import alternate, finish, parser, spawn, table
from benchmarks.speed.step import _WIDTHS, make_model, steps_of
from chorusline.runtime.zero.zero_redundancy_optimizer import OptimizerEngine, optimizer_engine_of

KINDS = ("exp_avg", "exp_avg_sq", "step", "master", "reduced gradient", "parameters")


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    # The state of one range is in four pieces, of which three are whole words and read as one.
    layers = [torch.nn.Linear(31, 66), torch.nn.Tanh(), torch.nn.Linear(66, 5)]
    return torch.nn.Sequential(*layers)


def _flip(tensor: torch.Tensor, rng: random.Random) -> None:
    octets = tensor.detach().view(-1).view(torch.uint8)
    octets[rng.randrange(octets.numel())] ^= 1 << rng.randrange(8)


def _tensors(engine: OptimizerEngine, kind: str, distance: int) -> list[torch.Tensor]:
    """What lies in memory on this rank. distance: 0 for its own shard, 1 for its replica."""
    shard = engine.shard
    if kind == "parameters":
        return [bucket.flat[: bucket.plan.content] for bucket in shard.buckets]
    if kind == "reduced gradient":
        found = [bucket.ranges[distance].reduced for bucket in shard.buckets]
        return [tensor for tensor in found if tensor is not None and tensor.numel()]
    assert shard.optimizer is not None
    return [
        mine.tensor if kind == "master" else shard.optimizer.state[mine.tensor][kind]
        for bucket, pieces in zip(shard.buckets, shard.pieces, strict=True)
        for mine in pieces
        if mine.range is bucket.ranges[distance] and mine.piece.numel
    ]


class _Planted:
    """A model and its optimizer, whose memory flips where `plant` says."""

    def __init__(self, group: cl.Group, dtype: torch.dtype, check_every: int | None) -> None:
        self.model = cl.DistributedDataParallel(_model().to(dtype), group)
        self.optimizer = cl.ZeroRedundancyOptimizer(
            self.model, torch.optim.AdamW, lr=1e-3, replicas=2, check_every=check_every
        )
        self.engine = optimizer_engine_of(self.optimizer)
        self._vote = self.engine.digests.vote

    def step(self, batch: torch.Tensor, plant: tuple[str, int, int] | None = None) -> None:
        """plant: kind, distance and seed, on the rank whose memory flips."""
        self.model(batch).square().mean().backward()
        if plant is not None and plant[0] == "reduced gradient":
            self._plant_before_vote(*plant)
        elif plant is not None:
            self._plant(*plant)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _plant(self, kind: str, distance: int, seed: int) -> None:
        rng = random.Random(seed)
        _flip(rng.choice(_tensors(self.engine, kind, distance)), rng)

    def _plant_before_vote(self, kind: str, distance: int, seed: int) -> None:
        """The reduction is complete when the rank votes."""

        def vote(num_steps: int) -> torch.Tensor | None:
            self.engine.digests.vote = self._vote  # type: ignore[method-assign]
            self._plant(kind, distance, seed)
            return self._vote(num_steps)

        self.engine.digests.vote = vote  # type: ignore[method-assign]

    def bits(self) -> list[torch.Tensor]:
        """Of all that this rank keeps."""
        held = self.engine.shard.held()
        return [
            part.tensors[name].detach().view(-1).view(torch.uint8)
            for where in held.ranges
            for _, part in held.overlapping(where)
            for name in sorted(part.tensors)
        ] + [p.detach().reshape(-1).view(torch.uint8) for p in self.model.parameters()]


def plant_flips(
    rank: int, num_ranks: int, store_path: str, num_flips: int, num_quiet: int, seed: int
) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = dict.fromkeys(("planted", "missed", "misnamed", "false_alarms", "other_bits"), 0)
    by_kind = dict.fromkeys(KINDS, 0)
    with cl.Group.create(cl.FileStore(store_path), rank, num_ranks) as group:
        rng = random.Random(seed)  # The same on all ranks.
        for dtype in (torch.float32, torch.bfloat16):
            kinds = [kind for kind in KINDS if dtype != torch.float32 or kind != "master"]
            flipped = _Planted(group, dtype, 1)
            clean = _Planted(group, dtype, None)
            found = flipped.optimizer.corrections
            data = torch.Generator().manual_seed(seed + rank)
            for _ in range(2):  # Then there is state to flip.
                batch = torch.randn(4, 31, generator=data).to(dtype)
                flipped.step(batch)
                clean.step(batch)
            for _ in range(num_flips // 2):
                victim, kind = rng.randrange(num_ranks), rng.choice(kinds)
                plant = (kind, rng.randrange(2), rng.getrandbits(30))
                batch = torch.randn(4, 31, generator=data).to(dtype)
                before = len(found)
                flipped.step(batch, plant if rank == victim else None)
                counts["planted"] += 1
                by_kind[kind] += 1
                fresh = found[before:]
                expected = kind if kind in ("parameters", "reduced gradient") else "optimizer state"
                counts["missed"] += not fresh
                counts["misnamed"] += bool(fresh) and [(one.rank, one.what) for one in fresh] != [
                    (victim, expected)
                ]
                if kind != "parameters":  # Else the step is left out.
                    clean.step(batch)
                before = len(found)
                batch = torch.randn(4, 31, generator=data).to(dtype)
                flipped.step(batch)
                clean.step(batch)
                counts["false_alarms"] += len(found) - before
                counts["other_bits"] += _differ(flipped, clean)
            before = len(found)
            for _ in range(num_quiet // 2):
                flipped.step(torch.randn(4, 31, generator=data).to(dtype))
            counts["false_alarms"] += len(found) - before
    return {**counts, "by_kind": by_kind, "quiet_steps": num_quiet // 2 * 2}


def _differ(one: _Planted, other: _Planted) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(one.bits(), other.bits(), strict=True))


def measure_cost(
    rank: int,
    num_ranks: int,
    store_path: str,
    size: str,
    num_rows: int,
    every: list[int],
    rounds: int,
) -> dict[str, float]:
    """Median seconds of a step, by way."""
    torch.set_num_threads(1)
    # A turn has as many checks for each step as a long run.
    num_steps = math.lcm(*every) * max(1, {"2M": 10, "25M": 2}.get(size, 1) // math.lcm(*every))
    batch = torch.randn(num_rows, _WIDTHS[size][0])
    with cl.Group.create(cl.FileStore(store_path), rank, num_ranks) as group:
        ways = {}
        for name, check_every in [("without", None), *((f"every {n}", n) for n in every)]:
            model = cl.DistributedDataParallel(make_model(size), group)
            optimizer = cl.ZeroRedundancyOptimizer(
                model, torch.optim.AdamW, lr=1e-4, replicas=2, check_every=check_every
            )
            ways[name] = steps_of(model, optimizer, nullcontext, batch, num_steps)
        engine = optimizer_engine_of(optimizer)
        digests, portions = engine.digests, engine.shard.portions

        def alone() -> None:
            number = optimizer.num_steps
            for _ in range(num_steps):
                digests.vote(number)
                read = [digests.read_written(number, portion) for portion in portions]
                digests.note(number, [one for written in read for one in written])

        ways["digests alone"] = alone
        medians = alternate(ways, rounds=rounds, calls=1)
        return {name: seconds / num_steps for name, seconds in medians.items()}


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--flips", type=int, default=1000)
    flags.add_argument("--quiet-steps", type=int, default=1000)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--ranks", type=int, default=0, help="default: 3, and 2 with --cost")
    flags.add_argument("--cost", action="store_true", help="measure what the digests cost")
    flags.add_argument("--sizes", default="2M,25M")
    flags.add_argument("--batches", default="16,128", help="rows per rank and step")
    flags.add_argument("--every", default="1", help="numbers of steps for check_every")
    flags.add_argument("--rounds", type=int, default=15)
    args = flags.parse_args()
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {}
    every = [int(number) for number in args.every.split(",")]
    if args.cost:
        for size in args.sizes.split(","):
            for rows in map(int, args.batches.split(",")):
                given = (size, rows, every, args.rounds)
                by_rank = spawn(measure_cost, args.ranks or 2, *given)
                step_s = {name: max(one[name] for one in by_rank) for name in by_rank[0]}
                figures[f"{size}/{rows}"] = step_s
                for name in step_s.keys() - {"without"}:
                    ratios[f"{name}/{size}/{rows}"] = step_s[name] / step_s["without"]
        cells = [
            (case, *(f"{s * 1e3:.2f}" for s in step_s.values())) for case, step_s in figures.items()
        ]
        table("ms a step", ("parameters/rows", *next(iter(figures.values()))), cells)
        table("over without", ("case", "ratio"), [(k, f"{v:.3f}") for k, v in ratios.items()])
    else:
        by_rank = spawn(plant_flips, args.ranks or 3, args.flips, args.quiet_steps, args.seed)
        figures = {
            **by_rank[0],
            "other_bits": max(one["other_bits"] for one in by_rank),
            "missed": max(one["missed"] for one in by_rank),
            "misnamed": max(one["misnamed"] for one in by_rank),
            "false_alarms": max(one["false_alarms"] for one in by_rank),
        }
        table("flips", ("", "count"), [(k, str(v)) for k, v in figures.items() if k != "by_kind"])
        table("planted in", ("", "count"), [(k, str(v)) for k, v in figures["by_kind"].items()])
    finish(args, ratios, figures)
    if not args.cost and any(
        figures[name] for name in ("missed", "misnamed", "false_alarms", "other_bits")
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
