"""Join: uneven inputs are exact, cost nothing, and an exception frees the peers."""

import contextlib
import itertools
import time
import warnings

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data.cursor import Cursor
from chorusline.runtime.join.ledger import JoinLedger
from chorusline.runtime.process.agreement import Agreement
from tests.harness.combinations import combinations
from tests.harness.reused_ranks import another_group
from tests.references.joinables import CountingJoinable
from tests.references.training import (
    OPTIMIZERS,
    backward_of_all,
    batches_of,
    data_of,
    largest_difference,
    loss_of,
    make_model,
    reference,
)

LENGTHS = [(5, 9), (1, 12), (7, 7), (0, 4), (3, 8, 1, 5)]


def train(group, lengths, optimizer, dtype, divide_by_initial=True, sharded=True, cap_mb=25.0):
    """Over plain lists of batches, which cannot look ahead; the parameters at the end."""
    model = cl.DistributedDataParallel(make_model(dtype), group, bucket_cap_mb=cap_mb)
    kind, options = OPTIMIZERS[optimizer]
    if sharded:
        stepper = cl.ZeroRedundancyOptimizer(model, kind, **options)
    else:
        stepper = kind(model.parameters(), **options)
    joined = [model, stepper] if sharded else [model]
    with cl.Join(joined, divide_by_initial_world_size=divide_by_initial):
        for batch in batches_of(group.rank, lengths[group.rank], dtype):
            loss_of(model, batch).backward()
            stepper.step()
            stepper.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@combinations(
    3,
    divide_by_initial=[True, False],
    sharded=[True, False],
    lengths=LENGTHS,
    optimizer=["sgd", "adamw"],
)
def test_uneven_inputs_equal_the_one_process_reference(
    ranks_of, lengths, optimizer, sharded, divide_by_initial
):
    ranks = ranks_of(len(lengths))
    expected = reference(lengths, optimizer, torch.float32, divide_by_initial)
    precise = reference(lengths, optimizer, torch.float64, divide_by_initial)
    args = (lengths, optimizer, torch.float32, divide_by_initial, sharded)
    for parameters in ranks.run(train, *args):
        for ours, theirs in zip(parameters, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert largest_difference(parameters, precise) < 1e-6


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
def test_many_small_buckets_change_no_bit(ranks_of, sharded):
    lengths = (3, 8, 1, 5)
    expected = reference(lengths, "adamw", torch.float32)
    for parameters in ranks_of(4).run(
        train, lengths, "adamw", torch.float32, True, sharded, 64 * 4 / (1 << 20)
    ):
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def train_on_shards(group, num_samples, keys):
    """Over a Shard, which looks ahead; parameters, operations, and the batches of all ranks."""
    dataset = torch.randn(num_samples, 7, generator=torch.Generator().manual_seed(3))
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    before = group.statistics.snapshot()
    for epoch in range(2):
        shard = cl.Shard(
            dataset, 4, rank=group.rank, world_size=group.size, epoch=epoch, keep_together=keys
        )
        with cl.Join([model, optimizer]):
            for batch in shard:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    operations = group.statistics.since(before).operations
    return [p.detach().clone() for p in model.parameters()], operations, optimizer.num_steps


def test_a_shard_looks_ahead_so_no_step_is_shadowed_in_vain(ranks_of):
    keys = ["long"] * 30 + ["short"] * 3 + ["b"] * 2 + ["c"] * 9
    results = ranks_of(2).run(train_on_shards, len(keys), keys)
    batches = [
        [
            -(-len(hand) // 4)
            for hand in cl.deal(len(keys), world_size=2, epoch=e, keep_together=keys)
        ]
        for e in range(2)
    ]
    assert all(one != other for one, other in batches), "the deal has to be uneven for this test"
    steps = sum(map(max, batches))
    shadowed = steps - sum(map(min, batches))
    for parameters, operations, num_steps in results:
        assert num_steps == steps
        # In a step that a rank shadows, all compare one digest of the parameters. At its end an
        # uneven Join compares those of the ranks, which of them are trained, and what was done to
        # the optimizer's state since the last step, and copies what the body has written, once in
        # an epoch. In the first two steps all compare the parameters.
        assert operations == {
            "reduce_scatter": steps,
            "all_reduce": steps,
            "all_gather": steps + shadowed + 8,
            "broadcast": 2,
        }
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][0], strict=True))


