"""Several models in one Join, in bodies that use them in turn, or one more often than another: as
in one process, or refused by all ranks, in the same words."""

import itertools

import pytest
import torch

import chorusline as cl
from tests.harness.combinations import combinations
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference

LR = 0.1
WAYS = ["zero", "plain", "plain, along"]
BODIES = {
    # How often the critic steps for a batch; the generator's batches; the models as they are listed
    "one step each": (1, 1, "critic first"),
    "listed in the other order": (1, 1, "generator first"),
    "two steps of the critic": (2, 1, "critic first"),
    "two steps of the critic, listed in the other order": (2, 1, "generator first"),
    "the generator in every second batch": (1, 2, "critic first"),
}


def make_pair(width):
    """The generator has as many elements as the critic with a width of 5, in buckets' terms."""
    torch.manual_seed(0)
    critic = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Tanh())
    return torch.nn.Linear(7, 5).double(), critic.double()


def adversarial_step(number, batches, models, optimizers, body, divisor):
    """One batch. batches: those that this process computes."""
    (generator, critic), (makes, judges) = models, optimizers
    num_critic, every, _ = BODIES[body]
    for _ in range(num_critic):
        judges.zero_grad()
        losses = [critic(generator(batch).detach()).square().mean() for batch in batches]
        (sum(losses) / divisor).backward()
        judges.step()
    if (number + 1) % every == 0:
        makes.zero_grad()
        (sum(critic(generator(batch)).mean() for batch in batches) / divisor).backward()
        makes.step()


def in_one_process(lengths, body, width):
    models = make_pair(width)
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate(lengths)]
    for number in range(max(lengths)):
        batches = [own[number] for own in data if number < len(own)]
        adversarial_step(number, batches, models, optimizers, body, len(lengths))
    return [p.detach() for model in models for p in model.parameters()]


def on_ranks(group, lengths, body, way, width, follows):
    with another_group(group) as own:
        models = [cl.DistributedDataParallel(module, own) for module in make_pair(width)]
        if way == "zero":
            kind = torch.optim.SGD
            optimizers = [cl.ZeroRedundancyOptimizer(model, kind, lr=LR) for model in models]
            pairs = [[*pair] for pair in zip(models, optimizers, strict=True)]
        else:
            optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
            pairs = [[model] for model in models]
        if BODIES[body][2] == "critic first":
            pairs.reverse()
        try:
            with cl.Join(
                [one for pair in pairs for one in pair],
                step_along=optimizers[::-1] if "along" in way else [],
                groups=[own.new_group(range(own.size))] if follows else [],
                skew_warning=None,
            ):
                for number, batch in enumerate(
                    batches_of(own.rank, lengths[own.rank], torch.float64)
                ):
                    adversarial_step(number, [batch], models, optimizers, body, 1)
        except cl.GroupAborted:
            raise  # It is no sentence of what the body does.
        except RuntimeError as error:
            return str(error)
        return [p.detach().clone() for model in models for p in model.parameters()]


@combinations(
    3,
    body=BODIES,
    lengths=[(4, 2), (1, 4), (3, 3)],
    width=[1, 40],  # Buckets of equal size, and of other sizes.
)
def test_an_adversarial_pair_is_exact_or_all_ranks_are_told_what_to_write(
    ranks_of, body, lengths, width
):
    expected = in_one_process(lengths, body, width)
    for way in WAYS:
        for follows in (False, True):
            results = ranks_of(2).run(on_ranks, lengths, body, way, width, follows)
            told = [result for result in results if isinstance(result, str)]
            for result in results if not told else ():
                assert largest_difference(result, expected) < 1e-12, (way, follows)
            assert not told or len(told) == 2, told
            if follows and way != "plain, along":
                assert not told, (way, told)
            for one in told:  # The remedy is one that works: see above.
                assert "groups=[ctx.group.new_group(" in one or "ZeroRedundancyOptimizer" in one
                assert "which does not need this" not in one
                assert "belong inside Join()" not in one


def make_chain(num_models):
    torch.manual_seed(1)
    return [torch.nn.Linear(7, 7).double() for _ in range(num_models)]


def loss_through(models, batch, is_chain):
    if not is_chain:
        return sum((number + 1) * one(batch) for number, one in enumerate(models)).square().mean()
    output = batch
    for model in models:
        output = model(output)
    return (output - batch).square().mean()


OF_ONE_PASS = {
    # The optimizer, and whether the body comes to the models in the order of their steps.
    **dict.fromkeys(WAYS, (torch.optim.SGD, False)),
    "zero": (torch.optim.SGD, True),
    "zero over all": (torch.optim.SGD, False),
    "zero, whole parameters": (torch.optim.Adafactor, False),
}


def one_pass_in_one_process(lengths, num_models, way, is_chain):
    models = make_chain(num_models)
    optimizers = [OF_ONE_PASS[way][0](model.parameters(), lr=LR) for model in models]
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate(lengths)]
    for number in range(max(lengths)):
        for own in data:
            if number < len(own):
                (loss_through(models, own[number], is_chain) / len(lengths)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for model in models for p in model.parameters()]


