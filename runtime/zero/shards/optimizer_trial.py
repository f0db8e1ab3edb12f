"""Finds out how finely the state of an unknown optimizer may be cut, by a trial on small tensors.

The same few steps are taken three times: by one optimizer over whole parameters, by several that
have some of the parameters each, and by several that have pieces of the flattened parameters. A cut
that gives the values of the first is exact under sharding. Beside the parameters the trial compares
what the optimizers keep (state, numbers in the groups, numbers among their attributes), because a
statistic over several tensors may take effect only later.

The shapes are those of the user's parameters, with long dimensions cut off. Gradients change in
size from step to step, so that thresholds (clipping) are crossed in both directions.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from ...partition.shards import ALIGNMENT
from ...process.option_numbers import copied_options
from ...process.random_state import RandomState

_SIZES = (1.0, 1e-3, 10.0, 0.3, 100.0, 1e-2, 1.0, 3.0)
"""By step, the size of the gradients."""
_DECAYS_FROM = 4
"""The step from which there is a weight decay, since a program may set it later."""
_LONGEST = {1: 136, 2: 136, 3: 20, 4: 12}
"""By number of dimensions, where a dimension is cut off. Some optimizers treat tensors of 128 rows
or 4096 elements in another way than smaller ones."""
_LONGEST_OF_MORE = 4
_LONGEST_VECTOR = 4160
"""Where there are only vectors."""
_MAX_GROUPS = 4
_SMALL = 16
"""Elements of a tensor among the options that is compared by its values."""
_TOLERANCE = 1e-5
"""The tolerance for flat pieces, as a part of the largest change: the last bits may depend on where
a vector begins and ends. The steps of whole parameters must be equal in each bit."""


@dataclass(frozen=True, slots=True)
class Shardability:
    """How the state of an optimizer may be cut.

    elementwise: anywhere; otherwise between parameters.
    refusal: why not at all; empty if it may be cut.
    per_element: the names of states that have a number for each element of any parameter.
    steps_nothing: whether it steps no parameters, too, and counts then in its groups as with some.
    counted: the names of options that its steps change.
    """

    elementwise: bool
    refusal: str = ""
    per_element: frozenset[str] = frozenset()
    steps_nothing: bool = False
    counted: frozenset[str] = frozenset()

    def has_any_shape(self, state: str) -> bool:
        """Whether a state of this name may have a shape that is not its parameter's."""
        return not self.elementwise and state not in self.per_element


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """One parameter group of the trial. options: of the user's group."""

    options: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device


def trial_groups(groups: Sequence[Mapping[str, Any]]) -> list[TrialGroup]:
    """Small groups with the options of the user's, for parameters of the same dimensions."""
    found: dict[Hashable, TrialGroup] = {}
    longest = dict(_LONGEST)
    if all(parameter.dim() < 2 for group in groups for parameter in group["params"]):
        longest[1] = _LONGEST_VECTOR
    for group in groups:
        kinds: dict[int, set[tuple[int, ...]]] = {}
        for parameter in group["params"]:
            kinds.setdefault(parameter.dim(), set()).add(_small(parameter.shape, longest))
        shapes: list[tuple[int, ...]] = []
        for _, same in sorted(kinds.items()):
            ordered = sorted(same, key=lambda shape: (math.prod(shape), shape))
            shapes += [ordered[-1], ordered[0]]  # Two at least: one may be a rank's only one.
        if not shapes:
            continue
        first = group["params"][0]
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        one = TrialGroup(options, tuple(shapes), dtype, first.device)
        # Layers that differ in their learning rates only are tried out once.
        found.setdefault((compared({**options, "lr": 0}), one.shapes, dtype), one)
    return list(found.values())[:_MAX_GROUPS]


def _small(shape: torch.Size, longest: Mapping[int, int]) -> tuple[int, ...]:
    cut_off = longest.get(len(shape), _LONGEST_OF_MORE)
    return tuple(min(max(length, 1), cut_off) for length in shape)


