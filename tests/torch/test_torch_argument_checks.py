"""Arguments of a process group that make no sense are refused where they are passed."""

import pytest
import torch
import torch.distributed as dist

from tests.harness.torch_groups import with_torch


def with_root(kind, root, tensor=0):
    options = kind()
    options.rootRank = root
    if hasattr(options, "rootTensor"):
        options.rootTensor = tensor
    return options


def refused(rank, size):
    group = dist.group.WORLD
    one, double, two = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    sparse = torch.sparse_coo_tensor([[0]], [1.0], size=(2,))
    longer = torch.sparse_coo_tensor([[0]], [1.0], size=(4,))
    all_reduce, gather, scatter = dist.AllreduceOptions, dist.GatherOptions, dist.ScatterOptions
    broadcast, reduce = dist.BroadcastOptions, dist.ReduceOptions
    coalesced = dist.AllreduceCoalescedOptions
    product = all_reduce()
    product.reduceOp = dist.ReduceOp.PRODUCT
    other = (rank + 1) % size
    calls = {
        "no tensor": lambda: group.allreduce([], all_reduce()),
        "dtypes": lambda: group.allreduce([one, double], all_reduce()),
        "shapes": lambda: group.allreduce([one, two], all_reduce()),
        "a sparse one": lambda: group.allreduce([two, sparse], all_reduce()),
        "a dense one": lambda: group.allreduce([sparse, two], all_reduce()),
        "sparse shapes": lambda: group.allreduce([sparse, longer], all_reduce()),
        "a sparse product": lambda: group.allreduce([sparse], product),
        "nothing coalesced": lambda: group.allreduce_coalesced([], coalesced()),
        "no broadcast": lambda: group.broadcast([], with_root(broadcast, 0)),
        "root -1": lambda: group.broadcast([one], with_root(broadcast, -1)),
        "root size": lambda: group.broadcast([one], with_root(broadcast, size)),
        "root tensor": lambda: group.broadcast([one], with_root(broadcast, rank, 1)),
        "broadcast dtypes": lambda: group.broadcast([one, double], with_root(broadcast, rank)),
        "broadcast shapes": lambda: group.broadcast([one, two], with_root(broadcast, rank)),
        "reduce to -1": lambda: group.reduce([one], with_root(reduce, -1)),
        "reduce of two": lambda: group.reduce([one, one], with_root(reduce, rank)),
        "reduce's root tensor": lambda: group.reduce([one], with_root(reduce, rank, 1)),
        "no gather": lambda: group.allgather([], []),
        "no output": lambda: group.allgather([], [one]),
        "two outputs": lambda: group.allgather([[one] * size] * 2, [one]),
        "few outputs": lambda: group.allgather([[one] * (size - 1)], [one]),
        "many outputs": lambda: group.allgather([[one] * (size + 1)], [one]),
        "gather dtypes": lambda: group.allgather([[one] * 2 * size] * 2, [one, double]),
        "gather shapes": lambda: group.allgather([[one] * 2 * size] * 2, [one, two]),
        "output dtypes": lambda: group.allgather([[one, double]], [one]),
        "gathered by nobody": lambda: group.gather([], [one], with_root(gather, -1)),
        "gather of none": lambda: group.gather([], [], with_root(gather, 0)),
        "gather of two": lambda: group.gather([], [one, one], with_root(gather, 0)),
        "gather into none": lambda: group.gather([], [one], with_root(gather, rank)),
        "gather into two": lambda: group.gather([[one] * size] * 2, [one], with_root(gather, rank)),
        "gather into few": lambda: group.gather([[one]], [one], with_root(gather, rank)),
        "gather's dtypes": lambda: group.gather([[double] * size], [one], with_root(gather, rank)),
        "gather's shapes": lambda: group.gather([[two] * size], [one], with_root(gather, rank)),
        "not the root": lambda: group.gather([[one] * size], [one], with_root(gather, other)),
        "scattered by nobody": lambda: group.scatter([one], [], with_root(scatter, -1)),
        "scatter into none": lambda: group.scatter([], [], with_root(scatter, 0)),
        "scatter into two": lambda: group.scatter([one, one], [], with_root(scatter, 0)),
        "scatter of none": lambda: group.scatter([one], [], with_root(scatter, rank)),
        "scatter of lists": lambda: group.scatter(
            [one], [[one] * size] * 2, with_root(scatter, rank)
        ),
        "scatter of few": lambda: group.scatter([one], [[one]], with_root(scatter, rank)),
        "scatter's dtypes": lambda: group.scatter(
            [one], [[double] * size], with_root(scatter, rank)
        ),
        "scatter's shapes": lambda: group.scatter([one], [[two] * size], with_root(scatter, rank)),
        "not the scatterer": lambda: group.scatter(
            [one], [[one] * size], with_root(scatter, other)
        ),
        "sent to nobody": lambda: group.send([one], size, 0),
        "sent none": lambda: group.send([], other, 0),
        "sent two": lambda: group.send([one, one], other, 0),
        "received from nobody": lambda: group.recv([one], -1, 0),
        "received two": lambda: group.recv([one, one], other, 0),
        "lists of ranks": lambda: dist.all_gather_coalesced([[one]] * (size + 1), [one]),
        "coalesced shapes": lambda: dist.all_gather_coalesced([[two]] * size, [one]),
        "coalesced dtypes": lambda: dist.all_gather_coalesced([[double]] * size, [one]),
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
        except (ValueError, RuntimeError, TypeError) as error:
            text = str(error)
            if len(text) < 15:
                wrong.append(f"{name}: {text}")
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
        else:
            wrong.append(f"{name}: taken")
    assert wrong == []
    assert (one.item(), double.item(), two.tolist()) == (0.0, 0.0, [0.0, 0.0])
    alive = torch.ones(1)
    dist.all_reduce(alive)
    assert alive.item() == size


def test_lists_of_tensors_that_make_no_sense_are_refused_and_the_group_lives_on(ranks_of):
    ranks_of(2).run(with_torch, "chorusline", refused)  # Gloo aborts the process at some of them.


def refused_beside_others(rank, size):
    """Coalesced operations whose last one is refused. The first ones are right."""
    group = dist.group.WORLD
    one, part = torch.ones(1), torch.zeros(1)
    whole, parts = torch.zeros(size), [torch.zeros(1) for _ in range(size)]
    sparse = torch.sparse_coo_tensor([[0]], [1.0], size=(2,))
    float8, double = one.to(torch.float8_e5m2), one.double()
    bitwise = dist.AllreduceCoalescedOptions()
    bitwise.reduceOp = dist.ReduceOp.BAND
    scatter = group.reduce_scatter_tensor_coalesced
    for call in (
        lambda: group.allreduce_coalesced([one, float8]),
        lambda: group.allreduce_coalesced([one, torch.ones(1).expand(3)]),
        lambda: group.allreduce_coalesced([one, one.expand(3)]),
        lambda: group.allreduce_coalesced([torch.tensor([rank]), one], bitwise),
        lambda: group.allreduce_coalesced([sparse, one]),
        lambda: dist.all_gather_coalesced(
            [[mine, other] for mine, other in zip(parts, [one] * size, strict=True)], [one, double]
        ),
        lambda: group.allgather_into_tensor_coalesced([whole, whole[1:].clone()], [one, one]),
        lambda: scatter([part, part.to(torch.float8_e5m2)], [torch.ones(size)] * 2),
        lambda: scatter([part, part], [torch.ones(size), torch.ones(size + 1)]),
    ):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            call()
    alive = torch.ones(1)
    dist.all_reduce(alive)
    assert alive.item() == size
    assert (one.item(), part.item(), sum(whole), sum(parts)) == (1, 0, 0, 0)
    assert sparse.to_dense().tolist() == [1, 0]


def test_an_operation_that_is_refused_starts_none_that_it_is_coalesced_with(ranks_of):
    ranks_of(2).run(with_torch, "chorusline", refused_beside_others)
