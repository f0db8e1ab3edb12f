"""What a ZeroRedundancyOptimizer refuses: in torch's words where it has some, and on all ranks."""

import warnings

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import loss_of, make_model


def step_without_gradients(group):
    with another_group(group) as own:
        parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
        zero = cl.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, group=own, lr=0.1)
        try:
            with cl.Join([zero], skew_warning=None):
                for _ in range(1 + own.rank):
                    for parameter in parameters:
                        parameter.grad = torch.ones_like(parameter)
                    zero.step()
                    zero.zero_grad()
        except (RuntimeError, cl.CollectiveError) as error:
            return str(error)
    return ""


def test_a_joined_rank_without_gradients_tells_all_instead_of_stepping_stale_ones(ranks_of):
    told = ranks_of(2).run(step_without_gradients)
    assert "of shape (3,) has a gradient on other ranks of [1] and none on rank 0" in told[0]
    assert "rank 0" in told[1] and "inside Join, list the joinable that does so before" in told[1]


def step_the_older_of_two(group, kind):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        older, newer = (cl.ZeroRedundancyOptimizer(model, kind, lr=0.1) for _ in range(2))
        loss_of(model, torch.ones(3, 7, dtype=torch.float64)).backward()
        with pytest.raises(RuntimeError) as raised:
            older.step()
        before = [p.detach().clone() for p in model.parameters()]
        newer.step()
        assert not any(map(torch.equal, before, model.parameters()))
        return str(raised.value)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor], ids=lambda k: k.__name__)
def test_an_optimizer_whose_model_has_got_another_one_does_not_step_in_vain(ranks_of, kind):
    for told in ranks_of(2).run(step_the_older_of_two, kind):
        assert told.startswith("another ZeroRedundancyOptimizer was made over this model after")


def made_between_a_pass_and_its_step(group):
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    batch = torch.full((3, 7), 1.0 + group.rank, dtype=torch.float64)
    loss_of(model, batch).backward()
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
    return str(raised.value), [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_takes_no_step_by_gradients_from_before_it_was_made(ranks_of, size):
    model = make_model(torch.float64)
    for rank in range(size):
        batch = torch.full((3, 7), 1.0 + rank, dtype=torch.float64)
        (loss_of(model, batch) / size).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for told, parameters in ranks_of(size).run(made_between_a_pass_and_its_step):
        assert told.startswith("step() needs gradients that were reduced since the last step")
        for ours, expected in zip(parameters, model.parameters(), strict=True):
            assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-14)


def step_with_a_sparse_gradient():
    with cl.Group.create(cl.HashStore(), 0, 1) as own:
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        zero = cl.ZeroRedundancyOptimizer(
            embedding.parameters(), torch.optim.SGD, group=own, lr=0.1
        )
        embedding(torch.tensor([1, 2])).sum().backward()
        zero.step()


def refusals(group):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    parameters = list(make_model(torch.float32).parameters())
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW)

    def zero(params, kind=torch.optim.SGD, **options):
        return lambda: cl.ZeroRedundancyOptimizer(params, kind, group=group, **options)

    vectors = iter(parameters)
    calls = {
        "set": zero([{"params": set(parameters)}]),
        "mixed": zero([parameters[0], 3.0]),
        "no leaf": zero([parameters[0] * 2]),
        "no groups": zero(iter([])),
        "empty group": lambda: cl.ZeroRedundancyOptimizer(
            [{"params": []}, {"params": vectors}], torch.optim.SGD, group=group
        ).add_param_group({"params": []}),
        "option": zero(parameters, torch.optim.AdamW, lr=-1.0),
        "unknown option": zero(parameters, torch.optim.SGD, beta=0.1),
        "sparse": zero(parameters, torch.optim.SparseAdam),
        "tensor": zero(parameters[0]),
        "empty": zero([]),
        "wrong type": zero(["weights"]),
        "twice": zero([{"params": parameters}, {"params": parameters[:1]}]),
        "not elementwise": zero(parameters, torch.optim.LBFGS),
        "max_norm": zero(parameters, max_norm=-1.0),
        "vector": zero([torch.nn.Parameter(torch.zeros(7))], torch.optim.Muon),
        "sparse parameter": zero([torch.nn.Parameter(torch.eye(3).to_sparse())]),
        "sparse gradient": step_with_a_sparse_gradient,
        "step first": optimizer.step,
    }
    told = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            told[name] = (type(error).__name__, str(error))
    return told


