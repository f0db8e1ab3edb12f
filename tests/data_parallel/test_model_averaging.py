"""Ranks that train apart and average their models, against one process that is all of them."""

import contextlib
import copy
import warnings

import pytest
import torch

import chorusline as cl
from tests.harness.ranks import error_of
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model

STEPS = 7
WARMUP = 2


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def apart(size, *, together, averaged, accumulate=1, max_norm=None, dtype=torch.float64):
    """Parameters of every rank after STEPS. together(step): lists of ranks whose gradients are
    averaged; averaged(step): lists of ranks whose parameters are, after the step."""
    models = [make_model(dtype) for _ in range(size)]
    optimizers = [optimizer_of(model.parameters()) for model in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            batches = batches_of(rank, STEPS * accumulate, dtype)
            for batch in batches[step * accumulate : (step + 1) * accumulate]:
                loss_of(model, batch).backward()
            if max_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for ranks in together(step):
            for same in zip(*(models[rank].parameters() for rank in ranks), strict=True):
                mean = sum(p.grad for p in same) / len(same)
                for parameter in same:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        for ranks in averaged(step):
            with torch.no_grad():
                for same in zip(*(models[rank].parameters() for rank in ranks), strict=True):
                    wide = torch.promote_types(dtype, torch.float32)
                    mean = (sum(p.to(wide) for p in same) / len(same)).to(dtype)
                    for parameter in same:
                        parameter.copy_(mean)
    return [[p.detach() for p in model.parameters()] for model in models]


def trained(group, model, optimizer):
    for batch in batches_of(group.rank, STEPS, torch.float64):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def periodic(group):
    model = make_model(torch.float64)
    averager = cl.PeriodicModelAverager(period=3, warmup_steps=WARMUP, process_group=group)
    optimizer = cl.PostLocalSGDOptimizer(optimizer_of(model.parameters()), averager)
    return trained(group, model, optimizer)


def test_periodic_averages_equal_one_process(ranks_of):
    expected = apart(
        3,
        together=lambda step: [],
        averaged=lambda step: [[0, 1, 2]] if step >= WARMUP and (step - WARMUP) % 3 == 0 else [],
    )
    for mine, theirs in zip(ranks_of(3).run(periodic), expected, strict=True):
        assert largest_difference(mine, theirs) < 1e-14
    assert largest_difference(expected[0], expected[1]) > 1e-3, "the last step was taken apart"


COMBINED = {
    "accumulation": {"accumulate": 2},
    "clipping": {"max_norm": 0.05},
    "half precision": {"dtype": torch.bfloat16},
}


def combined(group, options):
    accumulate, max_norm = options.get("accumulate", 1), options.get("max_norm")
    dtype = options.get("dtype", torch.float64)
    model = make_model(dtype)
    averager = cl.PeriodicModelAverager(3, WARMUP, group)
    optimizer = cl.PostLocalSGDOptimizer(optimizer_of(model.parameters()), averager)
    for number, batch in enumerate(batches_of(group.rank, STEPS * accumulate, dtype), start=1):
        loss_of(model, batch).backward()
        if number % accumulate == 0:
            if max_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", COMBINED)
def test_averages_go_with_what_the_table_says(ranks_of, name):
    def run(**options):
        return apart(
            3,
            together=lambda step: [],
            averaged=lambda step: [[0, 1, 2]] if step in (WARMUP, WARMUP + 3) else [],
            **options,
        )

    expected, plain = run(**COMBINED[name]), run()
    tolerance = 1e-14 if name != "half precision" else 2**-9
    results = ranks_of(3).run(combined, COMBINED[name])
    for mine, theirs in zip(results, expected, strict=True):
        assert largest_difference(mine, theirs) <= tolerance
    assert largest_difference(expected[0], plain[0]) > 1e-3 or name == "half precision"


def hierarchical(group, warmup):
    model = make_model(torch.float64)
    averager = cl.HierarchicalModelAverager({2: 2, 4: 4}, warmup, process_group=group)
    optimizer = optimizer_of(model.parameters())
    for batch in batches_of(group.rank, STEPS, torch.float64):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        averager.average_parameters(model.parameters())  # torch's would have averaged nothing here
    assert averager.step == STEPS
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("warmup", [0, 5])
def test_a_hierarchy_averages_in_the_largest_group_that_is_due(ranks_of, warmup):
    def averaged(step):
        if step < warmup:
            return []
        return [[0, 1, 2, 3]] if step % 4 == 0 else [[0, 1], [2, 3]] if step % 2 == 0 else []

    expected = apart(4, together=lambda step: [], averaged=averaged)
    results = ranks_of(4).run(hierarchical, warmup)
    for mine, theirs in zip(results, expected, strict=True):
        assert largest_difference(mine, theirs) < 1e-14
    assert largest_difference(results[1], results[2]) > 1e-3


def post_local(group, own_gradients):
    subgroup = None if own_gradients else group.split(group.rank // 2)
    # In several buckets: the hook is called for each of them, and a step counts once.
    model = cl.DistributedDataParallel(
        make_model(torch.float64), group, bucket_cap_mb=64 * 8 / (1 << 20)
    )
    state = cl.PostLocalSGDState(group, subgroup, WARMUP, not own_gradients)
    model.register_comm_hook(state, cl.post_localSGD_hook)
    averager = cl.PeriodicModelAverager(3, WARMUP, group)
    optimizer = cl.PostLocalSGDOptimizer(optimizer_of(model.parameters()), averager)
    return trained(group, model, optimizer)


@pytest.mark.parametrize("own_gradients", [False, True], ids=["subgroups", "own gradients"])
def test_post_local_sgd_equals_one_process(ranks_of, own_gradients):
    subgroups = [] if own_gradients else [[0, 1], [2, 3]]
    expected = apart(
        4,
        together=lambda step: [[0, 1, 2, 3]] if step < WARMUP else subgroups,
        averaged=lambda step: [[0, 1, 2, 3]] if step >= WARMUP and (step - WARMUP) % 3 == 0 else [],
    )
    for mine, theirs in zip(ranks_of(4).run(post_local, own_gradients), expected, strict=True):
        assert largest_difference(mine, theirs) < 1e-14


def on_two_hosts(group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHORUSLINE_HOST_ID", f"host {group.rank % 2}")
        return cl.PostLocalSGDState(group, None, start_localSGD_iter=1).subgroup.ranks


def test_the_subgroup_of_post_local_sgd_is_by_default_that_of_a_host(ranks_of):
    assert [list(ranks) for ranks in ranks_of(4).run(on_two_hosts)] == [[0, 2], [1, 3]] * 2


def with_an_averager(group, way):
    """What is warned of in a loop that trains apart, by its hook or in no_sync()."""
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    if way != "no_sync":
        subgroup = group.split(group.rank // 2)
        state = cl.PostLocalSGDState(group, subgroup, WARMUP, way == "subgroups")
        model.register_comm_hook(state, cl.post_localSGD_hook)
    averager = cl.PeriodicModelAverager(3, WARMUP, group)
    optimizer = cl.PostLocalSGDOptimizer(optimizer_of(model.parameters()), averager)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.no_sync() if way == "no_sync" else contextlib.nullcontext():
            trained(group, model, optimizer)
        trained(group, model, optimizer)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("way", ["subgroups", "own gradients", "no_sync"])
def test_ranks_that_train_apart_and_average_are_not_warned_that_they_differ(ranks_of, way):
    assert ranks_of(4).run(with_an_averager, way) == [[]] * 4


def sharded_apart(group, across):
    """across: average over the ranks of equal place in their subgroups, instead of over all."""
    subgroup = group.split(group.rank // 2)
    everybody = group.split(group.rank % 2) if across else group
    model = cl.DistributedDataParallel(make_model(torch.float64), subgroup)
    zero = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    averager = cl.PeriodicModelAverager(3, WARMUP, everybody)
    return trained(group, model, cl.PostLocalSGDOptimizer(zero, averager))


@pytest.mark.parametrize("across", [False, True], ids=["all ranks", "one of each subgroup"])
def test_shards_within_a_subgroup_and_averages_between_them_equal_one_process(ranks_of, across):
    expected = apart(
        4,
        together=lambda step: [[0, 1], [2, 3]],
        averaged=lambda step: [[0, 1, 2, 3]] if step >= WARMUP and (step - WARMUP) % 3 == 0 else [],
    )
    results = ranks_of(4).run(sharded_apart, across)
    for mine, theirs in zip(results, expected, strict=True):
        assert largest_difference(mine, theirs) < 1e-14
    assert all(torch.equal(a, b) for a, b in zip(results[2], results[3], strict=True))


def half_precision(group):
    parameter = torch.nn.Parameter(torch.full((3,), 60000.0, dtype=torch.float16))
    frozen = torch.nn.Parameter(torch.full((2,), float(group.rank)), requires_grad=False)
    groups = [{"params": [parameter]}, {"params": [frozen]}]
    cl.PeriodicModelAverager(2, process_group=group).average_parameters(groups)
    return parameter.tolist(), frozen.tolist()


def test_an_average_of_halves_does_not_overflow_and_what_is_frozen_stays(ranks_of):
    for rank, (halves, frozen) in enumerate(ranks_of(3).run(half_precision)):
        assert halves == [60000.0] * 3
        assert frozen == [rank] * 2


def continued(group):
    straight = periodic(group)
    model = make_model(torch.float64)
    batches = batches_of(group.rank, STEPS, torch.float64)
    state = None
    for part in (batches[:4], batches[4:]):
        optimizer = cl.PostLocalSGDOptimizer(
            optimizer_of(model.parameters()), cl.PeriodicModelAverager(3, WARMUP, group)
        )
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        if state is not None:
            optimizer.load_state_dict(state)
        for batch in part:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        state = copy.deepcopy(optimizer.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(optimizer.optim.state_dict())
    return largest_difference(list(model.parameters()), straight), state["step"], caught


def test_a_state_dictionary_goes_on_with_the_averagers_count(ranks_of):
    for difference, step, caught in ranks_of(2).run(continued):
        assert difference == 0
        assert step == STEPS
        assert "counted from 0" in str(caught[-1].message)


def refusals(group):
    told = []

    def attempt(call):
        told.append(str(error_of(call, ValueError, RuntimeError)))

    def hierarchy(sizes):
        return lambda: cl.HierarchicalModelAverager(sizes, process_group=group)

    attempt(lambda: cl.PeriodicModelAverager(0, process_group=group))
    attempt(lambda: cl.PeriodicModelAverager(2, -1, group))
    attempt(hierarchy({}))
    attempt(hierarchy({2: 2, 4: 2}))
    attempt(hierarchy({4: 2, 2: 4}))
    attempt(hierarchy({2: 3, 4: 4}))
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    zero = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    attempt(lambda: cl.PostLocalSGDOptimizer(zero, cl.PeriodicModelAverager(2, 0, group)))
    lopsided = group.split(0 if group.rank < 3 else 1)
    subgroup = group.split(group.rank // 2)
    model = cl.DistributedDataParallel(make_model(torch.float32), subgroup)
    zero = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    attempt(lambda: cl.PostLocalSGDOptimizer(zero, cl.PeriodicModelAverager(2, 0, lopsided)))
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    optimizer = cl.PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), cl.PeriodicModelAverager(2, 0, group)
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batches_of(0, 1, torch.float32)[0])).backward()
    attempt(lambda: scaler.step(optimizer))
    return told


def in_join(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), cl.PeriodicModelAverager(2, 0, own)
        )
        try:
            with cl.Join([model]):
                loss_of(model, batches_of(0, 1, torch.float32)[0]).backward()
                optimizer.step()
        except RuntimeError as error:
            return str(error)
    return ""


def test_what_is_not_defined_is_refused_with_the_reason(ranks_of):
    results = ranks_of(4).run(refusals)
    period, warmup, empty, sizes, order, cut, pointless, *lopsided, scaled = results[3]
    assert "period must be a positive number of steps, got 0" in period
    assert "warmup_steps must be at least 0, got -1" in warmup
    assert "must not be empty" in empty
    assert "must ascend together" in sizes and "must ascend together" in order
    assert "4 ranks cannot be cut into groups of 3" in cut
    assert "[0, 1, 2, 3] equal, so an average over them changes nothing" in pointless
    assert "Give the model and the optimizer a subgroup" in pointless
    assert "[2, 3] equal, but the averager would mix different parameters into them" in lopsided[0]
    assert lopsided[0] in results[2] and lopsided[0] not in results[1], "0 and 1 stay equal"
    assert "train in bfloat16, which needs no scaler" in scaled
    told = ranks_of(2).run(in_join)
    assert all("model averaging does not work inside Join" in text for text in told)
    assert all("without Join, or average gradients instead" in text for text in told)


def every_step(group):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cl.PeriodicModelAverager(1, process_group=group)
        cl.HierarchicalModelAverager({1: 1}, process_group=group)
    return [str(warning.message) for warning in caught]


def test_averaging_after_every_step_is_warned_of(ranks_of):
    periodic, hierarchical = ranks_of(1).run(every_step)[0]
    assert "costs as much as averaging gradients" in periodic
    assert "the largest period" in hierarchical
