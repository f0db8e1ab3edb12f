"""DistributedDataParallel: one gradient for all ranks, and a model that is the same on each."""

import copy
import inspect

import pytest
import torch
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model, reference


def starting_point(group, wrap):
    torch.manual_seed(group.rank)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    module.register_buffer("mask", torch.rand(5) > 0.5)
    model = wrap(module, group)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("wrap", [cl.DistributedDataParallel, cl.PureDistributedDataParallel])
def test_all_ranks_start_from_rank_0_whatever_the_dtype(ranks_of, wrap):
    first, *others = ranks_of(3).run(starting_point, wrap)
    assert "module.0.weight" in first
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


def gradients(group, dtype):
    model = cl.DistributedDataParallel(make_model(dtype), group)
    loss_of(model, batches_of(group.rank, 1, dtype)[0]).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_the_mean_over_all_ranks(ranks_of, dtype):
    model = make_model(torch.float64)
    model.load_state_dict(make_model(dtype).state_dict())
    for rank in range(3):
        batch = batches_of(rank, 1, dtype)[0].double()
        (loss_of(model, batch) / 3).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    results = ranks_of(3).run(gradients, dtype)
    tolerance = {torch.float64: 1e-15, torch.float32: 1e-7, torch.bfloat16: 1e-2}[dtype]
    for mine in results:
        assert largest_difference(mine, expected) < tolerance
        assert all(torch.equal(a, b) for a, b in zip(mine, results[0], strict=True))


def large_gradients(group):
    """The sum of two of them is beyond float16."""
    model = cl.DistributedDataParallel(torch.nn.Linear(3, 1).half(), group)
    found = []
    with cl.Join([model], divide_by_initial_world_size=False, skew_warning=None):
        for _ in range(1 + min(group.rank, 1)):  # The second step is without rank 0.
            model.zero_grad()
            model(torch.full((1, 3), 40000.0).half()).sum().backward()
            found.append(model.module.weight.grad.tolist()[0])
    return found


def test_the_mean_of_large_gradients_in_float16_is_finite(ranks_of):
    for rank, found in enumerate(ranks_of(3).run(large_gradients)):
        assert found == [[40000.0] * 3] * (1 + min(rank, 1))


def accumulate(group, sets_flag):
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    first, second = batches_of(group.rank, 2, torch.float64)
    before = group.statistics.snapshot()
    if sets_flag:  # As nanoGPT does.
        assert model.require_backward_grad_sync
        model.require_backward_grad_sync = False
        loss_of(model, first).backward()
        model.require_backward_grad_sync = True
    else:
        with model.no_sync():
            assert not model.require_backward_grad_sync
            loss_of(model, first).backward()
    silent = group.statistics.since(before).total_operations() == 0
    loss_of(model, second).backward()
    return [parameter.grad.clone() for parameter in model.parameters()], silent


@pytest.mark.parametrize("sets_flag", [False, True])
def test_no_sync_accumulates_and_the_next_pass_sends_the_sum(ranks_of, sets_flag):
    model = make_model(torch.float64)
    for rank in range(2):
        for batch in batches_of(rank, 2, torch.float64):
            (loss_of(model, batch) / 2).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for mine, silent in ranks_of(2).run(accumulate, sets_flag):
        assert silent
        assert largest_difference(mine, expected) < 1e-15


def accumulate_in_two_blocks(group, wrap):
    model = wrap(make_model(torch.float64), group)
    first, second, third = batches_of(group.rank, 3, torch.float64)
    before = group.statistics.snapshot()
    with model.no_sync():
        with model.no_sync():
            loss_of(model, first).backward()
        loss_of(model, second).backward()
    silent = group.statistics.since(before).total_operations() == 0
    loss_of(model, third).backward()
    return [parameter.grad.clone() for parameter in model.parameters()], silent


@pytest.mark.parametrize("wrap", [cl.DistributedDataParallel, cl.PureDistributedDataParallel])
def test_a_no_sync_block_inside_another_one_does_not_end_it(ranks_of, wrap):
    model = make_model(torch.float64)
    for rank in range(2):
        for batch in batches_of(rank, 3, torch.float64):
            (loss_of(model, batch) / 2).backward()
    for mine, silent in ranks_of(2).run(accumulate_in_two_blocks, wrap):
        assert silent
        assert (
            largest_difference(mine, [parameter.grad for parameter in model.parameters()]) < 1e-15
        )


def three_layers():
    layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)))
    with torch.no_grad():
        for number, parameter in enumerate(layers.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 5 - 1.5 + number)
    return layers


def loss_on(rank, model):
    return model(torch.full((2, 3), 1.0 + rank, dtype=torch.float64)).square().mean()