def test_unfit_arguments_get_torchs_errors_and_a_mend(ranks_of):
    told = ranks_of(1).run(refusals)[0]
    assert "empty group" not in told, "torch takes it, and so do we"
    expected = {
        "set": ("TypeError", "the ordering of tensors in sets will change between runs"),
        "mixed": ("TypeError", "optimizer can only optimize Tensors"),
        "no leaf": ("ValueError", "can't optimize a non-leaf Tensor"),
        "no groups": ("ValueError", "optimizer got an empty parameter list"),
        "option": ("ValueError", "Invalid learning rate: -1.0"),
        "unknown option": ("TypeError", "unexpected keyword argument 'beta'"),
        "sparse": ("ValueError", "SparseAdam cannot be sharded: only dense gradients"),
        "tensor": ("TypeError", "iterable of Tensors or dicts"),
        "empty": ("ValueError", "optimizer got an empty parameter list"),
        "wrong type": ("TypeError", "optimizer can only optimize Tensors"),
        "twice": ("ValueError", "some parameters appear in more than one parameter group"),
        "vector": ("ValueError", "found a parameter with size: torch.Size([7])"),
        "sparse parameter": ("ValueError", "use parameter.to_dense(), or a separate optimizer"),
        "sparse gradient": ("ValueError", "torch.sparse_coo gradient, and only dense ones"),
        "not elementwise": ("ValueError", "LBFGS cannot be sharded: its line search"),
        "max_norm": ("ValueError", "max_norm must be positive, got -1.0"),
        "step first": ("RuntimeError", "run loss.backward()"),
    }
    for name, (kind, text) in expected.items():
        assert told[name][0] == kind, name
        assert text in told[name][1], name


def duplicates(group):
    """torch warns, and so do we; the parameter is stepped once."""
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        zero = cl.ZeroRedundancyOptimizer([parameter] * 2, torch.optim.SGD, lr=0.5, group=group)
    parameter.grad = torch.ones(3)
    zero.step()
    return parameter.detach().clone()


def test_a_parameter_twice_in_a_group_is_warned_of(ranks_of):
    for parameter in ranks_of(2).run(duplicates):
        assert torch.equal(parameter, torch.full((3,), 0.5))


def different_models(group):
    told = []
    for parameters, options in (
        ([torch.nn.Parameter(torch.zeros(2 + group.rank))], {}),
        ([torch.nn.Parameter(torch.zeros(2)) for _ in range(2 + group.rank)], {}),
        ([torch.nn.Parameter(torch.zeros(2))], {"lr": 0.1 + group.rank}),
        ([torch.nn.Parameter(torch.zeros(2))], {"amsgrad": group.rank == 1}),
    ):
        try:
            cl.ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, group=group, **options)
        except cl.CollectiveMismatch as error:
            told.append((error.ranks, str(error)))
    return told


def test_what_differs_between_the_ranks_is_found_at_construction_and_named(ranks_of):
    for rank, told in enumerate(ranks_of(3).run(different_models)):
        shape, number, option, flag = told
        assert shape[0] == [1, 2] and "parameter 0 differs from rank 0's" in shape[1]
        assert f"on rank {rank} it is ({2 + rank},) torch.float32, trainable" in shape[1]
        assert "lr" not in shape[1], "what is the same on all ranks"
        assert f"on rank {rank} it is amsgrad {float(rank == 1)}." in flag[1], "as a number"
        assert number[0] == [1, 2] and "by rank: {0: 2, 1: 3, 2: 4}" in number[1]
        assert option[0] == [1, 2] and f"lr {0.1 + rank}" in option[1]


def capturable_on_a_cpu(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, capturable=True)
        loss_of(model, torch.ones(3, 7)).backward()
        with pytest.raises(AssertionError) as raised:
            optimizer.step()
        return str(raised.value)


def test_capturable_optimizers_are_refused_on_a_cpu_in_torchs_words(ranks_of):
    for told in ranks_of(2).run(capturable_on_a_cpu):
        assert "If capturable=True, params and state_steps must be on supported devices" in told


def step_once_too_often(group, begin):
    with another_group(group) as own:
        model = make_model(torch.float32)
        optimizer = cl.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, group=own)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.num_steps = begin
        optimizer.step()  # As often on all ranks.
        optimizer.num_steps = begin + group.rank  # as after calls on some ranks only
        with pytest.raises(cl.CollectiveMismatch) as raised:
            optimizer.step()
        return str(raised.value)


@pytest.mark.parametrize("begin", [0, 10**8 + 1])
def test_ranks_at_different_steps_are_told_on_every_rank(ranks_of, begin):
    for rank, told in enumerate(ranks_of(3).run(step_once_too_often, begin)):
        assert f"different numbers of steps (this rank: {begin + rank})" in told


