"""NCCL: its code numbers everywhere, its behaviour where there is a GPU.

The GPU tests run every rank as a process. Ranks beyond the number of GPUs share them, which NCCL
allows from 2.30 on.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from collectives.errors import CollectiveError, CollectiveTimeout, GroupAborted
from collectives.group import Group
from collectives.nccl import DTYPE_CODES, REDUCE_OP_CODES, connect, load_nccl
from collectives.operation import DTYPES
from collectives.reduce_op import ReduceOp
from collectives.store import FileStore, HashStore, Store
from collectives.work import Work

HAS_CUPY = importlib.util.find_spec("cupy") is not None
SIZES = (0, 1, 10, 1_000_003)


def test_every_dtype_of_the_contract_has_the_number_of_nccl_h() -> None:
    # enum ncclDataType_t of nccl.h, 2.32.
    header = {"int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
    assert {str(d).removeprefix("torch."): code for d, code in DTYPE_CODES.items()} == header
    assert set(DTYPE_CODES) == set(DTYPES)


def test_every_reduce_op_has_the_number_of_nccl_h() -> None:
    # enum ncclRedOp_t of nccl.h, 2.32: ncclMax comes before ncclMin.
    header = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
    assert {op.name: code for op, code in REDUCE_OP_CODES.items()} == header
    assert set(REDUCE_OP_CODES) == set(ReduceOp)


@pytest.mark.skipif(HAS_CUPY, reason="CuPy is installed here")
def test_without_cupy_the_error_names_the_extra_to_install() -> None:
    with pytest.raises(ImportError, match=r"chorusline\[cuda13\].* chorusline\[cuda12\]"):
        connect(HashStore(), 0, 1, torch.device("cuda:0"), 0)


@pytest.mark.skipif(not HAS_CUPY, reason="needs CuPy (no GPU): pip install chorusline[cuda13]")
def test_cupy_agrees_on_the_numbers_and_gives_an_id_of_bytes() -> None:
    nccl = load_nccl()
    for dtype, code in DTYPE_CODES.items():
        assert code == getattr(nccl, f"NCCL_{str(dtype).removeprefix('torch.').upper()}")
    for op, code in REDUCE_OP_CODES.items():
        assert code == getattr(nccl, f"NCCL_{'PROD' if op is ReduceOp.PRODUCT else op.name}")
    assert isinstance(nccl.get_unique_id(), bytes)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_out_of_range_is_refused_before_nccl_sees_it(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank must be in \[0, 2\), got {rank}"):
        connect(HashStore(), rank, 2, torch.device("cuda:0"), 0)


# -- GPU ---------------------------------------------------------------------------------------

Body = Callable[[Group, Store], None]


def _why_no_gpu() -> str:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return "" if HAS_CUPY else "CuPy is not installed: pip install chorusline[cuda13]"


def _rank_main(body: Body, path: Path, rank: int, size: int, failures: SimpleQueue[str]) -> None:
    try:
        num_devices = torch.cuda.device_count()
        if num_devices < size:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
            os.environ["NCCL_MAX_CTAS"] = "2"  # Several ranks' kernels must fit one GPU at once.
        store = FileStore(path)
        with Group.create(store, rank, size, f"cuda:{rank % num_devices}", timeout_s=60) as group:
            body(group, store)
    except BaseException:
        failures.put(f"rank {rank}:\n{traceback.format_exc()}")


def run_ranks(body: Body, size: int, tmp_path: Path) -> None:
    """Run `body` on `size` ranks, a process each; fail with the tracebacks of those that fail."""
    if torch.cuda.device_count() < size and load_nccl().get_version() < 23000:
        pytest.skip(f"{size} ranks on {torch.cuda.device_count()} GPUs need NCCL 2.30 or later")
    spawn = multiprocessing.get_context("spawn")
    failures: SimpleQueue[str] = spawn.SimpleQueue()
    ranks = [
        spawn.Process(target=_rank_main, args=(body, tmp_path / "store", rank, size, failures))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    give_up_at = time.monotonic() + 100
    for process in ranks:
        process.join(max(0.0, give_up_at - time.monotonic()))
    stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in stuck:
        ranks[rank].kill()
        ranks[rank].join()
    told = []
    while not failures.empty():
        told.append(failures.get())
    assert not told, "\n".join(told)
    assert not stuck, f"ranks {stuck} did not end within 100 s"
    assert [process.exitcode for process in ranks] == [0] * size


def finish(work: Work) -> None:
    """Block the host until `work` has ended."""

    async def wait() -> None:
        await work

    asyncio.run(wait())


def part(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` brings: from 1 to 3, so that every reduction is exact in every dtype."""
    numbers = np.random.default_rng([rank, numel]).integers(1, 4, numel)
    return torch.from_numpy(numbers).to(dtype)


