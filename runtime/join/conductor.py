"""How ranks that have run out of data follow collectives that they cannot foresee.

A step of Chorusline's own joinables is the same each time, and a joined rank shadows it from
memory. Other collectives of a loop's body are not (SyncBatchNorm in forward and backward, the
user's collectives, any number of them). They run on groups of their own, which a Join *follows*:

- A batch begins on all ranks at once. With `ctx.shard` each rank knows how many batches all ranks
  have. Otherwise it begins with a model's forward, of any that is listed, and an all-reduce of one
  int32 per rank tells which ranks have data.
- While every rank has data, nothing is announced.
- In a batch for which some rank has no data, the lowest rank with data (the *conductor*) announces
  what comes next by a broadcast of a few numbers: an operation, in which ranks without data take
  part with its neutral element; a joinable's part of the step, whose main hook they run; or the
  next batch.

Announcements travel on the first of the groups, in program order, so an operation cannot overtake
its announcement.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from chorusline.collectives.contract.errors import name_ranks
from chorusline.collectives.contract.operation import Kind, describe
from chorusline.collectives.group import Group
from chorusline.collectives.neutral import take_part, why_not_without
from chorusline.collectives.operations.host_reads import device_numbers

from .ledger import JoinLedger

_NUMBERS = 6  # in one announcement: a member of Next, and up to five numbers about it


class Next(enum.IntEnum):
    """What the conductor announces. The member's value travels, then the numbers named here."""

    BATCH = 0
    """The next batch: its number, or -1 if unknown."""
    HOOK = 1
    """A joinable's part of the step: the joinable's number."""
    OPERATION = 2
    """A collective: the group's number, then kind, numel, dtype and detail."""
    STOP = 3
    """No rank begins another batch: all ranks have agreed to stop here, between two steps."""


