"""What is built on torch.distributed, as it is, over our groups: DDP, FSDP2, ZeRO, DTensor, DCP."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.harness.programs import output_of
from tests.harness.torch_groups import with_torch
from tests.references.training import batches_of, largest_difference, loss_of, make_model, reference

STEPS = 4


def trained(model, optimizer, batches):
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def parameters_of(model):
    """The whole parameters, on every rank."""
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for p in model.parameters()
    ]


def with_ddp(rank, size):
    model = DistributedDataParallel(
        make_model(torch.float32), bucket_cap_mb=0.0002, find_unused_parameters=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained(model, optimizer, batches_of(rank, STEPS, torch.float32))
    return parameters_of(model)


def with_uneven_ddp(rank, size):
    model = DistributedDataParallel(make_model(torch.float32, batch_norm=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        trained(model, optimizer, batches_of(rank, STEPS + rank, torch.float32))
    return parameters_of(model)


def with_fsdp2(rank, size):
    model = make_model(torch.float32)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained(model, optimizer, batches_of(rank, STEPS, torch.float32))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not norm.isnan().any()
    return parameters_of(model)


def with_zero(rank, size):
    model = DistributedDataParallel(make_model(torch.float32))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    trained(model, optimizer, batches_of(rank, STEPS, torch.float32))
    optimizer.consolidate_state_dict(to=0)
    return parameters_of(model)


@pytest.mark.parametrize("training", [with_ddp, with_uneven_ddp, with_fsdp2, with_zero])
def test_two_ranks_get_the_bits_that_gloo_gives(ranks_of, training):
    """Of two numbers there is one sum, whoever adds them."""
    ours = ranks_of(2).run(with_torch, "chorusline", training)
    gloos = ranks_of(2).run(with_torch, "gloo", training)
    for mine, theirs in zip(ours, gloos, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)


def test_ddp_of_three_ranks_is_one_process_of_three_batches(ranks_of):
    expected = reference((STEPS,) * 3, "sgd", torch.float64)
    for mine in ranks_of(3).run(with_torch, "chorusline", with_ddp):
        assert largest_difference(mine, expected) < 1e-6


# -- a communication hook whose callbacks communicate ----------------------------------------------


def with_sparse_gradients(rank, size):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Embedding(7, 3, sparse=True, dtype=torch.float64))
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(words(rank, step)).square().sum().backward()
        assert model.module.weight.grad.is_sparse
        optimizer.step()
    return model.module.weight.detach().clone()


def words(rank, step):
    """As many as the rank has; some are those of other ranks."""
    return torch.tensor([(step + i) % 7 for i in range(rank + 1)])


def test_ddp_adds_up_sparse_gradients(ranks_of):
    torch.manual_seed(0)
    alone = torch.nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
    optimizer = torch.optim.SparseAdam(list(alone.parameters()), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(alone(words(rank, step)).square().sum() / 3 for rank in range(3)).backward()
        optimizer.step()
    for weight in ranks_of(3).run(with_torch, "chorusline", with_sparse_gradients):
        torch.testing.assert_close(weight, alone.weight, rtol=1e-12, atol=1e-12)


def with_power_sgd(rank, size, compress):
    torch.manual_seed(0)
    layers = torch.nn.Linear(7, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.001)
    if compress:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=7, start_powerSGD_iter=2, min_compression_rate=0.1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, optimizer, batches_of(rank, STEPS + 2, torch.float32))
    return parameters_of(model)


def test_power_sgd_of_as_many_ranks_as_the_gradient_has_is_exact(ranks_of):
    """The gradient of a linear layer has the rank of its batch: 3 rows from each of 2 ranks."""
    plain, _ = ranks_of(2).run(with_torch, "chorusline", with_power_sgd, False)
    compressed = ranks_of(2).run(with_torch, "chorusline", with_power_sgd, True)
    for mine in compressed:
        assert largest_difference(mine, plain) < 1e-5
        assert largest_difference(mine, compressed[0]) == 0


# -- the step inside the backward pass, which Gloo refuses -----------------------------------------


def overlapped(rank, size, interleaved, shard_buckets):
    """ZeRO with its step in DDP's hook: the parameters, and those of DDP and a plain optimizer."""
    plain = DistributedDataParallel(make_model(torch.float32), bucket_cap_mb=0.0002)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    batches = batches_of(rank, STEPS, torch.float32)
    trained(plain, plain_optimizer, batches)

    model = DistributedDataParallel(make_model(torch.float32), bucket_cap_mb=0.0002)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-2
    )
    make_hook = (
        ddp_zero_hook.hook_with_zero_step_interleaved
        if interleaved
        else ddp_zero_hook.hook_with_zero_step
    )
    hook = make_hook(default_hooks.allreduce_hook, model, zero, shard_buckets=shard_buckets)
    model.register_comm_hook(None, hook)
    for batch in [*batches[:2], *batches]:  # torch takes no step in the first two.
        loss_of(model, batch).backward()
        model.zero_grad()
    model(batches[0])  # the next forward waits for the broadcasts of the last step
    return parameters_of(plain), parameters_of(model)


