"""Our collectives against Gloo, and Ray's, in alternation: medians in microseconds, and the ratio.

    python -m benchmarks.speed.collectives [--json] [--ranks 2,4] [--sizes 4B,64KiB,1MiB,16MiB]
                                     [--no-ray] [--mpi] [--operations all_reduce,awaited,...]

The peers are torch.distributed.ProcessGroupGloo made directly, its fastest form, and
ray.util.collective (its Gloo backend), for which the ranks are Ray actors; with --no-ray they are
plain processes; with --mpi mpiexec starts them, and the peer besides Gloo is MPI, by mpi4py on
prepared numpy arrays. One thread a rank. A size is that of the larger of the two buffers. "awaited"
is all_reduce in a coroutine: ours awaited, Gloo's future calling back into the loop. Ray has
neither that nor all_to_all, and the table says so.

Each call takes other buffers than the one before, out of more memory than a processor's cache
holds (4 B: 1024 tensors), and the ranks meet before each turn of a way. The medians are those of
all calls after the warm-up, on the rank where they are largest; beside them stand the quartiles.
"memcpy" is a copy of a tensor of that size, which all ranks make at once, in the same turns;
"copies" is what our algorithm moves on a rank, counted in such copies (`copies_moved`). A case in
which ours is slower is marked and listed.
"symmetric" is ours on tensors of `group.empty_symmetric`, which the ranks read in place where there
is a core for each.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import math
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.alternation import attempt, by_time, finish, parser, quartiles, spawn, table, timed
from benchmarks.speed.collectives_mpi import calls_of, spawn_by_mpiexec
from chorusline.collectives.group import Group
from chorusline.collectives.shared_memory.algorithms import DIRECT_BYTES
from chorusline.collectives.shared_memory.in_place import IN_PLACE_BYTES
from chorusline.collectives.stores.file_store import FileStore

_ROOT = Path(__file__).resolve().parents[2]

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
_IN_PLACE = ("all_reduce", "reduce_scatter", "all_gather")
_AWAITS = 20  # in one run of the loop, which itself takes longer than a small operation
_ROTATED_BYTES = 64 << 20  # of each buffer's kind; twice the L3 cache of the project's machine
_MOST_SETS = 1024


class Buffers:
    """The tensors of one call. nbytes: of the larger buffer. make: a tensor of (n,)."""

    def __init__(self, nbytes: int, num_ranks: int, make: Callable[[int], torch.Tensor]) -> None:
        self.tensor = make(nbytes // 4)
        self.part = make(max(1, nbytes // 4 // num_ranks))
        self.whole = make(num_ranks * len(self.part))
        self.received = torch.zeros_like(self.whole)
        self.parts = list(self.whole.view(num_ranks, -1))
        self.arrays = SimpleNamespace(
            **{k: v.numpy() for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        )
        self.fill()

    def fill(self) -> None:
        for tensor in (self.tensor, self.part, self.whole):
            tensor.fill_(1)


Call = Callable[[Buffers], Any]
Quartiles = dict[str, dict[str, tuple[float, float, float]]]


def copies_moved(operation: str, nbytes: int, num_ranks: int) -> float | None:
    """What a rank reads and writes in shared_memory/algorithms.py, in copies of the larger buffer
    (each reads and writes all of it); None where no bytes move. For a broadcast: on any rank."""
    n, others = num_ranks, num_ranks - 1
    additions = 3 / 2 * others  # Each reads two addends and writes the sum.
    match operation:
        case "all_reduce" | "all_reduce_awaited" if nbytes <= DIRECT_BYTES:
            return 1 + additions
        case "all_reduce" | "all_reduce_awaited":
            return (others + additions + 1 + others) / n
        case "reduce_scatter":
            return (others + additions) / n
        case "all_gather":
            return (1 + others + 1) / n
        case "broadcast":
            return 1.0
        case "all_to_all":
            return (others + others + 1) / n
    return None


def copies_in_place(operation: str, num_ranks: int) -> float:
    """The same for symmetric tensors (shared_memory/in_place.py)."""
    n, others = num_ranks, num_ranks - 1
    additions = 3 / 2 * others + (n > 2)  # More than two go through a buffer in the cache.
    match operation:
        case "all_reduce":
            return (additions + others) / n
        case "reduce_scatter":
            return additions / n
    return 1.0


def measure(
    rank: int,
    num_ranks: int,
    store_path: str,
    sizes: list[str],
    operations: list[str],
    with_ray: bool = False,
    comm: Any = None,
) -> Quartiles:
    """Quartiles in seconds: {"all_reduce/2/4B": {"ours": ..., "gloo": ..., "ray": ...}}.

    comm: MPI's communicator, if MPI is compared with.
    """
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

        attempt(
            "ray",
            lambda: collective.init_collective_group(num_ranks, rank, "gloo", "default"),
            None,
        )  # If that fails, each of its calls does.
    by_mpi = {} if comm is None else calls_of(comm)
    found: Quartiles = {}
    sets: list[Buffers] = []
    symmetric_sets: list[Buffers] = []

    def meet() -> None:
        group.barrier().wait()

    def turning(call: Call, buffers: list[Buffers]) -> Callable[[], object]:
        turns = itertools.cycle(buffers)
        return lambda: call(next(turns))

    def case(name: str, nbytes: int, ours: Call, theirs: Call, rays: Call | None) -> None:
        calls = 50 if nbytes <= 1 << 16 else 5 if nbytes <= 1 << 20 else 1
        rounds = 20 if nbytes <= 1 << 20 else 15
        ways = {"ours": ours, "gloo": theirs, "memcpy": lambda b: b.received.copy_(b.whole)}
        if with_ray and rays is not None:
            ways["ray"] = rays
        if name.split("/")[0] in by_mpi:
            ways["mpi"] = by_mpi[name.split("/")[0]]
        turns = {way: turning(call, sets) for way, call in ways.items()}
        if name.split("/")[0] in _IN_PLACE and nbytes > IN_PLACE_BYTES:
            turns["symmetric"] = turning(ours, symmetric_sets)
            for buffers in symmetric_sets:
                ours(buffers)  # Others map a tensor when it comes to them for the first time.
        times = timed(turns, rounds=rounds, calls=calls, meet=meet)
        found[name] = {way: quartiles(seconds) for way, seconds in times.items()}

    def awaited(name: str, nbytes: int, ours: Call, ours_awaited: Call, theirs: Call) -> None:
        calls = 3 if nbytes <= 1 << 16 else 1
        times = _AWAITS if nbytes <= 1 << 16 else 1
        turns = itertools.cycle(sets)

        def sync() -> None:
            for _ in range(times):
                ours(next(turns))

        def in_loop(issue: Call) -> Callable[[], object]:
            async def several() -> None:
                for _ in range(times):
                    await _awaitable(issue(next(turns)))

            return lambda: loop.run_until_complete(several())

        ways = {"ours": in_loop(ours_awaited), "gloo": in_loop(theirs), "ours, waited for": sync}
        for way, seconds in timed(ways, rounds=15, calls=calls, meet=meet).items():
            first, median, third = quartiles(seconds)
            found.setdefault(name, {})[way] = (first / times, median / times, third / times)

    for size in sizes:
        nbytes = _SIZES[size]
        num_sets = min(_MOST_SETS, max(2, -(-_ROTATED_BYTES // nbytes)))
        sets = [Buffers(nbytes, num_ranks, torch.empty) for _ in range(num_sets)]
        symmetric_sets = [
            Buffers(nbytes, num_ranks, group.empty_symmetric)
            for _ in range(num_sets if nbytes > IN_PLACE_BYTES else 0)
        ]
        for operation in operations:
            name = f"{operation}/{num_ranks}/{size}"
            match operation:
                case "all_reduce":
                    case(
                        name,
                        nbytes,
                        lambda b: group.all_reduce(b.tensor).wait(),
                        lambda b: gloo.allreduce([b.tensor]).wait(),
                        lambda b: collective.allreduce(b.tensor),
                    )
                case "reduce_scatter":
                    case(
                        name,
                        nbytes,
                        lambda b: group.reduce_scatter(b.part, b.whole).wait(),
                        lambda b: gloo._reduce_scatter_base(b.part, b.whole).wait(),
                        lambda b: collective.reducescatter(b.part, b.parts),
                    )
                case "all_gather":
                    case(
                        name,
                        nbytes,
                        lambda b: group.all_gather(b.whole, b.part).wait(),
                        lambda b: gloo._allgather_base(b.whole, b.part).wait(),
                        lambda b: collective.allgather(b.parts, b.part),
                    )
                case "broadcast":
                    case(
                        name,
                        nbytes,
                        lambda b: group.broadcast(b.tensor).wait(),
                        lambda b: gloo.broadcast(b.tensor, 0).wait(),
                        lambda b: collective.broadcast(b.tensor, 0),
                    )
                case "all_to_all":
                    case(
                        name,
                        nbytes,
                        lambda b: group.all_to_all(b.received, b.whole).wait(),
                        lambda b: gloo.alltoall_base(b.received, b.whole, [], []).wait(),
                        None,
                    )
                case "awaited":
                    awaited(
                        f"all_reduce_awaited/{num_ranks}/{size}",
                        nbytes,
                        lambda b: group.all_reduce(b.tensor).wait(),
                        lambda b: group.all_reduce(b.tensor),
                        lambda b: _gloo_future(loop, gloo.allreduce([b.tensor])),
                    )
            for buffers in (*sets, *symmetric_sets):
                buffers.fill()  # Sums grow, and arithmetic on infinities takes another time.
    if "barrier" in operations:
        sets = [Buffers(4, num_ranks, torch.empty)]
        case(
            f"barrier/{num_ranks}/0B",
            4,
            lambda b: group.barrier().wait(),
            lambda b: gloo.barrier().wait(),
            lambda b: collective.barrier(),
        )
        del found[f"barrier/{num_ranks}/0B"]["memcpy"]
    group.barrier().wait()
    group.close()
    loop.close()
    return found


async def _awaitable(work: Any) -> None:
    await work


def _gloo_future(loop: asyncio.AbstractEventLoop, work: Any) -> Awaitable[None]:
    """The cheapest way to await an operation of Gloo's."""
    done: asyncio.Future[None] = loop.create_future()
    future = work.get_future()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set_result, None))
    return done


