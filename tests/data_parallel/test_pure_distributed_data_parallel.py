"""One all-reduce for each gradient: the simple way, equal to one process and to the fast way."""

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import (
    OPTIMIZERS,
    batches_of,
    largest_difference,
    loss_of,
    make_model,
    reference,
)

STEPS = 4


def trained(group, wrapper, optimizer, accumulate):
    model = wrapper(make_model(torch.float32), group)
    kind, options = OPTIMIZERS[optimizer]
    stepper = kind(model.parameters(), **options)
    for batch in batches_of(group.rank, STEPS, torch.float32):
        if accumulate:  # half of the gradient before, unsent
            with model.no_sync():
                (loss_of(model, batch) / 2).backward()
        (loss_of(model, batch) / (2 if accumulate else 1)).backward()
        stepper.step()
        stepper.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "no_sync"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("size", [2, 3])
def test_it_equals_one_process_with_all_batches(ranks_of, size, optimizer, accumulate):
    expected = reference((STEPS,) * size, optimizer, torch.float64)
    args = cl.PureDistributedDataParallel, optimizer, accumulate
    for mine in ranks_of(size).run(trained, *args):
        assert largest_difference(mine, expected) < 1e-6


def test_it_equals_the_bucketed_one_bit_by_bit(ranks_of):
    pure = ranks_of(3).run(trained, cl.PureDistributedDataParallel, "sgd", False)
    bucketed = ranks_of(3).run(trained, cl.DistributedDataParallel, "sgd", False)
    for mine, theirs in zip(pure, bucketed, strict=True):
        assert largest_difference(mine, theirs) == 0


def counted(group):
    model = cl.PureDistributedDataParallel(make_model(torch.float32), group)
    before = group.statistics.snapshot()
    loss_of(model, batches_of(group.rank, 1, torch.float32)[0]).backward()
    return group.statistics.since(before).total_operations(), len(list(model.parameters()))


def test_a_backward_pass_is_one_all_reduce_for_each_parameter(ranks_of):
    for operations, num_parameters in ranks_of(2).run(counted):
        assert operations == num_parameters == 4


def uneven(group):
    """Rank 1 leaves out the second layer; the others reduce its gradients."""
    doomed = another_group(group)
    model = cl.PureDistributedDataParallel(make_model(torch.float32), doomed)
    batch = batches_of(group.rank, 1, torch.float32)[0]
    try:
        output = model.module[0](batch) if group.rank == 1 else model(batch)
        output.square().mean().backward()
    except cl.CollectiveMismatch as error:
        return str(error)
    finally:
        doomed.close()


def test_ranks_that_use_other_parameters_are_told_so(ranks_of):
    for told in ranks_of(2).run(uneven):
        assert "does not match on ranks [0, 1]" in told


def test_a_module_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="doesn't have any parameter that requires a gradient"):
        cl.PureDistributedDataParallel(torch.nn.ReLU())
