"""How gradients come to the reducer: in which order, how often, and in which backward pass."""

import warnings
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import chorusline as cl
from chorusline.runtime.data_parallel.distributed_data_parallel import engine_of
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model

_EACH_ALONE = 64 * 8 / (1 << 20)
"""MiB of a bucket that one small float64 tensor fills."""


class Backwards(torch.nn.Module):
    """Registered in the order in which its layers are not used; rank 1 skips one of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = torch.nn.Linear(4, 4, bias=False)
        self.middle = torch.nn.Linear(4, 4, bias=False)
        self.first = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x, skips=False):
        hidden = self.first(x)
        return self.last(torch.tanh(hidden if skips else self.middle(hidden)))


def orders(group, sharded):
    model = cl.DistributedDataParallel(Backwards().double(), group, bucket_cap_mb=_EACH_ALONE)
    make = cl.ZeroRedundancyOptimizer if sharded else torch.optim.SGD
    optimizer = make(
        model.parameters(), **({"optimizer_class": torch.optim.SGD} if sharded else {}), lr=0.1
    )
    gradients = engine_of(model).reducer.gradients
    seen, broadcasts = [list(gradients.order)], []
    for _ in range(3):
        before = group.statistics.snapshot()
        x = torch.full((2, 4), 1.0 + group.rank, dtype=torch.float64)
        model(x, skips=group.rank == 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        broadcasts.append(group.statistics.since(before).operations.get("broadcast", 0))
        seen.append(list(gradients.order))
    buckets = [bucket.plan.spans[0][0] for bucket in gradients.buckets]
    return seen, broadcasts, buckets, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "zero"])
def test_buckets_take_the_order_of_one_rank_after_the_first_step_and_keep_it(ranks_of, sharded):
    """Parameters are numbered as registered: last 0, middle 1, first 2."""
    model = Backwards().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            x = torch.full((2, 4), 1.0 + rank, dtype=torch.float64)
            (model(x, skips=rank == 1).square().sum() / 2).backward()
        optimizer.step()
    for seen, broadcasts, buckets, parameters in ranks_of(2).run(orders, sharded):
        measured = [2, 1, 0] if sharded else [0, 1, 2]
        assert seen == [[2, 1, 0], measured, measured, measured]
        assert buckets == measured
        assert broadcasts == ([0, 0, 0] if sharded else [1, 0, 0])
        for ours, theirs in zip(parameters, model.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def first_step_without_rank_0(group):
    model = cl.DistributedDataParallel(Backwards().double(), group, bucket_cap_mb=_EACH_ALONE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cl.Join([model], step_along=[optimizer]):
        for _ in range(2 * group.rank):
            model(torch.ones(2, 4).double()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    order = engine_of(model).reducer.gradients.order
    return order, [p.detach().clone() for p in model.parameters()]


def test_a_rank_that_never_had_data_takes_the_order_of_the_others(ranks_of):
    (one, mine), (other, theirs) = ranks_of(2).run(first_step_without_rank_0)
    assert one == other == [0, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class Checkpointed(torch.nn.Module):
    """Two segments, each a backward pass inside the backward pass; `tied` is in both."""

    def __init__(self, is_tied):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.tied = torch.nn.Linear(4, 4)
        self.is_tied = is_tied

    def forward(self, x, by_segments=True):
        def run(layers, x):
            return checkpoint(layers, x, use_reentrant=True) if by_segments else layers(x)

        hidden = run(lambda x: torch.tanh(self.tied(self.one(x))), x)
        return run(lambda x: self.other(self.tied(x) if self.is_tied else x), hidden)


def checkpointed(group, is_tied, options):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(
            Checkpointed(is_tied).double(), own, bucket_cap_mb=_EACH_ALONE, **options
        )
        gradients = []
        for batch in batches_of(own.rank, 3, torch.float64):
            model.zero_grad()
            before = own.statistics.snapshot()
            try:
                loss_of(model, batch[:, :4].requires_grad_()).backward()
            except RuntimeError as error:
                return str(error)
            gradients.append([p.grad.clone() for p in model.parameters()])
        return gradients, own.statistics.since(before).operations


@pytest.mark.parametrize(
    ("is_tied", "options"),
    [(False, {}), (True, {"static_graph": True})],
    ids=["plain", "tied, static graph"],
)
def test_passes_of_checkpointed_segments_are_one_backward_pass(ranks_of, is_tied, options):
    model = Checkpointed(is_tied).double()
    expected = []
    for step in range(3):
        model.zero_grad()
        for rank in range(2):
            batch = batches_of(rank, 3, torch.float64)[step][:, :4]
            (model(batch, by_segments=False).square().mean() / 2).backward()
        expected.append([p.grad.clone() for p in model.parameters()])
    for gradients, operations in ranks_of(2).run(checkpointed, is_tied, options):
        assert operations == {"all_reduce": 6}, "a bucket for each parameter, once"
        for ours, theirs in zip(gradients, expected, strict=True):
            assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(ours, theirs, strict=True))


def test_a_second_gradient_after_its_bucket_was_sent_is_refused_with_the_mend(ranks_of):
    told = ranks_of(2).run(checkpointed, True, {})
    assert any("parameter tied." in t and "got a second gradient in the same" in t for t in told)
    assert all("static_graph=True" in t for t in told if "a second gradient" in t)


def penalised(group):
    """A gradient by the input, of a model whose parameters it must leave alone."""
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    x = batches_of(group.rank, 1, torch.float64)[0].requires_grad_()
    before = group.statistics.snapshot()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    silent = group.statistics.since(before).total_operations() == 0
    gradient.square().sum().backward()
    return silent, model.module[0].weight.grad.clone()


def test_gradients_by_inputs_send_nothing_and_can_be_penalised(ranks_of):
    model = make_model(torch.float64)
    for rank in range(2):
        x = batches_of(rank, 1, torch.float64)[0].requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient.square().sum() / 2).backward()
    for silent, weight in ranks_of(2).run(penalised):
        assert silent
        assert torch.allclose(weight, model[0].weight.grad, atol=1e-14)


def by_input(model, loss, output, x):
    torch.autograd.grad(loss, x, retain_graph=True)


def by_input_in_no_sync(model, loss, output, x):
    with model.no_sync():
        torch.autograd.grad(loss, x, retain_graph=True)
    model.zero_grad()


def fails(model, loss, output, x):
    """Before any parameter has a gradient."""

    def fail(_):
        raise ValueError

    handle = output.register_hook(fail)
    with pytest.raises(ValueError):
        loss.backward(retain_graph=True)
    handle.remove()


def weighted_twice(group, first_pass, is_weighed_again):
    """The first pass over the weighted loss brings no parameter a gradient."""
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    x = batches_of(group.rank, 1, torch.float64)[0].requires_grad_()

    def weighted():
        output = model(x)
        return model.weigh(output.square().mean(), 1 + group.rank), output

    loss, output = weighted()
    first_pass(model, loss, output, x)
    (weighted()[0] if is_weighed_again else loss).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("first_pass", [by_input, by_input_in_no_sync, fails])
@pytest.mark.parametrize("is_weighed_again", [True, False])
def test_a_weight_counts_once_and_only_with_gradients_of_parameters(
    ranks_of, first_pass, is_weighed_again
):
    model = make_model(torch.float64)
    for rank in range(2):
        x = batches_of(rank, 1, torch.float64)[0]
        (model(x).square().mean() * (1 + rank) / 3).backward()
    for found in ranks_of(2).run(weighted_twice, first_pass, is_weighed_again):
        for ours, parameter in zip(found, model.parameters(), strict=True):
            assert torch.allclose(ours, parameter.grad, atol=1e-14)


def compiled(group):
    """backend "eager": what is in question is the tracing, which must stay out of our methods."""
    weights = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        for compile_or_not in (lambda model: model, partial(torch.compile, backend="eager")):
            torch.manual_seed(0)
            model = cl.DistributedDataParallel(make_model(torch.float64), group)
            optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1)
            called = compile_or_not(model)
            for batch in batches_of(group.rank, 3, torch.float64):
                loss_of(called, batch).backward()
                optim.step()
                optim.zero_grad()
            weights.append(model.module[0].weight.detach().clone())
    return torch.equal(*weights)


def test_a_compiled_model_takes_the_same_steps(ranks_of):
    assert ranks_of(2).run(compiled) == [True, True]


def train_with(group, options):
    model = cl.DistributedDataParallel(make_model(torch.float64, batch_norm=True), group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches_of(group.rank, 3, torch.float64):
        loss_of(model, batch).backward()
        are_views = all(
            p.grad.untyped_storage().data_ptr()
            in {b.flat.untyped_storage().data_ptr() for b in engine_of(model).reducer.buckets}
            for p in model.parameters()
        )
        optimizer.step()
        optimizer.zero_grad()
    state = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    return state, are_views


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": False},
        {"broadcast_buffers": False},
        {"bucket_cap_mb": _EACH_ALONE},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_of_torchs_change_no_parameter(ranks_of, options):
    (plain, _), _ = ranks_of(2).run(train_with, {})
    (one, are_views), (other, _) = ranks_of(2).run(train_with, options)
    assert are_views
    for name, tensor in plain.items():
        if "running" not in name or "broadcast_buffers" not in options:
            assert torch.equal(one[name], tensor) and torch.equal(other[name], tensor)
        else:
            assert not torch.equal(one[name], other[name]), "each rank keeps its own"


def masks_in_hooks(group, sharded, bucket_cap_mb, replaces):
    """After wrapping, as a program that prunes: each rank scales its own gradients."""
    model = cl.DistributedDataParallel(wide_layers(), group, bucket_cap_mb=bucket_cap_mb)
    make = cl.ZeroRedundancyOptimizer if sharded else torch.optim.SGD
    given = (model, torch.optim.SGD) if sharded else (model.parameters(),)
    optimizer = make(*given, lr=0.1)

    def scale(parameter):
        if replaces:
            parameter.grad = parameter.grad * (2.0 + group.rank)
        else:
            parameter.grad.mul_(2.0 + group.rank)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(scale)
    for _ in range(3):
        model(wide_batch(group.rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def wide_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(130, 130) for _ in range(3)]).double()


def wide_batch(rank):
    return torch.full((2, 130), 0.1 + rank / 10, dtype=torch.float64)


@pytest.mark.parametrize("replaces", [False, True], ids=["edited", "replaced"])
@pytest.mark.parametrize("bucket_cap_mb", [_EACH_ALONE, 0.2, 25])
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "zero"])
def test_what_hooks_make_of_gradients_is_what_is_reduced(
    ranks_of, sharded, bucket_cap_mb, replaces
):
    """With torch's DDP too, the hooks of a parameter have run when its gradient is sent."""
    model = wide_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(wide_batch(rank)).square().sum() / 2 * (2.0 + rank)).backward()
        optimizer.step()
    for found in ranks_of(2).run(masks_in_hooks, sharded, bucket_cap_mb, replaces):
        for ours, theirs in zip(found, model.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
