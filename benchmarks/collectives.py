"""Our collectives against Gloo, and Ray's, in alternation: medians in microseconds, and the ratio.

    python benchmarks/collectives.py [--json] [--ranks 2,4] [--sizes 4B,64KiB,1MiB,16MiB]
                                     [--no-ray] [--operations all_reduce,awaited,...]

The peers are torch.distributed.ProcessGroupGloo made directly, its fastest form, and
ray.util.collective (its Gloo backend), for which the ranks are Ray actors; with --no-ray they are
plain processes. One thread a rank. A size is that of the larger of the two buffers. "awaited" is
all_reduce in a coroutine: ours awaited, Gloo's future calling back into the loop. Ray has neither
that nor all_to_all, and the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Python puts this folder first on the path, where this file would hide the package it measures.
_ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(_ROOT)

from benchmarks.alternation import alternate, finish, parser, spawn, table
from collectives import FileStore, Group

_SIZES = {"4B": 4, "64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20}
_OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "barrier",
    "awaited",
)
_AWAITS = 20  # in one run of the loop, which itself takes longer than a small operation
_RAY_START_S = 120.0

Way = Callable[[], object]


def measure(
    rank: int,
    num_ranks: int,
    store_path: str,
    sizes: list[str],
    operations: list[str],
    with_ray: bool = False,
) -> dict[str, dict[str, float]]:
    """Medians in seconds: {"all_reduce/2/4B": {"ours": ..., "gloo": ..., "ray": ...}}"""
    torch.set_num_threads(1)
    group = Group.create(FileStore(store_path), rank, num_ranks)
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo", dist.FileStore(store_path + "-gloo", num_ranks)),
        rank,
        num_ranks,
        datetime.timedelta(seconds=60),
    )
    loop = asyncio.new_event_loop()
    if with_ray:
        from ray.util import collective

        collective.init_collective_group(num_ranks, rank, "gloo", "default")
    medians: dict[str, dict[str, float]] = {}

    def case(name: str, nbytes: int, ours: Way, theirs: Way, rays: Way | None) -> None:
        calls = 50 if nbytes <= 1 << 16 else 5 if nbytes <= 1 << 20 else 1
        rounds = 20 if nbytes <= 1 << 20 else 15
        ways = {"ours": ours, "gloo": theirs}
        if with_ray and rays is not None:
            ways["ray"] = rays
        medians[name] = alternate(ways, rounds=rounds, calls=calls)

    def awaited(name: str, nbytes: int, ours: Way, ours_awaited: Way, theirs: Way) -> None:
        calls = 3 if nbytes <= 1 << 16 else 1
        times = _AWAITS if nbytes <= 1 << 16 else 1

        def sync() -> None:
            for _ in range(times):
                ours()

        def in_loop(issue: Way) -> Way:
            async def several() -> None:
                for _ in range(times):
                    await _awaitable(issue())

            return lambda: loop.run_until_complete(several())

        ways = {"ours": in_loop(ours_awaited), "gloo": in_loop(theirs), "ours, waited for": sync}
        found = alternate(ways, rounds=15, calls=calls)
        medians[name] = {way: seconds / times for way, seconds in found.items()}

    for size in sizes:
        nbytes = _SIZES[size]
        tensor = torch.ones(nbytes // 4)
        part = torch.ones(max(1, nbytes // 4 // num_ranks))
        whole = torch.ones(num_ranks * len(part))
        received = torch.empty_like(whole)
        parts = list(whole.view(num_ranks, -1))
        for operation in operations:
            name = f"{operation}/{num_ranks}/{size}"
            match operation:
                case "all_reduce":
                    case(
                        name,
                        nbytes,
                        lambda t=tensor: group.all_reduce(t).wait(),
                        lambda t=tensor: gloo.allreduce([t]).wait(),
                        lambda t=tensor: collective.allreduce(t),
                    )
                case "reduce_scatter":
                    case(
                        name,
                        nbytes,
                        lambda p=part, w=whole: group.reduce_scatter(p, w).wait(),
                        lambda p=part, w=whole: gloo._reduce_scatter_base(p, w).wait(),
                        lambda p=part, w=parts: collective.reducescatter(p, w),
                    )
                case "all_gather":
                    case(
                        name,
                        nbytes,
                        lambda p=part, w=whole: group.all_gather(w, p).wait(),
                        lambda p=part, w=whole: gloo._allgather_base(w, p).wait(),
                        lambda p=part, w=parts: collective.allgather(w, p),
                    )
                case "broadcast":
                    case(
                        name,
                        nbytes,
                        lambda t=tensor: group.broadcast(t).wait(),
                        lambda t=tensor: gloo.broadcast(t, 0).wait(),
                        lambda t=tensor: collective.broadcast(t, 0),
                    )
                case "all_to_all":
                    case(
                        name,
                        nbytes,
                        lambda w=whole, o=received: group.all_to_all(o, w).wait(),
                        lambda w=whole, o=received: gloo.alltoall_base(o, w, [], []).wait(),
                        None,
                    )
                case "awaited":
                    awaited(
                        f"all_reduce_awaited/{num_ranks}/{size}",
                        nbytes,
                        lambda t=tensor: group.all_reduce(t).wait(),
                        lambda t=tensor: group.all_reduce(t),
                        lambda t=tensor: _gloo_future(loop, gloo.allreduce([t])),
                    )
            tensor.fill_(1)  # Sums grow, and arithmetic on infinities takes another time.
            whole.fill_(1)
    if "barrier" in operations:
        case(
            f"barrier/{num_ranks}/0B",
            4,
            lambda: group.barrier().wait(),
            lambda: gloo.barrier().wait(),
            lambda: collective.barrier(),
        )
    group.barrier().wait()
    group.close()
    loop.close()
    return medians


async def _awaitable(work: Any) -> None:
    await work


def _gloo_future(loop: asyncio.AbstractEventLoop, work: Any) -> Awaitable[None]:
    """The cheapest way to await an operation of Gloo's."""
    done: asyncio.Future[None] = loop.create_future()
    future = work.get_future()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set_result, None))
    return done


