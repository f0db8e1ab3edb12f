"""Collectives of the loop's own while ranks run out of data: neutral elements, and refusals."""

import itertools
import time

import pytest
import torch

import chorusline as cl
from chorusline.collectives.contract.dtypes import DTYPES
from chorusline.collectives.contract.operation import UNEVEN, Kind
from chorusline.collectives.neutral import neutral_element, take_part, why_not_without
from chorusline.runtime.data_parallel.distributed_data_parallel import engine_of
from tests.harness.reused_ranks import another_group
from tests.references.joinables import CountingJoinable
from tests.references.training import batches_of, loss_of, make_model

_REDUCTIONS = [op for op in cl.ReduceOp if op is not cl.ReduceOp.AVG]
_BITS = (cl.ReduceOp.BAND, cl.ReduceOp.BOR, cl.ReduceOp.BXOR)


def values_of(rank, dtype, count=6):
    numbers = torch.arange(1, count + 1) * (rank + 2) % 5 - (0 if dtype is torch.uint8 else 2)
    return (numbers % 2).bool() if dtype is torch.bool else numbers.to(dtype)


def applies(op, dtype):
    if op in _BITS:
        return not (dtype.is_floating_point or dtype.is_complex)
    if dtype.is_complex:
        return op in (cl.ReduceOp.SUM, cl.ReduceOp.PREMUL_SUM)
    return not (op is cl.ReduceOp.PREMUL_SUM and dtype is torch.bool)


def reduced_without_the_last(group, pair):
    """Every reduction of every dtype: ranks 0 and 1 with data, rank 2 with nothing; and the same
    between two ranks alone."""
    wrong, count = [], 0
    for op, dtype in itertools.product(_REDUCTIONS, DTYPES):
        if not applies(op, dtype):
            continue
        count += 1
        factor = 2 if op is cl.ReduceOp.PREMUL_SUM else None
        index = DTYPES.index(dtype)
        if group.rank == 2:
            take_part(group, Kind.ALL_REDUCE, 6, index, op)
            take_part(group, Kind.REDUCE, 6, index, 16 * 1 + op)
            take_part(group, Kind.REDUCE_SCATTER, 6, index, op)
            continue
        expected = values_of(group.rank, dtype)
        pair.all_reduce(expected, op, factor=factor).wait()
        whole, rooted, part = (values_of(group.rank, dtype) for _ in range(3))
        group.all_reduce(whole, op, factor=factor).wait()
        group.reduce(rooted, 1, op, factor=factor).wait()
        out = part[:2].clone()
        group.reduce_scatter(out, part, op, factor=factor).wait()
        mine = slice(2 * group.rank, 2 * group.rank + 2)
        if not torch.equal(whole, expected) or not torch.equal(out, expected[mine]):
            wrong.append((op, dtype, whole, expected))
        if group.rank == 1 and not torch.equal(rooted, expected):
            wrong.append((op, dtype, "reduce", rooted, expected))
    return wrong, count


def neutral_reductions(group):
    pair = group.new_group([0, 1])
    return reduced_without_the_last(group, pair)


def test_a_rank_without_data_changes_no_reduction(ranks_of):
    results = ranks_of(3).run(neutral_reductions)
    assert [wrong for wrong, _ in results] == [[], [], []]
    assert {count for _, count in results} == {
        len([1 for op in _REDUCTIONS for d in DTYPES if applies(op, d)])
    }
    with pytest.raises(ValueError, match="AVG counts the ranks"):
        neutral_element(cl.ReduceOp.AVG, torch.float32)


def infinite_reductions(group):
    """The least and the greatest of infinities, while rank 2 has nothing."""
    found = []
    for op, infinity in ((cl.ReduceOp.MIN, torch.inf), (cl.ReduceOp.MAX, -torch.inf)):
        for dtype in DTYPES:
            if not dtype.is_floating_point:
                continue
            if group.rank == 2:
                take_part(group, Kind.ALL_REDUCE, 2, DTYPES.index(dtype), op)
                continue
            value = torch.tensor([infinity, 1.0], dtype=dtype)
            group.all_reduce(value, op).wait()
            found.append((dtype, value.tolist() == [infinity, 1.0]))
    return found


def test_a_rank_without_data_leaves_infinities_as_they_are(ranks_of):
    first, second, _ = ranks_of(3).run(infinite_reductions)
    assert first == second and len(first) >= 8
    assert all(kept for _, kept in first), first


