"""What every transport takes from a caller: tensors and arrays of any layout. What it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from chorusline.collectives.contract.errors import UnsupportedOperation
from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from tests.contracts.handle import settle
from tests.contracts.numbers import assert_equal


class Foreign:
    """Something that is no tensor and speaks DLPack, as a CuPy array does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **arguments: Any) -> object:
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> object:
        return self.tensor.__dlpack_device__()


def check_arrays_and_strides(group: Group) -> None:
    """Results are in the caller's memory, whatever it is; what is between its elements stays."""
    n, me = group.size, group.rank
    for i in range(2):
        foreign = torch.arange(5.0, device=group.device)
        settle(group.all_reduce(Foreign(foreign)), i)
        assert_equal(foreign, np.arange(5.0) * n)

        field = torch.zeros(6, 8, device=group.device)
        columns = field[:, 1::3]
        columns.copy_(torch.arange(18.0).view(6, 3))
        settle(group.all_reduce(columns), i)
        assert_equal(columns, np.arange(18.0).reshape(6, 3) * n)
        assert field.sum() == columns.sum()

        table = torch.zeros(3, 2 * n, device=group.device).t()  # row-major only when transposed
        mine = torch.full((3, 2), float(me), device=group.device).t()
        settle(group.all_gather(table, mine), i)
        assert_equal(table, np.repeat(np.arange(n), 2)[:, None] * np.ones((1, 3)))
        spread = torch.zeros(2, 3, device=group.device).t()
        settle(group.reduce_scatter(spread.t(), table), i)
        assert_equal(spread, np.full((3, 2), float(n * me)))

        lazy = torch.tensor([1 + 2j, 3 - 1j], device=group.device).conj()
        settle(group.broadcast(lazy, 0), i)
        assert_equal(lazy, np.array([1 - 2j, 3 + 1j]))
        settle(group.all_reduce(lazy), i)
        assert_equal(lazy, n * np.array([1 - 2j, 3 + 1j]))

        parts = [torch.zeros(2, 2, device=group.device).t() for _ in range(n)]
        settle(group.all_gather(parts, torch.tensor([[1.0, 2], [3, 4]], device=group.device)), i)
        for tensor in parts:
            assert_equal(tensor, np.array([[1.0, 2], [3, 4]]))
        ones = torch.ones((), device=group.device).expand(4)  # read, never written
        gathered = torch.zeros(4 * n, device=group.device)
        settle(group.all_gather(gathered, ones), i)
        assert_equal(gathered, np.ones(4 * n))


def check_negated_views(group: Group) -> None:
    """Their memory holds the other sign. Of one element, such a view counts as contiguous."""
    wave = torch.tensor([3 - 2j, 4 + 1j])
    views = [wave[:1].conj().imag, wave.clone().conj().imag, torch._neg_view(torch.ones(2))]
    for negated, numbers in zip(views, ([2.0], [2.0, -1.0], [-1.0, -1.0]), strict=True):
        assert negated.is_neg() and negated.tolist() == numbers
        copied = torch.zeros(len(numbers))
        group.broadcast(negated if group.rank == 0 else copied, 0).wait()
        assert group.rank == 0 or copied.tolist() == numbers
        group.all_reduce(negated).wait()
        assert_equal(negated, group.size * np.array(numbers))


def check_numpy(group: Group) -> None:
    n, me = group.size, group.rank
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    group.all_reduce(array).wait()
    np.testing.assert_array_equal(array, np.arange(6).reshape(2, 3) * n)
    strided = np.zeros((4, 4))
    group.broadcast(strided[:, 1] if me else np.ones(4), 0).wait()
    if me:
        assert strided.sum() == strided[:, 1].sum() == 4
    field = np.zeros((3, 4))
    backwards = field[::-1, ::-2]
    backwards[:] = np.arange(6.0).reshape(3, 2)
    assert_equal(group.all_reduce(backwards).wait(), np.arange(6.0).reshape(3, 2) * n)
    np.testing.assert_array_equal(field[:, [3, 1]][::-1], np.arange(6.0).reshape(3, 2) * n)
    assert not field[:, ::2].any()
    rows = np.zeros((n, 3))
    outputs = [row[::-1] for row in rows]
    group.all_gather(outputs, np.arange(3.0)[::-1] + me).wait()
    np.testing.assert_array_equal(rows, np.arange(3.0) + np.arange(n)[:, None])
    for tiny in (np.ones(1)[::-1], np.ones(0)[::-1], np.ones((2, 0))[::-1]):
        group.all_reduce(tiny).wait()
        np.testing.assert_array_equal(tiny, np.full(tiny.shape, n))
    read_only = np.ones(3, dtype=np.complex64)
    read_only.flags.writeable = False
    whole = np.zeros(3 * n, dtype=np.complex64)
    group.all_gather(whole, read_only).wait()
    np.testing.assert_array_equal(whole, np.ones(3 * n))
    flags = np.array([me == 0, True])
    group.all_reduce(flags, ReduceOp.BAND).wait()
    assert flags.tolist() == [n == 1, True]
    for unfit, error, told in (
        (read_only, ValueError, "read-only"),
        (np.ones(3, dtype=np.uint16), UnsupportedOperation, "uint16"),
        (np.array(["a"]), TypeError, "tensor"),
        ([1.0], TypeError, "must be a torch.Tensor"),
    ):
        with pytest.raises(error, match=told):
            group.all_reduce(unfit)


