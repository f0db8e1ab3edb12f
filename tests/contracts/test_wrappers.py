"""Wrapper tensors given to a `Group`: refused before anything is sent, and the group lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from chorusline.collectives.group import Group


class Plain(torch.Tensor):
    """A class that only adds Python."""


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        wrapper: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*pytree.tree_map_only(cls, lambda one: one.inner, args), **(kwargs or {}))


def fake(use: Callable[[torch.Tensor], Any]) -> None:
    with FakeTensorMode():
        tensor = torch.ones(3)
    use(tensor)


def in_fake_mode(use: Callable[[torch.Tensor], Any]) -> None:
    tensor = torch.ones(3)
    with FakeTensorMode():
        use(tensor)


def wrapper(use: Callable[[torch.Tensor], Any]) -> None:
    use(Wrapper(torch.ones(3)))


def vmapped(use: Callable[[torch.Tensor], Any]) -> None:
    torch.func.vmap(lambda one: (use(one), one)[1])(torch.ones(2, 3))


def functionalized(use: Callable[[torch.Tensor], Any]) -> None:
    torch.func.functionalize(lambda one: (use(one), one)[1])(torch.ones(3))


def sharded(use: Callable[[torch.Tensor], Any]) -> None:
    kind = type("DTensor", (Wrapper,), {})  # A real one needs a mesh.
    use(kind(torch.ones(3)))


def uninitialized(use: Callable[[torch.Tensor], Any]) -> None:
    use(torch.nn.UninitializedParameter())


REFUSED = {
    fake: "outside of FakeTensorMode",
    in_fake_mode: "outside of it",
    wrapper: "pass the tensors inside it",
    vmapped: "outside of the transform",
    functionalized: "outside of the transform",
    sharded: r"pass .to_local\(\)",
    uninitialized: "run the model once first",
}


def refuses(group: Group) -> None:
    for make, mend in REFUSED.items():
        uses: list[Callable[[torch.Tensor], Any]] = [
            lambda tensor: group.all_reduce(tensor).wait(),
            lambda tensor: group.broadcast(tensor, 0).wait(),
            lambda tensor: group.all_gather([torch.empty(3)] * 2, tensor).wait(),
        ]
        # On one rank only: nothing has been sent, so no other rank needs to know.
        for use in uses if group.rank == 0 else ():
            with pytest.raises(TypeError, match=mend):
                make(use)
    tensor = torch.ones(2)
    group.all_reduce(tensor).wait()
    assert tensor.tolist() == [2.0, 2.0]


def test_a_group_refuses_wrappers_before_anything_is_sent(ranks_of: Any) -> None:
    ranks_of(2).run(refuses)


def takes(group: Group) -> None:
    plain = torch.full((3,), group.rank + 1.0).as_subclass(Plain)
    group.all_reduce(plain).wait()
    assert type(plain) is Plain
    assert plain.tolist() == [3.0] * 3
    behind = torch.full((3,), group.rank + 1.0)
    group.all_reduce(AsyncCollectiveTensor(behind)).wait()
    assert behind.tolist() == [3.0] * 3
    parameter = torch.nn.Parameter(torch.full((3,), group.rank + 1.0))
    group.all_reduce(parameter).wait()
    assert parameter.tolist() == [3.0] * 3


def test_a_group_takes_what_only_adds_python_to_a_tensor(ranks_of: Any) -> None:
    ranks_of(2).run(takes)
