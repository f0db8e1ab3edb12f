"""What programs on torch.distributed are told when a rank dies, and how they go on."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import chorusline as cl
from chorusline.collectives.stores.torch_store import TorchStore
from chorusline.collectives.torch_backend.options import Options
from chorusline.runtime.process.torch_distributed import of_device
from tests.harness.ranks import GLOO, SHARED_MEMORY, Ranks
from tests.references.training import batches_of, loss_of, make_model

VICTIM = 1


def init(rank, size, store, prefix):
    dist.init_process_group(
        "chorusline",
        store=TorchStore(cl.PrefixStore(prefix, store)),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=20),
    )


def step(model, optimizer, batch):
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def rank_under_ddp(rank, hook):
    """Train until a rank dies; then train on without it. What this rank was told, and how late."""
    init(rank.rank, rank.size, rank.store, "first")
    model = DistributedDataParallel(make_model(torch.float32))
    if hook:
        # A hook of Python's: its future takes another way through C++.
        model.register_comm_hook(None, lambda _, bucket: summed(bucket.buffer(), rank.size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = batches_of(rank.rank, 1, torch.float32)[0]
    for _ in range(2):  # DDP's second step settles its buckets.
        step(model, optimizer, batch)
    if rank.rank == VICTIM:
        rank.say("ready")
        time.sleep(60)
    began_at = time.monotonic()
    rank.say("ready")
    with pytest.raises(cl.PeerLost) as caught:
        step(model, optimizer, batch)
    told, late_s = str(caught.value), time.monotonic() - began_at
    dist.destroy_process_group()

    left = [r for r in range(rank.size) if r != VICTIM]
    init(left.index(rank.rank), len(left), rank.store, "second")
    model = DistributedDataParallel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer, batch)
    everybody = [None] * len(left)
    mine = [p.detach().tolist() for p in model.parameters()]
    dist.all_gather_object(everybody, mine)
    dist.destroy_process_group()
    return told, late_s, all(other == mine for other in everybody)


def summed(buffer, size):
    future = dist.all_reduce(buffer.div_(size), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@pytest.mark.parametrize(
    ("transport", "hook"),
    [
        pytest.param(SHARED_MEMORY, False, marks=pytest.mark.slow),
        (SHARED_MEMORY, True),
        (GLOO, False),
    ],
)
def test_a_rank_killed_under_stock_ddp_is_named_and_the_others_train_on(tmp_path, transport, hook):
    """With Gloo, the ranks are told that they are on several hosts."""
    with Ranks(rank_under_ddp, 3, tmp_path, transport, hook) as ranks:
        ranks.wait_for("ready")
        ranks.signal(VICTIM, signal.SIGKILL)
        for told, late_s, agrees in ranks.results(ranks=[0, 2]):
            assert f"rank {VICTIM} is gone" in told
            assert "all_reduce" in told
            assert late_s < 10
            assert agrees


def rank_of_groups(rank):
    """Ranks 0 and 2 work in a group of their own when rank 1, of the world, dies."""
    init(rank.rank, rank.size, rank.store, "first")
    pair = dist.new_group([0, 2])
    if rank.rank == VICTIM:
        rank.say("ready")
        time.sleep(60)
    rank.say("ready")
    tensor = torch.ones(1)
    if rank.rank == 0:
        with pytest.raises(cl.PeerLost, match=r"rank 1 is gone"):
            dist.all_reduce(tensor)
        rank.store.wait(["said/told/2"], 30)  # To end now would be a death of its own.
    began_at = time.monotonic()
    if rank.rank == 2:
        # Rank 0 has been told, and will not come.
        with pytest.raises(cl.GroupAborted, match=r"rank 1 is gone"):
            dist.all_reduce(tensor, group=pair)
        rank.say("told")
    return time.monotonic() - began_at


def test_a_death_in_one_process_group_ends_those_that_share_ranks_with_it(tmp_path):
    with Ranks(rank_of_groups, 3, tmp_path) as ranks:
        ranks.wait_for("ready")
        ranks.signal(VICTIM, signal.SIGKILL)
        assert max(ranks.results(ranks=[0, 2])) < 10


def rank_beside_the_victim(rank):
    """Ranks 2 and 3 have a group of their own, in which rank 3 is rank 1."""
    init(rank.rank, rank.size, rank.store, "first")
    pair = dist.new_group([2, 3])
    rank.say("ready")
    if rank.rank == 3:
        time.sleep(60)
    with pytest.raises(cl.PeerLost) as raised:
        dist.all_reduce(torch.ones(1), group=pair if rank.rank == 2 else None)
    rank.say("told")
    rank.store.wait([f"said/told/{one}" for one in range(3)], 30)  # To end now would be a death.
    return raised.value.ranks


def test_the_errors_of_a_process_group_of_some_ranks_have_the_numbers_of_torch(tmp_path):
    with Ranks(rank_beside_the_victim, 4, tmp_path) as ranks:
        ranks.wait_for("ready")
        ranks.signal(3, signal.SIGKILL)
        assert ranks.results(ranks=[0, 1, 2]) == [[3]] * 3


def rank_beside_a_mismatch(rank):
    """Rank 3, which is rank 2 of its group, sums another number of elements."""
    init(rank.rank, rank.size, rank.store, "first")
    three = dist.new_group([1, 2, 3])
    with pytest.raises(cl.CollectiveMismatch) as raised:
        dist.all_reduce(torch.ones(2 + rank.rank // 3), group=three if rank.rank else None)
    rank.say("told")
    rank.store.wait([f"said/told/{one}" for one in range(4)], 30)  # To end now would be a death.
    return raised.value.ranks


def test_a_mismatch_in_a_process_group_of_some_ranks_has_the_numbers_of_torch(tmp_path):
    with Ranks(rank_beside_a_mismatch, 4, tmp_path) as ranks:
        assert ranks.results() == [[3]] * 4


def interrupted(rank, way):
    init(rank.rank, rank.size, rank.store, "first")
    if rank.rank == 1:
        rank.store.wait(["said/told/0"], 30)
        return True
    work = dist.all_reduce(torch.ones(1), async_op=True)
    future = work.get_future() if way == "future" else None
    wait = work.wait if future is None else future.wait
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        wait(timedelta(seconds=15)) if way == "timeout" else wait()
    # To whoever waits later, the interrupt of that thread is the end of the generation.
    with pytest.raises(cl.GroupAborted, match="KeyboardInterrupt during all_reduce"):
        wait()
    rank.say("told")
    return True


@pytest.mark.parametrize("way", ["future", "work", "timeout"])
def test_an_interrupt_of_a_thread_that_waits_ends_the_generation_and_is_no_value(tmp_path, way):
    with Ranks(interrupted, 2, tmp_path, SHARED_MEMORY, way) as ranks:
        assert ranks.results() == [True, True]


def refuses_and_dies(rank):
    group = rank.group()
    group.barrier().wait()
    rank.say("ready")
    watching = group._communicator.watching([0, 1], "the making of a group", 60)
    if rank.rank == 1:
        with pytest.raises(ImportError), watching:
            rank.store.wait(["said/in it/0"], 30)
            raise ImportError("no CuPy on this host")
        os.kill(os.getpid(), signal.SIGKILL)
    failure = None
    with pytest.raises(cl.CollectiveError), watching:
        rank.say("in it")
        give_up_at = time.monotonic() + 20
        while (failure := group.failure()) is None and time.monotonic() < give_up_at:
            time.sleep(0.01)
        raise failure or cl.CollectiveError("none", 0, [])
    return str(failure)


def test_ranks_that_make_a_group_hear_of_one_that_refuses_and_ends(tmp_path):
    with Ranks(refuses_and_dies, 2, tmp_path, GLOO) as ranks:
        assert "rank 1 is gone" in ranks.results(ranks=[0])[0]


def rank_that_aborts(rank):
    init(rank.rank, rank.size, rank.store, "first")
    if rank.rank == 0:
        dist.distributed_c10d._abort_process_group()
        assert not dist.is_initialized()
    else:
        with pytest.raises(cl.GroupAborted, match=r"by rank 0: the process group was aborted"):
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    init(rank.rank, rank.size, rank.store, "second")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def test_after_an_abort_a_new_process_group_is_initialised_in_the_same_processes(tmp_path):
    with Ranks(rank_that_aborts, 2, tmp_path) as ranks:
        assert ranks.results() == [2, 2]


def rank_over_a_group_that_ends(rank):
    group = rank.group()
    store = TorchStore(cl.PrefixStore("over", rank.store))
    options = Options(parent=group)
    dist.init_process_group(
        "chorusline", store=store, rank=rank.rank, world_size=rank.size, pg_options=options
    )
    if rank.rank == 1:
        rank.store.wait(["said/waits/0"], 30)
        group.abort("the session ends the run")
    else:
        rank.say("waits")
        with pytest.raises(cl.GroupAborted, match="the session ends the run"):
            dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_a_process_group_over_a_group_ends_with_it(tmp_path):
    with Ranks(rank_over_a_group_that_ends, 2, tmp_path) as ranks:
        ranks.results()


# -- in a session ----------------------------------------------------------------------------------


def train(ctx, die):
    ctx.init_torch_distributed()
    ctx.init_torch_distributed()  # harmless
    assert dist.get_backend() == "chorusline"
    assert (dist.get_rank(), dist.get_world_size()) == (ctx.rank, ctx.world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(7, 5).to(ctx.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(3, 7) * (ctx.rank + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    ctx.barrier()  # torch's groups and the session's, in turns
    if die == "raise" and ctx.rank == 1:
        raise KeyError("no such sample")
    if die == "kill" and ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step()
    return [p.detach().tolist() for p in model.parameters()]


@pytest.mark.parametrize(
    ("die", "error"),
    [
        pytest.param("raise", KeyError),
        pytest.param("kill", cl.WorkerLost, marks=pytest.mark.slow),
    ],
)
async def test_stock_ddp_trains_in_a_session_whatever_became_of_the_run_before(cluster, die, error):
    async with cl.Session(num_workers=2) as session:
        first, second = await session.run(train, die="")
        assert first == second
        with pytest.raises(error):  # in the same processes, over the same group
            await session.run(train, die=die)
        assert await session.run(train, die="") == [first, second]


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(ctx):
    return {name: os.environ.get(name) for name in VARIABLES}


def among_torchs_variables(ctx, error=None):
    os.environ["LOCAL_RANK"] = "of another program"
    ctx.init_torch_distributed()
    ctx.init_torch_distributed()
    found = environment(ctx)
    dist.destroy_process_group()
    ctx.init_torch_distributed()  # for the rest of the function
    port = environment(ctx).pop("MASTER_PORT")
    assert environment(ctx) == {**found, "MASTER_PORT": port}
    if ctx.rank == 0:  # What a program may do with them; see the documentation.
        store = dist.TCPStore(
            found["MASTER_ADDR"], int(port), is_master=True, wait_for_workers=False
        )
        store.set("rank 0", "is here")
    ctx.barrier()
    if ctx.rank == 1:
        store = dist.TCPStore(found["MASTER_ADDR"], int(port), wait_for_workers=False)
        assert store.get("rank 0") == b"is here"
    ctx.barrier()
    if error is not None and ctx.rank == 0:
        raise error
    return found


async def test_torchruns_variables_are_set_as_long_as_torch_is_initialised(session):
    """Libraries that look for them would train alone on every rank."""
    before = await session.run(environment)
    for rank, found in enumerate(await session.run(among_torchs_variables)):
        assert found["RANK"] == found["LOCAL_RANK"] == str(rank)
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "3"
    afterwards = {"LOCAL_RANK": "of another program"}
    assert await session.run(environment) == [{**names, **afterwards} for names in before]
    with pytest.raises(KeyError):
        await session.run(among_torchs_variables, error=KeyError("no such sample"))
    assert await session.run(environment) == [{**names, **afterwards} for names in before]


def test_accelerate_is_told_the_gpu_that_is_not_the_one_of_its_local_rank():
    name = "ACCELERATE_TORCH_DEVICE"
    assert of_device(torch.device("cuda", 3), {}) == {name: "cuda:3"}
    assert of_device(torch.device("cuda", 3), {name: "cuda:1"}) == {}, "the user's word stands"
    assert of_device(torch.device("cpu"), {}) == {"ACCELERATE_USE_CPU": "true"}
    assert of_device(torch.device("cpu"), {"ACCELERATE_USE_CPU": "no"}) == {}


def described_again(ctx, once):
    """Train, and lose a rank; what the variables say before and after each step."""
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(3, 2)))
    optimizer = ctx.register("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    said = []
    for step in range(4):
        ctx.init_torch_distributed()
        said.append((environment(ctx), str(ctx.rank), str(ctx.world_size)))
        if ctx.rank == 1 and step == 2 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return said


async def test_torchruns_variables_follow_the_ranks_after_a_loss(session, tmp_path):
    for said in await session.run(described_again, once=tmp_path / "killed"):
        for found, rank, size in said:
            assert (found["RANK"], found["WORLD_SIZE"]) == (rank, size)
            assert found["LOCAL_WORLD_SIZE"] == size


def refused_and_continued(rank):
    dist.init_process_group(
        "chorusline",
        store=TorchStore(cl.PrefixStore("first", rank.store)),
        rank=rank.rank,
        world_size=rank.size,
        timeout=timedelta(seconds=2),
    )
    with pytest.raises(ValueError, match="device must be a cpu or cuda device, got meta"):
        dist.all_reduce(torch.ones(2, device="meta"))
    time.sleep(3)  # Longer than the deadline of what the ranks have said to each other by then.
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


@pytest.mark.parametrize("transport", [SHARED_MEMORY, GLOO])
def test_a_tensor_that_is_refused_ends_no_group_later(tmp_path, transport):
    with Ranks(refused_and_continued, 2, tmp_path, transport) as ranks:
        assert ranks.results() == [2.0, 2.0]


def kept_waiting(rank):
    init(rank.rank, rank.size, rank.store, "first")
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    began_at = time.monotonic()
    if rank.rank == 1:
        with pytest.raises(cl.CollectiveTimeout, match=r"rank 0 did not arrive within 0\.5 s"):
            dist.all_reduce(torch.ones(1))
        rank.store.set("timed out", "")
    else:
        rank.store.wait(["timed out"], 60)
    waited_s = time.monotonic() - began_at
    dist.destroy_process_group()
    return waited_s


def test_a_process_group_takes_another_timeout(tmp_path):
    with Ranks(kept_waiting, 2, tmp_path) as ranks:
        assert max(ranks.results()) < 15  # The first timeout is 20 s.
