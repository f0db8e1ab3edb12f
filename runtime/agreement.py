"""What the ranks tell each other once per step, as a vector that one sum makes known to all.

Each rank writes its vote: whether it took this step with data of its own, whether it may take
another one, and which parameters got a gradient. Everybody reads the same agreement from the sum.
It travels with collectives that a step needs anyway (the last gradient bucket, or ZeRO's ballot),
never in the gradients' own dtype below float32: bfloat16 cannot count beyond 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Agreement:
    """One step as all ranks know it.

    live: ranks that contributed gradients, ascending. may_continue: ranks that may take another
    step. used: per parameter, whether any rank had a gradient for it.
    """

    live: tuple[int, ...]
    may_continue: tuple[int, ...]
    used: tuple[bool, ...]


def vote_numel(num_ranks: int, num_parameters: int) -> int:
    return 2 * num_ranks + num_parameters


def write_vote(
    vote: torch.Tensor, rank: int, num_ranks: int, live: bool, has_next: bool, used: Sequence[bool]
) -> None:
    """vote: (vote_numel,) float32 or float64, overwritten."""
    vote.zero_()
    if live:
        vote[rank] = 1
        vote[2 * num_ranks :] = torch.tensor(used, dtype=vote.dtype)
    if has_next:
        vote[num_ranks + rank] = 1


def read_agreement(total: torch.Tensor, num_ranks: int) -> Agreement:
    """total: (vote_numel,), the sum of all votes."""
    values = total.tolist()
    return Agreement(
        live=tuple(r for r in range(num_ranks) if values[r]),
        may_continue=tuple(r for r in range(num_ranks) if values[num_ranks + r]),
        used=tuple(value > 0 for value in values[2 * num_ranks :]),
    )