def one_pass_on_ranks(group, lengths, order, way, is_chain, follows=False, bucket_cap_mb=25):
    with another_group(group) as own:
        models = [
            cl.DistributedDataParallel(each, own, bucket_cap_mb=bucket_cap_mb)
            for each in make_chain(len(order))
        ]
        kind, along = OF_ONE_PASS[way][0], {}
        listed = [models[number] for number in order]
        if way == "zero over all":
            every = [p for model in models for p in model.parameters()]
            optimizers = [cl.ZeroRedundancyOptimizer(every, kind, lr=LR, group=own)]
            listed += optimizers
        elif "zero" in way:
            optimizers = [cl.ZeroRedundancyOptimizer(model, kind, lr=LR) for model in models]
            pairs = [(models[number], optimizers[number]) for number in order]
            listed = [one for pair in pairs for one in pair] if way == "zero" else listed
            listed += optimizers if "whole" in way else []
        else:
            optimizers = [kind(model.parameters(), lr=LR) for model in models]
            along = {"step_along": optimizers} if "along" in way else {}
        beside = [own.new_group(range(own.size))] if follows else []
        try:
            with cl.Join(listed, skew_warning=None, groups=beside, **along):
                for batch in batches_of(own.rank, lengths[own.rank], torch.float64):
                    loss_through(models, batch, is_chain).backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
        except cl.CollectiveMismatch as error:
            return str(error)
        return [p.detach().clone() for model in models for p in model.parameters()]


@pytest.mark.parametrize("is_chain", [True, False], ids=["in a row", "side by side"])
@pytest.mark.parametrize("num_models", [2, 3])
def test_models_in_one_pass_are_listed_in_the_order_that_the_error_names(
    ranks_of, num_models, is_chain
):
    lengths = (2, 4)
    for way, (_, by_steps) in OF_ONE_PASS.items():
        expected = one_pass_in_one_process(lengths, num_models, way, is_chain)
        # The optimizers step forwards, and a backward pass goes backwards.
        right = tuple(range(num_models)) if by_steps else (*reversed(range(num_models)),)
        for order in itertools.permutations(range(num_models)):
            results = ranks_of(2).run(one_pass_on_ranks, lengths, order, way, is_chain)
            if order == right:
                for result in results:
                    assert not isinstance(result, str), (way, order, result)
                    assert largest_difference(result, expected) < 1e-12, (way, order)
                continue
            for told in results:
                assert isinstance(told, str), (way, order)
                assert "list them in the order in which the body comes to them. A model" in told
                assert "forward pass was last comes first, as in Join([decoder, enc" in told


@pytest.mark.parametrize("is_chain", [True, False], ids=["in a row", "side by side"])
def test_where_a_group_is_followed_models_in_one_pass_are_listed_in_any_order(ranks_of, is_chain):
    lengths = (2, 4)
    for way in OF_ONE_PASS:
        expected = one_pass_in_one_process(lengths, 2, way, is_chain)
        for order in ((0, 1), (1, 0)):
            arguments = (lengths, order, way, is_chain, True)
            for result in ranks_of(2).run(one_pass_on_ranks, *arguments):
                assert not isinstance(result, str), (way, order, result)
                assert largest_difference(result, expected) < 1e-12, (way, order)


@pytest.mark.parametrize("is_chain", [True, False], ids=["in a row", "side by side"])
def test_models_in_one_pass_may_have_several_buckets_each(ranks_of, is_chain):
    """On ranks with data the buckets of two models are complete in turn."""
    for way, (_, by_steps) in OF_ONE_PASS.items():
        order = (0, 1) if by_steps else (1, 0)
        for lengths in ((2, 4), (3, 0)):
            expected = one_pass_in_one_process(lengths, 2, way, is_chain)
            arguments = (lengths, order, way, is_chain, False, 1e-4)
            for result in ranks_of(2).run(one_pass_on_ranks, *arguments):
                assert not isinstance(result, str), (way, lengths, result)
                assert largest_difference(result, expected) < 1e-12, (way, lengths)


OF_EPOCHS = [(2, 2), (1, 3)]  # Batches by rank: the first loop shows that a step has two passes.


def accumulate(models, data, longest, divisor, optimizers):
    """A step for every two batches, and one for an odd batch at the end. data: the batches of each
    rank that this process computes."""
    for number in range(longest):
        batches = [own[number] for own in data if number < len(own)]
        if not batches:  # This rank has run out of data.
            return
        for optimizer in optimizers if number % 2 == 0 else ():
            optimizer.zero_grad()
        for batch in batches:
            (loss_through(models, batch, True) / divisor).backward()
        for optimizer in optimizers if number % 2 or number == longest - 1 else ():
            optimizer.step()


def accumulating_in_one_process(num_models):
    models = make_chain(num_models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9) for model in models]
    for lengths in OF_EPOCHS:
        data = [batches_of(rank, n, torch.float64) for rank, n in enumerate(lengths)]
        accumulate(models, data, max(lengths), len(lengths), optimizers)
    return [p.detach() for model in models for p in model.parameters()]


def accumulating_on_ranks(group, num_models):
    with another_group(group) as own:
        models = [cl.DistributedDataParallel(each, own) for each in make_chain(num_models)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9) for model in models]
        for lengths in OF_EPOCHS:
            data = [batches_of(own.rank, lengths[own.rank], torch.float64)]
            with cl.Join(models[::-1], step_along=optimizers, skew_warning=None):
                accumulate(models, data, max(lengths), 1, optimizers)
        return [p.detach().clone() for model in models for p in model.parameters()]


@pytest.mark.parametrize("num_models", [1, 2])
def test_a_last_step_of_fewer_passes_is_stepped_along_once(ranks_of, num_models):
    expected = accumulating_in_one_process(num_models)
    for result in ranks_of(2).run(accumulating_on_ranks, num_models):
        assert largest_difference(result, expected) < 1e-12
