"""ZeRO: sharded state gives the plain optimizer's bits, for a fraction of its memory."""

import copy
import math

import pytest
import torch

import chorusline as cl
from chorusline.actors.fault_plan import Instant
from chorusline.runtime.data_parallel.distributed_data_parallel import engine_of
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.harness.allocations import Allocations
from tests.harness.ranks import error_of
from tests.harness.reused_ranks import another_group
from tests.references.sharded_training import ELEMENTWISE, assert_same_state, plain_run, sharded_run
from tests.references.training import OPTIMIZERS, batches_of, loss_of, make_model

WHOLE = {
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}
if hasattr(torch.optim, "Muon"):  # torch 2.9
    WHOLE["muon"] = (torch.optim.Muon, {"lr": 1e-2})


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_parameters_and_state_equal_the_plain_optimizers_bit_by_bit(ranks_of, name):
    kind, options = ELEMENTWISE[name]
    expected, expected_state = plain_run(3, kind, options, 4)
    results = ranks_of(3).run(sharded_run, kind, options, 4)
    for parameters, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    assert_same_state(results[-1][1], expected_state)


def traffic_and_memory(group, replicas=1, max_norm=None, scales=False, passes=1):
    model = cl.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(6))), group
    )
    optimizer = cl.ZeroRedundancyOptimizer(
        model, torch.optim.AdamW, replicas=replicas, max_norm=max_norm
    )
    scaler = cl.GradScaler(optimizer, enabled=scales)
    for _ in range(3):  # In the first two the ranks compare their parameters.
        before = group.statistics.snapshot()
        for _ in range(passes):
            scaler.scale(model(torch.randn(2, 64)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    used = group.statistics.since(before)
    state = sum(
        tensor.numel()
        for of_piece in optimizer.shard_optimizer.state.values()
        for tensor in of_piece.values()
        if tensor.dim()
    )
    return used, state, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_travel_once_and_state_is_one_nth(ranks_of, size):
    for used, state, parameters in ranks_of(size).run(traffic_and_memory):
        sent = used.elements_sent
        # And nothing else: one replica of each shard is its owner's, which costs nothing.
        assert used.operations == {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1}
        share = parameters * (size - 1) / size
        assert sent["reduce_scatter"] == share and sent["all_gather"] == share
        assert sent["all_reduce"] < 0.01 * parameters, "the ballot"
        assert state == 2 * parameters / size


@pytest.mark.parametrize("passes", [1, 2])
def test_the_norm_and_the_scale_travel_in_the_ballot_and_the_sum_of_passes_once(ranks_of, passes):
    once = {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1}
    for used, _, _ in ranks_of(2).run(traffic_and_memory, 1, 1.0, True, passes):
        assert used.operations == once


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_replica_costs_a_shard_of_state_and_of_traffic(ranks_of, size, replicas):
    if replicas > size:
        with pytest.raises(AssertionError, match="replicas=3 is more than the 2 ranks"):
            ranks_of(size).run(traffic_and_memory, replicas)
        return
    for used, state, parameters in ranks_of(size).run(traffic_and_memory, replicas):
        expected = (2 * (size - 1) + replicas - 1) * parameters / size
        assert expected <= sum(used.elements_sent.values()) < 1.01 * expected
        assert used.operations["all_to_all"] == 1
        assert state == 2 * replicas * parameters / size


def kept_bytes(group, dtype, replicas):
    with Allocations() as made:
        layer = torch.nn.Linear(512, 512, bias=False, dtype=dtype)
        model = cl.DistributedDataParallel(layer, group)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, replicas=replicas)
        for _ in range(2):
            model(torch.ones(2, 512, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return made.kept


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_parameters_and_gradients_a_rank_keeps_its_shards_and_nothing_whole(
    ranks_of, dtype, replicas
):
    size, numel = 4, 512 * 512
    # The reduced gradient and two averages; for half precision a float32 copy of both.
    of_a_shard = dtype.itemsize + 2 * 4 + (0 if dtype is torch.float32 else 2 * 4)
    # Whole are the parameters and this rank's own gradients.
    expected = numel * (2 * dtype.itemsize + of_a_shard * replicas / size)
    for kept in ranks_of(size).run(kept_bytes, dtype, replicas):
        assert expected <= kept < 1.05 * expected


def begun_in_the_first_step(group):
    """Reductions that have begun when the first layer gets its gradient, the last of the pass; and
    gathers when each bucket is stepped."""
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(3)]
    model = cl.DistributedDataParallel(torch.nn.Sequential(*layers), group, bucket_cap_mb=1e-5)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW)
    before = group.statistics.snapshot()
    reductions, gathers = [], []

    def note(name, into):
        into.append(group.statistics.since(before).operations.get(name, 0))

    layers[0].weight.register_hook(lambda _: note("reduce_scatter", reductions))
    for number in (1, 2, 3):
        optimizer_engine_of(optimizer).faults.at(
            Instant.APPLY, lambda: note("all_gather", gathers), number
        )
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return reductions, gathers


def test_buckets_are_reduced_during_the_first_pass_and_gathered_while_others_are_stepped(ranks_of):
    for reductions, gathers in ranks_of(2).run(begun_in_the_first_step):
        assert reductions == [2], "that of the bucket whose gradient comes now is left"
        # One more comes before, since the ranks compare their parameters in the first step.
        assert [number - gathers[0] for number in gathers] == [0, 1, 2]


def test_a_step_that_counts_is_taken_by_all_shards_where_the_gather_of_one_fails(
    alone, monkeypatch
):
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    start = [p.detach().clone() for p in layers.parameters()]
    model = cl.DistributedDataParallel(layers, alone, bucket_cap_mb=1e-5)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW)

    def fails(portion):
        raise cl.PeerLost("all_gather #1", 0, [1], "gone")

    monkeypatch.setattr(optimizer_engine_of(optimizer).shard, "start_gather", fails)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(cl.PeerLost):
        optimizer.step()
    assert optimizer.num_steps == 1
    for before, parameter in zip(start, layers.parameters(), strict=True):
        assert not torch.equal(before, parameter)


