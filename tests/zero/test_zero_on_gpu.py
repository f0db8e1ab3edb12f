"""ZeRO where state and parameters live on GPUs. Skipped, with the reason, where there are none."""

import pytest
import torch

import chorusline as cl
from tests.harness.ranks import NCCL, Rank, on_gpus, run_ranks
from tests.references.training import batches_of, loss_of, make_model

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device; a CPU has no second device"
)


class Spread(torch.nn.Module):
    """A model on two devices of one process."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(7, 13)
        self.second = torch.nn.Linear(13, 5).cuda()

    def forward(self, batch):
        return self.second(torch.tanh(self.first(batch)).cuda())


def train_spread(group):
    module = Spread()
    zero = cl.ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, lr=1e-2, group=group, max_norm=0.1
    )
    for batch in batches_of(0, 3, torch.float32):
        zero.zero_grad()
        module(batch).square().mean().backward()
        zero.step()
    zero.consolidate_state_dict()
    zero.load_state_dict(broadcast(group, zero))
    return [p.detach().cpu() for p in module.parameters()]


def broadcast(group, zero):
    state = [zero.state_dict() if group.rank == 0 else None]
    group.broadcast_object_list(state, 0).wait()
    return state[0]


@pytest.mark.gpu
@needs_cuda
def test_parameters_on_two_devices_are_gathered_by_way_of_the_groups(ranks_of):
    module = Spread()
    plain = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for batch in batches_of(0, 3, torch.float32):
        plain.zero_grad()
        module(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        plain.step()
    for parameters in ranks_of(2).run(train_spread):
        for ours, expected in zip(parameters, module.parameters(), strict=True):
            assert torch.allclose(ours, expected.cpu(), rtol=1e-4, atol=1e-6)


def train_capturable(rank: Rank, overlapped: bool):
    with rank.group() as group:
        device = group.device
        model = cl.DistributedDataParallel(
            make_model(torch.float32).to(device), group, bucket_cap_mb=2**-18
        )
        zero = cl.ZeroRedundancyOptimizer(
            model, torch.optim.AdamW, lr=1e-2, capturable=True, overlap_with_ddp=overlapped
        )
        for number, batch in enumerate(batches_of(group.rank, 4, torch.float32)):
            if number == 2:
                zero.consolidate_state_dict()
                zero.load_state_dict(broadcast(group, zero))
                assert zero.shard_optimizer is not None
                for state in zero.shard_optimizer.state.values():
                    assert all(value.device == device for value in state.values())
            loss_of(model, batch.to(device)).backward()
            zero.step()
            zero.zero_grad()
        return [p.detach().tolist() for p in model.parameters()]  # the rank ends now


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("size", [on_gpus(2)])
def test_state_of_capturable_optimizers_stays_on_the_gpu(size, overlapped, tmp_path):
    model = make_model(torch.float32)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [batches_of(rank, 4, torch.float32) for rank in range(size)]
    for step in range(4):
        plain.zero_grad()
        for batches in data:
            (loss_of(model, batches[step]) / size).backward()
        plain.step()
    for parameters in run_ranks(train_capturable, size, tmp_path, NCCL, overlapped):
        for ours, expected in zip(parameters, model.parameters(), strict=True):
            assert torch.allclose(torch.tensor(ours), expected, rtol=1e-4, atol=1e-6)
