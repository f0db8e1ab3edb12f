"""What a lost rank leaves behind on a GPU: nothing that is kept, and nothing that the program sees.

`wait()` orders the stream only, so a pass goes through also if an operation in it is stopped, and
computes on what the kernel leaves. Here one rank stops at a named place, and the other one learns
from its control loop that it is gone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.actors.fault_plan import Instant
from chorusline.collectives.contract.errors import GroupAborted
from chorusline.runtime.data_parallel.distributed_data_parallel import engine_of
from chorusline.runtime.partition.resharding import Range, Transfer
from chorusline.runtime.zero.shards.shard_state import MASTER, ShardState, exchange
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.harness.ranks import Rank
from tests.harness.stand_in_gpu import nccl
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in
from tests.harness.stand_in_gpu.runs import Driver, in_run

pytestmark = needs_stand_in

LOST = "driver: a rank is gone"


def lose_soon(group: cl.Group, lost: int) -> None:
    """As the control loop of a worker does it, in its own thread."""
    error = GroupAborted(group.generation, [lost], LOST)
    threading.Timer(0.3, lambda: group.abort(error)).start()


def live_on(
    rank: Rank, lost: int, train: Callable[[cl.Context], None], *, goes_on: bool = True
) -> Driver:
    """Run `train` on a rank whose peer `lost` stops; the peer is held until the rank is through."""
    driver = Driver()
    with rank.group() as group, contextlib.suppress(GroupAborted):
        in_run(group, train, goes_on=goes_on, driver=driver)
    if rank.rank != lost:
        rank.say("raised")
    return driver


def stop_here(rank: Rank) -> None:
    """The lost rank does nothing any more, until the other one is through."""
    rank.store.wait([f"said/raised/{1 - rank.rank}"], 30)
    raise GroupAborted(0, [rank.rank], LOST)


# -- what the forward pass communicates ----------------------------------------------------------


class Talking(torch.nn.Module):
    """Adds over the ranks, as a program may do in its own layers. how: in which group, and how it
    waits; "" not at all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.group: cl.Group | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return x
        total = x.detach().clone()
        work = self.group.all_reduce(total)
        if "host" in self.how:
            work.wait_on_host()
        else:
            work.wait()
        return x + total / self.group.size


def lose_rank_1_in_a_step(rank: Rank, how: str) -> bool | None:
    """Whether rank 0 waits inside its step to go on with the gradients that it has."""

    def train(ctx: cl.Context) -> None:
        norm = cl.SyncBatchNorm(8) if "statistics" in how else torch.nn.Tanh()
        talking = Talking(how)
        if "own" in how:
            talking.group = ctx.group
        elif "subgroup" in how:
            talking.group = ctx.group.new_group(range(ctx.world_size))
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), norm, talking).to(ctx.device)
        model = cl.DistributedDataParallel(net)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2)
        x = torch.arange(24.0).view(4, 6).to(ctx.device)
        for step in range(2):
            if step == 1 and ctx.rank == 1 and "shared" not in how:
                stop_here(rank)
            if "host" in how and step == 1:
                lose_soon(ctx.group, 1)
            loss = model(x).sum()
            loss.backward()  # It goes through: the host has not waited.
            if step == 1 and ctx.rank == 1:
                stop_here(rank)
            if "host" not in how and step == 1:
                lose_soon(ctx.group, 1)
            optimizer.step()

    driver = live_on(rank, 1, train)
    return driver.frozen.is_parked if driver.frozen is not None else None


@pytest.mark.parametrize(
    ("how", "goes_on"),
    [
        ("", True),
        ("statistics", False),
        ("own group", False),
        ("subgroup", False),
        ("statistics, shared in time", True),
        ("subgroup, shared in time", True),
        ("own group, host", False),  # It raises in the forward pass, as between CPUs.
    ],
)
def test_a_step_does_not_go_on_with_gradients_behind_operations_that_were_stopped(
    how: str, goes_on: bool
) -> None:
    with StandInRanks(2) as ranks:
        found = ranks.run(lose_rank_1_in_a_step, how)
    assert found[0] is goes_on


# -- what a step brings from the lost rank -------------------------------------------------------


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    # What is normalised has the same square whatever the weights, so their gradient is small: in
    # float32 nobody would see that a step is missing.
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9)).double()


def inputs(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def lose_a_rank_behind_the_ballot(rank: Rank, where: str) -> dict[str, Any]:
    """Both ranks have agreed on the second step, and one stops before its parameters, or its
    buffers, have come. What the other one has then."""
    lost = 1 if where == "parameters" else 0  # Buffers are those of rank 0.
    told: dict[str, Any] = {"went on": False}

    def train(ctx: cl.Context) -> None:
        model = cl.DistributedDataParallel(net().to(ctx.device))
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, replicas=2)
        engine = optimizer_engine_of(optimizer)
        x = inputs(ctx.rank).to(ctx.device)
        try:
            for step in range(2):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if step == 1 and ctx.rank == lost and where == "parameters":
                    engine.faults.at(Instant.APPLIED, lambda: stop_here(rank))
                elif step == 1 and ctx.rank == lost:
                    engine.model.sync_buffers = lambda *_, **__: stop_here(rank)
                elif step == 1:
                    # After this rank has seen the ballot, and compared its parameters.
                    engine.faults.at(Instant.APPLIED, lambda: lose_soon(ctx.group, lost))
                told["before"] = [b.cpu() for b in model.buffers()] if step else []
                optimizer.step()
            told["went on"] = True
        except GroupAborted:
            held = engine.shard.held(takes_parameters=True)
            whole = Range(0, 0, engine.shard.layout.contents[0])
            values = torch.empty(whole.numel, dtype=torch.float64, device=ctx.device)
            held.cut(whole, MASTER, values)
            spans = engine.shard.layout.plans[0].spans
            told["held"] = {n: values[start : start + numel].cpu() for n, start, numel in spans}
            told["buffers"] = [b.cpu() for b in model.buffers()]
            told["synced"] = engine_of(model).buffers.synced_step
            raise

    driver = live_on(rank, lost, train)
    told["parked"] = driver.frozen.is_parked if driver.frozen is not None else None
    return told