def fine_tune(group):
    """Rank 0 freezes the last layer, whose buckets come first, after a step of all layers."""
    layers = three_layers()
    model = cl.DistributedDataParallel(layers, group, bucket_cap_mb=1e-5)
    loss_on(group.rank, model).backward()
    model.zero_grad()
    layers[2].requires_grad_(group.rank != 0)
    before = group.statistics.snapshot()
    launched = []
    layers[0].weight.register_post_accumulate_grad_hook(
        lambda _: launched.append(group.statistics.since(before).total_operations())
    )
    loss_on(group.rank, model).backward()
    return launched, [parameter.grad.clone() for parameter in model.parameters()]


def test_a_frozen_parameter_holds_up_no_bucket_and_adds_nothing(ranks_of):
    alone = []
    for rank in range(2):
        layers = three_layers()
        loss_on(rank, layers).backward()
        alone.append([parameter.grad / 2 for parameter in layers.parameters()])
    expected = [first + second for first, second in zip(*alone, strict=True)]
    expected[4:] = alone[1][4:]
    for launched, gradients in ranks_of(2).run(fine_tune):
        assert launched[0] >= 4, "the buckets of the last two layers are not on their way"
        assert largest_difference(gradients, expected) < 1e-12 * expected[0].abs().max()


def running_statistics(group, sharded):
    model = cl.DistributedDataParallel(make_model(torch.float32, batch_norm=True), group)
    if sharded:
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cl.Join([model, optimizer] if sharded else [model]):
        for batch in batches_of(group.rank, 2 + 2 * group.rank, torch.float32):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
def test_buffers_and_parameters_are_equal_after_join(ranks_of, sharded):
    first, *others = ranks_of(3).run(running_statistics, sharded)
    assert first["module.1.num_batches_tracked"] == 6
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


def different_models(group, kind):
    torch.manual_seed(0)
    width = 4 if kind == "shape" and group.rank == 1 else 3
    layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, width)]
    if kind == "count" and group.rank == 1:
        layers.append(torch.nn.Linear(3, 3))
    with another_group(group) as own:
        with pytest.raises(cl.CollectiveMismatch) as raised:
            cl.DistributedDataParallel(torch.nn.Sequential(*layers), own)
        return str(raised.value)


def test_models_that_differ_are_found_at_construction_and_named(ranks_of):
    for told in ranks_of(3).run(different_models, "shape"):
        assert "rank 1" in told and "parameter 2 differs" in told and "1.weight" in told
    for told in ranks_of(3).run(different_models, "count"):
        assert "different numbers of parameters" in told and "1: 6" in told


def refusals(group):
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    split = torch.nn.Linear(2, 2)
    split.bias = torch.nn.Parameter(torch.zeros(2, device="meta"))
    told = []
    for module, options in (
        (frozen, {}),
        (split, {}),
        (torch.nn.Linear(2, 2, device="meta"), {}),
        (torch.nn.Linear(2, 2), {"bucket_cap_mb": 0}),
        (torch.nn.LazyLinear(2), {}),
    ):
        try:
            cl.DistributedDataParallel(module, group, **options)
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    try:
        cl.DistributedDataParallel(torch.nn.Linear(2, 2))
    except RuntimeError as error:
        told.append(str(error))
    with another_group(group) as own:
        try:
            copy.deepcopy(cl.DistributedDataParallel(torch.nn.Linear(2, 2), own))
        except TypeError as error:
            told.append(str(error))
    return told


def test_unfit_modules_are_refused_with_the_mend(ranks_of):
    frozen, split, elsewhere, cap, lazy, no_group, copied = ranks_of(1).run(refusals)[0]
    assert "doesn't have any parameter that requires a gradient" in frozen
    assert "several devices: weight on cpu, bias on meta" in split
    assert "call module.to_empty(device='cpu')" in elsewhere
    assert "bucket_cap_mb must be positive, got 0" in cap
    assert "Run a dummy forward pass" in lazy
    assert "there is no default group" in no_group
    assert "copy model.module (copy.deepcopy(model.module)" in copied


def sparse(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True), own)
        with pytest.raises((ValueError, RuntimeError)) as raised:
            model(torch.tensor([1])).sum().backward()
        return str(raised.value)


def test_sparse_gradients_are_refused(ranks_of):
    (told,) = ranks_of(1).run(sparse)
    assert "parameter weight of shape (4, 2) has a torch.sparse_coo gradient" in told
    assert "only dense gradients are reduced" in told
    assert "(for nn.Embedding and nn.EmbeddingBag: sparse=False)" in told
    assert "torch's DistributedDataParallel on Chorusline's groups" in told


