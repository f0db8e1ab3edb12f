"""`chorusline bench`: how fast the collectives are between ranks of this machine.

The columns are those of nccl-tests. Times are medians, with one thread per rank.

    size     bytes of the larger buffer
    algbw    size over time
    busbw    algbw times the bytes that a bandwidth-optimal algorithm moves over each link per byte
             of the buffer: 2(n-1)/n for all_reduce, (n-1)/n where every rank keeps its own part,
             1 for a broadcast. It is comparable between numbers of ranks.
    #wrong   elements with a wrong value, over all ranks
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group
from chorusline.collectives.stores.file_store import FileStore

from ..process.end_with import end_with
from .arguments import WrongUsage

OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "send_recv",
    "barrier",
)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BUDGET_S = 0.5  # for measuring one row
_MOST_CALLS = 500
_MEET_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. size: bytes. time_us: the median on the slowest rank. algbw, busbw: GB/s
    (1e9)."""

    op: str
    size: int
    count: int
    calls: int
    time_us: float
    algbw: float
    busbw: float
    wrong: int


def show_bench(options: argparse.Namespace) -> int:
    """Exit code: 0, or 1 if a result was wrong."""
    operations = OPERATIONS if options.op == "all" else tuple(options.op.split(","))
    unknown = [op for op in operations if op not in OPERATIONS]
    if unknown:
        raise WrongUsage(f"--op knows {', '.join(OPERATIONS)} and all; got {', '.join(unknown)}")
    if options.ranks < 2:  # No link would be measured.
        raise WrongUsage(f"--ranks must be at least 2, got {options.ranks}")
    # Ranks on one GPU would measure its memory in place of a link.
    if options.backend == "nccl" and torch.cuda.device_count() < options.ranks:
        raise WrongUsage(
            f"--backend nccl with --ranks {options.ranks} needs as many GPUs; torch sees "
            f"{torch.cuda.device_count()}"
        )
    sizes = [nbytes(text) for text in options.sizes.split(",")]
    rows = measure(options.ranks, operations, sizes, options.backend)
    if options.json:
        print(json.dumps({"ranks": options.ranks, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"# {options.ranks} ranks by {options.backend}, torch {torch.__version__}")
        for op in operations:
            print(table([row for row in rows if row.op == op]))
    return int(any(row.wrong for row in rows))


def nbytes(text: str) -> int:
    """`64K` in bytes. Raises WrongUsage."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)]
    if not number.isdigit() or unit not in _UNITS or int(number) == 0:
        raise WrongUsage(f"--sizes takes bytes with commas between, as 4,64K,1M; got {text!r}")
    return max(4, int(number) * _UNITS[unit] // 4 * 4)


def table(rows: list[Row]) -> str:
    lines = [
        f"\n# {rows[0].op}, float32",
        f"{'size':>12}{'count':>12}{'time':>12}{'algbw':>10}{'busbw':>10}{'#wrong':>8}",
        f"{'(B)':>12}{'(elements)':>12}{'(us)':>12}{'(GB/s)':>10}{'(GB/s)':>10}{'':>8}",
    ]
    for row in rows:
        lines.append(
            f"{row.size:>12}{row.count:>12}{row.time_us:>12.1f}{row.algbw:>10.2f}"
            f"{row.busbw:>10.2f}{row.wrong:>8}"
        )
    if rows[0].size:
        mean = statistics.mean(row.busbw for row in rows)
        lines.append(f"# average bus bandwidth: {mean:.2f} GB/s")
    return "\n".join(lines)


def bus_factor(op: str, num_ranks: int) -> float:
    """The ratio of busbw to algbw."""
    if op == "all_reduce":
        return 2 * (num_ranks - 1) / num_ranks
    if op in ("reduce_scatter", "all_gather", "all_to_all"):
        return (num_ranks - 1) / num_ranks
    return 1.0


def measure(
    num_ranks: int, operations: tuple[str, ...], sizes: list[int], backend: str
) -> list[Row]:
    """Start the ranks, measure all operations, and end the ranks."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(num_ranks, context, end_with, (os.getpid(),)) as pool,
    ):
        path = str(Path(folder) / "store")
        try:
            calls = [
                pool.submit(_rank, rank, num_ranks, path, operations, sizes, backend)
                for rank in range(num_ranks)
            ]
            rows, *_ = [call.result() for call in calls]
            return rows
        except BaseException:
            # The ranks know nothing of SIGTERM, and the pool would wait until they end.
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _rank(
    rank: int, size: int, path: str, operations: tuple[str, ...], sizes: list[int], backend: str
) -> list[Row]:
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    rows = []
    with Group.create(
        FileStore(path), rank, size, device, backend=backend, timeout_s=_MEET_S
    ) as group:
        for op in operations:
            for asked in [0] if op == "barrier" else sizes:
                rows.append(_row(group, op, asked))
        group.barrier().wait()
    return rows


def _row(group: Group, op: str, asked: int) -> Row:
    call, wrong, nbytes = _case(group, op, asked)
    began_at = time.perf_counter()
    for _ in range(2):
        call()
    once_s = torch.tensor([(time.perf_counter() - began_at) / 2], dtype=torch.float64)
    once_s = once_s.to(group.device)
    group.broadcast(once_s).wait_on_host()  # All ranks must make the same number of calls.
    calls = max(5, min(_MOST_CALLS, int(_BUDGET_S / max(once_s.item(), 1e-6))))
    times = []
    for _ in range(calls):
        began_at = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_at)
    mine = torch.tensor([statistics.median(times), wrong()], dtype=torch.float64)
    mine = mine.to(group.device)
    every = torch.empty(2 * group.size, dtype=torch.float64, device=group.device)
    group.all_gather(every, mine).wait_on_host()
    seconds = every[0::2].max().item()
    bandwidth = nbytes / seconds / 1e9
    return Row(
        op,
        nbytes,
        nbytes // 4,
        calls,
        seconds * 1e6,
        bandwidth,
        bandwidth * bus_factor(op, group.size),
        int(every[1::2].sum().item()),
    )


