"""Groups that come later, parameters that are frozen and unfrozen: as a plain optimizer has it."""

import contextlib
import copy
import time

import pytest
import torch

import chorusline as cl
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.harness.combinations import combinations
from tests.harness.reused_ranks import another_group
from tests.references.sharded_training import assert_same_state
from tests.references.training import (
    backward_of_all,
    batches_of,
    data_of as data_by_rank,
    largest_difference,
    loss_of,
    make_model,
)

KINDS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}
NUM_STEPS = 6


class Tower(torch.nn.Module):
    """`deep` is frozen at first, `head` is trained from the start."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.deep = torch.nn.Linear(7, 13).requires_grad_(False)
        self.head = torch.nn.Linear(13, 5)

    def forward(self, batch):
        return self.head(torch.tanh(self.deep(batch)))


def add_a_group(step, model, optimizer):
    """Before step 2 `deep` is made trainable and gets options of its own."""
    if step == 2:
        model.deep.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.deep.parameters()), "lr": 0.03})


def freeze_and_unfreeze(step, model, optimizer):
    """All parameters are the optimizer's from the start; which are trainable changes."""
    if step == 2:
        model.deep.weight.requires_grad_(True)
    if step == 3:
        model.head.requires_grad_(False)
        model.deep.bias.requires_grad_(True)
    if step == 5:
        model.head.requires_grad_(True)


CHANGES = {"later group": add_a_group, "trainability": freeze_and_unfreeze}


def first_parameters(model, change):
    return model.head.parameters() if change is add_a_group else model.parameters()


def data_of(rank):
    return batches_of(rank, NUM_STEPS, torch.float32)


def plain_run(size, name, change):
    model = Tower()
    kind, options = KINDS[name]
    optimizer = kind(first_parameters(model, change), **options)
    for step in range(NUM_STEPS):
        change(step, model, optimizer)
        total = {}
        for rank in range(size):
            model.zero_grad()
            loss_of(model, data_of(rank)[step]).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    total[parameter] = total.get(parameter, 0) + parameter.grad
        for parameter in model.parameters():
            parameter.grad = total[parameter] / size if parameter in total else None
        optimizer.step()
    return list(model.parameters()), optimizer.state_dict()


def sharded_run(group, name, change, with_model):
    kind, options = KINDS[name]
    module = Tower()
    model = cl.DistributedDataParallel(module, group) if with_model else module
    optimizer = cl.ZeroRedundancyOptimizer(
        first_parameters(module, change), kind, group=group, **options
    )
    assert (optimizer_engine_of(optimizer).reducer is not None) is (
        with_model and name != "adafactor"
    )
    for step in range(NUM_STEPS):
        change(step, module, optimizer)
        if with_model:
            loss_of(model, data_of(group.rank)[step]).backward()
        else:
            gradients_of_all(module, step, group.size)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if group.rank == 0 else None
    return [p.detach().clone() for p in module.parameters()], state


def gradients_of_all(module, step, size):
    """Make `.grad` the mean over the ranks, as whoever reduces gradients without our model does."""
    total = {}
    for rank in range(size):
        module.zero_grad()
        loss_of(module, data_of(rank)[step]).backward()
        for parameter in module.parameters():
            if parameter.grad is not None:
                total[parameter] = total.get(parameter, 0) + parameter.grad
    for parameter, gradient in total.items():
        parameter.grad = gradient / size


