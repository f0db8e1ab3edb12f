"""Every form of a call that torch's own process groups take, with wrappers and under modes."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.harness.torch_groups import all_gather_single, with_torch


class Two(torch.Tensor):
    """A wrapper around two tensors, whose operators are those of both."""

    @staticmethod
    def __new__(cls, a, b):
        two = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)
        two.a, two.b = a, b
        return two

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def half(name):
            return pytree.tree_map_only(Two, lambda two: getattr(two, name), args)

        first = function(*half("a"), **(kwargs or {}))
        second = function(*half("b"), **(kwargs or {}))
        if isinstance(first, torch.Tensor):
            return Two(first, second)
        dist._Work.unbox(second[1]).wait()  # of a collective
        return first


class Closed(Two):
    """A wrapper that has no collectives."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"no {function}")


@pytest.fixture(params=["chorusline", "gloo"])
def backend(request):
    """What these tests want of ours, Gloo gives."""
    return request.param


def wrappers(rank, size):
    two = Two(torch.full((3,), rank + 1.0), torch.full((3,), 10.0 * (rank + 1)))
    dist.all_reduce(two)
    assert two.a.tolist() == [3.0] * 3
    assert two.b.tolist() == [30.0] * 3
    two = Two(torch.full((2,), float(rank)), torch.full((2,), 7.0 + rank))
    dist.broadcast(two, 1)
    assert (two.a.tolist(), two.b.tolist()) == ([1.0, 1.0], [8.0, 8.0])

    waited = AsyncCollectiveTensor(torch.full((2,), float(rank)))
    dist.all_reduce(waited)
    assert waited.tolist() == [1.0, 1.0]

    with pytest.raises(NotImplementedError, match=r"no c10d\.allreduce_"):
        dist.all_reduce(Closed(torch.ones(2), torch.ones(2)))
    if rank == 0:  # It is one rank's affair: nothing was sent.
        with pytest.raises(RuntimeError, match=r"vmap|Batching"):
            torch.func.vmap(lambda t: dist.all_reduce(t) or t)(torch.ones(3, 2))
    with FakeTensorMode():
        fake = torch.ones(3)
        dist.all_reduce(fake)  # as with any backend: nothing happens
        assert fake.shape == (3,)
    still = torch.ones(2)
    dist.all_reduce(still)
    assert still.tolist() == [2.0, 2.0]


def test_a_wrapper_says_itself_what_a_collective_means_and_the_group_lives_on(ranks_of, backend):
    ranks_of(2).run(with_torch, backend, wrappers)


def counted(rank, size):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    with CommDebugMode() as seen:
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor)
        all_gather_single(torch.empty(3 * size), tensor)
        dist.barrier()
        model(torch.ones(1, 2)).sum().backward()
    assert tensor.tolist() == [float(sum(range(size)))] * 3
    counts = {str(op): n for op, n in seen.get_comm_counts().items()}
    assert counts["c10d.allreduce_"] == 2, counts
    assert counts["c10d._allgather_base_"] == 1


def test_a_dispatch_mode_sees_the_collectives(ranks_of, backend):
    ranks_of(2).run(with_torch, backend, counted)


def forms(rank, size):
    group = dist.group.WORLD
    short = timedelta(seconds=20)

    def fresh():
        return torch.full((2,), rank + 1.0)

    def equals(wanted, tensor):
        assert tensor.tolist() == wanted, (tensor, wanted)

    sums = [
        lambda t: group.allreduce(t),
        lambda t: group.allreduce([t]),
        lambda t: group.allreduce(t, dist.ReduceOp.SUM, short),
        lambda t: group.allreduce([t], op=dist.ReduceOp.SUM, timeout=short),
        lambda t: group.allreduce(tensors=[t], opts=dist.AllreduceOptions()),
        lambda t: group.allreduce_coalesced([t]),
        lambda t: group.reduce(t, 0) if rank == 0 else group.reduce(t.clone(), root=0),
        lambda t: group.reduce(tensor=t, root=rank * 0, op=dist.ReduceOp.SUM, timeout=short),
    ]
    for form in sums:
        tensor = fresh()
        form(tensor).wait()
        if rank == 0:
            equals([3.0, 3.0], tensor)
    if dist.get_backend() != "gloo":
        tensor = fresh()
        group.allreduce([tensor], dist._make_nccl_premul_sum(2.0)).wait()
        equals([6.0, 6.0], tensor)
    for form in (
        lambda t: group.broadcast(t, root=1),
        lambda t: group.broadcast(t, 1, short),
        lambda t: group.broadcast(tensor=t, root=1, timeout=short),
    ):
        tensor = fresh()
        form(tensor).wait()
        equals([2.0, 2.0], tensor)
    for form in (
        lambda out, t: group.allgather(out, t),
        lambda out, t: group.allgather(output_tensors=[out], input_tensors=[t]),
        lambda out, t: group.allgather_coalesced([[one] for one in out], [t]),
    ):
        out = [torch.empty(2), torch.empty(2)]
        form(out, fresh()).wait()
        equals([1.0, 1.0], out[0])
        equals([2.0, 2.0], out[1])
    names = [
        name
        for name in ("_allgather_base", "all_gather_single")
        if hasattr(dist.ProcessGroup, name)
    ]
    for form in (getattr(group, name) for name in names):
        whole = torch.empty(4)
        form(output=whole, input=fresh()).wait()
        equals([1.0, 1.0, 2.0, 2.0], whole)
    out = [torch.empty(2), torch.empty(2)] if rank == 1 else []
    group.gather(out, fresh(), root=1).wait()
    if rank == 1:
        equals([2.0, 2.0], out[1])
    tensor = torch.empty(2)
    group.scatter(tensor, [torch.zeros(2), torch.ones(2)] if rank == 0 else [], root=0).wait()
    equals([float(rank)] * 2, tensor)
    group.reduce_scatter(tensor, [fresh(), fresh() * 2]).wait()
    equals([3.0 * (rank + 1)] * 2, tensor)
    group._reduce_scatter_base(tensor, torch.cat([fresh(), fresh() * 2])).wait()
    equals([3.0 * (rank + 1)] * 2, tensor)
    whole = torch.empty(2)
    group.alltoall_base(whole, fresh(), [], []).wait()
    equals([1.0, 2.0], whole)
    if hasattr(dist.ProcessGroup, "all_to_all_single"):
        group.all_to_all_single(whole, fresh(), [1, 1], [1, 1], timeout=short).wait()
        equals([1.0, 2.0], whole)
    group.barrier().wait()
    group.barrier(timeout=short).wait()
    work = group.send([tensor], 1, 3) if rank == 0 else group.recv([tensor], srcRank=0, tag=3)
    work.wait()
    equals([3.0, 3.0], tensor)


