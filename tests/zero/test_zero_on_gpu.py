"""ZeRO where state and parameters live on GPUs, or on stand-ins for them."""

import pytest
import torch

import chorusline as cl
from chorusline.collectives.group import Group
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.harness.gpus import gpus_of
from tests.harness.ranks import Rank
from tests.references.training import batches_of, loss_of, make_model


class Spread(torch.nn.Module):
    """A model on the host and on a second device."""

    def __init__(self, second):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(7, 13)
        self.second = torch.nn.Linear(13, 5).to(second)

    def forward(self, batch):
        hidden = torch.tanh(self.first(batch))
        return self.second(hidden.to(self.second.weight.device))


def train_spread(group):
    module = Spread("cuda")
    zero = cl.ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, lr=1e-2, group=group, max_norm=0.1
    )
    for batch in batches_of(group.rank, 3, torch.float32):
        zero.zero_grad()
        module(batch).square().mean().backward()
        for parameter in module.parameters():  # As docs/zero.md has it.
            mean = parameter.grad.to(group.device)
            group.all_reduce(mean, cl.ReduceOp.AVG).wait_on_host()
            parameter.grad.copy_(mean)
        zero.step()
    zero.consolidate_state_dict()
    zero.load_state_dict(broadcast(group, zero))
    return [p.detach().cpu() for p in module.parameters()]


def broadcast(group, zero):
    state = [zero.state_dict() if group.rank == 0 else None]
    group.broadcast_object_list(state, 0).wait()
    return state[0]


def train_spread_on(rank: Rank):
    with Group.create(rank.store, rank.rank, rank.size, "cpu", name="on the host") as group:
        return train_spread(group)


@pytest.mark.parametrize("gpus", gpus_of(2))
def test_parameters_on_two_devices_are_gathered_by_way_of_the_groups(gpus, tmp_path):
    module = Spread("cpu")
    plain = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for batches in zip(*(batches_of(rank, 3, torch.float32) for rank in range(2)), strict=True):
        plain.zero_grad()
        for batch in batches:
            (module(batch).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        plain.step()
    for parameters in gpus.run(train_spread_on, tmp_path):
        for ours, expected in zip(parameters, module.parameters(), strict=True):
            assert torch.allclose(ours, expected.cpu(), rtol=1e-4, atol=1e-6)


def devices_of_state(zero):
    return {
        value.device for state in zero.shard_optimizer.state.values() for value in state.values()
    }


def train_capturable(rank: Rank):
    with rank.group() as group:
        device = group.device
        model = cl.DistributedDataParallel(
            make_model(torch.float32).to(device), group, bucket_cap_mb=2**-18
        )
        zero = cl.ZeroRedundancyOptimizer(
            model, torch.optim.AdamW, lr=1e-2, capturable=True, replicas=2
        )
        for number, batch in enumerate(batches_of(group.rank, 4, torch.float32)):
            if number == 2:
                zero.consolidate_state_dict()
                zero.load_state_dict(broadcast(group, zero))
                assert devices_of_state(zero) == {device}
            loss_of(model, batch.to(device)).backward()
            zero.step()
            zero.zero_grad()
        told = [p.detach().tolist() for p in model.parameters()]  # the rank ends now
        if (alone := group.new_group([0])) is not None:  # As after the loss of the others.
            engine = optimizer_engine_of(zero)
            held = engine.shard.held()
            engine.shard.complete(held, [held.inventory], alone)
            engine.change_group(alone, held)
            assert devices_of_state(zero) == {device}
        group.barrier().wait_on_host()
        return told


@pytest.mark.parametrize("gpus", gpus_of(2))
def test_state_of_capturable_optimizers_stays_on_the_gpu(gpus, tmp_path):
    model = make_model(torch.float32)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [batches_of(rank, 4, torch.float32) for rank in range(gpus.size)]
    for step in range(4):
        plain.zero_grad()
        for batches in data:
            (loss_of(model, batches[step]) / gpus.size).backward()
        plain.step()
    for parameters in gpus.run(train_capturable, tmp_path):
        for ours, expected in zip(parameters, model.parameters(), strict=True):
            assert torch.allclose(torch.tensor(ours), expected, rtol=1e-4, atol=1e-6)
