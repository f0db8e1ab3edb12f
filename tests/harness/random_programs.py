"""Random programs on groups: a pure function of a seed, and what runs one against numpy.

A program is a list of tracks. A track is a list of steps on one group, in an order that all its
ranks keep: collectives, or messages. A process runs its tracks in turn (each step of one, then of
another, at random), in a thread each, or in an asyncio task each. Every rank waits for its works in
an order of its own. All numbers are small and whole, so every dtype holds every result exactly.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from collectives import Group, ReduceOp
from tests.references.reductions import UFUNCS

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *WHOLE, *COMPLEX, torch.bool)
FORMS = ("plain", "offset", "strided", "transposed", "numpy", "backwards", "leaf", "conjugate")
SENTINEL = 3
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


# -- numbers ---------------------------------------------------------------------------------------


def wide(dtype: torch.dtype) -> Any:
    return np.complex128 if dtype.is_complex else np.int64


class Numbers:
    """What a rank brings to a step, by rank, and what numpy makes of it."""

    def __init__(self, seed: int, track: int, index: int, step: dict[str, Any], size: int) -> None:
        self.key = (seed, track, index)
        self.dtype = DTYPES[step["dtype"]]
        self.op = ReduceOp[step["op"]]
        self.size = size

    def of(self, rank: int, shape: Any, part: int = 0) -> np.ndarray:
        draw = np.random.default_rng((*self.key, rank, part))
        low, high = 0, 4
        if self.dtype is torch.bool:
            high = 2
        elif self.op is ReduceOp.PRODUCT:
            high = 3
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            low = -3
        values = draw.integers(low, high, size=shape).astype(wide(self.dtype))
        if self.dtype.is_complex:
            values = values + 1j * draw.integers(low, high, size=shape)
        return values * self.size if self.op is ReduceOp.AVG else values

    def factor(self) -> int | None:
        return 2 if self.op is ReduceOp.PREMUL_SUM else None

    def reduced(self, parts: list[np.ndarray]) -> np.ndarray:
        op = self.op
        if self.dtype is torch.bool and op is ReduceOp.SUM:
            op = ReduceOp.MAX
        stack = np.stack(parts)
        if op is ReduceOp.AVG:
            return stack.sum(0) / len(parts)
        if op is ReduceOp.PREMUL_SUM:
            return 2 * stack.sum(0)
        return UFUNCS[op].reduce(stack, axis=0)


def held(values: np.ndarray, dtype: torch.dtype, form: str) -> tuple[Any, Callable[[], None]]:
    """`values` in an argument of `form`, and what checks that nothing beside it was written."""
    target = torch.tensor(values).to(dtype)
    shape = tuple(values.shape)

    def nothing() -> None:
        pass

    if form == "offset":
        base = torch.full((target.numel() + 3,), 1).to(dtype)
        tensor = base[1 : 1 + target.numel()].view(shape)
        tensor.copy_(target)
        return tensor, lambda: _untouched(torch.cat([base[:1], base[1 + target.numel() :]]))
    if form == "strided":
        base = torch.full((*shape, 2), 1).to(dtype)
        base[..., 0] = target
        return base[..., 0], lambda: _untouched(base[..., 1])
    if form == "transposed" and len(shape) >= 2:
        return target.transpose(0, -1).contiguous().transpose(0, -1), nothing
    if form == "numpy" and dtype is not torch.bfloat16:
        return target.numpy(), nothing
    if form == "backwards" and dtype is not torch.bfloat16 and shape:
        return np.ascontiguousarray(target.numpy()[::-1])[::-1], nothing
    if form == "leaf" and (dtype.is_floating_point or dtype.is_complex):
        return target.requires_grad_(), nothing
    if form == "conjugate" and dtype.is_complex:
        return target.conj().clone().conj(), nothing
    return target, nothing


def _untouched(rest: torch.Tensor) -> None:
    assert (rest == torch.ones((), dtype=rest.dtype)).all(), "memory beside the tensor was written"


def read(argument: Any) -> np.ndarray:
    tensor = argument if isinstance(argument, torch.Tensor) else torch.tensor(argument.copy())
    tensor = tensor.detach().resolve_conj()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()


def same(argument: Any, expected: np.ndarray, what: str) -> None:
    got = read(argument)
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    assert np.array_equal(got, expected), f"{what}: got {got}, expected {expected}"


# -- steps -----------------------------------------------------------------------------------------

Issued = Iterator[tuple[Any, Callable[[], None]]]
"""Works of a step, each with the check of its result."""


def issue(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    """Issue a step's operations on this rank."""
    yield from globals()[f"_{step['kind']}"](group, step, numbers)