def spawn_actors(num_ranks: int, *args: Any) -> list[Any]:
    """As `spawn`, but the ranks are Ray actors, where alone ray.util.collective works."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    if not ray.is_initialized():
        ray.init(address="local", num_cpus=num_ranks, include_dashboard=False, log_to_driver=False)

    class Rank:
        def run(self, *args: Any) -> Any:
            from benchmarks.collectives import measure

            return measure(*args, with_ray=True)

    environment = {"env_vars": {"PYTHONPATH": str(_ROOT)}}
    actor = ray.remote(num_cpus=0, runtime_env=environment)(Rank)
    with tempfile.TemporaryDirectory() as folder:
        actors = [actor.remote() for _ in range(num_ranks)]
        path = str(Path(folder) / "store")
        calls = [a.run.remote(rank, num_ranks, path, *args) for rank, a in enumerate(actors)]
        try:
            return ray.get(calls, timeout=_RAY_START_S + 480)
        finally:
            for a in actors:
                ray.kill(a)


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--ranks", default="2,4")
    flags.add_argument("--sizes", default=",".join(_SIZES))
    flags.add_argument("--operations", default=",".join(_OPERATIONS))
    flags.add_argument(
        "--ray",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with ray.util.collective, too",
    )
    args = flags.parse_args()
    operations = args.operations.split(",")
    unknown = sorted(set(operations) - set(_OPERATIONS))
    if unknown:
        flags.error(f"--operations knows {', '.join(_OPERATIONS)}; got {', '.join(unknown)}")
    medians: dict[str, dict[str, float]] = {}
    for num_ranks in map(int, args.ranks.split(",")):
        arguments = (args.sizes.split(","), operations)
        if args.ray:
            by_rank = spawn_actors(num_ranks, *arguments)
        else:
            by_rank = spawn(measure, num_ranks, *arguments)
        # The slowest rank is what a step waits for.
        for name in by_rank[0]:
            medians[name] = {
                way: max(one[name][way] for one in by_rank) for way in by_rank[0][name]
            }
    ratios = {name: m["ours"] / m["gloo"] for name, m in medians.items()}
    to_ray = {name: m["ours"] / m["ray"] for name, m in medians.items() if "ray" in m}
    overhead_s = {
        name: m["ours"] - m["ours, waited for"]
        for name, m in medians.items()
        if "ours, waited for" in m
    }

    def row(name: str, m: dict[str, float]) -> tuple[str, ...]:
        cells = [name, f"{m['ours'] * 1e6:.1f}", f"{m['gloo'] * 1e6:.1f}", f"{ratios[name]:.3f}"]
        if args.ray:
            cells += (
                [f"{m['ray'] * 1e6:.1f}", f"{to_ray[name]:.3f}"] if "ray" in m else ["lacks it", ""]
            )
        return tuple(cells)

    header = ("case", "ours", "gloo", "ours/gloo", *(("ray", "ours/ray") if args.ray else ()))
    table(
        "collective/ranks/bytes, median microseconds",
        header,
        [row(name, m) for name, m in medians.items()],
    )
    if overhead_s:
        table(
            "what awaiting adds to one all_reduce, microseconds",
            ("case", "overhead"),
            [(name, f"{seconds * 1e6:.1f}") for name, seconds in overhead_s.items()],
        )
    figures = {
        "medians_s": medians,
        "ratios_to_ray": to_ray,
        "await_overhead_s": overhead_s,
        "torch": torch.__version__,
    }
    finish(args, ratios, figures)


if __name__ == "__main__":
    main()
