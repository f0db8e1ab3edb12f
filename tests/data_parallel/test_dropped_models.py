"""A model that a program drops is freed, in a group that goes on; one that it keeps is reduced."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.stepped_training import stepped
from tests.references.training import batches_of, largest_difference, loss_of, make_model

BATCHES = [torch.ones(2, 3), torch.full((1, 3), 2.0)]


def perceptron() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
    )


def only_wrapped(group: cl.Group) -> torch.nn.Module:
    return cl.DistributedDataParallel(perceptron(), group)


def without_a_step(group: cl.Group) -> torch.nn.Module:
    model = cl.DistributedDataParallel(perceptron(), group)
    model(BATCHES[0]).sum().backward()
    return model


def accumulated(group: cl.Group) -> torch.nn.Module:
    model = cl.DistributedDataParallel(perceptron(), group)
    with model.no_sync():
        model(BATCHES[0]).sum().backward()
    return model


def plain(group: cl.Group) -> torch.nn.Module:
    model = cl.DistributedDataParallel(perceptron(), group, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters())
    with cl.Join([model], step_along=[optimizer]):
        for _ in range(2):
            model(BATCHES[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def sharded(group: cl.Group) -> torch.nn.Module:
    model = cl.DistributedDataParallel(perceptron(), group)
    optimizer = cl.ZeroRedundancyOptimizer(
        model, torch.optim.AdamW, lr=0.1, max_norm=1.0, check_every=1
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with cl.Join([model, optimizer], step_along=[schedule]):
        for batch in BATCHES * 2:
            model(batch.expand(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    optimizer.consolidate_state_dict(0)
    return model


def pure(group: cl.Group) -> torch.nn.Module:
    model = cl.PureDistributedDataParallel(perceptron(), group)
    with model.no_sync():
        model(BATCHES[0]).sum().backward()
    model(BATCHES[0]).sum().backward()
    return model


def ended_by_an_error(group: cl.Group) -> torch.nn.Module:
    model = cl.DistributedDataParallel(perceptron(), group)
    with contextlib.suppress(RuntimeError), cl.Join([model]):
        model(torch.ones(2, 4))
    return model


@pytest.mark.parametrize(
    "train", [only_wrapped, without_a_step, accumulated, plain, sharded, pure, ended_by_an_error]
)
def test_a_model_that_is_dropped_is_freed(
    alone: cl.Group, train: Callable[[cl.Group], torch.nn.Module]
) -> None:
    model = train(alone)
    left = [weakref.ref(each) for each in (model, model.module, *model.parameters())]
    del model
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)


def _kinds_that_stay(group: cl.Group, options: dict[str, Any]) -> Counter[str]:
    segment: Any = group._communicator._segment  # type: ignore[attr-defined]

    def living() -> Counter[str]:
        segment._views.clear()  # Of its memory: it keeps 512 at most.
        gc.collect()
        types = [type(each) for each in gc.get_objects()]
        return Counter(
            kind.__name__
            for kind in types
            if issubclass(kind, torch.Tensor | torch.nn.Module)
            or kind.__module__.startswith("chorusline.runtime")
        )

    for _ in range(2):  # What is made once and kept.
        stepped(group, epochs=1, **options)
    before = living()
    for _ in range(3):
        stepped(group, epochs=1, **options)
    return living() - before


@pytest.mark.parametrize(
    "options",
    [{}, {"sharded": False}, {"num_passes": 3}, {"replicas": 2}, {"model_name": "transformer"}],
    ids=str,
)
def test_training_again_and_again_keeps_nothing(ranks_of: Any, options: dict[str, Any]) -> None:
    for kinds in ranks_of(2).run(_kinds_that_stay, options):
        assert kinds.total() < 5, kinds  # A value of the last step or so, not one of each training.


@pytest.mark.parametrize("wrap", [cl.DistributedDataParallel, cl.PureDistributedDataParallel])
def test_a_module_whose_wrapper_was_dropped_is_still_reduced(ranks_of: Any, wrap: Any) -> None:
    assert ranks_of(2).run(_gradient_without_the_wrapper, wrap) == [1.5, 1.5]


def _gradient_without_the_wrapper(group: cl.Group, wrap: Any) -> float:
    net = torch.nn.Linear(1, 1, bias=False)
    output = wrap(net, group)(torch.full((1, 1), 1.0 + group.rank))
    gc.collect()
    output.sum().backward()
    assert net.weight.grad is not None
    return net.weight.grad.item()


def train_wrapped_again(group, lengths, is_part):
    """The module is wrapped for each epoch, and its model before is dropped. is_part: the second
    time as a part of another module."""
    module = make_model(torch.float64)
    with another_group(group) as own:
        for epoch in range(2):
            whole = torch.nn.Sequential(module) if is_part and epoch else module
            model = cl.DistributedDataParallel(whole, own)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with cl.Join([model], step_along=[optimizer], skew_warning=None):
                for batch in batches_of(own.rank, 4, torch.float64)[epoch : lengths[own.rank]]:
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("lengths", [(3, 3), (4, 2)])
def test_a_module_that_is_wrapped_again_is_reduced_by_its_newest_model(ranks_of, lengths, is_part):
    module = make_model(torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for epoch in range(2):
        own = [batches_of(r, 4, torch.float64)[epoch:n] for r, n in enumerate(lengths)]
        for batches in itertools.zip_longest(*own):
            live = [loss_of(module, batch) for batch in batches if batch is not None]
            optimizer.zero_grad()
            (sum(live) / 2).backward()
            optimizer.step()
    for found in ranks_of(2).run(train_wrapped_again, lengths, is_part):
        assert largest_difference(found, [p.detach() for p in module.parameters()]) < 1e-12
