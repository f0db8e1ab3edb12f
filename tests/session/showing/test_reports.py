"""What a report may carry, and what is refused by name."""

from __future__ import annotations

import enum
import math
from collections.abc import AsyncIterator
from typing import Any

import numpy
import pytest
import torch

import chorusline as cl
from chorusline.runtime.program.report_values import plain_values
from chorusline.runtime.session.showing.progress_model import ProgressModel

received: list[cl.Report] = []


@pytest.fixture(scope="module")
async def session(cluster: None) -> AsyncIterator[cl.Session]:
    async with cl.Session(
        1, resources_per_worker={"CPU": 0.1}, on_report=received.append
    ) as session:
        yield session


async def test_vectors_and_nested_numbers_arrive_as_lists_and_dictionaries(
    session: cl.Session,
) -> None:
    def train(ctx: cl.Context) -> None:
        weight = torch.ones(2, requires_grad=True)
        ctx.report({"loss": torch.tensor([0.5]), "by layer": {"first": [1, 2.5], "second": weight}})
        ctx.report(norms=numpy.ones((2, 2), numpy.float32), rate=numpy.float64(0.1), flag=True)
        ctx.report({"a": 1}, text="b", none=(), half=torch.tensor(1.5, dtype=torch.bfloat16))

    await session.run(train)
    assert [report.values for report in received] == [
        {"loss": 0.5, "by layer": {"first": [1, 2.5], "second": [1.0, 1.0]}},
        {"norms": [[1.0, 1.0], [1.0, 1.0]], "rate": 0.1, "flag": True},
        {"a": 1, "text": "b", "none": [], "half": 1.5},
    ]
    assert type(received[1].values["rate"]) is float


@pytest.mark.parametrize(
    ("values", "kind", "says"),
    [
        (
            {"loss": None},
            TypeError,
            r"report\(loss=...\) got a value of type NoneType; a report takes",
        ),
        ({"a": {"b": [1, {1}]}}, TypeError, r"report\(a\['b'\]\[1\]=...\) got a value of type set"),
        ({"a": {1: 2}}, TypeError, r"report\(a=...\) got the key 1"),
        ({"a": 1j}, TypeError, "type complex"),
        ({"a": torch.ones(40, 40)}, ValueError, r"got a tensor of shape \(40, 40\); .* 1,024"),
        ({"a": numpy.ones(1025)}, ValueError, r"got an array of shape \(1025,\)"),
        ({"a": {"b": [1] * 600, "c": [1] * 600}}, ValueError, r"report\(a=...\) got 1200 values"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, TypeError, r"report\(a\[0\]=...\)"),
        ({1: 2}, TypeError, "names in a report must be strings, got 1"),
        (0.5, TypeError, r"write ctx.report\(loss=loss\)"),
    ],
)
def test_what_cannot_be_reported_is_refused_by_its_name(
    values: Any, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        plain_values(values, {})


class Word(enum.StrEnum):
    TRAIN = "train"


class Level(enum.IntEnum):
    HIGH = 3


class Ratio(float):
    pass


def test_a_value_of_the_programs_own_kind_is_a_plain_one() -> None:
    given = {Word.TRAIN: Word.TRAIN, "a": Level.HIGH, "b": Ratio(0.5), "c": {Word.TRAIN: [True]}}
    plain = plain_values(given, {"d": numpy.str_("e"), "f": numpy.float64(0.5)})
    assert plain == {"train": "train", "a": 3, "b": 0.5, "c": {"train": [True]}, "d": "e", "f": 0.5}
    values = [plain[name] for name in ("train", "a", "b", "d", "f")]
    assert [type(one) for one in values] == [str, int, float, str, float]
    assert plain["c"]["train"] == [True] and type(plain["c"]["train"][0]) is bool
    assert {type(name) for name in (*plain, *plain["c"])} == {str}


@pytest.mark.parametrize(
    "value", [numpy.ma.masked, numpy.ma.array([5.0], mask=[1]), numpy.ma.array([1, 2], mask=[0, 1])]
)
def test_a_masked_element_is_no_number(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"report\(n\['m'\]=...\) got an array with masked elements"
    ):
        plain_values({"n": {"m": value}}, {})
    assert plain_values({"n": numpy.ma.array([5.0], mask=[0])}, {}) == {"n": 5.0}


def test_a_value_is_given_once() -> None:
    with pytest.raises(ValueError, match="'loss' twice"):
        plain_values({"loss": 1}, {"loss": 2})


def test_the_display_takes_a_vector_of_a_known_name_for_no_number() -> None:
    seen = ProgressModel().add(
        cl.Report(0, 0, 1.0, {"loss": [1.0, 2.0], "epoch": "first", "tokens": []})
    )
    assert "loss" not in seen.numbers
    nan = ProgressModel().add(cl.Report(0, 0, 1.0, {"loss": math.nan, "batches_left": math.inf}))
    assert math.isnan(nan.numbers["loss"])


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), [1, 10**400], {"n": (2**2000,)}, numpy.array([10**400], object)]
)
def test_a_number_that_no_float_can_hold_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"report\(n.*=\.\.\.\) got a whole number of \d+ bits"):
        plain_values({"n": value}, {})
    assert plain_values({"n": 2**1000}, {}) == {"n": 2**1000}


@pytest.mark.parametrize("value", [1.5, [1.5, 2.5]])
def test_numbers_longer_than_a_float_become_one(value: Any) -> None:
    long = numpy.array(value, numpy.longdouble)
    assert plain_values({"n": long, "one": numpy.longdouble(2)}, {}) == {"n": value, "one": 2.0}
    with pytest.raises(TypeError, match=r"got a tensor of layout torch\.strided on meta"):
        plain_values({"n": torch.ones(2, device="meta")}, {})
    with pytest.raises(TypeError, match=r"got a tensor of layout torch\.sparse_coo on cpu"):
        plain_values({"n": torch.eye(2).to_sparse()}, {})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="contains itself"):
        plain_values({"n": endless}, {})
