"""State dictionaries: the plain optimizer's, at any number of ranks, by number and by name."""

import copy
import io
import itertools
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import chorusline as cl
from chorusline.collectives.objects.blocking import broadcast_object
from chorusline.runtime.zero.shards import optimizer_state
from tests.harness.allocations import Allocations
from tests.references.checkpoint_runs import in_run
from tests.references.sharded_training import (
    ELEMENTWISE,
    assert_same_state,
    groups_of,
    plain_run,
    sharded_run,
)
from tests.references.training import batches_of, loss_of, make_model


@pytest.mark.parametrize("name", ["sgd", "adamw_fused"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_state_of_a_plain_optimizer_goes_on_at_any_number_of_ranks(ranks_of, name, size):
    kind, options = ELEMENTWISE[name]
    half_way = plain_run(size, kind, options, 2)
    expected, expected_state = plain_run(size, kind, options, 5, start=half_way, first=2)
    results = ranks_of(size).run(sharded_run, kind, options, 5, half_way, 2)
    for parameters, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    assert_same_state(results[-1][1], expected_state)


def test_state_saved_by_three_ranks_is_loaded_by_two(ranks_of):
    kind, options = ELEMENTWISE["adamw_foreach"]
    saved = ranks_of(3).run(sharded_run, kind, options, 2)[-1]
    expected, _ = plain_run(2, kind, options, 5, start=saved, first=2)
    for parameters, _ in ranks_of(2).run(sharded_run, kind, options, 5, saved, 2):
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


@pytest.mark.parametrize("name", ["adamw_fused", "nadam", "adagrad"])
def test_a_run_goes_on_from_any_number_of_ranks_to_any_other(ranks_of, name):
    kind, options = ELEMENTWISE[name]
    ours = theirs = None
    for step, size in enumerate([1, 2, 3, 4, 2, 1, 4]):
        theirs = plain_run(size, kind, options, step + 1, start=theirs, first=step)
        results = ranks_of(size).run(sharded_run, kind, options, step + 1, ours, step)
        ours = results[0][0], results[-1][1]
        assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True)), size
        assert_same_state(ours[1], theirs[1])


# -- torch's own ----------------------------------------------------------------------------------


def torchs_zero(group, start, first, steps):
    path = broadcast_object(group, tempfile.mktemp(prefix="chorusline-gloo-"))
    store = dist.FileStore(path, group.size)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    try:
        model = TorchDDP(make_model(torch.float32))
        zero = TorchZero(model.parameters(), torch.optim.AdamW, lr=1e-2)
        start_from(start, model, zero)
        for batch in batches_of(group.rank, steps, torch.float32)[first:]:
            loss_of(model, batch).backward()
            zero.step()
            zero.zero_grad()
        zero.consolidate_state_dict(to=0)
        state = copy.deepcopy(zero.state_dict()) if group.rank == 0 else None
        return [p.detach().clone() for p in model.parameters()], state
    finally:
        dist.destroy_process_group()


def our_zero(group, start, first, steps):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    zero = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2)
    start_from(start, model, zero)
    for batch in batches_of(group.rank, steps, torch.float32)[first:]:
        loss_of(model, batch).backward()
        zero.step()
        zero.zero_grad()
    zero.consolidate_state_dict(to=0)
    state = zero.state_dict() if group.rank == 0 else None
    return [p.detach().clone() for p in model.parameters()], state


def start_from(start, model, optimizer):
    if start is not None:
        with torch.no_grad():
            for parameter, saved in zip(model.parameters(), start[0], strict=True):
                parameter.copy_(saved)
        optimizer.load_state_dict(copy.deepcopy(start[1]))  # torch's takes the caller's apart