class Layers(torch.nn.Module):
    """skip: layers that a pass leaves out. nests: each layer has a backward pass of its own."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4).double() for _ in range(4))

    def forward(self, x, skip=(), nests=False):
        for number, layer in enumerate(self.layers):
            if number not in skip:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if nests else layer(x))
        return x


def skipped(one, other, x, rank):
    """The bucket of the last layer would go first."""
    return one(x).square().sum() + other(x, skip=(3,) if rank == 1 else ()).square().sum()


def swapped(one, other, x, rank):
    first, second = (one, other) if rank == 0 else (other, one)
    return first(x).square().sum() + second(x).square().sum()


def one_nests(one, other, x, rank):
    return nesting(one, other, x.requires_grad_(), rank, one)


def other_nests(one, other, x, rank):
    return nesting(one, other, x.requires_grad_(), rank, other)


def nesting(one, other, x, rank, nests):
    order = (one, other) if rank == 0 else (other, one)
    return sum(model(x, nests=model is nests).square().sum() for model in order)


def used_twice(one, other, x, rank):
    loss = one(x).square().sum() + other(x).square().sum()
    return loss + one(2 * x).square().sum() if rank == 1 else loss


def left_out(one, other, x, rank):
    return one(x).square().sum() + (other(x).square().sum() if rank == 0 else 0)


def batch_of_two(rank):
    torch.manual_seed(rank)
    return torch.randn(3, 4).double()


def two_models_in_a_pass(group, loss_of_two, sharded=False):
    with another_group(group) as own:
        models = [
            cl.DistributedDataParallel(Layers(seed), own, bucket_cap_mb=1e-4) for seed in (1, 2)
        ]
        make = (
            cl.ZeroRedundancyOptimizer
            if sharded
            else lambda model, sgd, **options: sgd(model.parameters(), **options)
        )
        optimizers = [make(model, torch.optim.SGD, lr=0.1) for model in models]
        for _ in range(2):
            try:
                loss_of_two(*models, batch_of_two(group.rank), group.rank).backward()
            except cl.CollectiveMismatch as error:
                return str(error)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for model in models for p in model.parameters()]


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "zero"])
@pytest.mark.parametrize("loss_of_two", [skipped, swapped, one_nests, other_nests, used_twice])
def test_two_models_of_one_pass_get_their_own_gradients_in_whichever_order_these_come(
    ranks_of, loss_of_two, sharded
):
    modules = [Layers(seed) for seed in (1, 2)]
    expected = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(expected, lr=0.1)
    for _ in range(2):
        for rank in range(2):
            (loss_of_two(*modules, batch_of_two(rank), rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks_of(2).run(two_models_in_a_pass, loss_of_two, sharded):
        assert largest_difference(found, expected) < 1e-14


def test_a_rank_whose_pass_leaves_a_model_out_is_told_so(ranks_of):
    for told in ranks_of(2).run(two_models_in_a_pass, left_out):
        assert "model 1 on rank 0, model 0 on rank 1" in told
        assert "adds 0 * other(x).sum()" in told


def with_a_common_layer():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4).double() for _ in range(3)]
    return [torch.nn.Sequential(layers[0], other) for other in layers[1:]]


def train_with_a_common_layer(group, weighs):
    modules = with_a_common_layer()
    with another_group(group) as own:
        models = [cl.DistributedDataParallel(module, own) for module in modules]
        x = batch_of_two(own.rank)
        losses = [model(x).square().mean() for model in models]
        if weighs:
            pairs = zip(models, losses, strict=True)
            losses = [model.weigh(loss, 1.0 + own.rank) for model, loss in pairs]
        try:
            sum(losses).backward()
        except RuntimeError as error:
            return str(error)
        return [p.grad.clone() for module in modules for p in module.parameters()]


def test_two_models_with_a_common_layer_get_means_or_are_told_that_these_would_be_wrong(ranks_of):
    modules = with_a_common_layer()
    for rank in range(2):
        x = batch_of_two(rank)
        (sum(module(x).square().mean() for module in modules) / 2).backward()
    expected = [p.grad for module in modules for p in module.parameters()]
    for found in ranks_of(2).run(train_with_a_common_layer, False):
        assert largest_difference(found, expected) < 1e-14
    for told in ranks_of(2).run(train_with_a_common_layer, True):
        assert "have a parameter in common" in told and "Since losses are weighted" in told


def train_after_the_common_layer_has_left_one(group):
    kept, other = with_a_common_layer()
    with another_group(group) as own:
        model, before = (cl.DistributedDataParallel(module, own) for module in (kept, other))
        other[0] = torch.nn.Linear(4, 4).double()
        after = cl.DistributedDataParallel(other, own)
        loss = model(batch_of_two(own.rank)).square().mean()
        model.weigh(loss, 1.0 + own.rank).backward()
        assert before is not after
        return [p.grad.clone() for p in kept.parameters()]


def test_a_model_that_is_alone_with_its_layers_again_weighs_its_losses(ranks_of):
    module, _ = with_a_common_layer()
    for rank in range(2):
        (module(batch_of_two(rank)).square().mean() * (1 + rank) / 3).backward()
    for found in ranks_of(2).run(train_after_the_common_layer_has_left_one):
        assert largest_difference(found, [p.grad for p in module.parameters()]) < 1e-14


def two_passes_over_a_buffer(group):
    module = torch.nn.BatchNorm1d(3).double()
    model = cl.DistributedDataParallel(module, group)
    torch.manual_seed(group.rank)
    losses = [model(torch.randn(4, 3).double()).square().sum() for _ in range(2)]
    model.eval()
    losses.append(model(torch.randn(4, 3).double()).square().sum())
    for loss in losses:
        loss.backward()
    return [*model.buffers(), *(p.grad for p in model.parameters())]


def test_graphs_that_read_buffers_outlive_the_backward_pass_before(ranks_of):
    first, second = ranks_of(2).run(two_passes_over_a_buffer)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def join_as_in_torch(group):
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with model.join(divide_by_initial_world_size=False, step_along=[optimizer]):
        for batch in batches_of(group.rank, 3 - group.rank, torch.float64):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_model_makes_its_join_as_in_torch(ranks_of):
    expected = reference((3, 2), "sgd", torch.float64, divide_by_initial=False)
    for parameters in ranks_of(2).run(join_as_in_torch):
        assert largest_difference(parameters, expected) < 1e-14


TAKEN = {  # by torch's constructor: with values that mean the same here
    "device_ids": [0],
    "output_device": 0,
    "broadcast_buffers": False,
    "bucket_cap_mb": 1,
    "find_unused_parameters": True,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16),
    "skip_all_reduce_unused_params": True,
}
INSTEAD = {
    "dim": "batches are split before",
    "init_sync": "all ranks start from rank 0's parameters",
    "process_group": "write group=, with a chorusline Group",
    "check_reduction": "leave it out",
    "delay_all_reduce_named_params": "buckets follow the order in which gradients come",
    "param_to_hook_all_reduce": "leave it out",
    "device_mesh": "write group=, with a chorusline Group",
    "bucket_cap_mb_list": "write bucket_cap_mb=",
    "batched_grad_copy": "gradients move into their buckets as they come",
    "forward_sync_buffers": "write broadcast_buffers=",
}


def test_each_argument_of_torchs_constructor_is_in_the_table() -> None:
    torchs = set(inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters)
    assert torchs - {"module"} <= TAKEN.keys() | INSTEAD.keys()


@pytest.mark.parametrize("name", TAKEN)
def test_an_argument_of_torch_scripts_is_taken(name: str, alone: cl.Group) -> None:
    model = cl.DistributedDataParallel(torch.nn.Linear(2, 2), alone, **{name: TAKEN[name]})
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("name", INSTEAD)
def test_an_argument_of_torch_scripts_is_refused_with_the_mend(name: str, alone: cl.Group) -> None:
    told = rf"DistributedDataParallel\(\) has no argument '{name}': .*{INSTEAD[name]}"
    with pytest.raises(TypeError, match=told):
        cl.DistributedDataParallel(torch.nn.Linear(2, 2), alone, **{name: None})


def test_values_of_torchs_arguments_that_mean_nothing_here_are_refused(alone: cl.Group) -> None:
    with pytest.raises(ValueError, match="a rank owns one: start a worker for each"):
        cl.DistributedDataParallel(torch.nn.Linear(2, 2), alone, device_ids=[0, 1])
    with pytest.raises(TypeError, match="mixed_precision must be"):
        cl.DistributedDataParallel(torch.nn.Linear(2, 2), alone, mixed_precision=object())


def test_completion_shows_torchs_names_and_the_public_ones_only() -> None:
    def shown(model: torch.nn.Module) -> set[str]:
        return {n for n in dir(model) if not n.startswith("_")} - set(dir(torch.nn.Module()))

    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        model = cl.DistributedDataParallel(torch.nn.Linear(2, 2), group)
        pure = cl.PureDistributedDataParallel(torch.nn.Linear(2, 2), group)
        assert shown(pure) == {"module", "group", "no_sync"}
        assert shown(model) == {
            "module",
            "group",
            "broadcast_buffers",
            "mixed_precision",
            "no_sync",
            "require_backward_grad_sync",
            "join",
            "weigh",
            "statistics",
            "register_comm_hook",
            "join_hook",
            "join_device",
            "join_group",
        }
