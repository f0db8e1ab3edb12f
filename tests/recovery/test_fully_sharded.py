"""Which models of `fully_shard` survive a lost rank, and what the others are told."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import chorusline as cl
from chorusline.runtime.process.registry import Registered
from chorusline.runtime.recovery.fully_sharded import is_sharded, shard_for, why_not_in_replicas
from chorusline.runtime.recovery.plain_optimizer_steps import PlainSteps
from tests.harness.torch_groups import with_torch
from tests.references.checkpoint_runs import in_run


def network():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def told(rank, size, kind):
    shape = (2,) if kind == "one copy" else (1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = network()
    if kind == "a part":
        fully_shard(model[0], mesh=mesh)
    elif kind == "ignored":
        fully_shard(model, mesh=mesh, ignored_params={model[1].bias})
    else:
        fully_shard(model, mesh=mesh)
    assert is_sharded(model)
    assert is_sharded(torch.optim.SGD(model.parameters(), lr=0.1))
    replica_size = 1 if kind == "one copy" else 2
    before = why_not_in_replicas(model, "net", replica_size, dist.group.WORLD.group)
    # Whole parameters are swapped in between a forward pass and its backward pass.
    model(torch.ones(1, 3))
    assert why_not_in_replicas(model, "net", replica_size, dist.group.WORLD.group) == before
    return before


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("replicas", ""),
        ("one copy", r"'net' is a model of fully_shard on a mesh of shape (2,)"),
        ("a part", "parameter 1.weight of 'net' is not sharded"),
        ("ignored", "parameter 1.bias of 'net' is not sharded"),
    ],
)
def test_what_keeps_a_model_from_surviving_is_told(ranks_of, kind, says):
    for text in ranks_of(2).run(with_torch, "chorusline", told, kind):
        assert text.startswith(says) and bool(text) == bool(says)


def test_a_model_in_whole_is_not_sharded():
    model = network()
    assert not is_sharded(model) and not is_sharded(torch.optim.SGD(model.parameters(), lr=0.1))


def two_optimizers(rank, size):
    model = network()
    for part in model:
        fully_shard(part, mesh=init_device_mesh("cpu", (size,)))
    steps = PlainSteps(lambda cursors, iterations: None)
    # Those of whole parameters step with the agreement of a backward pass.
    for number, one in enumerate((model[0], network(), network())):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        steps.watch(Registered(f"optimizer {number}", optimizer, False))
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(ValueError) as raised:
        steps.watch(Registered("second", second, False))
    steps.begin()  # The function runs again.
    steps.watch(Registered("second", second, False))
    return str(raised.value)


def test_a_second_optimizer_of_shards_is_refused(ranks_of):
    for text in ranks_of(2).run(with_torch, "chorusline", two_optimizers):
        assert text.startswith("optimizers 'optimizer 0' and 'second' both step sharded parameters")
        assert "parameter groups of one optimizer" in text


def test_a_shard_that_is_gone_is_told_with_the_page_on_replicas():
    with (
        cl.Group.create(cl.HashStore(), 0, 1, "cpu") as group,
        pytest.raises(cl.StateLost, match=r"shard 1 of 2 of 'net' died\. Save .*") as raised,
    ):
        shard_for(group, [0], 2, None, "net")
    assert str(raised.value).endswith("of the function (docs/torch-distributed.md).")


def saved(rank, size, folder):
    mesh = init_device_mesh("cpu", (size,))
    model = network()
    fully_shard(model[0], mesh=mesh)

    def train(ctx):
        ctx.register("net", model)
        with pytest.raises(RuntimeError) as raised:
            ctx.save()
        return str(raised.value)

    return in_run(dist.group.WORLD.group, train, cl.CheckpointConfig(folder))


def test_a_checkpoint_refuses_a_model_of_which_a_part_is_sharded(ranks_of, tmp_path):
    for text in ranks_of(2).run(with_torch, "chorusline", saved, str(tmp_path)):
        assert text.startswith("'net' is a model of fully_shard, whose shards a checkpoint cannot")
        assert text.endswith("save it with torch.distributed.checkpoint")
    assert not list(tmp_path.iterdir())
