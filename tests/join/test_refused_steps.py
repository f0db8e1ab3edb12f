"""A sharded step that a rank cannot take, inside a Join: all ranks say so in the same words, also
those that have run out of data."""

from collections.abc import Callable

import pytest
import torch

import chorusline as cl
from chorusline.collectives.contract.errors import name_ranks
from tests.harness.combinations import combinations
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model

Body = Callable[[torch.nn.Module, cl.ZeroRedundancyOptimizer, torch.Tensor, int], None]


def steps_twice(model, optimizer, batch, number):
    loss_of(model, batch).backward()
    for _ in range(2 if number >= 2 else 1):
        optimizer.step()
    optimizer.zero_grad()


def steps_before_a_pass(model, optimizer, batch, number):
    with model.no_sync():
        loss_of(model, batch).backward()
    optimizer.step()


def unfreezes(model, optimizer, batch, number):
    model.module[-1].requires_grad_(number >= 2)
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def clips(model, optimizer, batch, number):
    loss_of(model, batch).backward()
    if number >= 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()


def replaces_gradients(model, optimizer, batch, number):
    loss_of(model, batch).backward()
    if number >= 2:
        model.module[0].bias.grad = torch.ones_like(model.module[0].bias)
    optimizer.step()
    optimizer.zero_grad()


def adds_in_no_sync(model, optimizer, batch, number):
    loss_of(model, batch).backward()
    if number >= 2:
        with model.no_sync():
            loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def adds_in_no_sync_after_two(model, optimizer, batch, number):
    with model.no_sync():
        loss_of(model, batch).backward()
    loss_of(model, batch).backward()
    loss_of(model, batch).backward()
    if number >= 2:
        with model.no_sync():
            loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def clips_after_several(model, optimizer, batch, number):
    loss_of(model, batch).backward()
    with model.no_sync():
        loss_of(model, batch).backward()
    loss_of(model, batch).backward()
    if number >= 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    optimizer.step()
    optimizer.zero_grad()


def deletes_an_option(model, optimizer, batch, number):
    loss_of(model, batch).backward()
    if number >= 2:
        del optimizer.param_groups[0]["lr"]
    optimizer.step()
    optimizer.zero_grad()


def makes_its_group_anew(model, optimizer, batch, number):
    loss_of(model, batch).backward()
    if number >= 2:
        optimizer.param_groups[0] = {"params": optimizer.param_groups[0]["params"], "lr": 0.2}
    optimizer.step()
    optimizer.zero_grad()


BODIES: dict[Body, str] = {
    steps_twice: "step() needs gradients that were reduced since the last step",
    steps_before_a_pass: "outside no_sync()",
    unfreezes: "trainable now (2.weight, 2.bias)",
    clips: "write ZeroRedundancyOptimizer(..., max_norm=",
    clips_after_several: "write ZeroRedundancyOptimizer(..., max_norm=",
    adds_in_no_sync: "a backward pass in no_sync() has added to the gradient of a parameter",
    adds_in_no_sync_after_two: "a backward pass in no_sync() has added to the gradient",
    replaces_gradients: "(0.bias) was changed after the backward pass",
    deletes_an_option: "parameter group 0 of the optimizer no longer has lr, and SGD",
    makes_its_group_anew: "optimizer.param_groups[0]['dampening'] = 0",
}


def train(group, lengths, body, several):
    with another_group(group) as own:
        module = make_model(torch.float64)
        module[-1].requires_grad_(body is not unfreezes)
        model = cl.DistributedDataParallel(module, own, bucket_cap_mb=1e-4 if several else 25)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        with pytest.raises(RuntimeError) as raised, cl.Join([model, optimizer], skew_warning=None):
            for number, batch in enumerate(batches_of(own.rank, lengths[own.rank], torch.float64)):
                body(model, optimizer, batch, number)
        return str(raised.value)


@combinations(4, body=BODIES, lengths=[(4, 4), (5, 1), (2, 4), (0, 3)])
def test_a_step_that_a_rank_cannot_take_is_refused_by_all_ranks_in_one_sentence(
    ranks_of, body, lengths
):
    for several in (False, True):
        told = ranks_of(2).run(train, lengths, body, several)
        assert told[0] == told[1], told
        needs = 0 if body is steps_before_a_pass else 2
        ranks = [rank for rank, length in enumerate(lengths) if length > needs]
        assert told[0].startswith(f"on {name_ranks(ranks)}: ") and BODIES[body] in told[0], told[0]


def end_as(how, number, joined):
    """What the body does in batch `number`; joined: on a rank without data."""
    if number < 2:
        return
    if how == "a function raises" and joined:
        raise ValueError("its own")
    if how == "the body raises" and not joined:
        raise ValueError("its own")


def train_after_an_error(group, how):
    lengths, told = (2, 5), ""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        along = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        done = []

        def step():
            done.append(optimizer)
            end_as(how, len(done) - 1, len(done) > lengths[own.rank])
            optimizer.step()

        try:
            listed = [step] if how != "other steps" else [step, along]
            with cl.Join([model], step_along=listed, skew_warning=None):
                for batch in batches_of(own.rank, lengths[own.rank], torch.float64):
                    loss_of(model, batch).backward()
                    step()
                    optimizer.zero_grad()
        except (ValueError, cl.CollectiveError) as error:
            told = type(error).__name__
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        with cl.Join([model], skew_warning=None):
            for batch in batches_of(own.rank, lengths[own.rank], torch.float64):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return told, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["a function raises", "the body raises", "other steps"])
def test_after_an_error_in_shadowed_steps_the_next_join_of_a_process_is_as_the_first(ranks_of, how):
    module = make_model(torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    for number in range(5):
        for rank in range(2) if number < 2 else [1]:
            (loss_of(module, batches_of(rank, 5, torch.float64)[number]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for told, parameters in ranks_of(2).run(train_after_an_error, how):
        assert told
        assert largest_difference(parameters, module.parameters()) < 1e-12
