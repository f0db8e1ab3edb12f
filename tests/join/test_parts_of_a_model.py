"""One model with an optimizer for each of its parts, as a GAN in one module: a body clears, clips
and steps the parts in any order, and uneven data give what they give in one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import chorusline as cl
from tests.harness.combinations import combinations
from tests.harness.reused_ranks import another_group
from tests.references.random_bodies import data_of

Act = tuple[str, int]
"""What is done, and with which part: "pass" (the last that it uses), "clear", "clear to zeros",
"clip" or "step"."""


class Parts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(3, 3).double() for _ in range(2))

    def forward(self, x: torch.Tensor, last: int) -> torch.Tensor:
        for part in self.parts[: last + 1]:
            x = part(x).sin()
        return x

    def of(self, part: int) -> list[torch.nn.Parameter]:
        return list(self.parts[part].parameters())


def optimizers(net: Parts, way: str, group: cl.Group | None) -> list[Any]:
    # In the way "plain" a rank without data does not step, and gets the parameters at the end.
    options = {"lr": 0.1, "momentum": 0.0 if way == "plain" else 0.9}
    if way == "zero" and group is not None:
        make = functools.partial(cl.ZeroRedundancyOptimizer, group=group, **options)
        return [make(net.of(part), torch.optim.SGD) for part in (0, 1)]
    return [torch.optim.SGD(net.of(part), **options) for part in (0, 1)]


def on_ranks(
    group: cl.Group, body: Sequence[Act], lengths: Sequence[int], way: str, weighs: bool
) -> list[torch.Tensor]:
    with another_group(group) as own:
        net = Parts()
        model = cl.DistributedDataParallel(net, own)
        both = optimizers(net, way, own)
        listed = [model, *both] if way == "zero" else [model]
        along = both if way == "along" else []
        beside = [own.new_group(range(own.size))]
        for epoch in range(2):
            with cl.Join(listed, step_along=along, groups=beside, skew_warning=None):
                for batch in range(lengths[own.rank]):
                    for number, (kind, part) in enumerate(body):
                        if kind == "pass":
                            data = data_of(own.rank, batch + 7 * epoch, number)
                            loss = model(data, part).mean()
                            (
                                model.weigh(loss, weight_of(own.rank, batch)) if weighs else loss
                            ).backward()
                        else:
                            do(both[part], kind)
        return [parameter.detach().clone() for parameter in net.parameters()]


def weight_of(rank: int, batch: int) -> float:
    return 1.0 + 2 * rank + batch


def do(optimizer: Any, kind: str) -> None:
    if kind == "step":
        optimizer.step()
    elif kind == "clip":
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.02, 0.02)
    else:
        optimizer.zero_grad(set_to_none="zeros" not in kind)


def in_one_process(
    body: Sequence[Act], lengths: Sequence[int], way: str, weighs: bool
) -> list[torch.Tensor]:
    net = Parts()
    both = optimizers(net, way, None)
    weights = [0.0, 0.0]  # Of the losses, since a part was cleared.
    has_stepped = False  # Since the last pass.
    for epoch, batch in itertools.product(range(2), range(max(lengths))):
        live = [rank for rank, length in enumerate(lengths) if length > batch]
        each = {rank: weight_of(rank, batch) if weighs else 1.0 for rank in live}
        total = sum(each.values())
        for number, (kind, part) in enumerate(body):
            holds = [net.of(one)[0].grad is not None for one in (0, 1)]
            if kind != "pass":
                do(both[part], kind)
                has_stepped |= kind == "step"
                if "clear" in kind and holds[part]:
                    weights[part] = 0.0
                continue
            datas = {rank: data_of(rank, batch + 7 * epoch, number) for rank in live}
            loss = sum(net(data, part).mean() * each[rank] for rank, data in datas.items())
            for one in (0, 1):
                # A part without gradients in the step before begins again.
                before = 0.0 if has_stepped and not holds[one] else weights[one]
                weights[one] = before + total
                divisor = weights[one] if weighs else len(lengths)
                used = net.of(one) if one <= part else []
                came = torch.autograd.grad(loss, used, retain_graph=True) if used else []
                for p in net.of(one) if weighs else []:
                    p.grad = None if p.grad is None else p.grad * before / divisor
                for p, g in zip(used, came, strict=True):
                    p.grad = g / divisor + (0.0 if p.grad is None else p.grad)
            has_stepped = False
    return [parameter.detach() for parameter in net.parameters()]


def check(
    ranks_of: Any, body: Sequence[Act], lengths: Sequence[int], way: str, weighs: bool
) -> None:
    whole = in_one_process(body, lengths, way, weighs)
    for rank, told in enumerate(ranks_of(len(lengths)).run(on_ranks, body, lengths, way, weighs)):
        for one, other in zip(told, whole, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-11), (rank, one - other)


BODIES: dict[str, list[Act]] = {
    "critic, then generator": [
        *(("clear", 0), ("pass", 0), ("step", 0)),
        *(("clear", 1), ("pass", 1), ("step", 1)),
    ],
    "generator, then critic": [
        *(("clear", 1), ("pass", 1), ("step", 1)),
        *(("clear", 0), ("pass", 0), ("step", 0)),
    ],
    "cleared behind": [
        *(("pass", 0), ("step", 0), ("pass", 1), ("step", 1)),
        *(("clear", 1), ("clear to zeros", 0)),
    ],
    "one part is cleared never": [("clear", 1), ("pass", 1), ("step", 1), ("step", 0)],
    "cleared before and after": [
        *(("clear", 0), ("pass", 0), ("step", 0)),
        *(("clear", 1), ("pass", 1), ("step", 1), ("clear", 0)),
    ],
    "clipped": [
        *(("clear", 0), ("pass", 0), ("clip", 0), ("step", 0)),
        *(("clear", 1), ("pass", 1), ("clip", 1), ("step", 1)),
    ],
    "a part that the first pass does not use": [
        *(("clear", 0), ("clear", 1), ("pass", 0), ("pass", 1), ("step", 1), ("step", 0)),
    ],
}


@combinations(
    3,
    lengths=[(4, 4), (5, 3), (0, 3)],
    body=BODIES,
    weighs=[False, True],
    way=["zero", "plain"],
)
def test_parts_are_cleared_and_stepped_as_in_one_process(ranks_of, lengths, body, weighs, way):
    check(ranks_of, BODIES[body], lengths, way, weighs)


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("lengths", [(4, 4), (5, 3)])
def test_a_rank_without_data_that_steps_along_keeps_what_the_others_keep(ranks_of, lengths, weighs):
    # One pass in a batch, and then the steps: what such a rank can know.
    body = [("clear", 1), ("pass", 1), ("step", 0), ("step", 1)]
    check(ranks_of, body, lengths, "along", weighs)


KINDS = ["pass", "clear", "clear to zeros", "clip", "step"]
ACTS = st.tuples(st.sampled_from(KINDS), st.integers(0, 1))


@given(
    st.lists(ACTS, max_size=7),
    st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(any),
    st.sampled_from(["zero", "plain"]),
    st.booleans(),
)
def test_any_order_of_passes_clears_and_steps_of_parts_is_exact(
    ranks_of, body, lengths, way, weighs
):
    if weighs:  # Zeros and the gradients of a part that a pass does not use look alike.
        body = [(kind.removesuffix(" to zeros"), part) for kind, part in body]
    # Both parts have gradients from the first step on, and a pass of each batch shows the steps.
    check(ranks_of, [("pass", 1), *body], lengths, way, weighs)