def exchange_parts(group, lengths):
    """Scatter and all_to_all in each batch: to and from a rank without data nothing."""
    beside = group.new_group(range(group.size))
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    seen = []
    with cl.Join([model], groups=[beside], skew_warning=None) as join:
        for batch in batches_of(group.rank, lengths[group.rank], torch.float64):
            loss_of(model, batch).backward()
            live = join.live_ranks
            sizes = [2 * (rank in live) for rank in range(group.size)]
            part = torch.zeros(2)
            parts = [torch.full((n,), 1.0 + rank) for rank, n in enumerate(sizes)]
            root = min(live)
            beside.scatter(part, parts if group.rank == root else None, root).wait()
            got = [torch.zeros(n) for n in sizes]
            beside.all_to_all(got, [torch.full((n,), 1.0 + group.rank) for n in sizes]).wait()
            seen.append((live, part.tolist(), [one.tolist() for one in got]))
    beside.close()
    return seen


@pytest.mark.parametrize("lengths", [(1, 3, 2), (2, 0, 2)])
def test_parts_go_to_and_come_from_the_ranks_that_have_data(ranks_of, lengths):
    for rank, seen in enumerate(ranks_of(3).run(exchange_parts, lengths)):
        assert len(seen) == lengths[rank]
        for step, (live, part, got) in enumerate(seen):
            assert live == tuple(r for r, n in enumerate(lengths) if step < n)
            assert part == [1.0 + rank] * 2
            assert got == [[1.0 + r] * 2 if r in live else [] for r in range(3)]


def evaluate(group, lengths):
    beside = group.new_group(range(group.size))
    model = cl.DistributedDataParallel(make_model(torch.float64), group).eval()
    seen = []
    with torch.no_grad(), cl.Join([model], groups=[beside], skew_warning=None) as join:
        for batch in batches_of(group.rank, lengths[group.rank], torch.float64):
            model(batch)
            count = torch.ones(1)
            beside.all_reduce(count).wait()
            seen.append((int(count), join.live_ranks))
    beside.close()
    return seen


@pytest.mark.parametrize("lengths", [(2, 4), (3, 0, 1)])
def test_an_evaluation_may_use_a_group_that_a_join_follows(ranks_of, lengths):
    for rank, seen in enumerate(ranks_of(len(lengths)).run(evaluate, lengths)):
        live = [tuple(r for r, n in enumerate(lengths) if step < n) for step in range(max(lengths))]
        assert seen == [(len(ranks), ranks) for ranks in live[: lengths[rank]]]


def reduce_after_early_termination(group):
    """Rank 0 is known to be out of data when the Join ends."""
    with another_group(group) as own:
        beside = own.new_group(range(own.size))
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        with (
            pytest.raises(RuntimeError, match="exhausted inputs: rank 0"),
            cl.Join([model], throw_on_early_termination=True, groups=[beside]),
        ):
            for batch in batches_of(own.rank, 1 + own.rank, torch.float64):
                loss_of(model, batch).backward()
        before, mean = beside.statistics.snapshot(), torch.tensor([own.rank + 1.0])
        beside.all_reduce(mean, cl.ReduceOp.AVG).wait()
        return mean.item(), beside.statistics.since(before).operations


def test_a_join_that_is_over_follows_no_group(ranks_of):
    for mean, operations in ranks_of(2).run(reduce_after_early_termination):
        assert mean == 1.5 and operations == {"all_reduce": 1}