def _copies_of(case: str) -> float | None:
    operation, num_ranks, size = case.split("/")
    return copies_moved(operation, _SIZES.get(size, 0), int(num_ranks))


def spawn_actors(num_ranks: int, *args: Any) -> list[Any]:
    """As `spawn`, but the ranks are Ray actors, where alone ray.util.collective works."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    if not ray.is_initialized():
        ray.init(address="local", num_cpus=num_ranks, include_dashboard=False, log_to_driver=False)

    class Rank:
        def run(self, *args: Any) -> Any:
            from benchmarks.speed.collectives import measure

            return measure(*args, with_ray=True)

    environment = {"env_vars": {"PYTHONPATH": str(_ROOT)}}
    actor = ray.remote(num_cpus=0, runtime_env=environment)(Rank)
    with tempfile.TemporaryDirectory() as folder:
        actors = [actor.remote() for _ in range(num_ranks)]
        path = str(Path(folder) / "store")
        calls = [a.run.remote(rank, num_ranks, path, *args) for rank, a in enumerate(actors)]
        try:
            return ray.get(calls)
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
    flags.add_argument("--mpi", action="store_true", help="compare with MPI, and not with Ray")
    args = flags.parse_args()
    operations = args.operations.split(",")
    unknown = sorted(set(operations) - set(_OPERATIONS))
    if unknown:
        flags.error(f"--operations knows {', '.join(_OPERATIONS)}; got {', '.join(unknown)}")
    peer = "mpi" if args.mpi else "ray" if args.ray else ""  # besides Gloo
    spreads: Quartiles = {}
    for num_ranks in map(int, args.ranks.split(",")):
        arguments = (args.sizes.split(","), operations)
        by_rank: list[Quartiles] = []
        if args.mpi:
            by_rank = attempt("mpi", lambda n=num_ranks, a=arguments: spawn_by_mpiexec(n, *a), [])
        elif args.ray:
            by_rank = attempt("ray", lambda n=num_ranks, a=arguments: spawn_actors(n, *a), [])
        has_peer = bool(by_rank)
        by_rank = by_rank or spawn(measure, num_ranks, *arguments)
        # The slowest rank is what a step waits for.
        for name in by_rank[0]:
            spreads[name] = {
                way: max(
                    (one[name][way] for one in by_rank), key=lambda quarters: by_time(quarters[1])
                )
                for way in by_rank[0][name]
            }
            if peer and not has_peer:
                spreads[name][peer] = (math.nan,) * 3
    medians = {
        name: {way: quarters[1] for way, quarters in ways.items()} for name, ways in spreads.items()
    }
    ratios = {name: m["ours"] / m["gloo"] for name, m in medians.items()}
    to_peer = {name: m["ours"] / m[peer] for name, m in medians.items() if peer in m}
    to_memcpy = {name: m["ours"] / m["memcpy"] for name, m in medians.items() if "memcpy" in m}
    moved = {name: _copies_of(name) for name in medians}
    lost = [name for name in medians if max(ratios[name], to_peer.get(name, 0.0)) > 1]
    overhead_s = {
        name: m["ours"] - m["ours, waited for"]
        for name, m in medians.items()
        if "ours, waited for" in m
    }

    def row(name: str, m: dict[str, float]) -> tuple[str, ...]:
        def timing(way: str) -> tuple[str, str]:
            first, median, third = spreads[name][way]
            return f"{median * 1e6:.1f}", f"({first * 1e6:.1f}, {third * 1e6:.1f})"

        mark = " lost" if name in lost else ""
        copies = moved[name]
        cells = [name, *timing("ours"), *timing("gloo"), f"{ratios[name]:.3f}{mark}"]
        if peer:
            cells += (
                [f"{m[peer] * 1e6:.1f}", f"{to_peer[name]:.3f}"] if peer in m else ["lacks it", ""]
            )
        cells += (
            [f"{m['memcpy'] * 1e6:.1f}", f"{to_memcpy[name]:.2f}"] if "memcpy" in m else ["", ""]
        )
        return *cells, "" if copies is None else f"{copies:.2f}"

    header = (
        *("case", "ours", "quartiles", "gloo", "quartiles", "ours/gloo"),
        *((peer, f"ours/{peer}") if peer else ()),
        *("memcpy", "ours/memcpy", "copies"),
    )
    table(
        f"collective/ranks/bytes, median microseconds; torch {torch.__version__} and its Gloo",
        header,
        [row(name, m) for name, m in medians.items()],
    )
    print(f"slower than a peer: {', '.join(lost) or 'none'}")
    symmetric = {name: m["symmetric"] for name, m in medians.items() if "symmetric" in m}
    if symmetric:
        table(
            "symmetric tensors, median microseconds",
            *(("case", "symmetric", "quartiles", "/gloo", "/ours", "/memcpy", "copies"),),
            [
                (
                    *(name, f"{seconds * 1e6:.1f}"),
                    "({:.1f}, {:.1f})".format(*(1e6 * s for s in spreads[name]["symmetric"][::2])),
                    *(f"{seconds / medians[name][way]:.3f}" for way in ("gloo", "ours", "memcpy")),
                    f"{copies_in_place(name.split('/')[0], int(name.split('/')[1])):.2f}",
                )
                for name, seconds in symmetric.items()
            ],
        )
    for name, seconds in symmetric.items():
        if name.startswith("all_reduce/2/"):
            ratios[f"memcpy/{name.split('/')[-1]}"] = seconds / medians[name]["memcpy"]
    if overhead_s:
        table(
            "what awaiting adds to one all_reduce, microseconds",
            ("case", "overhead"),
            [(name, f"{seconds * 1e6:.1f}") for name, seconds in overhead_s.items()],
        )
    figures = {
        "medians_s": medians,
        "quartiles_s": spreads,
        "lost": lost,
        "ratios_to_memcpy": to_memcpy,
        "copies_moved": moved,
        "ratios_to_peer": to_peer,
        "await_overhead_s": overhead_s,
        "torch": torch.__version__,
    }
    finish(args, ratios, figures)


if __name__ == "__main__":
    main()