def operations_of_an_epoch(group, inside):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    dataset = torch.randn(24, 7)
    shard = cl.Shard(dataset, 4, rank=group.rank, world_size=group.size, shuffle=False)
    before = group.statistics.snapshot()
    with cl.Join([model, optimizer], enable=inside):
        for batch in shard:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return group.statistics.since(before)


def test_join_adds_no_collective_to_a_step(ranks_of):
    outside = ranks_of(2).run(operations_of_an_epoch, False)
    inside = ranks_of(2).run(operations_of_an_epoch, True)
    assert inside == outside
    assert inside[0].total_operations() > 0


def operations_of_steps(group, inside, sharded, weighs, throws):
    """Over a list of batches, by step."""
    model = cl.DistributedDataParallel(make_model(torch.float32, batch_norm=True), group)
    if sharded:
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        joined, along = [model, optimizer], []
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        joined, along = [model], [optimizer]
    by_step = []
    with cl.Join(joined, inside, throws, step_along=along):
        for batch in batches_of(group.rank, 4, torch.float32):
            before = group.statistics.snapshot()
            loss = loss_of(model, batch)
            (model.weigh(loss, len(batch)) if weighs else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            by_step.append(group.statistics.since(before).operations)
    return by_step


@pytest.mark.parametrize("throws", [False, True], ids=["shadows", "throws"])
@pytest.mark.parametrize("weighs", [False, True], ids=["", "weighed"])
@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
def test_no_option_of_a_join_adds_a_collective_to_a_step(ranks_of, sharded, weighs, throws):
    """torch's throw_on_early_termination takes an all-reduce in each step."""
    outside = ranks_of(2).run(operations_of_steps, False, sharded, weighs, False)
    assert ranks_of(2).run(operations_of_steps, True, sharded, weighs, throws) == outside
    assert all(outside[0])


def configuration_after_join(group):
    model = cl.DistributedDataParallel(make_model(torch.float32, batch_norm=True), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)

    def operations_of_a_step():
        before = group.statistics.snapshot()
        loss_of(model, torch.randn(3, 7)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return group.statistics.since(before)

    for _ in range(3):  # In the first two the ranks compare their parameters.
        first = operations_of_a_step()
    with cl.Join([model, optimizer]):
        for _ in range(1 + group.rank):
            operations_of_a_step()
    return first == operations_of_a_step(), model._join is None and optimizer._join is None


def test_join_leaves_nothing_behind_on_its_objects(ranks_of):
    """torch 2.13 leaves three all-reduces per step with BatchNorm."""
    assert ranks_of(2).run(configuration_after_join) == [(True, True)] * 2


def raise_in_body(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        started = time.monotonic()
        try:
            with cl.Join([model, optimizer]):
                for step in range(9):
                    if group.rank == 1 and step == 2:
                        raise KeyError("no such column")
                    loss_of(model, torch.randn(3, 7)).backward()
                    optimizer.step()
        except (KeyError, cl.GroupAborted) as error:
            return type(error).__name__, str(error), time.monotonic() - started
    return None


def test_an_exception_in_the_body_frees_the_peers_at_once_with_its_traceback(ranks_of):
    """torch 2.13: the peers wait for the whole timeout."""
    (peer, told, seconds), (culprit, _, _) = ranks_of(2).run(raise_in_body)
    assert culprit == "KeyError"
    assert peer == "GroupAborted"
    assert "by rank 1" in told
    assert "no such column" in told and "raise_in_body" in told
    assert seconds < 10


class Stumbling(CountingJoinable):
    """Its hook raises, on the rank that has joined, in the middle of the others' steps."""

    def join_hook(self, **kwargs):
        hook = super().join_hook(**kwargs)
        hook.main_hook = self.stumble
        return hook

    def stumble(self):
        raise OSError("the log is full")


def raise_in_hook(group):
    with another_group(group) as own:
        started = time.monotonic()
        joinable = Stumbling(own)
        try:
            with cl.Join([joinable]):
                for _ in range(2 + 3 * group.rank):
                    joinable.step()
        except (OSError, cl.GroupAborted) as error:
            told = type(error).__name__, str(error), time.monotonic() - started
            group.barrier().wait()  # Closing would free the peers, too.
            return told
    return None


def test_an_exception_in_a_hook_frees_the_peers_at_once_with_its_traceback(ranks_of):
    (culprit, _, _), (peer, told, seconds) = ranks_of(2).run(raise_in_hook)
    assert culprit == "OSError"
    assert peer == "GroupAborted"
    assert "by rank 0" in told
    assert "the log is full" in told and "in stumble" in told
    assert seconds < 10


def throw_early(group, lengths):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        try:
            with cl.Join([model, optimizer], throw_on_early_termination=True):
                for batch in batches_of(group.rank, lengths[group.rank], torch.float32):
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except RuntimeError as error:
            return optimizer.num_steps, str(error)
        return optimizer.num_steps, ""


def test_early_termination_raises_on_every_rank_at_the_same_step(ranks_of):
    results = ranks_of(2).run(throw_early, (3, 5))
    assert [steps for steps, _ in results] == [3, 3]
    assert all("exhausted inputs: rank 0" in told for _, told in results)
    assert ranks_of(2).run(throw_early, (4, 4)) == [(4, ""), (4, "")]


def go_on_after_early_termination(group, lengths, kind, clears_first):
    """Three epochs, each of which ends with the error, or with the data."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None
        listed = [model]
        if kind != "plain":
            optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
            listed.append(optimizer)
        if kind == "scaled":
            scaler = cl.GradScaler(optimizer, init_scale=4.0, growth_interval=2)
            listed.append(scaler)
        texts = []
        for _ in range(3):
            try:
                with cl.Join(listed, throw_on_early_termination=True):
                    for batch in batches_of(own.rank, lengths[own.rank], torch.float64):
                        if clears_first:
                            optimizer.zero_grad()
                        loss = loss_of(model, batch)
                        if scaler is None:
                            loss.backward()
                            optimizer.step()
                        else:
                            scaler.scale(loss).backward()
                            scaler.step(optimizer)
                            scaler.update()
                        if not clears_first:
                            optimizer.zero_grad()
            except RuntimeError as error:
                texts.append(str(error).partition(":")[0])
        return [p.detach().clone() for p in model.parameters()], texts


@pytest.mark.parametrize("clears_first", [True, False])
@pytest.mark.parametrize("kind", ["plain", "sharded", "scaled"])
@pytest.mark.parametrize("lengths", [(3, 5), (0, 2), (2, 4, 3), (2, 2)])
def test_ranks_that_catch_the_early_termination_go_on_together(
    ranks_of, lengths, kind, clears_first
):
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = data_of(None, lengths, torch.float64)
    for _ in range(3):
        for number in range(min(lengths)):
            optimizer.zero_grad()
            backward_of_all(model, data, number)
            optimizer.step()
    size = len(lengths)
    for found, texts in ranks_of(size).run(
        go_on_after_early_termination, lengths, kind, clears_first
    ):
        assert largest_difference(found, list(model.parameters())) < 1e-12
        caught = 0 if len(set(lengths)) == 1 else 3
        assert texts == ["Detected at least one rank that exhausted inputs"] * caught


def leave_a_generator(group, is_inside):
    """Each rank takes two steps at most, in a loop over a generator. is_inside: it has the Join."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        around = cl.Join([model, optimizer], skew_warning=None)

        def steps():
            with around if is_inside else contextlib.nullcontext():
                for batch in batches_of(own.rank, (1, 4)[own.rank], torch.float64):
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    yield

        try:
            with contextlib.nullcontext() if is_inside else around:
                for number, _ in enumerate(steps()):
                    if number == 1:
                        break
            own.barrier().wait()
        except cl.GroupAborted as error:
            return str(error)
        return optimizer.num_steps


def test_a_join_in_a_generator_that_is_left_says_where_to_write_it(ranks_of):
    for text in ranks_of(2).run(leave_a_generator, True):
        assert "by rank 1" in text and "the generator that contains a Join was closed" in text
    assert ranks_of(2).run(leave_a_generator, False) == [2, 2]


def accumulate(group, lengths):
    """Every second batch is sent; a rank with an odd number hands in the last one when it joins."""
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    with cl.Join([model, optimizer]):
        for number, batch in enumerate(batches_of(group.rank, lengths[group.rank], torch.float64)):
            if number % 2 == 0:
                with model.no_sync():
                    loss_of(model, batch).backward()
            else:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], optimizer.num_steps


def test_leftover_accumulated_gradients_are_handed_in(ranks_of):
    lengths = (3, 6)
    model = make_model(torch.float64)
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate(lengths)]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        sgd.zero_grad()
        for batches in data:
            for batch in batches[2 * step : 2 * step + 2]:
                (loss_of(model, batch) / 2).backward()
        sgd.step()
    for parameters, num_steps in ranks_of(2).run(accumulate, lengths):
        assert num_steps == 3
        assert largest_difference(parameters, list(model.parameters())) < 1e-14


def shard_of(group, lengths, **options):
    """Each rank looks ahead over its own `batches_of`; lengths: the longest first."""
    everybodys = [b for rank, n in enumerate(lengths) for b in batches_of(rank, n, torch.float64)]
    return cl.Shard(
        everybodys,
        1,
        rank=group.rank,
        world_size=group.size,
        shuffle=False,
        keep_together=[rank for rank, n in enumerate(lengths) for _ in range(n)],
        collate_fn=lambda items: items[0],
        **options,
    )


def train_two_epochs(group, lengths, sharded, looks_ahead):
    """The last batch of an epoch may have no step: its gradients are part of the next epoch's first
    step, as without a Join."""
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    kind = cl.ZeroRedundancyOptimizer if sharded else torch.optim.SGD
    args = (model, torch.optim.SGD) if sharded else (model.parameters(),)
    optimizer = kind(*args, lr=0.1)
    joined, along = ([model, optimizer], []) if sharded else ([model], [optimizer])
    for _ in range(2):
        with cl.Join(joined, step_along=along, skew_warning=None):
            batches = batches_of(group.rank, lengths[group.rank], torch.float64)
            for number, batch in enumerate(shard_of(group, lengths) if looks_ahead else batches):
                if number % 2 == 0:
                    with model.no_sync():
                        loss_of(model, batch).backward()
                    continue
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
@pytest.mark.parametrize(
    ("lengths", "looks_ahead"),
    [((3, 6), False), ((5, 5), False), ((6, 3), True), ((4, 3), True)],
)
def test_gradients_that_no_step_has_used_are_there_in_the_next_epoch(
    ranks_of, lengths, looks_ahead, sharded
):
    model = make_model(torch.float64)
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate(lengths)]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for number in range(max(lengths)):
            for batches in data:
                for batch in batches[number : number + 1]:
                    (loss_of(model, batch) / 2).backward()
            if number % 2:
                sgd.step()
                sgd.zero_grad()
    for parameters in ranks_of(2).run(train_two_epochs, lengths, sharded, looks_ahead):
        assert largest_difference(parameters, list(model.parameters())) < 1e-14