@pytest.mark.skipif(
    "timeout" not in str(dist.ProcessGroup.allreduce.__doc__),
    reason=f"the forms of torch {torch.__version__} are fewer: none takes a timeout",
)
def test_every_form_of_a_call_that_torchs_binding_knows_is_taken(ranks_of, backend):
    ranks_of(2).run(with_torch, backend, forms)


def in_backward(rank, size):
    weight = torch.full((2,), 3.0, requires_grad=True)
    kept = torch.ones(2)
    product = weight * kept
    dist.broadcast(kept, 0)
    dist.all_reduce(kept, dist.ReduceOp.MAX)
    activation = (weight * 2).exp()
    dist.all_reduce(activation.detach(), dist.ReduceOp.MAX)
    (product + activation).sum().backward()
    torch.testing.assert_close(weight.grad, 1 + 2 * activation.detach())


def test_a_collective_does_not_count_as_a_change_in_place(ranks_of, backend):
    ranks_of(2).run(with_torch, backend, in_backward)


def functional_out(rank, size):
    whole = torch.empty(2 * size)
    name = dist.group.WORLD.group_name
    mine = torch.full((2,), float(rank))
    got = torch.ops._c10d_functional.all_gather_into_tensor_out(mine, size, name, out=whole)
    torch.ops._c10d_functional.wait_tensor(got)
    assert whole.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_a_functional_all_gather_writes_into_a_given_tensor(ranks_of, backend):
    ranks_of(2).run(with_torch, backend, functional_out)


def several(rank, size):
    group = dist.group.WORLD
    twice = torch.full((3,), rank + 1.0)
    group.allreduce_coalesced([twice, twice]).wait()
    assert twice.tolist() == [3.0] * 3  # once
    row = torch.arange(4.0)
    group.allreduce_coalesced([row, row[1:3], row[::2]]).wait()
    assert row.tolist() == [0.0, 2.0, 4.0, 6.0]

    # As many ranks as tensors, as Gloo has it.
    pair = [torch.tensor([2.0 * rank]), torch.tensor([2.0 * rank + 1])]
    group.allreduce(pair).wait()
    assert [one.item() for one in pair] == [6.0, 6.0]
    sparse = [torch.ones(2).to_sparse() * (2 * rank + i + 1) for i in range(2)]
    group.allreduce(sparse).wait()
    assert [one.to_dense().tolist() for one in sparse] == [[10.0, 10.0]] * 2
    if dist.get_backend() != "gloo":  # which has no kernel for it
        sparse = [torch.ones(1).to_sparse() * (rank + 1) for _ in range(2)]
        group.allreduce_coalesced(sparse).wait()
        assert [one.to_dense().item() for one in sparse] == [3.0, 3.0]
    pair = [torch.tensor([2 * rank]), torch.tensor([2 * rank + 1])]
    out = [[torch.tensor([-1]) for _ in range(4)] for _ in range(2)]
    value = group.allgather(out, pair).get_future().wait()
    assert [[one.item() for one in row] for row in out] == [[0, 1, 2, 3]] * 2
    assert [[one.item() for one in row] for row in value] == [[0, 1, 2, 3]] * 2  # as it was given
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 1
    group.broadcast(pair, options).wait()
    assert [one.item() for one in pair] == [3, 3]


def test_lists_of_several_tensors_mean_what_they_mean_to_gloo(ranks_of, backend):
    ranks_of(2).run(with_torch, backend, several)


def years(rank, size):
    """As configurations write it that want no timeout."""
    long = timedelta(seconds=180_000_000)
    group = dist.new_group([0, 1], timeout=long)
    group.set_timeout(long)
    for options in ({}, {"timeout": long}):
        tensor = torch.full((2,), rank + 1.0)
        group.allreduce([tensor], op=dist.ReduceOp.SUM, **options).wait()
        assert tensor.tolist() == [3.0, 3.0]
    group.monitored_barrier(long)


def test_a_timeout_of_years_is_taken(ranks_of, backend):
    ranks_of(2).run(with_torch, backend, years)
