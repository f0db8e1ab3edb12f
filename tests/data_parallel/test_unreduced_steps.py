"""Steps of a plain optimizer with gradients that no backward pass of the model has brought."""

import contextlib
import warnings

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model

STEPS = 4


def its_own(model, batch, group):
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(loss_of(model, batch), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


def of_the_bare_module(model, batch, group):
    its_own(model.module, batch, group)


def of_the_last_layer(model, batch, group):
    its_own(model.module[-1], model.module[:-1](batch).detach(), group)


def into_the_same_tensors(model, batch, group):
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(loss_of(model, batch), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient if p.grad is None else p.grad.copy_(gradient)


def in_no_sync(model, batch, group):
    with model.no_sync():
        loss_of(model, batch).backward()


def several_in_no_sync(model, batch, group):
    in_no_sync(model, batch, group)
    in_no_sync(model, batch, group)


def in_no_sync_after_another(model, batch, group):
    loss_of(model, batch).backward()
    in_no_sync(model, batch, group)


def in_no_sync_then_averaged(model, batch, group):
    in_no_sync(model, batch, group)
    for p in model.parameters():
        group.all_reduce(p.grad).wait()
        p.grad /= group.size


def accumulated(model, batch, group):
    in_no_sync(model, batch, group)
    loss_of(model, batch).backward()


def put_back_from_a_hook(model, batch, group):
    kept = {}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: kept.__setitem__(p, p.grad.clone()))
        for p in model.parameters()
    ]
    loss_of(model, batch).backward()
    for p, gradient in kept.items():
        p.grad = gradient
    for hook in hooks:
        hook.remove()


def averaged(model, batch, group):
    its_own(model, batch, group)
    for p in model.parameters():
        group.all_reduce(p.grad).wait()
        p.grad /= group.size


def by_rule(model, batch, group):
    for p in model.parameters():
        p.grad = p.detach().sign()


def by_backward(model, batch, group):
    loss_of(model, batch).backward()


def changed_after_backward(model, batch, group):
    loss_of(model, batch).backward()
    for p in model.parameters():
        p.grad = p.grad * 2


def twice_by_one_backward(model, batch, group):
    loss_of(model, batch).backward()
    model.also_steps()


DRIFT = [
    in_no_sync,
    several_in_no_sync,
    in_no_sync_after_another,
    its_own,
    of_the_bare_module,
    of_the_last_layer,
    into_the_same_tensors,
    put_back_from_a_hook,
]
STAY = [
    accumulated,
    in_no_sync_then_averaged,
    averaged,
    by_rule,
    by_backward,
    changed_after_backward,
    twice_by_one_backward,
]


def train(group, makes_gradients):
    with another_group(group) as own, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.also_steps = optimizer.step
        for batch in batches_of(own.rank, STEPS, torch.float64):
            optimizer.zero_grad()
            makes_gradients(model, batch, own)
            optimizer.step()
            own.barrier().wait()
        told = [(str(one.message), one.filename) for one in said]
        # What a next pass that is reduced tells of these ranks.
        told = [
            one
            for one in told
            if "0.weight differs between rank 0 and rank 1 in step" not in one[0]
        ]
        return [p.detach().clone() for p in model.parameters()], told


@pytest.mark.parametrize("makes_gradients", DRIFT)
def test_gradients_that_nothing_reduces_are_named_once(ranks_of, makes_gradients):
    (first, told), (second, others) = ranks_of(2).run(train, makes_gradients)
    assert largest_difference(first, second) > 0, "the ranks have drifted apart"
    assert others == [] and len(told) == 1, "one rank tells it, once"
    text, path = told[0]
    name = "2.weight" if makes_gradients is of_the_last_layer else "0.weight"
    assert f"that of parameter {name} differs between rank 0 and rank 1" in text
    assert "parameter.grad = ctx.reduce(parameter.grad)" in text and "loss.backward()" in text
    assert path == __file__


@pytest.mark.parametrize("makes_gradients", STAY)
def test_gradients_that_are_the_same_on_all_ranks_are_not_spoken_of(ranks_of, makes_gradients):
    (first, told), (second, others) = ranks_of(2).run(train, makes_gradients)
    assert told == others == []
    assert largest_difference(first, second) == 0


