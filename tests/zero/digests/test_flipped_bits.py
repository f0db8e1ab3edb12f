"""Planted flips of bits: found in the next ballot, with the rank, and made right bit by bit."""

import functools
import random
import warnings

import pytest
import torch

import chorusline as cl
from chorusline.collectives.objects.blocking import all_gather_object, broadcast_object
from chorusline.runtime.data_parallel.distributed_data_parallel import engine_of
from chorusline.runtime.process.registry import Registered, Registry
from chorusline.runtime.recovery.restart import RestartState
from chorusline.runtime.zero.digests.state_digests import StateDigests
from chorusline.runtime.zero.shards.shard_state import ShardState
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.references.stepped_training import stepped
from tests.references.training import batches_of, loss_of, make_model

STEPS = 6


def flip(tensor, rng):
    """Flip one bit of one element."""
    octets = tensor.detach().view(-1).view(torch.uint8)
    at = rng.randrange(octets.numel())
    octets[at] ^= 1 << rng.randrange(8)


def tensors_of(optimizer, what, distance):
    """What lies in memory on this rank, by kind; distance: 0 for the own shard, else a replica."""
    shard = optimizer_engine_of(optimizer).shard
    if what == "parameters":
        return [bucket.flat[: bucket.plan.content] for bucket in shard.buckets]
    if what == "reduced gradient":
        return [bucket.ranges[distance].reduced for bucket in shard.buckets]
    found = []
    for bucket, pieces in zip(shard.buckets, shard.pieces, strict=True):
        for mine in pieces:
            if mine.range is bucket.ranges[distance] and mine.piece.numel:
                state = {**shard.optimizer.state[mine.tensor], "master": mine.tensor}
                found.append(state[what])
    return found


def plant(optimizer, what, distance, seed):
    """Flip a bit; that of a gradient between its reduction and the vote."""
    rng = random.Random(seed)
    engine = optimizer_engine_of(optimizer)

    def flip_one():
        kinds = tensors_of(optimizer, what, distance)
        flip(rng.choice([tensor for tensor in kinds if tensor.numel()]), rng)

    if what != "reduced gradient":
        flip_one()
        return
    vote, planted = engine.digests.vote, []

    def vote_after_flip(num_steps):
        if not planted:
            planted.append(True)
            flip_one()
        return vote(num_steps)

    engine.digests.vote = vote_after_flip


