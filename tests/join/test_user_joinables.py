"""Joinables of the user's own: hooks, arguments, notifications, and the word about skew."""

import asyncio
import time
import warnings

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.joinables import CountingJoinable


def count_with_own_joinable(group, lengths):
    joinable = CountingJoinable(group)
    with cl.Join([joinable], color="blue"):
        for _ in range(lengths[group.rank]):
            joinable.step()
    return joinable.total.item(), joinable.calls


@pytest.mark.parametrize("lengths", [(2, 5), (3, 3), (0, 1), (4, 1, 2)])
def test_main_hook_runs_once_per_step_that_some_rank_still_takes(ranks_of, lengths):
    results = ranks_of(len(lengths)).run(count_with_own_joinable, lengths)
    steps = max(lengths)
    for rank, (total, calls) in enumerate(results):
        alive = [sum(step < n for n in lengths) for step in range(lengths[rank])]
        assert total == sum(alive)
        post = ("post", lengths[rank] == steps, {"color": "blue"})
        assert calls == ["main"] * (steps - lengths[rank]) + [post]


def beside_a_plain_optimizer(group, counts_first):
    """A joinable and a model whose optimizer ranks without data step along."""
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(3, 2).double(), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counter = CountingJoinable(group)
    listed = [counter, model] if counts_first else [model, counter]
    with cl.Join(listed, step_along=[optimizer], skew_warning=None):
        for number in range((1, 4)[group.rank]):
            optimizer.zero_grad()
            if counts_first:
                counter.step()
            model(torch.full((1, 3), 1.0 + number).double()).square().sum().backward()
            if not counts_first:
                counter.step()
            optimizer.step()
    weight = model.module.weight
    return weight.detach(), optimizer.state[weight]["momentum_buffer"], counter.calls


@pytest.mark.parametrize("counts_first", [True, False])
def test_optimizers_are_stepped_along_beside_joinables_of_the_users_own(ranks_of, counts_first):
    early, late = ranks_of(2).run(beside_a_plain_optimizer, counts_first)
    assert early[2].count("main") == 3 and late[2].count("main") == 0
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        optimizer.zero_grad()
        # Both ranks have the first batch, and one of two the others.
        share = 1.0 if number == 0 else 0.5
        (net(torch.full((1, 3), 1.0 + number).double()).square().sum() * share).backward()
        optimizer.step()
    for weight, momentum, _ in (early, late):
        torch.testing.assert_close(weight, net.weight.detach())
        torch.testing.assert_close(momentum, optimizer.state[net.weight]["momentum_buffer"])


def called_along(group, lengths, follows):
    """A function beside a joinable that records no agreement. How often it has run on this rank."""
    joinable, calls = CountingJoinable(group), []
    groups = [group.new_group(range(group.size))] if follows else []

    def call():
        calls.append(1)

    with cl.Join([joinable], step_along=[call], groups=groups, skew_warning=None):
        for _ in range(lengths[group.rank]):
            joinable.step()
            call()
    for each in groups:
        each.close()
    return len(calls)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("lengths", [(1, 4), (0, 2, 1), (3, 3)])
def test_what_steps_along_with_joinables_of_the_users_own_alone_runs_in_each_step(
    ranks_of, lengths, follows
):
    size = len(lengths)
    assert ranks_of(size).run(called_along, lengths, follows) == [max(lengths)] * size


def throw_early(group, lengths):
    with another_group(group) as own:
        joinable, told = CountingJoinable(own), ""
        try:
            with cl.Join([joinable], throw_on_early_termination=True):
                for _ in range(lengths[own.rank]):
                    joinable.step()
        except RuntimeError as error:
            told = str(error)
        return joinable.total.item(), joinable.calls, told


