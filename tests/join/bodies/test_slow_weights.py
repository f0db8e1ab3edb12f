"""Weights that the loop's body keeps and writes beside a plain optimizer (Lookahead, averages): a
rank that has missed steps has other ones from the second epoch on. The ranks are told so, and each
remedy gives what one process gives."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import (
    backward_of_all,
    data_of,
    largest_difference,
    make_model,
)

DTYPE = torch.float64


class Body:
    """What the body does after the step, and at the end of an epoch, with what it keeps."""

    every = 3

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.steps = module, 0
        self.slow = [p.detach().clone() for p in module.parameters()]

    @property
    def pairs(self) -> Any:
        return zip(self.slow, self.module.parameters(), strict=True)

    def before_pass(self) -> None: ...

    def after_step(self) -> None: ...

    def after_epoch(self) -> None: ...


class Lookahead(Body):
    def after_step(self) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            for slow, parameter in self.pairs:
                slow.lerp_(parameter.data, 0.5)
                parameter.data.copy_(slow)


class LookaheadByData(Body):
    def after_step(self) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            for slow, parameter in self.pairs:
                parameter.data = torch.lerp(slow, parameter.data, 0.5)
                slow.copy_(parameter.data)


class LookaheadWithoutGradients(Body):
    every = 2

    @torch.no_grad()
    def after_step(self) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            for slow, parameter in self.pairs:
                parameter.lerp_(slow, 0.5)
                slow.copy_(parameter)


class LookaheadOfOneLayer(Body):
    """It writes a part of the model, one parameter of four."""

    def after_step(self) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            slow, parameter = next(iter(self.pairs))
            slow.lerp_(parameter.data, 0.5)
            parameter.data.copy_(slow)


class AverageWrittenAtTheEnd(Body):
    def after_step(self) -> None:
        for slow, parameter in self.pairs:
            slow.lerp_(parameter.data, 0.1)

    def after_epoch(self) -> None:
        for slow, parameter in self.pairs:
            parameter.data.copy_(slow)


class PulledToAnAverage(AverageWrittenAtTheEnd):
    def after_step(self) -> None:
        super().after_step()
        for slow, parameter in self.pairs:
            parameter.data.lerp_(slow, 0.01)

    def after_epoch(self) -> None: ...


class Clamped(Body):
    """It keeps nothing: what a rank without data has missed comes with the parameters."""

    def after_step(self) -> None:
        for parameter in self.module.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class ClampedFirst(Clamped):
    """The others have clamped before the pass of which a rank without data has none."""

    def before_pass(self) -> None:
        super().after_step()

    def after_step(self) -> None: ...


class LookaheadInBuffers(Body):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        module.register_buffer("steps", torch.zeros(()))
        for number, slow in enumerate(self.slow):
            module.register_buffer(f"slow_{number}", slow)

    def after_step(self) -> None:
        self.module.steps += 1
        if int(self.module.steps) % self.every == 0:
            for slow, parameter in self.pairs:
                slow.lerp_(parameter.data, 0.5)
                parameter.data.copy_(slow)


def train(
    group: cl.Group | None,
    kind: type[Body],
    lengths: Sequence[int],
    lists: str = "",
    transposed: bool = False,
) -> tuple[list[torch.Tensor], list[str]]:
    """The parameters, and what was warned. group: None: in one process, over all batches. lists:
    what step_along has. transposed: no parameter is contiguous, so none can be sampled."""
    module = make_model(DTYPE)
    if transposed:
        for number in (0, 2):
            module[number].bias = None
            module[number].weight.data = module[number].weight.data.T.contiguous().T
    body = kind(module)
    model: Any = cl.DistributedDataParallel(module, group) if group else module
    optim = torch.optim.SGD(module.parameters(), lr=0.1)
    data = data_of(group, lengths, DTYPE)

    def step() -> None:
        optim.step()
        body.after_step()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            along = [step] if lists == "function" else []
            join = cl.Join([model], step_along=along, skew_warning=None) if group else None
            with join or contextlib.nullcontext():
                for number in range(max(map(len, data))):
                    body.before_pass()
                    optim.zero_grad()
                    backward_of_all(model, data, number)
                    step()
            body.after_epoch()
    return [p.detach().clone() for p in module.parameters()], [str(one.message) for one in told]


def on_ranks(group: cl.Group, *args: Any) -> Any:
    with another_group(group) as own:
        return train(own, *args)


DRIFTING = [
    *(Lookahead, LookaheadByData, LookaheadWithoutGradients, LookaheadOfOneLayer),
    *(AverageWrittenAtTheEnd, PulledToAnAverage),
]
LENGTHS = ((4, 7), (7, 3), (2, 9))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", DRIFTING)
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_that_ranks_keep_by_hand_are_named_where_they_part_them(
    ranks_of: Callable[[int], Any], kind: type[Body], lengths: tuple[int, int], transposed: bool
) -> None:
    first, second = ranks_of(2).run(on_ranks, kind, lengths, "", transposed)
    told = [*first[1], *second[1]]
    assert len(told) == 1, told
    assert "differs between rank 0 and rank 1" in told[0]
    assert "not what the loop's body keeps" in told[0] and "in buffers of the model" in told[0]


@pytest.mark.parametrize("lengths", [*LENGTHS, (5, 5), (0, 5)], ids=str)
@pytest.mark.parametrize(
    ("kind", "lists"),
    [
        *((Clamped, ""), (ClampedFirst, ""), (LookaheadInBuffers, "")),
        *((kind, "function") for kind in DRIFTING if kind is not AverageWrittenAtTheEnd),
    ],
)
def test_each_remedy_gives_what_one_process_gives(
    ranks_of: Callable[[int], Any], kind: type[Body], lists: str, lengths: tuple[int, int]
) -> None:
    expected, _ = train(None, kind, lengths)
    for found, told in ranks_of(2).run(on_ranks, kind, lengths, lists):
        assert told == []
        assert largest_difference(found, expected) < 1e-12