def compared(value: Any) -> Hashable:
    """Equal for equal options, and for nothing else: of an object that is no plain value, which a
    program may change, nothing is known but that it is there once."""
    if isinstance(value, Mapping):
        pairs = [(str(key), compared(one)) for key, one in value.items()]
        return tuple(sorted(pairs, key=itemgetter(0)))
    if isinstance(value, list | tuple):
        return type(value), tuple(compared(one) for one in value)
    if isinstance(value, torch.Tensor) and value.numel() <= _SMALL:
        return value.dtype, str(value.device), tuple(value.shape), tuple(value.flatten().tolist())
    if isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device | None):
        return type(value), value
    if isinstance(value, TrialGroup):
        return compared(value.options), value.shapes, value.dtype, value.device
    return _Once()


class _Once:
    """Equal to itself only."""


def is_known(options: Hashable) -> bool:
    """Whether what `compared` has returned can be met again."""
    if isinstance(options, tuple):
        return all(is_known(one) for one in options)
    return not isinstance(options, _Once)


def try_out(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[TrialGroup],
    defaults: Mapping[str, Any],
) -> Shardability:
    """Take the steps of the trial."""
    with _unnoticed() as generators:
        return _judge(optimizer_class, groups, defaults, generators)


def keeps_state(
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> bool:
    """Whether the optimizer keeps state of what it steps with the options of this group: SGD does
    with momentum only."""
    if not options["params"]:
        return True
    group = {k: v for k, v in options.items() if k not in ("params", "param_names")}
    stepped = torch.nn.Parameter(torch.ones(1, device=options["params"][0].device))
    stepped.grad = torch.ones_like(stepped)
    try:
        with _unnoticed():
            own = {**copy.deepcopy(group), "params": [stepped]}
            optimizer = optimizer_class([own], **copy.deepcopy(dict(defaults)))
            optimizer.step()
    except Exception:  # It needs shapes, or another mode.
        return True
    return bool(optimizer.state.get(stepped))


@contextlib.contextmanager
def _unnoticed() -> Iterator[Mapping[str, Any]]:
    """The random generators, whose state it yields, are left as they were; no warning is shown, and
    the program's hooks on the steps of all optimizers do not see those of a trial."""
    generators = RandomState()
    before = generators.state_dict()
    try:
        with warnings.catch_warnings(), torch.no_grad(), _without_global_hooks():
            warnings.simplefilter("ignore")
            yield before
    finally:
        generators.load_state_dict(before)


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    module = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides its name.
    tables: list[dict[int, Any]] = [getattr(module, name, {}) for name in names]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def _judge(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[TrialGroup],
    defaults: Mapping[str, Any],
    generators: Mapping[str, Any],
) -> Shardability:
    name = optimizer_class.__name__
    trial = _Trial(optimizer_class, groups, defaults, has_unused=True)
    try:
        whole = trial.run(trial.whole())
    except Exception:  # Some cannot do without a gradient.
        trial = _Trial(optimizer_class, groups, defaults, has_unused=False)
        try:
            whole = trial.run(trial.whole())
        except Exception as error:
            return _refused(
                name,
                f"in a trial on small tensors, in one process, its step() raised {_text_of(error)}",
            )
    # Each rank would keep it for its own parameters, and no range says whose it is.
    if whole.kept[0]["state"]:
        names = ", ".join(sorted(map(repr, whole.kept[0]["state"])))
        return _refused(
            name, f"its state has entries of no parameter ({names}), which no rank owns"
        )
    # Noise is drawn by element, in an order that changes with the cuts.
    if not _is_like(generators, RandomState().state_dict()):
        return _refused(
            name, "it draws random numbers, and the ranks would draw other numbers than one process"
        )
    # A shard is stepped without a closure.
    if not trial.ignores_losses(whole):
        return _refused(name, "its steps depend on the loss, which differs between the ranks")
    try:
        # First whole parameters: what fails here cannot be sharded in any way.
        differing = trial.run(trial.by_parameter()).differs_from(whole, 0.0)
    except Exception as error:
        differing = (
            f"it needs all parameters in one place, and raises {_text_of(error)} without them"
        )
    if differing:
        how = (
            "If the cause is an option that uses all gradients (a clipping norm), turn it off, "
            "and use max_norm of ZeroRedundancyOptimizer. Otherwise use"
        )
        return _refused(name, differing, how)
    # It can be sharded. What follows says whether it can be cut inside a parameter.
    per_element = whole.per_element(trial.shapes)
    # Counters among the attributes would be lost when shards are cut again for other ranks.
    may_be_flat = whole.is_plain(trial.shapes) and not whole.has_counted
    try:
        is_flat = may_be_flat and not trial.run(trial.flat()).differs_from(whole, _TOLERANCE)
    except Exception:  # It needs shapes.
        is_flat = False
    try:  # As on a rank that owns no piece.
        steps_nothing = not trial.run([*trial.whole(), []]).differs_from(whole, 0.0)
    except Exception:  # It needs some.
        steps_nothing = False
    return Shardability(is_flat, "", per_element, steps_nothing, whole.counted)


def _text_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__} ({text[:160]})" if text else type(error).__name__


