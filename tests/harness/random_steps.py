"""One step of a random program: what a rank brings to it, the operation, and what numpy says of it.

random_programs.py draws the steps, and runs programs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from tests.references.reductions import UFUNCS

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *WHOLE, *COMPLEX, torch.bool)
FORMS = ("plain", "offset", "strided", "transposed", "numpy", "backwards", "leaf", "conjugate")


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