def step_two_in_another_order(group, kind):
    """Of equal models, whose gradients and ballots have equal sizes."""
    with another_group(group) as own:
        models = [cl.DistributedDataParallel(make_model(torch.float64), own) for _ in range(2)]
        optimizers = [cl.ZeroRedundancyOptimizer(model, kind, lr=0.1) for model in models]
        for number, model in enumerate(models):
            loss_of(model, torch.full((3, 7), 1.0 + number, dtype=torch.float64)).backward()
        with pytest.raises(cl.CollectiveMismatch) as raised:
            for optimizer in optimizers if own.rank == 0 else reversed(optimizers):
                optimizer.step()
        return str(raised.value)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor], ids=lambda k: k.__name__)
def test_two_optimizers_that_ranks_step_in_another_order_are_told_on_every_rank(ranks_of, kind):
    for told in ranks_of(2).run(step_two_in_another_order, kind):
        assert "optimizer 0 on rank 0, optimizer 1 on rank 1" in told
        assert "All ranks call step() of the same optimizers, in the same order" in told


def clip_on_one_rank(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, max_norm=2.0)
        optimizer.max_norm = None if own.rank else 0.5
        loss_of(model, torch.ones(3, 7)).backward()
        with pytest.raises(cl.CollectiveMismatch) as raised:
            optimizer.step()
        return str(raised.value)


def test_a_rank_that_does_not_clip_is_told_with_none(ranks_of):
    for told in ranks_of(2).run(clip_on_one_rank):
        assert "max_norm is 0.5 on rank 0, None on rank 1, so each rank would step" in told


def train_at_rates_of_their_own(group, how):
    """how: the ranks set other rates, or a rank that has joined misses steps of the schedule."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(torch.nn.Linear(1, 1), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        along = [schedule] if how == "step_along" else []
        steps = 0
        try:
            for _ in range(2):
                with cl.Join([model, optimizer], step_along=along, skew_warning=None):
                    for number in range(2 + own.rank):
                        model(torch.ones(2, 1)).mean().backward()
                        if how == "by hand" and number == 1:
                            optimizer.param_groups[0]["lr"] = 0.1 * (1 + own.rank)
                        optimizer.step()
                        optimizer.zero_grad()
                        schedule.step()
                        steps += 1
        except cl.CollectiveMismatch as error:
            return steps, error.ranks, str(error)
    return steps, [], optimizer.param_groups[0]["lr"]


def test_ranks_with_learning_rates_of_their_own_are_told_on_every_rank(ranks_of):
    for steps, ranks, told in ranks_of(2).run(train_at_rates_of_their_own, "by hand"):
        assert (steps, ranks) == (1, [1]), "the step was not taken"
        assert "lr is 0.1 on rank 0, 0.2 on rank 1, so each rank would step its shard with" in told


def test_a_schedule_that_a_joined_rank_has_not_stepped_is_told_or_stepped_along(ranks_of):
    first, second = ranks_of(2).run(train_at_rates_of_their_own, "in the body")
    assert (first[:2], second[:2]) == ((3, [1]), (4, [1])), "in the second epoch"
    assert first[2] == second[2] and "list a schedule in Join(..., step_along" in first[2]
    assert ranks_of(2).run(train_at_rates_of_their_own, "step_along") == [
        (4, [], 0.5 / 8),
        (6, [], 0.5 / 8),
    ]


def train_on_grown_data(group):
    """Between two epochs the dataset grows on all ranks, then on one only."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(torch.nn.Linear(1, 1), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        used = []
        try:
            for epoch, length in enumerate((6, 9, 9 + own.rank)):
                with cl.Join([model, optimizer]):
                    shard = cl.Shard(range(length), 2, rank=own.rank, world_size=2, epoch=epoch)
                    for numbers in shard:
                        model(numbers[:, None].float()).mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        used.append((epoch, numbers.tolist()))
        except cl.CollectiveMismatch as error:
            return str(error), used
    return "", used


def test_a_dataset_may_change_between_epochs_if_it_does_so_on_all_ranks(ranks_of):
    told = ranks_of(2).run(train_on_grown_data)
    for error, _ in told:
        assert "different numbers of samples on the ranks (rank 0: 9, rank 1: 10)" in error
        assert "Every rank must pass the same dataset" in error
    for epoch, length in enumerate((6, 9)):
        used = [n for _, batches in told for e, batch in batches if e == epoch for n in batch]
        assert sorted(used) == list(range(length))
    assert not any(epoch == 2 for _, batches in told for epoch, _ in batches), "no step was taken"