def warnings_of_step(optimizer):
    """Of a step, after which the gradients are cleared."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    optimizer.zero_grad()
    return [str(one.message) for one in caught]


def trained(group, flips, without=(), dtype=torch.float32, kind=torch.optim.AdamW, **more):
    """Parameters, whole state, corrections and warnings after STEPS.

    flips: by step, (rank, what, distance, seed). without: steps that are left out.
    """
    model = cl.DistributedDataParallel(make_model(dtype), group)
    more = {"replicas": 2, "check_every": 1, "lr": 0.05, **more}
    optimizer = cl.ZeroRedundancyOptimizer(model, kind, **more)
    said = []
    for step, batch in enumerate(batches_of(group.rank, STEPS, dtype)):
        if step in without:
            continue
        loss_of(model, batch).backward()
        for rank, *planted in flips.get(step, ()):
            if rank == group.rank:
                plant(optimizer, *planted)
        said += warnings_of_step(optimizer)
        optimizer_engine_of(optimizer).digests.__dict__.pop("vote", None)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if group.rank == 0 else None
    found = [(one.step, one.rank, one.what, one.source) for one in optimizer.corrections]
    return [p.detach().clone() for p in model.parameters()], state, found, said


def assert_same(one, other):
    for (ours, state, *_), (theirs, expected, *_) in zip(one, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        if state is not None:
            torch.testing.assert_close(state, expected, rtol=0, atol=0)


def run(ranks, flips, **more):
    return ranks.run(functools.partial(trained, flips=flips, **more))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("distance", [0, 1])
@pytest.mark.parametrize("what", ["exp_avg", "exp_avg_sq", "step", "reduced gradient"])
def test_a_flip_in_state_or_gradient_of_owner_or_replica_leaves_no_trace(
    ranks_of, size, distance, what
):
    expected = run(ranks_of(size), {}, check_every=None)
    results = run(ranks_of(size), {2: [(1, what, distance, 7)], 4: [(0, what, distance, 8)]})
    assert_same(results, expected)
    named = what if what == "reduced gradient" else "optimizer state"
    for _, _, found, _ in results:
        assert [one[:3] for one in found] == [(2, 1, named), (4, 0, named)]
    for rank, (_, _, _, said) in enumerate(results):
        assert len(said) == (rank < 2)
        assert all(
            f"silent data corruption on rank {rank}: " in text and named in text for text in said
        )
        if named == "optimizer state":
            assert all("weight" in text or "bias" in text for text in said)


@pytest.mark.parametrize("size", [2, 3])
def test_flipped_parameters_are_copied_and_the_step_that_used_them_is_left_out(ranks_of, size):
    expected = run(ranks_of(size), {}, without=(3,))
    for rank in range(size):
        results = run(ranks_of(size), {3: [(rank, "parameters", 0, 5)]})
        assert_same(results, expected)
        source = 1 if rank == 0 else 0
        for _, _, found, _ in results:
            assert found == [(3, rank, "parameters", source)]
        assert "the step was left out" in results[rank][3][0]


def test_of_so_many_steps_one_is_checked(ranks_of):
    expected = run(ranks_of(2), {})
    results = run(ranks_of(2), {4: [(1, "exp_avg", 0, 7)]}, check_every=2)
    assert_same(results, expected)
    for _, _, found, _ in results:
        assert [one[:3] for one in found] == [(4, 1, "optimizer state")]


def healed_in_each_bucket(group):
    """A bit of each bucket's parameters flips on rank 1. The corrections, and what rank 1 warns."""
    model = cl.DistributedDataParallel(make_model(torch.float32), group, bucket_cap_mb=0.0002)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, replicas=2, check_every=1)
    texts, buckets = [], optimizer_engine_of(optimizer).shard.buckets
    for step, batch in enumerate(batches_of(group.rank, 3, torch.float32)):
        loss_of(model, batch).backward()
        if (group.rank, step) == (1, 1):
            for number, bucket in enumerate(buckets):
                flip(bucket.flat[: bucket.plan.content], random.Random(number))
        texts += warnings_of_step(optimizer)
    found = [(one.step, one.rank, one.what, one.source) for one in optimizer.corrections]
    return len(buckets), found, texts, [p.detach().clone() for p in model.parameters()]


def test_flipped_parameters_are_copied_in_every_bucket(ranks_of):
    results = ranks_of(2).run(healed_in_each_bucket)
    for num_buckets, found, _, _ in results:
        assert num_buckets > 1
        assert found == [(1, 1, "parameters", 0)], "and the next ballot finds nothing left"
    (_, _, nothing, ours), (_, _, (text,), theirs) = results
    assert not nothing and all(f"{layer}." in text for layer in (0, 2))
    assert all(map(torch.equal, ours, theirs))


def test_masters_of_half_precision_are_checked_too(ranks_of):
    half = {"dtype": torch.bfloat16}
    expected = run(ranks_of(3), {}, **half)
    results = run(ranks_of(3), {2: [(2, "master", 0, 1)], 3: [(0, "master", 1, 2)]}, **half)
    assert_same(results, expected)
    assert [one[:3] for one in results[0][2]] == [
        (2, 2, "optimizer state"),
        (3, 0, "optimizer state"),
    ]


def test_a_third_flip_on_a_rank_tells_to_take_out_its_machine(ranks_of):
    flips = {step: [(1, "exp_avg", 0, step)] for step in (2, 3, 4)}
    said = run(ranks_of(2), flips)[1][3]
    assert "check the memory" in said[1]
    assert "correction 3 on rank 1: take its machine out of the cluster" in said[2]


