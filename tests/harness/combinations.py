"""Combinations of arguments, of which the ordinary suite takes a part."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def combinations(one_in: int, **values: Iterable[Any]) -> pytest.MarkDecorator:
    """A test is run with each combination of the values of its arguments; one combination of
    `one_in` is in the ordinary suite, in which each value is, and the others are slow."""
    cases = [
        pytest.param(
            *(value for _, value in chosen),
            marks=[pytest.mark.slow] if sum(number for number, _ in chosen) % one_in else [],
        )
        for chosen in itertools.product(*map(enumerate, values.values()))
    ]
    return pytest.mark.parametrize(list(values), cases)