def buffers_at_the_end(group, lengths, sharded, broadcasts):
    """The statistics of a BatchNorm, each rank of its own batches."""
    module = make_model(torch.float64, batch_norm=True)
    model = cl.DistributedDataParallel(module, group, broadcast_buffers=broadcasts)
    if sharded:
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.0)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with cl.Join([model, optimizer] if sharded else [model], skew_warning=None):
        for batch in batches_of(group.rank, lengths[group.rank], torch.float64):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [buffer.clone() for buffer in module.buffers()]


@pytest.mark.parametrize("broadcasts", [True, False], ids=["in each step", "at the end"])
@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
@pytest.mark.parametrize("lengths", [(3, 3, 1), (2, 3, 3), (2, 2, 2), (3, 1, 2)])
def test_the_buffers_at_the_end_are_those_of_the_largest_rank_of_the_last_step(
    ranks_of, lengths, sharded, broadcasts
):
    newest = [max(r for r, n in enumerate(lengths) if step < n) for step in range(max(lengths))]
    modules = [make_model(torch.float64, batch_norm=True) for _ in lengths]
    for step, root in enumerate(newest):
        for rank, module in enumerate(modules):
            if step < lengths[rank]:
                loss_of(module, batches_of(rank, step + 1, torch.float64)[step])
        for module in modules if broadcasts else ():
            module.load_state_dict(modules[root].state_dict())
    expected = [*modules[newest[-1]].buffers()]
    for buffers in ranks_of(3).run(buffers_at_the_end, lengths, sharded, broadcasts):
        assert largest_difference(buffers, expected) < 1e-12