@pytest.mark.parametrize(
    ("lengths", "exhausted"), [((2, 5), "rank 0"), ((3, 1), "rank 1"), ((1, 3, 1), "ranks [0, 2]")]
)
def test_joinables_of_the_users_own_end_at_one_step_where_a_join_throws(
    ranks_of, lengths, exhausted
):
    size, fewest = len(lengths), min(lengths)
    for total, calls, told in ranks_of(size).run(throw_early, lengths):
        assert total == size * fewest and calls == [], "no rank shadows"
        assert f"exhausted inputs: {exhausted}. Every rank raises" in told
    assert ranks_of(2).run(throw_early, (2, 2)) == [(4.0, [("post", True, {})], "")] * 2


def warned_of_skew(group, lengths, options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        joinable = CountingJoinable(group)
        with cl.Join([joinable], **options):
            for _ in range(lengths[group.rank]):
                joinable.step()
    return [f"{warning.filename}: {warning.message}" for warning in caught]


def test_skew_past_the_threshold_is_told_once_with_the_numbers_of_all_ranks(ranks_of):
    for options in ({}, {"skew_warning": 0.5}):  # A half is the default.
        others, told = ranks_of(2).run(warned_of_skew, (2, 8), options)
        assert len(told) == 1 and others == []
        assert "60%" in told[0] and "rank 0: 2, rank 1: 5" in told[0]
        assert "joinables.py: " in told[0], "the line that takes the step"
        assert ranks_of(2).run(warned_of_skew, (5, 8), options) == [[], []]
    assert ranks_of(2).run(warned_of_skew, (2, 8), {"skew_warning": None}) == [[], []]


def warned_in_one_join_entered_twice(group):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        joinable, told = CountingJoinable(group), []
        epochs = cl.Join([joinable])
        for _ in range(2):
            with epochs:
                for _ in range((2, 8)[group.rank]):
                    joinable.step()
            told.append([str(warning.message) for warning in caught])
            caught.clear()
    return told


def test_one_join_around_each_epoch_counts_from_its_beginning(ranks_of):
    others, (first, second) = ranks_of(2).run(warned_in_one_join_entered_twice)
    assert others == [[], []]
    assert len(first) == 1 and "rank 0: 2, rank 1: 5" in first[0]
    assert second == first


def steps_when_warned(group, sharded):
    """Of a model and its optimizer: how many steps this rank had begun at each warning."""
    model = cl.DistributedDataParallel(torch.nn.Linear(2, 2), group)
    if sharded:
        optim = cl.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        join = cl.Join([model, optim], skew_warning=0.25)
    else:
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        join = cl.Join([model], step_along=[optim], skew_warning=0.25)
    begun, told = 0, []

    def note(message, _category, path, *_more):
        told.append((begun, f"{path}: {message}"))

    with warnings.catch_warnings(), join:
        warnings.simplefilter("always")
        warnings.showwarning = note
        for _ in range((9, 3, 9)[group.rank]):
            begun += 1
            model(torch.ones(1, 2)).sum().backward()
            optim.step()
    return told


@pytest.mark.parametrize("sharded", [False, True])
def test_a_loop_is_told_of_skew_at_the_step_that_passes_the_threshold(ranks_of, sharded):
    told, *others = ranks_of(3).run(steps_when_warned, sharded)
    # After four steps the share is exactly a quarter, and not more.
    assert [begun for begun, _ in told] == [5]
    assert "40% of the steps so far (rank 0: 5, rank 1: 3, rank 2: 5)" in told[0][1]
    assert told[0][1].startswith(__file__)
    assert others == [[], []]


class Telling(CountingJoinable):
    """Notes what is done to it in a list that several share."""

    def __init__(self, group, name, told):
        super().__init__(group)
        self.name, self.told = name, told

    def join_hook(self, **kwargs):
        outer, inner = self, super().join_hook(**kwargs)
        outer.told.append((outer.name, kwargs))

        class Hook(cl.JoinHook):
            def main_hook(self):
                outer.told.append(f"{outer.name} main")
                inner.main_hook()

            def post_hook(self, is_last_joiner):
                outer.told.append(f"{outer.name} post {is_last_joiner}")

        return Hook()


async def two_with_one_set_of_arguments(group, lengths):
    told = []
    first, second = Telling(group, "first", told), Telling(group, "second", told)
    async with cl.Join([first, second], shape="round", size=3):
        for _ in range(lengths[group.rank]):
            first.step()
            second.step()
    return told, first.total.item(), second.total.item(), first._join


def run_two(group, lengths):
    return asyncio.run(two_with_one_set_of_arguments(group, lengths))


def test_all_hooks_get_the_same_arguments_and_run_in_the_order_given(ranks_of):
    same = {"shape": "round", "size": 3}
    made = [("first", same), ("second", same)]
    (early, *_), (late, one, other, join) = ranks_of(2).run(run_two, (1, 3))
    assert early == [
        *made,
        *["first main", "second main"] * 2,
        "first post False",
        "second post False",
    ]
    assert late == [*made, "first post True", "second post True"]
    assert one == other == 1 + 1 + 2 and join is None


def notifications(group):
    first, second = CountingJoinable(group), CountingJoinable(group)
    outside = cl.Join.notify_join_context(first)
    with cl.Join([first, second]):
        before = group.statistics.snapshot()
        work = cl.Join.notify_join_context(first)
        nothing = cl.Join.notify_join_context(second)
        sent = group.statistics.since(before).operations
        for _ in range(2):  # What the hooks of a rank without data would meet.
            group.all_reduce(torch.ones(1)).wait()
    with cl.Join([first], enable=False):
        disabled = cl.Join.notify_join_context(first)
    return outside, work.is_completed(), work.result().tolist(), nothing, sent, disabled


def test_the_first_joinables_notification_is_one_small_all_reduce(ranks_of):
    for told in ranks_of(2).run(notifications):
        assert told == (None, True, [1, 1], None, {"all_reduce": 1}, None)


def raise_at_the_second_step(group):
    told = []
    with another_group(group) as own:
        joinable = Telling(own, "it", told)
        try:
            with cl.Join([joinable]):
                joinable.step()
                if own.rank == 1:
                    raise KeyError("no such column")
        except (KeyError, cl.GroupAborted) as error:
            told.append(type(error).__name__)
    return told


def test_an_exception_skips_the_hooks_that_end_a_join(ranks_of):
    peer, culprit = ranks_of(2).run(raise_at_the_second_step)
    assert culprit == [("it", {}), "KeyError"]
    assert peer[-1] == "GroupAborted" and not any("post" in str(line) for line in peer)


async def raise_in_an_async_body(group, told):
    with another_group(group) as own:
        joinable, began = Telling(own, "it", told), time.monotonic()
        try:
            async with cl.Join([joinable]):
                joinable.step()
                if own.rank == 1:
                    raise KeyError("no such column")
        except (KeyError, cl.GroupAborted) as error:
            told.append(f"{type(error).__name__}: {error}")
        group.barrier().wait()  # Closing would free the peer, too.
        return told, time.monotonic() - began


def run_and_raise(group):
    return asyncio.run(raise_in_an_async_body(group, []))


def test_an_exception_in_an_async_body_frees_the_peers_and_skips_the_hooks(ranks_of):
    (peer, seconds), (culprit, _) = ranks_of(2).run(run_and_raise)
    assert culprit == [("it", {}), "KeyError: 'no such column'"]
    assert "by rank 1" in peer[-1] and "no such column" in peer[-1]
    assert not any("post" in str(line) for line in peer) and seconds < 10


def test_torchs_name_for_the_group_of_a_joinable_is_told_what_it_is_called_here() -> None:
    def of_torch(self: object) -> None: ...

    with pytest.raises(TypeError, match="call it join_group here, and return a chorusline Group"):
        type("Counter", (cl.Joinable,), {"join_process_group": property(of_torch)})
