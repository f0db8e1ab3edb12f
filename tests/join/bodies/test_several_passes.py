"""Several backward passes for one step, with uneven inputs: as in one process, or refused."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.combinations import combinations
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, make_model

Losses = Callable[[torch.nn.Module, torch.Tensor], Iterator[torch.Tensor]]


def once(model: torch.nn.Module, batch: torch.Tensor) -> Iterator[torch.Tensor]:
    yield model(batch).square().mean()


def two_losses(model: torch.nn.Module, batch: torch.Tensor) -> Iterator[torch.Tensor]:
    out = model(batch)
    yield out.square().mean()
    yield out.abs().mean()


def forward_twice(model: torch.nn.Module, batch: torch.Tensor) -> Iterator[torch.Tensor]:
    yield model(batch).square().mean()
    yield model(batch + 1).abs().mean()


def three(model: torch.nn.Module, batch: torch.Tensor) -> Iterator[torch.Tensor]:
    for shift in range(3):
        yield model(batch + shift).square().mean()


BODIES: dict[str, Losses] = {
    "two losses": two_losses,
    "forward twice": forward_twice,
    "three passes": three,
}


def train(
    group: cl.Group,
    lengths: tuple[int, ...],
    body: Losses,
    way: str,
    every: int = 1,
    by_initial: bool = True,
    epochs: int = 2,
    weigh: bool = False,
) -> Any:
    """way: "zero", "plain", "along" (a plain optimizer stepped along), "follow" (groups). every:
    batches for each step, accumulated without no_sync."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        options = {"lr": 0.1, "momentum": 0.9 if way in ("zero", "along", "follow") else 0.0}
        sharded = way in ("zero", "follow")
        optimizer: Any
        if sharded:
            optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, **options)
        else:
            optimizer = torch.optim.SGD(model.parameters(), **options)
        for _ in range(epochs):
            with cl.Join(
                [model, optimizer] if sharded else [model],
                step_along=[optimizer] if way == "along" else [],
                groups=[own.new_group(range(own.size))] if way == "follow" else [],
                divide_by_initial_world_size=by_initial,
                skew_warning=None,
            ):
                data = batches_of(own.rank, lengths[own.rank], torch.float64)
                for number, batch in enumerate(data):
                    for loss in body(model, batch):
                        if weigh:
                            loss = model.weigh(loss, own.rank + 1)
                        loss.backward(retain_graph=body is two_losses)
                    if (number + 1) % every == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]


