"""GradScaler: one rank's overflow is everybody's, joined or not, and nobody drifts."""

import math

import pytest
import torch

import chorusline as cl
from tests.harness.ranks import error_of
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model

_OPTIONS = {"init_scale": 2.0**10, "growth_interval": 2}


def train(group, lengths, overflow_at, max_norm=None, factor=math.inf):
    """overflow_at: (rank, number of the batch) whose loss is multiplied with factor."""
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=max_norm)
    scaler = cl.GradScaler(optimizer, **_OPTIONS)
    scales = []
    with cl.Join([model, optimizer, scaler], skew_warning=None):
        for number, batch in enumerate(batches_of(group.rank, lengths[group.rank], torch.float32)):
            loss = loss_of(model, batch)
            if (group.rank, number) == overflow_at:
                loss = loss * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    return [p.detach().clone() for p in model.parameters()], scales, scaler.get_scale()


def reference(lengths, overflow_at, max_norm=None, factor=math.inf):
    model = make_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", **_OPTIONS)
    data = [batches_of(rank, n, torch.float32) for rank, n in enumerate(lengths)]
    scales = []
    for step in range(max(lengths)):
        total = []
        for rank, batches in enumerate(data):
            if step < len(batches):
                optimizer.zero_grad()
                loss = loss_of(model, batches[step])
                if (rank, step) == overflow_at:
                    loss = loss * factor
                scaler.scale(loss).backward()
                mine = [p.grad for p in model.parameters()]
                total = [a + b for a, b in zip(total, mine, strict=True)] if total else mine
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient / len(lengths)
        if max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.detach().clone() for p in model.parameters()], scales


@pytest.mark.parametrize("overflow_at", [None, (0, 1), (1, 4)])
@pytest.mark.parametrize("lengths", [(5, 5), (2, 6), (0, 5)])
def test_steps_and_scales_equal_torchs_in_one_process(ranks_of, lengths, overflow_at):
    expected, scales = reference(lengths, overflow_at)
    results = ranks_of(2).run(train, lengths, overflow_at)
    for rank, (parameters, seen, last) in enumerate(results):
        assert seen == scales[: lengths[rank]]
        assert last == scales[-1], "a joined rank follows"
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_clipping_takes_the_norm_of_unscaled_gradients(ranks_of, factor):
    expected, scales = reference((3, 4), (1, 1), 0.05, factor)
    for parameters, _, last in ranks_of(2).run(train, (3, 4), (1, 1), 0.05, factor):
        assert last == scales[-1]
        for ours, theirs in zip(parameters, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def refusals(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        stock = torch.amp.GradScaler("cpu")
        stock.scale(loss_of(model, torch.randn(3, 7))).backward()
        scaler = cl.GradScaler(optimizer)
        optimizer.uses_scaler = False
        calls = (
            lambda: stock.step(optimizer),
            lambda: scaler.unscale_(optimizer),
            lambda: cl.Join([model, scaler, optimizer]),
        )
        return [str(error_of(call, RuntimeError, ValueError)) for call in calls]


def test_what_would_decide_by_local_gradients_is_refused(ranks_of):
    for stock, unscale, order in ranks_of(2).run(refusals):
        assert "Use chorusline.GradScaler(optimizer)" in stock
        assert "clip with the optimizer's max_norm" in unscale
        assert "Join([model, optimizer, scaler])" in order


def take_step_at_a_scale_of_its_own(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        scaler = cl.GradScaler(optimizer, init_scale=4.0 * (1 + group.rank))
        scaler.scale(loss_of(model, torch.randn(3, 7))).backward()
        return str(error_of(lambda: scaler.step(optimizer), RuntimeError))


def test_scales_that_differ_are_refused_on_every_rank(ranks_of):
    for told in ranks_of(2).run(take_step_at_a_scale_of_its_own):
        assert "the loss scales of the ranks differ: 4 on rank 0, 8 on rank 1; every" in told


def test_the_default_dtype_of_a_program_does_not_matter():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with cl.Group.create(cl.HashStore(), 0, 1) as own:
            model = cl.DistributedDataParallel(make_model(torch.float64), own)
            optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
            scaler = cl.GradScaler(optimizer, growth_interval=2)
            for factor in (1.0, math.inf, 1.0):
                scaler.scale(loss_of(model, torch.ones(3, 7)) * factor).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert optimizer.num_steps == 2 and scaler.get_scale() == 2.0**15
    finally:
        torch.set_default_dtype(before)


def steps_by_a_scaler_of_another(group, which):
    with another_group(group) as own:
        models = [cl.DistributedDataParallel(make_model(torch.float32), own) for _ in range(2)]
        optimizers = [cl.ZeroRedundancyOptimizer(m, torch.optim.SGD, lr=0.1) for m in models]
        scaler = cl.GradScaler(optimizers[0])
        stepped = optimizers[which == "another optimizer"]
        if which == "a newer scaler":
            newer = cl.GradScaler(optimizers[0])
        batch = torch.ones(2, 7)
        scaler.scale(sum(loss_of(model, batch) for model in models)).backward()
        told = str(error_of(lambda: scaler.step(stepped), RuntimeError))
        if which == "a newer scaler":
            newer.scale(torch.zeros(()))
            newer.step(stepped)
        return told, stepped.num_steps


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("another optimizer", "scales the losses of another ZeroRedundancyOptimizer. Make one for"),
        ("a newer scaler", "another GradScaler was made for this ZeroRedundancyOptimizer after"),
    ],
)
def test_a_scaler_steps_its_own_optimizer_only(ranks_of, which, says):
    for told, num_steps in ranks_of(2).run(steps_by_a_scaler_of_another, which):
        assert says in told
        assert "local gradients" not in told
        assert num_steps == (which == "a newer scaler")


def step_without_the_scaler(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        scaler = cl.GradScaler(optimizer)
        loss_of(model, torch.ones(3, 7)).backward()
        assert scaler.is_enabled()  # And alive.
        return str(error_of(optimizer.step, RuntimeError))


def test_a_step_beside_the_scaler_is_told_as_that(ranks_of):
    for told in ranks_of(2).run(step_without_the_scaler):
        assert "a GradScaler was made for this optimizer, and ranks [0, 1] stepped without" in told