def test_gradients_that_the_program_averages_are_those_of_one_process(ranks_of):
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches in zip(*(batches_of(rank, STEPS, torch.float64) for rank in range(3)), strict=True):
        optimizer.zero_grad()
        (sum(loss_of(model, batch) for batch in batches) / 3).backward()
        optimizer.step()
    for found, told in ranks_of(3).run(train, averaged):
        assert told == []
        assert largest_difference(found, [p.detach() for p in model.parameters()]) < 1e-12


def train_two(group):
    """Two models of one shape, of which each rank steps the second with its own gradients."""
    with another_group(group) as own, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        models = [cl.DistributedDataParallel(make_model(torch.float64), own) for _ in range(2)]
        for batch in batches_of(own.rank, STEPS, torch.float64):
            for model, makes_gradients in zip(models, (averaged, its_own), strict=True):
                makes_gradients(model, batch, own)
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            own.barrier().wait()
        return len(said)


def test_models_of_one_shape_are_told_apart(ranks_of):
    assert ranks_of(2).run(train_two) == [1, 0]


def alone(beside, batch, group):
    """Nothing reduces its gradient."""


def averaged_beside(beside, batch, group):
    group.all_reduce(beside.grad).wait()
    beside.grad /= group.size


def by_rule_beside(beside, batch, group):
    beside.grad = beside.detach().sign()


def unused(beside, batch, group):
    beside.grad = None


def train_beside(group, makes_gradient, shape, has_own_group):
    """The optimizer of the model has a parameter too that is in no model."""
    with another_group(group) as own, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        beside = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        ours = [*model.parameters()]
        groups = [{"params": ours}, {"params": [beside]}] if has_own_group else [*ours, beside]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        for batch in batches_of(own.rank, STEPS, torch.float64):
            optimizer.zero_grad()
            (model(batch) * beside).square().mean().backward()
            makes_gradient(beside, batch, own)
            optimizer.step()
            own.barrier().wait()
        return beside.detach(), [(str(one.message), one.filename) for one in said]


@pytest.mark.parametrize("has_own_group", [True, False])
@pytest.mark.parametrize("shape", [(), (5,)])
@pytest.mark.parametrize("makes_gradient", [alone, averaged_beside, by_rule_beside, unused])
def test_a_parameter_that_is_in_no_model_is_named(ranks_of, makes_gradient, shape, has_own_group):
    (first, told), (second, others) = ranks_of(2).run(
        train_beside, makes_gradient, shape, has_own_group
    )
    assert others == []
    if makes_gradient is not alone:
        assert told == [] and torch.equal(first, second)
        return
    assert not torch.equal(first, second), "the ranks have drifted apart"
    ((text, path),) = told
    place = "0 of group 1" if has_own_group else "4 of group 0"
    assert f"stepped parameter {place} of SGD, of shape {shape}, which is in no " in text
    assert "differs between rank 0 and rank 1" in text and "Register it in the module" in text
    assert path == __file__


class Around(torch.optim.Optimizer):
    """As Lookahead: the step is that of the optimizer inside."""

    def __init__(self, inside):
        super().__init__(inside.param_groups, {})
        self.inside = inside

    def step(self, closure=None):
        return self.inside.step(closure)


