"""What the ranks of collectives.py do: how an operation is issued, and what it must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group


@dataclass(frozen=True)
class Step:
    """One operation. way: how it is waited for; "later" leaves it in flight. pauses_s: by rank,
    before it is issued."""

    name: str
    numel: int
    dtype: torch.dtype
    root: int
    way: str
    pauses_s: tuple[float, ...]


Issued = tuple[Work, Callable[[], bool]]
"""The work, and whether its result is right, to be asked when it is done."""


def _part(number: int, rank: int, step: Step) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every dtype."""
    start = (number + 3 * rank) % 5
    return ((torch.arange(step.numel) + start) % 5).to(step.dtype)


def _sum(number: int, size: int, step: Step) -> torch.Tensor:
    return sum((_part(number, r, step) for r in range(size)), torch.zeros_like(_part(0, 0, step)))


def _all_reduce(group: Group, number: int, step: Step) -> Issued:
    tensor = _part(number, group.rank, step)
    expected = _sum(number, group.size, step)
    return group.all_reduce(tensor), lambda: torch.equal(tensor, expected)


def _reduce(group: Group, number: int, step: Step) -> Issued:
    tensor = _part(number, group.rank, step)
    expected = _sum(number, group.size, step) if group.rank == step.root else tensor.clone()
    return group.reduce(tensor, step.root), lambda: torch.equal(tensor, expected)


def _reduce_scatter(group: Group, number: int, step: Step) -> Issued:
    output = _part(0, 0, step)
    expected = _sum(number + group.rank, group.size, step)
    whole = torch.cat([_part(number + r, group.rank, step) for r in range(group.size)])
    return group.reduce_scatter(output, whole), lambda: torch.equal(output, expected)


def _all_gather(group: Group, number: int, step: Step) -> Issued:
    expected = torch.cat([_part(number, r, step) for r in range(group.size)])
    output = torch.zeros_like(expected)
    work = group.all_gather(output, _part(number, group.rank, step))
    return work, lambda: torch.equal(output, expected)


def _gather(group: Group, number: int, step: Step) -> Issued:
    expected = [_part(number, r, step) for r in range(group.size)]
    outputs = [torch.zeros_like(one) for one in expected]
    is_root = group.rank == step.root
    part = _part(number, group.rank, step)
    work = group.gather(part, outputs if is_root else None, step.root)
    return work, lambda: not is_root or all(map(torch.equal, outputs, expected))


def _scatter(group: Group, number: int, step: Step) -> Issued:
    parts = [_part(number, r, step) for r in range(group.size)]
    output = torch.zeros_like(parts[0])
    work = group.scatter(output, parts if group.rank == step.root else None, step.root)
    return work, lambda: torch.equal(output, parts[group.rank])


def _all_to_all(group: Group, number: int, step: Step) -> Issued:
    """Rank s sends to rank r, of what is `step.numel` long, all but s + r elements."""

    def sent(source: int, to: int) -> torch.Tensor:
        return _part(number + source, to, step)[source + to :]

    expected = [sent(r, group.rank) for r in range(group.size)]
    outputs = [torch.zeros_like(one) for one in expected]
    work = group.all_to_all(outputs, [sent(group.rank, r) for r in range(group.size)])
    return work, lambda: all(map(torch.equal, outputs, expected))


def _broadcast(group: Group, number: int, step: Step) -> Issued:
    tensor = _part(number, group.rank, step)
    expected = _part(number, step.root, step)
    return group.broadcast(tensor, step.root), lambda: torch.equal(tensor, expected)


def _barrier(group: Group, number: int, step: Step) -> Issued:
    return group.barrier(), lambda: True


def _monitored_barrier(group: Group, number: int, step: Step) -> Issued:
    return group.monitored_barrier(), lambda: True


def _coalesced(group: Group, number: int, step: Step) -> Issued:
    with group.coalesce() as work:
        _, first = _all_reduce(group, number, step)
        _, second = _broadcast(group, number, step)
    return work, lambda: first() and second()


def _ring(group: Group, number: int, step: Step) -> Issued:
    """To the right, from the left, as one work."""
    n, me = group.size, group.rank
    expected = _part(number, (me - 1) % n, step)
    tensor = torch.zeros_like(expected)
    with group.coalesce() as work:
        group.send(_part(number, me, step), (me + 1) % n)
        group.recv(tensor, (me - 1) % n)
    return work, lambda: torch.equal(tensor, expected)


def _object_ring(group: Group, number: int, step: Step) -> Issued:
    n, me = group.size, group.rank
    received: list[Any] = [None, None]
    sent = group.send_object_list([me, _part(number, me, step)], (me + 1) % n)
    work = group.recv_object_list(received, (me - 1) % n)

    def is_right() -> bool:
        sent.wait()
        source, tensor = received
        return source == (me - 1) % n and torch.equal(tensor, _part(number, source, step))

    return work, is_right


def _all_gather_object(group: Group, number: int, step: Step) -> Issued:
    work = group.all_gather_object(_part(number, group.rank, step))
    expected = [_part(number, r, step) for r in range(group.size)]
    return work, lambda: all(map(torch.equal, work.result(), expected))


def _broadcast_object_list(group: Group, number: int, step: Step) -> Issued:
    objects = [_part(number, group.rank, step)]
    work = group.broadcast_object_list(objects, step.root)
    return work, lambda: torch.equal(objects[0], _part(number, step.root, step))


def _gather_object(group: Group, number: int, step: Step) -> Issued:
    work = group.gather_object((number, group.rank), step.root)
    expected = [(number, r) for r in range(group.size)] if group.rank == step.root else None
    return work, lambda: work.result() == expected


def _scatter_object_list(group: Group, number: int, step: Step) -> Issued:
    parts = [_part(number, r, step) for r in range(group.size)]
    work = group.scatter_object_list(parts if group.rank == step.root else None, step.root)
    return work, lambda: torch.equal(work.result(), parts[group.rank])


OPERATIONS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
    "monitored_barrier": _monitored_barrier,
    "coalesced": _coalesced,
    "send_and_recv": _ring,
    "send_and_recv_object_list": _object_ring,
    "all_gather_object": _all_gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
}
