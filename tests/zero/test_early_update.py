"""overlap_with_ddp: shards are stepped during the backward pass, and nothing else changes."""

import pytest
import torch

import chorusline as cl
from tests.harness.ranks import error_of
from tests.harness.standing_ranks import another_group
from tests.references.sharded_training import ELEMENTWISE, assert_same_state, groups_of, plain_run
from tests.references.training import batches_of, loss_of, make_model

ONE_PARAMETER = 2**-18  # MiB: buckets of one parameter each


def overlapped_model(group):
    return cl.DistributedDataParallel(make_model(torch.float32), group, bucket_cap_mb=ONE_PARAMETER)


def overlapped_run(group, name, steps):
    """The parameters after each step, and how many buckets had been stepped before step()."""
    model = overlapped_model(group)
    kind, options = ELEMENTWISE[name]
    zero = cl.ZeroRedundancyOptimizer(groups_of(model), kind, overlap_with_ddp=True, **options)
    after, early = [], []
    for batch in batches_of(group.rank, steps, torch.float32):
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, batch).backward()
        group.barrier().wait()  # whatever is on its way has arrived
        early.append(
            sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        )
        zero.step()
        zero.zero_grad()
        after.append([p.detach().clone() for p in model.parameters()])
    zero.consolidate_state_dict()
    return after, early, zero.state_dict() if group.rank == 0 else None


@pytest.mark.parametrize("name", ["adamw_fused", "sgd", "rmsprop"])
def test_every_step_from_the_first_on_is_the_plain_optimizers(ranks_of, name):
    kind, options = ELEMENTWISE[name]
    results = ranks_of(3).run(overlapped_run, name, 3)
    for steps in (1, 2, 3):
        expected, expected_state = plain_run(3, kind, options, steps)
        for after, _, _ in results:
            ours = after[steps - 1]
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)), steps
    assert_same_state(results[0][2], expected_state)
    assert all(early == [3, 3, 3] for _, early, _ in results), "all but the last of 4 buckets"


def scheduled_run(group, overlapped):
    """Rank 0 joins early, and another changes the learning rate by hand, where no schedule on the
    joined rank can know."""
    model = overlapped_model(group)
    zero = cl.ZeroRedundancyOptimizer(
        model, torch.optim.SGD, lr=0.5, momentum=0.9, overlap_with_ddp=overlapped
    )
    with cl.Join([model, zero], skew_warning=None):
        for number, batch in enumerate(batches_of(group.rank, 2 + 2 * group.rank, torch.float32)):
            zero.param_groups[0]["lr"] = 0.5 / (1 + number)
            model.weigh(loss_of(model, batch), 1.0 + number + group.rank).backward()
            zero.step()
            zero.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_a_joined_rank_gets_the_options_of_the_step_first(ranks_of):
    expected = ranks_of(3).run(scheduled_run, False)[0]
    for parameters in ranks_of(3).run(scheduled_run, True):
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def later_group(group, overlapped):
    module = make_model(torch.float32)
    module[0].requires_grad_(False)
    model = cl.DistributedDataParallel(module, group, bucket_cap_mb=ONE_PARAMETER)
    zero = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1, overlap_with_ddp=overlapped)
    for number, batch in enumerate(batches_of(group.rank, 4, torch.float32)):
        loss_of(model, batch).backward()
        if number == 1:
            module[0].requires_grad_(True)
            zero.add_param_group({"params": module[0].parameters(), "lr": 0.01})
        zero.step()
        zero.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


def test_groups_that_come_later_are_stepped_early_too(ranks_of):
    expected = ranks_of(2).run(later_group, False)[0]
    for parameters in ranks_of(2).run(later_group, True):
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def refusals(group):
    with another_group(group) as own:
        model = overlapped_model(own)
        plain = list(make_model(torch.float32).parameters())
        overlap = {"overlap_with_ddp": True, "lr": 0.1}

        def step_once(zero):
            for _ in range(2):
                loss_of(model, torch.randn(3, 7)).backward()

        calls = (
            lambda: cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, max_norm=1.0, **overlap),
            lambda: cl.ZeroRedundancyOptimizer(plain, torch.optim.SGD, group=own, **overlap),
            lambda: cl.ZeroRedundancyOptimizer(model, torch.optim.Adafactor, **overlap),
            lambda: cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, replicas=2, **overlap),
            lambda: cl.GradScaler(cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, **overlap)),
            lambda: step_once(cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, **overlap)),
        )
        return [str(error_of(call, RuntimeError, ValueError)) for call in calls]


def test_what_cannot_be_undone_is_refused_with_the_reason(ranks_of):
    for norm, no_model, whole, replicas, scaler, twice in ranks_of(2).run(refusals):
        assert "before the norm of the whole gradient is known; leave out max_norm" in norm
        assert "one chorusline DistributedDataParallel" in no_model
        assert "torch's elementwise optimizers (SGD" in whole
        assert "keep its replicas; leave out replicas, or overlap_with_ddp" in replicas
        assert "a scaled step may have to be skipped" in scaler
        assert "accumulate gradients under no_sync()" in twice
