"""What goes wrong around a Join is told at once, and names what to write instead."""

import warnings

import pytest
import torch

import chorusline as cl
from chorusline.runtime.process.leftovers import LeftoverVote, belongs
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model


def reduce_in_the_body(group: cl.Group, after: int) -> str:
    """From batch `after` on; the ranks have two and four batches."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        with pytest.raises(cl.CollectiveError) as raised, cl.Join([model, optimizer]):
            for number, batch in enumerate(batches_of(own.rank, 2 + 2 * own.rank, torch.float32)):
                loss = loss_of(model, batch)
                if number >= after:
                    own.all_reduce(loss.detach().clone()).wait()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return str(raised.value)


@pytest.mark.parametrize("after", [0, 3])
def test_a_collective_of_the_body_among_uneven_ranks_names_the_groups_to_follow(ranks_of, after):
    for told in ranks_of(2).run(reduce_in_the_body, after):
        assert "inside Join()" in told and "groups=[beside]" in told
        assert "the same order, with equal sizes and dtypes" not in told


def reduce_first(group: cl.Group) -> str:
    """Before the forward pass; the ranks have three and five batches."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        beside = own.new_group(range(2))
        with pytest.raises(cl.CollectiveError) as raised, cl.Join([model], groups=[beside]):
            for batch in batches_of(own.rank, 3 + 2 * own.rank, torch.float32):
                beside.all_reduce(torch.ones(1)).wait()
                loss_of(model, batch).backward()
        return str(raised.value)


def test_a_collective_before_the_forward_pass_is_told_where_it_belongs(ranks_of):
    for told in ranks_of(2).run(reduce_first):
        assert "after that forward pass" in told and "iterate ctx.shard" in told
        assert "groups=[beside]" not in told