def flipped_before_and_after_ranks_change(group):
    """Two corrections on rank 1, which is lost; then one on the rank that gets its number, in
    place. Then all begin again with another rank, and both have more. Warnings, and corrections by
    rank."""

    def make(ranks):
        model = cl.DistributedDataParallel(make_model(torch.float32), ranks)
        return model, cl.ZeroRedundancyOptimizer(
            model, torch.optim.AdamW, lr=0.05, replicas=2, check_every=1
        )

    def steps(flipped, ranks):
        """flipped: by step, the rank on which a bit flips; None: on no rank."""
        texts = []
        for rank in flipped:
            loss_of(model, batches_of(ranks.rank, 1, torch.float32)[0]).backward()
            if rank == ranks.rank:
                plant(optimizer, "exp_avg", 0, 7)
            texts += warnings_of_step(optimizer)
        return texts

    model, optimizer = make(group)
    steps([None, 1, 1], group)
    engine, held, kept, texts = optimizer_engine_of(optimizer), ShardState(), RestartState(), []
    fewer = group.new_group([0, 2])
    if fewer is not None:
        held = engine.shard.held()
        engine.shard.complete(held, all_gather_object(fewer, held.inventory), fewer)
        engine.change_group(fewer, held)
        engine_of(model).change_group(fewer)
        engine.shard.gather()
        texts += steps([None, 1], fewer)
        registry = Registry()
        registry.add("optimizer", optimizer)
        kept = RestartState.of(registry, (5, 0), {})
    group.barrier().wait()
    # The rank that has come has the number of the one that was lost, and nothing of it.
    model, optimizer = make(group)
    summaries = all_gather_object(group, kept.summary(fewer is not None, None))
    kept.restore(Registered("optimizer", optimizer, False), summaries, group)
    texts += steps([None, 1, 2, 2], group)
    return texts, [(one.step, one.rank) for one in optimizer.corrections]


def test_a_machine_is_not_told_to_leave_for_what_another_of_its_rank_has_had(ranks_of):
    results = ranks_of(3).run(flipped_before_and_after_ranks_change)
    (nothing, _), (of_new, _), ((first, second, third), _) = results
    assert all(found == [(1, 1), (2, 1), (4, 1), (6, 1), (7, 2), (8, 2)] for _, found in results)
    assert not nothing and "If rank 1 says this again" in first and "If rank 2" in second
    assert "This is correction 3 on rank 2: take its machine out" in third
    assert len(of_new) == 1 and "If rank 1 says this again" in of_new[0]


def test_flips_on_two_ranks_at_once_are_found_by_kind(ranks_of):
    expected = run(ranks_of(3), {})
    flips = {2: [(0, "exp_avg", 0, 1), (1, "exp_avg", 0, 2), (2, "reduced gradient", 1, 3)]}
    results = run(ranks_of(3), flips)
    assert_same(results, expected)
    assert {one[:3] for one in results[0][2]} == {
        (2, 0, "optimizer state"),
        (2, 1, "optimizer state"),
        (2, 2, "reduced gradient"),
    }


def error_of(group, what, **more):
    try:
        trained(group, {2: [(1, what, 0, 3)]}, **more)
    except cl.CollectiveMismatch as error:
        return str(error)
    return None


def test_without_a_replica_a_flip_in_the_state_is_an_error_on_all_ranks(ranks_of):
    for text in ranks_of(2).run(functools.partial(error_of, what="exp_avg", replicas=1)):
        assert "the optimizer state of rank 1 has changed since its last step" in text
        assert "Resume from the last checkpoint" in text


def wrong_update(group, replicas):
    """Rank 1 steps with another gradient than was voted on."""
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(
        model, torch.optim.AdamW, lr=0.05, replicas=replicas, check_every=1
    )
    engine = optimizer_engine_of(optimizer)
    see = engine._see

    def see_then_flip(*args):
        if group.rank == 1 and optimizer.num_steps == 2:
            replica = engine.shard.buckets[0].ranges[1].reduced
            replica[0] = replica[0] + 1
        return see(*args)

    engine._see = see_then_flip
    try:
        for batch in batches_of(group.rank, STEPS, torch.float32):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    except cl.CollectiveMismatch as error:
        return str(error)
    return [(one.step, one.rank, one.what, one.source) for one in optimizer.corrections]


def test_two_copies_that_were_stepped_otherwise_are_an_error_and_three_decide(ranks_of):
    for text in ranks_of(2).run(wrong_update, 2):
        assert "their copies of the optimizer state of rank 0's shard differ" in text
        assert "does not match on ranks [0, 1]" in text
    for found in ranks_of(3).run(wrong_update, 3):
        assert found == [(3, 1, "optimizer state", 0)]