def train(group, lengths, looks_ahead):
    """Collectives before, between and after the passes; ranks have different numbers of batches."""
    beside, second = group.new_group([0, 1, 2]), group.new_group([0, 1, 2])
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = batches_of(group.rank, lengths[group.rank], torch.float64)
    if looks_ahead:
        keys = [rank for rank, n in enumerate(lengths) for _ in range(n)]
        everything = [b for r, n in enumerate(lengths) for b in batches_of(r, n, torch.float64)]
        data = cl.Shard(
            everything,
            1,
            rank=group.rank,
            world_size=3,
            shuffle=False,
            keep_together=keys,
            collate_fn=lambda items: items[0],
        )
    else:
        data = batches
    seen = []
    with cl.Join(
        [model], step_along=[optimizer], groups=[beside, second], skew_warning=None
    ) as join:
        for number, batch in enumerate(data):
            loss = loss_of(model, batch)
            largest = loss.detach().clone().view(1)
            work = second.all_reduce(largest, cl.ReduceOp.MAX)
            count = torch.ones(1, dtype=torch.int64)
            beside.all_reduce(count).wait()
            work.wait()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            root = min(join.live_ranks)
            first = loss.detach().clone().view(1)
            beside.broadcast(first, root).wait()
            rows = torch.zeros(3, 2, dtype=torch.float64)
            second.all_gather(rows, torch.tensor([loss.item(), 1.0]).double()).wait()
            parts = [torch.zeros(1 if r in join.live_ranks else 0).double() for r in range(3)]
            beside.gather(loss.detach().view(1), parts if group.rank == root else None, root).wait()
            if number % 2:  # As often as the loop likes.
                beside.barrier().wait()
            seen.append(
                (
                    count.item(),
                    largest.item(),
                    first.item(),
                    rows,
                    parts,
                    join.live_ranks,
                    loss.item(),
                )
            )
    beside.close()
    second.close()
    return seen, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("looks_ahead", [True, False], ids=["shard", "list"])
@pytest.mark.parametrize("lengths", [(5, 2, 4), (1, 6, 6)])
def test_collectives_of_the_body_are_over_the_ranks_that_have_data(ranks_of, lengths, looks_ahead):
    if looks_ahead:
        lengths = tuple(sorted(lengths, reverse=True))
    results = ranks_of(3).run(train, lengths, looks_ahead)
    for step in range(max(lengths)):
        live = tuple(rank for rank, n in enumerate(lengths) if step < n)
        losses = [results[rank][0][step][-1] for rank in live]
        for rank in live:
            count, largest, first, rows, parts, told, _ = results[rank][0][step]
            assert count == len(live) and told == live
            assert largest == max(losses) and first == losses[0]
            expected = torch.zeros(3, 2).double()
            for r, loss in zip(live, losses, strict=True):
                expected[r] = torch.tensor([loss, 1.0]).double()
            assert torch.equal(rows, expected)
            if rank == live[0]:
                assert torch.cat(parts).tolist() == losses
    for _, parameters in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][1], strict=True))


def refused(group, what):
    """Rank 0 runs out of data first; what the others are told."""
    with another_group(group) as own:
        beside = own.new_group([0, 1])
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        x = torch.ones(2)
        calls = {
            "avg": lambda: beside.all_reduce(x, cl.ReduceOp.AVG).wait(),
            "root": lambda: beside.broadcast(x, 0).wait(),
            "root of a sum": lambda: beside.reduce(x, 0).wait(),
            "message": lambda: beside.send(x, 0).wait(),
            "object": lambda: beside.all_gather_object(1).wait(),
            "coalesced": lambda: beside.coalesce(),
            "sizes": lambda: beside.all_gather([x[:1], x], x).wait(),
        }
        try:
            with cl.Join([model], groups=[beside]) as join:
                for batch in batches_of(own.rank, 1 + own.rank, torch.float32):
                    loss_of(model, batch).backward()
                    if len(join.live_ranks) < 2:
                        calls[what]()
        except (RuntimeError, cl.GroupAborted) as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("avg", "AVG counts them; use SUM"),
        ("root", "rank 0, its root, is one of them"),
        ("root of a sum", "rank 0, its root, is one of them"),
        ("message", "a message is known to its two ranks only"),
        ("object", "objects have no neutral element"),
        ("coalesced", "issue its operations one by one"),
        ("sizes", "they cannot know the sizes of the parts"),
    ],
)
def test_what_has_no_neutral_element_is_refused_and_frees_the_ranks_that_wait(
    ranks_of, what, reason
):
    waiting, told = ranks_of(2).run(refused, what)
    assert "inside Join, but rank 0 has run out of data" in told and reason in told
    assert "by rank 1" in waiting and reason in waiting


def test_what_is_refused_depends_on_who_is_out():
    assert why_not_without(Kind.BROADCAST, 1, [0]) is None
    assert why_not_without(Kind.SCATTER, 0, [0]) is not None
    assert why_not_without(Kind.REDUCE, UNEVEN * 2 + cl.ReduceOp.SUM, [0]) is None
    assert "rank 2, its root" in why_not_without(Kind.REDUCE, UNEVEN * 2 + cl.ReduceOp.SUM, [0, 2])
    assert why_not_without(Kind.REDUCE, UNEVEN * 2 + cl.ReduceOp.AVG, [0]) is not None
    assert why_not_without(Kind.ALL_REDUCE, cl.ReduceOp.MAX, [0]) is None


