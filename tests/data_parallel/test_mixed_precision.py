"""`mixed_precision` against one process that computes on a copy in the other dtype."""

import contextlib
import copy

import pytest
import torch
from torch.nn.parallel.distributed import _MixedPrecision

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model

LOW = torch.bfloat16


def train(group, sharded, dtypes, lengths):
    model = cl.DistributedDataParallel(
        make_model(torch.float32), group, mixed_precision=_MixedPrecision(**dtypes)
    )
    optim = (
        cl.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        if sharded
        else torch.optim.SGD(model.parameters(), lr=0.1)
    )
    is_even = len(set(lengths)) == 1
    with contextlib.nullcontext() if is_even else cl.Join([model, optim] if sharded else [model]):
        for batch in batches_of(group.rank, lengths[group.rank], torch.float32):
            optim.zero_grad()
            output = model(batch)
            output.square().mean().backward()
            optim.step()
            assert output.dtype == dtypes.get("param_dtype", torch.float32)
    return [parameter.detach().clone() for parameter in model.parameters()]


def one_process(lengths, param_dtype=torch.float32, reduce_dtype=torch.float32):
    model = make_model(torch.float32)
    data = [batches_of(rank, length, torch.float32) for rank, length in enumerate(lengths)]
    for number in range(max(lengths)):
        total = [torch.zeros_like(p, dtype=reduce_dtype) for p in model.parameters()]
        for batches in data:
            if number >= len(batches):
                continue  # It counts as zeros.
            low = copy.deepcopy(model).to(param_dtype)
            loss_of(low, batches[number].to(param_dtype)).backward()
            for summed, parameter in zip(total, low.parameters(), strict=True):
                summed += parameter.grad.float().to(reduce_dtype)
        with torch.no_grad():
            for parameter, summed in zip(model.parameters(), total, strict=True):
                parameter -= 0.1 * (summed / len(lengths)).float()
    return list(model.parameters())


@pytest.mark.parametrize("lengths", [(3, 3), (1, 4)], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("sharded", "dtypes"),
    [
        (False, {"param_dtype": LOW}),
        (True, {"param_dtype": LOW}),
        (False, {"reduce_dtype": LOW}),
        (False, {"param_dtype": torch.float16, "reduce_dtype": LOW}),
    ],
)
def test_each_dtype_is_used_where_torch_says(ranks_of, sharded, dtypes, lengths):
    expected = one_process(lengths, **dtypes)
    assert largest_difference(one_process(lengths), expected) > 1e-5  # It shows in the numbers.
    for parameters in ranks_of(2).run(train, sharded, dtypes, lengths):
        assert {p.dtype for p in parameters} == {torch.float32}
        assert largest_difference(parameters, expected) < 1e-7


def with_buffers(group):
    module = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.BatchNorm1d(3))
    precision = _MixedPrecision(param_dtype=LOW, buffer_dtype=LOW)
    model = cl.DistributedDataParallel(module, group, mixed_precision=precision)
    model(torch.tensor([0, 1, 2, group.rank])).sum().backward()
    return model.state_dict()


def test_buffers_are_converted_for_good_and_whole_numbers_are_not(ranks_of):
    first, second = ranks_of(2).run(with_buffers)
    assert first["module.1.running_mean"].dtype == LOW
    assert first["module.1.num_batches_tracked"].item() == 1
    assert first["module.0.weight"].dtype == torch.float32
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def unlike(group):
    with another_group(group) as own:
        dtype = LOW if group.rank else torch.float16
        with pytest.raises(cl.CollectiveMismatch) as raised:
            cl.DistributedDataParallel(
                torch.nn.Linear(2, 2), own, mixed_precision=_MixedPrecision(param_dtype=dtype)
            )
        return str(raised.value)


def test_ranks_with_other_dtypes_are_named(ranks_of):
    for text in ranks_of(2).run(unlike):
        assert "mixed_precision.param_dtype is torch.float16 on rank 0, torch.bfloat16 on" in text


def test_what_cannot_be_is_refused() -> None:
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        net = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match=r"mixed_precision\.param_dtype must be one of None"):
            cl.DistributedDataParallel(
                net, group, mixed_precision=_MixedPrecision(param_dtype=torch.int8)
            )
        model = cl.DistributedDataParallel(
            net, group, mixed_precision=_MixedPrecision(reduce_dtype=LOW)
        )
        with pytest.raises(RuntimeError, match=r"mixed_precision\(reduce_dtype=torch.bfloat16\)"):
            model.register_comm_hook(None, print)
        with pytest.raises(ValueError, match="reduce_dtype"):
            cl.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
