"""What programs do to parameters and gradients around a sharded step counts, or is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 1, 7)),
        torch.nn.Conv2d(1, 3, (1, 3)),
        torch.nn.Tanh(),
        torch.nn.Conv2d(3, 2, (1, 3)),
        torch.nn.Flatten(),
        torch.nn.Linear(6, 5),
    ).double()


def halve(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


def put_vector(module: torch.nn.Module) -> None:
    vector = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector * 0.5, module.parameters())


def clamp(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def load(module: torch.nn.Module) -> None:
    module.load_state_dict({k: v * 0.5 for k, v in module.state_dict().items()})


def use_channels_last(module: torch.nn.Module) -> None:
    module.to(memory_format=torch.channels_last)


CHANGES: dict[str, Callable[[torch.nn.Module], None]] = {
    "data": halve,
    "vector": put_vector,
    "clamp": clamp,
    "load": load,
    "channels last": use_channels_last,
}


def train(group: cl.Group | None, change: Callable[..., None], at: int, size: int) -> Any:
    """Four steps, with `change` before step number `at`, or, for -1, before anything is wrapped.
    group: None: in one process, over the batches of `size` ranks."""
    module = make_model()
    if at < 0:
        change(module)
    model: torch.nn.Module = module
    if group is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        data = [batches_of(rank, 4, torch.float64) for rank in range(size)]
    else:
        model = cl.DistributedDataParallel(module, group, bucket_cap_mb=1e-4)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01)
        data = [batches_of(group.rank, 4, torch.float64)]
    for step in range(4):
        if step == at:
            change(module)
        for batches in data:
            (model(batches[step]).square().mean() / len(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in module.parameters()]


def train_all(group: cl.Group) -> dict[str, Any]:
    with another_group(group) as own:
        return {
            f"{name} {at}": train(own, change, at, own.size)
            for name, change in CHANGES.items()
            for at in (-1, 0, 2)
        }


def test_what_is_written_or_rebound_counts_as_in_one_process(ranks_of):
    results = ranks_of(2).run(train_all)
    for name, change in CHANGES.items():
        for at in (-1, 0, 2):
            expected = train(None, change, at, 2)
            for of_rank in results:
                found = of_rank[f"{name} {at}"]
                assert largest_difference(found, expected) < 1e-12, (name, at)


def clip(module: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def clip_values(module: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(module.parameters(), 0.1)


def add_noise(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad += 0.1


def replace(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()


def change_gradients(group: cl.Group, change: Callable[[torch.nn.Module], None]) -> str:
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01)
        (batch,) = batches_of(own.rank, 1, torch.float64)
        for _ in range(2):  # The first step is as always.
            model(batch).square().mean().backward()
            if optimizer.num_steps:
                change(model.module)
            try:
                optimizer.step()
            except RuntimeError as error:
                return str(error)
            optimizer.zero_grad()
    return ""


def clamp_data(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-0.001, 0.001)


def halve_in_numpy(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        array = parameter.grad.numpy()
        array *= 0.5


def clear_a_row(module: torch.nn.Module) -> None:
    module[-1].weight.grad.data[0].zero_()


def set_data(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data * 0.5


def turn_around(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.data.copy_(parameter.grad.data.flatten().flip(0).view(parameter.shape))


def negate(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.data.neg_()


UNCOUNTED = [turn_around, negate, clamp_data, halve_in_numpy, clear_a_row, set_data]
"""Changes of which torch's counter of writes knows nothing."""


@pytest.mark.parametrize("change", [clip, clip_values, add_noise, replace, *UNCOUNTED])
def test_gradients_that_are_sent_already_cannot_be_changed_in_silence(ranks_of, change):
    for told in ranks_of(2).run(change_gradients, change):
        assert "was changed after the backward pass" in told and "max_norm=" in told


