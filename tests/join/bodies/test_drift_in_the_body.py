"""What the loop's body does around a plain optimizer, differently on each rank: where a rank runs
out of data, the end of the Join would overwrite it, so the ranks are told before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import chorusline as cl
from chorusline.runtime.data_parallel.gradients.local_steps import _sample_of
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model

DTYPE = torch.float64
Body = Callable[[torch.nn.Module, int, int], None]


def clip_by_rank(model: torch.nn.Module, rank: int, number: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01 * (rank + 1))


def clip_by_rank_later(model: torch.nn.Module, rank: int, number: int) -> None:
    if number >= 2:
        clip_by_rank(model, rank, number)


def clip_values_by_rank(model: torch.nn.Module, rank: int, number: int) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3 * (rank + 1))


def clip_once_by_rank(model: torch.nn.Module, rank: int, number: int) -> None:
    if number == 2:
        clip_by_rank(model, rank, number)


def clip_alike(model: torch.nn.Module, rank: int, number: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def drops_alike(model: torch.nn.Module, rank: int, number: int) -> None:
    next(iter(model.parameters())).grad = None


def train(
    group: cl.Group,
    body: Body,
    lengths: Sequence[int],
    writes_first: bool,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> list[str]:
    """What is warned. writes_first: the body halves the parameters before its pass, which a rank
    without data has not done when the next vote comes."""
    with another_group(group) as own, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = cl.DistributedDataParallel(make_model(DTYPE), own)
        optim = make(model.parameters(), lr=0.1)
        with cl.Join([model], skew_warning=None):
            for number, batch in enumerate(batches_of(own.rank, lengths[own.rank], DTYPE)):
                if writes_first:
                    for parameter in model.parameters():
                        parameter.data *= 0.5
                loss_of(model, batch).backward()
                body(model, own.rank, number)
                optim.step()
                optim.zero_grad()
    return [str(one.message) for one in told if "parameter" in str(one.message)]


def test_parameters_without_memory_of_their_own_are_not_read() -> None:
    emptied = torch.nn.Parameter(torch.ones(3))
    emptied.untyped_storage().resize_(0)
    wrapping = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    transposed = torch.nn.Parameter(torch.ones(3, 2).T)
    none = torch.nn.Parameter(torch.ones(0))
    meta = torch.nn.Parameter(torch.ones(3, device="meta"))
    assert [_sample_of(one) for one in (emptied, wrapping, transposed, none, meta)] == [0] * 5
    assert _sample_of(torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))) > 0


LENGTHS = ((3, 5), (5, 3), (4, 4), (7, 4))


@pytest.mark.parametrize("writes_first", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    "body", [clip_by_rank, clip_by_rank_later, clip_values_by_rank, clip_once_by_rank]
)
def test_ranks_that_clip_differently_are_told_although_a_join_makes_them_equal(
    ranks_of: Callable[[int], Any], body: Body, lengths: tuple[int, int], writes_first: bool
) -> None:
    first, second = ranks_of(2).run(train, body, lengths, writes_first)
    assert len(first) == 1 and not second
    assert "differs between rank 0 and rank 1" in first[0] and "max_norm of its own" in first[0]


@pytest.mark.parametrize("writes_first", [False, True])
@pytest.mark.parametrize("lengths", [*LENGTHS, (0, 3), (1, 9)], ids=str)
@pytest.mark.parametrize("body", [clip_alike, drops_alike])
def test_ranks_whose_bodies_do_the_same_are_told_nothing(
    ranks_of: Callable[[int], Any], body: Body, lengths: tuple[int, int], writes_first: bool
) -> None:
    assert ranks_of(2).run(train, body, lengths, writes_first) == [[], []]
