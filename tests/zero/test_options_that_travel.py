"""Options that are set in the loop's body reach a rank without data, whatever holds the numbers."""

import numpy as np
import pytest
import torch

import chorusline as cl
from tests.harness.standing_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model

CHANGES = {
    "a whole number becomes a fraction": ({"weight_decay": 0}, {"weight_decay": 0.5}),
    "two whole numbers": ({"lr": 1, "momentum": 0}, {"lr": 0.25, "momentum": 0.5}),
    "numpy": ({"lr": np.float32(0.5)}, {"lr": np.float32(0.25)}),
    "max_norm, at once": ({"max_norm": None}, {"max_norm": 0.1}),
    "max_norm": ({"max_norm": 5.0}, {"max_norm": 0.1}),
}


def train(group, name, lengths):
    with another_group(group) as own:
        before, after = CHANGES[name]
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, **{"lr": 0.1, **before})
        with cl.Join([model, optim], skew_warning=None):
            for number, batch in enumerate(batches_of(own.rank, lengths[own.rank], torch.float64)):
                if number == 2:
                    for option, value in after.items():
                        if option == "max_norm":
                            optim.max_norm = value
                        else:
                            optim.param_groups[0][option] = value
                loss_of(model, batch).backward()
                optim.step()
                optim.zero_grad()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_rank_with_data_sets_reaches_the_shard_of_one_without(ranks_of, name):
    lengths = (2, 5)
    before, after = ({"max_norm": None, **one} for one in CHANGES[name])
    model = make_model(torch.float64)
    max_norm = before.pop("max_norm")
    optim = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **before})
    for step in range(max(lengths)):
        if step == 2:
            max_norm = after.pop("max_norm")
            optim.param_groups[0].update({k: float(np.asarray(v).item()) for k, v in after.items()})
        for rank, length in enumerate(lengths):
            if step < length:
                batch = batches_of(rank, length, torch.float64)[step]
                (loss_of(model, batch) / 2).backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optim.step()
        optim.zero_grad()
    for parameters in ranks_of(2).run(train, name, lengths):
        assert largest_difference(parameters, list(model.parameters())) < 1e-12


def refuse(group, what):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        betas = [0.9, 0.95 if what == "constructor" and own.rank else 0.99]
        try:
            optim = cl.ZeroRedundancyOptimizer(model, torch.optim.Adam, lr=0.1, betas=betas)
            if what == "max_norm":
                optim.max_norm = 1.0 + own.rank
            if what == "length":
                optim.param_groups[0]["betas"] = [0.9]
            loss_of(model, torch.randn(3, 7)).backward()
            optim.step()
        except (RuntimeError, cl.CollectiveError) as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("constructor", "betas"),
        ("max_norm", "max_norm is 1 on rank 0, 2 on rank 1"),
        ("length", "number of entries"),
    ],
)
def test_options_that_differ_or_change_their_length_are_refused_by_name(ranks_of, what, told):
    assert all(told in text for text in ranks_of(2).run(refuse, what))
