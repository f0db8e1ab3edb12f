"""SyncBatchNorm, and other collectives of the loop's body, while ranks run out of data."""

import copy
import inspect
import itertools

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data_parallel.distributed_data_parallel import engine_of
from tests.harness.combinations import combinations
from tests.harness.gpus import gpus_of
from tests.harness.ranks import error_of
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of


def make_model():
    """Two layers of statistics, the first one without a bias before it."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(7, 6, bias=False),
        torch.nn.BatchNorm1d(6),
        torch.nn.Tanh(),
        torch.nn.Linear(6, 4, bias=False),
        torch.nn.BatchNorm1d(4, momentum=None, affine=False),
        torch.nn.Linear(4, 3),
    ).double()


def synced(group, **options):
    module = cl.SyncBatchNorm.convert_sync_batchnorm(make_model()).to(group.device)
    return cl.DistributedDataParallel(module, group, **options)


def samples_of(rank, length):
    """Batches of 2 or 3 samples, different on each rank."""
    return [
        batch[: 2 + (rank + number) % 2]
        for number, batch in enumerate(batches_of(rank, length, torch.float64))
    ]


def reference(lengths, accumulate=1):
    """One process: each forward is over the batches of all ranks that still have one."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = [samples_of(rank, n) for rank, n in enumerate(lengths)]
    for start in range(0, max(lengths), accumulate):
        optimizer.zero_grad()
        for number in range(start, min(start + accumulate, max(lengths))):
            batches = [own[number] for own in data if number < len(own)]
            outputs = model(torch.cat(batches)).split([len(batch) for batch in batches])
            (sum(o.square().mean() for o in outputs) / len(lengths)).backward()
        if start + accumulate <= max(lengths):  # What is left at the end is stepped nowhere.
            optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def halves(size):
    """By rank, some of the samples; each with another mean."""
    samples = torch.randn(4 * size + 1, 6, generator=torch.Generator().manual_seed(0)).double()
    return (samples + torch.arange(len(samples))[:, None]).tensor_split(size)


def layers_without_a_bias(group):
    given = torch.nn.BatchNorm1d(6, dtype=torch.float64, bias=False)
    found = []
    for layer in (
        cl.SyncBatchNorm(6, dtype=torch.float64, process_group=group, bias=False),
        cl.SyncBatchNorm.convert_sync_batchnorm(given, group),
    ):
        assert layer.bias is None and "bias" not in layer.state_dict()
        own = halves(group.size)[group.rank].clone().requires_grad_()
        output = layer(own)
        output.pow(3).sum().backward()
        found.append((output.detach(), own.grad, layer.running_mean, layer.running_var))
    return found


