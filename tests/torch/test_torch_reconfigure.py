"""Process groups whose members change in place: `reconfigure` of torch 2.14 and newer.

torch's own tests of it (test_c10d_fault_tolerance.py of PyTorch's repository) pass on this backend
as well; here the same is asked with ranks that are killed, and ranks that are new.
"""

import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import chorusline as cl
from chorusline.collectives.stores.torch_store import StoreFromTorch, TorchStore
from chorusline.collectives.torch_backend.options import Options
from chorusline.collectives.torch_backend.process_group import ChoruslineProcessGroup
from chorusline.collectives.torch_backend.reconfiguring import GroupMembership
from tests.harness.ranks import GLOO, SHARED_MEMORY, Ranks, run_ranks, transports
from tests.references.training import batches_of, loss_of, make_model

needs_reconfigure = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"),
    reason=f"torch {torch.__version__} has no ProcessGroup.reconfigure; it came with torch 2.14",
)
VICTIM = 1
EVERYBODY = [0, 1, 2]


def init(rank, size, store, **keywords):
    dist.init_process_group(
        "chorusline",
        store=TorchStore(cl.PrefixStore("torch", store)),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=20),
        **keywords,
    )


def handles_of(rank, number, members):
    """Those of `members`, who all call this."""
    rank.store.set(f"handle/{number}/{rank.rank}", dist._get_reconfigure_handle())
    found = rank.store.multi_get([f"handle/{number}/{member}" for member in members], 30)
    return [handle.decode() for handle in found]


def reconfigure(rank, number, members):
    dist._reconfigure(number, handles_of(rank, number, members)).wait()
    assert dist.get_rank() == members.index(rank.rank)
    assert dist.get_world_size() == len(members)


def numbers(member):
    return torch.randn(1001, generator=torch.Generator().manual_seed(member))


def summed(rank, number, members):
    """Whether the process group adds as a group does that was made of `members` at first."""
    ours, theirs = numbers(rank.rank), numbers(rank.rank)
    dist.all_reduce(ours)
    place, size = members.index(rank.rank), len(members)
    with cl.Group.create(rank.store, place, size, generation=number, name="reference") as group:
        group.all_reduce(theirs).wait()
    assert torch.allclose(ours, sum(map(numbers, members)), atol=1e-5)
    return torch.equal(ours, theirs)


ROUNDS = [
    [EVERYBODY],
    [[0, 1]],  # without the last rank; it waits for a later round
    [[0, 2]],  # without the middle one; from now on it is rank 1 of two
    [[0], [1], [2]],
    [[2, 0, 1]],  # all again, in another order
    [[2, 0, 1]],  # the same once more
    [[1], [0, 2]],
    [[1, 2, 0]],  # two groups that merge
]


def rank_in_rounds(rank):
    init(rank.rank, rank.size, rank.store, enable_reconfigure=True)
    pg = dist.group.WORLD
    assert dist._supports_reconfigure()
    with pytest.raises(RuntimeError, match=r"not connected: .*meet in reconfigure"):
        dist.all_reduce(torch.ones(1))
    for place, groups in enumerate(ROUNDS):
        for which, members in enumerate(groups):
            if rank.rank not in members:
                continue
            number = 10 * place + which
            reconfigure(rank, number, members)
            assert dist.group.WORLD is pg and pg.group.generation == number
            assert summed(rank, number, members)
            ours = torch.tensor([float(rank.rank)])
            dist.broadcast(ours, group_src=len(members) - 1)
            assert ours.item() == members[-1]
            if len(members) > 1:
                here = dist.get_rank()
                to, of = (here + 1) % len(members), (here - 1) % len(members)
                sending = dist.isend(torch.tensor([here]), to)
                came = torch.zeros(1, dtype=torch.long)
                dist.recv(came, of)
                sending.wait()
                assert came.item() == of
    # A set leaves the order to the backend: by former rank.
    former = dist.get_rank()
    dist._reconfigure(1000, set(handles_of(rank, 1000, EVERYBODY))).wait()
    assert dist.get_rank() == former
    rank.say("over")
    rank.store.wait([f"said/over/{member}" for member in EVERYBODY], 30)
    dist.destroy_process_group()
    return True


@needs_reconfigure
@transports
def test_members_leave_come_split_and_merge_in_place_and_sums_keep_their_bits(tmp_path, transport):
    assert run_ranks(rank_in_rounds, 3, tmp_path, transport) == [True] * 3


