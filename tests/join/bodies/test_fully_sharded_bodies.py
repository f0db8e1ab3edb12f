"""Any body of a loop over a stock `fully_shard` model, over uneven data from a Shard, is what it is
in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import chorusline as cl
from tests.harness.torch_groups import with_torch

ONE, BOTH, TWICE, LOOK = "a pass", "one pass of two forwards", "two passes", "an evaluation"
MAX_NORM = 0.05


@dataclass(frozen=True)
class Body:
    """num_samples: of each epoch, dealt in batches of two to three ranks. acts: of each batch.
    accumulate: batches to a step, of which only the last one's gradients are reduced at once.
    recomputes: the activations of the blocks, in the backward pass. freezes: a layer of each.
    by_live: the divisor is the number of ranks with data; of each reduction by itself, where a step
    has several."""

    num_samples: int = 9
    acts: tuple[str, ...] = (ONE,)
    accumulate: int = 1
    clips: bool = True
    recomputes: bool = True
    freezes: bool = True
    reshards: bool = True
    by_live: bool = False

    @property
    def num_reductions(self) -> int:
        """FSDP2 reduces after the backward pass of each forward pass."""
        return sum({ONE: 1, LOOK: 0}.get(what, 2) for what in self.acts)


class Block(torch.nn.Module):
    def __init__(self, recomputes: bool, freezes: bool) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(11, 11)
        self.other = torch.nn.Linear(11, 11).requires_grad_(not freezes)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return x + checkpoint(self._branch, x, use_reentrant=False)
        return x + self._branch(x)

    def _branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.inner(x)))


def network(body: Body) -> torch.nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(body.recomputes, body.freezes) for _ in range(2)]
    return torch.nn.Sequential(torch.nn.Linear(5, 11), *blocks, torch.nn.Linear(11, 3)).double()


def batches(body: Body, rank: int, epoch: int) -> cl.Shard:
    samples = torch.randn(body.num_samples, 5, generator=torch.Generator().manual_seed(epoch))
    return cl.Shard(samples.double(), 2, rank=rank, world_size=3, epoch=epoch)


def act(model: Any, what: str, batch: torch.Tensor, divisor: int) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() / divisor

    if what == LOOK:
        with torch.no_grad():
            loss(batch)
    elif what == BOTH:
        (loss(batch) + loss(batch / 2)).backward()
    else:
        for factor in (1.0, 0.5)[: 1 + (what == TWICE)]:
            loss(factor * batch).backward()


def train(
    model: Any,
    body: Body,
    steps_of: Callable[[int], Iterable[Sequence[torch.Tensor | None]]],
    join: Callable[[list[Any]], AbstractContextManager[Any]],
    divisor: int = 1,
) -> list[torch.Tensor]:
    """steps_of: by epoch, the batches of the ranks that this process is; None where one has run
    out. divisor: of losses; FSDP2 divides by the number of ranks itself."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    for epoch in range(2):
        with join([*([clip] if body.clips else []), optimizer]):
            took: set[int] = set()
            for number, now in enumerate(steps_of(epoch)):
                is_last = (number + 1) % body.accumulate == 0
                if divisor == 1:
                    model.set_requires_gradient_sync(is_last)
                for rank, batch in enumerate(now):
                    if batch is not None:
                        took.add(rank)
                        for what in body.acts:
                            act(model, what, batch, divisor)
                if not is_last:
                    continue
                if body.by_live and divisor > 1:
                    for one in model.parameters():
                        if one.grad is not None:
                            one.grad *= divisor / len(took)
                took = set()
                if body.clips:
                    clip()
                optimizer.step()
                optimizer.zero_grad()
    return list(model.parameters())


def on_a_rank(rank: int, size: int, body: Body) -> list[torch.Tensor]:
    model: Any = network(body)
    mesh = init_device_mesh("cpu", (size,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=body.reshards)

    def join(step_along: list[Any]) -> cl.Join:
        by_initial = not body.by_live
        return cl.Join(
            [model],
            divide_by_initial_world_size=by_initial,
            step_along=step_along,
            skew_warning=None,
        )

    trained: Any = train(
        model, body, lambda epoch: ((b,) for b in batches(body, rank, epoch)), join
    )
    return [one.full_tensor().detach() for one in trained]


def in_one_process(body: Body) -> list[torch.Tensor]:
    def steps_of(epoch: int) -> Iterable[Sequence[torch.Tensor | None]]:
        return zip_longest(*(batches(body, rank, epoch) for rank in range(3)))

    return train(network(body), body, steps_of, lambda step_along: nullcontext(), divisor=3)


def check(ranks_of: Any, body: Body) -> None:
    expected = in_one_process(body)
    for mine in ranks_of(3).run(with_torch, "chorusline", on_a_rank, body):
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


SEVERAL = Body(num_samples=8, acts=(BOTH, LOOK, TWICE), accumulate=2, recomputes=False)


@pytest.mark.parametrize(
    "body",
    [
        Body(),
        SEVERAL,
        replace(SEVERAL, accumulate=1, by_live=True),
        replace(SEVERAL, acts=(ONE, LOOK), by_live=True),
    ],
    ids=["recomputed", "several passes", "by ranks with data", "accumulated, by ranks with data"],
)
def test_a_body_over_a_shard_is_that_of_one_process(ranks_of: Any, body: Body) -> None:
    check(ranks_of, body)


@pytest.mark.slow
@given(
    st.builds(
        Body,
        num_samples=st.integers(1, 15),
        acts=st.lists(st.sampled_from((ONE, BOTH, TWICE, LOOK)), min_size=1, max_size=3)
        .filter(lambda acts: set(acts) != {LOOK})
        .map(tuple),
        accumulate=st.integers(1, 3),
        clips=st.booleans(),
        recomputes=st.booleans(),
        freezes=st.booleans(),
        reshards=st.booleans(),
        by_live=st.booleans(),
    )
    .filter(lambda body: not body.by_live or body.accumulate == 1 or body.num_reductions == 1)
    # After such an evaluation stock FSDP2 has whole parameters without gradients, and takes its
    # next pass with them.
    .filter(lambda body: body.reshards or body.acts[-1] != LOOK)
)
def test_any_body_over_a_shard_is_that_of_one_process(ranks_of: Any, body: Body) -> None:
    check(ranks_of, body)