def check_refusals(group: Group) -> None:
    """Each is a sentence, before anything is enqueued: the group works on."""
    n, me, backend = group.size, group.rank, group.backend
    one = torch.ones(2 * n, device=group.device)
    many = [torch.ones(2, device=group.device) for _ in range(n)]
    short, long = many[0], torch.ones(2 * n + 1, device=group.device)
    other = (me + 1) % n
    before = group.statistics.snapshot()
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, rf"dst must be a rank in \[0, {n}\)", lambda: group.reduce(one, n)),
        (ValueError, "src must be a rank", lambda: group.scatter(short, many, -1)),
        (ValueError, "this rank itself", lambda: group.send(one, me)),
        (ValueError, "this rank itself", lambda: group.recv(one, me)),
        (ValueError, f"output has {n + 1} tensors", lambda: group.gather(short, [*many, one], me)),
        (ValueError, "output is missing on rank", lambda: group.gather(short, None, me)),
        (ValueError, "make them equal", lambda: group.all_gather(many, one if n > 1 else long)),
        (ValueError, "input_split_sizes", lambda: group.all_to_all(one, one, None, [1] * n)),
        (ValueError, "part . of input, which", lambda: group.all_to_all(one, one[:n])),
        (ValueError, "sum", lambda: group.all_to_all(one, one, None, [n + 2] * n)),
        (TypeError, "two lists", lambda: group.all_to_all(many, one)),
        (ValueError, "split sizes are for tensors", lambda: group.all_to_all(many, many, [2] * n)),
        (ValueError, "of one operation have one dtype", lambda: group.all_gather(
            [*many[:-1], many[0].int()], short) if n > 1 else group.reduce(one, n, ReduceOp.SUM)),
        (ValueError, "torch.int32", lambda: group.reduce_scatter(short, one.int())),
        (ValueError, "several elements in one place",
         lambda: group.all_reduce(torch.ones((), device=group.device).expand(3))),
        (ValueError, "timeout_s must be positive", lambda: group.reduce(one, 0, timeout_s=0)),
        (ValueError, "factor belongs to", lambda: group.all_reduce(one, factor=2)),
        (ValueError, "factor belongs to", lambda: group.all_reduce(one, ReduceOp.PREMUL_SUM)),
        (ValueError, "must be an int",
         lambda: group.all_reduce(one.int(), ReduceOp.PREMUL_SUM, factor=0.5)),
        (ValueError, "is complex", lambda: group.all_reduce(one, ReduceOp.PREMUL_SUM, factor=1j)),
        (TypeError, "op must be a ReduceOp", lambda: group.all_reduce(one, "sum")),
        (UnsupportedOperation, f"BAND is not supported by the {backend}",
         lambda: group.all_reduce(one, ReduceOp.BAND)),
        (UnsupportedOperation, "complex", lambda: group.reduce(one + 0j, 0, ReduceOp.MAX)),
        (UnsupportedOperation, "bool", lambda: group.all_reduce(one.bool(), ReduceOp.AVG)),
        (ValueError, "tag must be in", lambda: group.send(one, other, -1) if n > 1
         else group.reduce(one, n)),
    ]  # fmt: skip
    for error, told, call in refused:
        if n == 1 and told in ("of one operation have one dtype", "tag must be in"):
            continue
        with pytest.raises(error, match=told):
            call()
    assert group.statistics.snapshot() == before
    assert_equal(one, np.ones(2 * n))
    if n == 1:
        with pytest.raises(ValueError, match="nobody can send"):
            group.recv(one)
    elif backend == "nccl":
        with pytest.raises(UnsupportedOperation, match="recv from any rank"):
            group.recv(one)
        with pytest.raises(UnsupportedOperation, match="tag 3"):
            group.send(one, other, 3)
        with pytest.raises(UnsupportedOperation, match=r"by the nccl backend.* torch.int32"):
            group.all_reduce(one.short())
        for narrow in (torch.int8, torch.uint8):
            with pytest.raises(UnsupportedOperation, match=r"by the nccl backend.* overflows"):
                group.all_reduce(one.to(narrow), ReduceOp.AVG)
    group.barrier().wait()
