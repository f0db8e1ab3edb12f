"""Faults that a person orders: what may be written, and that each is committed once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import chorusline as cl
from chorusline.actors.fault_plan import VARIABLE, Faults, Instant, Order, What, drawn, parsed


def test_orders_are_read_as_they_are_written() -> None:
    text = "kill 1 at vote 3; driver 0 at gather again 2"
    orders = parsed(text, 2)
    assert orders == (
        Order(What.KILL, 1, Instant.VOTE, 3),
        Order(What.DRIVER, 0, Instant.GATHER_AGAIN, 2),
    )
    assert "; ".join(map(str, orders)) == text
    assert parsed("", 2) == ()


@pytest.mark.parametrize(
    "text", ["kill 1", "kill 1 at lunch 3", "burn 1 at vote 3", "kill 1 at vote 0", "seed x"]
)
def test_an_order_that_cannot_be_read_is_answered_with_the_words_that_are_known(text: str) -> None:
    with pytest.raises(ValueError, match=r"WHAT: kill, .*INSTANT: reduce, .*recovered") as caught:
        parsed(text, 2)
    assert repr(text) in str(caught.value)


def test_an_order_for_a_seat_that_does_not_exist_is_refused_with_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "kill 0 at vote 1; kill 3 at vote 1")
    with pytest.raises(ValueError, match=r"'kill 3 at vote 1' for seat 3, .* the seats 0 to 2"):
        cl.Session((1, 3))


def test_a_seed_draws_the_same_orders_again_for_seats_that_there_are() -> None:
    plans = [drawn(seed, 3) for seed in range(200)]
    assert plans == [parsed(f"seed {seed}", 3) for seed in range(200)]
    orders = [order for plan in plans for order in plan]
    assert {order.what for order in orders} == set(What)
    assert {order.instant for order in orders} == set(Instant)
    assert {order.seat for order in orders} == {0, 1, 2}


def test_each_order_is_committed_once_when_its_instant_has_come_so_often() -> None:
    acts: list[str] = []
    faults = Faults()
    faults.at(Instant.VOTE, lambda: acts.append("second"), 2)
    faults.at(Instant.VOTE, lambda: acts.append("first"))
    counts = []
    for _ in range(4):
        faults.reach(Instant.SEEN)
        faults.reach(Instant.VOTE)
        counts.append(len(acts))
    assert counts == [1, 2, 2, 2] and acts == ["first", "second"]
    orders = (Order(What.DRIVER, 1, Instant.SEEN, 1),)
    for seat in (0, -1, 1):
        Faults.of(orders, seat, lambda: acts.append("driver")).reach(Instant.SEEN)
    assert acts == ["first", "second", "driver"], "that of another seat, or of a newcomer, is not"


def train(ctx: cl.Context, folder: str) -> tuple[list[list[float]], int]:
    (Path(folder) / f"{ctx.rank}-{os.getpid()}").touch()
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(2, 1).double())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.Adam, lr=0.1, replicas=2)
    for epoch in ctx.epochs(2):
        with cl.Join([model, optim]):
            for batch in ctx.shard(torch.ones(24, 2, dtype=torch.float64), 2, epoch=epoch):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
    return [p.tolist() for p in model.parameters()], ctx.world_size


async def test_a_session_commits_what_is_ordered_and_says_so(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"CPU": 0.1}
    monkeypatch.setenv(VARIABLE, "kill 1 at seen 3; driver 0 at vote 2")
    with pytest.warns(UserWarning, match="injects faults: kill 1 at seen 3; driver 0 at vote 2"):
        session = cl.Session((1, 2), resources_per_worker=few, timeout_s=20)
    monkeypatch.delenv(VARIABLE)
    async with session:
        (one,) = await session.run(train, folder=str(tmp_path))
        driver = (await session.snapshot()).driver
    assert one[1] == 1
    assert driver is not None and driver.incarnation == 1, "the first one was killed"
    victim = next(tmp_path.glob("1-*")).name.split("-")[1]
    with pytest.raises(ProcessLookupError):
        os.kill(int(victim), signal.SIGCONT)
    monkeypatch.setenv(VARIABLE, "kill 1")
    with pytest.raises(ValueError, match="WHAT SEAT at INSTANT N"):
        cl.Session(2)
