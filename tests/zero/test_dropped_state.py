"""A program that drops the state of a sharded optimizer, as between two phases, begins anew with it
on all ranks, also on one without data; what a rank cannot do to the state it is told."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model

DTYPE = torch.float64
Change = Callable[[Any, torch.nn.Module], object]


def assign(optim: Any, _: torch.nn.Module) -> None:
    optim.state = defaultdict(dict)


def delete(optim: Any, module: torch.nn.Module) -> None:
    for parameter in module[2].parameters():  # type: ignore[index]
        if parameter in optim.state:
            del optim.state[parameter]


def set_each(optim: Any, module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        optim.state[parameter] = {}


def pop(optim: Any, module: torch.nn.Module) -> None:
    optim.state.pop(next(module.parameters()), None)


def clear_values(optim: Any, _: torch.nn.Module) -> None:
    for state in optim.state.values():
        state.clear()


def clear(optim: Any, _: torch.nn.Module) -> None:
    optim.state.clear()
    assert not optim.state


def look(optim: Any, _: torch.nn.Module) -> None:
    """As Lightning does, which moves the tensors of the state to a device."""
    for parameter, state in optim.state.items():
        optim.state[parameter] = state


DROPS: list[Change] = [clear, assign, delete, set_each, pop, clear_values, look]


def train(
    group: cl.Group | None,
    change: Change,
    lengths: Sequence[int],
    is_at_end: bool,
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Two epochs. The state is changed in batches 1 and 4 of the first one, at their beginning or
    end, and after it. group: None: in one process, over the batches of all ranks."""
    module = make_model(DTYPE)
    model: Any = module
    if group is None:
        optim: Any = kind(module.parameters(), lr=0.05)
        data = [batches_of(rank, length, DTYPE) for rank, length in enumerate(lengths)]
    else:
        model = cl.DistributedDataParallel(module, group, bucket_cap_mb=1e-4)
        optim = cl.ZeroRedundancyOptimizer(model, kind, lr=0.05, **(options or {}))
        data = [batches_of(group.rank, lengths[group.rank], DTYPE)]
    for epoch in range(2):
        join = cl.Join([model, optim], skew_warning=None) if group else contextlib.nullcontext()
        with join:
            for number in range(max(map(len, data))):
                if (is_due := epoch == 0 and number in (1, 4)) and not is_at_end:
                    change(optim, module)
                for batches in data:
                    if number < len(batches):
                        loss = loss_of(model, batches[number])
                        (loss / (1 if group else len(data))).backward()
                optim.step()
                optim.zero_grad()
                if is_due and is_at_end:
                    change(optim, module)
        if epoch == 0:
            change(optim, module)
    return [parameter.detach().clone() for parameter in module.parameters()]


def on_ranks(group: cl.Group, *args: Any) -> Any:
    with another_group(group) as own:
        try:
            return train(own, *args)
        except (RuntimeError, cl.CollectiveMismatch) as error:
            return str(error)


def drop_in_all_ways(group: cl.Group, lengths: Sequence[int]) -> list[Any]:
    with another_group(group) as own:
        return [
            train(own, change, lengths, is_at_end, torch.optim.Adam, options)
            for change in DROPS
            for is_at_end, options in PLACES
        ]


PLACES: list[tuple[bool, dict[str, Any]]] = [(False, {}), (True, {"check_every": 1, "replicas": 2})]


@pytest.mark.parametrize("lengths", [pytest.param((4, 4), marks=pytest.mark.slow), (5, 3), (0, 2)])
def test_state_that_is_dropped_is_gone_on_all_ranks(ranks_of, lengths):
    cases = [(change, is_at_end) for change in DROPS for is_at_end, _ in PLACES]
    results = ranks_of(2).run(drop_in_all_ways, lengths)
    for (change, is_at_end), *by_rank in zip(cases, *results, strict=True):
        expected = train(None, change, lengths, is_at_end, torch.optim.Adam)
        for found in by_rank:
            assert largest_difference(found, expected) < 1e-12, (change, is_at_end)


def test_optimizers_that_keep_parameters_whole_begin_anew_too(ranks_of):
    expected = train(None, clear, (5, 3), False, torch.optim.Adafactor)
    for found in ranks_of(2).run(on_ranks, clear, (5, 3), False, torch.optim.Adafactor):
        assert not isinstance(found, str), found
        assert largest_difference(found, expected) < 1e-12


def read(optim: Any, module: torch.nn.Module) -> None:
    optim.state[next(module.parameters())]["exp_avg"].zero_()


def read_each(optim: Any, _: torch.nn.Module) -> None:
    for state in optim.state.values():
        state.get("exp_avg").zero_()


def write(optim: Any, module: torch.nn.Module) -> None:
    optim.state[next(module.parameters())] = {"step": torch.tensor(0.0)}


@pytest.mark.parametrize("change", [read, read_each, write])
def test_what_a_rank_has_no_state_for_is_refused_with_the_remedies(ranks_of, change):
    for told in ranks_of(2).run(on_ranks, change, (4, 4), False, torch.optim.Adam):
        assert "state of a ZeroRedundancyOptimizer is in shards" in told
        assert "optimizer.state.clear()" in told and "load_state_dict()" in told


def load(optim: Any, module: torch.nn.Module) -> None:
    """As before the first step."""
    fresh = torch.optim.Adam(module.parameters(), lr=0.05)
    optim.load_state_dict(fresh.state_dict())


def test_a_state_that_is_loaded_counts_where_every_rank_loads_it(ranks_of):
    for is_at_end in (False, True):
        expected = train(None, load, (4, 4), is_at_end, torch.optim.Adam)
        for found in ranks_of(2).run(on_ranks, load, (4, 4), is_at_end, torch.optim.Adam):
            assert largest_difference(found, expected) < 1e-12
        first, second = ranks_of(2).run(on_ranks, load, (5, 3), is_at_end, torch.optim.Adam)
        assert first == second and "0 dropped, 1 loaded on rank 0" in first, first
        assert "call load_state_dict() before or after the Join" in first


def drop_on_one(group: cl.Group) -> str:
    def change(optim: Any, module: torch.nn.Module) -> None:
        if group.rank:
            clear(optim, module)

    return str(on_ranks(group, change, (4, 4), False, torch.optim.Adam))


def test_state_that_one_rank_drops_is_named(ranks_of):
    for told in ranks_of(2).run(drop_on_one):
        assert "on rank 1" in told and "4 dropped, 0 loaded on rank 1" in told, told
