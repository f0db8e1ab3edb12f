"""Join around stock `fully_shard` models: uneven inputs against one process, in float64."""

import contextlib
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import chorusline as cl
from tests.harness.combinations import combinations
from tests.harness.ranks import Ranks
from tests.harness.torch_groups import with_torch
from tests.references.training import CLIPPED, EXACT, batches_of, loss_of

LENGTHS = [(3, 5, 2, 7), (0, 2, 0, 3), (2, 2, 2, 2)]
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(13, 13)
        self.frozen = torch.nn.Linear(13, 13).requires_grad_(False)

    def forward(self, x):
        return x + self.frozen(torch.tanh(self.inner(x)))


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(7, 13), Block(), torch.nn.Tanh(), torch.nn.Linear(13, 5)
    ).double()


def sharded(size, reshard=True, replicas=1):
    model = network()
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in (model[0], model[1], model[3]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def train(model, data, size, epochs, clip, accumulate, by_live, join, synchronise=lambda on: None):
    """data: the batches of each rank that this process is; all of them, for the reference."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def limit():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    longest = max(map(len, data))
    for _ in range(epochs):
        with join([*([limit] if clip else []), optimizer, schedule]):
            took = set()
            for number in range(longest):
                live = [rank for rank, batches in enumerate(data) if number < len(batches)]
                took.update(live)
                last = (number + 1) % accumulate == 0
                synchronise(last)
                for rank in live:
                    loss_of(model, data[rank][number]).div(len(data)).backward()
                if last:
                    if by_live and len(data) > 1:
                        for one in model.parameters():
                            if one.grad is not None:
                                one.grad *= size / len(took)
                    took = set()
                    if clip:
                        limit()
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()


def trained(
    rank, size, lengths, reshard, clip, accumulate, by_live, replicas=1, switch="gradient_sync"
):
    """switch: what is off in passes that accumulate."""
    model = sharded(size, reshard, replicas)

    def join(step_along):
        return cl.Join(
            [model],
            step_along=step_along,
            skew_warning=None,
            divide_by_initial_world_size=not by_live,
        )

    mine = [batches_of(rank, lengths[rank], torch.float64)]
    synchronise = getattr(model, f"set_requires_{switch}")
    train(model, mine, size, 2, clip, accumulate, by_live, join, synchronise)
    return [one.full_tensor().detach() for one in model.parameters()]


def one_process(lengths, clip, accumulate, by_live):
    model = network()
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate(lengths)]
    train(
        model,
        data,
        len(lengths),
        2,
        clip,
        accumulate,
        by_live,
        lambda step_along: contextlib.nullcontext(),
    )
    return list(model.parameters())


@combinations(
    3,
    lengths=LENGTHS,
    ways=[
        (True, False, 1, False),
        (False, True, 1, False),
        (True, True, 1, True),
        (True, True, 2, False),
        (False, False, 2, True),
    ],
    replicas=[1, 2],
)
def test_uneven_ranks_train_as_one_process(ranks_of, lengths, ways, replicas):
    reshard, clip, accumulate, by_live = ways
    expected = one_process(lengths, clip, accumulate, by_live)
    options = (lengths, reshard, clip, accumulate, by_live, replicas)
    for mine in ranks_of(4).run(with_torch, "chorusline", trained, *options):
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other, **(CLIPPED if clip else EXACT))


@pytest.mark.parametrize("lengths", [(3, 6, 2, 8), (0, 2, 0, 4), (2, 4, 4, 3)])
def test_replicas_that_reduce_in_the_last_pass_only_train_as_one_process(ranks_of, lengths):
    """torch's way to accumulate with HSDP: each pass is reduced within its replica."""
    expected = one_process(lengths, False, 2, False)
    options = (lengths, True, False, 2, False, 2, "all_reduce")
    for mine in ranks_of(4).run(with_torch, "chorusline", trained, *options):
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other, **EXACT)


def summed_over_passes(rank, size, dtype, policy):
    """Two epochs of three passes, of which the second is reduced over the replicas and stepped; the
    gradients of a pass are `rank + 1`. The weights, which begin with 0."""
    model = torch.nn.Linear(3, 2, bias=False, dtype=dtype)
    torch.nn.init.zeros_(model.weight)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        with cl.Join(
            [model],
            step_along=[optimizer],
            skew_warning=None,
            divide_by_initial_world_size=False,
        ):
            for number in range((1, 3, 3, 3)[rank]):
                model.set_requires_all_reduce(number == 1)
                model(torch.full((1, 3), rank + 1.0, dtype=dtype)).sum().backward()
                if number == 1:
                    optimizer.step()
                    optimizer.zero_grad()
    return model.weight.full_tensor().detach().double()


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        (torch.float32, MixedPrecisionPolicy()),
        (torch.float64, MixedPrecisionPolicy()),
        (torch.float32, MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    ],
    ids=["float32", "float64", "mixed precision"],
)
def test_a_rank_that_runs_out_between_the_passes_of_a_step_is_in_the_sums_it_took(
    ranks_of, dtype, policy
):
    # All ranks take the first pass, and three of them the others. The third one of the first epoch
    # is part of the second step.
    first, others = (1 + 2 + 3 + 4) / 4, (2 + 3 + 4) / 3
    expected = torch.full((2, 3), -(first + others) - (others + first + others)).double()
    for mine in ranks_of(4).run(with_torch, "chorusline", summed_over_passes, dtype, policy):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0)


