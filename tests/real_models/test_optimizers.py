"""Optimizers of torch and of four libraries under ZeRO: as in one process, or refused by name."""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.real_models.optimizers import LIBRARIES, names, train, train_alone

pytestmark = pytest.mark.slow

UNMADE = {
    "pytorch_optimizer.DeMo": "You need to install `einops`",
    "pytorch_optimizer.DistributedMuon": "Default process group has not been initialized",
    "pytorch_optimizer.FriendlySAM": "missing 1 required positional argument",
    "pytorch_optimizer.GSAM": "missing 3 required positional arguments",
    "pytorch_optimizer.LookSAM": "missing 1 required positional argument",
    "pytorch_optimizer.SAM": "missing 1 required positional argument",
}
"""Optimizers that their own constructor refuses, in its words."""


def documented() -> dict[str, str]:
    """The verdicts in the table of docs/zero.md, by the optimizer's name."""
    text = (ROOT / "docs" / "zero.md").read_text().partition("| library |")[2].partition("\n\n")[0]
    found = {}
    for row in text.splitlines()[2:]:
        library, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        for verdict, cell in zip(("flat", "whole", "refused"), cells, strict=True):
            for kind in re.findall(r"\w+", cell):
                found[f"{library.strip('`')}.{kind}"] = verdict
    return found


def difference(ours: Any, theirs: Any, path: str = "state") -> str:
    """The first place where two states differ in any bit; empty if they are equal."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if ours.shape == theirs.shape and torch.allclose(ours, theirs, 0, 0, equal_nan=True):
            return ""
        return f"{path}: {tuple(ours.shape)} and {tuple(theirs.shape)}"
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return f"{path}: {list(ours)} and {list(theirs)}"
        pairs = [(key, ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list | tuple | deque) and len(ours) == len(theirs):
        pairs = [(n, *pair) for n, pair in enumerate(zip(ours, theirs, strict=True))]
    else:
        return "" if ours == theirs or type(ours).__eq__ is object.__eq__ else f"{path}: {ours}"
    return next((told for key, *pair in pairs if (told := difference(*pair, f"{path}/{key}"))), "")


@pytest.mark.parametrize("name", names())
def test_an_optimizer_steps_as_in_one_process_or_is_refused_by_name(ranks_of, name):
    if name in LIBRARIES:
        pytest.skip(f"{name} is not installed")
    if name in UNMADE:
        with pytest.raises(AssertionError, match=re.escape(UNMADE[name])):
            told = ranks_of(2).run(train, name, 2)[0][2]
            raise AssertionError(told)
        return
    (values, state, how), (others, _, _) = ranks_of(2).run(train, name, 2)
    assert documented()[name] == (how if values else "refused")
    if values is None:
        kind = name.rpartition(".")[2]
        assert f"{kind} cannot be sharded: " in how
        assert "without ZeroRedundancyOptimizer" in how or kind in ("LBFGS", "SparseAdam")
        return
    [(expected, plain, _)] = ranks_of(1).run(train_alone, name, 2)
    assert all(map(torch.equal, values, others)), "the ranks differ"
    assert all(value.isfinite().all() for value in expected)
    assert all(map(torch.equal, values, expected))
    # Some have touched the state of a parameter and put nothing in.
    assert difference(state, {number: kept for number, kept in plain.items() if kept}) == ""