def trained(model, rank, steps):
    """The parameters after `steps` more steps of SGD on this rank's batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches_of(rank.rank, steps, torch.float32):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def rank_that_goes_on(rank, comes_later=False):
    init(rank.rank, rank.size, rank.store, enable_reconfigure=True)
    model = make_model(torch.float32)
    told, late_s, continues = "", 0.0, True
    if not comes_later:
        reconfigure(rank, 1, EVERYBODY)
        model = DistributedDataParallel(model)
        trained(model, rank, 2)
        rank.say("ready")
        if rank.rank == VICTIM:
            time.sleep(60)
        began_at = time.monotonic()
        with pytest.raises(cl.PeerLost) as caught:
            trained(model, rank, 1)
        told, late_s = str(caught.value), time.monotonic() - began_at
        left = [0, 2]
        reconfigure(rank, 2, left)
        assert summed(rank, 2, left)

        # Training goes on as over a new process group of two ranks. A DDP whose backward pass has
        # failed divides the next gradients by the former number of ranks, hence a new one.
        model = DistributedDataParallel(model.module)
        model.zero_grad()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        ours = trained(model, rank, 2)
        apart = dist.new_group([0, 1])
        reference = make_model(torch.float32)
        with torch.no_grad():
            for parameter, value in zip(reference.parameters(), before, strict=True):
                parameter.copy_(value)
        theirs = trained(DistributedDataParallel(reference, process_group=apart), rank, 2)
        continues = all(map(torch.equal, ours, theirs))
        model = model.module
        rank.say("goes on")
    reconfigure(rank, 3, EVERYBODY)
    assert summed(rank, 3, EVERYBODY)
    ours = trained(DistributedDataParallel(model), rank, 2)  # which sends rank 0's parameters
    everybody = [None] * rank.size
    dist.all_gather_object(everybody, [value.tolist() for value in ours])
    part = dist.new_group([0, VICTIM])  # The first of the new rank, and the second of rank 0.
    if part is not dist.GroupMember.NON_GROUP_MEMBER:
        ours = numbers(rank.rank)
        dist.all_reduce(ours, group=part)
        continues = continues and torch.equal(ours, numbers(0) + numbers(VICTIM))
    dist.destroy_process_group()
    return told, late_s, continues, all(values == everybody[0] for values in everybody)


@needs_reconfigure
@pytest.mark.parametrize("transport", [SHARED_MEMORY, pytest.param(GLOO, marks=pytest.mark.slow)])
def test_after_a_sigkill_the_others_reconfigure_and_train_on_and_a_new_rank_comes(
    tmp_path, transport
):
    with Ranks(rank_that_goes_on, 3, tmp_path, transport) as ranks:
        ranks.wait_for("ready")
        ranks.signal(VICTIM, signal.SIGKILL)
        ranks.wait_for("goes on", [0, 2])
        ranks.start(VICTIM, True)
        for rank, (told, late_s, continues, agree) in enumerate(ranks.results()):
            assert continues and agree
            if rank != VICTIM:
                assert f"rank {VICTIM} is gone" in told
                assert late_s < 10


def rank_that_calls_by_itself(rank):
    store = TorchStore(cl.PrefixStore("torch", rank.store))
    members = GroupMembership(StoreFromTorch(store), "by hand", rank.rank, rank.size, 20.0)
    pg = ChoruslineProcessGroup(members, store)
    assert pg.supports_reconfigure
    equal = []
    for number, members in enumerate([EVERYBODY, [2, 0]], 1):
        rank.store.set(f"handle/{number}/{rank.rank}", pg.get_reconfigure_handle())
        found = rank.store.multi_get([f"handle/{number}/{member}" for member in members], 30)
        handles = [handle.decode() for handle in found]
        pg.reconfigure(SimpleNamespace(handles=handles, uuid=number, timeout=None)).wait()
        assert (pg.rank(), pg.size()) == (members.index(rank.rank), len(members))
        ours, theirs = numbers(rank.rank), numbers(rank.rank)
        pg.allreduce([ours]).wait()
        place, size = members.index(rank.rank), len(members)
        with cl.Group.create(rank.store, place, size, generation=number, name="reference") as group:
            group.all_reduce(theirs).wait()
        equal.append(torch.equal(ours, theirs))
        if number == 1:
            rank.say("ready")
            if rank.rank == VICTIM:
                time.sleep(60)
            with pytest.raises(cl.PeerLost, match=f"rank {VICTIM} is gone"):
                pg.allreduce([ours]).wait()
    pg.shutdown()
    return equal


def test_survivors_of_a_sigkill_reconfigure_by_the_methods_that_torch_calls(tmp_path):
    """On every torch: an older one has no caller of these methods."""
    with Ranks(rank_that_calls_by_itself, 3, tmp_path) as ranks:
        ranks.wait_for("ready")
        ranks.signal(VICTIM, signal.SIGKILL)
        assert ranks.results(ranks=[0, 2]) == [[True, True]] * 2


def membership(store, rank=0, size=1):
    return GroupMembership(store, "by hand", rank, size, 20.0)


def test_new_ranks_are_in_the_order_of_the_handles_and_of_a_set_in_that_of_former_ranks():
    """On every torch, as the next ones. Ten stands after two."""
    of_ranks = [membership(cl.HashStore(), rank, 12).handle for rank in range(12)]
    last = membership(cl.HashStore(), 11, 12)
    given = [of_ranks[4], last.handle, of_ranks[2], of_ranks[10]]
    assert last.members(given) == given
    ordered = [of_ranks[2], of_ranks[4], of_ranks[10], last.handle]
    assert last.members({*given}) == last.members(frozenset(given)) == ordered


def test_a_handle_and_a_number_are_good_for_one_meeting():
    member = membership(store := cl.HashStore())
    first = member.handle
    with member.connect([first], 5, 3.0) as group:
        assert (group.rank, group.size, group.generation) == (0, 1, 5)
    with pytest.raises(RuntimeError, match="good for one reconfigure"):
        member.members([first])
    for one in (member, membership(store)):
        with pytest.raises(RuntimeError, match="uuid 5 was already used"):
            one.connect([one.handle], 5, 3.0)
    member.connect([member.handle], 6, 3.0).close()


def rank_with_unfinished_business(rank):
    init(rank.rank, rank.size, rank.store, enable_reconfigure=True)
    reconfigure(rank, 1, EVERYBODY)
    pg, part = dist.group.WORLD, dist.new_group([0, 1])
    if rank.rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)  # to which no other rank comes
    elif rank.rank == 1:
        pg.abort()
        assert pg.get_error().name == "SUCCESS"  # as torch has it of its own abort
    rank.say("aborted")
    rank.store.wait([f"said/aborted/{member}" for member in EVERYBODY], 30)
    reconfigure(rank, 2, EVERYBODY)
    if rank.rank == 0:
        with pytest.raises((cl.GroupAborted, cl.GroupClosed)):
            work.wait()
    if rank.rank != 2:
        with pytest.raises((cl.GroupAborted, cl.GroupClosed)):
            dist.all_reduce(torch.ones(1), group=part)
    assert summed(rank, 2, EVERYBODY)

    # Rank 2 does not come to the third, and is named; the others meet without it.
    if rank.rank == 2:
        rank.store.wait(["said/two/0", "said/two/1"], 60)
        return ""
    missing = [*handles_of(rank, 3, [0, 1]), "chorusline:2:of-a-rank-that-is-gone"]
    with pytest.raises(cl.StoreTimeout) as caught:
        dist._reconfigure(3, missing, timeout=timedelta(seconds=1))
    assert dist.get_world_size() == 3
    with pytest.raises(RuntimeError, match="not connected"):
        dist.all_reduce(torch.ones(1))
    reconfigure(rank, 4, [1, 0])
    assert summed(rank, 4, [1, 0])
    rank.say("two")
    dist.destroy_process_group()
    return str(caught.value)


@needs_reconfigure
def test_what_was_in_flight_ends_and_a_member_that_does_not_come_is_named(tmp_path):
    told = run_ranks(rank_with_unfinished_business, 3, tmp_path)
    assert all("rank 2 of 3 did not come" in text for text in told[:2])


@pytest.fixture
def alone():
    yield lambda **keywords: init(0, 1, cl.HashStore(), **keywords)
    if dist.is_initialized():
        dist.destroy_process_group()


@needs_reconfigure
def test_a_number_is_good_once_and_handles_are_checked(alone):
    alone(enable_reconfigure=True)
    pg = dist.group.WORLD
    assert "no members" in repr(pg)
    with pytest.raises(RuntimeError, match="not connected"):
        dist.new_group([0])
    first = dist._get_reconfigure_handle()
    assert first == dist._get_reconfigure_handle()
    for handles, message in (
        ([], "must have this rank's own"),
        ([first, first], "once"),
        ([first, "gloo:1:-1:1:"], "'gloo:1:-1:1:' is not a handle of the backend chorusline"),
    ):
        with pytest.raises(RuntimeError, match=message):
            dist._reconfigure(5, handles)
    pg.set_timeout(timedelta(seconds=7))
    dist._reconfigure(5, [first], timeout=timedelta(seconds=3)).wait()
    assert pg.group.timeout_s == 7
    with pytest.raises(RuntimeError, match="good for one reconfigure"):
        dist._reconfigure(6, [first])
    dist.all_reduce(torch.ones(1))  # What was refused has ended nothing.
    with pytest.raises(RuntimeError, match="uuid 5 was already used"):
        dist._reconfigure(5, [dist._get_reconfigure_handle()])


@needs_reconfigure
def test_a_session_decides_the_members_of_its_own_group(alone):
    with cl.Group.create(cl.HashStore(), 0, 1) as group:
        with pytest.raises(ValueError, match="whose members its session decides"):
            alone(enable_reconfigure=True, pg_options=Options(parent=group))


def test_a_process_group_that_was_not_asked_to_says_how_to_go_on_without(alone):
    alone()
    pg = dist.group.WORLD
    assert not pg.supports_reconfigure
    for call in (pg.get_reconfigure_handle, lambda: pg.reconfigure(None)):
        with pytest.raises(cl.UnsupportedOperation, match=r"enable_reconfigure=True.*torch 2\.14"):
            call()