@pytest.mark.parametrize("with_model", [True, False], ids=["model", "parameters"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", KINDS)
def test_later_parameters_are_stepped_as_the_plain_optimizer_does(
    ranks_of, name, change, with_model
):
    expected, expected_state = plain_run(3, name, CHANGES[change])
    results = ranks_of(3).run(sharded_run, name, CHANGES[change], with_model)
    for parameters, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    state = results[0][1]
    assert state["param_groups"] == expected_state["param_groups"]
    assert state["state"].keys() == expected_state["state"].keys()
    for number, theirs in expected_state["state"].items():
        for entry, value in theirs.items():
            assert torch.equal(state["state"][number][entry], value), (number, entry)


def unfreeze_between_steps_of_two_passes(group, adds):
    module = model = Tower()
    parameters = module.head.parameters() if adds else module.parameters()
    if group is None:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
    else:
        model = cl.DistributedDataParallel(module, group)
        optimizer = cl.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, group=group, lr=0.1)
    for step in range(4):
        if step == 2:
            module.deep.requires_grad_(True)
        for batch in data_of(0)[step : step + 2]:
            loss_of(model, batch).backward()
        if adds and step == 2:
            optimizer.add_param_group({"params": [*module.deep.parameters()], "lr": 0.03})
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("adds", [False, True], ids=["given before", "added"])
def test_parameters_are_unfrozen_in_steps_of_several_passes(ranks_of, adds):
    expected = unfreeze_between_steps_of_two_passes(None, adds)
    for parameters in ranks_of(2).run(unfreeze_between_steps_of_two_passes, adds):
        assert largest_difference(parameters, expected) < 1e-6


def load_while_frozen(group, name, with_model, weights, state, size=3):
    """`deep` was trained before, is frozen when the state is loaded, and again trained later. The
    state as saved at once, that at the end, and the parameters. group: None for a plain run."""
    kind, options = KINDS[name]
    module = model = Tower()
    module.load_state_dict(weights)
    if group is None:
        optimizer = kind(module.parameters(), **options)
    else:
        model = cl.DistributedDataParallel(module, group) if with_model else module
        optimizer = cl.ZeroRedundancyOptimizer(
            module.parameters(), kind, group=group, **{**options, "lr": 1.0}
        )
    optimizer.load_state_dict(copy.deepcopy(state))
    states = [saved_state(optimizer)]
    for step in range(2, NUM_STEPS):
        if step == 4:
            module.deep.requires_grad_(True)
        if with_model and group is not None:
            loss_of(model, data_of(group.rank)[step]).backward()
        else:
            gradients_of_all(module, step, size)
        optimizer.step()
        optimizer.zero_grad()
    states.append(saved_state(optimizer))
    return *states, [p.detach().clone() for p in module.parameters()]


def saved_state(optimizer):
    """None on a rank other than 0."""
    if isinstance(optimizer, cl.ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict()
        if optimizer.group.rank:
            return None
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("with_model", [True, False], ids=["model", "parameters"])
@pytest.mark.parametrize("name", KINDS)
def test_the_state_of_a_parameter_that_is_frozen_when_it_is_loaded_is_there(
    ranks_of, name, with_model
):
    module = Tower()
    module.deep.requires_grad_(True)
    kind, options = KINDS[name]
    before = kind(module.parameters(), **options)
    for step in range(2):
        gradients_of_all(module, step, 3)
        before.step()
    start = module.state_dict(), before.state_dict()
    *expected, parameters = load_while_frozen(None, name, False, *start)
    results = ranks_of(3).run(load_while_frozen, name, with_model, *start)
    for *_, found in results:
        assert all(torch.equal(a, b) for a, b in zip(found, parameters, strict=True))
    for found, theirs in zip(results[0], expected, strict=False):
        assert_same_state(found, theirs)


def unfreeze_what_the_optimizer_lacks(group, in_join):
    """It was made with the model, of which `deep` was frozen."""
    module = Tower()
    with another_group(group) as own:
        model = cl.DistributedDataParallel(module, own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        try:
            with cl.Join([model, optimizer], enable=in_join):
                for step, batch in enumerate(data_of(own.rank)[: 5 + own.rank * in_join]):
                    module.deep.requires_grad_(step >= 2)
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except RuntimeError as error:
            return optimizer.num_steps, str(error)
    return optimizer.num_steps, ""


@pytest.mark.parametrize("in_join", [False, True])
def test_an_unfrozen_parameter_that_the_optimizer_lacks_is_named_at_once(ranks_of, in_join):
    for num_steps, told in ranks_of(2).run(unfreeze_what_the_optimizer_lacks, in_join):
        assert num_steps == 2 and "(deep.weight, deep.bias)" in told
        assert "add_param_group" in told and "model.parameters()" in told


def train_plain_optimizer(group):
    module = Tower()
    model = cl.DistributedDataParallel(module, group)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        freeze_and_unfreeze(step, module, optimizer)
        loss_of(model, data_of(group.rank)[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


def test_a_model_reduces_what_was_frozen_when_it_was_wrapped(ranks_of):
    expected, _ = plain_run(3, "adamw", freeze_and_unfreeze)
    for parameters in ranks_of(3).run(train_plain_optimizer):
        for ours, theirs in zip(parameters, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def train_in_phases(group, kind, given, joins, frozen, lengths):
    """Each epoch freezes other layers, and has an optimizer of its own. given: to it. Returns the
    parameters, or the error."""
    module = model = make_model(torch.float64)
    options = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.01}
    if group is not None:
        model = cl.DistributedDataParallel(module, group)
    for layers in frozen:
        for number in (0, 2):
            module[number].requires_grad_(number not in layers)
        trained = [p for p in module.parameters() if p.requires_grad]
        if group is None:
            optimizer, join = kind(trained, **options), contextlib.nullcontext()
        else:
            if given == "wrapped again":
                model = cl.DistributedDataParallel(module, group)
            listed = trained if given == "trained" else model
            try:
                optimizer = cl.ZeroRedundancyOptimizer(listed, kind, group=group, **options)
            except ValueError as error:
                return str(error)
            join = cl.Join([model, optimizer], skew_warning=None, enable=joins)
        data = data_by_rank(group, lengths, torch.float64)
        with join:
            for number in range(max(map(len, data))):
                backward_of_all(model, data, number)
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


@combinations(
    2,
    kind=[torch.optim.SGD, torch.optim.Adafactor],
    given=["model", "wrapped again", "trained"],
    loop=[(False, (3, 3)), (True, (3, 3)), (True, (1, 3))],
    frozen=[[(), (0,), (2,)], [(2,), (), (0,)], [(), (0,), ()]],
)
def test_each_phase_that_freezes_layers_may_have_an_optimizer_of_its_own(
    ranks_of, kind, given, loop, frozen
):
    joins, lengths = loop
    expected = train_in_phases(None, kind, given, joins, frozen, lengths)
    for found in ranks_of(2).run(train_in_phases, kind, given, joins, frozen, lengths):
        if given == "trained" and () in frozen[:2]:
            assert "has taken over the steps of a model" in found
        else:
            assert largest_difference(found, expected) < 1e-12


class Unfreeze:
    """What a loop's body does between steps, as an object that joined ranks step along."""

    def __init__(self, module):
        self.module = module
        self.steps = 0

    def step(self):
        self.steps += 1
        if self.steps == 2:
            self.module.deep.requires_grad_(True)


def unfreeze_inside_join(group, sharded):
    module = Tower()
    model = cl.DistributedDataParallel(module, group)
    kind = cl.ZeroRedundancyOptimizer if sharded else torch.optim.AdamW
    optimizer = (
        kind(module.parameters(), torch.optim.AdamW, lr=1e-2)
        if sharded
        else kind(module.parameters(), lr=1e-2)
    )
    unfreeze = Unfreeze(module)
    joinables = [model, optimizer] if sharded else [model]
    along = [unfreeze] if sharded else [optimizer, unfreeze]
    with cl.Join(joinables, step_along=along, skew_warning=None):
        for batch in data_of(group.rank)[: 1 + 3 * group.rank]:
            loss_of(model, batch).backward()
            optimizer.step()
            unfreeze.step()
            model.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
def test_a_rank_that_has_joined_takes_up_what_is_unfrozen_by_then(ranks_of, sharded):
    module = Tower()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(4):
        module.deep.requires_grad_(step >= 2)
        for rank in range(2):
            if step < 1 + 3 * rank:
                (loss_of(module, data_of(rank)[step]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in ranks_of(2).run(unfreeze_inside_join, sharded):
        for ours, theirs in zip(parameters, module.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def add_a_fresh_layer(group):
    """Between backward and step, with values and gradients that differ between the ranks."""
    module = Tower()
    model = cl.DistributedDataParallel(module, group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=1.0)
    loss_of(model, data_of(group.rank)[0]).backward()
    torch.manual_seed(group.rank)
    module.fresh = torch.nn.Linear(3, 2, bias=False)
    module.fresh.weight.grad = torch.full((2, 3), 1.0 + group.rank)
    optimizer.add_param_group({"params": module.fresh.parameters()})
    optimizer.step()
    return module.fresh.weight.detach().clone()


def test_a_layer_registered_later_starts_from_rank_0_and_joins_the_step_it_falls_into(ranks_of):
    torch.manual_seed(0)
    expected = torch.nn.Linear(3, 2, bias=False).weight - 1.5
    for weight in ranks_of(2).run(add_a_fresh_layer):
        assert torch.equal(weight, expected)


def refused_groups(group):
    module = Tower()
    model = cl.DistributedDataParallel(module, group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW)
    matrices = cl.ZeroRedundancyOptimizer(
        [torch.nn.Parameter(torch.zeros(3, 3))], torch.optim.Muon, group=group
    )
    deep = list(module.deep.parameters())
    told = {}
    for name, call in {
        "foreign": lambda: optimizer.add_param_group({"params": make_model(torch.float32)[0].bias}),
        "learning rate": lambda: optimizer.add_param_group(
            {"params": deep, "lr": 0.1 * (1 + group.rank)}
        ),
        "number": lambda: optimizer.add_param_group({"params": deep[: 1 + group.rank]}),
        "twice": lambda: optimizer.add_param_group({"params": module.head.weight}),
        "no dictionary": lambda: optimizer.add_param_group(deep),
        "dimensions": lambda: matrices.add_param_group({"params": torch.nn.Parameter(deep[1])}),
    }.items():
        try:
            call()
        except Exception as error:
            told[name] = (type(error).__name__, str(error))
    assert len(optimizer.param_groups) == 1 and len(matrices.param_groups) == 1
    loss_of(model, data_of(group.rank)[0]).backward()
    optimizer.step()  # The group is whole, and the optimizer what it was.
    return told


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.8 has no Muon")
def test_a_group_that_cannot_be_added_is_refused_on_all_ranks_and_leaves_no_trace(ranks_of):
    expected = {
        "foreign": ("ValueError", "a parameter of shape (13,) does not belong to the module"),
        "learning rate": ("CollectiveMismatch", "parameter 0 differs from rank 0's; on rank"),
        "number": ("CollectiveMismatch", "numbers of parameters, by rank: {0: 1, 1: 2}"),
        "twice": ("ValueError", "some parameters appear in more than one parameter group"),
        "no dictionary": ("TypeError", "param_group must be a dict"),
        "dimensions": ("ValueError", "Muon only supports 2D parameters"),
    }
    for told in ranks_of(2).run(refused_groups):
        for name, (kind, text) in expected.items():
            assert told[name][0] == kind, name
            assert text in told[name][1], (name, told[name])
    assert "lr 0.2" in ranks_of(2).run(refused_groups)[1]["learning rate"][1]


def add_on_one_rank_only(group):
    with another_group(group) as own:
        module = Tower()
        model = cl.DistributedDataParallel(module, own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW)
        began_at = time.monotonic()
        try:
            if own.rank == 0:
                optimizer.add_param_group({"params": list(module.deep.parameters())})
            else:
                loss_of(model, data_of(own.rank)[0]).backward()
                optimizer.step()
        except cl.CollectiveMismatch as error:
            notes = getattr(error, "__notes__", [])
            return str(error), notes, time.monotonic() - began_at
    return "", [], 0.0


def test_a_group_added_on_one_rank_only_is_an_error_on_all_and_no_hang(ranks_of):
    results = ranks_of(2).run(add_on_one_rank_only)
    for told, _, seconds in results:
        assert "rank 0 issued all_gather" in told and "reduce_scatter" in told
        assert seconds < 5
    assert "Every rank must call add_param_group() with the same group" in results[0][1][0]
