"""Faults that a person orders: processes of a run die or stop at instants that have names.

    CHORUSLINE_FAULT_PLAN="kill 1 at vote 3; stop 0 at gather 5" python train.py
    CHORUSLINE_FAULT_PLAN="seed 7" python train.py

An order is `WHAT SEAT at INSTANT N`: when the worker in that seat comes to the instant for the Nth
time. Only workers with which the run began are struck, so those that replace them do not repeat
them. The code that trains calls `Faults.reach` at these instants; without orders that is one look
at an empty table. Tests arm the same instants with acts of their own (`Faults.at`).
"""

from __future__ import annotations

import enum
import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from chorusline.collectives.contract.call_site import users_level

VARIABLE = "CHORUSLINE_FAULT_PLAN"


class Instant(enum.Enum):
    """An instant in the step of a ZeroRedundancyOptimizer, or in a recovery
    (runtime/recovery/in_place.py)."""

    REDUCE = "reduce"
    """(1) Gradients are on their way; this rank has not waited for them."""

    REDUCED = "reduced"
    """They are reduced here."""

    REPLICATE = "replicate"
    """(2) Reduced parts are on their way to their replicas."""

    VOTE = "vote"
    """(3) This rank has not voted."""

    SEEN = "seen"
    """It has seen the ballot."""

    APPLY = "apply"
    """(4) It has not stepped the bucket that is next."""

    APPLIED = "applied"
    """It has stepped a bucket."""

    GATHER = "gather"
    """(5) New parameters of a bucket are on their way."""

    STEPPED = "stepped"
    """The step is over here."""

    MEET = "meet"
    """The ranks of a generation are about to meet, even those of the first one that make a new
    group."""

    MOVE = "move"
    """(d) They have met, and are about to move state."""

    ENTER = "enter"
    """(e) This rank is about to deal the samples again, and to cut its shards."""

    GATHER_AGAIN = "gather again"
    """(f) Parameters that some rank may lack are on their way."""

    RECOVERED = "recovered"
    """This rank continues its step."""


class What(enum.Enum):
    """What happens to a worker: the signal that it sends itself, or the death of the driver."""

    KILL = "kill"
    STOP = "stop"
    TERMINATE = "terminate"
    DRIVER = "driver"
    """The worker kills the driver."""


SIGNALS = {
    What.KILL: signal.SIGKILL,
    What.STOP: signal.SIGSTOP,
    What.TERMINATE: signal.SIGTERM,
}


@dataclass(frozen=True, slots=True)
class Order:
    """One order of the plan: `kill 1 at vote 20`. seat: the number of the worker."""

    what: What
    seat: int
    instant: Instant
    number: int

    def __str__(self) -> str:
        return f"{self.what.value} {self.seat} at {self.instant.value} {self.number}"


_ORDER = re.compile(r"(\w+) (\d+) at ([a-z ]+?) (\d+)")
_SEED = re.compile(r"seed (\d+)")


def ordered(num_workers: int) -> tuple[Order, ...]:
    """The orders of this process's environment; a warning shows them. For a constructor that a
    person calls. Raises ValueError, as `parsed`."""
    orders = parsed(os.environ.get(VARIABLE, ""), num_workers)
    if orders:
        faults = "; ".join(map(str, orders))
        warnings.warn(f"{VARIABLE} injects faults: {faults}", stacklevel=users_level())
    return orders


def parsed(text: str, num_workers: int) -> tuple[Order, ...]:
    """The orders in the value of CHORUSLINE_FAULT_PLAN. num_workers: for those drawn by a seed.

    Raises ValueError with the words that are known.
    """
    if seed := _SEED.fullmatch(text.strip()):
        return drawn(int(seed[1]), num_workers)
    orders = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        found = _ORDER.fullmatch(entry)
        try:
            if found is None or int(found[4]) < 1:
                raise ValueError
            # The enums refuse unknown words by a ValueError, too: one sentence names them all.
            orders.append(Order(What(found[1]), int(found[2]), Instant(found[3]), int(found[4])))
        except ValueError:
            whats = ", ".join(one.value for one in What)
            instants = ", ".join(one.value for one in Instant)
            raise ValueError(
                f"{VARIABLE} has an order {entry!r}; write `WHAT SEAT at INSTANT N` with orders "
                f"between semicolons, or `seed N`. WHAT: {whats}. INSTANT: {instants}. N: from 1, "
                "which time the worker comes to it"
            ) from None
        if orders[-1].seat >= num_workers:  # In silence, it would strike nobody.
            raise ValueError(
                f"{VARIABLE} has an order {entry!r} for seat {orders[-1].seat}, and the session "
                f"has the seats 0 to {num_workers - 1}, one for each of its workers"
            )
    return tuple(orders)


def drawn(seed: int, num_workers: int) -> tuple[Order, ...]:
    """One to three orders, for different seats."""
    rng = random.Random(seed)
    seats = rng.sample(range(num_workers), min(num_workers, rng.randint(1, 3)))
    whats = rng.choices(list(What), (6, 1, 1, 2), k=len(seats))
    return tuple(
        Order(what, seat, rng.choice(list(Instant)), rng.randint(1, 20))
        for what, seat in zip(whats, seats, strict=True)
    )


class Faults:
    """What happens to one rank in one run, by instant."""

    def __init__(self) -> None:
        self._armed: dict[Instant, list[tuple[int, Callable[[], object]]]] = {}

    @classmethod
    def of(cls, orders: tuple[Order, ...], seat: int, kill_driver: Callable[[], object]) -> Faults:
        """The orders for the worker in a seat."""
        faults = cls()
        for order in orders:
            if order.seat == seat:
                act = kill_driver if order.what is What.DRIVER else _sender(SIGNALS[order.what])
                faults.at(order.instant, act, order.number)
        return faults

    def at(self, instant: Instant, act: Callable[[], object], number: int = 1) -> None:
        """Act once, when the rank comes to the instant for the `number`th time from now."""
        self._armed.setdefault(instant, []).append((number, act))

    def reach(self, instant: Instant) -> None:
        """The rank is at this instant. Called by the code that trains, on its thread."""
        if self._armed:
            self._reach(instant)

    def _reach(self, instant: Instant) -> None:
        waiting, due = [], []
        for number, act in self._armed.pop(instant, []):
            if number > 1:
                waiting.append((number - 1, act))
            else:
                due.append(act)
        if waiting:
            self._armed[instant] = waiting
        for act in due:
            act()


def _sender(number: signal.Signals) -> Callable[[], None]:
    def send() -> None:
        os.kill(os.getpid(), number)
        if number is not signal.SIGTERM:
            time.sleep(0.5)  # The signal may need a moment; nothing is to happen in it.

    return send
