"""Which workers form whole replicas: over all sets of survivors of up to four replicas."""

import itertools

import pytest

from chorusline.actors.driver.events import (
    Leaving,
    PauseEnded,
    RankEnded,
    RankFroze,
    RanksReady,
    RunStarted,
    RunTakenOver,
    WorkerRegistered,
)
from chorusline.actors.driver.instructions import (
    AttachRank,
    AwaitReadiness,
    RestRank,
    ResumeRank,
    StartRank,
)
from chorusline.actors.driver.membership import Membership
from chorusline.actors.driver.replicas import whole_replicas
from chorusline.actors.errors import WorkerLost
from chorusline.actors.messages.messages import (
    Assignment,
    Failure,
    Frozen,
    Loss,
    PlaceInRun,
    RunFailed,
    Waiting,
)
from chorusline.actors.messages.outcomes import raise_failure
from tests.references.driver_events import GONE, death, request, resumptions, worker


@pytest.mark.parametrize(("replicas", "size"), [(1, 1), (2, 2), (3, 2), (2, 3), (4, 2), (3, 3)])
@pytest.mark.parametrize("num_newcomers", [0, 1, 2, 3])
def test_replicas_are_whole_and_every_shard_that_is_left_keeps_a_holder(
    replicas, size, num_newcomers
):
    ranks = range(replicas * size)
    newcomers = [f"new {n}" for n in range(num_newcomers)]
    for alive in itertools.product([False, True], repeat=len(ranks)):
        survivors = {rank: f"old {rank}" for rank in ranks if alive[rank]}
        members, resting = whole_replicas(survivors, newcomers, size)
        placed = [who for who, _ in members]
        assert len(members) == (len(survivors) + num_newcomers) // size * size
        assert len({*placed, *resting}) == len(placed) + len(resting)
        assert {*resting} == {*survivors.values()}.difference(placed)
        for new, (who, former) in enumerate(members):
            assert who in newcomers if former < 0 else who == survivors[former]
            # A survivor gets another shard only where no newcomer could take the place.
            if former >= 0 and former % size != new % size:
                assert set(newcomers) <= set(placed)
        olds = [(new, old) for new, (_, old) in enumerate(members) if old >= 0]
        kept = {old % size for new, old in olds if old % size == new % size}
        assert kept == {rank % size for rank in survivors} or not members
        # Replicas that have lost nobody stay as they are, unless there are too few places.
        whole = [r for r in range(replicas) if all(r * size + n in survivors for n in range(size))]
        if len(whole) <= len(members) // size:
            for replica in whole:
                mine = [f"old {replica * size + n}" for n in range(size)]
                at = placed.index(mine[0])
                assert at % size == 0 and placed[at : at + size] == mine


def begun(num_workers=4):
    membership = Membership()
    for seat in range(num_workers):
        membership.handle(WorkerRegistered(worker(seat)))
    told = membership.handle(RunStarted(request(0, fewest=2, max_failures=None, replica_size=2)))
    return membership, [one.worker_id for one in told if isinstance(one, StartRank)]


def froze(membership, ranks, generation=0):
    told = []
    for rank in ranks:
        frozen = Frozen(rank, generation, (), GONE, waiting=Waiting.NOWHERE, spare=1)
        told += membership.handle(RankFroze(frozen))
    return told


def ended(seat):
    aborted = Failure(seat, b"", "GroupAborted: it rests", "Traceback", (), True)
    return RankEnded(aborted, worker(seat).worker_id)


def test_a_worker_too_many_has_no_rank():
    assert len(begun(5)[1]) == 4