@pytest.mark.parametrize("legs", [(torchs_zero, our_zero), (our_zero, torchs_zero)])
def test_state_goes_to_torchs_own_zero_and_comes_from_it(ranks_of, legs):
    before, after = legs
    expected, expected_state = ranks_of(2).run(torchs_zero, None, 0, 4)[0]
    half_way = ranks_of(2).run(before, None, 0, 2)[0]
    parameters, state = ranks_of(2).run(after, half_way, 2, 4)[0]
    for ours, theirs in zip(parameters, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    for number, of_parameter in expected_state["state"].items():
        for name, value in of_parameter.items():
            assert torch.allclose(state["state"][number][name], value, rtol=1e-5, atol=1e-9)


# -- by name --------------------------------------------------------------------------------------


def reversed_groups(model):
    """Other groups, and in another order, than the numbers would have it."""
    late, early = groups_of(model)
    return [{**early, "params": early["params"][::-1]}, late]


def from_plain_by_name(group, parameters, state):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), parameters, strict=True):
            parameter.copy_(value)
    zero = cl.ZeroRedundancyOptimizer(reversed_groups(model), torch.optim.AdamW, lr=0.7)
    zero.load_state_dict(state)
    loss_of(model, batches_of(0, 3, torch.float32)[2]).backward()
    zero.step()
    zero.consolidate_state_dict(to=1)
    named = zero.state_dict(by_name=True) if group.rank == 1 else None
    return [p.detach().clone() for p in model.parameters()], named


def test_names_lead_from_torchs_checkpoint_format_and_back(ranks_of):
    model = make_model(torch.float32)
    plain = torch.optim.AdamW(groups_of(model), lr=1e-2)
    batches = batches_of(0, 4, torch.float32)

    def step(number):
        plain.zero_grad()
        loss_of(model, batches[number]).backward()
        plain.step()

    step(0)
    step(1)
    named = get_optimizer_state_dict(model, plain)
    parameters = [p.detach().clone() for p in model.parameters()]
    results = ranks_of(2).run(from_plain_by_name, parameters, named)
    step(2)
    for ours, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(ours, model.parameters(), strict=True))
    back = results[1][1]
    again = make_model(torch.float32)
    with torch.no_grad():
        for parameter, value in zip(again.parameters(), results[0][0], strict=True):
            parameter.copy_(value)
    other = torch.optim.AdamW(groups_of(again), lr=0.5)
    set_optimizer_state_dict(again, other, back)
    step(3)
    loss_of(again, batches[3]).backward()
    other.step()
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )
    assert [g["weight_decay"] for g in other.param_groups] == [0.01, 0.0]


def load_what_does_not_fit(group):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    zero = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2)
    nameless = cl.ZeroRedundancyOptimizer(
        make_model(torch.float32).parameters(), torch.optim.AdamW, group=group
    )
    plain = torch.optim.AdamW(make_model(torch.float32).named_parameters(), lr=0.5).state_dict()
    numbered = copy.deepcopy(plain)
    numbered["state"] = {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3, 3)}}
    names = plain["param_groups"][0].pop("param_names")
    options = {**plain["param_groups"][0], "params": names}

    def named(params, state=None, **changed):
        return {"state": state or {}, "param_groups": [{**options, **changed, "params": params}]}

    two = {"state": {}, "param_groups": [{**options, "params": names[:1]}, {**options, "lr": 0.1}]}
    two["param_groups"][1]["params"] = names[1:]
    told = {}
    for what, call in {
        "not consolidated": zero.state_dict,
        "groups": lambda: zero.load_state_dict({"state": {}, "param_groups": []}),
        "shape": lambda: zero.load_state_dict(numbered),
        "named shape": lambda: zero.load_state_dict(
            named(names, {"2.bias": {"exp_avg": torch.zeros(13)}})
        ),
        "missing": lambda: zero.load_state_dict(named(names[1:])),
        "unknown": lambda: zero.load_state_dict(named([*names, "norm.weight"])),
        "options": lambda: zero.load_state_dict(two),
        "nameless": lambda: nameless.load_state_dict(named(names)),
    }.items():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            told[what] = str(error)
    assert zero.param_groups[0]["lr"] == 1e-2, "nothing was taken over"
    return told


def test_state_that_does_not_fit_is_refused_on_every_rank_and_names_the_parameter(ranks_of):
    expected = {
        "not consolidated": "has not been consolidated on this rank",
        "groups": "a different number of parameter groups",
        "shape": "parameter 0 (0.weight) has shape (3, 3), but the parameter has (13, 7)",
        "named shape": "parameter 2.bias has shape (13,), but the parameter has (5,)",
        "missing": "loaded state dict lacks the parameters 0.weight",
        "unknown": "has parameters that the optimizer does not have: norm.weight",
        "options": "0.weight and 0.bias are in one parameter group, but were saved with different",
        "nameless": "has no name. Pass a chorusline DistributedDataParallel to the optimizer",
    }
    for told in ranks_of(3).run(load_what_does_not_fit):
        for what, text in expected.items():
            assert text in told[what], (what, told[what])


