"""What diagnosis costs: one operation with the flight recorder, without, and at DETAIL, in turns.

    python -m benchmarks.speed.recorder [--json] [--rounds 200]

Two ranks, all_reduce of 4 bytes. Without: the call that records does nothing, and no site of the
caller is written into shared memory. The part of it that is ours alone is timed on its own, too.
DETAIL is a second group of the same ranks, which compares before each operation; an all_to_all
compares twice.
"""

from __future__ import annotations

import sys
import time
from types import FrameType

import torch

from benchmarks.alternation import alternate, finish, parser, spawn, table
from chorusline.collectives.contract.call_site import padded_site
from chorusline.collectives.contract.operation import Kind, Operation
from chorusline.collectives.diagnosis.debug import DebugLevel, set_debug_level
from chorusline.collectives.diagnosis.flight_recorder import FlightRecorder
from chorusline.collectives.group import Group
from chorusline.collectives.stores.file_store import FileStore


class _NoRecorder(FlightRecorder):
    def record(self, operation: Operation, frame: FrameType) -> None:
        pass


def measure(rank: int, num_ranks: int, store_path: str, rounds: int) -> dict[str, float]:
    """Seconds: an all_reduce with and without, and the recorder's own part."""
    torch.set_num_threads(1)
    store = FileStore(store_path)
    group = Group.create(store, rank, num_ranks)
    set_debug_level(DebugLevel.DETAIL)
    compared = Group.create(store, rank, num_ranks, name="compared")
    set_debug_level(DebugLevel.OFF)
    tensor = torch.ones(1)
    parts, received = torch.ones(num_ranks), torch.empty(num_ranks)
    recorder = group.recorder
    absent = _NoRecorder(rank, num_ranks, "default", 0)

    def with_recorder() -> None:
        group.recorder = recorder
        group.all_reduce(tensor).wait()

    def without() -> None:
        group.recorder = absent
        group.all_reduce(tensor).wait()

    medians = alternate({"with": with_recorder, "without": without}, rounds=rounds, calls=100)
    group.recorder = recorder
    levels = {
        "all_reduce": lambda: group.all_reduce(tensor).wait(),
        "all_reduce at DETAIL": lambda: compared.all_reduce(tensor).wait(),
        "all_to_all": lambda: group.all_to_all(received, parts).wait(),
        "all_to_all at DETAIL": lambda: compared.all_to_all(received, parts).wait(),
    }
    medians |= alternate(levels, rounds=max(1, rounds // 10), calls=100)
    group.barrier().wait()
    compared.close()
    group.close()

    operation = Operation(Kind.ALL_REDUCE, 0, 0, 1, 0, 0, 60.0)
    region = memoryview(bytearray(64))

    def call() -> None:  # Stands for Group.all_reduce: one frame of ours below the user's.
        recorder.record(operation, sys._getframe(1))
        region[:] = padded_site(operation.caller, operation.caller_at)
        operation.end(None)

    def nothing() -> None:
        pass

    own = []
    for function in (call, nothing):
        started_at = time.perf_counter()
        for _ in range(100_000):
            function()
        own.append((time.perf_counter() - started_at) / 100_000)
    return {**medians, "own": own[0] - own[1]}


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--rounds", type=int, default=200)
    args = flags.parse_args()
    by_rank = spawn(measure, 2, args.rounds)
    figures = {name: max(one[name] for one in by_rank) for name in by_rank[0]}
    table(
        "the flight recorder, 2 ranks, microseconds",
        ("case", "median"),
        [
            ("all_reduce 4 B with it", f"{figures['with'] * 1e6:.2f}"),
            ("all_reduce 4 B without", f"{figures['without'] * 1e6:.2f}"),
            ("its own work per operation", f"{figures['own'] * 1e6:.2f}"),
        ],
    )
    table(
        "debug level DETAIL, 2 ranks, microseconds",
        ("case, 4 B to each rank", "OFF", "DETAIL", "DETAIL/OFF"),
        [
            (
                name,
                f"{figures[name] * 1e6:.1f}",
                f"{figures[f'{name} at DETAIL'] * 1e6:.1f}",
                f"{figures[f'{name} at DETAIL'] / figures[name]:.2f}",
            )
            for name in ("all_reduce", "all_to_all")
        ],
    )
    ratios = {
        "all_reduce/2/4B": figures["with"] / figures["without"],
        "all_reduce/2/4B/DETAIL": figures["all_reduce at DETAIL"] / figures["all_reduce"],
        "all_to_all/2/4B/DETAIL": figures["all_to_all at DETAIL"] / figures["all_to_all"],
    }
    finish(args, ratios, {"seconds": figures, "torch": torch.__version__})


if __name__ == "__main__":
    main()
