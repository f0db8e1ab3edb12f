"""Options that are set in the loop's body reach a rank without data, whatever holds the numbers."""

import copy
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model

OF_PAIR = {"betas": (0.5, 0.75), "eps": 0.125}
CHANGES = {
    "a whole number becomes a fraction": ({"weight_decay": 0}, {"weight_decay": 0.5}),
    "two whole numbers": ({"lr": 1, "momentum": 0}, {"lr": 0.25, "momentum": 0.5}),
    "numpy": ({"lr": np.float32(0.5)}, {"lr": np.float32(0.25)}),
    "a tensor that would round": ({"lr": torch.tensor(0.5)}, {"lr": 0.1}),
    "a pair becomes an array": (OF_PAIR, {"betas": np.array([0.25, 0.5])}),
    "a pair becomes a tensor": (OF_PAIR, {"betas": torch.tensor([0.25, 0.5]).double()}),
    "an array": (OF_PAIR | {"betas": np.array([0.5, 0.75])}, {"betas": np.array([0.25, 0.5])}),
    "max_norm, at once": ({"max_norm": None}, {"max_norm": 0.1}),
    "max_norm": ({"max_norm": 5.0}, {"max_norm": 0.1}),
}


def train(group, before, after, when, lengths):
    """before, after: options, and max_norm; the body sets them when it begins step `when`."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optim = cl.ZeroRedundancyOptimizer(model, kind_of(before), **{"lr": 0.1, **before})
        with cl.Join([model, optim], skew_warning=None):
            for number, batch in enumerate(batches_of(own.rank, lengths[own.rank], torch.float64)):
                if number == when:
                    options = dict(after)
                    optim.max_norm = options.pop("max_norm", optim.max_norm)
                    optim.param_groups[0].update(options)
                loss_of(model, batch).backward()
                optim.step()
                optim.zero_grad()
        return [p.detach().clone() for p in model.parameters()]


def kind_of(options):
    return torch.optim.AdamW if "betas" in options else torch.optim.SGD


def plain(options):
    """As Python's numbers, without max_norm."""
    return {
        name: tuple(map(float, value)) if name == "betas" else float(value)
        for name, value in options.items()
        if name != "max_norm"
    }


def in_one_process(before, after, when, lengths):
    model = make_model(torch.float64)
    optim = kind_of(before)(model.parameters(), **{"lr": 0.1, **plain(before)})
    max_norm = before.get("max_norm")
    for step in range(max(lengths)):
        if step == when:
            max_norm = after.get("max_norm", max_norm)
            optim.param_groups[0].update(plain(after))
        for rank, length in enumerate(lengths):
            if step < length:
                batch = batches_of(rank, length, torch.float64)[step]
                (loss_of(model, batch) / len(lengths)).backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optim.step()
        optim.zero_grad()
    return list(model.parameters())


def check(ranks_of, before, after, when, lengths):
    whole = in_one_process(before, after, when, lengths)
    # torch's own arithmetic with an option in float32 is in float32: lr * weight_decay, for one.
    held = [*before.values(), *after.values()]
    limit = 1e-6 if any(isinstance(value, np.float32) for value in held) else 1e-12
    for parameters in ranks_of(2).run(train, before, after, when, lengths):
        assert largest_difference(parameters, whole) < limit


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_rank_with_data_sets_reaches_the_shard_of_one_without(ranks_of, name):
    check(ranks_of, *CHANGES[name], 2, (2, 5))


def held(value):
    """A number as programs hold it; each of these is exact in all of them."""
    whole = [int(value)] if value == int(value) else []
    return st.sampled_from([*whole, value, np.float32(value), np.float64(value)])


NUMBERS = st.sampled_from([0.0, 0.25, 0.5, 1.0]).flatmap(held)
BETAS = st.sampled_from([0.5, 0.75, 0.875, np.float64(0.625)])  # Adam takes no other numbers.
OPTIONS = {
    "lr": NUMBERS,
    "weight_decay": NUMBERS,
    "max_norm": st.sampled_from([None, 0.125, 1, 4.0]),
}
OF_SGD = {**OPTIONS, "momentum": NUMBERS}
OF_ADAMW = {**OPTIONS, "betas": st.lists(BETAS, min_size=2, max_size=2) | st.tuples(BETAS, BETAS)}


