"""Programs that set torch's default device: what Chorusline makes for itself stays where it was."""

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data.dealing import deal
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model


class Halving(torch.optim.SGD):
    """One that is tried out."""


def train(group, sharded, device):
    with another_group(group) as own:
        module, data = make_model(torch.float64), batches_of(own.rank, 2 + own.rank, torch.float64)
        model = cl.DistributedDataParallel(module, own)
        with torch.device(device):
            optimizer = (
                cl.ZeroRedundancyOptimizer(model, Halving, lr=0.1, max_norm=1.0)
                if sharded
                else Halving(model.parameters(), lr=0.1)
            )
            listed, along = ([model, optimizer], []) if sharded else ([model], [optimizer])
            for _ in range(2):
                with cl.Join(listed, step_along=along, skew_warning=None):
                    for batch in data:
                        loss_of(model, batch).backward()
                        optimizer.step()
                        optimizer.zero_grad()
            if sharded:
                optimizer.consolidate_state_dict()
            everybody = own.all_gather_object("of" + "rank" * own.rank).wait()
        return [p.detach().clone() for p in module.parameters()], everybody


@pytest.mark.parametrize("sharded", [True, False])
def test_a_default_device_reaches_no_tensor_of_the_library(ranks_of, sharded):
    expected = ranks_of(2).run(train, sharded, "cpu")
    for (found, told), (wanted, said) in zip(
        ranks_of(2).run(train, sharded, "meta"), expected, strict=True
    ):
        assert largest_difference(found, wanted) == 0 and told == said


def test_a_default_device_shuffles_no_samples_otherwise():
    wanted = deal(11, world_size=2, epoch=1, seed=3, shuffle=True)
    with torch.device("meta"):
        assert deal(11, world_size=2, epoch=1, seed=3, shuffle=True) == wanted