def pass_once_more(group: cl.Group) -> str:
    """One more backward pass than steps in a batch; the ranks have two and four batches."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        first, *rest = model.parameters()
        optimizers = [
            cl.ZeroRedundancyOptimizer(part, torch.optim.SGD, lr=0.1, group=own)
            for part in ([first], rest)
        ]
        with pytest.raises(cl.CollectiveMismatch) as raised, cl.Join([model, *optimizers]):
            for batch in batches_of(own.rank, 2 + 2 * own.rank, torch.float32):
                loss_of(model, batch).backward()
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
                loss_of(model, batch).backward()
                model.zero_grad()
        return str(raised.value)


def test_a_model_that_comes_more_often_than_its_optimizers_is_told_of_the_turn(ranks_of):
    for told in ranks_of(2).run(pass_once_more):
        assert "If the body uses one of them more often than another" in told


def step_first(group: cl.Group) -> str:
    """By the gradients of the batch before; the ranks have one and two batches."""
    with another_group(group, timeout_s=1.5) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        joins = cl.Join([model, optimizer], groups=[own.new_group(range(2))])
        with pytest.raises(cl.CollectiveError) as raised, joins:
            for number, batch in enumerate(batches_of(own.rank, 1 + own.rank, torch.float32)):
                if number:
                    optimizer.step()
                loss_of(model, batch).backward()
        return str(raised.value)


def test_a_step_before_the_forward_pass_is_told_where_it_belongs(ranks_of):
    for told in ranks_of(2).run(step_first):
        assert "step after the first forward pass of a batch" in told


def step_by_own_gradients(group: cl.Group, lengths: tuple[int, ...]) -> str:
    with another_group(group) as own:
        module = make_model(torch.float32)
        model = cl.DistributedDataParallel(module, own)
        parameters = [*module.parameters()]
        with pytest.raises(cl.CollectiveMismatch) as raised, cl.Join([model], skew_warning=None):
            for batch in batches_of(own.rank, lengths[own.rank], torch.float32):
                gradients = torch.autograd.grad(loss_of(model, batch), parameters)
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.sub_(gradient)
        return str(raised.value)


@pytest.mark.parametrize("lengths", [(4, 4), (5, 3), (0, 3)])
def test_ranks_that_step_without_a_backward_pass_are_not_said_to_have_taken_the_same_steps(
    ranks_of, lengths
):
    for told in ranks_of(2).run(step_by_own_gradients, lengths):
        assert "agreed on no step" in told and "torch.autograd.grad returns" in told


def stop_early(group: cl.Group) -> str:
    """Rank 0 leaves a Join that follows groups, and does something else."""
    with another_group(group, timeout_s=1.5) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        beside = own.new_group(range(2))
        try:
            with cl.Join([model], groups=[beside]):
                for number, batch in enumerate(batches_of(own.rank, 4, torch.float32)):
                    if own.rank == 0 and number == 2:
                        own.barrier().wait()
                    loss_of(model, batch).backward()
        except cl.CollectiveError as error:
            return str(error)
        return ""


def test_a_rank_that_is_elsewhere_inside_a_join_is_not_sent_to_a_join(ranks_of):
    for told in ranks_of(2).run(stop_early):
        assert told and "belong inside Join()" not in told


def grow_a_buffer(group: cl.Group, at_wrapping: bool) -> str:
    with another_group(group) as own:
        module = make_model(torch.float32)
        module.register_buffer("seen", torch.zeros(3 + (own.rank if at_wrapping else 0)))
        with pytest.raises(cl.CollectiveMismatch) as raised:
            model = cl.DistributedDataParallel(module, own)
            for step in range(3):
                if own.rank == 1 and step == 1:
                    module.register_buffer("seen", torch.zeros(4))
                loss_of(model, batches_of(own.rank, 1, torch.float32)[0]).backward()
        return str(raised.value)


@pytest.mark.parametrize("at_wrapping", [True, False])
def test_a_buffer_whose_shape_differs_by_rank_is_named(ranks_of, at_wrapping):
    first, second = ranks_of(2).run(grow_a_buffer, at_wrapping)
    assert "buffer" in first and "the same collectives" not in first
    assert "seen" in second and "(4,)" in second and "the same collectives" not in second


def forget_the_join(group: cl.Group, inside: bool) -> list[str]:
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        keys = [0] * 3 + [1] * 2
        shard = cl.Shard(
            torch.randn(5, 7), 1, rank=own.rank, world_size=own.size, keep_together=keys
        )
        with (
            warnings.catch_warnings(record=True) as seen,
            cl.Join([model], enable=inside, skew_warning=None),
        ):
            warnings.simplefilter("always")
            for number, batch in enumerate(shard):
                if inside or number < 2:  # Without a Join the ranks would wait here.
                    loss_of(model, batch).backward()
            with torch.no_grad():
                for batch in shard:
                    model.module(batch)
        return [str(one.message) for one in seen]


def test_uneven_batches_outside_a_join_are_told_when_the_loop_begins(ranks_of):
    (told,), others = ranks_of(2).run(forget_the_join, False)
    assert (
        "rank 0: " in told and "rank 1: " in told and "chorusline.Join([model, optimizer])" in told
    )
    assert others == [], "one rank tells it"
    assert ranks_of(2).run(forget_the_join, True) == [[], []]


def train_a_gan(group: cl.Group, lengths: tuple[int, ...], follows: bool) -> list[int] | str:
    """The critic takes two steps of a batch, its generator one."""
    with another_group(group) as own:
        maker = cl.DistributedDataParallel(torch.nn.Linear(7, 5), own)
        critic = cl.DistributedDataParallel(torch.nn.Linear(5, 1), own)
        makes = cl.ZeroRedundancyOptimizer(maker, torch.optim.SGD, lr=0.1)
        judges = cl.ZeroRedundancyOptimizer(critic, torch.optim.SGD, lr=0.1)
        groups = [own.new_group(range(2))] if follows else []
        try:
            with cl.Join([critic, judges, maker, makes], groups=groups, skew_warning=None):
                for batch in batches_of(own.rank, lengths[own.rank], torch.float32):
                    for _ in range(2):
                        judges.zero_grad()
                        critic(maker(batch).detach()).square().mean().backward()
                        judges.step()
                    makes.zero_grad()
                    critic(maker(batch)).mean().backward()
                    makes.step()
        except cl.CollectiveMismatch as error:
            return str(error)
        return [judges.num_steps, makes.num_steps]


@pytest.mark.parametrize("lengths", [(4, 2), (1, 4)])
def test_a_critic_that_steps_twice_is_told_of_groups_to_follow_and_they_help(ranks_of, lengths):
    for told in ranks_of(2).run(train_a_gan, lengths, False):
        assert "once each" in told and "groups=[" in told and "belong inside Join()" not in told
    most = max(lengths)
    assert ranks_of(2).run(train_a_gan, lengths, True) == [[2 * most, most]] * 2


@pytest.mark.parametrize(
    ("cleared", "who"),
    [
        ((1,), "rank 1 has cleared the gradients, and ranks [2, 3] have not"),
        ((1, 3), "ranks [1, 3] have cleared the gradients, and rank 2 has not"),
    ],
)
def test_gradients_that_some_ranks_have_cleared_name_both_kinds_of_ranks(cleared, who):
    out_of_data = LeftoverVote(is_live=False, passes=1, holds=True)
    votes = [LeftoverVote(is_live=True, calls=rank in cleared) for rank in (1, 2, 3)]
    with pytest.raises(RuntimeError, match="rank 0 has run out of data") as raised:
        belongs([out_of_data, *votes], 0)
    assert who in str(raised.value)
