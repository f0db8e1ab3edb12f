"""Finds out, before anything is overwritten, whether all ranks build the same thing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from collectives import Group
from collectives.diagnosis.blame import check_like_rank_0
from collectives.objects.blocking import all_gather_row


def check_same_parameters(operation: str, told: Sequence[str], group: Group) -> None:
    """Compare one text per parameter over the ranks, by number.

    operation: whose arguments are compared, for the error. told: what must be equal: shape, dtype
    and so on. Two collectives, small ones.

    Raises CollectiveMismatch on all ranks, naming the first parameter that differs.
    """
    counts = [count for (count,) in all_gather_row(group, [len(told)])]
    by_rank = dict(enumerate(counts))
    detail = f"the models have different numbers of parameters, by rank: {by_rank}"
    check_like_rank_0(operation, group.generation, counts, detail)
    digests = [
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
        for text in told
    ]
    everybody = all_gather_row(group, digests)
    for number, text in enumerate(told):
        detail = f"parameter {number} differs from rank 0's; on rank {group.rank} it is {text}"
        said = [theirs[number] for theirs in everybody]
        check_like_rank_0(operation, group.generation, said, detail)