def refusals(group):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    alone = group.split(group.rank)
    other = CountingJoinable(alone)
    told = []
    for joinables in ([], [model, optimizer, other], [model], [optimizer]):
        try:
            cl.Join(joinables)
        except ValueError as error:
            told.append(str(error))
    alone.close()
    return told


def test_what_cannot_be_joined_is_refused_with_the_reason(ranks_of):
    (empty, groups, model_alone, optimizer_alone), _ = ranks_of(2).run(refusals)
    assert empty == "The join context manager requires at least one joinable"
    assert "multiple process groups" in groups
    assert "Join([model, optimizer])" in model_alone
    assert "Join([model, optimizer])" in optimizer_alone


def test_the_ledger_follows_the_agreements():
    ledger = JoinLedger(3, divide_by_initial_world_size=False)
    assert ledger.somebody_may_continue(), "nobody knows better before the first step"
    everybody = Agreement((0, 1, 2), (0, 2), ())
    ledger.record(everybody)
    assert ledger.divisor(everybody) == 3 and not ledger.somebody_missed_a_step
    two = Agreement((0, 2), (), ())
    ledger.record(two)
    assert ledger.divisor(two) == 2 and ledger.somebody_missed_a_step
    assert ledger.steps_taken == [2, 1, 2] and ledger.skew() == 0.5
    assert ledger.last_live == (0, 2) and not ledger.somebody_may_continue()
    nobody = Agreement((), (), ())
    ledger.record(nobody)
    assert ledger.divisor(nobody) == 0 and ledger.last_live == (0, 2)
    weighed = Agreement((1,), (1,), (), weight=7.0)
    assert ledger.divisor(weighed) == 7.0


