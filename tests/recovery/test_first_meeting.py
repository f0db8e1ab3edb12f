"""Workers that stop or die before they have met the others, in a run that goes on without them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data_parallel import distributed_data_parallel


class StrikesOnce:
    """An argument that does something to the process of the first worker that unpickles it."""

    def __init__(self, folder: Path, what: signal.Signals) -> None:
        self.folder, self.what = folder, what

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return struck, (self.folder, self.what)


def struck(folder: Path, what: signal.Signals) -> str:
    try:
        os.close(os.open(folder / "struck", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "another"
    (folder / "pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), what)
    return "this one"


def train(ctx: cl.Context, fault: object) -> tuple[int, int, list[list[float]]]:
    torch.manual_seed(ctx.rank)
    model = cl.DistributedDataParallel(torch.nn.Linear(3, 2))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1, replicas=2)
    ctx.register("model", model)
    ctx.register("optim", optim)
    for epoch in ctx.epochs(2):
        with cl.Join([model, optim]):
            for batch in ctx.shard(torch.ones(24, 3), 2, epoch=epoch):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
    return os.getpid(), optim.num_steps, [p.tolist() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
async def test_who_never_comes_to_the_first_meeting_is_replaced_and_the_others_begin(
    cluster: None, tmp_path: Path, what: signal.Signals
) -> None:
    few = {"CPU": 0.1}
    # A new worker imports for seconds where a busy machine runs it, and the others wait for it.
    async with cl.Session((1, 3), resources_per_worker=few, timeout_s=15) as session:
        await session.run(train, fault=None)
        told = await session.run(train, fault=StrikesOnce(tmp_path, what))
        again = await session.run(train, fault=None)
    victim = int((tmp_path / "pid").read_text())
    assert victim not in {pid for pid, _, _ in told}
    assert {pid for pid, _, _ in told} <= {pid for pid, _, _ in again}
    assert len(told) in (2, 3) and len(again) == 3
    # Nothing had begun, so nothing is missing: every batch of the epochs was taken.
    batches = 12 * 2
    assert {steps for _, steps, _ in told} <= {-(-batches // size) for size in (2, 3)}
    assert all(parameters == told[0][2] for _, _, parameters in told)


ORDERS = {
    "driver": "driver 0 at meet 1",
    "driver, by the rank that comes last": "driver 1 at meet 1; stop 0 at meet 1",
    "driver and its killer": "driver 0 at meet 1; kill 0 at meet 1",
    "driver and another": "driver 0 at meet 1; kill 1 at meet 1",
    "driver, and the next one": "driver 0 at meet 1; driver 1 at meet 2; kill 2 at meet 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
async def test_a_driver_that_dies_when_ranks_meet_for_the_first_time_costs_nothing(
    cluster: None, monkeypatch: pytest.MonkeyPatch, orders: str
) -> None:
    monkeypatch.setenv("CHORUSLINE_FAULT_PLAN", orders)
    with pytest.warns(UserWarning, match="injects faults"):
        session = cl.Session((1, 3), resources_per_worker={"CPU": 0.1}, timeout_s=15)
    async with session:
        assert session._holder.worker_group is not None
        driver = session._holder.worker_group._driver
        told = await session.run(train, fault=None)
        assert session._holder.worker_group._driver is not driver, "the order was carried out"
    assert all(8 <= steps <= 24 for _, steps, _ in told)  # By three ranks, and by one.
    assert all(parameters == told[0][2] for _, _, parameters in told)


def train_slowly_made(
    ctx: cl.Context, folder: Path, instant: str, sharded: bool
) -> tuple[int, int, list[list[float]]]:
    """As `train`; rank 1 dies at this instant, while the objects are made."""

    def reach(name: str) -> None:
        if ctx.rank == 1 and name == instant:
            struck(folder, signal.SIGKILL)

    ctx.reduce(1.0)  # So that a collective of the function has succeeded.
    module = torch.nn.Linear(3, 2)
    with pytest.MonkeyPatch.context() as patch:
        copy = distributed_data_parallel.broadcast_tensors
        patch.setattr(
            distributed_data_parallel,
            "broadcast_tensors",
            lambda *args, **kwargs: (reach("in the model"), copy(*args, **kwargs))[1],
        )
        model = cl.DistributedDataParallel(module)
    reach("after the model")
    if sharded:
        optim: torch.optim.Optimizer = cl.ZeroRedundancyOptimizer(
            model, torch.optim.AdamW, lr=0.1, replicas=2
        )
    else:
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    ctx.register("model", model)
    reach("before the optimizer is registered")
    ctx.barrier()
    ctx.register("optim", optim)
    steps = 0
    for epoch in ctx.epochs(2):
        with cl.Join([model, optim] if sharded else [model]):
            for batch in ctx.shard(torch.ones(24, 3), 2, epoch=epoch):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
                steps += 1
    return os.getpid(), steps, [p.tolist() for p in model.parameters()]


INSTANTS = ["in the model", "after the model", "before the optimizer is registered"]


@pytest.mark.parametrize(
    ("instant", "sharded"),
    [
        pytest.param(instant, sharded, marks=() if number == int(sharded) else pytest.mark.slow)
        for number, instant in enumerate(INSTANTS)
        for sharded in (True, False)
    ],
)
async def test_a_death_while_the_objects_are_made_lets_the_others_begin_again(
    session: cl.Session, tmp_path: Path, instant: str, sharded: bool
) -> None:
    told = await session.run(train_slowly_made, folder=tmp_path, instant=instant, sharded=sharded)
    assert (tmp_path / "pid").exists(), "it was killed"
    assert int((tmp_path / "pid").read_text()) not in {pid for pid, _, _ in told}
    assert sum(steps for _, steps, _ in told) == 12 * 2
    assert all(parameters == told[0][2] for _, _, parameters in told)