def stepped_alone(steps: int) -> list[torch.Tensor]:
    """The parameters of one process."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        losses = [model(inputs(rank)).square().mean() for rank in range(2)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("where", ["parameters", "buffers"])
def test_a_program_sees_no_parameters_and_buffers_that_did_not_arrive(where: str) -> None:
    """Its average of parameters, say, could not be taken back. The rank waits inside its step."""
    with StandInRanks(2) as ranks:
        told = ranks.run(lose_a_rank_behind_the_ballot, where)[0 if where == "parameters" else 1]
    assert not told["went on"]
    assert told["parked"]
    for now, before in zip(told["buffers"], told["before"], strict=True):
        assert torch.equal(now, before), "they were spoiled by a broadcast that was stopped"
    assert told["synced"] == 1


def test_replicas_on_a_gpu_outlive_the_gather_that_the_lost_rank_did_not_join() -> None:
    """The stopped kernel leaves anything in the ranges of the lost rank, and the replica of these
    ranges is the only one that is left."""
    with StandInRanks(2) as ranks:
        told = ranks.run(lose_a_rank_behind_the_ballot, "parameters")[0]
    for number, expected in enumerate(stepped_alone(2)):
        torch.testing.assert_close(told["held"][number], expected.flatten())


def lose_the_sender(rank: Rank) -> bool:
    """Whether rank 0 takes what has not come for a part of its state."""
    with rank.group() as group:
        parts = [torch.ones(2, device=group.device) for _ in range(2)]
        group.all_to_all([torch.zeros_like(part) for part in parts], parts).wait()  # It connects.
        whole = Range(0, 0, 8)
        if rank.rank == 1:
            rank.store.wait(["said/raised/0"], 30)
            return False
        lose_soon(group, 1)
        held = ShardState()
        plan = [Transfer(1, 0, whole)]
        with pytest.raises(GroupAborted, match=LOST):
            exchange(held, plan, [{MASTER: torch.float32}], group)
        rank.say("raised")
        return bool(held.ranges)


def test_ranges_whose_transfer_was_stopped_are_not_taken_for_state() -> None:
    with StandInRanks(2) as ranks:
        assert ranks.run(lose_the_sender)[0] is False


def keep_buffers_of_a_plain_step(rank: Rank) -> dict[str, Any]:
    """Rank 0 stops between the vote on a step and its buffers. Rank 1 has stepped by then, so the
    step counts, and it keeps the buffers for the function that runs again. (In the first two steps
    the ranks compare their parameters before that.)"""
    told: dict[str, Any] = {}

    def train(ctx: cl.Context) -> None:
        model = cl.DistributedDataParallel(net().to(ctx.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ctx.register("model", model)
        ctx.register("optimizer", optimizer)
        engine = engine_of(model)
        try:
            for step in range(4):
                optimizer.zero_grad()
                loss = model(inputs(ctx.rank).to(ctx.device)).square().mean()
                if step == 2 and ctx.rank == 0:
                    engine.sync_buffers = lambda *_, **__: stop_here(rank)
                told["before"] = [b.cpu() for b in model.buffers()] if step < 3 else told["before"]
                loss.backward()
                if step == 2:
                    lose_soon(ctx.group, 0)
                optimizer.step()
        except GroupAborted:
            kept = engine.buffers.committed()
            told["kept"] = [kept[name].cpu() for name, _ in model.module.named_buffers()]
            raise

    live_on(rank, 0, train)
    return told


def test_buffers_that_are_kept_behind_a_plain_step_are_never_those_that_did_not_arrive() -> None:
    with StandInRanks(2) as ranks:
        told = ranks.run(keep_buffers_of_a_plain_step)[1]
    for kept, before in zip(told["kept"], told["before"], strict=True):
        assert torch.equal(kept, before)


# -- the end of a step ---------------------------------------------------------------------------


def gathers_that_have_ended(rank: Rank) -> list[bool]:
    """Of one step, when it has returned: whether its parameters are known to have come."""
    nccl.settings.kernel_s = 0.05
    ended: list[bool] = []

    def train(ctx: cl.Context) -> None:
        model = cl.DistributedDataParallel(torch.nn.Linear(6, 8).to(ctx.device))
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        shard, gathers = optimizer_engine_of(optimizer).shard, []
        start_gather = shard.start_gather

        def started(portion: Any) -> Any:
            gathers.extend(start_gather(portion))
            return gathers[-len(portion) :]

        shard.start_gather = started  # type: ignore[method-assign]
        for _ in range(3):  # In the first two the ranks compare their parameters.
            gathers.clear()
            model(torch.ones(4, 6, device=ctx.device)).sum().backward()
            optimizer.step()
            ended[:] = [gather.work.is_completed() for gather in gathers]

    with rank.group() as group:
        in_run(group, train, goes_on=True, driver=Driver())
    return ended


def test_a_step_of_a_run_that_survives_a_loss_returns_when_its_parameters_have_come() -> None:
    with StandInRanks(2) as ranks:
        assert ranks.run(gathers_that_have_ended) == [[True], [True]]