def wrong_values_of_an_owner(group):
    """A bit flips in what rank 0 has stepped, before that is gathered; other buckets are stepped
    when it has come to all."""
    model = cl.DistributedDataParallel(make_model(torch.float32), group, bucket_cap_mb=0.0002)
    optimizer = cl.ZeroRedundancyOptimizer(
        model, torch.optim.AdamW, lr=0.05, replicas=group.size, check_every=1
    )
    shard = optimizer_engine_of(optimizer).shard
    apply, start_gather = shard.apply, shard.start_gather

    def apply_then_flip(portion, *args):
        apply(portion, *args)
        if group.rank == 0 and optimizer.num_steps == 2 and portion == [0]:
            flip(shard.buckets[0].own.values[:1], random.Random(1))

    def gather_to_the_end(portion):
        gathers = start_gather(portion)
        for gather in gathers:
            gather.work.wait_on_host()
        return gathers

    shard.apply, shard.start_gather = apply_then_flip, gather_to_the_end
    with pytest.raises(cl.CollectiveMismatch) as caught:
        for batch in batches_of(group.rank, STEPS, torch.float32):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return len(shard.buckets), optimizer.num_steps, str(caught.value)


@pytest.mark.parametrize("size", [2, 3])
def test_other_parameters_than_the_copies_have_written_are_an_error_on_all_ranks(ranks_of, size):
    for num_buckets, num_steps, text in ranks_of(size).run(wrong_values_of_an_owner):
        assert num_buckets > 1 and num_steps == 3
        assert "they wrote other parameters of rank 0's shard in the last step" in text


def changed_by_the_program(group):
    """All ranks change parameters and load state between steps."""
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(
        model, torch.optim.AdamW, lr=0.05, replicas=2, check_every=1, max_norm=1.0
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = cl.GradScaler(optimizer, init_scale=2.0**127)
    for number, batch in enumerate(batches_of(group.rank, STEPS, torch.float32)):
        scaler.scale(16 * loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        if number == 3:
            optimizer.consolidate_state_dict(to=0)
            state = optimizer.state_dict() if group.rank == 0 else None
            optimizer.load_state_dict(broadcast_object(group, state))
    return optimizer.corrections


def test_what_all_ranks_change_is_no_flip(ranks_of):
    assert ranks_of(3).run(changed_by_the_program) == [[]] * 3


def moved_and_back(group):
    """The body of rank 0 leaves other last bits in a parameter than it found there."""
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, replicas=2, check_every=1)
    texts = []
    for step, batch in enumerate(batches_of(group.rank, 3, torch.float32)):
        loss_of(model, batch).backward()
        if (group.rank, step) == (0, 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1).sub_(0.1)
        texts += [(step, text) for text in warnings_of_step(optimizer)]
    return texts


def test_what_the_program_writes_on_one_rank_is_not_told_as_corruption(ranks_of):
    of_rank_0, of_rank_1 = ranks_of(2).run(moved_and_back)
    [(step, text)] = of_rank_0
    assert step == 1 and not of_rank_1
    assert "the program has written to the parameters of" in text
    assert "on rank 0 before step 2, and not the same as on the other ranks" in text


def flipped_in_channels_last(group):
    """A value of the convolution of rank 1 changes before the second step, and torch knows of no
    write."""
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten())
    model = cl.DistributedDataParallel(module.to(memory_format=torch.channels_last), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, replicas=2, check_every=1)
    texts = []
    for step in range(3):
        model(torch.ones(2, 3, 4, 4)).square().mean().backward()
        if (group.rank, step) == (1, 1):
            module[0].weight.detach().numpy()[1, 2, 1, 1] += 1
        texts += warnings_of_step(optimizer)
    return texts


def test_a_flip_in_a_parameter_in_channels_last_is_not_told_as_the_programs_write(ranks_of):
    nothing, (text,) = ranks_of(2).run(flipped_in_channels_last)
    assert not nothing
    assert text.startswith("silent data corruption on rank 1: its parameters of 0.weight changed")


def flipped_where_the_program_writes(group):
    """All ranks halve the parameters before the step, and a bit of rank 1's state flips."""
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, replicas=2, check_every=1)
    for step, batch in enumerate(batches_of(group.rank, 2, torch.float32)):
        loss_of(model, batch).backward()
        if step == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            if group.rank == 1:
                plant(optimizer, "exp_avg", 0, 1)
        texts = warnings_of_step(optimizer)
    return texts


def test_corrupted_state_is_told_as_that_where_the_program_writes_to_its_parameter(ranks_of):
    nothing, (text,) = ranks_of(2).run(flipped_where_the_program_writes)
    assert text.startswith("silent data corruption on rank 1: its optimizer state of")
    assert not nothing


def uneven(group):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.ZeroRedundancyOptimizer(
        model, torch.optim.SGD, lr=0.05, momentum=0.9, replicas=2, check_every=2
    )
    with cl.Join([model, optimizer]):
        for batch in batches_of(group.rank, STEPS, torch.float32)[: STEPS - 2 * group.rank]:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.corrections, optimizer.num_steps


