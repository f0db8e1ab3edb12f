"""Our collectives against Gloo, in alternation: medians in microseconds, and the ratio.

    python benchmarks/collectives.py [--json] [--ranks 2,4] [--sizes 4B,64KiB,1MiB,16MiB]

The peer is torch.distributed.ProcessGroupGloo made directly, its fastest form. One thread a rank.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

# Python puts this folder first on the path, where this file would hide the package it measures.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.alternation import alternate, finish, parser, spawn, table
from collectives import FileStore, Group

_SIZES = {"4B": 4, "64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20}


def measure(
    rank: int, num_ranks: int, store_path: str, sizes: list[str]
) -> dict[str, dict[str, float]]:
    """Medians in seconds: {"all_reduce/2/4B": {"ours": ..., "gloo": ...}}"""
    torch.set_num_threads(1)
    group = Group.create(FileStore(store_path), rank, num_ranks)
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo", dist.FileStore(store_path + "-gloo", num_ranks)),
        rank,
        num_ranks,
        datetime.timedelta(seconds=60),
    )
    medians: dict[str, dict[str, float]] = {}

    def case(name: str, nbytes: int, ours: Callable[[], None], theirs: Callable[[], None]) -> None:
        calls = 50 if nbytes <= 1 << 16 else 5 if nbytes <= 1 << 20 else 1
        rounds = 20 if nbytes <= 1 << 20 else 15
        medians[name] = alternate({"ours": ours, "gloo": theirs}, rounds=rounds, calls=calls)

    for size in sizes:
        tensor = torch.ones(_SIZES[size] // 4)
        case(
            f"all_reduce/{num_ranks}/{size}",
            _SIZES[size],
            lambda t=tensor: group.all_reduce(t).wait(),
            lambda t=tensor: gloo.allreduce([t]).wait(),
        )
    case(
        f"barrier/{num_ranks}/0B",
        4,
        lambda: group.barrier().wait(),
        lambda: gloo.barrier().wait(),
    )
    group.barrier().wait()
    group.close()
    return medians


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--ranks", default="2,4")
    flags.add_argument("--sizes", default=",".join(_SIZES))
    args = flags.parse_args()
    medians: dict[str, dict[str, float]] = {}
    for num_ranks in map(int, args.ranks.split(",")):
        by_rank = spawn(measure, num_ranks, args.sizes.split(","))
        # The slowest rank is what a step waits for.
        for name in by_rank[0]:
            medians[name] = {
                way: max(one[name][way] for one in by_rank) for way in by_rank[0][name]
            }
    ratios = {name: m["ours"] / m["gloo"] for name, m in medians.items()}
    table(
        "collective/ranks/bytes, median microseconds",
        ("case", "ours", "gloo", "ours/gloo"),
        [
            (name, f"{m['ours'] * 1e6:.1f}", f"{m['gloo'] * 1e6:.1f}", f"{ratios[name]:.3f}")
            for name, m in medians.items()
        ],
    )
    finish(args, ratios, {"medians_s": medians, "torch": torch.__version__})


if __name__ == "__main__":
    main()
