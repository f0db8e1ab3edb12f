"""Replicas of a stock FSDP2 model in a session lose ranks, and get them back.

Every rank notes in files, which outlive it, with which samples it took part in which step. One
process then takes the same steps over the same samples, in float64.
"""

import json
import os
import random
import signal
import time
from collections import defaultdict

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import chorusline as cl
from chorusline.collectives.objects.blocking import all_gather_row
from chorusline.runtime.recovery import recovery
from tests.harness.arrivals import FEW
from tests.references.training import CLIPPED

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 75, 2, 2
PHASES = ["forward", "loss", "backward", "clip", "vote", "step", "stepped"]
"""Where a rank is killed: in the forward pass; before and in the backward pass; before the norm; at
the beginning of `step()`; after the vote on the step, and after the step."""


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, number):
        of_it = torch.Generator().manual_seed(number)
        return number, torch.randn(9, generator=of_it, dtype=torch.float64)


def network():
    torch.manual_seed(0)
    hidden = torch.nn.Sequential(torch.nn.Linear(9, 13), torch.nn.Tanh(), torch.nn.Linear(13, 1))
    return hidden.double()


def loss_of(model, inputs):
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def made(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)


def train(ctx, folder, kills=(), also=(), left=()):
    """kills: the phase, the rank and the step at which it is killed, the first time it is there;
    also: pids of others that are killed then. left: ranks that are left in the vote of a step whose
    result all others have, with the step."""
    size = 2
    ctx.init_torch_distributed()
    shape = (ctx.world_size // size, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = network()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer, schedule = made(model)

    def reach(phase):
        step = schedule.last_epoch - (phase == "stepped" and steps[-1] == schedule.last_epoch)
        if (phase, ctx.rank, step) in kills:
            try:
                (folder / f"killed in {phase} of {step}").touch(exist_ok=False)
            except FileExistsError:
                return
            for pid in (*also, os.getpid()):
                os.kill(pid, signal.SIGKILL)

    def clip():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    def row_or_left(group, row):
        rows = all_gather_row(group, row)
        if (ctx.rank, schedule.last_epoch) in left and not (folder / "was left").exists():
            (folder / "was left").touch()
            while (error := group.failure()) is None:
                time.sleep(0.01)
            raise error
        return rows

    recovery.all_gather_row = row_or_left
    optimizer.register_step_pre_hook(lambda *_: reach("vote"))
    for name, one in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
        ctx.register(name, one)
    optimizer.register_step_pre_hook(lambda *_: reach("step"))
    model[1].register_forward_hook(lambda *_: reach("forward"))
    model[0].register_full_backward_hook(lambda *_: reach("backward"))
    steps = []
    for epoch in ctx.epochs(EPOCHS):
        with cl.Join([model], step_along=[clip, optimizer, schedule], skew_warning=None):
            for numbers, inputs in ctx.shard(Pairs(), BATCH_SIZE, seed=1):
                place = f"{schedule.last_epoch} {ctx.generation} {ctx.rank} {epoch}"
                noted = ctx.world_size, numbers.tolist(), os.getpid()
                (folder / place).write_text(json.dumps(noted))
                loss = loss_of(model, inputs)
                reach("loss")
                loss.backward()
                reach("clip")
                clip()
                optimizer.step()
                steps.append(schedule.last_epoch)
                reach("stepped")
                schedule.step()
                optimizer.zero_grad()
    whole = [one.full_tensor().detach() for one in model.parameters()]
    return ctx.world_size, os.getpid(), schedule.last_epoch, whole


def noted_steps(folder):
    """By step, generation and rank: the epoch, and what the rank has noted."""
    steps = defaultdict(dict)
    for path in folder.glob("[0-9]*"):
        step, generation, rank, epoch = map(int, path.name.split())
        steps[step].setdefault(generation, {})[rank] = epoch, *json.loads(path.read_text())
    return steps


def one_process(steps):
    """The parameters after the steps that counted, and how often each sample was in one."""
    model = network()
    optimizer, schedule = made(model)
    used = defaultdict(list)
    for step in sorted(steps):
        # In a generation before, a rank that is lost had begun it, or others with that rank.
        by_rank = steps[step][max(steps[step])]
        for _, (epoch, world_size, numbers, _) in sorted(by_rank.items()):
            inputs = torch.stack([Pairs()[number][1] for number in numbers])
            (loss_of(model, inputs) / world_size).backward()
            used[epoch] += numbers
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return len(steps), [*model.parameters()], used


def check(folder, told, killed_in):
    """killed_in: the step in which one of ranks 2 and 3 was killed; 0 and 1 are a whole replica."""
    steps = noted_steps(folder)
    num_steps, expected, used = one_process(steps)
    first = min(steps[killed_in])
    assert all(max(steps[step]) <= first for step in range(killed_in)), "a step was taken again"
    stayed = {steps[killed_in][first][rank][-1] for rank in (0, 1)}
    assert stayed <= {pid for _, pid, _, _ in told}, "a process that was whole was replaced"
    for epoch in range(EPOCHS):
        assert sorted(used[epoch]) == [*range(NUM_SAMPLES)]
    for _, _, taken, parameters in told:
        assert taken == num_steps
        for mine, first, theirs in zip(parameters, told[0][3], expected, strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, theirs.detach(), **CLIPPED)


def session(num_workers, **more):
    options = {"replica_size": 2, "max_failures": None, "resources_per_worker": FEW}
    return cl.Session(num_workers, **options, **more)


@pytest.mark.promise(
    "a lost rank with a shard of a [`fully_shard` model in replicas]"
    "(torch-distributed.md#survive-lost-workers-with-fsdp2)"
)
async def test_whole_replicas_go_on_when_a_rank_is_killed_in_its_step(cluster, tmp_path):
    async with session((2, 4)) as workers:
        told = await workers.run(train, folder=tmp_path, kills=[("step", 2, 4)])
    assert (tmp_path / "killed in step of 4").exists()
    check(tmp_path, told, 4)


async def test_a_step_that_others_have_voted_on_counts_for_a_rank_that_was_left_in_its_vote(
    cluster, tmp_path
):
    async with session((2, 4)) as workers:
        told = await workers.run(train, folder=tmp_path, kills=[("step", 2, 4)], left=[(0, 4)])
    assert (tmp_path / "killed in step of 4").exists() and (tmp_path / "was left").exists()
    check(tmp_path, told, 4)


class Counting(torch.nn.Module):
    """seen: forward passes. last: what the body has set after its last step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.last = 0

    def forward(self, inputs):
        self.seen += 1
        return inputs

    def get_extra_state(self):
        return self.last

    def set_extra_state(self, state):
        self.last = state


def count(ctx, folder):
    """Rank 2 is killed after a forward pass, which the others have then made in vain."""
    ctx.init_torch_distributed()
    shape = (ctx.world_size // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    counting = Counting()
    model = fully_shard(torch.nn.Sequential(network(), counting), mesh=mesh)
    optimizer, schedule = made(model)
    for name, one in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
        ctx.register(name, one)
    for _ in ctx.epochs(1):
        for _, inputs in ctx.shard(torch.utils.data.Subset(Pairs(), range(48)), BATCH_SIZE):
            step = schedule.last_epoch
            # The body writes to the buffer, too: in each step of its own one more.
            assert (counting.seen.item(), counting.last) == (2 * step, step)
            assert counting.training == (step == 0)
            loss = loss_of(model, inputs)
            if ctx.world_size == 4 and (step, ctx.rank) == (3, 2):
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            counting.seen += 1
            counting.last = schedule.last_epoch
            counting.eval()
    return counting.seen.item(), schedule.last_epoch


async def test_what_a_sharded_model_has_beside_its_shards_is_that_of_the_last_step(
    cluster, tmp_path
):
    async with session((2, 4)) as workers:
        told = await workers.run(count, folder=tmp_path)
    assert (tmp_path / "killed").exists()
    assert told == [(18.0, 9)] * 2  # Three steps on four ranks, and 24 samples on two.


@pytest.mark.slow
@pytest.mark.parametrize("spares", [0, 1])
async def test_a_rank_killed_in_any_phase_of_a_step_costs_no_step_and_no_sample(
    cluster, tmp_path, spares
):
    chance = random.Random(spares)
    async with session((2, 4) if spares == 0 else 4, spares=spares) as workers:
        for phase in PHASES:
            folder = tmp_path / phase
            folder.mkdir()
            kill = phase, chance.randrange(2, 4), chance.randrange(1, 12)
            told = await workers.run(train, folder=folder, kills=[kill])
            assert (folder / f"killed in {phase} of {kill[2]}").exists(), kill
            check(folder, told, kill[2])
            if spares:
                assert len(told) == 4, "a spare worker takes the seat, and nobody waits"


def both_die(ctx, folder):
    train(ctx, folder, [("loss", 1, 3)], also=[ctx.reduce(os.getpid() * (ctx.rank == 3), "sum")])


@pytest.mark.slow
async def test_a_shard_that_no_rank_has_any_more_is_named(cluster, tmp_path):
    async with session((2, 4)) as workers:
        with pytest.raises(
            cl.StateLost, match=r"all ranks that had shard 1 of 2 of 'model' died\. Save"
        ):
            await workers.run(both_die, folder=tmp_path)


def refused(ctx, shape):
    ctx.init_torch_distributed()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = fully_shard(network(), mesh=mesh)
    optimizer, _ = made(model)
    ctx.register("model", model)
    ctx.register("optimizer", optimizer)
    loss_of(model, torch.ones(2, 9, dtype=torch.float64)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"torch\.distributed\.checkpoint"):
        ctx.save("unused")
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.barrier()


async def test_a_model_in_one_copy_says_how_it_is_sharded_in_replicas(cluster):
    with pytest.raises(ValueError, match="must be a multiple of replica_size=2"):
        cl.Session(3, replica_size=2)
    async with cl.Session((1, 2), resources_per_worker=FEW) as workers:
        with pytest.raises(cl.WorkerLost, match=r"Session\(replica_size=2\).*mesh_dim_names"):
            await workers.run(refused, shape=(2,))