def step_beside(group, sharded_class, plain_class, is_around):
    """What another optimizer's step says over a model that has a sharded one."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        sharded = cl.ZeroRedundancyOptimizer(model, sharded_class, lr=0.01)
        kept = [*model.parameters()] if plain_class is torch.optim.SGD else [model.module[0].weight]
        other = Around(sharded) if is_around else plain_class(kept, lr=0.01)
        try:
            for batch in batches_of(own.rank, 2, torch.float64):
                loss_of(model, batch).backward()
                other.step()
                other.zero_grad()
        except RuntimeError as error:
            return str(error)
        return sharded.num_steps


@pytest.mark.parametrize("sharded_class", [torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("plain_class", [torch.optim.SGD, torch.optim.Adam])
def test_a_plain_optimizer_over_a_sharded_model_is_refused(ranks_of, sharded_class, plain_class):
    for told in ranks_of(2).run(step_beside, sharded_class, plain_class, False):
        assert f"{plain_class.__name__}.step() has stepped parameters whose model" in told
        assert "Step the ZeroRedundancyOptimizer alone" in told


@pytest.mark.parametrize("sharded_class", [torch.optim.AdamW, torch.optim.Adafactor])
def test_an_optimizer_that_steps_the_sharded_one_is_not(ranks_of, sharded_class):
    assert ranks_of(2).run(step_beside, sharded_class, None, True) == [2, 2]


def write(p):
    p.data.add_(p.grad, alpha=-0.1)


def drift_in_a_join(group, lengths, writes_from):
    """From a batch on each rank writes parameters of the first layer by its own gradients, past all
    that a step sees: where the last batch does so first, its sample is of the second layer."""
    with another_group(group) as own, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with cl.Join([model], step_along=[optimizer], skew_warning=None):
                data = batches_of(own.rank, lengths[own.rank], torch.float64)
                for number, batch in enumerate(data):
                    if number == writes_from:
                        for p in model.module[0].parameters():
                            p.register_post_accumulate_grad_hook(write)
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return [str(one.message) for one in said if one.filename == __file__]


@pytest.mark.parametrize(
    ("lengths", "writes_from", "when"),
    [
        ((3, 3), 0, "in step 1"),
        ((3, 3), 1, "in step 2"),
        ((3, 3), 2, "at the end of a Join"),
        ((3, 3), 9, ""),
        ((4, 9), 9, ""),
    ],
)
def test_ranks_that_have_drifted_apart_are_told_so_once(ranks_of, lengths, writes_from, when):
    told, others = ranks_of(2).run(drift_in_a_join, lengths, writes_from)
    assert others == [] and len(told) == bool(when)
    for text in told:
        assert f"parameter 0.weight differs between rank 0 and rank 1 {when}," in text


def load_on_one_rank(group, optimizer_class, lengths):
    """As a program that loads a checkpoint on rank 0 after it has wrapped the model."""
    with another_group(group) as own, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        is_sharded = optimizer_class is cl.ZeroRedundancyOptimizer
        given = (model, torch.optim.SGD) if is_sharded else (model.parameters(),)
        optimizer = optimizer_class(*given, lr=0.1)
        if own.rank == 1:
            model.module[0].weight.data.mul_(2)
        with cl.Join([model, optimizer] if is_sharded else [model], skew_warning=None):
            for batch in batches_of(own.rank, lengths[own.rank], torch.float64):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [str(one.message) for one in said if one.filename == __file__]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, cl.ZeroRedundancyOptimizer])
def test_weights_that_one_rank_has_loaded_are_told(ranks_of, optimizer_class):
    for lengths in ((2, 2), (3, 1)):
        told, others = ranks_of(2).run(load_on_one_rank, optimizer_class, lengths)
        assert others == [] and len(told) == 1
        assert "parameter 0.weight differs between rank 0 and rank 1 in step 1" in told[0]


def write_without_steps(group, lengths):
    """The sharded optimizer never steps: hooks write the parameters."""
    with another_group(group) as own, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(write)
        with cl.Join([model, optimizer], skew_warning=None):
            for batch in batches_of(own.rank, lengths[own.rank], torch.float64):
                loss_of(model, batch).backward()
                optimizer.zero_grad()
        return [str(one.message) for one in said if one.filename == __file__]


@pytest.mark.parametrize("lengths", [(3, 3), (4, 4, 1)])  # Ranks with fewer batches take over.
def test_what_ranks_have_written_without_a_step_is_told(ranks_of, lengths):
    told, *others = ranks_of(len(lengths)).run(write_without_steps, lengths)
    assert not any(others) and len(told) == 1
    assert "differs between rank 0 and rank 1 at the end of a Join" in told[0]


def step_in_hooks(group, lengths, is_hooked_first):
    """As torch's tutorial steps in the backward pass: an optimizer for each parameter."""
    with another_group(group) as own:
        module = make_model(torch.float64)
        model = None if is_hooked_first else cl.DistributedDataParallel(module, own)
        for parameter in module.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(_, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        model = model or cl.DistributedDataParallel(module, own)
        with pytest.raises(RuntimeError) as raised, cl.Join([model], skew_warning=None):
            for batch in batches_of(own.rank, lengths[own.rank], torch.float64):
                loss_of(model, batch).backward()
        return str(raised.value)


@pytest.mark.parametrize("is_hooked_first", [False, True])
@pytest.mark.parametrize("lengths", [(3, 3), (2, 1)])
def test_a_step_inside_a_backward_pass_is_refused(ranks_of, lengths, is_hooked_first):
    for told in ranks_of(2).run(step_in_hooks, lengths, is_hooked_first):
        assert "SGD has stepped before a backward pass of the DistributedDataParallel had" in told
        assert "Call step() after loss.backward()" in told


def sharded_step_in_a_hook(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        last = [*model.parameters()][-1]
        last.register_post_accumulate_grad_hook(lambda _: optimizer.step() and None)
        with pytest.raises(RuntimeError) as raised:
            for batch in batches_of(own.rank, 2, torch.float64):
                loss_of(model, batch).backward()
        return str(raised.value)


def test_a_sharded_step_inside_a_backward_pass_is_refused(ranks_of):
    for told in ranks_of(2).run(sharded_step_in_a_hook):
        assert "ZeroRedundancyOptimizer has stepped before a backward pass of the" in told


def catch_failed_passes(group, is_sharded, syncs):
    """Each rank catches the error of its second pass, and goes on with the third batch."""
    with another_group(group) as own:
        module = make_model(torch.float64)
        model = cl.DistributedDataParallel(module, own)
        optimizer = (
            cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
            if is_sharded
            else torch.optim.SGD(model.parameters(), lr=0.1)
        )
        try:
            for number, batch in enumerate(batches_of(own.rank, STEPS, torch.float64)):
                fails = number == 1
                hook = module[0].weight.register_hook(raise_an_error) if fails else None
                try:
                    with contextlib.nullcontext() if syncs or not fails else model.no_sync():
                        loss_of(model, batch).backward()
                except ValueError:
                    optimizer.zero_grad()
                    hook.remove()
                    continue
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            return str(error)
        return [p.detach().clone() for p in module.parameters()]


def raise_an_error(_):
    raise ValueError("out of memory")


@pytest.mark.parametrize("is_sharded", [True, False])
def test_no_pass_follows_one_that_has_failed(ranks_of, is_sharded):
    for rank, told in enumerate(ranks_of(2).run(catch_failed_passes, is_sharded, True)):
        assert f"has ended in an error, which the program caught on rank {rank}" in told


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize(("size", "syncs"), [(1, True), (2, False)])
def test_a_failed_pass_that_has_sent_nothing_is_forgotten(ranks_of, is_sharded, size, syncs):
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_rank = [batches_of(rank, STEPS, torch.float64) for rank in range(size)]
    for number, batches in enumerate(zip(*by_rank, strict=True)):
        if number != 1:
            optimizer.zero_grad()
            (sum(loss_of(model, batch) for batch in batches) / size).backward()
            optimizer.step()
    for found in ranks_of(size).run(catch_failed_passes, is_sharded, syncs):
        assert largest_difference(found, [p.detach() for p in model.parameters()]) < 1e-12


def pass_after_a_failed_one(group, fails_at):
    """Without a forward pass in between."""
    with another_group(group) as own:
        module = make_model(torch.float64)
        model = cl.DistributedDataParallel(module, own)
        first, second = (model(batch) for batch in batches_of(own.rank, 2, torch.float64))
        tensor = {"output": first, "parameter": module[0].weight}[fails_at]
        hook = tensor.register_hook(raise_an_error)
        with pytest.raises(ValueError, match="out of memory"):
            first.square().mean().backward()
        hook.remove()
        try:
            second.square().mean().backward()
        except RuntimeError as error:
            return str(error)
        return [p.grad.clone() for p in module.parameters()]


def test_a_pass_that_follows_a_failed_one_at_once_is_reduced(ranks_of):
    module = make_model(torch.float64)
    for rank in range(2):
        (module(batches_of(rank, 2, torch.float64)[1]).square().mean() / 2).backward()
    for found in ranks_of(2).run(pass_after_a_failed_one, "output"):
        assert largest_difference(found, [p.grad for p in module.parameters()]) < 1e-14
    for rank, told in enumerate(ranks_of(2).run(pass_after_a_failed_one, "parameter")):
        assert f"has ended in an error, which the program caught on rank {rank}" in told


def test_one_rank_alone_may_step_inside_a_backward_pass(ranks_of):
    (same,) = ranks_of(1).run(step_in_hooks_alone)
    assert same


def step_in_hooks_alone(group):
    made = []
    for wraps in (True, False):
        module = make_model(torch.float64)
        with another_group(group) as own:
            model = cl.DistributedDataParallel(module, own) if wraps else module
            for parameter in module.parameters():
                optimizer = torch.optim.SGD([parameter], lr=0.1)
                parameter.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
            for batch in batches_of(0, STEPS, torch.float64):
                loss_of(model, batch).backward()
                module.zero_grad()
        made.append([p.detach().clone() for p in module.parameters()])
    return largest_difference(*made) == 0