def _expecting(
    pairs: list[tuple[Any, np.ndarray, Callable[[], None]]], what: str
) -> Callable[[], None]:
    def check() -> None:
        for argument, expected, beside in pairs:
            same(argument, expected, what)
            beside()

    return check


def _one(group: Group, step: dict[str, Any], numbers: Numbers, shape: Any = None) -> Any:
    """This rank's tensor and the values of all ranks."""
    shape = step["shape"] if shape is None else shape
    rows = [numbers.of(rank, shape) for rank in range(group.size)]
    tensor, beside = held(rows[group.rank], numbers.dtype, step["forms"][0])
    return rows, tensor, beside


def _all_reduce(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    rows, tensor, beside = _one(group, step, numbers)
    work = group.all_reduce(tensor, numbers.op, factor=numbers.factor())
    yield work, _expecting([(tensor, numbers.reduced(rows), beside)], "all_reduce")


def _reduce(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    rows, tensor, beside = _one(group, step, numbers)
    root = step["root"] % group.size
    work = group.reduce(tensor, root, numbers.op, factor=numbers.factor())
    wanted = numbers.reduced(rows) if group.rank == root else rows[group.rank]
    yield work, _expecting([(tensor, wanted, beside)], "reduce")


def _broadcast(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    rows, tensor, beside = _one(group, step, numbers)
    root = step["root"] % group.size
    work = group.broadcast(tensor, root)
    yield work, _expecting([(tensor, rows[root], beside)], "broadcast")


def _barrier(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    yield group.barrier(), lambda: None


def _lengths(group: Group, step: dict[str, Any]) -> list[int]:
    return [step["sizes"][0 if step["even"] else rank] for rank in range(group.size)]


def _reduce_scatter(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    n = step["sizes"][0]
    rows, tensor, beside = _one(group, step, numbers, [group.size * n])
    output, around = held(np.zeros(n, wide(numbers.dtype)), numbers.dtype, step["forms"][1])
    work = group.reduce_scatter(output, tensor, numbers.op, factor=numbers.factor())
    wanted = numbers.reduced(rows)[group.rank * n : (group.rank + 1) * n]
    pairs = [(output, wanted, around), (tensor, rows[group.rank], beside)]
    yield work, _expecting(pairs, "reduce_scatter")


def _reduce_scatter_list(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    lengths = _lengths(group, step)
    mine = [numbers.of(group.rank, [n], part) for part, n in enumerate(lengths)]
    inputs = [held(part, numbers.dtype, step["forms"][0])[0] for part in mine]
    n = lengths[group.rank]
    output, around = held(np.zeros(n, wide(numbers.dtype)), numbers.dtype, step["forms"][1])
    work = group.reduce_scatter(output, inputs, numbers.op, factor=numbers.factor())
    wanted = numbers.reduced([numbers.of(r, [n], group.rank) for r in range(group.size)])
    pairs = [(output, wanted, around)]
    pairs += [(one, part, lambda: None) for one, part in zip(inputs, mine, strict=True)]
    yield work, _expecting(pairs, "reduce_scatter of a list")


def _all_gather(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    rows, tensor, _ = _one(group, step, numbers)
    wanted = np.stack(rows)
    output, around = held(np.zeros_like(wanted), numbers.dtype, step["forms"][1])
    yield group.all_gather(output, tensor), _expecting([(output, wanted, around)], "all_gather")


def _places(lengths: list[int], dtype: torch.dtype, form: str) -> list[Any]:
    return [held(np.zeros(n, wide(dtype)), dtype, form) for n in lengths]


def _filled(places: list[Any], wanted: list[np.ndarray]) -> list[Any]:
    return [(one, part, around) for (one, around), part in zip(places, wanted, strict=True)]


def _all_gather_list(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    lengths = _lengths(group, step)
    rows = [numbers.of(rank, [n]) for rank, n in enumerate(lengths)]
    tensor, _ = held(rows[group.rank], numbers.dtype, step["forms"][0])
    places = _places(lengths, numbers.dtype, step["forms"][1])
    work = group.all_gather([one for one, _ in places], tensor)
    yield work, _expecting(_filled(places, rows), "all_gather of a list")


def _gather(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    lengths = _lengths(group, step)
    rows = [numbers.of(rank, [n]) for rank, n in enumerate(lengths)]
    tensor, _ = held(rows[group.rank], numbers.dtype, step["forms"][0])
    root = step["root"] % group.size
    places = _places(lengths, numbers.dtype, step["forms"][1]) if group.rank == root else []
    work = group.gather(tensor, [one for one, _ in places] if places else None, root)
    yield work, _expecting(_filled(places, rows) if places else [], "gather")


def _scatter(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    lengths = _lengths(group, step)
    root = step["root"] % group.size
    parts = [numbers.of(root, [n], part) for part, n in enumerate(lengths)]
    inputs = [held(part, numbers.dtype, step["forms"][0])[0] for part in parts]
    ((output, around),) = _places([lengths[group.rank]], numbers.dtype, step["forms"][1])
    work = group.scatter(output, inputs if group.rank == root else None, root)
    yield work, _expecting([(output, parts[group.rank], around)], "scatter")


def _sent(group: Group, step: dict[str, Any], source: int, target: int) -> int:
    size: int = step["sizes"][0 if step["even"] else source * group.size + target]
    return size


def _all_to_all(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    sends = [_sent(group, step, group.rank, target) for target in range(group.size)]
    gets = [_sent(group, step, source, group.rank) for source in range(group.size)]
    parts = [numbers.of(group.rank, [n, 2], part) for part, n in enumerate(sends)]
    tensor, _ = held(np.concatenate(parts), numbers.dtype, step["forms"][0])
    wanted = [numbers.of(source, [n, 2], group.rank) for source, n in enumerate(gets)]
    whole = np.concatenate(wanted)
    output, around = held(np.zeros_like(whole), numbers.dtype, step["forms"][1])
    splits = [] if step["even"] else [gets, sends]
    work = group.all_to_all(output, tensor, *splits)
    yield work, _expecting([(output, whole, around)], "all_to_all")


def _all_to_all_list(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    sends = [_sent(group, step, group.rank, target) for target in range(group.size)]
    gets = [_sent(group, step, source, group.rank) for source in range(group.size)]
    parts = [numbers.of(group.rank, [n], part) for part, n in enumerate(sends)]
    inputs = [held(part, numbers.dtype, step["forms"][0])[0] for part in parts]
    places = _places(gets, numbers.dtype, step["forms"][1])
    work = group.all_to_all([one for one, _ in places], inputs)
    wanted = [numbers.of(source, [n], group.rank) for source, n in enumerate(gets)]
    yield work, _expecting(_filled(places, wanted), "all_to_all of lists")


def _coalesced(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    rows, tensor, beside = _one(group, step, numbers)
    other = numbers.of(step["root"] % group.size, [3], 9)
    mine = other if group.rank == step["root"] % group.size else np.zeros_like(other)
    copied, around = held(mine, numbers.dtype, step["forms"][1])
    with group.coalesce() as work:
        group.all_reduce(tensor, numbers.op, factor=numbers.factor())
        group.broadcast(copied, step["root"] % group.size)
    pairs = [(tensor, numbers.reduced(rows), beside), (copied, other, around)]
    yield work, _expecting(pairs, "coalesced")


def _objects(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    work = group.all_gather_object((group.rank, step["sizes"]))

    def check() -> None:
        told = work.result()
        assert told == [(rank, step["sizes"]) for rank in range(group.size)], told

    yield work, check


def _message(group: Group, step: dict[str, Any], numbers: Numbers) -> Issued:
    if group.rank == step["from"]:
        tensor, _ = held(numbers.of(0, step["shape"]), numbers.dtype, step["forms"][0])
        yield group.send(tensor, step["to"], step["tag"]), lambda: None
    if group.rank == step["to"]:
        wanted = numbers.of(0, step["shape"])
        place, around = held(np.zeros_like(wanted), numbers.dtype, step["forms"][1])
        work = group.recv(place, step["from"], step["tag"])
        yield work, _expecting([(place, wanted, around)], "message")


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