def kept_after_each_step(group, replicas):
    """By step, by range: what this rank holds of parameters and state, its own and replicas."""
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1, replicas=replicas)
    kept = []
    for batch in batches_of(group.rank, 4, torch.float32):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        held = optimizer_engine_of(optimizer).shard.held()
        kept.append(
            {
                common: {name: tensor.clone() for name, tensor in part.tensors.items()}
                for whole in held.ranges
                for common, part in held.overlapping(whole)
            }
        )
    return kept


@pytest.mark.parametrize("replicas", [2, 3])
def test_no_replica_is_behind_its_owner_after_any_step(ranks_of, replicas):
    for of_ranks in zip(*ranks_of(3).run(kept_after_each_step, replicas), strict=True):
        for where in {where for held in of_ranks for where in held}:
            copies = [held[where] for held in of_ranks if where in held]
            assert len(copies) == replicas
            assert {"master", "exp_avg", "exp_avg_sq"} <= set(copies[0])
            for copy_ in copies[1:]:
                assert all(torch.equal(copy_[name], copies[0][name]) for name in copies[0])


def local_gradients(group):
    """With parameters of no DistributedDataParallel `.grad` is taken as it is."""
    model = make_model(torch.float32)
    optimizer = cl.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, group=group)
    loss_of(model, batches_of(0, 1, torch.float32)[0]).backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_without_data_parallelism_gradients_are_taken_as_they_are(ranks_of):
    model = make_model(torch.float32)
    loss_of(model, batches_of(0, 1, torch.float32)[0]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for parameters in ranks_of(3).run(local_gradients):
        assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))


def step_by_a_closure(group):
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    (batch,) = batches_of(group.rank, 1, torch.float64)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    return loss.item(), [p.detach().clone() for p in model.parameters()]


def test_a_closure_is_called_with_gradients_and_its_loss_is_returned(ranks_of):
    model = make_model(torch.float64)
    losses = [loss_of(model, batches_of(rank, 1, torch.float64)[0]) for rank in range(2)]
    (sum(losses) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    results = ranks_of(2).run(step_by_a_closure)
    assert [loss for loss, _ in results] == [loss.item() for loss in losses]
    for _, parameters in results:
        for ours, expected in zip(parameters, model.parameters(), strict=True):
            assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-14)


