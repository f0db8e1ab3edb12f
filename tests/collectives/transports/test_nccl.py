"""NCCL: its code numbers everywhere, what only a GPU can do where there is one.

The contract itself is in test_group_contract.py. Ranks beyond the number of GPUs share them, which
NCCL allows from 2.30 on.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from chorusline.collectives.contract.dtypes import DTYPES
from chorusline.collectives.contract.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
)
from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.contract.work import Work
from chorusline.collectives.diagnosis.debug import DebugLevel, set_debug_level
from chorusline.collectives.group import Group
from chorusline.collectives.operations.arguments import travelling_dtype
from chorusline.collectives.stores.store import HashStore
from chorusline.collectives.transports.nccl import connect, load_nccl
from chorusline.collectives.transports.nccl_codes import (
    DTYPE_CODES,
    REDUCE_OP_CODES,
    as_moved,
    lacks,
)
from tests.contracts.handle import finish
from tests.contracts.numbers import assert_equal
from tests.harness.gpus import Gpus, gpus_of
from tests.harness.ranks import Body, Rank

HAS_CUPY = importlib.util.find_spec("cupy") is not None


def test_every_dtype_of_the_contract_has_the_number_of_nccl_h() -> None:
    # enum ncclDataType_t of nccl.h, 2.32.
    header = {
        "int8": 0,
        "uint8": 1,
        "int32": 2,
        "int64": 4,
        "float16": 6,
        "float32": 7,
        "float64": 8,
        "bfloat16": 9,
    }
    assert {str(d).removeprefix("torch."): code for d, code in DTYPE_CODES.items()} == header
    travelling = {travelling_dtype(dtype) for dtype in DTYPES}
    assert set(DTYPE_CODES) == travelling - {torch.int16}  # which travels as bytes


def test_what_nccl_has_no_name_for_is_moved_as_bytes() -> None:
    shorts, halves = torch.zeros(5, dtype=torch.int16), torch.zeros(5, dtype=torch.float16)
    assert as_moved(shorts) == (shorts.data_ptr(), 10, DTYPE_CODES[torch.uint8])
    assert as_moved(halves) == (halves.data_ptr(), 5, DTYPE_CODES[torch.float16])


def test_what_nccl_cannot_reduce_is_said_with_a_way_out() -> None:
    assert "all_gather" in lacks(ReduceOp.BAND, torch.int32)
    assert "torch.int32" in lacks(ReduceOp.SUM, torch.int16)
    assert lacks(ReduceOp.AVG, torch.bfloat16) == ""


def test_every_reduce_op_has_the_number_of_nccl_h() -> None:
    # enum ncclRedOp_t of nccl.h, 2.32: ncclMax comes before ncclMin.
    header = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
    assert {op.name: code for op, code in REDUCE_OP_CODES.items()} == header
    # PREMUL_SUM is a SUM of what was multiplied before.
    lacking = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.PREMUL_SUM}
    assert set(REDUCE_OP_CODES) == set(ReduceOp) - lacking


@pytest.mark.skipif(HAS_CUPY, reason="CuPy is installed here")
def test_without_cupy_the_error_names_the_extra_to_install() -> None:
    with pytest.raises(ImportError, match=r"'\.\[cuda13\]'.* '\.\[cuda12\]'"):
        connect(HashStore(), 0, 1, torch.device("cuda:0"), 0)


@pytest.mark.skipif(not HAS_CUPY, reason="needs CuPy (no GPU): pip install -e '.[cuda13]'")
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


def check_streams(rank: Rank) -> None:
    """No host synchronisation between kernels, collective and kernels."""
    with rank.group(timeout_s=60) as group:
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


def check_abort(rank: Rank) -> None:
    """The last rank aborts while the others wait for it."""
    last = rank.size - 1
    with rank.group(timeout_s=60) as group:
        if rank.rank == last:
            rank.store.wait([f"said/waiting/{other}" for other in range(last)])
            group.abort(ValueError("no more"))
        else:
            work = group.all_reduce(torch.ones(10, device=group.device))
            rank.say("waiting")
            with pytest.raises(GroupAborted, match="no more") as caught:
                finish(work)
            assert caught.value.ranks == [last]
        with pytest.raises(GroupAborted, match="no more"):
            group.barrier().wait()
        torch.cuda.synchronize(group.device)  # The kernels have ended: this returns.


def check_timeout(rank: Rank) -> None:
    """The last rank does not come, and still learns what happened."""
    last = rank.size - 1
    with rank.group(timeout_s=60) as group:
        group.barrier().wait()
        if rank.rank == last:
            rank.store.wait([f"said/seen/{other}" for other in range(last)], 60)
        else:
            work = group.all_reduce(torch.ones(10, device=group.device), timeout_s=2)
            with pytest.raises(CollectiveTimeout, match="within 2 s") as caught:
                finish(work)
            assert caught.value.ranks == [last]
            assert f"rank {last} has finished barrier #0" in str(caught.value)
            rank.say("seen")
        with pytest.raises(CollectiveError) as later:
            group.barrier().wait()
        assert isinstance(later.value, CollectiveTimeout)
        assert later.value.ranks == [last]


def check_detail(rank: Rank) -> None:
    """NCCL compares nothing itself; at DETAIL no kernel starts before the ranks agree."""
    set_debug_level(DebugLevel.DETAIL)
    ones = torch.ones(12)

    def issue(group: Group, what: str) -> Work:
        mine = ones.to(group.device)
        odd = rank.rank == 0
        match what:
            case "shape":
                return group.all_reduce(mine.view(3, 4) if odd else mine)
            case "length":
                return group.all_reduce(mine[:9] if odd else mine)
            case "kind":
                return group.broadcast(mine) if odd else group.all_reduce(mine)
            case _:
                parts = [mine[:2].clone() for _ in range(rank.size)]
                sent = [mine[:3]] * rank.size if odd else [mine[:2]] * rank.size
                parts[rank.rank] = sent[rank.rank].clone()
                return group.all_to_all(parts, sent)

    for generation, what in enumerate(("shape", "length", "kind", "pair")):
        with rank.group(generation=generation, timeout_s=30) as group:
            with pytest.raises(CollectiveMismatch) as caught:
                finish(issue(group, what))
            assert 0 in caught.value.ranks, what
            assert "test_nccl.py:" in str(caught.value), what
            torch.cuda.synchronize(group.device)


@pytest.mark.parametrize("gpus", [*gpus_of(2), *gpus_of(4)])
@pytest.mark.parametrize("body", [check_streams, check_abort, check_timeout, check_detail])
def test_nccl_orders_streams_aborts_and_times_out(body: Body, gpus: Gpus, tmp_path: Path) -> None:
    gpus.run(body, tmp_path)
