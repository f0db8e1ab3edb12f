"""What cannot be trained, called or collated says so in a sentence with the mend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data.fetching.options import FetchOptions
from tests.harness.reused_ranks import another_group


def wrapped(group: cl.Group, sharded: bool = False) -> tuple[Any, Any]:
    model = cl.DistributedDataParallel(torch.nn.Linear(2, 1), group)
    if sharded:
        return model, cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse coo": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "sparse csc": lambda: torch.eye(3).to_sparse_csc(),
    "sparse bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "expanded": lambda: torch.ones(1).expand(4),
    "expanded ": lambda: torch.ones(3, 1, 2).expand(3, 5, 2),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.filterwarnings("ignore")
def test_a_buffer_that_is_not_dense_is_named(alone: cl.Group, kind: str) -> None:
    module = torch.nn.Linear(2, 1)
    module.register_buffer("table", TENSORS[kind]())
    with pytest.raises(ValueError, match=f"buffer table is {kind.strip()}"):
        cl.DistributedDataParallel(module, alone)


@pytest.mark.parametrize("shape", [(), (1,), (1, 4), (0, 3)], ids=str)
def test_dense_buffers_with_any_strides_are_taken(alone: cl.Group, shape: tuple[int, ...]) -> None:
    module = torch.nn.Linear(2, 1)
    module.register_buffer(
        "table", torch.ones(1).expand(shape) if 1 in shape else torch.ones(shape)
    )
    if shape == (1, 4):
        module.table = torch.ones(4, 1).t()
    cl.DistributedDataParallel(module, alone)


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_belong_to_a_graph_are_refused(alone: cl.Group, sharded: bool) -> None:
    model, _ = wrapped(alone, sharded)
    with pytest.raises(RuntimeError, match=r"torch.autograd.grad\(loss, inputs, create_graph=True"):
        model(torch.ones(1, 2)).square().mean().backward(create_graph=True)


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
def test_a_penalty_on_gradients_of_the_input_is_taken(alone: cl.Group, sharded: bool) -> None:
    model, optim = wrapped(alone, sharded)
    x = torch.ones(1, 2, requires_grad=True)
    (of_input,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    of_input.square().sum().backward()
    optim.step()


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
def test_parameters_that_were_replaced_have_a_remedy_that_helps(
    alone: cl.Group, sharded: bool
) -> None:
    model, _ = wrapped(alone, sharded)
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    model.module.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="assign=False, which copies into them"):
        model(torch.ones(1, 2))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(1), torch.ones(2)],
        [{"x": 1}, {"y": 1}],
        [[1], [1, 2]],
        [object(), object()],
        [None, None],
    ],
    ids=["ragged", "keys", "lists", "objects", "none"],
)
def test_samples_that_make_no_batch_name_collate_fn(samples: list[Any], num_workers: int) -> None:
    options = FetchOptions(num_workers)
    shard = cl.Shard(samples, 2, rank=0, world_size=1, shuffle=False, options=options)
    with pytest.raises((TypeError, RuntimeError), match=r"no batch can be made .*Pass collate_fn="):
        next(iter(shard))


class Needy:
    def step(self, metric: float) -> None: ...


@pytest.mark.parametrize(
    "each",
    [
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: Needy(),
        lambda o: Needy().step,
        lambda o: functools.partial(lambda a, b: None, 1),
        lambda o: lambda metric: None,
    ],
    ids=["plateau", "own", "method", "partial", "lambda"],
)
def test_what_a_joined_rank_cannot_call_is_named(alone: cl.Group, each: Any) -> None:
    model, optim = wrapped(alone)
    with pytest.raises(TypeError, match=r"step_along\[1\].*cannot be called without arguments"):
        cl.Join([model], step_along=[optim, each(optim)])


def test_train_arguments_by_position_are_told_their_names() -> None:
    with pytest.raises(TypeError, match=r"run\(train, config=config\)"):
        cl.run(lambda ctx, config: None, {"lr": 0.1})  # type: ignore[call-arg]
    session = cl.Session()
    for call in (session.run, session.submit):
        with pytest.raises(TypeError, match=r"train_loop_config"):
            call(lambda ctx: None, {"lr": 0.1})  # type: ignore[call-arg]


def test_a_session_in_a_plain_with_says_how() -> None:
    with pytest.raises(TypeError, match="async with Session"), cl.Session():
        pass


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.8 has no grad_dtype")
def test_a_gradient_in_a_dtype_of_its_own_is_refused_as_that(alone: cl.Group) -> None:
    module = torch.nn.Linear(4, 1).to(torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
    model = cl.DistributedDataParallel(module, alone)
    with pytest.raises(RuntimeError, match=r"gradient torch\.float32, as the program has set "):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()


def ignoring(group: cl.Group, name: str, differs: bool) -> str:
    """As trl does for buffers of booleans, which NCCL does not send."""
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 2)
    module.register_buffer("mask", torch.tensor([True, differs and group.rank == 1]))
    module._ddp_params_and_buffers_to_ignore = [name]  # type: ignore[assignment]
    with another_group(group) as own:
        try:
            cl.DistributedDataParallel(module, own)
        except (ValueError, cl.CollectiveMismatch) as error:
            return str(error)
    return ""


def test_what_torch_is_told_to_ignore_is_equal_on_all_ranks_or_refused(ranks_of: Any) -> None:
    assert ranks_of(2).run(ignoring, "mask", False) == ["", ""]
    for told in ranks_of(2).run(ignoring, "mask", True):
        assert "it is mask, which _ddp_params_and_buffers_to_ignore names, with values" in told
    for told in ranks_of(2).run(ignoring, "weight", False):
        assert told.startswith("weight of _ddp_params_and_buffers_to_ignore would be a parameter")