class Conductor:
    """One rank's part in the batches inside one Join, with data of its own or as a follower.

    groups: the groups that are followed, all of the same ranks.
    on_batch: called on every rank when a batch begins, with the ranks that have data for it.
    channel: the group of the announcements; by default the first of `groups`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        ledger: JoinLedger,
        on_batch: Callable[[tuple[int, ...]], None],
        channel: Group | None = None,
    ) -> None:
        self._groups = list(groups)
        self._channel = channel or groups[0]
        self._ledger = ledger
        self._on_batch = on_batch
        self._all_ranks = tuple(range(self._channel.size))
        self._is_quiet = False  # True: all ranks foresee what is issued now, so announce nothing
        self.live = self._all_ranks
        """The ranks that have data for the current batch, equal on all ranks."""
        self.last_live = self._all_ranks
        """The ranks that had data for the last batch of any rank: they have its statistics."""

    def attach(self) -> None:
        for number, group in enumerate(self._groups):
            group.announce_to(partial(self._operation, number))

    def detach(self) -> None:
        for group in self._groups:
            group.announce_to(None)

    # -- a rank with data ------------------------------------------------------------------------

    def begin_batch(self, number: int | None = None) -> None:
        """This rank begins a batch with data. number: of the batch; None where ranks cannot look
        ahead."""
        self._begin_batch(number, has_data=True)

    def _begin_batch(self, number: int | None, *, has_data: bool) -> None:
        if self.some_rank_is_out:
            self._announce(Next.BATCH, -1 if number is None else number)
        self._find_live(number, has_data)

    def begin_hook(self, number: int, *details: int) -> None:
        """Joinable `number` begins its part of the step, or the part of it that `details` say."""
        if self.is_announcing:
            self._announce(Next.HOOK, number, *details)

    @property
    def is_announcing(self) -> bool:
        """Whether ranks without data have to be told what this rank does now."""
        return self.some_rank_is_out and not self._is_quiet

    def tell(self, numbers: Sequence[int]) -> None:
        """More about what was announced; ranks without data know how many numbers to `receive`."""
        with self._quietly():
            self._channel.broadcast(self._on_device(numbers), min(self.live)).wait()

    def stop(self) -> None:
        """All ranks have agreed to stop, and this rank is at the end of its loop's body. Followers
        take part in everything that the body does after its step, so they are released only here.
        """
        if self.is_announcing:
            self._announce(Next.STOP)

    def _operation(self, group: int, kind: Kind, numel: int, dtype: int, detail: int) -> None:
        # With all ranks in the loop nobody follows, and an announcement would cost a broadcast.
        if not self.is_announcing:
            return
        absent = [rank for rank in self._all_ranks if rank not in self.live]
        reason = why_not_without(kind, detail, absent)
        if reason is not None:
            of = self._groups[group]
            raise RuntimeError(
                f"{describe(kind, of.describe().operations, numel, dtype)} inside Join, but "
                f"{name_ranks(absent, 'has', 'have')} run out of data and cannot take part in it: "
                f"{reason}"
            )
        self._announce(Next.OPERATION, group, kind, numel, dtype, detail)

    # -- a rank without data ---------------------------------------------------------------------

    def follow(self, batch: int | None, run_hook: Callable[..., None]) -> None:
        """Take part in what other ranks do, until no rank has a batch, or all ranks stop.

        batch: the number of the coming batch, if known. run_hook: runs the main hook of a joinable,
            or the part of it that the numbers after the joinable's say.
        """
        self._begin_batch(batch, has_data=False)
        # What this rank issues to take part was announced already.
        self._is_quiet = True
        try:
            while self.live:
                what, number, *operation = self.receive()
                if what == Next.BATCH:
                    self._find_live(None if number < 0 else number, has_data=False)
                elif what == Next.HOOK:
                    run_hook(number, *operation)
                elif what == Next.STOP:
                    break
                else:
                    kind, numel, dtype, detail = operation
                    take_part(self._groups[number], Kind(kind), numel, dtype, detail)
        finally:
            self._is_quiet = False
        # Outside the loop all ranks issue the same again.
        self.live = self._all_ranks

    # --------------------------------------------------------------------------------------------

    @property
    def some_rank_is_out(self) -> bool:
        """Whether a rank has no data for the current batch."""
        return len(self.live) < len(self._all_ranks)

    def _find_live(self, batch: int | None, has_data: bool) -> None:
        if batch is not None:  # All ranks know the numbers of batches.
            self.live = self._ledger.ranks_with_batch(batch)
        else:  # Only each rank itself knows whether it has data: ask them all.
            mine = [int(has_data and rank == self._channel.rank) for rank in self._all_ranks]
            flags = device_numbers(mine, torch.int32, self._channel.device)
            with self._quietly():
                everybody = self._channel.all_reduce_and_read(flags).tolist()
            self.live = tuple(rank for rank, flag in enumerate(everybody) if flag)
        self.last_live = self.live or self.last_live
        self._on_batch(self.live)

    def _announce(self, *numbers: int) -> None:
        """A rank with data tells what comes next; what the conductor tells counts. On a GPU it
        does not wait until that has arrived: only ranks without data have to read it."""
        self.tell([*numbers, *[0] * (_NUMBERS - len(numbers))])

    def receive(self, count: int = _NUMBERS) -> list[int]:
        """What the conductor announces or tells, for a rank without data."""
        return self.from_rank(min(self.live), [0] * count)

    def receive_hook(self) -> list[int]:
        """The details of a joinable's part of the step; [-1] if something else is announced."""
        what, _, *details = self.receive()
        return details if what == Next.HOOK else [-1]

    def from_rank(self, rank: int, numbers: Sequence[int]) -> list[int]:
        """The numbers of one rank, on all of them."""
        with self._quietly():
            there = self._on_device(numbers)
            return self._channel.broadcast_and_read(there, rank).tolist()

    def count(self, counts: bool) -> int:
        """On how many ranks `counts` is true."""
        with self._quietly():
            mine = self._on_device([int(counts)])
            return int(self._channel.all_reduce_and_read(mine).tolist()[0])

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        return device_numbers(numbers, torch.int64, self._channel.device)

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """All ranks foresee what is issued inside."""
        quiet, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = quiet