def test_uneven_inputs_are_no_flips(ranks_of):
    assert ranks_of(3).run(uneven) == [([], STEPS)] * 3


def stepped_with_flips(group, deterministic, flips):
    """In steps of ctx.steps. flips: by step, (rank, what)."""
    seen = []

    def watch(optimizer):
        seen.append(optimizer)
        digests = optimizer_engine_of(optimizer).digests
        vote, done = digests.vote, set()

        def vote_after_flip(num_steps):
            step = optimizer.num_steps
            rank, what = flips.get(step, (None, None))
            if rank == group.rank and step not in done:
                done.add(step)
                rng = random.Random(step)
                kinds = tensors_of(optimizer, what, step % 2)
                flip(rng.choice([tensor for tensor in kinds if tensor.numel()]), rng)
            return vote(num_steps)

        digests.vote = vote_after_flip

    paces = [1.0] * group.size  # Else who takes which micro-batches depends on the clock.
    parameters, state, _ = stepped(
        group,
        deterministic=deterministic,
        paces=paces,
        replicas=2,
        check_every=1,
        watch=watch,
        max_norm=0.5,
    )
    found = [(one.step, one.rank, one.what) for one in seen[0].corrections]
    return parameters, state, found


@pytest.mark.parametrize(
    ("size", "deterministic"),
    [(2, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, False), (3, True)])],
)
def test_flips_in_the_steps_of_a_fixed_batch_leave_no_trace(ranks_of, size, deterministic):
    expected = ranks_of(size).run(stepped_with_flips, deterministic, {})
    flips = {2: (1, "reduced gradient"), 3: (0, "reduced gradient"), 4: (1, "exp_avg")}
    results = ranks_of(size).run(stepped_with_flips, deterministic, flips)
    assert [one[:2] for one in results] == [one[:2] for one in expected]
    for _, _, found in results:
        assert found == [
            (2, 1, "reduced gradient"),
            (3, 0, "reduced gradient"),
            (4, 1, "optimizer state"),
        ]


def test_every_wrong_number_of_steps_is_refused(alone):
    model = cl.DistributedDataParallel(make_model(torch.float32), alone)
    for wrong, error, said in (
        (0, ValueError, "at least 1, got 0"),
        (-1, ValueError, "at least 1, got -1"),
        (1.5, TypeError, "a whole number or None, got float 1.5"),
        (True, TypeError, "a whole number or None, got bool True"),
    ):
        with pytest.raises(error, match=f"check_every must be {said}"):
            cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, check_every=wrong)


def of_many_tiles(group, check_every):
    """A model and the engine of its optimizer, after some steps."""
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(512, 1024), group)
    optimizer = cl.ZeroRedundancyOptimizer(
        model, torch.optim.AdamW, replicas=2, check_every=check_every
    )
    for step in range(3):
        model(torch.full((2, 512), 1.0 + group.rank + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer_engine_of(optimizer)


def read_as_one(group):
    """The tiles, the tensors that are read; digests before and after changes; parameters."""
    model, engine = of_many_tiles(group, 1)
    shard, digests = engine.shard, StateDigests()
    states = [shard.optimizer.state[mine.tensor] for pieces in shard.pieces for mine in pieces]
    seen = [digests.of(shard)]
    num_read = sum(len(copy.tensors["exp_avg"]) for copy in digests._copies)
    states[-1]["exp_avg"][-1] += 1  # In place, in the last tile of the replica.
    seen.append(digests.of(shard))
    states[0]["exp_avg"] = states[0]["exp_avg"] + 1  # Other memory, in the first one of the shard.
    seen.append(digests.of(shard))
    states[1]["more"] = torch.ones(4)
    seen.append(digests.of(shard))
    plain, _ = of_many_tiles(group, None)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    is_same = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    own, replica = ([int(one[distance]) for one in seen] for distance in range(2))
    return len(states), num_read, 2 * len(shard.buckets), own, replica, is_same


def test_the_state_of_many_tiles_is_read_as_one_and_each_change_is_seen(ranks_of):
    for num_tiles, num_read, num_ranges, own, replica, is_same in ranks_of(2).run(read_as_one):
        assert num_tiles > num_read == num_ranges
        assert own[0] == own[1] and len(set(own[1:])) == 3
        assert replica[0] != replica[1] == replica[2] == replica[3]
        assert is_same