@st.composite
def changes(draw):
    """The options of an optimizer, and those that the body sets."""
    names, always = draw(st.sampled_from([(OF_SGD, []), (OF_ADAMW, ["betas"])]))
    drawn = draw(st.lists(st.sampled_from(sorted(names)), unique=True))
    before = {name: draw(names[name]) for name in {*drawn, *always}}
    if "betas" in before:
        before["eps"] = 0.125  # Else rounding is divided by 1e-8 where a gradient is almost zero.
    after = {name: draw(names[name]) for name in draw(st.sets(st.sampled_from(sorted(names))))}
    return before, after


@given(changes(), st.integers(0, 4), st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(any))
def test_any_options_set_at_any_step_over_any_lengths_are_those_of_one_process(
    ranks_of, change, when, lengths
):
    check(ranks_of, *change, when, lengths)


def set_to(group, options):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1)
        loss_of(model, batches_of(own.rank, 1, torch.float64)[0]).backward()
        optim.param_groups[0].update(options)
        with pytest.raises(RuntimeError) as raised:
            optim.step()
        return str(raised.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"betas": (0.9,)}, "(betas: 1 in place of 2)"),
        ({"lr": "1e-3"}, "(lr: 0 in place of 1)"),
        (
            {"eps": None, "weight_decay": 1j},
            "(eps: 0 in place of 1, weight_decay: 0 in place of 1)",
        ),
    ],
)
def test_an_option_that_cannot_travel_is_named(ranks_of, options, named):
    assert all(named in told for told in ranks_of(2).run(set_to, options))


def set_on_rank_1(group, options):
    """options: None deletes one."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1)
        loss_of(model, batches_of(own.rank, 1, torch.float64)[0]).backward()
        for name, value in options.items() if own.rank == 1 else ():
            optim.param_groups[0][name] = value
            if value is None:
                del optim.param_groups[0][name]
        with pytest.raises((RuntimeError, cl.CollectiveError)) as raised:
            optim.step()
        return str(raised.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": float("nan")}, "lr of the optimizer is NaN on rank 1"),
        ({"betas": (0.9, np.float32("nan"))}, "betas of the optimizer is NaN on rank 1"),
        ({"lr": 10**400}, "lr is 0.1 on rank 0, inf on rank 1"),
        ({"lr": -torch.inf}, "lr is 0.1 on rank 0, -inf on rank 1"),
        ({"lr": np.float32(0.1)}, "lr is 0.1 on rank 0, 0.10000000149011612 on rank 1"),
        ({"params": None}, "have [0] parameters, and were given"),
    ],
)
def test_what_no_step_can_use_is_refused_where_it_is_set(ranks_of, options, named):
    told = ranks_of(2).run(set_on_rank_1, options)
    assert named in told[1]
    assert named in told[0] or "rank 1" in told[0]


def hold_by_rank(group, kind, by_rank, sharded):
    options = by_rank[group.rank]
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        try:
            if sharded:
                optim = cl.ZeroRedundancyOptimizer(model, kind, **options)
            else:
                optim = kind(model.parameters(), **options)
            for batch in batches_of(own.rank, 3, torch.float64):
                loss_of(model, batch).backward()
                optim.step()
                optim.zero_grad()
        except cl.CollectiveMismatch as error:
            return str(error)
        return ""


OF_MOMENTUM = {"lr": 0.1, "momentum": 0.5}
HELD = {
    "a flag, a number": (torch.optim.SGD, "nesterov", (True, 1), OF_MOMENTUM),
    "a number, numpy's flag": (torch.optim.SGD, "nesterov", (1, np.bool_(True)), OF_MOMENTUM),
    "whole, not whole": (torch.optim.SGD, "momentum", (0, 0.0), {"lr": 0.1}),
    "a list, a pair": (torch.optim.AdamW, "betas", ([0.5, 0.75], (0.5, np.float64(0.75))), {}),
    "a tensor": (torch.optim.AdamW, "lr", (0.5, torch.tensor(0.5)), {}),
}


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "plain"])
@pytest.mark.parametrize("name", HELD)
def test_an_option_is_the_same_whatever_holds_it_on_a_rank(ranks_of, name, sharded):
    kind, option, values, others = HELD[name]
    by_rank = [others | {option: value} for value in values]
    assert ranks_of(2).run(hold_by_rank, kind, by_rank, sharded) == ["", ""]


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "plain"])
def test_numbers_that_differ_are_written_so_that_they_differ(ranks_of, sharded):
    by_rank = [{"lr": 0.1}, {"lr": np.float32(0.1)}]
    *_, told = ranks_of(2).run(hold_by_rank, torch.optim.SGD, by_rank, sharded)
    assert "0.10000000149011612" in told


class Signed(torch.optim.Optimizer):
    """A step of a program's own, some of whose options are texts."""

    def __init__(self, params, lr=0.1, how=None, order=("sign", "scale")):
        super().__init__(params, {"lr": lr, "how": how, "order": order})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            is_signed = group["how"] in ("sign", b"sign") and group["order"][0] == "sign"
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * (p.grad.sign() if is_signed else p.grad))