def names_of_their_own(group):
    model = make_model(torch.float32)
    zero = cl.ZeroRedundancyOptimizer(
        ((f"net.{name}", p) for name, p in model.named_parameters()),
        torch.optim.SGD,
        lr=0.1,
        momentum=0.9,
        group=group,
    )
    loss_of(model, batches_of(0, 1, torch.float32)[0]).backward()
    zero.step()
    zero.consolidate_state_dict()
    if group.rank == 0:
        return zero.state_dict()["param_groups"], sorted(zero.state_dict(by_name=True)["state"])
    return None


def test_names_that_were_given_with_the_parameters_are_kept(ranks_of):
    groups, keys = ranks_of(2).run(names_of_their_own)[0]
    names = ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    assert groups[0]["param_names"] == names and keys == sorted(names)


# -- half precision -------------------------------------------------------------------------------


def half_precision_leg(group, start, steps, frozen=False):
    """With gradients given, so that runs at different numbers of ranks are alike. frozen: the
    weight is, until its state is loaded."""
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 3).bfloat16()
    model.weight.requires_grad_(not frozen or start is None)
    if start is not None:
        model.load_state_dict(start[0])
    zero = cl.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=1e-4, momentum=0.9, group=group
    )
    if start is not None:
        zero.load_state_dict(start[1])
    model.weight.requires_grad_(True)
    for step in steps:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + step)
        zero.step()
    zero.consolidate_state_dict()
    return model.state_dict(), zero.state_dict() if group.rank == 0 else None


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_what_half_precision_rounds_away_is_saved_and_loaded_at_other_numbers_of_ranks(
    ranks_of, frozen
):
    whole, expected = ranks_of(1).run(half_precision_leg, None, range(30))[0]
    start = None
    for size, steps in [(2, range(10)), (3, range(10, 20)), (1, range(20, 30))]:
        start = ranks_of(size).run(half_precision_leg, start, steps, frozen)[0]
    assert all(torch.equal(start[0][name], value) for name, value in whole.items())
    assert_same_state(start[1], expected)
    master = expected["state"][0]["master"]
    assert master.dtype is torch.float32 and not torch.equal(master, whole["weight"].float())
    plain = torch.optim.SGD(torch.nn.Linear(100, 3).bfloat16().parameters(), momentum=0.9)
    plain.load_state_dict(copy.deepcopy(expected))  # it carries what it does not know along