def _refused(name: str, reason: str, how: str = "Use") -> Shardability:
    return Shardability(
        False,
        f"{name} cannot be sharded: {reason}. {how} it without ZeroRedundancyOptimizer: "
        f"{name}(model.parameters(), ...) takes the same steps on every rank of a "
        "DistributedDataParallel",
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements [start, stop) of a parameter of the trial; all of it, in its shape, by default."""

    parameter: int
    start: int = 0
    stop: int | None = None  # None: all of the parameter

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.stop is None else tensor.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the optimizers of one run have left.

    values: by parameter, its elements after each step: (steps, numel).
    states: by parameter, those of its pieces, in order.
    kept: by optimizer, what it keeps beside the state of parameters.
    has_counted: whether numbers among the attributes of an optimizer have changed.
    counted: the names of options that the steps have changed.
    """

    values: list[torch.Tensor]
    states: list[list[dict[Any, Any]]]
    kept: list[Any]
    has_counted: bool
    counted: frozenset[str]

    def per_element(self, shapes: Sequence[tuple[int, ...]]) -> frozenset[str]:
        by_name: dict[Any, list[bool]] = {}
        for states, shape in zip(self.states, shapes, strict=True):
            for name, value in states[0].items():
                fits = isinstance(value, torch.Tensor) and tuple(value.shape) == shape
                by_name.setdefault(name, []).append(fits)
        return frozenset(name for name, fits in by_name.items() if len(fits) > 1 and all(fits))

    def is_plain(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether each entry of the state has a number for each element, or is one number."""
        return all(
            isinstance(value, bool | int | float | str | None)
            if not isinstance(value, torch.Tensor)
            else tuple(value.shape) in ((), shape)
            for states, shape in zip(self.states, shapes, strict=True)
            for state in states
            for value in state.values()
        )

    def differs_from(self, whole: _Outcome, tolerance: float) -> str:
        """What is not as in the run over whole parameters; empty if nothing differs."""
        for ours, theirs in zip(self.values, whole.values, strict=True):
            # Compared with how far a step moves: values themselves may be large, and steps tiny.
            moved = float(torch.nan_to_num((theirs[1:] - theirs[:-1]).abs()).max())
            allowed = tolerance * moved + 2 * torch.finfo(ours.dtype).eps * bool(tolerance)
            if not torch.allclose(ours, theirs, rtol=0, atol=allowed, equal_nan=True):
                return (
                    "its step of a parameter depends on the other parameters (on a statistic or a "
                    "norm over all of them)"
                )
        for pieces, uncut in zip(self.states, whole.states, strict=True):
            if not _is_like(uncut[0], _joined(pieces), tolerance):
                return "its state of a parameter depends on the other parameters"
        if not all(_is_like(whole.kept[0], kept, tolerance) for kept in self.kept):
            return "numbers that it keeps for all parameters depend on the parameters that it has"
        return ""


def _joined(pieces: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    """The state of a parameter from those of its pieces."""
    # Nothing to put together; and its shapes stay.
    if len(pieces) == 1:
        return pieces[0]
    joined: dict[Any, Any] = {}
    for name, first in pieces[0].items():
        values: list[Any] = [piece.get(name) for piece in pieces]
        # One number for each element; the others, such as `step`, have to be equal in all pieces.
        if isinstance(first, torch.Tensor) and first.dim() > 0:
            joined[name] = torch.cat(values)
        else:
            joined[name] = first if all(_is_like(first, value) for value in values) else values
    return joined


def _is_like(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Whether two values are equal, in whatever shape their tensors are. tolerance: of floating
    point tensors, relative to the largest element."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        ours, theirs = one.detach().reshape(-1), other.detach().reshape(-1)
        # Flattened above: a flat piece has another shape than its parameter.
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        # Counters must be equal; only floating point numbers may be rounded otherwise.
        if torch.equal(ours, theirs) or not ours.is_floating_point() or not ours.numel():
            return torch.equal(ours, theirs)
        # Relative to the largest element: a small one may be the difference of two large ones.
        allowed = tolerance * float(torch.nan_to_num(ours).abs().max())
        return torch.allclose(ours, theirs, rtol=0, atol=allowed, equal_nan=True)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            _is_like(one[key], other[key], tolerance) for key in one
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(
            _is_like(ours, theirs, tolerance) for ours, theirs in zip(one, other, strict=True)
        )
    if isinstance(one, bool | int | float | complex | str | bytes | None):
        return type(one) is type(other) and (one == other or one != one)  # NaN is like NaN.
    # What is left are objects and functions, which have no content to compare.
    return type(one) is type(other)


class _Trial:
    """The problem, and the runs over it. has_unused: a parameter has no gradient in one step."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[TrialGroup],
        defaults: Mapping[str, Any],
        *,
        has_unused: bool,
    ) -> None:
        self._optimizer_class, self._groups, self._defaults = optimizer_class, groups, defaults
        self._unused = (3, 1) if has_unused else None  # the step, and the parameter
        self._group_of = [n for n, group in enumerate(groups) for _ in group.shapes]
        self.shapes = [shape for group in groups for shape in group.shapes]
        drawn = torch.Generator().manual_seed(0)
        self._start, self._noise = [], []
        for number, shape in zip(self._group_of, self.shapes, strict=True):
            dtype, device = groups[number].dtype, groups[number].device
            self._start.append(torch.randn(shape, generator=drawn, device="cpu").to(device, dtype))
            noise = torch.randn((len(_SIZES), *shape), generator=drawn, device="cpu")
            self._noise.append(noise.to(device, dtype))

    def whole(self) -> list[list[_Piece]]:
        return [[_Piece(number) for number in range(len(self.shapes))]]

    def by_parameter(self) -> list[list[_Piece]]:
        """Three ranks, of which one has one parameter, and nothing of the other groups."""
        one, *others = self.whole()[0]
        return [rank for rank in ([one], others[::2], others[1::2]) if rank]

    def flat(self) -> list[list[_Piece]]:
        """Two ranks with a part of each parameter, one of them with two pieces of it."""
        first, second = [], []
        for number, shape in enumerate(self.shapes):
            numel = math.prod(shape)
            # Cut as shards are, at whole cache lines, where a parameter is long enough for it.
            fine = numel < 3 * ALIGNMENT
            step = max(1, numel // 3) if fine else numel // 3 // ALIGNMENT * ALIGNMENT
            ends = [0, min(step, numel), min(2 * step, numel), numel]
            pieces = [_Piece(number, *ends[n : n + 2]) for n in range(3) if ends[n] < ends[n + 1]]
            first += pieces[:1]
            second += pieces[1:]
        return [rank for rank in (first, second) if rank]

    def ignores_losses(self, whole: _Outcome) -> bool:
        """Whether the steps stay the same with a closure, of which shards do not know."""
        losses: list[float] = []

        def closure() -> Any:
            losses.append(1.0 + len(losses))
            return torch.tensor(losses[-1], device="cpu")

        try:
            return not self.run(self.whole(), closure).differs_from(whole, 0.0)
        except Exception:  # It takes none.
            return True

    def run(
        self, ranks: Sequence[Sequence[_Piece]], closure: Callable[[], float] | None = None
    ) -> _Outcome:
        made = [self._make(pieces) for pieces in ranks]
        before = [_kept(optimizer)["attributes"] for optimizer, _ in made]
        options = [one for optimizer, _ in made for one in copied_options(optimizer.param_groups)]
        steps: list[list[torch.Tensor]] = [[one.reshape(-1)] for one in self._start]
        for step in range(len(_SIZES)):
            # The simulated ranks step in turn, each with its pieces of the same gradients.
            for (optimizer, tensors), pieces in zip(made, ranks, strict=True):
                self._step(step, optimizer, tensors, pieces, closure)
            # The pieces of a parameter are put together, so that any cut has the same form.
            for number in range(len(self.shapes)):
                parts = self._of(number, made, ranks)
                steps[number].append(torch.cat([part.detach().reshape(-1) for _, part in parts]))
        return _Outcome(
            [torch.stack(values) for values in steps],
            [
                [
                    dict(optimizer.state.get(part, {}))
                    for optimizer, part in self._of(n, made, ranks)
                ]
                for n in range(len(self.shapes))
            ],
            kept := [_kept(optimizer) for optimizer, _ in made],
            not _is_like(before, [each["attributes"] for each in kept]),
            frozenset(
                name
                for one, now in zip(
                    options, (group for each, _ in made for group in each.param_groups), strict=True
                )
                for name, value in now.items()
                # A weight decay is set by the trial.
                if name not in ("params", "weight_decay") and not _is_like(one.get(name), value)
            ),
        )

    def _make(
        self, pieces: Sequence[_Piece]
    ) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
        tensors = [
            torch.nn.Parameter(piece.of(self._start[piece.parameter]).clone()) for piece in pieces
        ]
        wanted = [
            {
                **copy.deepcopy(dict(group.options)),
                "params": [
                    tensor
                    for tensor, piece in zip(tensors, pieces, strict=True)
                    if self._group_of[piece.parameter] == number
                ],
            }
            for number, group in enumerate(self._groups)
        ]
        optimizer = self._optimizer_class(wanted, **copy.deepcopy(dict(self._defaults)))
        for options in optimizer.param_groups:
            rate = options.get("lr")
            # A warm-up may begin with none, which would move nothing.
            if isinstance(rate, float | int) and rate < 1e-2:
                options["lr"] = 1e-2
            elif isinstance(rate, torch.Tensor):
                rate.clamp_(min=1e-2)
        # Schedule-free optimizers raise in step() otherwise.
        if callable(train := getattr(optimizer, "train", None)):
            train()
        return optimizer, tensors

    def _step(
        self,
        step: int,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[torch.nn.Parameter],
        pieces: Sequence[_Piece],
        closure: Callable[[], float] | None,
    ) -> None:
        for tensor, piece in zip(tensors, pieces, strict=True):
            noise = piece.of(self._noise[piece.parameter][step])
            is_unused = (step, piece.parameter) == self._unused
            tensor.grad = None if is_unused else noise * _SIZES[step] + 0.1 * tensor
        # A decay of zero says nothing of how the class applies one that is set later.
        if step == _DECAYS_FROM:
            for options in optimizer.param_groups:
                if options.get("weight_decay") == 0:
                    options["weight_decay"] = 1e-2
        optimizer.step() if closure is None else optimizer.step(closure)

    def _of(
        self,
        number: int,
        made: Sequence[tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]],
        ranks: Sequence[Sequence[_Piece]],
    ) -> list[tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
        """The pieces of a parameter, in order, each with its optimizer."""
        return [
            (optimizer, tensor)
            for (optimizer, tensors), pieces in zip(made, ranks, strict=True)
            for tensor, piece in zip(tensors, pieces, strict=True)
            if piece.parameter == number
        ]


def _kept(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The numbers that an optimizer keeps for all its parameters: in its groups, among its
    attributes, and in a state that is no parameter's."""

    def numbers(held: Mapping[Any, Any]) -> dict[Any, Any]:
        return {
            key: value
            for key, value in held.items()
            if isinstance(value, bool | int | float)
            or (isinstance(value, torch.Tensor) and value.numel() == 1)
        }

    shared = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    groups = [numbers(options) for options in optimizer.param_groups]
    return {"groups": groups, "attributes": numbers(vars(optimizer)), "state": shared}