@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_zeros_step_may_overlap_the_backward_pass(ranks_of, interleaved, shard_buckets):
    ran = ranks_of(2).run(with_torch, "chorusline", overlapped, interleaved, shard_buckets)
    for plain, mine in ran:
        assert largest_difference(mine, plain) < 1e-6
        assert all(torch.equal(a, b) for a, b in zip(mine, ran[0][1], strict=True))


# -- tensors and files -----------------------------------------------------------------------------


def distributed_tensors(rank, size):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    b = torch.randn(6, 7, generator=generator, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (size,))
    rows = distribute_tensor(a, mesh, [Shard(0)])
    columns = distribute_tensor(b, mesh, [Shard(1)])
    torch.testing.assert_close((rows @ columns).full_tensor(), a @ b)
    inner = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    torch.testing.assert_close(inner.redistribute(mesh, [Shard(1)]).full_tensor(), a @ b)
    torch.testing.assert_close(inner.redistribute(mesh, [Replicate()]).to_local(), a @ b)


def test_distributed_tensors_multiply_and_move(ranks_of):
    ranks_of(3).run(with_torch, "chorusline", distributed_tensors)


def saved_and_loaded(rank, size, folder):
    mesh = init_device_mesh("cpu", (size,))
    model = make_model(torch.float32)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained(model, optimizer, batches_of(rank, 2, torch.float32))
    before = parameters_of(model)
    dcp.save({"model": model.state_dict(), "step": 2}, checkpoint_id=folder)
    trained(model, optimizer, batches_of(rank, 1, torch.float32))
    assert largest_difference(parameters_of(model), before) > 0
    state = {"model": model.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert state["step"] == 2
    assert largest_difference(parameters_of(model), before) == 0
    return before


def loaded_alone(rank, size, folder):
    state = {"model": make_model(torch.float32).state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return list(state["model"].values())


def test_a_distributed_checkpoint_is_saved_and_loaded_at_another_number_of_ranks(
    ranks_of, tmp_path
):
    (saved, *_) = ranks_of(2).run(with_torch, "chorusline", saved_and_loaded, str(tmp_path))
    for loaded in ranks_of(3).run(with_torch, "chorusline", loaded_alone, str(tmp_path)):
        assert largest_difference(loaded, saved) == 0


# -- torch.compile ---------------------------------------------------------------------------------


def compiled(rank, size):
    """backend "eager": what is in question is the tracing, which must stay out of our methods."""
    plain = DistributedDataParallel(make_model(torch.float32))
    model = DistributedDataParallel(copy.deepcopy(plain.module))
    traced = torch.compile(model, backend="eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    batches = batches_of(rank, 2, torch.float32)
    trained(plain, optimizers[0], batches)
    trained(traced, optimizers[1], batches)

    @torch.compile(backend="eager", fullgraph=True)
    def total(tensor):
        from torch.distributed._functional_collectives import all_reduce

        return all_reduce(tensor, "sum", dist.group.WORLD) * 2

    assert math.isclose(total(torch.ones(3)).sum().item(), 6 * size)
    return largest_difference(parameters_of(model), parameters_of(plain))


def test_compiled_models_and_functions_run_on_it(ranks_of):
    assert ranks_of(2).run(with_torch, "chorusline", compiled) == [0, 0]


OPERATES = """
import sys, torch, torch.distributed as dist, chorusline

dist.init_process_group("chorusline", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
print("torch._dynamo" in sys.modules)
"""


def test_a_process_that_compiles_nothing_does_not_import_the_compiler():
    """It takes seconds, in the first operation, while other ranks wait."""
    assert output_of("-c", OPERATES, timeout_s=120, is_forked=False) == "False\n"
