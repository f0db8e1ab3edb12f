"""What `ctx.reduce` makes of values of every kind: it reduces them, or refuses them."""

from __future__ import annotations

import ctypes
import decimal
import enum
import fractions
import math
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import chorusline as cl
from chorusline.runtime.program.reducing import checked_weight, has_value, reduced

KINDS = (
    *("float16", "float32", "float64", "longdouble", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "bool_", "complex64", "complex128"),
)


@dataclass
class Metrics:
    loss: Any


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


class Named(enum.Enum):
    HALF = 0.5


class Metres(float):
    pass


class Point(NamedTuple):
    x: float


class Index:
    def __index__(self) -> int:
        return 1


VALUES: dict[str, Callable[[int], Any]] = {
    "a float": float,
    "an int": int,
    "a complex": lambda n: n + 2j * n,
    "long complex": lambda n: numpy.clongdouble(n + 2j * n),
    "array long complex": lambda n: numpy.array([n + 2j * n, 1], dtype=numpy.clongdouble),
    "array >f8": lambda n: numpy.array([n, 1], dtype=">f8"),
    "array without dimensions": lambda n: numpy.array(float(n)),
    "a bool": bool,
    "an IntEnum": lambda n: Level(n),
    "a float of one's own": lambda n: Metres(n),
    "a parameter": lambda n: torch.nn.Parameter(torch.tensor([n, 1.0])),
    "a complex conjugate": lambda n: torch.tensor([n + 2j, 1 - n * 1j]).conj(),
    "a negative": lambda n: torch.tensor([n + 2j, 1 - n * 1j]).conj().imag,
}
for kind in KINDS:
    VALUES[kind] = getattr(numpy, kind)
    VALUES[f"array {kind}"] = partial(lambda kind, n: numpy.array([n, 1], dtype=kind), kind)
for kind in ("float16", "bfloat16", "float64", "int16", "uint8", "uint16", "bool", "complex64"):
    VALUES[f"tensor {kind}"] = partial(
        lambda dtype, n: torch.tensor([n, 1]).to(dtype), getattr(torch, kind)
    )


def reduce_all(group: cl.Group, names: list[str]) -> dict[str, Any]:
    results = {}
    for name in names:
        value = VALUES[name](group.rank)
        assert has_value(value), name
        weight = 1.0 + 2 * group.rank
        calls = [("mean", None), ("sum", None), ("mean", weight)]
        results[name] = [plain(reduced(group, value, op, each)) for op, each in calls]
    return results


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor | numpy.ndarray) else value


def test_every_kind_of_number_is_reduced(ranks_of: Callable[[int], Any]) -> None:
    both = ranks_of(2).run(reduce_all, list(VALUES))
    for name, make in VALUES.items():
        wide = numpy.complex128 if "complex" in name else numpy.float64
        zero, one = (numpy.asarray(plain(make(n))).astype(wide) for n in (0, 1))
        for results in both:
            mean, total, weighed = (numpy.asarray(each) for each in results[name])
            assert mean == pytest.approx((zero + one) / 2), name
            assert total == pytest.approx(zero + one), name
            assert weighed == pytest.approx((zero + 3 * one) / 4, rel=1e-2), name


@pytest.mark.parametrize("value", ["name", numpy.str_("name"), b"ab", None], ids=repr)
def test_a_text_comes_back(value: object) -> None:
    assert not has_value(value)


OTHERS = (
    *([1.0], (1, 2), {"loss": torch.ones(())}, {3}, deque([1.0]), range(3), Point(1.0), [], {}),
    *(decimal.Decimal(1), fractions.Fraction(1, 2), timedelta(1), date(2026, 1, 2), Named.HALF),
    *(numpy.array([None]), numpy.array(["a"]), numpy.timedelta64(3, "s"), torch.Size([2])),
    *(Metrics(1.0), SimpleNamespace(loss=1.0), array("d", [1.0]), memoryview(b"ab"), Index()),
    *(ctypes.c_float(1), iter([1.0]), (n for n in (1, 2)), numpy.ma.array([1.0], mask=[1])),
)


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_what_may_hold_numbers_of_this_rank_alone_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"ctx.reduce\(\) (takes a number|cannot reduce)"):
        has_value(value)


def test_complex_numbers_have_no_largest(alone: cl.Group) -> None:
    for value in (1j, numpy.complex64(1), torch.ones(1, dtype=torch.complex64)):
        with pytest.raises(ValueError, match="complex numbers have none"):
            reduced(alone, value, "max", None)


def test_tensors_that_are_not_dense_are_refused(alone: cl.Group) -> None:
    for value in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()):
        for weight in (None, 2.0):
            with pytest.raises(TypeError, match=r"layout torch.sparse_.*to_dense"):
                reduced(alone, value, "mean", weight)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(
        TypeError, match="cannot reduce a nested tensor, whose parts may have other"
    ):
        reduced(alone, nested, "mean", None)