class SecondLater(torch.nn.Module):
    """Its second layer is used, and stepped, when the program says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torch.nn.Linear(7, 3).bfloat16() for _ in range(2))
        self.uses_both = False

    def forward(self, batch):
        return self.first(batch) + (self.second(batch) if self.uses_both else 0)


def half_precision_without_some_state(group):
    model = cl.DistributedDataParallel(SecondLater(), group)
    zero = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1)
    batch = torch.ones(2, 7, dtype=torch.bfloat16)
    zero.consolidate_state_dict()
    fresh = zero.state_dict() if group.rank == 0 else None
    model(batch).square().mean().backward()
    zero.step()
    zero.zero_grad()
    zero.consolidate_state_dict()
    # What was changed since, and is in no entry, stays.
    with torch.no_grad():
        model.module.second.weight.fill_(2.0)
    zero.load_state_dict(broadcast_object(group, zero.state_dict() if group.rank == 0 else None, 0))
    assert torch.all(model.module.second.weight == 2)
    model.module.uses_both = True
    model(batch).square().mean().backward()
    zero.step()
    # The first step of AdamW is of size lr, less lr times its decay.
    assert torch.all(model.module.second.weight.sub(2).abs() < 0.11)
    return fresh, zero.state_dict() if group.rank == 0 else None


def test_a_parameter_without_state_has_none_for_a_plain_optimizer_either(ranks_of):
    fresh, state = ranks_of(2).run(half_precision_without_some_state)[0]
    assert fresh["state"] == {} and list(state["state"]) == [0, 1]
    model = SecondLater()
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    plain.load_state_dict(state)
    model.uses_both = True
    model(torch.ones(2, 7, dtype=torch.bfloat16)).square().mean().backward()
    plain.step()


def masters_beside_state(group):
    """Of one layer with momentum and one without, after steps that bfloat16 rounds away."""
    model = cl.DistributedDataParallel(SecondLater(), group)
    model.module.uses_both = True
    layers = [model.module.first.parameters(), model.module.second.parameters()]
    groups = [{"params": [*layers[0]], "momentum": 0.9}, {"params": [*layers[1]]}]
    zero = cl.ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=1e-5, group=group)
    for _ in range(3):
        model(torch.ones(2, 7, dtype=torch.bfloat16)).square().mean().backward()
        zero.step()
        zero.zero_grad()
    zero.consolidate_state_dict()
    return zero.state_dict()["state"] if group.rank == 0 else None


def test_masters_are_saved_of_parameters_whose_group_keeps_no_state_beside_one_that_does(ranks_of):
    state = ranks_of(2).run(masters_beside_state)[0]
    assert [sorted(one) for one in state.values()] == [
        *[["master", "momentum_buffer"]] * 2,
        *[["master"]] * 2,
    ]
    assert not torch.equal(state[2]["master"], state[2]["master"].bfloat16().float())


class Counted(torch.optim.SGD):
    made = 0

    def __init__(self, *args, **options):
        Counted.made += 1
        super().__init__(*args, **options)


def made_to_consolidate(group, dtype):
    model = torch.nn.Linear(7, 3, dtype=dtype)
    zero = cl.ZeroRedundancyOptimizer(model.parameters(), Counted, lr=1e-5, group=group)
    before = Counted.made
    zero.consolidate_state_dict()
    return Counted.made - before


@pytest.mark.parametrize(("dtype", "made"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_whether_steps_keep_state_is_tried_out_in_half_precision_only(ranks_of, dtype, made):
    assert ranks_of(2).run(made_to_consolidate, dtype) == [made, made]


def load_before_the_first_step(group):
    model = cl.DistributedDataParallel(SecondLater(), group)
    zero = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1)
    zero.consolidate_state_dict()
    zero.load_state_dict(broadcast_object(group, zero.state_dict() if group.rank == 0 else None, 0))
    zero.consolidate_state_dict()
    return zero.state_dict()["state"] if group.rank == 0 else None


def test_a_fresh_state_that_is_loaded_stays_one_without_state(ranks_of):
    assert ranks_of(2).run(load_before_the_first_step)[0] == {}


def overwrite_parameters(group):
    model = torch.nn.Linear(100, 3).bfloat16()
    zero = cl.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5, group=group)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    zero.step()
    return model.weight.detach().clone()


def test_a_checkpoint_loaded_after_construction_is_what_the_next_step_starts_from(ranks_of):
    for weight in ranks_of(2).run(overwrite_parameters):
        assert torch.equal(weight, torch.full((3, 100), 1.5, dtype=torch.bfloat16))


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.between = torch.nn.Linear(3, 3, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, numbers):
        between = self.between(self.embedding(numbers).bfloat16()).float()
        return self.head(between) * self.frozen.sum() + self.nothing.sum()


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return len(buffer.getvalue())


def handed_out(group):
    """What torch.save writes of a state dictionary, and whether it still is the model's memory."""
    model = cl.DistributedDataParallel(Tied(), group)
    plain = copy.deepcopy(model.module)
    zero = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW)
    model.module.frozen.requires_grad_()
    zero.add_param_group({"params": [model.module.frozen]})
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
        zero.step()
        zero.zero_grad()
        state = model.module.state_dict()
        for name, tensor in state.items():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
            assert tensor.storage_offset() == 0, name
        assert saved(state) < 1.5 * saved(plain.state_dict())
        with torch.no_grad():
            for tensor in state.values():  # As a broadcast of all of them does.
                tensor.fill_(0.5)
    model(torch.tensor([1, 2])).sum().backward()
    assert torch.equal(model.module.between.bias, torch.full((3,), 0.5, dtype=torch.bfloat16))
    zero.step()
    stepped = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    model.load_state_dict({f"module.{name}": tensor for name, tensor in stepped.items()})
    zero.consolidate_state_dict()
    moments = zero.state_dict()["state"].values() if group.rank == 0 else ()
    for tensor in (tensor for of_one in moments for tensor in of_one.values()):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert state["embedding.weight"].data_ptr() == state["head.weight"].data_ptr()
    return stepped


def test_state_dictionaries_hand_out_tensors_that_own_their_storage(ranks_of):
    """A view of a bucket takes the whole bucket along, and passes for a tied weight."""
    first, second = ranks_of(2).run(handed_out)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert not tensor.numel() or not torch.equal(tensor, torch.full_like(tensor, 0.5)), name


# -- memory ---------------------------------------------------------------------------------------