def test_completion_shows_torchs_names_and_the_public_ones_only():
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        parameters = [torch.nn.Parameter(torch.zeros(3))]
        zero = cl.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, group=group, lr=0.1)
        plain = set(dir(torch.optim.SGD(parameters, lr=0.1)))
        assert {name for name in dir(zero) if not name.startswith("_")} - plain == {
            "check_every",
            "consolidate_state_dict",
            "corrections",
            "found_overflow",
            "grad_norm",
            "group",
            "join_device",
            "join_group",
            "join_hook",
            "max_norm",
            "num_steps",
            "shard_optimizer",
            "uses_scaler",
        }


def check_an_embedding(group, kind, options, check_every):
    """What the constructor says; empty: nothing."""
    with another_group(group) as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.nn.Sequential(kind(7, 3, **options), torch.nn.Linear(3, 2))
        model = cl.DistributedDataParallel(net, own)
        try:
            cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, check_every=check_every)
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_an_embedding_that_writes_its_rows_is_not_taken_for_silent_data_corruption(ranks_of, kind):
    for told in ranks_of(2).run(check_an_embedding, kind, {"max_norm": 1.0}, 1):
        assert f"check_every does not work with this model: 0 is an {kind.__name__}" in told
        assert "shortens the rows that its own batch uses, on this rank alone" in told
        assert "weight.renorm_(2, 0, 1)" in told
    for options, check_every in (({"max_norm": 1.0}, None), ({}, 1)):
        assert ranks_of(2).run(check_an_embedding, kind, options, check_every) == ["", ""]


def drops_a_group(optimizer):
    del optimizer.param_groups[0]


def drops_a_parameter(optimizer):
    optimizer.param_groups[0]["params"].pop()


def appends_a_group(optimizer):
    fresh = torch.nn.Parameter(torch.ones(2))
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [fresh]})


def replaces_a_parameter(optimizer):
    params = optimizer.param_groups[0]["params"]
    params[0] = torch.nn.Parameter(params[0].detach().clone())


def turns_the_groups(optimizer):
    optimizer.param_groups.reverse()


def clears_the_groups(optimizer):
    optimizer.param_groups.clear()


REGROUPED = {
    drops_a_group: "have [2] parameters, and were given [2, 2]",
    drops_a_parameter: "have [1, 2] parameters, and were given [2, 2]",
    appends_a_group: "have [2, 2, 1] parameters, and were given [2, 2]",
    replaces_a_parameter: "have other parameters, or in another order, than they were given",
    turns_the_groups: "have other parameters, or in another order, than they were given",
    clears_the_groups: "have [] parameters, and were given [2, 2]",
}


def step_regrouped(group, change, lengths):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        first, second = [[*layer.parameters()] for layer in model.module if [*layer.parameters()]]
        optimizer = cl.ZeroRedundancyOptimizer(
            [{"params": first}, {"params": second, "lr": 0.2}], torch.optim.SGD, lr=0.1
        )
        try:
            with cl.Join([model, optimizer], enable=bool(lengths), skew_warning=None):
                for number in range(lengths[own.rank] if lengths else 3):
                    loss_of(model, torch.ones(3, 7)).backward()
                    if number == 1:
                        change(optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
        except RuntimeError as error:
            return str(error), optimizer.num_steps
        return "", optimizer.num_steps


@pytest.mark.parametrize("change", REGROUPED)
def test_lists_of_parameters_that_the_program_changes_are_refused(ranks_of, change):
    for lengths in ((), (1, 3)):
        for told, num_steps in ranks_of(2).run(step_regrouped, change, lengths):
            assert REGROUPED[change] in told and "add_param_group()" in told, (lengths, told)
            assert num_steps == 1


def share_as_parameters(module):
    module[1].weight = torch.nn.Parameter(module[0].weight.data)


def share_a_part(module):
    module[1].bias = torch.nn.Parameter(module[0].weight.data.flatten()[2:5])


def share_as_a_buffer(module):
    module.register_buffer("first", module[0].weight.data[0])


def share_the_parameter(module):
    module[1].weight = module[0].weight


def share_one_tensor_by_rows(module):
    whole = torch.zeros(2, 3, 3)
    for number in range(2):
        module[number].weight = torch.nn.Parameter(whole[number])


@pytest.mark.parametrize(
    ("share", "names"),
    [
        (share_as_parameters, "0.weight and 1.weight"),
        (share_a_part, "0.weight and 1.bias"),
        (share_as_a_buffer, "0.weight and first"),
        (share_the_parameter, ""),
        (share_one_tensor_by_rows, ""),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_parameters_that_share_memory_are_refused(alone, share, names):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    share(module)
    model = cl.DistributedDataParallel(module, alone)
    if names:
        with pytest.raises(ValueError, match="share memory") as raised:
            cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        assert sorted(names.split(" and ")) == sorted(
            str(raised.value).split(" share")[0].split(" and ")
        )
    else:
        cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
