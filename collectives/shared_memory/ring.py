"""The ring of bytes through which one rank of a host sends to another.

Only the sender writes the head (bytes ever put in), and only the receiver writes the tail (bytes
ever taken out), so processes need no locks. A message is a header of 64 bytes and its elements,
padded to 64 bytes; a message that is longer than the ring passes through it in pieces.
"""

from __future__ import annotations

import struct

import torch

from .layout import HEAD, RECEIVER_WAITS, RING_BYTES, SENDER_WAITS, TAIL
from .segment import SharedSegment

HEADER = struct.Struct("=8q")  # tag, numel, dtype, nbytes, and padding
UNIT = HEADER.size  # heads and tails are multiples of UNIT


class Channel:
    """One ordered pair's ring, seen from either side."""

    def __init__(self, segment: SharedSegment, sender: int, receiver: int) -> None:
        self.segment = segment
        self.words, word, self.ring = segment.channel(sender, receiver)
        self.head_at, self.tail_at = word + HEAD, word + TAIL
        self.waits_at = word + (SENDER_WAITS if segment.rank == sender else RECEIVER_WAITS)

    def free(self) -> int:
        return RING_BYTES - (self.words[self.head_at] - self.words[self.tail_at])

    def filled(self) -> int:
        filled = self.words[self.head_at] - self.words[self.tail_at]
        self.segment.fence()
        return int(filled)

    def put(self, content: torch.Tensor) -> None:
        """content: (n,) uint8, n <= free()."""
        self._copy(self.words[self.head_at], content, into_ring=True)
        self.segment.fence()
        self.words[self.head_at] += _padded(len(content))

    def take(self, into: torch.Tensor) -> None:
        """into: (n,) uint8, n <= filled()."""
        self._copy(self.words[self.tail_at], into, into_ring=False)
        self.segment.fence()
        self.words[self.tail_at] += _padded(len(into))

    def header(self) -> tuple[int, int, int, int]:
        """Tag, numel, dtype and nbytes of the next message, which stays in the ring."""
        at = self.words[self.tail_at] % RING_BYTES
        tag, numel, dtype, nbytes, *_ = HEADER.unpack(self.ring[at : at + UNIT].numpy().tobytes())
        return tag, numel, dtype, nbytes

    def skip_header(self) -> None:
        self.words[self.tail_at] += UNIT

    def _copy(self, position: int, content: torch.Tensor, *, into_ring: bool) -> None:
        at = position % RING_BYTES
        first = min(len(content), RING_BYTES - at)
        for outside, inside in (
            (content[:first], self.ring[at : at + first]),
            (content[first:], self.ring[: len(content) - first]),
        ):
            if len(outside):
                inside.copy_(outside) if into_ring else outside.copy_(inside)


def _padded(nbytes: int) -> int:
    return -(-nbytes // UNIT) * UNIT
