"""The memory that the ranks of one host share, and how they wait in it.

One rank makes a nameless file in memory (memfd); the others open it through /proc, map it, and
from then on it lives exactly as long as the processes that map it: nothing is left behind, not
even when all of them are killed. It is laid out as

    header     magic, and the abort word
    ranks      one block each: tick, whom it sleeps on, state, what it is doing (twice), bell
    channels   two words per ordered pair of ranks, for messages (shared_messages.py)
    sites      the lines of users' code that began that, as text (two per rank)
    record     the error that ended the generation, as JSON
    slots      two per rank, for data; which one a tick uses is the tick's parity
    rings      one per ordered pair, for messages

**Ticks.** Every collective is a sequence of ticks, counted alike on all ranks. A rank *publishes*
tick t by storing t in its block. One rule makes all of it safe:

    Data of tick t is written after all ranks have published t-1, and before the own publication
    of t. It is read after all have published t, and before the own publication of t+1.

So a slot is free again two ticks later, and no further locks are needed.

**Waiting** is a short spin that yields the core, then sleep on the tick of the rank that is late
(futex). A publisher makes the system call that wakes only if somebody says that it sleeps on it.
Both sides write one word and then read the other's, which a processor may reorder, so a wake-up
can be missed in theory; therefore sleep comes in slices. Between slices a waiter looks at the
abort word, at the other processes (pidfd) and at the deadline.

Publishing relies on stores becoming visible in program order. x86 promises that; elsewhere
`_fence` orders them by the acquire-release pair of a lock.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import select
import struct
import threading
import time
from collections.abc import Sequence

import torch

from .call_site import SITE_BYTES
from .errors import (
    CollectiveError,
    CollectiveTimeout,
    PeerLost,
    error_from_json,
    error_to_json,
)
from .flight_recorder import tell_positions
from .operation import Kind, Operation
from .signature import Signature, mismatch

_MAGIC = 0x43484F5255534C31  # "CHORUSL1"
_HEADER_WORDS = 8
_BLOCK_WORDS = 48  # 384 bytes: words that different ranks write never share a cache line
_TICK, _SLEEPS_ON, _STATE, _SIGNATURE = 0, 8, 16, 24  # words from the start of a rank's block
_BELL, _ASLEEP = 32, 40
_CHANNEL_WORDS = 16
_ABSENT, _OPEN, _CLOSED = 0, 1, 2
_ABORT_WORD = 1
_RECORD_BYTES = 64 * 1024
RING_BYTES = 256 * 1024  # of which no page takes memory before a message needs it
_RECORD_LOCK_S = 1.0  # it is held for microseconds

_SPINS_WITH_CORES = 200  # sched_yield is about 0.4 us on an idle core
_SPINS_OVERCOMMITTED = 50  # more ranks than cores: somebody else needs the core to arrive
# On a busy core each yield lasts a time slice of somebody else's: 200 of them took two seconds, in
# which nobody looked whether the generation had ended.
_SPIN_S = 0.0003
_SLICES_S = (0.002, 0.005, 0.02)

_WEAKLY_ORDERED = platform.machine() not in ("x86_64", "AMD64")
_fence_lock = threading.Lock()

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_lock = ctypes.PyDLL(None)  # for calls that never wait
_SYS_FUTEX = {"x86_64": 202, "AMD64": 202, "aarch64": 98}.get(platform.machine(), 0)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _fence() -> None:
    # Release then acquire, twice: a full barrier on every architecture that CPython runs on.
    for _ in range(2):
        with _fence_lock:
            pass


class SharedSegment:
    """This rank's view of the memory that it shares with the other ranks of its host.

    rank, size: as in the group; all of its ranks map the segment. generation: for errors.
    slot_bytes: bytes of one slot.
    """

    def __init__(
        self, descriptor: int, pids: list[int], rank: int, generation: int, slot_bytes: int
    ) -> None:
        """descriptor: of the memory, owned by the segment from here on. pids: one per rank."""
        self.rank = rank
        self.size = len(pids)
        self.generation = generation
        self.slot_bytes = slot_bytes
        self._descriptor = descriptor
        self._pids = pids
        self._map = mmap.mmap(descriptor, self.bytes_needed(self.size, slot_bytes))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        control_bytes = self._control_bytes(self.size)
        self._words = memoryview(self._map)[:control_bytes].cast("Q")
        self._sites_at = control_bytes
        self._record_at = self._record_start(self.size)
        self._slots_at = self._record_at + _RECORD_BYTES
        self._rings_at = self._slots_at + self.size * 2 * slot_bytes
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

        blocks = [_HEADER_WORDS + _BLOCK_WORDS * r for r in range(self.size)]
        self._block = blocks[rank]
        self._tick_at = blocks[rank] + _TICK
        self._tick_addresses = [self._address + 8 * (b + _TICK) for b in blocks]
        self._peers = tuple((r, b + _TICK) for r, b in enumerate(blocks) if r != rank)
        self._peer_ticks = tuple(at for _, at in self._peers)
        self._peer_sleeps = tuple(b + _SLEEPS_ON for r, b in enumerate(blocks) if r != rank)
        self._blocks = blocks
        self._bells_rung = 0
        self.spins = (
            _SPINS_WITH_CORES if self.size <= (os.cpu_count() or 1) else _SPINS_OVERCOMMITTED
        )
        self._timespec = _Timespec()
        self._views: dict[tuple[int, int, int, torch.dtype], tuple[torch.Tensor, ...]] = {}
        self._abort_lock = threading.Lock()
        self._exits = select.poll()
        self._rank_of_pidfd: dict[int, int] = {}
        self._meet_timeout_s = 0.0
        try:
            self._watch_peers()
        except PeerLost:
            self.leave()
            raise

    # -- making and finding the memory ---------------------------------------------------------

    @staticmethod
    def bytes_needed(size: int, slot_bytes: int) -> int:
        return (
            SharedSegment._record_start(size)
            + _RECORD_BYTES
            + size * 2 * slot_bytes
            + size * size * RING_BYTES
        )

    @staticmethod
    def _control_bytes(size: int) -> int:
        return 8 * (_HEADER_WORDS + _BLOCK_WORDS * size + _CHANNEL_WORDS * size * size)

    @staticmethod
    def _record_start(size: int) -> int:
        return _page_aligned(SharedSegment._control_bytes(size) + 2 * SITE_BYTES * size)

    @staticmethod
    def make_memory(size: int, slot_bytes: int) -> int:
        """A new, zeroed, nameless file for `size` ranks; its descriptor."""
        nbytes = SharedSegment.bytes_needed(size, slot_bytes)
        descriptor = -1
        try:
            descriptor = os.memfd_create("chorusline", os.MFD_CLOEXEC)
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, nbytes)
            os.pwrite(descriptor, _MAGIC.to_bytes(8, "little"), 0)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise OSError(
                error.errno,
                f"no memory of {nbytes} bytes to share between the {size} ranks of this host: "
                f"{error.strerror}. See the limits on the size of files and on their number "
                "(ulimit -f, ulimit -n), and on this container's memory",
            ) from error
        return descriptor

    @staticmethod
    def open_memory(pid: int, descriptor: int) -> int:
        """The memory that process `pid` of this user made; a descriptor of our own."""
        ours = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.pread(ours, 8, 0) != _MAGIC.to_bytes(8, "little"):
            os.close(ours)
            raise OSError(errno.EINVAL, f"descriptor {descriptor} of process {pid} is not ours")
        return ours

    def _watch_peers(self) -> None:
        for peer, pid in enumerate(self._pids):
            if peer == self.rank or pid == os.getpid():
                continue
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError as error:
                raise PeerLost(
                    "rendezvous", self.generation, [peer], f"process {pid} ended"
                ) from error
            self._rank_of_pidfd[pidfd] = peer
            self._exits.register(pidfd, select.POLLIN)

    # -- data ----------------------------------------------------------------------------------

    def slots(self, tick: int, offset: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor]:
        """Every rank's slot of `tick` from byte `offset` on, as tensors of (count,), by rank."""
        key = (tick & 1, offset, count, dtype)
        views = self._views.get(key)
        if views is None:
            if len(self._views) > 512:  # Odd sizes without end must not pile up.
                self._views.clear()
            nbytes = count * dtype.itemsize
            at = [
                self._slots_at + (2 * r + (tick & 1)) * self.slot_bytes + offset
                for r in range(self.size)
            ]
            views = tuple(self._bytes[a : a + nbytes].view(dtype) for a in at)
            self._views[key] = views
        return views  # type: ignore[return-value]

    def write_numbers(self, tick: int, numbers: Sequence[int]) -> None:
        """Into the own slot of `tick`, from its start, 8 bytes each."""
        at = self._slots_at + (2 * self.rank + (tick & 1)) * self.slot_bytes
        struct.pack_into(f"={len(numbers)}q", self._map, at, *numbers)

    def read_numbers(self, tick: int, rank: int, count: int) -> tuple[int, ...]:
        """What `rank` wrote so."""
        at = self._slots_at + (2 * rank + (tick & 1)) * self.slot_bytes
        return struct.unpack_from(f"={count}q", self._map, at)

    # -- ticks ---------------------------------------------------------------------------------

    def publish(self, tick: int) -> None:
        """Show what was written for `tick` to all ranks."""
        words = self._words
        if _WEAKLY_ORDERED:
            _fence()
        words[self._tick_at] = tick
        me = self.rank + 1
        for at in self._peer_sleeps:
            if words[at] == me:
                self._wake(self.rank)
                return

    def reached(self, tick: int) -> bool:
        """Whether all ranks have published `tick`."""
        words = self._words
        for at in self._peer_ticks:
            if words[at] < tick:
                return False
        if _WEAKLY_ORDERED:
            _fence()
        return True

    def wait(self, tick: int, operation: Operation | str, give_up_at: float, spin: bool) -> None:
        """Return when all ranks have published `tick`; spin first if the core is ours to spend.

        give_up_at: time.monotonic() in seconds. Raises the error that ends the generation,
        after telling it to all ranks.
        """
        words = self._words
        spins = self.spins if spin else 1
        for peer, at in self._peers:
            if words[at] >= tick:
                continue
            spin_until = time.monotonic() + _SPIN_S
            for _ in range(spins):
                os.sched_yield()
                if words[at] >= tick or time.monotonic() > spin_until:
                    break
            if words[at] < tick:
                self._sleep(peer, at, tick, operation, give_up_at)
        if _WEAKLY_ORDERED:
            _fence()

    def _sleep(
        self, peer: int, at: int, tick: int, operation: Operation | str, give_up_at: float
    ) -> None:
        words = self._words
        address = self._tick_addresses[peer]
        mine = self._block + _SLEEPS_ON
        slices = iter(_SLICES_S)
        slice_s = 0.0
        try:
            while True:
                words[mine] = peer + 1
                seen = words[at]
                if seen >= tick:
                    return
                slice_s = next(slices, slice_s)
                self._timespec.nanoseconds = int(slice_s * 1e9)
                _libc.syscall(
                    _SYS_FUTEX,
                    ctypes.c_void_p(address),
                    _FUTEX_WAIT,
                    ctypes.c_uint32(seen & 0xFFFFFFFF),
                    ctypes.byref(self._timespec),
                    None,
                    0,
                )
                if words[at] >= tick:
                    return
                self._check(tick, operation, give_up_at)
        finally:
            words[mine] = 0

    def _wake(self, rank: int) -> None:
        self._wake_address(self._tick_addresses[rank])

    def _wake_address(self, address: int) -> None:
        _libc_with_lock.syscall(
            _SYS_FUTEX,
            ctypes.c_void_p(address),
            _FUTEX_WAKE,
            0x7FFFFFFF,
            None,
            None,
            0,
        )

    def _check(self, tick: int, operation: Operation | str, give_up_at: float) -> None:
        """Raise if waiting for `tick` has become pointless."""
        failure = self.failure()
        if failure is not None:
            raise failure
        late = [peer for peer, at in self._peers if self._words[at] < tick]
        if not late:
            return
        dead = [rank for rank in self._dead_ranks() if rank in late]
        if dead:
            pids = ", ".join(f"process {self._pids[rank]} ended" for rank in dead)
            raise self.abort(PeerLost(str(operation), self.generation, dead, pids))
        closed = [r for r in late if self._words[self._blocks[r] + _STATE] == _CLOSED]
        if closed:
            detail = "closed the group while others still used it"
            raise self.abort(PeerLost(str(operation), self.generation, closed, detail))
        now = time.monotonic()
        if now >= give_up_at:
            timeout_s = self._meet_timeout_s
            if isinstance(operation, Operation):
                timeout_s = operation.timeout_s
            raise self.abort(
                CollectiveTimeout(
                    str(operation),
                    self.generation,
                    late,
                    timeout_s,
                    self._whereabouts(late),
                )
            )

    def _dead_ranks(self) -> list[int]:
        return [self._rank_of_pidfd[descriptor] for descriptor, _ in self._exits.poll(0)]

    # -- messages ------------------------------------------------------------------------------

    def channel(self, sender: int, receiver: int) -> tuple[memoryview, int, torch.Tensor]:
        """The words of all channels, the first one of this, and its ring, (RING_BYTES,) uint8."""
        index = sender * self.size + receiver
        word = _HEADER_WORDS + _BLOCK_WORDS * self.size + _CHANNEL_WORDS * index
        at = self._rings_at + index * RING_BYTES
        return self._words, word, self._bytes[at : at + RING_BYTES]

    def fence(self) -> None:
        """Order what was written before it, or read, against what comes after."""
        if _WEAKLY_ORDERED:
            _fence()

    def ring_bell(self, rank: int) -> None:
        """Wake `rank` if it sleeps on its bell. All ranks write it; no two write equal values, so
        whoever has seen an older one does not fall asleep."""
        self._bells_rung += 1
        at = self._blocks[rank]
        self._words[at + _BELL] = (self._bells_rung * self.size + self.rank) & 0xFFFFFFFF
        if self._words[at + _ASLEEP]:
            self._wake_address(self._address + 8 * (at + _BELL))

    def bell(self) -> int:
        return self._words[self._block + _BELL]

    def sleep_on_bell(self, seen: int, slice_s: float) -> None:
        """Return when the bell is not `seen` any more, or after `slice_s` seconds."""
        words = self._words
        words[self._block + _ASLEEP] = 1
        try:
            if words[self._block + _BELL] != seen:
                return
            timespec = _Timespec(0, int(slice_s * 1e9))
            _libc.syscall(
                _SYS_FUTEX,
                ctypes.c_void_p(self._address + 8 * (self._block + _BELL)),
                _FUTEX_WAIT,
                ctypes.c_uint32(seen),
                ctypes.byref(timespec),
                None,
                0,
            )
        finally:
            words[self._block + _ASLEEP] = 0

    def gone(self) -> dict[int, str]:
        """The ranks that will not come again, and how they went."""
        how = {
            rank: "closed the group while others still used it"
            for rank, _ in self._peers
            if self._words[self._blocks[rank] + _STATE] == _CLOSED
        }
        for rank in self._dead_ranks():
            how[rank] = f"process {self._pids[rank]} ended"
        return how

    # -- who does what -------------------------------------------------------------------------

    def sign(self, operation: Operation) -> None:
        """Say what this rank is about to do; compared by `check_signatures` of the others."""
        at = self._block + _SIGNATURE + 4 * (operation.sequence & 1)
        words = self._words
        words[at] = operation.sequence
        words[at + 1] = operation.kind | (operation.dtype + 1) << 8 | (operation.detail + 1) << 16
        words[at + 2] = operation.numel + 1  # Unsigned words; numel may be -1.
        site = self._sites_at + (2 * self.rank + (operation.sequence & 1)) * SITE_BYTES
        self._map[site : site + SITE_BYTES] = operation.padded_site()

    def check_signatures(self, operation: Operation) -> None:
        """Raise CollectiveMismatch, on all ranks, unless all do the same.

        Called before anything of the caller's is written. Two copies by parity suffice: nobody
        can be two operations ahead of this rank.
        """
        words = self._words
        offset = _SIGNATURE + 4 * (operation.sequence & 1) + 1
        mine = self._block + offset
        what, numel = words[mine], words[mine + 1]
        for block in self._blocks:
            at = block + offset
            if words[at] != what or words[at + 1] != numel:
                break
        else:
            return
        signed = [self._signature(r, operation.sequence & 1) for r in range(self.size)]
        error = mismatch(self.generation, signed)
        assert error is not None
        raise self.abort(error)

    def _signature(self, rank: int, parity: int) -> Signature:
        at = self._blocks[rank] + _SIGNATURE + 4 * parity
        sequence, what, numel = self._words[at], self._words[at + 1], self._words[at + 2]
        return Signature(sequence, what & 0xFF, (what >> 8 & 0xFF) - 1, (what >> 16) - 1, numel - 1)

    def whereabouts(self, rank: int) -> str:
        """What a rank that is late did last, in words."""
        return f"rank {rank} is at {self._place(rank)}"

    def _whereabouts(self, late: list[int]) -> str:
        """What every rank did last, in words; those that are late first."""
        return tell_positions({rank: self._place(rank) for rank in range(self.size)}, late)

    def _place(self, rank: int) -> str:
        last = max(self._signature(rank, parity) for parity in range(2))
        if not last.kind:
            return "nothing yet"
        at = self._sites_at + (2 * rank + (last.sequence & 1)) * SITE_BYTES
        site = self._map[at : at + SITE_BYTES].rstrip(b"\0").decode(errors="replace")
        if last.kind == Kind.COMPARISON:
            return site  # It stands for another operation, which is told there.
        name = f"{Kind(last.kind).name.lower()} #{last.sequence}"
        return f"{name}, {site}" if site else name

    # -- the end -------------------------------------------------------------------------------

    def failure(self) -> CollectiveError | None:
        """The error that ended the generation, if one did."""
        if not self._words[_ABORT_WORD]:
            return None
        if _WEAKLY_ORDERED:
            _fence()
        at = self._record_at
        length = int.from_bytes(self._map[at : at + 8], "little")
        return error_from_json(self._map[at + 8 : at + 8 + length].decode())

    def abort(self, error: CollectiveError) -> CollectiveError:
        """End the generation for all ranks; the error that did, which may be an earlier one."""
        with self._abort_lock:
            if self._descriptor < 0:
                return error  # This rank has left.
            self._lock_record()
            try:
                if not self._words[_ABORT_WORD]:
                    record = _fitting_record(error)
                    at = self._record_at
                    self._map[at + 8 : at + 8 + len(record)] = record
                    self._map[at : at + 8] = len(record).to_bytes(8, "little")
                    if _WEAKLY_ORDERED:
                        _fence()
                    self._words[_ABORT_WORD] = 1
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        for rank in range(self.size):
            self._wake(rank)
            self.ring_bell(rank)
        failure = self.failure()
        assert failure is not None
        return failure

    def _lock_record(self) -> None:
        """Exclude the other ranks, except one that was stopped while it excluded us."""
        give_up_at = time.monotonic() + _RECORD_LOCK_S
        while True:
            try:
                return fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    return None
            time.sleep(0.001)

    def meet(self, timeout_s: float) -> None:
        """Return when all ranks have mapped the segment. Uses tick 1."""
        self._meet_timeout_s = timeout_s
        self._words[self._block + _STATE] = _OPEN
        self.publish(1)
        self.wait(1, "rendezvous", time.monotonic() + timeout_s, spin=True)

    def leave(self) -> None:
        """Tell the others that this rank will not come again, and give back what is ours.

        The mapping itself goes with the last tensor that looks into it.
        """
        self._words[self._block + _STATE] = _CLOSED
        self._wake(self.rank)
        for pidfd in self._rank_of_pidfd:
            self._exits.unregister(pidfd)
            os.close(pidfd)
        self._rank_of_pidfd.clear()
        with self._abort_lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1


def _page_aligned(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def _fitting_record(error: CollectiveError) -> bytes:
    """The error as JSON; its longest text is cut in the middle if it does not fit."""
    record = error_to_json(error).encode()
    while len(record) > _RECORD_BYTES - 8:
        fields = list(error.args)
        longest = max(
            (i for i, field in enumerate(fields) if isinstance(field, str)),
            key=lambda i: len(fields[i]),
        )
        text = fields[longest]
        keep = len(text) // 4
        fields[longest] = f"{text[:keep]}\n[... cut ...]\n{text[-keep:]}"
        error = type(error)(*fields)
        record = error_to_json(error).encode()
    return record