def joinables_of_their_own(group, lengths):
    """Without a model the first joinable's step begins a pass."""
    beside, others = (group.new_group([0, 1]) for _ in range(2))
    first, second = CountingJoinable(group), CountingJoinable(others)
    live = []
    with cl.Join([first, second], groups=[beside]) as join:
        for _ in range(lengths[group.rank]):
            first.step()
            count = torch.ones(1)
            beside.all_reduce(count).wait()
            second.step()
            live.append((int(count), join.live_ranks))
    beside.close()
    others.close()
    return first.total.item(), second.total.item(), live, join._engine.ledger.steps_taken


@pytest.mark.parametrize("lengths", [(2, 4), (3, 0), (2, 2)])
def test_joinables_of_the_users_own_on_groups_of_their_own_go_together(ranks_of, lengths):
    for rank, (first, second, live, taken) in enumerate(
        ranks_of(2).run(joinables_of_their_own, lengths)
    ):
        at_step = [[r for r in (0, 1) if step < lengths[r]] for step in range(lengths[rank])]
        assert first == second == sum(map(len, at_step))
        assert live == [(len(ranks), tuple(ranks)) for ranks in at_step]
        assert taken == list(lengths)


def accumulating_beside_a_joinable(group, lengths):
    """Three batches a step, and a joinable of the user's own in each step."""
    beside = group.new_group([0, 1])
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counter = CountingJoinable(group)
    with cl.Join([model, counter], step_along=[optimizer], groups=[beside], skew_warning=None):
        for number, batch in enumerate(
            batches_of(group.rank, lengths[group.rank], torch.float64), 1
        ):
            engine_of(model).reducer.is_syncing = number % 3 == 0
            loss_of(model, batch).backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
                counter.step()
    beside.close()
    told = ""
    with cl.Join([model, counter], enable=True):
        try:
            with model.no_sync():
                pass
        except RuntimeError as error:
            told = str(error)
    return counter.total.item(), [p.detach().clone() for p in model.parameters()], told


