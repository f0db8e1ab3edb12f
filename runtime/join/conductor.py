"""How ranks that have run out of data follow collectives that nobody can foresee.

The steps of our joinables are the same each time; a joined rank shadows them from memory. What else
a loop's body issues (SyncBatchNorm in forward and backward, collectives of the user's own, as often
as the body likes) is not. Those run on groups of their own, which a Join *follows*:

- A *pass* begins on all ranks at once: with each batch of `ctx.shard`, of which all ranks know how
  many everybody has; else with each forward of the model, by one int32 per rank.
- While every rank has data nothing else happens.
- In a pass that some rank has no data for, the lowest rank that has (the *conductor*) announces
  what comes next, by a broadcast of a few numbers: an operation, and ranks without data take part
  in it with its neutral element; or a joinable's part of the step, and they run its main hook; or
  the next pass.

All of it travels on the first of the groups, in the order of the program, so it cannot be overtaken
by what it announces.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial

import torch

from collectives import Group
from collectives.contract.operation import Kind, describe
from collectives.neutral import take_part, why_not_without

from .ledger import JoinLedger

_NUMBERS = 6  # what is announced, and what there is to know of it


class Next(enum.IntEnum):
    """What the conductor announces. The number travels."""

    PASS = 0
    """The next pass; number: of the batch, where that is known."""
    HOOK = 1
    """A joinable's part of the step; number: of the joinable."""
    OPERATION = 2
    """A collective; number: of the group; then kind, numel, dtype and detail."""
    STOP = 3
    """Nobody begins another pass: all have agreed to stop here, between two steps."""


class Conductor:
    """One rank's part in the passes inside one Join, as a follower or with data.

    groups: those that are followed, of the same ranks. on_pass: called on every rank with those
    that take a pass. A batch is known by its number where ranks can look ahead, else it is None.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        ledger: JoinLedger,
        on_pass: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._groups = list(groups)
        self._channel = groups[0]
        self._ledger = ledger
        self._on_pass = on_pass
        self._everybody = tuple(range(self._channel.size))
        self._is_quiet = False  # what is issued now is known to all ranks
        self.live = self._everybody
        """The ranks that have data for the current pass, equal on all ranks."""
        self.last_live = self._everybody
        """Those that had data for the last pass that any rank took: they have its statistics."""

    def attach(self) -> None:
        for number, group in enumerate(self._groups):
            group.announce_to(partial(self._operation, number))

    def detach(self) -> None:
        for group in self._groups:
            group.announce_to(None)

    # -- a rank with data ------------------------------------------------------------------------

    def begin_pass(self, batch: int | None = None) -> None:
        """This rank has a batch for the next pass."""
        self._begin_pass(batch, has_data=True)

    def _begin_pass(self, batch: int | None, *, has_data: bool) -> None:
        if self._somebody_is_out:
            self._tell(Next.PASS, -1 if batch is None else batch)
        self._find_live(batch, has_data)

    def begin_hook(self, number: int) -> None:
        """Joinable `number` begins its part of the step."""
        if self._somebody_is_out and not self._is_quiet:
            self._tell(Next.HOOK, number)

    def stop(self) -> None:
        """All have agreed to stop, and this rank has come to the end of its pass. What a body does
        behind its step is followed too, so only here others can be let go."""
        if self._somebody_is_out and not self._is_quiet:
            self._tell(Next.STOP)

    def _operation(self, group: int, kind: Kind, numel: int, dtype: int, detail: int) -> None:
        if self._is_quiet or not self._somebody_is_out:
            return
        absent = [rank for rank in self._everybody if rank not in self.live]
        reason = why_not_without(kind, detail, absent)
        if reason is not None:
            of = self._groups[group]
            raise RuntimeError(
                f"{describe(kind, of.describe().operations, numel, dtype)} inside Join, but ranks "
                f"{absent} have run out of data and cannot take part in it: {reason}"
            )
        self._tell(Next.OPERATION, group, kind, numel, dtype, detail)

    # -- a rank without data ---------------------------------------------------------------------

    def follow(self, batch: int | None, run_hook: Callable[[int], None]) -> None:
        """Take part in what others do, until no rank takes a pass any more, or all stop."""
        self._begin_pass(batch, has_data=False)
        self._is_quiet = True
        try:
            while self.live:
                what, number, *operation = self._tell()
                if what == Next.PASS:
                    self._find_live(None if number < 0 else number, has_data=False)
                elif what == Next.HOOK:
                    run_hook(number)
                elif what == Next.STOP:
                    break
                else:
                    kind, numel, dtype, detail = operation
                    take_part(self._groups[number], Kind(kind), numel, dtype, detail)
        finally:
            self._is_quiet = False
        self.live = self._everybody

    # --------------------------------------------------------------------------------------------

    @property
    def _somebody_is_out(self) -> bool:
        return len(self.live) < len(self._everybody)

    def _find_live(self, batch: int | None, has_data: bool) -> None:
        if batch is not None:
            self.live = self._ledger.ranks_with_batch(batch)
        else:
            flags = torch.zeros(len(self._everybody), dtype=torch.int32).to(self._channel.device)
            flags[self._channel.rank] = has_data
            quiet, self._is_quiet = self._is_quiet, True
            try:
                self._channel.all_reduce(flags).wait()
            finally:
                self._is_quiet = quiet
            self.live = tuple(rank for rank, flag in enumerate(flags.tolist()) if flag)
        self.last_live = self.live or self.last_live
        self._on_pass(self.live)

    def _tell(self, *numbers: int) -> list[int]:
        """Announce this if it is for this rank to do; what was announced, in any case."""
        announced = torch.tensor(
            [*numbers, *[0] * (_NUMBERS - len(numbers))], dtype=torch.int64
        ).to(self._channel.device)
        quiet, self._is_quiet = self._is_quiet, True
        try:
            self._channel.broadcast(announced, min(self.live)).wait()
        finally:
            self._is_quiet = quiet
        told: list[int] = announced.tolist()
        return told