def expected(
    lengths: tuple[int, ...],
    body: Losses,
    way: str,
    every: int = 1,
    by_initial: bool = True,
    epochs: int = 2,
    weigh: bool = False,
) -> list[torch.Tensor]:
    """The same in one process."""
    model = make_model(torch.float64)
    momentum = 0.9 if way in ("zero", "along", "follow") else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for _ in range(epochs):
        for step in range(max(lengths) // every):
            weights = 0.0
            for part in range(step * every, (step + 1) * every):
                live = [rank for rank, n in enumerate(lengths) if n > part]
                for rank in live:
                    batch = batches_of(rank, lengths[rank], torch.float64)[part]
                    divisor = len(lengths) if by_initial else len(live)
                    for loss in body(model, batch):
                        weights += rank + 1
                        factor = rank + 1 if weigh else 1 / divisor
                        (loss * factor).backward(retain_graph=body is two_losses)
            if weigh:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= weights
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@combinations(2, body=BODIES, way=["zero", "plain", "along", "follow"])
def test_a_joined_rank_takes_as_many_passes_as_the_others(ranks_of, body, way):
    for lengths in ((2, 5), (5, 5)):
        whole = expected(lengths, BODIES[body], way)
        for parameters in ranks_of(2).run(train, lengths, BODIES[body], way):
            assert largest_difference(parameters, whole) < 1e-14


@pytest.mark.parametrize("way", ["zero", "plain", "along"])
def test_accumulation_without_no_sync_is_exact(ranks_of, way):
    for lengths, by_initial in (((2, 6), True), ((2, 6), False), ((4, 2, 6), True)):
        args = lengths, once, way, 2, by_initial
        for parameters in ranks_of(len(lengths)).run(train, *args):
            assert largest_difference(parameters, expected(*args)) < 1e-14


@pytest.mark.parametrize("way", ["zero", "plain"])
def test_a_rank_without_any_batch_takes_them_too(ranks_of, way):
    for parameters in ranks_of(2).run(train, (0, 3), three, way):
        assert largest_difference(parameters, expected((0, 3), three, way)) < 1e-14


@pytest.mark.parametrize("way", ["zero", "plain"])
def test_weighed_losses_of_several_passes_give_the_mean_over_all_of_them(ranks_of, way):
    args = (2, 4), forward_twice, way, 1, True, 2, True
    for parameters in ranks_of(2).run(train, *args):
        assert largest_difference(parameters, expected(*args)) < 1e-14


def train_on_shards(group: cl.Group, keys: list[int], passes: list[int], way: str) -> Any:
    """Over shards that look ahead. passes: by batch number of the epoch; each is a step of its own
    with "steps", and they are one step with "zero" and "plain"."""
    with another_group(group) as own:
        torch.manual_seed(3)
        data = torch.randn(len(keys), 7, dtype=torch.float64)
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer: Any
        if way == "plain":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        joined = [model] if way == "plain" else [model, optimizer]
        before = own.statistics.snapshot()
        for _ in range(2):
            shard = cl.Shard(
                data, 1, rank=own.rank, world_size=own.size, shuffle=False, keep_together=keys
            )
            with cl.Join(joined, skew_warning=None):
                for number, batch in enumerate(shard):
                    for _ in range(passes[number]):
                        model(batch).square().mean().backward()
                        if way == "steps":
                            optimizer.step()
                            optimizer.zero_grad()
                    if way != "steps":
                        optimizer.step()
                        optimizer.zero_grad()
        operations = own.statistics.since(before).operations
        return [p.detach().clone() for p in model.parameters()], shard.hands, operations


def expected_on_shards(hands: list[list[int]], passes: list[int], way: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    data = torch.randn(sum(map(len, hands)), 7, dtype=torch.float64)
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for number in range(max(map(len, hands))):
            for _ in range(passes[number]):
                for hand in hands:
                    if number < len(hand):
                        loss = model(data[hand[number] : hand[number] + 1]).square().mean()
                        (loss / len(hands)).backward()
                if way == "steps":
                    optimizer.step()
                    optimizer.zero_grad()
            if way != "steps":
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("way", ["zero", "plain", "steps"])
def test_shards_that_look_ahead_do_so_with_several_passes(ranks_of, way):
    for keys, passes in (
        ([0] * 5 + [1] * 2, [2] * 5),
        ([0] * 5 + [1] * 2, [2, 1, 2, 3, 1]),
        ([0, 1], [3]),
    ):
        results = ranks_of(2).run(train_on_shards, keys, passes, way)
        whole = expected_on_shards(results[0][1], passes, way)
        for parameters, _, _ in results:
            assert largest_difference(parameters, whole) < 1e-14


def test_once_a_body_is_known_no_pass_is_shadowed_in_vain(ranks_of):
    keys, passes = [0] * 5 + [1] * 2, [2] * 5
    (_, _, operations), _ = ranks_of(2).run(train_on_shards, keys, passes, "plain")
    assert operations["all_reduce"] == 2 * 2 * 5


def grow_in_the_last_batch(group: cl.Group) -> str:
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        shard = cl.Shard(torch.randn(8, 7).double(), 1, rank=own.rank, world_size=own.size)
        try:
            with cl.Join([model]):
                for number, batch in enumerate(shard):
                    for _ in range(2 if number == 3 and own.rank == 0 else 1):
                        model(batch).square().mean().backward()
                        model.zero_grad()
            own.barrier().wait()
        except (RuntimeError, cl.GroupAborted) as error:
            return str(error)
        return ""


def test_a_pass_that_no_rank_waits_for_is_refused_by_name(ranks_of):
    for told in ranks_of(2).run(grow_in_the_last_batch):
        assert "the last batch of this epoch has more" in told and "groups=" in told


def skip_steps(group: cl.Group, way: str, clears: bool) -> Any:
    """No step for batch 3, which only one rank has."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer: Any
        if way == "zero":
            optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with cl.Join(
                [model, optimizer] if way == "zero" else [model],
                step_along=[optimizer] if way == "along" else [],
                skew_warning=None,
            ):
                data = batches_of(own.rank, (2, 6)[own.rank], torch.float64)
                for number, batch in enumerate(data):
                    model(batch).square().mean().backward()
                    if number != 3:
                        optimizer.step()
                    if number != 3 or clears:
                        optimizer.zero_grad()
        except RuntimeError as error:
            return str(error)
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("way", ["zero", "plain"])
def test_a_step_that_is_left_out_where_some_rank_has_joined_is_left_out(ranks_of, way, clears):
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate((2, 6))]
    for step in range(6):
        for batches in data:
            if step < len(batches):
                (model(batches[step]).square().mean() / 2).backward()
        if step != 3:
            optimizer.step()
        if step != 3 or clears:
            optimizer.zero_grad()
    for parameters in ranks_of(2).run(skip_steps, way, clears):
        assert largest_difference(parameters, list(model.parameters())) < 1e-14


@pytest.mark.parametrize("clears", [True, False])
def test_a_step_that_a_joined_rank_has_taken_alone_is_an_error_on_all(ranks_of, clears):
    for told in ranks_of(2).run(skip_steps, "along", clears):
        assert "have stepped: SGD on rank 0, none on rank 1" in told and "step_along" in told


def end_between(group: cl.Group, way: str) -> Any:
    """The last pass has no step, so none is taken; its gradients are cleared after the Join."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer: Any
        if way == "zero":
            optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        told = []
        for _ in range(2):
            with cl.Join(
                [model, optimizer] if way == "zero" else [model],
                step_along=[] if way == "zero" else [optimizer],
                skew_warning=None,
            ):
                data = batches_of(own.rank, (2, 5)[own.rank], torch.float64)
                for number, batch in enumerate(data):
                    model(batch).square().mean().backward()
                    if number % 2:
                        optimizer.step()
                        optimizer.zero_grad()
            optimizer.zero_grad()
            told.append([p.detach().clone() for p in model.parameters()])
        return told


@pytest.mark.parametrize("way", ["zero", "along"])
def test_a_pass_without_a_step_at_the_end_leaves_all_ranks_equal(ranks_of, way):
    first, second = ranks_of(2).run(end_between, way)
    model = make_model(torch.float64)
    momentum = 0.0 if way == "zero" else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate((2, 5))]
    for epoch in range(2):
        for step in range(5):
            for batches in data:
                if step < len(batches):
                    (model(batches[step]).square().mean() / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()
        for told in (first, second):
            assert largest_difference(told[epoch], list(model.parameters())) < 1e-14


def set_before_the_pass(
    group: cl.Group, lengths: tuple[int, ...], how: str
) -> tuple[list[torch.Tensor], str]:
    """Each rank puts a gradient of its own in the place of those of the pass before."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with cl.Join([model], step_along=[optimizer], skew_warning=None):
                for batch in batches_of(own.rank, lengths[own.rank], torch.float64):
                    set_gradients(model, own.rank, how)
                    model(batch).square().mean().backward()
                    optimizer.step()
        except RuntimeError as error:
            return [], str(error)
        return [p.detach().clone() for p in model.parameters()], ""


def set_gradients(model: torch.nn.Module, rank: int, how: str) -> None:
    for parameter in model.parameters():
        if how == "cleared first":
            parameter.grad = None
        if how == "some" and parameter.dim() == 1:
            parameter.grad = None
        else:
            parameter.grad = parameter.detach().sign() * (rank + 1) / 100


HOWS = ["cleared first", "replaced", "some"]


@pytest.mark.parametrize("how", HOWS)
def test_gradients_that_the_program_sets_before_a_pass_are_part_of_its_mean(
    ranks_of: Any, how: str
) -> None:
    model = make_model(torch.float64)
    for batches in zip(*(batches_of(rank, 3, torch.float64) for rank in range(2)), strict=True):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank, batch in enumerate(batches):
            set_gradients(model, rank, how)
            model(batch).square().mean().backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
        with torch.no_grad():
            for total, parameter in zip(sums, model.parameters(), strict=True):
                parameter -= 0.1 * total / 2
    for found, told in ranks_of(2).run(set_before_the_pass, (3, 3), how):
        assert told == ""
        assert all(map(torch.allclose, found, model.parameters()))


@pytest.mark.parametrize("how", HOWS)
def test_where_a_rank_has_no_data_gradients_that_the_program_sets_are_refused(
    ranks_of: Any, how: str
) -> None:
    for _, told in ranks_of(2).run(set_before_the_pass, (4, 2), how):
        assert "the program has set .grad to tensors of its own" in told
        assert "rank 1 has run out of data" in told and "step_along=[function]" in told


def step_along(
    group: cl.Group, lengths: tuple[int, ...], passes: list[int], follows_remedy: bool
) -> Any:
    """A step has passes[number] of them. Returns the parameters, or what was raised."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        try:
            with cl.Join([model], step_along=[optimizer], skew_warning=None):
                data = batches_of(own.rank, lengths[own.rank], torch.float64)
                for number, batch in enumerate(data):
                    for left in reversed(range(passes[number])):
                        alone = follows_remedy and left
                        with model.no_sync() if alone else contextlib.nullcontext():
                            model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except cl.CollectiveMismatch as error:
            return str(error)
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("lengths", "passes"),
    [((0, 3), [2, 2, 2]), ((3, 0), [3, 3, 3]), ((1, 4), [1, 2, 2, 2]), ((2, 4), [2, 2, 3, 1])],
)
def test_a_number_of_passes_that_a_rank_without_data_cannot_know_is_told_with_what_helps(
    ranks_of, lengths, passes
):
    for told in ranks_of(2).run(step_along, lengths, passes, False):
        assert isinstance(told, str) and "all passes of a step but the last one" in told, told
        assert "in the very first step after one" in told
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [batches_of(rank, length, torch.float64) for rank, length in enumerate(lengths)]
    for number in range(max(lengths)):
        for batches in data:
            if number < len(batches):
                (model(batches[number]).square().mean() * passes[number] / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in ranks_of(2).run(step_along, lengths, passes, True):
        assert largest_difference(parameters, list(model.parameters())) < 1e-12


def step_in_a_function(
    group: cl.Group, lengths: tuple[int, ...], passes: list[int], clears_first: bool
) -> Any:
    """A listed function steps. Returns the parameters, or what was raised, and how often it ran."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        num_calls = 0

        def step() -> None:
            nonlocal num_calls
            num_calls += 1
            optimizer.step()

        try:
            with cl.Join([model], step_along=[step], skew_warning=None):
                data = batches_of(own.rank, lengths[own.rank], torch.float64)
                for number, batch in enumerate(data):
                    if clears_first:
                        optimizer.zero_grad()
                    for _ in range(passes[number]):
                        model(batch).square().mean().backward()
                    step()
                    if not clears_first:
                        optimizer.zero_grad()
        except RuntimeError as error:
            return str(error), num_calls
        return [p.detach().clone() for p in model.parameters()], num_calls


@pytest.mark.parametrize("clears_first", [True, False])
def test_a_listed_function_steps_once_in_each_step_whatever_the_passes(ranks_of, clears_first):
    num_exact = 0
    for lengths in ((2, 1), (1, 2), (3, 2), (2, 2)):
        for passes in ([2, 1, 1], [1, 2, 1], [2, 2, 1], [3, 1, 2]):
            model = make_model(torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = [batches_of(rank, length, torch.float64) for rank, length in enumerate(lengths)]
            for number in range(max(lengths)):
                for batches in data:
                    if number < len(batches):
                        loss = model(batches[number]).square().mean()
                        (loss * passes[number] / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
            results = ranks_of(2).run(step_in_a_function, lengths, passes, clears_first)
            for parameters, num_calls in results:
                if isinstance(parameters, str):
                    assert "different number of backward passes" in parameters
                else:
                    assert num_calls == max(lengths), (lengths, passes)
                    assert largest_difference(parameters, list(model.parameters())) < 1e-12
                    num_exact += 1
    assert num_exact >= 16