def steps_at_boundaries(group, lengths):
    """What `ctx.shard` does between two batches, as saving a checkpoint that is due."""
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    seen = []

    def note() -> None:
        seen.append(optimizer.num_steps)

    shard = shard_of(group, lengths, at_boundary=note, cursor=Cursor())
    with cl.Join([model, optimizer], skew_warning=None):
        for batch in shard:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("lengths", [(5, 2), (4, 3, 0)])
def test_a_joined_rank_comes_to_each_boundary_between_steps(ranks_of, lengths):
    expected = list(range(1, max(lengths) + 1))
    assert ranks_of(len(lengths)).run(steps_at_boundaries, lengths) == [expected] * len(lengths)


def weighted(group, lengths, sizes, sharded):
    """Batches of different sizes, each loss a mean over its own samples."""
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    if sharded:
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cl.Join([model, optimizer] if sharded else [model]):
        for batch in batches_of(group.rank, lengths[group.rank], torch.float64):
            samples = batch[: sizes[group.rank]]
            model.weigh(loss_of(model, samples), len(samples)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
def test_weighed_losses_give_the_mean_over_all_samples_of_all_ranks(ranks_of, sharded):
    lengths, sizes = (2, 4, 3), (3, 1, 2)
    model = make_model(torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate(lengths)]
    for step in range(4):
        batches = [d[step][:size] for d, size in zip(data, sizes, strict=True) if step < len(d)]
        sgd.zero_grad()
        loss_of(model, torch.cat(batches)).backward()
        sgd.step()
    for parameters in ranks_of(3).run(weighted, lengths, sizes, sharded):
        assert largest_difference(parameters, list(model.parameters())) < 1e-14


def join_inside_itself(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        try:
            with cl.Join([model, optimizer], skew_warning=None):
                for _ in range(own.rank):
                    with cl.Join([model, optimizer], skew_warning=None):
                        loss_of(model, torch.ones(3, 7)).backward()
        except (RuntimeError, cl.CollectiveError) as error:
            return str(error)
    return ""


def test_a_join_inside_a_join_of_the_same_joinables_is_refused(ranks_of):
    without_data, with_data = ranks_of(2).run(join_inside_itself)
    assert with_data.startswith("this Join is inside another one that lists the same joinables")
    assert "aborted by rank 1: RuntimeError: this Join is inside another one" in without_data


def weighed_two_by_two(model, batch, how):
    """Two weighted losses in a step, in the orders in which programs have them."""
    if how == "accumulated":
        with model.no_sync():
            model.weigh(loss_of(model, batch), 1).backward()
        model.weigh(loss_of(model, 3 * batch), 3).backward()
    elif how == "both forward passes first":
        first, second = loss_of(model, batch), loss_of(model, 3 * batch)
        (model.weigh(first, 1) + model.weigh(second, 3)).backward()
    else:
        one = model.weigh(loss_of(model, batch), 1)
        (one + model.weigh(loss_of(model, 3 * batch), 3)).backward()


def train_weighed_two_by_two(group, how, sharded, to_none):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = (
            cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
            if sharded
            else torch.optim.SGD(model.parameters(), lr=0.1)
        )
        for batch in batches_of(own.rank, 3, torch.float64):
            optimizer.zero_grad(set_to_none=to_none)
            weighed_two_by_two(model, batch, how)
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("how", ["accumulated", "both forward passes first", "in turn"])
def test_two_weighed_losses_of_a_step_count_once_each(ranks_of, how, sharded):
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches in zip(*(batches_of(rank, 3, torch.float64) for rank in range(2)), strict=True):
        optimizer.zero_grad()
        sum(loss_of(model, b) / 8 + loss_of(model, 3 * b) * 3 / 8 for b in batches).backward()
        optimizer.step()
    for to_none in (True, False):
        for found in ranks_of(2).run(train_weighed_two_by_two, how, sharded, to_none):
            assert largest_difference(found, [p.detach() for p in model.parameters()]) < 1e-12


def weight_of(rank, number):
    return 1.0 + rank + number


def keep_all_gradients(group, lengths, weighs):
    """Two epochs, whose steps have the gradients of all batches so far."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        options = {"divide_by_initial_world_size": weighs, "skew_warning": None}
        for _ in range(2):
            with cl.Join([model, optimizer], **options):
                batches = batches_of(own.rank, lengths[own.rank], torch.float64)
                for number, batch in enumerate(batches):
                    loss = loss_of(model, batch)
                    if weighs:
                        loss = model.weigh(loss, weight_of(own.rank, number))
                    loss.backward()
                    optimizer.step()
        return [p.detach().clone() for p in model.parameters()]


@combinations(2, lengths=[(3, 0, 2), (0, 3), (2, 0, 1), (2, 3)], weighs=[True, False])
def test_zeros_that_stand_for_gradients_of_others_weigh_nothing(ranks_of, lengths, weighs):
    """A rank that has had no batch yet holds them from the end of the first epoch on. weighs: else
    the mean is over the ranks that have had one."""
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums, weights = [torch.zeros_like(p) for p in model.parameters()], dict[int, float]()
    for _, number in itertools.product(range(2), range(max(lengths))):
        for rank, length in enumerate(lengths):
            if number < length:
                weight = weight_of(rank, number) if weighs else 1.0
                weights[rank] = weight + (weights.get(rank, 0.0) if weighs else 0.0)
                loss = loss_of(model, batches_of(rank, length, torch.float64)[number]) * weight
                came = torch.autograd.grad(loss, list(model.parameters()))
                sums = [total + gradient for total, gradient in zip(sums, came, strict=True)]
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = total / sum(weights.values())
        optimizer.step()
    for found in ranks_of(len(lengths)).run(keep_all_gradients, lengths, weighs):
        assert largest_difference(found, [p.detach() for p in model.parameters()]) < 1e-12


def weigh_without_passes(group, sharded, looks):
    """looks: weighs losses that no step is taken by."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        parameters = list(model.parameters())
        sgd = torch.optim.SGD
        if sharded:
            optimizer = cl.ZeroRedundancyOptimizer(model, sgd, lr=0.1)
        else:
            optimizer = sgd(parameters, lr=0.1)
        with cl.Join([model, optimizer] if sharded else [model], skew_warning=None):
            for batch in batches_of(own.rank, 2 + own.rank, torch.float64):
                if looks:
                    with torch.no_grad():
                        model.weigh(loss_of(model, batch), 10)
                    model.weigh(loss_of(model, batch), 10)  # Its backward pass is left out.
                model.weigh(loss_of(model, batch), 2 + own.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in parameters]


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
def test_the_weight_of_a_loss_without_a_backward_pass_does_not_count(ranks_of, sharded):
    ranks = ranks_of(2)
    looked = ranks.run(weigh_without_passes, sharded, True)
    for ours, usual in zip(looked, ranks.run(weigh_without_passes, sharded, False), strict=True):
        assert all(map(torch.equal, ours, usual))


def weigh_twice(group):
    """One graph, two backward passes of which the first is cleared, or not."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        loss = model.weigh(loss_of(model, torch.ones(3, 7, dtype=torch.float64)), 3)
        with model.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]


def test_a_second_pass_of_a_weighted_loss_adds_its_gradient_once_more(ranks_of):
    model = make_model(torch.float64)
    (2 * loss_of(model, torch.ones(3, 7, dtype=torch.float64))).backward()
    for gradients in ranks_of(2).run(weigh_twice):
        assert largest_difference(gradients, [p.grad for p in model.parameters()]) < 1e-14


@pytest.mark.parametrize(
    ("weight", "kind"),
    [("3", TypeError), (None, TypeError), (True, TypeError), (torch.ones(2), TypeError)]
    + [(value, ValueError) for value in (-1, float("inf"), float("nan"))],
    ids=str,
)
def test_a_weight_that_is_no_number_of_samples_is_refused(weight, kind):
    with cl.Group.create(cl.HashStore(), 0, 1) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        with pytest.raises(kind, match="number"):
            model.weigh(loss_of(model, torch.ones(3, 7)), weight)


def weigh_on_one_rank(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        loss = loss_of(model, torch.randn(3, 7))
        with pytest.raises(RuntimeError) as raised:
            (model.weigh(loss, 3) if group.rank == 1 else loss).backward()
        return str(raised.value)


def test_weighing_on_some_ranks_only_is_refused_on_all(ranks_of):
    for told in ranks_of(2).run(weigh_on_one_rank):
        assert "1 of the ranks [0, 1] weighted their loss" in told


def scheduled(group, lengths):
    """The rate changes in every step; a rank that has joined steps its shard with it too."""
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    with cl.Join([model, optimizer], step_along=[scheduler]):
        for number, batch in enumerate(batches_of(group.rank, lengths[group.rank], torch.float32)):
            loss_of(model, batch).backward()
            if number == 3:
                optimizer.param_groups[0]["weight_decay"] = 0.5  # by hand, in the loop
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    options = optimizer.param_groups[0]
    told = (options["lr"], options["betas"], options["weight_decay"], scheduler.last_epoch)
    return [p.detach().clone() for p in model.parameters()], told


def test_a_joined_rank_follows_the_schedule_of_the_live_ones(ranks_of):
    lengths = (2, 6)
    model = make_model(torch.float32)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(adamw, 0.7)
    data = [batches_of(rank, n, torch.float32) for rank, n in enumerate(lengths)]
    for step in range(6):
        adamw.zero_grad()
        for batches in data:
            if step < len(batches):
                loss_of(model, batches[step]).backward()
        for parameter in model.parameters():
            parameter.grad /= 2
        if step == 3:
            adamw.param_groups[0]["weight_decay"] = 0.5
        adamw.step()
        scheduler.step()
    expected = list(model.parameters())
    (first, one), (second, other) = ranks_of(2).run(scheduled, lengths)
    for parameters in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    assert one == other == (scheduler.get_last_lr()[0], (0.9, 0.999), 0.5, 6)


def warnings_of_schedules(group, way):
    told = []
    for make in SCHEDULES:
        for lengths in ((0, 3), (3, 0)):
            with another_group(group) as own, warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                model = cl.DistributedDataParallel(make_model(torch.float32), own)
                optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
                schedule = make(optimizer)
                along = {"listed": [schedule], "in a function": [lambda each=schedule: each.step()]}
                with cl.Join([model, optimizer], step_along=along.get(way, []), skew_warning=None):
                    for batch in batches_of(own.rank, lengths[own.rank], torch.float32):
                        loss_of(model, batch).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        if way in along:
                            schedule.step()
                if way not in along:
                    schedule.step()
            told += [str(one.message) for one in warned]
    return told


SCHEDULES = (
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10),
    lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05),
)


@pytest.mark.parametrize("way", ["listed", "in a function", "after the epoch"])
def test_a_rank_without_any_data_is_not_told_that_its_schedule_comes_too_early(ranks_of, way):
    assert ranks_of(2).run(warnings_of_schedules, way) == [[], []]


def warnings_of_a_schedule(group, is_listed):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for lengths in ((3, 1), (1, 1)):
            along = [schedule] if is_listed else []
            with cl.Join([model, optimizer], step_along=along, skew_warning=None):
                for batch in batches_of(group.rank, lengths[group.rank], torch.float32):
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    optimizer.step()
                    schedule.step()
    return [str(one.message) for one in caught]


def test_a_schedule_that_step_along_does_not_list_is_named_where_it_has_counted_less(ranks_of):
    first, second = ranks_of(2).run(warnings_of_a_schedule, False)
    assert first == [] and len(second) == 1
    assert "rank 1, which has run out of data, had" in second[0]
    assert "Join(..., step_along=[schedule])" in second[0]
    assert ranks_of(2).run(warnings_of_a_schedule, True) == [[], []]


def plain_and_scheduled(group, lengths):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    with cl.Join([model], step_along=[optimizer, scheduler]):
        for batch in batches_of(group.rank, lengths[group.rank], torch.float32):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [*(p.detach().clone() for p in model.parameters()), *momentum], scheduler.last_epoch


def test_a_joined_rank_steps_a_plain_optimizer_that_has_a_schedule(ranks_of):
    (first, one), (second, other) = ranks_of(2).run(plain_and_scheduled, (2, 6))
    assert one == other == 6
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def plain_optimizer_for_two_epochs(group, lengths):
    """Not sharded: each rank has the whole optimizer, and steps it along while it shadows."""
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        with cl.Join([model], step_along=[optimizer]):
            for batch in batches_of(group.rank, lengths[group.rank], torch.float32):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_a_plain_optimizer_stepped_along_stays_equal_over_epochs(ranks_of):
    """torch leaves a joined rank's own optimizer behind: from the second epoch on ranks drift."""
    lengths = (2, 6)
    model = make_model(torch.float32)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = [batches_of(rank, n, torch.float32) for rank, n in enumerate(lengths)]
    for _ in range(2):
        for step in range(6):
            adamw.zero_grad()
            for batches in data:
                if step < len(batches):
                    loss_of(model, batches[step]).backward()
            for parameter in model.parameters():
                parameter.grad /= 2
            adamw.step()
    expected = list(model.parameters())
    for parameters in ranks_of(2).run(plain_optimizer_for_two_epochs, lengths):
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