class Branches(torch.nn.Module):
    """Each rank uses `common` and one branch; nobody uses `idle`; `frozen` takes no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.common = torch.nn.Linear(4, 4)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.idle = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)

    def forward(self, batch, branch):
        return self.branches[branch](self.frozen(self.common(batch)))


def train_branches(group, sharded):
    model = cl.DistributedDataParallel(Branches(), group)
    options = {"lr": 0.1, "weight_decay": 0.1}
    if sharded:
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **options)
    for step in range(3):
        # In the last step both ranks use branch 0, so branch 1 must not move.
        branch = group.rank if step < 2 else 0
        model(torch.full((2, 4), 1.0 + group.rank), branch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
def test_parameters_unused_on_every_rank_are_skipped_not_stepped_with_zeros(ranks_of, sharded):
    model = Branches()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1
    )
    for step in range(3):
        for rank in range(2):
            branch = rank if step < 2 else 0
            (model(torch.full((2, 4), 1.0 + rank), branch).sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in ranks_of(2).run(train_branches, sharded):
        for name, expected in model.named_parameters():
            assert torch.allclose(parameters[name], expected, atol=1e-6, rtol=1e-5), name
        untouched = Branches().idle.weight
        assert torch.equal(parameters["idle.weight"], untouched)


def train_clipped(group, max_norm):
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.5, max_norm=max_norm)
    norms = []
    with cl.Join([model, optimizer]):
        for batch in batches_of(group.rank, 2 + group.rank, torch.float64):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
    return [p.detach().clone() for p in model.parameters()], norms


@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_clipping_takes_the_norm_of_the_whole_mean_gradient(ranks_of, max_norm):
    model = make_model(torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    data = [batches_of(rank, 2 + rank, torch.float64) for rank in range(3)]
    norms = []
    for step in range(4):
        sgd.zero_grad()
        for batches in data:
            if step < len(batches):
                (loss_of(model, batches[step]) / 3).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        sgd.step()
    results = ranks_of(3).run(train_clipped, max_norm)
    assert results[2][1] == pytest.approx(norms, rel=1e-12)
    for parameters, _ in results:
        for ours, expected in zip(parameters, model.parameters(), strict=True):
            assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-14)


def clip_after_plain_steps(group):
    torch.manual_seed(0)
    # On two ranks the shards of 64 elements have room behind them, where plain steps had votes.
    model = cl.DistributedDataParallel(torch.nn.Linear(8, 8, bias=False), group)
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model(torch.ones(2, 8)).square().mean().backward()
        plain.step()
        plain.zero_grad()
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, max_norm=100.0)
    model(torch.ones(2, 8)).square().mean().backward()
    expected = model.module.weight.grad.norm().item()
    optimizer.step()
    return optimizer.grad_norm, expected


def test_the_norm_counts_nothing_of_steps_before_the_optimizer_was_made(ranks_of):
    for norm, expected in ranks_of(2).run(clip_after_plain_steps):
        assert norm == pytest.approx(expected, rel=1e-6)


def spoiled_loss(model, rank, bad):
    """On rank 1 some gradients are no numbers."""
    output = model(batches_of(rank, 1, torch.float32)[0])
    return output[:, 0].sum() + (output[:, 1] * (bad if rank == 1 else 1.0)).sum()


def clip_what_is_no_number(group, bad):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.5, max_norm=1.0)
    spoiled_loss(model, group.rank, bad).backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()], optimizer.grad_norm


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clipping_what_is_no_number_gives_what_torchs_clipping_gives(ranks_of, bad):
    model = make_model(torch.float32)
    (sum(spoiled_loss(model, rank, bad) for rank in range(2)) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for parameters, ours in ranks_of(2).run(clip_what_is_no_number, bad):
        assert str(ours) == str(norm.item())
        for mine, expected in zip(parameters, model.parameters(), strict=True):
            assert torch.allclose(mine, expected, equal_nan=True)


def train_in_bfloat16(group):
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(8, 8, bias=False).bfloat16(), group)
    start = model.module.weight.detach().clone()
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=1e-5)
    for _ in range(400):
        model.module.weight.grad = None
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    return start, model.module.weight.detach().clone()


def test_half_precision_parameters_keep_what_rounds_to_nothing_in_one_step(ranks_of):
    for start, end in ranks_of(2).run(train_in_bfloat16):
        # The gradient is one everywhere. In bfloat16 1e-5 is nothing beside a weight of 0.3.
        moved = (start.float() - end.float()).mean().item()
        assert moved == pytest.approx(400 * 1e-5, rel=0.05)
        assert end.dtype is torch.bfloat16


def step_by_a_third(group):
    """A gradient of one on rank 0, and none on the others."""
    model = torch.nn.Linear(64, 3, bias=False).bfloat16()
    torch.nn.init.zeros_(model.weight)
    wrapped = cl.DistributedDataParallel(model, group)
    optimizer = cl.ZeroRedundancyOptimizer(wrapped, torch.optim.SGD, lr=1.0)
    output = wrapped(torch.ones(1, 64, dtype=torch.bfloat16)).sum()
    (output * (group.rank == 0)).backward()
    optimizer.step()
    optimizer.consolidate_state_dict()
    return optimizer.state_dict()["state"][0]["master"] if group.rank == 0 else None


def test_the_mean_of_half_precision_gradients_is_taken_in_float32(ranks_of):
    master = ranks_of(3).run(step_by_a_third)[0]
    assert torch.equal(master, torch.full((3, 64), -1 / 3))


def float16_model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    return torch.nn.Sequential(*layers).half()


def float16_batches(rank, count):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, 4, 6, generator=generator).half()


def train_in_float16(group, lengths):
    model = cl.DistributedDataParallel(float16_model(), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-3)
    scaler = cl.GradScaler(optimizer, init_scale=2.0**7)
    with cl.Join([model, optimizer, scaler], skew_warning=None):
        for batch in float16_batches(group.rank, lengths[group.rank]):
            scaler.scale(model(batch).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def float32_masters(lengths):
    """What float16 parameters become in one process whose optimizer has them in float32."""
    model = float16_model()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    data = [float16_batches(rank, length) for rank, length in enumerate(lengths)]
    for step in range(max(lengths)):
        live = [batches[step] for batches in data if step < len(batches)]
        for master in masters:
            master.grad = torch.zeros_like(master)
        for batch in live:
            model.zero_grad()
            model(batch).float().square().mean().backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad += parameter.grad.float() / len(lengths)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("lengths", [(30, 30), (12, 30)])
def test_float16_parameters_train_as_with_float32_masters_in_one_process(ranks_of, lengths):
    start = [p.detach() for p in float16_model().parameters()]
    expected = float32_masters(lengths)
    for found in ranks_of(2).run(train_in_float16, lengths):
        for mine, other, before in zip(found, expected, start, strict=True):
            assert mine.dtype is torch.float16
            moved = (other.float() - before.float()).abs().max()
            # Gradients are rounded to float16 once more where the ranks add them up.
            assert (mine.float() - other.float()).abs().max() < 0.05 * moved


def schedule(group):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    loss_of(model, batches_of(0, 1, torch.float32)[0]).backward()
    optimizer.step()
    scheduler.step()
    loss_of(model, batches_of(0, 1, torch.float32)[0]).backward()
    optimizer.step()
    return optimizer.param_groups[0]["lr"], optimizer.shard_optimizer.param_groups[0]["lr"]


def test_a_learning_rate_schedule_reaches_the_shard(ranks_of):
    assert ranks_of(2).run(schedule) == [(5e-4, 5e-4)] * 2


def with_a_schedule_of_each_group(model, optimizer, ranks):
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda number: 0.5**number, lambda number: 1.0 + number]
    )
    for number in range(3):
        for rank in ranks:
            batch = batches_of(rank, 3, torch.float64)[number]
            (loss_of(model, batch) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


def groups_with_rates(model, kind):
    return [
        {"params": [p for p in model.parameters() if (p.dim() > 1) is is_matrix], "lr": kind(lr)}
        for is_matrix, lr in ((True, 0.1), (False, 0.2))
    ]


def train_with_a_schedule_of_each_group(group, kind, state):
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    optimizer = cl.ZeroRedundancyOptimizer(groups_with_rates(model, kind), torch.optim.SGD)
    optimizer.load_state_dict(state)
    found = with_a_schedule_of_each_group(model, optimizer, [group.rank])
    return found, [float(options["lr"]) for options in state["param_groups"]]


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_each_group_has_its_own_schedule_and_the_rates_of_a_loaded_state_stay(ranks_of, kind):
    model = make_model(torch.float64)
    plain = torch.optim.SGD(groups_with_rates(model, kind), foreach=False)
    state = copy.deepcopy(plain.state_dict())
    expected = with_a_schedule_of_each_group(model, plain, range(2))
    for found, rates in ranks_of(2).run(train_with_a_schedule_of_each_group, kind, state):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))
        assert rates == pytest.approx([0.1, 0.2])


def train_among_some_ranks(group):
    """Ranks 0 and 2 of four train one model, ranks 1 and 3 another, with other data."""
    with another_group(group) as whole:
        own = whole.split(whole.rank % 2)
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2)
        for batch in batches_of(whole.rank, 3, torch.float32):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.consolidate_state_dict(to=1)
        has_state = error_of(optimizer.state_dict, RuntimeError) is None
        whole.barrier().wait()
        return [p.detach().clone() for p in model.parameters()], own.rank, has_state


def test_a_group_of_some_ranks_trains_on_its_own(ranks_of):
    results = ranks_of(4).run(train_among_some_ranks)
    assert [own_rank for _, own_rank, _ in results] == [0, 0, 1, 1]
    assert [has_state for *_, has_state in results] == [False, False, True, True]
    for color in range(2):
        model = make_model(torch.float32)
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = [batches_of(rank, 3, torch.float32) for rank in (color, color + 2)]
        for both in zip(*data, strict=True):
            plain.zero_grad()
            for batch in both:
                (loss_of(model, batch) / 2).backward()
            plain.step()
        for parameters, *_ in results[color::2]:
            for ours, theirs in zip(parameters, model.parameters(), strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def generator_of_parameters(group):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer((p for p in model.parameters()), torch.optim.SGD, lr=0.1)
    return optimizer_engine_of(optimizer).reducer is engine_of(model).reducer


def test_the_models_parameters_are_recognised_in_any_form(ranks_of):
    assert ranks_of(2).run(generator_of_parameters) == [True, True]


def test_the_reference_optimizers_are_all_elementwise():
    assert {kind for kind, _ in OPTIMIZERS.values()} <= {kind for kind, _ in ELEMENTWISE.values()}


def matrices(model):
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


def train_whole(group, name, lengths, start=None, first=0):
    """Biases stay as they are: Muon takes matrices only."""
    kind, options = WHOLE[name]
    module = make_model(torch.float32)
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    model = cl.DistributedDataParallel(module, group)
    if start is not None:
        with torch.no_grad():
            for parameter, saved in zip(matrices(model), start[0], strict=True):
                parameter.copy_(saved)
    optimizer = cl.ZeroRedundancyOptimizer(matrices(model), kind, **options)
    if start is not None:
        optimizer.load_state_dict(start[1])
    with cl.Join([model, optimizer]):
        for batch in batches_of(group.rank, lengths[group.rank], torch.float32)[first:]:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    owned = [tuple(p.shape) for g in optimizer.shard_optimizer.param_groups for p in g["params"]]
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if group.rank == 0 else None
    return [p.detach().clone() for p in matrices(model)], state, owned


def plain_whole(name, lengths):
    kind, options = WHOLE[name]
    model = make_model(torch.float32)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    optimizer = kind(matrices(model), **options)
    data = [batches_of(rank, n, torch.float32) for rank, n in enumerate(lengths)]
    for step in range(max(lengths)):
        total = []
        for batches in data:
            if step < len(batches):
                optimizer.zero_grad()
                loss_of(model, batches[step]).backward()
                mine = [p.grad for p in matrices(model)]
                total = [a + b for a, b in zip(total, mine, strict=True)] if total else mine
        for parameter, gradient in zip(matrices(model), total, strict=True):
            parameter.grad = gradient / len(lengths)
        optimizer.step()
    return [p.detach().clone() for p in matrices(model)], optimizer.state_dict()


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_need_whole_parameters_get_them(ranks_of, name):
    lengths = (3, 5)
    expected, expected_state = plain_whole(name, lengths)
    results = ranks_of(2).run(train_whole, name, lengths)
    for parameters, _, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    assert sorted(shape for _, _, owned in results for shape in owned) == [(5, 13), (13, 7)]
    assert_same_state(results[0][1], expected_state)


def owned_of_equal_parameters(group):
    """Of four of equal size, in two dtypes, of which two are added later."""
    first, later = (
        [torch.nn.Parameter(torch.ones(8, 8, dtype=dtype)) for dtype in dtypes]
        for dtypes in ([torch.float32, torch.float64], [torch.float32, torch.float64])
    )
    optimizer = cl.ZeroRedundancyOptimizer(first, torch.optim.Adafactor, group=group)
    optimizer.add_param_group({"params": later})
    return sum(len(one["params"]) for one in optimizer.shard_optimizer.param_groups)


def test_whole_parameters_of_all_dtypes_and_groups_are_balanced_together(ranks_of):
    assert ranks_of(2).run(owned_of_equal_parameters) == [2, 2]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_parameter_state_is_loaded_at_another_number_of_ranks(ranks_of, name):
    saved = ranks_of(2).run(train_whole, name, (2, 2))[0]
    (once, _, _), *_ = ranks_of(1).run(train_whole, name, (4,), saved[:2], 2)
    again, _, _ = ranks_of(1).run(train_whole, name, (4,), saved[:2], 2)[0]
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    kind, options = WHOLE[name]
    model = make_model(torch.float32)
    with torch.no_grad():
        for parameter, value in zip(matrices(model), saved[0], strict=True):
            parameter.copy_(value)
    plain = kind(matrices(model), **options)
    plain.load_state_dict(copy.deepcopy(saved[1]))
    for batch in batches_of(0, 4, torch.float32)[2:]:
        plain.zero_grad()
        loss_of(model, batch).backward()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(once, matrices(model), strict=True))
