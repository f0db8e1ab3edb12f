"""Random programs on groups: a pure function of a seed, and what runs one against numpy.

A program is a list of tracks. A track is a list of steps on one group, in an order that all its
ranks keep: collectives, or messages. A process runs its tracks in turn (each step of one, then of
another, at random), in a thread each, or in an asyncio task each. Every rank waits for its works in
an order of its own. All numbers are small and whole, so every dtype holds every result exactly.
What a step does is in random_steps.py.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from tests.harness.random_steps import DTYPES, FORMS, Numbers, issue

COLLECTIVES = (
    *("all_reduce", "all_reduce", "reduce", "broadcast", "barrier", "reduce_scatter", "all_gather"),
    *("reduce_scatter_list", "all_gather_list", "gather", "scatter", "all_to_all"),
    *("all_to_all_list", "coalesced", "objects"),
)


def program(seed: int, size: int) -> dict[str, Any]:
    """The program of `seed` on `size` ranks: plain data, the same in every process."""
    draw = random.Random(seed * 1009 + size)
    groups = list(range(len(members(size))))
    draw.shuffle(groups)
    tracks = [
        {"group": group, "steps": [_collective(draw, size) for _ in range(draw.randint(1, 8))]}
        for group in groups[: draw.randint(1, 3)]
    ]
    for _ in range(draw.randint(0, 2)):
        steps = [_a_message(draw, size, tag=len(tracks)) for _ in range(draw.randint(1, 6))]
        tracks.append({"group": 0, "steps": steps})
    way = draw.choice(["in turn", "threads", "tasks"])
    order = [i for i, track in enumerate(tracks) for _ in track["steps"]]
    draw.shuffle(order)
    return {"seed": seed, "size": size, "way": way, "order": order, "tracks": tracks}


def members(size: int) -> list[list[int]]:
    """The ranks of the groups that programs use; the first is the group itself."""
    return [
        list(range(size)),
        list(reversed(range(size))),
        list(range(size)),
        [0, size - 1],
        list(range(1, size)),
    ]


def _shape(draw: random.Random) -> list[int]:
    if draw.random() < 0.03:
        return [draw.choice([20_000, 70_001])]
    return [draw.choice([0, 1, 1, 2, 3, 5, 7, 17]) for _ in range(draw.randint(0, 3))]


def _collective(draw: random.Random, size: int) -> dict[str, Any]:
    dtype = draw.randrange(len(DTYPES))
    return {
        "kind": draw.choice(COLLECTIVES),
        "dtype": dtype,
        "shape": _shape(draw),
        "op": draw.choice(_ops(DTYPES[dtype])).name,
        "root": draw.randrange(60),
        "sizes": [draw.choice([0, 1, 2, 5]) for _ in range(size * size)],
        "forms": [draw.choice(FORMS) for _ in range(4)],
        "even": draw.random() < 0.5,
    }


def _a_message(draw: random.Random, size: int, tag: int) -> dict[str, Any]:
    source, target = draw.sample(range(size), 2)
    return {
        "kind": "message",
        "dtype": draw.randrange(len(DTYPES)),
        "shape": _shape(draw),
        "op": "SUM",
        "from": source,
        "to": target,
        "tag": tag,
        "forms": [draw.choice(FORMS) for _ in range(2)],
    }


def _ops(dtype: torch.dtype) -> list[ReduceOp]:
    if dtype.is_complex:
        return [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM]
    general = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    bits = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    if dtype is torch.bool:
        return general + bits
    more = [ReduceOp.AVG, ReduceOp.PREMUL_SUM]
    return general + more if dtype.is_floating_point else general + more + bits


# -- running ---------------------------------------------------------------------------------------


class Track:
    """A track on this rank: its steps in order, and the works that it has not waited for."""

    def __init__(self, number: int, track: dict[str, Any], group: Group, seed: int) -> None:
        self.number, self.steps, self.group, self.seed = number, track["steps"], group, seed
        self.next = 0
        self.pending: list[Any] = []
        self.draw = random.Random(seed * 31 + number * 7 + group.ranks[group.rank])

    def issue(self) -> None:
        step = self.steps[self.next]
        numbers = Numbers(self.seed, self.number, self.next, step, self.group.size)
        self.next += 1
        self.pending += [(step, *one) for one in issue(self.group, step, numbers)]

    def to_wait_for(self) -> Iterator[Any]:
        """Works to wait for now: at the end all, before it a random few, in any order."""
        while self.pending and (
            self.next == len(self.steps) or len(self.pending) > 4 or self.draw.random() < 0.4
        ):
            yield self.pending.pop(self.draw.randrange(len(self.pending)))


def run(group: Group, seeds: list[int]) -> int:
    """Run the programs of `seeds`, and return the number of their steps. An error says its seed."""
    ways: dict[str, Callable[[dict[str, Any], list[Track]], None]] = {
        "in turn": _in_turn,
        "threads": _in_threads,
        "tasks": lambda program, tracks: asyncio.run(_in_tasks(tracks)),
    }
    pool = [group, *(group.new_group(ranks) for ranks in members(group.size)[1:])]
    steps = 0
    for seed in seeds:
        made = program(seed, group.size)
        tracks = [
            Track(number, track, pool[track["group"]], seed)
            for number, track in enumerate(made["tracks"])
            if pool[track["group"]] is not None
        ]
        try:
            ways[made["way"]](made, tracks)
        except BaseException as error:
            raise AssertionError(f"seed {seed} on {group.size} ranks: {error}\n{made}") from error
        steps += sum(len(track.steps) for track in tracks)
    for one in pool[1:]:
        if one is not None:
            one.close()
    return steps


def _told(track: Track, step: dict[str, Any], check: Callable[[], None]) -> None:
    try:
        check()
    except AssertionError as error:
        raise AssertionError(f"track {track.number}, {step}: {error}") from error


def _in_turn(program: dict[str, Any], tracks: list[Track]) -> None:
    by_number = {track.number: track for track in tracks}
    for number in program["order"]:
        track = by_number.get(number)
        if track is not None:
            track.issue()
            for step, work, check in track.to_wait_for():
                work.wait()
                _told(track, step, check)


def _in_threads(program: dict[str, Any], tracks: list[Track]) -> None:
    errors: list[BaseException] = []

    def go(track: Track) -> None:
        try:
            _in_turn({"order": [track.number] * len(track.steps)}, [track])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=go, args=(track,)) for track in tracks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


async def _in_tasks(tracks: list[Track]) -> None:
    async def go(track: Track) -> None:
        for _ in track.steps:
            track.issue()
            for step, work, check in track.to_wait_for():
                await work
                _told(track, step, check)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for track in tracks:
            tasks.create_task(go(track), name=f"track {track.number}")


def spread(first: int, last: int, sizes: tuple[int, ...]) -> dict[int, list[int]]:
    """The seeds of [first, last) by the number of ranks that run them."""
    return {
        size: [s for s in range(first, last) if s % len(sizes) == i] for i, size in enumerate(sizes)
    }


def parts(seeds: list[int], at_most: int) -> Iterator[list[int]]:
    for i in range(math.ceil(len(seeds) / at_most)):
        yield seeds[i * at_most : (i + 1) * at_most]