def test_the_partner_of_a_lost_rank_rests_and_comes_back_with_a_new_worker():
    membership, _ = begun()
    membership.handle(death(1))
    told = froze(membership, [0, 2, 3])
    assert [one.worker_id for one in told if isinstance(one, RestRank)] == [worker(0).worker_id]
    formed = resumptions(told)
    assert [*formed] == [worker(2).worker_id, worker(3).worker_id]
    one = formed[worker(2).worker_id]
    assert one.restarts and one.former_ranks == (2, 3)
    assert {gone.rank: "replica" in gone.why for gone in one.gone} == {0: True, 1: False}
    # A worker alone is no replica; neither is the partner, when it has ended what it did.
    assert not any(
        isinstance(one, AwaitReadiness)
        for one in membership.handle(WorkerRegistered(worker(1, incarnation=1)))
    )
    (asked,) = membership.handle(ended(0))
    assert asked == AwaitReadiness((worker(2).worker_id, worker(3).worker_id), 1)
    membership.handle(RanksReady(1, False))
    told = froze(membership, [0, 1], generation=1)
    began = [one for one in told if isinstance(one, StartRank | ResumeRank)]
    former = began[0].resumption.former_ranks
    assert former == (0, 1, -1, -1) and len(began) == 4
    assert {one.worker_id for one in began if isinstance(one, StartRank)} == {
        worker(0).worker_id,
        worker(1, incarnation=1).worker_id,
    }


def test_a_rank_that_the_driver_before_had_not_told_to_rest_ends_what_it_does_first():
    """It would be called again while its function still runs."""
    first, _ = begun()
    first.handle(death(1))
    formed = resumptions(froze(first, [0, 2, 3]))
    membership = Membership()
    for seat in (0, 2, 3):
        membership.handle(WorkerRegistered(worker(seat)))
    places = [PlaceInRun(worker(0), Assignment(0, 0, 4, 0, 4, 0), None)]
    places += [
        PlaceInRun(worker(seat), formed[worker(seat).worker_id].assignment, one)
        for seat, one in zip((2, 3), formed.values(), strict=True)
    ]
    run = request(0, fewest=2, max_failures=None, replica_size=2)
    told = membership.handle(RunTakenOver(run, tuple(places)))
    assert AttachRank(worker(0).worker_id) in told
    assert [one.worker_id for one in told if isinstance(one, RestRank)] == [worker(0).worker_id]
    assert membership.handle(WorkerRegistered(worker(1, incarnation=1))) == []
    (asked,) = membership.handle(ended(0))
    assert asked == AwaitReadiness((worker(2).worker_id, worker(3).worker_id), 1)


def test_halves_of_two_replicas_make_one():
    membership, _ = begun()
    membership.handle(death(0))
    membership.handle(death(3))
    formed = resumptions(froze(membership, [1, 2]))
    # Rank 2 had shard 0, rank 1 had shard 1.
    assert [*formed] == [worker(2).worker_id, worker(1).worker_id]
    assert formed[worker(1).worker_id].former_ranks == (2, 1)


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_lost_run_is_told_to_write_is_allowed(size):
    gone = Loss(1, worker(1), "SIGKILL")
    workers = tuple(map(worker, range(4)))
    with pytest.raises(WorkerLost) as raised:
        raise_failure(RunFailed(0, gone, workers, (), (), replica_size=size))
    text = str(raised.value)
    if size == 1:
        assert "num_workers=(1, 4)) and ZeroRedundancyOptimizer(" in text and "checkpoint=" in text
    else:
        assert "num_workers=(2, 4), replica_size=2), and register" in text
        assert "checkpoint=" not in text and "torch.distributed.checkpoint" in text


def test_a_run_with_less_than_a_replica_waits_for_workers():
    membership, _ = begun()
    for seat in (0, 1, 3):
        membership.handle(death(seat))
    assert resumptions(froze(membership, [2])) == {}
    assert membership.missing == 1
    formed = resumptions(membership.handle(WorkerRegistered(worker(3, incarnation=1))))
    assert formed[worker(2).worker_id].former_ranks == (2, -1)
    assert membership.handle(PauseEnded(0)) == []


def test_a_spare_worker_that_is_to_come_makes_no_replica_of_less_than_its_ranks():
    membership, _ = begun(2)
    membership.handle(Leaving(worker(0).worker_id, "SIGTERM", num_ready=1))
    membership.handle(death(0))
    assert resumptions(froze(membership, [1])) == {}
    assert membership.missing == 1
    formed = resumptions(membership.handle(WorkerRegistered(worker(0, incarnation=1))))
    assert formed[worker(1).worker_id].former_ranks == (-1, 1)