def _case(group: Group, op: str, nbytes: int) -> tuple[Callable[[], None], Callable[[], int], int]:
    """The call to measure, a function that makes a fresh call and counts its wrong elements, and
    the size in bytes."""
    rank, size = group.rank, group.size
    part = max(1, nbytes // 4 // size)
    in_parts = op in ("reduce_scatter", "all_gather", "all_to_all")
    count = part * size if in_parts else max(1, nbytes // 4)
    whole = torch.empty(count, device=group.device)
    other = torch.empty_like(whole)
    mine = torch.empty(part, device=group.device)
    right, left = (rank + 1) % size, (rank - 1) % size
    total = float(sum(range(1, size + 1)))
    blocks = torch.arange(1.0, size + 1, device=group.device).repeat_interleave(part)

    def fill() -> None:
        whole.fill_(rank + 1.0)
        other.zero_()
        mine.fill_(rank + 1.0)

    # By operation: what issues it, and where it leaves which values.
    cases: dict[str, tuple[Callable[[], list[Work]], torch.Tensor, torch.Tensor | float]] = {
        "all_reduce": (lambda: [group.all_reduce(whole)], whole, total),
        "reduce_scatter": (lambda: [group.reduce_scatter(mine, whole)], mine, total),
        "all_gather": (lambda: [group.all_gather(other, mine)], other, blocks),
        "broadcast": (lambda: [group.broadcast(whole)], whole, 1.0),
        "reduce": (lambda: [group.reduce(whole, 0)], whole, rank + 1.0 if rank else total),
        "all_to_all": (lambda: [group.all_to_all(other, whole)], other, blocks),
        "send_recv": (
            lambda: [group.send(whole, right), group.recv(other, left)],
            other,
            left + 1.0,
        ),
        "barrier": (lambda: [group.barrier()], whole[:0], 0.0),
    }
    issue, result, expected = cases[op]

    def call() -> None:
        for work in issue():
            work.wait()
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)

    def wrong() -> int:
        fill()
        for work in issue():
            work.wait_on_host()  # The elements are looked at below.
        return int((result != expected).sum().item())

    fill()
    if op in ("all_reduce", "reduce"):
        # Zeros: sums of sums would grow to infinity, and arithmetic on infinities is not as fast.
        whole.zero_()
    return call, wrong, 0 if op == "barrier" else count * 4
