"""Arguments that are none: a typed sentence at once, or they work."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import numpy
import pytest
import torch

from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from chorusline.collectives.stores.rendezvous import store_from_url
from chorusline.collectives.stores.store import HashStore

HOSTILE: list[tuple[str, Any]] = [
    *[
        ("timeout_s", value)
        for value in (float("nan"), float("inf"), -1, 0, 1e300, True, "1", None, [1])
    ],
    *[("timeout_s", timedelta(seconds=seconds)) for seconds in (0, -1, 10**9)],
    *[("store", value) for value in (None, 5, "store", {})],
    *[("generation", value) for value in ("x", float("nan"), -1, 2**80, None, True, 0.5)],
    *[("name", value) for value in (None, 5, "", "x" * 10**6, b"bytes")],
    *[("size", value) for value in (0, -1, 10**6, 10**9, 2**80, "2", 1.5, True, None)],
    *[("rank", value) for value in (-1, 1, 2**80, "0", float("nan"), True, None)],
    *[("device", value) for value in ("gpu", "", "nope:0", object())],
    *[("backend", value) for value in ("nope", "", 5)],
    *[(name, numpy.longdouble("nan")) for name in ("timeout_s", "size", "rank", "generation")],
]


@pytest.mark.parametrize(("argument", "value"), HOSTILE, ids=lambda value: repr(value)[:20])
def test_what_is_no_argument_of_a_group_is_refused_before_it_waits(
    argument: str, value: Any
) -> None:
    arguments = {"store": HashStore(), "rank": 0, "size": 1, argument: value}
    began_at = time.process_time()
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"\w+ .*\w"):
        Group.create(**arguments)
    assert time.process_time() - began_at < 5, "it was refused before it named a million keys"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e300, True, "1", -1, 0])
def test_no_operation_waits_for_ever(alone: Group, seconds: Any) -> None:
    for issue in (
        lambda: alone.all_reduce(torch.ones(1), timeout_s=seconds),
        lambda: alone.barrier(timeout_s=seconds),
        lambda: alone.all_gather_object(1, timeout_s=seconds),
        lambda: alone.coalesce(timeout_s=seconds),
        lambda: HashStore().set_timeout(seconds),
        lambda: store_from_url("file:///tmp/none", 0, 1, timeout_s=seconds),
    ):
        with pytest.raises((TypeError, ValueError), match=r"timeout_s must be"):
            issue()


@pytest.mark.parametrize("numel", [-1, 2**62, 2**80, float("nan"), "2", None, True])
def test_what_is_no_size_of_a_tensor_is_refused_by_name(alone: Group, numel: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="numel must be"):
        alone.empty_symmetric(numel)


def test_a_deadline_may_be_a_timedelta() -> None:
    with Group.create(HashStore(), 0, 1, timeout_s=timedelta(minutes=2)) as group:  # type: ignore[arg-type]
        assert group.timeout_s == 120
        group.barrier(timeout_s=timedelta(seconds=5)).wait()  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0.0, "0", None, True, numpy.float64(0)])
def test_what_is_no_rank_or_tag_is_refused_before_the_operation_counts(
    alone: Group, rank: Any
) -> None:
    tensor = torch.ones(4)
    for issue in (
        lambda: alone.broadcast(tensor, rank),
        lambda: alone.reduce(tensor, rank),
        lambda: alone.gather(tensor, torch.zeros(4), rank),
        lambda: alone.scatter(tensor, torch.zeros(4), rank),
        lambda: alone.broadcast_object_list([1], rank),
        lambda: alone.send(tensor, rank),
        lambda: alone._check_tag(rank),
        lambda: alone.send_object_list([1], rank),
    ):
        with pytest.raises(TypeError, match="must be a whole number"):
            issue()
    assert alone.broadcast(tensor, numpy.int64(0)).wait() is tensor
    alone.barrier().wait()


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [("2", torch.float32), (2**70, torch.int64), (10**400, torch.float32), ([1], torch.float64)],
    ids=["text", "wide", "huge", "list"],
)
def test_what_is_no_factor_is_refused_before_the_operation_counts(
    alone: Group, factor: Any, dtype: torch.dtype
) -> None:
    before = alone.describe()
    tensor = torch.ones(3, dtype=dtype)
    for issue in (
        lambda: alone.all_reduce(tensor, ReduceOp.PREMUL_SUM, factor=factor),
        lambda: alone.reduce(tensor, 0, ReduceOp.PREMUL_SUM, factor=factor),
    ):
        with pytest.raises((TypeError, ValueError), match="factor"):
            issue()
    assert alone.describe() == before
    assert not alone.recorder.has_pending
