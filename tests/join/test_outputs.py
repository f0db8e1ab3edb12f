"""Outputs of every kind begin a pass at the model's output; and each refused pass has its cause."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import types
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import chorusline as cl
from chorusline.runtime.data_parallel.outputs import tensors_of
from tests.harness.reused_ranks import another_group


@dataclasses.dataclass
class Data:
    loss: Any


@dataclasses.dataclass(slots=True, frozen=True)
class Slotted:
    loss: Any


class Own:
    def __init__(self, loss: Any) -> None:
        self.hidden = {"of": [Data(loss)]}

    @property
    def loss(self) -> Any:
        return self.hidden["of"][0].loss


class Cyclic:
    def __init__(self, loss: Any) -> None:
        self.own, self.loss = self, loss


class Dictionary(dict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        return self[name]


Named = namedtuple("Named", "loss")


class Module(torch.nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class Failure(Exception):
    @property
    def loss(self) -> Any:
        return self.args[0]


class Asked:
    """Gives the loss when it is called, as the way there says."""

    def __init__(self, held: Any, way: Callable[[Any], Any]) -> None:
        self.held, self.way = held, way

    @property
    def loss(self) -> Any:
        return self.way(self.held)


def future_of(loss: Any) -> Asked:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(loss)
    return Asked(future, lambda one: one.value())


def awaited(loss: Any) -> Asked:
    future = asyncio.new_event_loop().create_future()
    future.set_result(loss)
    future.get_loop().close()
    return Asked(future, lambda one: one.result())


def array_of(loss: Any) -> Asked:
    array = np.empty(1, object)
    array[0] = loss
    return Asked(array, lambda one: one[0])


kept: list[Any] = []


def referred_to(loss: Any) -> Asked:
    kept[:] = [loss]
    return Asked(weakref.ref(loss), lambda one: one())


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "dataclass": Data,
    "slots": Slotted,
    "own": Own,
    "cyclic": Cyclic,
    "namespace": lambda loss: types.SimpleNamespace(loss=loss),
    "dictionary": lambda loss: Dictionary(loss=loss),
    "named tuple": Named,
    "module": Module,
    "exception": Failure,
    "future": future_of,
    "asyncio's future": awaited,
    "reference": referred_to,
    "function": lambda loss: Asked(lambda: loss, lambda one: one()),
    "method": lambda loss: Asked(Data(loss).__repr__, lambda one: one.__self__.loss),
    "partial": lambda loss: Asked(functools.partial(torch.sum, loss), lambda one: one()),
    "array": array_of,
}


class Holding(torch.nn.Module):
    def __init__(self, holder: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.holder = torch.nn.Linear(2, 3), HOLDERS[holder]

    def forward(self, x: torch.Tensor) -> Any:
        return self.holder(self.inner(x).square().mean())


def train(group: cl.Group, holder: str, lengths: tuple[int, int], how: str) -> Any:
    """Uneven, with a plain optimizer; the parameters at the end, or the error."""
    group = another_group(group)
    try:
        return train_in(group, holder, lengths, how)
    except RuntimeError as error:
        return str(error)
    finally:
        group.close()


def train_in(group: cl.Group, holder: str, lengths: tuple[int, int], how: str) -> Any:
    net = Holding(holder)
    model = cl.DistributedDataParallel(net, group)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    run = net if how == "inside" else model
    with cl.Join([model], step_along=[optim], skew_warning=None):
        for step in range(lengths[group.rank]):
            x = torch.full((1, 2), 1.0 + step + 10 * group.rank)
            if how == "no_sync":
                model(x).loss.backward()
                with model.no_sync():
                    model(x).loss.backward()
            run(x).loss.backward()
            optim.step()
            optim.zero_grad()
    return [parameter.tolist() for parameter in model.parameters()]


def alone(holder: str, lengths: tuple[int, int]) -> list[Any]:
    net = Holding(holder)
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(max(lengths)):
        optim.zero_grad()
        for rank in range(2):
            if step < lengths[rank]:
                (net(torch.full((1, 2), 1.0 + step + 10 * rank)).loss / 2).backward()
        optim.step()
    return [parameter.tolist() for parameter in net.parameters()]


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("lengths", [(4, 2), (0, 3)], ids=str)
def test_an_output_of_any_kind_trains_as_in_one_process(
    ranks_of: Callable[[int], Any], holder: str, lengths: tuple[int, int]
) -> None:
    expected = alone(holder, lengths)
    for parameters in ranks_of(2).run(train, holder, lengths, ""):
        for ours, theirs in zip(parameters, expected, strict=True):
            assert torch.tensor(ours).allclose(torch.tensor(theirs), rtol=1e-4)


CAUSES = {
    "inside": ("did not begin at an output of this DistributedDataParallel", "model(x)"),
    "no_sync": ("a backward pass in no_sync() was added", "only the last one outside"),
}


@pytest.mark.parametrize("how", CAUSES)
def test_a_refused_pass_says_its_own_cause(ranks_of: Callable[[int], Any], how: str) -> None:
    with_data, without = ranks_of(2).run(train, "dataclass", (4, 2), how)
    for text in CAUSES[how]:
        assert text in with_data, with_data
    assert "rank 1 has run out of data" in with_data
    assert not any(text in with_data for other in CAUSES if other != how for text in CAUSES[other])
    assert "ranks []" not in with_data + str(without)


def test_what_refers_to_more_than_its_output_is_not_looked_into() -> None:
    loss = torch.ones(())
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    held = types.SimpleNamespace(a=module, b=torch.nn.Linear, c=torch, d=[loss, 1])
    assert [*tensors_of(held)] == [loss]
