"""The memory that the ranks of one host share, and how they wait in it.

One rank makes a nameless file in memory (memfd); the others open it through /proc and map it. The
file lives exactly as long as the processes that map it, so nothing is left behind, even if all of
them are killed. shared_memory/layout.py has the layout.

**Ticks.** Every collective is a sequence of ticks, which all ranks count in the same way. A rank
*publishes* tick t by storing t in its block. One rule makes this safe:

    A rank writes data of tick t after all ranks have published t-1, and before it publishes t.
    It reads data of tick t after all ranks have published t, and before it publishes t+1.

So a slot is free again two ticks later, and no further locks are needed.

**Waiting** is a short spin that yields the core, then sleep on the tick of the late rank (futex).
A publisher makes the system call that wakes only if a rank's block says that it sleeps on that
tick. Sleep is split into slices (futex.py says why); between slices a waiter checks the abort
word, the other processes (pidfd) and the deadline.

Publishing relies on stores becoming visible in program order. x86 guarantees that; elsewhere
`fence` orders them by the acquire-release pair of a lock.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..contract.call_site import SITE_BYTES
from ..contract.errors import (
    CollectiveError,
    CollectiveTimeout,
    PeerLost,
    waits_for_resting,
)
from ..contract.operation import Kind, Operation
from ..diagnosis.blame import describe_waits, to_blame
from ..diagnosis.flight_recorder import describe_positions
from ..diagnosis.late_warning import Lateness
from ..diagnosis.signature import Signature, mismatch
from . import robust_list
from .end_record import EndRecord
from .futex import WEAKLY_ORDERED, fence, sleep_on, wake
from .layout import (
    ABORT_WORD,
    ASLEEP,
    BELL,
    ENDED,
    RESTS,
    RING_BYTES,
    SHOWN,
    SIGNATURE,
    SLEEPS_ON,
    STATE,
    TICK,
    block_at,
    channel_at,
    mapped_file,
    record_start,
    rings_start,
    sites_start,
    slots_start,
)
from .wait_table import Waits

OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""What this process is short of; such an error says nothing of another one."""

_ABSENT, _OPEN, _CLOSED = 0, 1, 2

_SPINS_WITH_CORES = 200  # sched_yield takes about 0.4 us on an idle core
_SPINS_OVERCOMMITTED = 50  # more ranks than cores: another rank needs the core to arrive
# On a busy core each yield lasts another process's time slice: 200 yields took two seconds, in
# which the waiter did not notice that the generation had ended.
_SPIN_S = 0.0003
_SLICES_S = (0.002, 0.005, 0.02)

Overdue = Callable[[], tuple[str, float] | None]
"""The name of what should have ended by now, and its timeout in seconds; None if nothing should."""