def peak_of_consolidation(group):
    model = cl.DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False), group)
    zero = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW)
    model(torch.randn(2, 1024)).sum().backward()
    zero.step()
    optimizer_state.CHUNK_BYTES = 64 << 10
    try:
        before = group.statistics.snapshot()
        with Allocations() as gathering:
            zero.consolidate_state_dict(to=1)
        sent = group.statistics.since(before).elements_sent
        state = zero.state_dict() if group.rank == 1 else None
        state = broadcast_object(group, state, 1)
        with Allocations() as loading:
            zero.load_state_dict(state)
    finally:
        optimizer_state.CHUNK_BYTES = 4 << 20
    return gathering.peak, loading.peak, sent


def test_consolidation_needs_a_chunk_beside_the_result_and_loading_one_shard(ranks_of):
    whole = 2 * 1024 * 1024 * 4
    for rank, (gathering, loading, sent) in enumerate(ranks_of(4).run(peak_of_consolidation)):
        print(f"rank {rank}: {gathering} and {loading} bytes; sent {sent}")
        result = whole if rank == 1 else 0
        assert result <= gathering <= result + (160 << 10)
        assert loading <= whole / 4 + (1 << 10)
        assert sent["gather"] == (0 if rank == 1 else whole / 4 / 4)


@pytest.mark.parametrize("named", [False, True], ids=["of the models", "given"])
def test_parameters_of_two_models_with_the_same_names_keep_their_own_states(alone, named, tmp_path):
    """As in a CycleGAN: one optimizer for two generators, and both are in a checkpoint."""

    def train(ctx, gradient):
        models = [cl.DistributedDataParallel(torch.nn.Linear(2, 2)) for _ in range(3)]
        each = [m.module.named_parameters() if named else m.parameters() for m in models]
        optim = cl.ZeroRedundancyOptimizer(
            itertools.chain(*each), torch.optim.SGD, lr=0.1, momentum=0.5
        )
        ctx.register("optimizer", optim)
        if gradient is not None:
            for number, model in enumerate(models):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, number + gradient)
            optim.step()
            ctx.save().wait()
        optim.consolidate_state_dict()
        return [one["momentum_buffer"] for one in optim.state_dict(by_name=True)["state"].values()]

    config = cl.CheckpointConfig(tmp_path)
    saved = in_run(alone, train, config, gradient=1.0)
    resumed = in_run(alone, train, config, gradient=None)
    assert [float(one.flatten()[0]) for one in saved] == [1, 1, 2, 2, 3, 3]
    assert all(torch.equal(a, b) for a, b in zip(saved, resumed, strict=True))


def hooked(optimizer, told):
    def renames(_, state_dict):
        told.append("load pre")
        return {key: state_dict[f"our {key}"] for key in ("state", "param_groups")}

    def packs(_, state_dict):
        told.append("save post")
        for state in state_dict["state"].values():
            state["momentum_buffer"] = state["momentum_buffer"] * 2
        return {f"our {key}": value for key, value in state_dict.items()}

    def notes(text):
        return lambda *_: told.append(text)

    optimizer.register_state_dict_pre_hook(notes("save pre"))
    optimizer.register_state_dict_post_hook(packs)
    optimizer.register_load_state_dict_pre_hook(renames)
    optimizer.register_load_state_dict_post_hook(notes("load post"))
    return optimizer


def test_hooks_of_state_dictionaries_run_as_with_the_plain_optimizer(alone):
    told = []

    def saved_and_loaded(module, model, optimizer):
        (batch,) = batches_of(0, 1, torch.float64)
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):  # The hooks change what they get: once each time.
            if isinstance(optimizer, cl.ZeroRedundancyOptimizer):
                optimizer.consolidate_state_dict()
                optimizer.state_dict()
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
        assert [*saved] == ["our state", "our param_groups"]
        loss_of(model, batch).backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in module.parameters()]

    module, options = make_model(torch.float64), {"lr": 0.1, "momentum": 0.9}
    plain = hooked(torch.optim.SGD(module.parameters(), **options), told)
    expected, in_torch = saved_and_loaded(module, module, plain), [*told]
    told.clear()
    model = cl.DistributedDataParallel(make_model(torch.float64), alone)
    ours = hooked(cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, **options), told)
    found = saved_and_loaded(model.module, model, ours)
    assert in_torch == ["save pre", "save post", "load pre", "load post"] * 2
    assert told == ["save pre", "save post", *in_torch[:4]] * 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
