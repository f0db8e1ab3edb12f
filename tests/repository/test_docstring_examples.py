"""Examples in docstrings of public names run as they stand there, on ranks without Ray."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest
import torch

import chorusline as cl

RUN = (
    "CheckpointConfig",
    "DistributedDataParallel",
    "FileStore",
    "GradScaler",
    "Group",
    "HashStore",
    "Join",
    "PeriodicModelAverager",
    "PrefixStore",
    "PureDistributedDataParallel",
    "SyncBatchNorm",
    "ZeroRedundancyOptimizer",
    "deal",
)
"""Names whose examples need no session."""


def example_of(name: str) -> str:
    """The first block of code in the docstring of a name."""
    block = re.search(r"\n\n((?: {4}.*\n)+)", f"{inspect.getdoc(getattr(cl, name))}\n")
    assert block, f"the docstring of {name} has no example"
    return textwrap.dedent(block[1])


@pytest.mark.parametrize("name", RUN)
def test_the_example_of_a_docstring_runs_on_ranks(ranks_of, name, tmp_path):
    ranks_of(2).run(run_example, name, str(tmp_path))


def run_example(group: cl.Group, name: str, folder: str) -> None:
    """group, net and folder are what an example finds."""
    torch.manual_seed(0)
    names = {"cl": cl, "torch": torch, "group": group, "net": torch.nn.Linear(8, 1)}
    exec(example_of(name), names | {"folder": folder})


def test_what_the_example_of_deal_says_it_gives_is_what_it_gives() -> None:
    call, comment = example_of("deal").strip().split("  # ")
    assert [list(hand) for hand in eval(call, {"cl": cl})] == eval(comment)