class SharedSegment:
    """This rank's view of the memory that it shares with the other ranks of its host.

    rank, size: as in the group; all of its ranks map the segment. generation: for errors.
    slot_bytes: bytes of one slot.
    """

    def __init__(
        self, descriptor: int, pids: list[int], rank: int, generation: int, slot_bytes: int
    ) -> None:
        """descriptor: of the memory; the segment owns it from here on. pids: one per rank."""
        self.rank = rank
        self.size = len(pids)
        self.generation = generation
        self.slot_bytes = slot_bytes
        self.pids = pids
        try:
            self._bytes = mapped_file(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        self.address = self._bytes.data_ptr()
        self._map = self._bytes.numpy().data
        self.sites_at = sites_start(self.size)
        self._words = self._map[: self.sites_at].cast("Q")
        self.waits = Waits(self._words, rank, self.size)
        self._record = EndRecord(self._map, self._words, record_start(self.size), descriptor)
        self.slots_at = slots_start(self.size)
        self._rings_at = rings_start(self.size, slot_bytes)

        blocks = [block_at(r) for r in range(self.size)]
        self._block = blocks[rank]
        self._tick_at = blocks[rank] + TICK
        self._tick_addresses = [self.address + 8 * (b + TICK) for b in blocks]
        self._peers = tuple((r, b + TICK) for r, b in enumerate(blocks) if r != rank)
        self._peer_ticks = tuple(at for _, at in self._peers)
        self._peer_sleeps = tuple(b + SLEEPS_ON for r, b in enumerate(blocks) if r != rank)
        self._blocks = blocks
        # Not an attribute that is incremented: the control loop's thread rings bells, too.
        self._rings = itertools.count(1)
        self.spins = (
            _SPINS_WITH_CORES if self.size <= (os.cpu_count() or 1) else _SPINS_OVERCOMMITTED
        )
        self._views: dict[tuple[int, int, int, torch.dtype], tuple[torch.Tensor, ...]] = {}
        self._exits = select.poll()
        self._rank_of_pidfd: dict[int, int] = {}
        # By rank, where the kernel has no pidfd: the process, and when it started.
        self._looked_at: dict[int, tuple[int, str]] = {}
        # The lane and the messages check for dead ranks in different threads, and a poll object
        # serves one thread at a time.
        self._polling = threading.Lock()
        self._look: Callable[[], None] | None = None  # None: nothing else to look at
        self._turns = 1
        self._lateness = Lateness(rank, self.size)
        # Passes on to the parent which ranks this rank waits for, and since; None: not a subgroup.
        self.on_wait: Callable[[Sequence[int], float], None] | None = None
        try:
            robust_list.mark_at_exit(
                self._words, self._block + ENDED, self.address + 8 * (self._block + ENDED)
            )
            self._watch_peers()
        except BaseException:
            self.leave()
            raise

    def _watch_peers(self) -> None:
        for peer, pid in enumerate(self.pids):
            # Ranks may be threads of one process, and end with it.
            if peer == self.rank or pid == os.getpid():
                continue
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError as error:
                raise PeerLost(
                    "rendezvous", self.generation, [peer], f"process {pid} ended"
                ) from error
            # A kernel before 5.3, or a sandbox without the call; a Python that was built without.
            except (OSError, AttributeError) as error:
                if getattr(error, "errno", None) in OWN_LIMITS:
                    raise
                # Without a pidfd the process is told from a later one of the same number by its
                # start.
                if not (started_at := _started_at(pid)):
                    raise PeerLost(
                        "rendezvous", self.generation, [peer], f"process {pid} ended"
                    ) from None
                self._looked_at[peer] = pid, started_at
                continue
            self._rank_of_pidfd[pidfd] = peer
            self._exits.register(pidfd, select.POLLIN)

    # -- data ----------------------------------------------------------------------------------

    def slots(self, tick: int, offset: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor]:
        """Every rank's slot of `tick` from byte `offset` on, as tensors of (count,), by rank."""
        key = (tick & 1, offset, count, dtype)
        views = self._views.get(key)
        if views is None:
            # A model's buckets are few sizes; making the views again costs more than a small
            # operation.
            if len(self._views) > 512:  # Views of ever new sizes must not pile up.
                self._views.clear()
            nbytes = count * dtype.itemsize
            at = [
                self.slots_at + (2 * r + (tick & 1)) * self.slot_bytes + offset
                for r in range(self.size)
            ]
            views = tuple(self._bytes[a : a + nbytes].view(dtype) for a in at)
            self._views[key] = views
        return views  # type: ignore[return-value]

    def write_numbers(self, tick: int, numbers: Sequence[int]) -> None:
        """Write `numbers` to the start of this rank's slot of `tick`, 8 bytes each."""
        at = self.slots_at + (2 * self.rank + (tick & 1)) * self.slot_bytes
        struct.pack_into(f"={len(numbers)}q", self._map, at, *numbers)

    def read_numbers(self, tick: int, rank: int, count: int) -> tuple[int, ...]:
        """The numbers that `rank` wrote with `write_numbers`."""
        at = self.slots_at + (2 * rank + (tick & 1)) * self.slot_bytes
        return struct.unpack_from(f"={count}q", self._map, at)

    def show(self, tick: int, *words: int) -> None:
        """Show three numbers to the other ranks, as data of `tick`."""
        at = self._block + SHOWN + 3 * (tick & 1)
        self._words[at], self._words[at + 1], self._words[at + 2] = words

    def shown(self, tick: int, rank: int) -> tuple[int, int, int]:
        """The numbers that `rank` shows in `tick`."""
        at = self._blocks[rank] + SHOWN + 3 * (tick & 1)
        return self._words[at], self._words[at + 1], self._words[at + 2]

    # -- ticks ---------------------------------------------------------------------------------

    def publish(self, tick: int) -> None:
        """Make this rank's data of `tick` visible to all ranks."""
        words = self._words
        if WEAKLY_ORDERED:
            fence()
        # After the data: whoever sees the tick may read them.
        words[self._tick_at] = tick
        me = self.rank + 1
        # One call wakes all that sleep on this word; mostly none does, and the call is saved.
        for at in self._peer_sleeps:
            if words[at] == me:
                self._wake(self.rank)
                return

    def reached(self, tick: int) -> bool:
        """Whether all ranks have published `tick`."""
        words = self._words
        # A plain loop: small operations ask often, and all() would make a generator each time.
        for at in self._peer_ticks:
            if words[at] < tick:
                return False
        if WEAKLY_ORDERED:
            fence()
        return True

    def wait(self, tick: int, operation: Operation | str, overdue: Overdue, spin: bool) -> None:
        """Return when all ranks have published `tick`. spin: yield the core first, then sleep.

        Raises the error that ends the generation, which all ranks raise.
        """
        words = self._words
        spins = self.spins if spin else 1
        for peer, at in self._peers:
            # One late rank after the other: those that came while this one waited cost nothing.
            if words[at] >= tick:
                continue
            spin_until = time.monotonic() + _SPIN_S
            for _ in range(spins):
                os.sched_yield()
                if words[at] >= tick or time.monotonic() > spin_until:
                    break
            if words[at] < tick:
                self._sleep(peer, at, tick, operation, overdue)
        # What a peer wrote before its tick must not be read before the tick.
        if WEAKLY_ORDERED:
            fence()

    def _sleep(
        self, peer: int, at: int, tick: int, operation: Operation | str, overdue: Overdue
    ) -> None:
        words = self._words
        address = self._tick_addresses[peer]
        mine = self._block + SLEEPS_ON
        slices = iter(_SLICES_S)
        slice_s = 0.0
        has_told = False
        try:
            while True:
                # Say first that it sleeps, then look: a peer that comes in between wakes it.
                words[mine] = peer + 1
                seen = words[at]
                if seen >= tick:
                    return
                # Short at first, since most ranks are late by little; long in the end, as each look
                # costs CPU time that a late rank may need.
                slice_s = next(slices, slice_s)
                sleep_on(address, seen, slice_s)
                if words[at] >= tick:
                    return
                late = self._check(tick, operation, overdue)
                # A warning long before the deadline: a person can look at the late rank while it
                # hangs.
                if self._lateness.is_due(operation):
                    assert isinstance(operation, Operation)
                    self._lateness.tell(operation, late, self._positions(late))
                if self.on_wait is not None and isinstance(operation, Operation):
                    has_told = True
                    self.on_wait(late, operation.issued_at)
        finally:
            # Also after an error: a publisher would make a system call for a rank that does not
            # sleep.
            words[mine] = 0
            if has_told and self.on_wait is not None:
                self.on_wait((), 0.0)

    def _wake(self, rank: int) -> None:
        wake(self._tick_addresses[rank])

    def _check(self, tick: int, operation: Operation | str, overdue: Overdue) -> list[int]:
        """The late ranks. Raises if a late rank is gone, or the generation or the time is over."""
        # The error that stands comes first. All ranks raise that one, whatever this rank finds.
        self.raise_failure()
        if self._look is not None:
            self._look()
        # The ticks are read last. A peer that was late may come, return from its function and close
        # while this rank has no CPU, and whoever has come is not to blame for what it did then.
        ended = self.ended_ranks()
        states = {peer: self._words[self._blocks[peer] + STATE] for peer, _ in self._peers}
        rests = {peer: self._words[self._blocks[peer] + RESTS] for peer, _ in self._peers}
        self.fence()
        late = [peer for peer, at in self._peers if self._words[at] < tick]
        if not late:
            return late
        dead = [rank for rank in late if rank in ended]
        if dead:
            pids = ", ".join(f"process {self.pids[rank]} ended" for rank in dead)
            raise self.abort(PeerLost(str(operation), self.generation, dead, pids))
        # A rank that closed is not dead, and its operating system has nothing to report.
        closed = [rank for rank in late if states[rank] == _CLOSED]
        if closed:
            detail = "closed the group while others still used it"
            raise self.abort(PeerLost(str(operation), self.generation, closed, detail))
        turns = self._turns
        resting = [rank for rank in late if rests[rank] == turns]
        if resting:
            raise self.abort(waits_for_resting(operation, self.generation, resting))
        # The deadline comes last: a death explains more than a timeout.
        if (found := overdue()) is not None:
            name, timeout_s = found
            # A late rank may itself wait for another one, in a message or a subgroup: the end of
            # such a chain is to blame.
            waits_for = self.waits.of_all(timeout_s)
            here = [rank for rank in range(self.size) if rank not in late]
            raise self.abort(
                CollectiveTimeout(
                    name,
                    self.generation,
                    to_blame(late, waits_for, here),
                    timeout_s,
                    self._positions(late) + describe_waits(waits_for, late),
                )
            )
        return late

    def ended_ranks(self) -> set[int]:
        """Those whose process has ended, as the kernel says."""
        blocks = enumerate(self._blocks)
        ended = {r for r, at in blocks if robust_list.has_ended(self._words, at + ENDED)}
        with self._polling:
            ended.update(self._rank_of_pidfd[descriptor] for descriptor, _ in self._exits.poll(0))
            looked_at = self._looked_at.items()
            return ended.union(rank for rank, (pid, at) in looked_at if _has_ended(pid, at))

    # -- messages ------------------------------------------------------------------------------

    def channel(self, sender: int, receiver: int) -> tuple[memoryview, int, torch.Tensor]:
        """All words, the index of the channel's first word, and its ring, (RING_BYTES,) uint8."""
        at = self._rings_at + (sender * self.size + receiver) * RING_BYTES
        word = channel_at(self.size, sender, receiver)
        return self._words, word, self._bytes[at : at + RING_BYTES]

    def fence(self) -> None:
        """Order the reads and writes before this call against those after it."""
        if WEAKLY_ORDERED:
            fence()

    def ring_bell(self, rank: int) -> None:
        """Wake `rank` if it sleeps on its bell. No two ranks and no two threads write equal values
        to a bell, so a rank that has seen an older value does not fall asleep."""
        # A bell, and no tick: messages are known to two ranks, and have no place in the count of
        # all.
        at = self._blocks[rank]
        self._words[at + BELL] = (next(self._rings) * self.size + self.rank) & 0xFFFFFFFF
        if self._words[at + ASLEEP]:
            wake(self.address + 8 * (at + BELL))

    def bell(self) -> int:
        return self._words[self._block + BELL]

    def sleep_on_bell(self, seen: int, slice_s: float) -> None:
        """Return when the bell is no longer `seen`, or after `slice_s` seconds."""
        words = self._words
        words[self._block + ASLEEP] = 1
        try:
            if words[self._block + BELL] != seen:
                return
            sleep_on(self.address + 8 * (self._block + BELL), seen, slice_s)
        finally:
            words[self._block + ASLEEP] = 0

    def show_waits_elsewhere(self, ranks: Sequence[int], since: float) -> None:
        """Show that this rank waits for `ranks` in a subgroup; empty `ranks` end that."""
        self.waits.show_elsewhere(ranks, since)
        if self.on_wait is not None:
            self.on_wait(ranks, since)

    def gone(self) -> dict[int, str]:
        """The ranks known to be lost, and how each was lost."""
        how = {
            rank: "closed the group while others still used it"
            for rank, _ in self._peers
            if self._words[self._blocks[rank] + STATE] == _CLOSED
        }
        for rank in sorted(self.ended_ranks()):
            how[rank] = f"process {self.pids[rank]} ended"
        return how

    # -- signatures and positions --------------------------------------------------------------

    def sign(self, operation: Operation) -> None:
        """Write this rank's operation, for `check_signatures` of the other ranks."""
        at = self._block + SIGNATURE + 4 * (operation.sequence & 1)
        words = self._words
        words[at] = operation.sequence
        words[at + 1] = what_of(operation)
        # Two words hold what has to be equal, so that ranks compare them without making objects.
        words[at + 2] = operation.numel + 1  # Unsigned words; numel may be -1.
        site = self.sites_at + (2 * self.rank + (operation.sequence & 1)) * SITE_BYTES
        self._map[site : site + SITE_BYTES] = operation.padded_site()

    def check_signatures(self, operation: Operation) -> None:
        """Raise CollectiveMismatch, on all ranks, unless all ranks have signed the same operation.

        Called before a caller's tensor is written. Two copies by parity suffice, because no rank
        can be two operations ahead of this rank.
        """
        words = self._words
        offset = SIGNATURE + 4 * (operation.sequence & 1) + 1
        mine = self._block + offset
        what, numel = words[mine], words[mine + 1]
        for block in self._blocks:
            at = block + offset
            if words[at] != what or words[at + 1] != numel:
                break
        else:
            return
        signed = [self._signed(r, operation.sequence) for r in range(self.size)]
        error = mismatch(self.generation, signed)
        assert error is not None
        raise self.abort(error)

    def _signed(self, rank: int, sequence: int) -> Signature:
        """What `rank` has signed with this number, or else what it has signed last."""
        signed = self._signature(rank, sequence & 1)
        # A rank whose numbers are ahead has signed something older there, or nothing yet.
        if signed.kind and signed.sequence == sequence:
            return signed
        return max(signed, self._signature(rank, ~sequence & 1))

    def _signature(self, rank: int, parity: int) -> Signature:
        at = self._blocks[rank] + SIGNATURE + 4 * parity
        sequence, what, numel = self._words[at], self._words[at + 1], self._words[at + 2]
        return Signature(sequence, what & 0xFF, (what >> 8 & 0xFF) - 1, (what >> 16) - 1, numel - 1)

    def position_of(self, rank: int) -> str:
        """The last operation of a late rank, in words."""
        return f"rank {rank} is at {self._place(rank)}"

    def _positions(self, late: list[int]) -> str:
        """The last operation of every rank, in words; late ranks come first."""
        return describe_positions({rank: self._place(rank) for rank in range(self.size)}, late)

    def _place(self, rank: int) -> str:
        last = max(self._signature(rank, parity) for parity in range(2))
        if not last.kind:
            return "nothing yet"
        at = self.sites_at + (2 * rank + (last.sequence & 1)) * SITE_BYTES
        site = bytes(self._map[at : at + SITE_BYTES]).rstrip(b"\0").decode(errors="replace")
        if last.kind == Kind.COMPARISON:
            return site  # A comparison stands for another operation, which its site names.
        name = f"{Kind(last.kind).name.lower()} #{last.sequence}"
        return f"{name}, {site}" if site else name

    # -- the end -------------------------------------------------------------------------------

    def failure(self) -> CollectiveError | None:
        """The error that ended the generation, if one did."""
        return self._record.read() if self._words[ABORT_WORD] else None

    def raise_failure(self) -> None:
        """Raise the error that ended the generation, if one did."""
        if self._words[ABORT_WORD]:
            # No frame may have it as a variable: its traceback has the frames, and with them the
            # tensors of operations, until garbage collection finds them.
            raise self._record.read()

    def is_interrupted_abort(self) -> bool:
        """Whether this is a signal handler that has interrupted `abort`, whose error stands."""
        return self._record.has_interrupted_a_write()

    def abort(self, error: CollectiveError) -> CollectiveError:
        """End the generation for all ranks; returns the error that stands, maybe an earlier one."""
        if not self._record.write(error):
            return error  # This rank has left.
        # Those that sleep would see it after a slice, up to 20 ms later.
        for rank in range(self.size):
            self._wake(rank)
            self.ring_bell(rank)
        failure = self.failure()
        assert failure is not None
        return failure

    def meet(self, timeout_s: float, look: Callable[[], None]) -> None:
        """Return when all ranks have mapped the segment. Uses tick 1.

        look: called while this rank waits; raises if the rendezvous is over. Another rank may have
            been told to leave it before it could map the segment, and nothing here shows that.
        """
        give_up_at = time.monotonic() + timeout_s

        def overdue() -> tuple[str, float] | None:
            return None if time.monotonic() < give_up_at else ("rendezvous", timeout_s)

        self._words[self._block + STATE] = _OPEN
        self.publish(1)
        self._look = look
        try:
            self.wait(1, "rendezvous", overdue, spin=True)
        except CollectiveError as error:
            # Ranks that come later must not wait for this one: they find the error at once.
            raise self.abort(error) from None
        finally:
            self._look = None

    def turn(self) -> None:
        self._turns += 1

    def rest(self) -> None:
        """Show the other ranks that this one issues nothing more before the next turn."""
        self._words[self._block + RESTS] = self._turns

    def leave(self) -> None:
        """Show the other ranks that this rank has closed, and free its resources.

        The last tensor that views the mapping frees the mapping itself.
        """
        # A rank that waits for this one looks why it does not come, and names it.
        self._words[self._block + STATE] = _CLOSED
        self._wake(self.rank)
        robust_list.forget(self._words, self._block + ENDED)
        with self._polling:
            for pidfd in self._rank_of_pidfd:
                self._exits.unregister(pidfd)
                os.close(pidfd)
            self._rank_of_pidfd.clear()
            self._looked_at.clear()
        self._record.close()


def what_of(operation: Operation) -> int:
    """All that has to be equal on all ranks, but the number of elements."""
    return operation.kind | (operation.dtype + 1) << 8 | (operation.detail + 1) << 16


def _started_at(pid: int) -> str:
    """When the process started, in ticks since the kernel did; empty if it has ended. Another one
    may get its number, but not its start. Raises OSError where that cannot be read."""
    try:
        # The name in parentheses may hold anything; the fields after it are plain.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _has_ended(pid: int, started_at: str) -> bool:
    """Whether the process that started then has ended, as far as this one can see."""
    try:
        return _started_at(pid) != started_at
    except OSError:  # This process is short of something (OWN_LIMITS), and the other one lives.
        return False