def delete_options(group: cl.Group) -> tuple[list[str], bool]:
    """Each option of each group in turn; it is set again, and the step is taken."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(), own)
        first, *others = model.parameters()
        groups = [{"params": [first]}, {"params": others, "lr": 0.5}]
        optimizer = cl.ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01)
        (batch,) = batches_of(own.rank, 1, torch.float64)
        said = []
        for number, options in enumerate(optimizer.param_groups):
            for name in optimizer.defaults:
                model(batch).square().mean().backward()
                value = options.pop(name)
                with pytest.raises(RuntimeError, match=f"group {number} .* has {name},") as told:
                    optimizer.step()
                said.append(str(told.value))
                options[name] = value
                optimizer.step()
                optimizer.zero_grad()
        return said, optimizer.num_steps == len(said)


def test_an_option_that_the_program_has_deleted_is_named_with_its_group(ranks_of):
    for said, has_stepped in ranks_of(2).run(delete_options):
        assert len(said) > 20 and has_stepped
        assert all("Set what is missing before step(), on all ranks" in one for one in said)


def convert(group: cl.Group) -> str:
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01)
        (batch,) = batches_of(own.rank, 1, torch.float32)
        model.module.float()
        with pytest.raises(RuntimeError) as raised:
            model(batch).square().mean().backward()
            optimizer.step()
        return str(raised.value)


def test_another_dtype_after_wrapping_is_refused(ranks_of):
    for told in ranks_of(2).run(convert):
        assert "torch.float32" in told and "before" in told


def step_between(group: cl.Group | None, used: str, size: int) -> Any:
    """A step between a forward pass and its backward pass. used: the part of the model that the
    first loss has trained; the second loss is of `first`."""
    torch.manual_seed(0)
    module = torch.nn.ModuleDict(
        {name: torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Linear(3, 1)) for name in PARTS}
    ).double()
    model = cl.DistributedDataParallel(Both(module), group) if group else Both(module)
    optimizer = (
        cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        if group
        else torch.optim.SGD(model.parameters(), lr=0.1)
    )
    ranks = range(size) if group is None else [group.rank]
    batches = [batches_of(rank, 1, torch.float64)[0] for rank in ranks]
    share = 1 if group else size
    losses = [model(batch) for batch in batches]
    (sum(loss[used].square().mean() for loss in losses) / share).backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    try:
        (sum(loss["first"].square().mean() for loss in losses) / share).backward()
    except RuntimeError as error:
        return str(error)
    optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


PARTS = ("first", "second")


class Both(torch.nn.Module):
    def __init__(self, parts: torch.nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: self.parts[name](batch) for name in PARTS}


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_between_a_forward_pass_and_its_backward_pass_is_refused_as_in_torch(
    ranks_of: Any, size: int
) -> None:
    refused = "has been modified by an inplace operation"
    assert refused in step_between(None, "first", size)
    for told in ranks_of(size).run(step_between, "first", size):
        assert refused in told
    # What the step has not changed may be passed.
    for found in ranks_of(size).run(step_between, "second", size):
        assert largest_difference(found, step_between(None, "second", size)) < 1e-12


def drift(group: cl.Group, has_mean: bool) -> list[str]:
    """The program writes to the parameters before each step, in a hook of a parameter."""
    with another_group(group) as own, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = cl.DistributedDataParallel(make_model(), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)

        def write(parameter: torch.Tensor) -> None:
            gradient = parameter.grad.clone()
            if has_mean:
                own.all_reduce(gradient).wait()
            parameter.data.add_(gradient, alpha=-0.1)

        bias = model.module[-1].bias
        bias.register_post_accumulate_grad_hook(write)
        for batch in batches_of(own.rank, 4, torch.float64):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [str(one.message) for one in said if one.filename == __file__]


@pytest.mark.parametrize("has_mean", [False, True])
def test_ranks_that_write_other_parameters_are_told_so_once(ranks_of: Any, has_mean: bool) -> None:
    told, others = ranks_of(2).run(drift, has_mean)
    assert others == [] and len(told) == int(not has_mean)
    if not has_mean:
        assert "parameter 5.bias differs between rank 0 and rank 1 in step 1" in told[0], told


@pytest.mark.parametrize("freezes", [False, True], ids=["cleared", "frozen"])
def test_the_norm_leaves_out_what_is_frozen_and_counts_what_is_cleared_after_the_pass(
    alone: cl.Group, freezes: bool
) -> None:
    """Cleared, it has been sent; it is not stepped either way (docs/zero.md)."""
    (batch,) = batches_of(0, 1, torch.float64)
    plain = make_model()
    plain(batch).square().mean().backward()
    of_all = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    plain[-1].weight.grad = None
    of_rest = torch.nn.utils.get_total_norm(
        [p.grad for p in plain.parameters() if p.grad is not None]
    )
    model = cl.DistributedDataParallel(make_model(), alone)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, max_norm=1e-3)
    weight = model.module[-1].weight
    before = weight.detach().clone()
    weight.requires_grad_(not freezes)
    model(batch).square().mean().backward()
    weight.grad = None
    optimizer.step()
    assert torch.equal(weight, before)
    assert optimizer.grad_norm == pytest.approx(float(of_rest if freezes else of_all), rel=1e-12)
    assert of_rest < 0.95 * of_all
