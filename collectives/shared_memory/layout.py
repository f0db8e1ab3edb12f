"""The layout of the memory that the ranks of one host share, and how it is made and opened.

    header     magic, the abort word, and a key that no other memory has
    ranks      one block each: tick, the rank it sleeps on, state, signatures (two), bell, where the
               tensor of its operation lies (two), and whether its process has ended
    channels   one per ordered pair of ranks, for messages: words of the sender, of the receiver
    sites      the users' lines that issued the signed operations, as text (two per rank)
    record     the error that ended the generation, as JSON
    slots      two per rank, for data; a tick uses the slot of its parity
    rings      one per ordered pair, for messages

The file has no name and lives as long as the processes that map it; only its user may open it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

import torch

from ..contract.call_site import SITE_BYTES

_MAGIC = b"1LSUROHC"
HEADER_WORDS = 8
ABORT_WORD, KEY_WORD = 1, 2
BLOCK_WORDS = 56  # 448 bytes: words that different ranks write never share a cache line
TICK, SLEEPS_ON, STATE, RESTS, SIGNATURE = (
    0,
    8,
    16,
    17,
    24,
)  # words from the start of a rank's block
BELL, ASLEEP = 32, 40
SHOWN = 48  # three words for each parity of a tick
ENDED = 54  # two words, for robust_list.py
CHANNEL_WORDS = 16
HEAD, SENDER_WAITS, ELSEWHERE = 0, 1, 2  # words of a channel that the sender writes
TAIL, RECEIVER_WAITS = 8, 9  # words of a channel that the receiver writes
RECORD_BYTES = 64 * 1024
RING_BYTES = 256 * 1024  # a page takes memory only once a message has used it

# Linux's numbers: conda's Python is built for a C library that did not have them, and lacks them.
_CLOEXEC, _ALLOW_SEALING, _NOEXEC_SEAL = 0x1, 0x2, 0x8
_ADD_SEALS, _SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1033, 0x1, 0x2, 0x4
_libc = ctypes.CDLL(None, use_errno=True)


def block_at(rank: int) -> int:
    """The first word of a rank's block."""
    return HEADER_WORDS + BLOCK_WORDS * rank


def channel_at(size: int, sender: int, receiver: int) -> int:
    """The first word of a channel."""
    return HEADER_WORDS + BLOCK_WORDS * size + CHANNEL_WORDS * (sender * size + receiver)


def sites_start(size: int) -> int:
    """The first byte after all words."""
    return 8 * (HEADER_WORDS + BLOCK_WORDS * size + CHANNEL_WORDS * size * size)


def record_start(size: int) -> int:
    end = sites_start(size) + 2 * SITE_BYTES * size
    return -(-end // 4096) * 4096  # a page


def slots_start(size: int) -> int:
    return record_start(size) + RECORD_BYTES


def rings_start(size: int, slot_bytes: int) -> int:
    return slots_start(size) + size * 2 * slot_bytes


def make_memory(size: int, slot_bytes: int) -> int:
    """The descriptor of a new, zeroed, nameless file for `size` ranks. Raises OSError."""
    nbytes = rings_start(size, slot_bytes) + size * size * RING_BYTES
    descriptor = -1
    try:
        descriptor = nameless_file("chorusline", nbytes)
        os.pwrite(descriptor, _MAGIC, 0)
        os.pwrite(descriptor, os.urandom(8), 8 * KEY_WORD)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise OSError(
            error.errno,
            f"no memory of {nbytes} bytes to share between the {size} ranks of this host: "
            f"{error.strerror}. Check the limits on the size and number of files (ulimit -f, "
            "ulimit -n), and the memory limit of this container",
        ) from error
    return descriptor


def nameless_file(name: str, nbytes: int) -> int:
    """The descriptor of a new, zeroed file in memory, which no process can make shorter: one that
    reads its mapping would be killed by SIGBUS. Raises OSError."""
    flags = _CLOEXEC | _ALLOW_SEALING
    try:
        # A kernel with vm.memfd_noexec=2 makes no other file in memory.
        descriptor = _memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = _memfd_create(name, flags)  # Linux before 6.3 does not know it.
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _memfd_create(name: str, flags: int) -> int:
    """As in os, which not every Python has it in."""
    descriptor: int = _libc.memfd_create(name.encode(), flags)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def key_of(descriptor: int) -> int:
    return int.from_bytes(os.pread(descriptor, 8, 8 * KEY_WORD), "little")


def open_memory(pid: int, descriptor: int, key: int) -> int:
    """A new descriptor of the memory that process `pid` of this user made. Raises OSError; ENOENT
    if that process has closed it, and may have another file at the descriptor."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # A pipe, for example, cannot be read at an offset, and raises.
        if os.pread(opened, 8, 0) != _MAGIC or key_of(opened) != key:
            raise FileNotFoundError(
                errno.ENOENT, f"descriptor {descriptor} of process {pid} is not that memory"
            )
    except OSError:
        os.close(opened)
        raise
    return opened


def mapped_file(descriptor: int) -> torch.Tensor:
    """The whole file, (nbytes,) uint8, mapped without a descriptor of its own: Python's mmap has
    one, open until the last tensor that views the memory is gone. Raises OSError."""
    nbytes = os.fstat(descriptor).st_size
    path = f"/proc/self/fd/{descriptor}"
    try:
        whole = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        # By way of NumPy it is one that torch.multiprocessing copies before it shares it; it cannot
        # send this one, whose descriptor it does not have.
        return torch.from_numpy(whole.numpy())
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise OSError(errno.ENOMEM, f"{nbytes} bytes cannot be mapped: {reason}") from error