@pytest.mark.skipif(
    "bias" not in inspect.signature(torch.nn.BatchNorm1d).parameters,
    reason=f"the layers of torch {torch.__version__} have no argument bias",
)
def test_layers_without_a_bias_are_those_of_one_process(ranks_of):
    layer = torch.nn.BatchNorm1d(6, dtype=torch.float64, bias=False)
    whole = torch.cat(halves(3)).requires_grad_()
    output = layer(whole)
    output.pow(3).sum().backward()
    expected = [*zip(output.detach().tensor_split(3), whole.grad.tensor_split(3), strict=True)]
    for found, parts in zip(ranks_of(3).run(layers_without_a_bias), expected, strict=True):
        for one in found:
            for mine, theirs in zip(
                one, (*parts, layer.running_mean, layer.running_var), strict=True
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


class Batches:
    """A dataset whose samples are the batches of all ranks, kept together by rank."""

    def __init__(self, lengths):
        self.items = [b for rank, n in enumerate(lengths) for b in samples_of(rank, n)]
        self.ranks = [rank for rank, n in enumerate(lengths) for _ in range(n)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    def shard(self, group):
        return cl.Shard(
            self,
            1,
            rank=group.rank,
            world_size=group.size,
            shuffle=False,
            keep_together=self.ranks,
            collate_fn=lambda items: items[0],
        )


def train(group, lengths, sharded, accumulate, looks_ahead):
    model = synced(group, bucket_cap_mb=2**-12)
    if sharded:
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01)
        join = cl.Join([model, optimizer], skew_warning=None)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        join = cl.Join([model], step_along=[optimizer], skew_warning=None)
    data = (
        Batches(lengths).shard(group)
        if looks_ahead
        else samples_of(group.rank, lengths[group.rank])
    )
    with join:
        for number, batch in enumerate(data, start=1):
            engine_of(model).reducer.is_syncing = number % accumulate == 0
            model(batch.to(group.device)).square().mean().backward()
            if engine_of(model).reducer.is_syncing:
                optimizer.step()
                optimizer.zero_grad()
    return {name: tensor.cpu().clone() for name, tensor in model.module.state_dict().items()}


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(state[name], tensor, rtol=1e-9, atol=1e-12), (
            name,
            (state[name] - tensor).abs().max(),
        )


@combinations(
    4,
    lengths=[(5, 9), (3, 0, 7), (4, 4), (7, 2, 5)],
    sharded=[True, False],
    accumulate=[1, 2],
    looks_ahead=[True, False],
)
def test_statistics_are_those_of_the_ranks_that_have_data(
    ranks_of, lengths, sharded, accumulate, looks_ahead
):
    if looks_ahead and 0 in lengths:
        lengths = tuple(
            sorted(lengths, reverse=True)
        )  # Keys are dealt in order to the first ranks.
    expected = reference(lengths, accumulate)
    for state in ranks_of(len(lengths)).run(train, lengths, sharded, accumulate, looks_ahead):
        assert_same(state, expected)


def train_at_detail(group, *case):
    cl.set_debug_level(cl.DebugLevel.DETAIL)
    try:
        with another_group(group) as own:
            return train(own, *case)
    finally:
        cl.set_debug_level(cl.DebugLevel.OFF)


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
def test_followers_keep_up_where_every_operation_is_compared_first(ranks_of, sharded):
    for state in ranks_of(2).run(train_at_detail, (2, 5), sharded, 2, True):
        assert_same(state, reference((2, 5), 2))


def torchs_layer(module_class, shape, dtype, affine, empty_rank):
    torch.manual_seed(1)
    layer = module_class(shape[1], affine=affine).to(dtype)
    if affine:
        with torch.no_grad():
            layer.weight.uniform_(0.5, 2)
            layer.bias.uniform_(-1, 1)
    inputs = [
        torch.randn(0 if rank == empty_rank else 1 + 2 * rank, *shape[1:], dtype=dtype) * 3 + 5
        for rank in range(3)
    ]
    return layer, inputs


def synced_layer(group, *case):
    layer, inputs = torchs_layer(*case)
    layer = cl.SyncBatchNorm.convert_sync_batchnorm(layer, group)
    mine = inputs[group.rank].requires_grad_()
    output = layer(mine)
    (output * torch.arange(output.numel()).view_as(output).to(output)).sum().backward()
    own = [p.grad for p in layer.parameters()]
    for gradient in own:
        group.all_reduce(gradient).wait()
    return output.detach(), mine.grad, own, dict(layer.named_buffers())


@pytest.mark.parametrize(
    "case",
    [
        (torch.nn.BatchNorm1d, (0, 4), torch.float64, True, None),
        (torch.nn.BatchNorm1d, (0, 4, 3), torch.float64, False, 1),
        (torch.nn.BatchNorm2d, (0, 3, 4, 5), torch.float64, True, 0),
        (torch.nn.BatchNorm3d, (0, 2, 2, 3, 2), torch.float32, True, None),
    ],
    ids=["1d", "sequence, no affine, empty", "2d, empty", "3d in float32"],
)
def test_a_layer_equals_torchs_over_the_samples_of_all_ranks(ranks_of, case):
    layer, inputs = torchs_layer(*case)
    whole = torch.cat(inputs).requires_grad_()
    outputs = layer(whole).split([len(part) for part in inputs])
    sum((o * torch.arange(o.numel()).view_as(o).to(o)).sum() for o in outputs).backward()
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if whole.dtype == torch.float64 else {"atol": 1e-3}
    gradients = whole.grad.split([len(part) for part in inputs])
    results = ranks_of(3).run(synced_layer, *case)
    for (output, gradient, own, buffers), expected, of in zip(
        results, outputs, gradients, strict=True
    ):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        assert torch.allclose(gradient, of, **tolerance)
        for ours, theirs in zip(own, layer.parameters(), strict=True):
            assert torch.allclose(ours, theirs.grad, **tolerance)
        for name, buffer in layer.named_buffers():
            assert torch.allclose(buffers[name], buffer, **tolerance), name


def far_from_zero(group):
    """Sums of squares of these cancel to nothing in float32."""
    layer = cl.SyncBatchNorm(1, process_group=group)
    x = 1e4 + torch.arange(4.0).view(4, 1) + 4 * group.rank
    return layer(x).detach(), layer.running_var.item()


def test_statistics_far_from_zero_do_not_cancel(ranks_of):
    x = 1e4 + torch.arange(8.0, dtype=torch.float64).view(8, 1)
    plain = torch.nn.BatchNorm1d(1).double()
    expected = plain(x)
    for rank, (output, variance) in enumerate(ranks_of(2).run(far_from_zero)):
        torch.testing.assert_close(
            output.double(), expected[4 * rank : 4 * rank + 4].detach(), rtol=1e-3, atol=1e-3
        )
        assert variance == pytest.approx(plain.running_var.item(), rel=1e-4)


def ways_to_wrap(group):
    module = cl.SyncBatchNorm.convert_sync_batchnorm(make_model())
    names = [type(layer).__name__ for layer in module]
    model = cl.DistributedDataParallel(module, group)
    alone = copy.deepcopy(model.module)
    alone.eval()
    same = torch.equal(alone(torch.ones(2, 7).double()), model.eval()(torch.ones(2, 7).double()))
    calls = (
        lambda: cl.DistributedDataParallel(
            torch.nn.SyncBatchNorm.convert_sync_batchnorm(make_model()), group
        ),
        lambda: cl.SyncBatchNorm(3, process_group="world"),
        lambda: alone.train()(torch.ones(2, 7).double()),
        lambda: cl.SyncBatchNorm(3, process_group=group)(torch.ones(2)),
        lambda: cl.SyncBatchNorm(3, process_group=group)(torch.ones(2, 4)),
    )
    told = [str(error_of(call, ValueError, TypeError, RuntimeError)) for call in calls]
    return names, alone[1].group is None, same, told


def test_layers_are_converted_copied_and_refused_with_the_mend(ranks_of):
    for names, is_free, same, told in ranks_of(2).run(ways_to_wrap):
        assert names.count("SyncBatchNorm") == 2 and "BatchNorm1d" not in names
        assert is_free and same, "a copy belongs to no group, and evaluates alike"
        torchs, no_group, no_session, dimensions, channels = told
        assert "1 is torch's SyncBatchNorm" in torchs and "convert_sync_batchnorm" in torchs
        assert "process_group must be a Group or None, got str" in no_group
        assert "there is no default group" in no_session
        assert "expected at least 2D input (got 1D input)" in dimensions
        assert "expected 3 channels in dimension 1" in channels


def with_a_group_of_its_own(group):
    pair = group.split(group.rank // 2)
    module = cl.SyncBatchNorm.convert_sync_batchnorm(make_model(), pair)
    model = cl.DistributedDataParallel(module, group)
    model(samples_of(group.rank, 1)[0])
    return [layer.group is pair for layer in (module[1], module[4])], module[1].running_mean.clone()


def test_a_group_that_the_user_gives_a_layer_is_not_that_of_the_model(ranks_of):
    found = ranks_of(4).run(with_a_group_of_its_own)
    for pair in (0, 1), (2, 3):
        module = make_model()
        module(torch.cat([samples_of(rank, 1)[0] for rank in pair]))
        for rank in pair:
            are_pairs, mean = found[rank]
            assert are_pairs == [True, True]
            assert torch.allclose(mean, module[1].running_mean)


def test_a_converted_layer_keeps_what_was_set(alone):
    given = torch.nn.BatchNorm2d(3, eps=0.5, momentum=0.3).eval()
    layer = cl.SyncBatchNorm.convert_sync_batchnorm(given, alone)
    assert (layer.eps, layer.momentum, layer.training) == (0.5, 0.3, False)
    assert layer.weight is given.weight and layer.running_var is given.running_var


def one_value(group):
    with another_group(group) as own:
        with pytest.raises(ValueError) as raised:
            cl.SyncBatchNorm(2, process_group=own)(torch.ones(1 - own.rank, 2))
        return str(raised.value)


def test_one_value_per_channel_over_all_ranks_is_refused_on_all(ranks_of):
    first, second = ranks_of(2).run(one_value)
    assert "input size (1, 2) on rank 0, and 1 over all ranks" in first
    assert "input size (0, 2) on rank 1, and 1 over all ranks" in second


def train_by_the_flags_of_the_layers(group, lengths):
    """The wrapper's own flag says the opposite of the layers' in each forward pass."""
    model = synced(group)
    net = model.module
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with cl.Join([model], step_along=[optimizer], skew_warning=None):
        for batch in samples_of(group.rank, lengths[group.rank]):
            model.eval()
            net.train()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.train()
            net.eval()
            with torch.no_grad():
                for _ in range(1 + group.rank):  # Ranks evaluate different numbers of batches.
                    model(batch)
    return dict(net.state_dict())


def train_with_frozen_layers(group, lengths):
    model = synced(group)
    model.eval()
    model.module.train()
    for layer in model.module:
        layer.train(not isinstance(layer, cl.SyncBatchNorm))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with cl.Join([model], step_along=[optimizer], skew_warning=None):
        for batch in samples_of(group.rank, lengths[group.rank]):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().tolist() for p in model.parameters()]


def test_the_flags_of_the_layers_decide_whether_a_batch_begins(ranks_of):
    """model.eval() and then net.train(), as after the validation of a library."""
    lengths = (3, 5)
    expected = reference(lengths)
    for state in ranks_of(2).run(train_by_the_flags_of_the_layers, lengths):
        assert_same(state, expected)
    first, second = ranks_of(2).run(train_with_frozen_layers, lengths)
    assert first == second


def operations_by_group(group, inside, looks_ahead):
    model = synced(group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    lengths = (3, 3)
    data = Batches(lengths).shard(group) if looks_ahead else samples_of(group.rank, 3)
    statistics = [group.statistics, model.module[1].group.statistics]
    before = [s.snapshot() for s in statistics]
    with cl.Join([model, optimizer], enable=inside):
        for batch in data:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [s.since(b).operations for s, b in zip(statistics, before, strict=True)]


def test_following_costs_nothing_in_a_step_while_all_ranks_have_data(ranks_of):
    """Three forwards; two layers, with an all_gather in forward and an all_reduce in backward."""
    plain, statistics = ranks_of(2).run(operations_by_group, False, True)[0]
    assert statistics == {"all_gather": 6, "all_reduce": 6}
    inside, followed = ranks_of(2).run(operations_by_group, True, True)[0]
    assert inside == plain
    # One when the block ends: has everybody left it?
    assert followed == {"all_gather": 6, "all_reduce": 6 + 1}
    _, followed = ranks_of(2).run(operations_by_group, True, False)[0]
    # A list cannot look ahead: one int32 per rank with each forward.
    assert followed == {"all_gather": 6, "all_reduce": 6 + 3 + 1}


def throw_early(group, lengths, looks_ahead):
    with another_group(group) as own:
        model = synced(own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        batches = (
            Batches(lengths).shard(own) if looks_ahead else samples_of(own.rank, lengths[own.rank])
        )
        try:
            with cl.Join([model, optimizer], throw_on_early_termination=True):
                for batch in batches:
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except RuntimeError as error:
            return optimizer.num_steps, str(error)
    return None


@pytest.mark.parametrize("looks_ahead", [True, False], ids=["shard", "list"])
def test_early_termination_raises_on_all_ranks_before_any_statistics(ranks_of, looks_ahead):
    for steps, told in ranks_of(2).run(throw_early, (4, 2), looks_ahead):
        assert steps == 2 and "exhausted inputs: rank 1" in told


def train_on_gpu(rank, ways):
    """Uneven, with accumulation. ways: whether the optimizer is sharded, and whether ranks look
    ahead."""
    with rank.group(timeout_s=60) as group:
        for sharded, looks_ahead in ways:
            lengths = (5, 3, 2, 1)[: group.size]
            state = train(group, lengths, sharded, 2, looks_ahead)
            assert_same(state, reference(lengths, 2))


@pytest.mark.parametrize("gpus", gpus_of(2))
def test_statistics_on_gpus_are_those_of_the_ranks_that_have_data(gpus, tmp_path):
    ways = itertools.product((True, False), repeat=2)
    # Stand-ins take half of them, by seed: in either half each value is.
    taken = [way for way in ways if gpus.seed is None or (sum(way) + gpus.seed) % 2 == 0]
    gpus.run(train_on_gpu, tmp_path, taken)