def test_tensors_that_wrap_others_are_refused(alone: cl.Group) -> None:
    wrapper = TwoTensor(torch.ones(2), torch.ones(2))
    with pytest.raises(TypeError, match=r"got a TwoTensor, which wraps others; .*to_local"):
        reduced(alone, wrapper, "mean", None)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_without_values_of_their_own_are_refused(alone: cl.Group) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for value, mend in ((torch.ones(2, device="meta"), "no values"), (quantized, "dequantize")):
        for op in ("mean", "sum", "max"):
            with pytest.raises(TypeError, match=mend):
                reduced(alone, value, op, None)


def reduce_large(group: cl.Group) -> list[Any]:
    def reduce(value: Any, op: str) -> Any:
        try:
            return reduced(group, value, op, None)
        except OverflowError as error:
            return str(error)

    sign = 1 - 2 * group.rank
    return [
        reduce(2**63 - 1, "sum"),
        reduce(-(2**63), "sum"),
        reduce(numpy.int64(5 * 10**18 * sign - 1), "sum"),
        reduce(3 * 10**9 * sign, "product"),
        reduce(4 * 10**9, "product"),
        reduce(2**62 + group.rank, "max"),
    ]


def test_whole_numbers_do_not_wrap(ranks_of: Callable[[int], Any]) -> None:
    for *exact, product, largest in ranks_of(2).run(reduce_large):
        assert exact == [2**64 - 2, -(2**64), -2, -9 * 10**18]
        assert product.startswith("the product of all ranks, about 1.6e+19, is more than 64 bits")
        assert largest == 2**62 + 1


@pytest.mark.parametrize("value", [2**70, -(2**63) - 1, numpy.uint64(2**63)], ids=str)
def test_whole_numbers_of_more_than_64_bits_are_refused(alone: cl.Group, value: object) -> None:
    with pytest.raises(OverflowError, match=r"reduce float\(value\)"):
        reduced(alone, value, "sum", None)


WEIGHTS = (
    *(2, 2.0, numpy.float32(2), numpy.float16(2), numpy.int64(2), numpy.longdouble(2)),
    *(numpy.array(2.0), numpy.array([2]), torch.tensor(2.0), torch.tensor([2]).cfloat().real),
    *(torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor(2.0, requires_grad=True)),
)
NO_NUMBERS = (
    *("1", [1], True, 1j, decimal.Decimal(2), numpy.complex64(2), numpy.ones(2), torch.ones(2)),
    *(torch.ones(0), torch.tensor(2 + 0j), torch.ones((), device="meta"), numpy.array([None])),
)
NO_WEIGHTS = (-1, math.nan, math.inf, 10**400, torch.tensor(-1.0), numpy.array(math.nan))


def weighed(group: cl.Group, weight: Any) -> tuple[float, float]:
    """What a loss of 3 becomes, and its gradient after the division by the weights."""
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1), group)
    torch.nn.init.zeros_(model.module.weight)
    torch.nn.init.zeros_(model.module.bias)
    weighted = model.weigh(3 + 5 * model(torch.ones(1, 1)).sum(), weight)
    weighted.backward()
    assert model.module.bias.grad is not None
    return weighted.item(), model.module.bias.grad.item()


def test_a_weight_is_any_real_number(alone: cl.Group) -> None:
    for weight in WEIGHTS:
        number = checked_weight("mean", weight)
        assert number == 2 and type(number) is float, weight
        assert weighed(alone, weight) == (6, 5), weight
    assert checked_weight("mean", 2**70) == 2.0**70
    assert weighed(alone, 2**70) == (3 * 2.0**70, 5)


@pytest.mark.parametrize("weight", NO_NUMBERS, ids=repr)
def test_a_weight_that_is_no_number_is_refused(weight: Any, alone: cl.Group) -> None:
    with pytest.raises(TypeError, match="weight must be a number, got"):
        checked_weight("mean", weight)
    with pytest.raises(TypeError, match=r"takes a number of samples or tokens, .*, got"):
        weighed(alone, weight)


@pytest.mark.parametrize("weight", NO_WEIGHTS, ids=lambda weight: str(weight)[:9])
def test_a_weight_that_no_mean_can_have_is_refused(weight: Any, alone: cl.Group) -> None:
    with pytest.raises(ValueError, match="weight must be a finite number of at least 0, got"):
        checked_weight("mean", weight)
    with pytest.raises(ValueError, match="weight must be a finite number of at least 0, got"):
        weighed(alone, weight)


@pytest.mark.parametrize("op", [None, 1, ["mean"], {}, "median", cl.ReduceOp.SUM], ids=str)
def test_an_op_that_is_none_is_refused(op: Any) -> None:
    with pytest.raises(ValueError, match=r"op must be one of 'mean', 'sum', .*, got"):
        checked_weight(op, None)


def test_a_weight_needs_a_mean() -> None:
    with pytest.raises(ValueError, match="weight needs op='mean'; got 2, op='sum'"):
        checked_weight("sum", 2)