def reduced(parts: list[torch.Tensor], op: ReduceOp) -> NDArray[np.float64]:
    """The reduction in numpy, in float64."""
    stack: NDArray[np.float64] = np.stack([p.double().numpy() for p in parts])
    if op is ReduceOp.AVG:
        mean = np.asarray(stack.sum(0) / len(parts))
        return mean if parts[0].dtype.is_floating_point else np.trunc(mean)
    reduce = {
        ReduceOp.SUM: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
    }
    return np.asarray(reduce[op].reduce(stack, axis=0))


def assert_equal(tensor: torch.Tensor, expected: NDArray[np.float64]) -> None:
    np.testing.assert_array_equal(tensor.cpu().double().numpy(), expected)


def check_reductions(group: Group, store: Store) -> None:
    for numel in SIZES:
        for dtype in DTYPES:
            for op in ReduceOp:
                parts = [part(rank, numel, dtype) for rank in range(group.size)]
                tensor = parts[group.rank].to(group.device, copy=True)
                group.all_reduce(tensor, op).wait()
                assert_equal(tensor, reduced(parts, op))


def check_movements(group: Group, store: Store) -> None:
    size, rank, device = group.size, group.rank, group.device
    for numel in SIZES:
        for dtype in DTYPES:
            wholes = [part(r, size * numel, dtype) for r in range(size)]
            mine = slice(rank * numel, (rank + 1) * numel)
            output = torch.zeros(numel, dtype=dtype, device=device)
            whole = wholes[rank].to(device)
            group.reduce_scatter(output, whole).wait()
            assert_equal(output, reduced(wholes, ReduceOp.SUM)[mine])
            assert_equal(whole, wholes[rank].double().numpy())

            gathered = torch.zeros(size * numel, dtype=dtype, device=device)
            gathered[mine] = wholes[0][mine].to(device)
            group.all_gather(gathered, gathered[mine]).wait()
            assert_equal(gathered, wholes[0].double().numpy())

            tensor = wholes[rank].to(device, copy=True)
            group.broadcast(tensor, root=size - 1).wait()
            assert_equal(tensor, wholes[size - 1].double().numpy())
    group.barrier().wait()


def check_streams(group: Group, store: Store) -> None:
    """No host synchronisation between kernels, collective and kernels."""
    tensor = torch.zeros(1_000_003, device=group.device)
    for _ in range(200):
        tensor += 1
    work = group.all_reduce(tensor)
    work.wait()
    doubled = tensor * 2
    assert_equal(doubled, np.full(1_000_003, 400.0 * group.size))
    finish(work)
    assert work.is_completed()
    assert work.error() is None


def check_abort(group: Group, store: Store) -> None:
    """The last rank aborts while the others wait for it."""
    last = group.size - 1
    if group.rank == last:
        store.wait([f"waiting/{rank}" for rank in range(last)])
        group.abort(ValueError("no more"))
    else:
        work = group.all_reduce(torch.ones(10, device=group.device))
        store.set(f"waiting/{group.rank}", "1")
        with pytest.raises(GroupAborted, match="no more") as caught:
            finish(work)
        assert caught.value.ranks == [last]
    with pytest.raises(GroupAborted, match="no more"):
        group.barrier().wait()
    torch.cuda.synchronize(group.device)  # The kernels have ended: this returns.


def check_timeout(group: Group, store: Store) -> None:
    """The last rank does not come, and still learns what happened."""
    last = group.size - 1
    group.barrier().wait()
    if group.rank == last:
        store.wait([f"seen/{rank}" for rank in range(last)], 60)
    else:
        work = group.all_reduce(torch.ones(10, device=group.device), timeout_s=2)
        with pytest.raises(CollectiveTimeout, match="within 2 s") as caught:
            finish(work)
        assert caught.value.ranks == [last]
        assert f"rank {last} has finished barrier #0" in str(caught.value)
        store.set(f"seen/{group.rank}", "1")
    with pytest.raises(CollectiveError) as later:
        group.barrier().wait()
    assert isinstance(later.value, CollectiveTimeout)
    assert later.value.ranks == [last]


@pytest.mark.gpu
@pytest.mark.skipif(_why_no_gpu() != "", reason=_why_no_gpu())
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "body", [check_reductions, check_movements, check_streams, check_abort, check_timeout]
)
def test_nccl_keeps_the_contract(body: Body, size: int, tmp_path: Path) -> None:
    run_ranks(body, size, tmp_path)