def test_joinables_of_the_users_own_go_with_accumulation_where_groups_are_followed(ranks_of):
    lengths = (3, 9)
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate(lengths)]
    for start in range(0, 9, 3):
        optimizer.zero_grad()
        for batch in [*data[0][start : start + 3], *data[1][start : start + 3]]:
            (loss_of(model, batch) / 2).backward()
        optimizer.step()
    results = ranks_of(2).run(accumulating_beside_a_joinable, lengths)
    assert [total for total, _, _ in results] == [2, 2 + 1 + 1]
    for _, parameters, told in results:
        assert "a rank without data counts each forward pass as a step" in told
        for ours, theirs in zip(parameters, model.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def two_models(group, lengths, sharded, follows):
    """An adversarial pair, each model reduced on a group of its own. follows: one of them with
    statistics; then the critic may take two steps for each of the other's."""
    others = group.new_group([0, 1])
    critic = cl.DistributedDataParallel(make_model(torch.float64), others)
    maker = cl.DistributedDataParallel(
        cl.SyncBatchNorm.convert_sync_batchnorm(make_model(torch.float64, batch_norm=follows)),
        group,
    )
    make = cl.ZeroRedundancyOptimizer if sharded else torch.optim.SGD
    optimizers = [
        make(
            m if sharded else m.parameters(),
            **({"optimizer_class": torch.optim.SGD} if sharded else {}),
            lr=0.1,
        )
        for m in (critic, maker)
    ]
    joined = [critic, optimizers[0], maker, optimizers[1]] if sharded else [critic, maker]
    with cl.Join(joined, skew_warning=None):
        for batch in batches_of(group.rank, lengths[group.rank], torch.float64):
            for _ in range(2 if follows else 1):
                optimizers[0].zero_grad()
                loss_of(critic, batch).backward()
                optimizers[0].step()
            optimizers[1].zero_grad()
            loss_of(maker, batch).backward()
            optimizers[1].step()
    others.close()
    return [[p.detach().clone() for p in m.parameters()] for m in (critic, maker)]


def two_models_in_one_process(lengths, follows):
    models = [make_model(torch.float64), make_model(torch.float64, batch_norm=follows)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate(lengths)]
    for step in range(max(lengths)):
        batches = [own[step] for own in data if step < len(own)]
        for number in (0, 0, 1) if follows else (0, 1):
            optimizers[number].zero_grad()
            outputs = models[number](torch.cat(batches)).split([len(b) for b in batches])
            (sum(o.square().mean() for o in outputs) / len(lengths)).backward()
            optimizers[number].step()
    return [list(model.parameters()) for model in models]


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
@pytest.mark.parametrize("lengths", [(2, 5), (3, 0)])
@pytest.mark.parametrize("follows", [True, False], ids=["statistics", "plain"])
def test_two_models_of_two_groups_share_a_join(ranks_of, lengths, sharded, follows):
    expected = two_models_in_one_process(lengths, follows)
    for models in ranks_of(2).run(two_models, lengths, sharded, follows):
        for ours, theirs in zip(models, expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def unfit_groups(group):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    alone = group.split(group.rank)
    told = []
    for joinables, groups in (
        ([model], [group]),
        ([model], [alone]),
        ([model, CountingJoinable(alone)], []),
    ):
        try:
            cl.Join(joinables, groups=groups)
        except ValueError as error:
            told.append(str(error))
    alone.close()
    return told


def test_groups_that_a_join_cannot_hold_are_refused_with_the_mend(ranks_of):
    for rank, (own, fewer, joinables) in enumerate(ranks_of(2).run(unfit_groups)):
        assert "is the group of a joinable" in own and "group.new_group(range(group.size))" in own
        for told in (fewer, joinables):
            assert "multiple process groups of different ranks" in told
            assert f"has [{rank}]" in told and "has [0, 1]" in told


def pairs(group):
    """A joinable of ranks 0 and 1 beside one of as many other ranks, and of these in another order;
    what the ranks of both are told."""
    told = []
    first = group.new_group([0, 1])
    for ranks in ([0, 2], [1, 0]):
        second = group.new_group(ranks)
        if first is not None and second is not None:
            with pytest.raises(ValueError, match="multiple process groups") as raised:
                cl.Join([CountingJoinable(first), CountingJoinable(second)])
            told.append(str(raised.value))
    return told


def test_groups_of_as_many_ranks_have_to_be_of_the_same_ones_in_one_order(ranks_of):
    (other, *turned), also_turned, _ = ranks_of(3).run(pairs)
    assert "has [0, 2]" in other and "has [0, 1]" in other
    for told in (*turned, *also_turned):
        assert "has [1, 0]" in told and "has [0, 1]" in told
    assert len(turned) == len(also_turned) == 1


def raise_beside_a_second_joinable(group):
    """Rank 0 waits in the group of the second joinable, which is of another family."""
    with another_group(group) as own, another_group(group) as others:
        first, second = CountingJoinable(own), CountingJoinable(others)
        began = time.monotonic()
        try:
            with cl.Join([first, second]):
                first.step()
                if own.rank == 1:
                    raise KeyError("no such column")
                second.step()
        except (KeyError, cl.GroupAborted) as error:
            told = type(error).__name__, str(error), time.monotonic() - began
            group.barrier().wait()  # Closing would free the peer, too.
            return told
    return None


def test_an_exception_frees_the_peers_in_the_groups_of_all_joinables(ranks_of):
    (waiting, told, seconds), (culprit, _, _) = ranks_of(2).run(raise_beside_a_second_joinable)
    assert (waiting, culprit) == ("GroupAborted", "KeyError")
    assert "by rank 1" in told and "no such column" in told
    assert seconds < 10


def raise_while_somebody_follows(group):
    """The followed group is of another family than the model's: nothing else would end it."""
    with another_group(group) as own, another_group(group) as beside:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        try:
            with cl.Join([model], groups=[beside]):
                for number, batch in enumerate(
                    batches_of(own.rank, 1 + 2 * own.rank, torch.float32)
                ):
                    loss_of(model, batch).backward()
                    if number == 1:
                        raise KeyError("no such column")
        except (KeyError, cl.GroupAborted) as error:
            return str(error)
    return ""


def test_an_exception_frees_a_rank_that_follows(ranks_of):
    waiting, culprit = ranks_of(2).run(raise_while_somebody_follows)
    assert "by rank 1" in waiting and "no such column" in waiting
    assert "no such column" in culprit