def step_by_text(group, before, after, who, lengths, along):
    """who: the ranks whose bodies set an option after the second step. along: whether they do it in
    a function in step_along."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optim = cl.ZeroRedundancyOptimizer(model, Signed, **before)
        calls = []

        def set_option():
            calls.append(0)
            if len(calls) == 2 and own.rank in who:
                optim.param_groups[0].update(after)

        try:
            functions = [set_option] if along else []
            with cl.Join([model, optim], step_along=functions, skew_warning=None):
                for batch in batches_of(own.rank, lengths[own.rank], torch.float64):
                    loss_of(model, batch).backward()
                    optim.step()
                    set_option()
                    optim.zero_grad()
        except cl.CollectiveMismatch as error:
            return str(error)
        return [p.detach().clone() for p in model.parameters()]


def step_by_text_in_one_process(before, after, lengths):
    model = make_model(torch.float64)
    optim = Signed(model.parameters(), **before)
    for step in range(max(lengths)):
        for rank, length in enumerate(lengths):
            if step < length:
                batch = batches_of(rank, length, torch.float64)[step]
                (loss_of(model, batch) / len(lengths)).backward()
        optim.step()
        optim.param_groups[0].update(after if step == 1 else {})
        optim.zero_grad()
    return list(model.parameters())


TEXTS = {
    "None becomes a text": ({}, {"how": "sign"}, "how 'sign'"),
    "a text becomes None": ({"how": "sign"}, {"how": None}, "how None"),
    "another text": ({"how": "none"}, {"how": "sign"}, "how 'sign'"),
    "bytes": ({"how": b"none"}, {"how": b"sign"}, "how b'sign'"),
    "a tuple of texts": ({"how": "sign"}, {"order": ("scale", "sign")}, "'scale', order 'sign'"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_among_the_options_is_the_same_on_all_ranks_or_refused(ranks_of, name):
    before, after, named = TEXTS[name]
    for who, lengths, different in [
        ((0, 1), (5, 1), "rank 1"),
        ((0, 1), (1, 5), "rank 0"),
        ((0,), (4, 4), "rank 0"),
    ]:
        results = ranks_of(2).run(step_by_text, before, after, who, lengths, False)
        assert all(f"does not match on {different}: options" in told for told in results)
        assert sum(named in told for told in results) == 1
        assert all("call it after the step" in told for told in results)
    for lengths in [(5, 2), (2, 5), (4, 4)]:
        whole = step_by_text_in_one_process(before, after, lengths)
        for parameters in ranks_of(2).run(step_by_text, before, after, (0, 1), lengths, True):
            assert largest_difference(parameters, whole) < 1e-12


def warn_of_rate(group, rate):
    with another_group(group) as own, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        # Processes share a tensor that they are sent.
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=copy.deepcopy(rate))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
        with cl.Join([model, optim], skew_warning=None):
            for batch in batches_of(own.rank, 2 + 2 * own.rank, torch.float64):
                loss_of(model, batch).backward()
                optim.step()
                optim.zero_grad()
                schedule.step()
        return [str(one.message) for one in told]


@pytest.mark.parametrize(
    "rate", [0.5, torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5), np.array(0.5)]
)
def test_a_rate_of_a_schedule_that_is_not_listed_is_told_whatever_holds_it(ranks_of, rate):
    joined, live = ranks_of(2).run(warn_of_rate, rate)
    assert live == []
    (one,) = joined
    assert "with data has become 0.0625, and rank 0, which has run out of data, had 0.125" in one