def stepped_by_one_rank(rank, size):
    """The weights, which begin with 0, after a step with gradients close to the largest float16."""
    model = torch.nn.Linear(3, 2, bias=False, dtype=torch.float16)
    torch.nn.init.zeros_(model.weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with cl.Join(
        [model], step_along=[optimizer], skew_warning=None, divide_by_initial_world_size=False
    ):
        for _ in range(1 if rank == 0 else 0):
            model(torch.full((1, 3), 30000.0, dtype=torch.float16)).sum().backward()
            optimizer.step()
    return model.weight.full_tensor().detach().double()


def test_gradients_in_float16_are_not_multiplied_before_they_are_divided_by_the_live_ranks(
    ranks_of,
):
    for mine in ranks_of(4).run(with_torch, "chorusline", stepped_by_one_rank):
        assert torch.equal(mine, torch.full((2, 3), -30000.0).double())


# -- what is refused, and how --------------------------------------------------------------------


def body(rank, size, kind):
    """A step that a rank without data cannot follow. The error of this rank."""
    model = sharded(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clear = kind != "zeros"
    with pytest.raises(Exception, match="") as raised:
        step_along = [] if kind == "not listed" else [optimizer]
        with cl.Join([model], step_along=step_along, skew_warning=None):
            for number, batch in enumerate(batches_of(rank, (1, 4)[rank], torch.float64)):
                loss_of(model, batch).backward()
                if kind == "clipped norm":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if kind == "clipped values":
                    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                if kind == "scaled" and number == 1:
                    optimizer.grad_scale = torch.ones(())  # As GradScaler hands it over.
                if kind == "learning rate" and number == 2:
                    optimizer.param_groups[0]["lr"] = 0.01
                if kind == "own collective":
                    dist.all_reduce(torch.ones(()))
                optimizer.step()
                optimizer.zero_grad(set_to_none=clear)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("not listed", "the ranks with data step an optimizer of this model"),
        ("clipped norm", "where the ranks with data do COLLECTIVE"),
        ("own collective", "where the ranks with data do COLLECTIVE"),
        ("clipped values", "the ranks with data change gradients"),
        ("zeros", "clear them by zeros, and rank 0 without data cannot"),
        ("learning rate", "the options of an optimizer differ on this rank 0"),
    ],
)
def test_a_body_that_ranks_without_data_cannot_follow_is_refused(ranks_of, kind, says):
    for message in ranks_of(2).run(with_torch, "chorusline", body, kind):
        assert says in message and "step_along" in message


def test_a_scale_that_ranks_without_data_do_not_know_is_refused(ranks_of):
    for message in ranks_of(2).run(with_torch, "chorusline", body, "scaled"):
        assert "a GradScaler hands its scale to a fused optimizer, and ranks [0]" in message


def constructed(rank, size):
    model = sharded(size)
    part = model[0]
    texts = []
    for joinables in ([model, sharded(size)], [part]):
        with pytest.raises(ValueError) as raised:
            model(torch.ones(3, 7, dtype=torch.float64))
            with cl.Join(joinables):
                pass
        texts.append(str(raised.value))
    with cl.Join([model]), pytest.raises(RuntimeError, match="inside another one"):
        cl.Join([model]).__enter__()
    return texts


def test_a_join_takes_one_root_of_fully_shard(ranks_of):
    for several, part in ranks_of(2).run(with_torch, "chorusline", constructed):
        assert "only joinable" in several and "outermost module" in part


def early(rank, size):
    model = sharded(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RuntimeError, match=r"exhausted inputs: rank 0"),
        cl.Join([model], throw_on_early_termination=True, step_along=[optimizer]),
    ):
        for batch in batches_of(rank, 1 + rank, torch.float64):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_early_termination_is_raised_on_every_rank(ranks_of):
    ranks_of(2).run(with_torch, "chorusline", early)


def rank_whose_peer_dies(rank):
    """Rank 0 is out of data when rank 1 dies between its forward and its backward pass."""
    store = cl.TorchStore(rank.store)
    dist.init_process_group("chorusline", store=store, rank=rank.rank, world_size=rank.size)
    model = sharded(rank.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = batches_of(rank.rank, (1, 9, 9)[rank.rank], torch.float64)
    with (
        pytest.raises(cl.CollectiveError, match=r"rank 1 is gone"),
        cl.Join([model], step_along=[optimizer], skew_warning=None),
    ):
        for number, batch in enumerate(batches):
            loss = loss_of(model, batch)
            if rank.rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_rank_killed_in_a_shadowed_step_is_named_by_all(tmp_path):
    with Ranks(rank_whose_peer_dies, 3, tmp_path) as ranks:
        ranks.results(ranks=[0, 2])


# -- evaluation, reduction in another dtype ------------------------------------------------------


def evaluated(rank, size):
    """An evaluation in each batch, and mixed precision; the ranks' shards together."""
    model = network().float()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model[0], model[1], model[3]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with cl.Join([model], step_along=[optimizer], skew_warning=None) as join:
            for batch in batches_of(rank, (3, 1)[rank], torch.float32):
                with torch.no_grad():
                    model(batch)
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model(batch)
            assert join.live_ranks
    return [one.full_tensor().detach() for one in model.parameters()]


def test_evaluations_and_mixed_precision_are_shadowed(ranks_of):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate((3, 1))]
    for _ in range(2):
        for number in range(3):
            for batches in data:
                if number < len(batches):
                    loss_of(model, batches[number]).div(2).backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine in ranks_of(2).run(with_torch, "chorusline", evaluated):
        for one, other in zip(mine, model.parameters(), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=0.05, atol=0.01)
