"""A `ZeroRedundancyOptimizer` in a checkpoint: every rank writes and reads the pieces it steps.

    name/state/<parameter>/<tensor>    as in the optimizer's plain state, by parameter name
    name/state/<parameter>/master      the float32 copy of a parameter in half precision
    name/param_groups, name/num_steps  leaves

Names instead of numbers are also what torch.distributed.checkpoint uses for optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..zero.optimizer_state import MASTER
from ..zero.parameter_shard import KeptPiece
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from .contents import pickled, whole_of
from .format.pieces import Contents, Path, TensorRange

STATE, GROUPS, NUM_STEPS = "state", "param_groups", "num_steps"


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces of one parameter, one behind the other."""

    parameter: int
    pieces: tuple[KeptPiece, ...]

    @property
    def start(self) -> int:
        return self.pieces[0].piece.parameter_start

    @property
    def stop(self) -> int:
        last = self.pieces[-1].piece
        return last.parameter_start + last.numel


class ShardedState:
    """What a checkpoint needs to know of one optimizer on one rank."""

    def __init__(self, name: str, optimizer: ZeroRedundancyOptimizer) -> None:
        self.name = name
        self.optimizer = optimizer
        shard = optimizer.shard
        self.inner = shard.optimizer
        self.parameters: Sequence[torch.nn.Parameter] = shard.parameters
        pieces = [kept for of_bucket in shard.pieces for kept in of_bucket]
        self.runs = [] if self.inner is None else list(_runs_of(pieces))
        """Of this rank's own shard and of the replicas that it keeps: both are read."""
        self._names = names_of(optimizer)

    def name_of(self, run: Run) -> str:
        return self.name_of_parameter(self.parameters[run.parameter])

    def name_of_parameter(self, parameter: torch.nn.Parameter) -> str:
        return self._names[id(parameter)]

    def shape_of(self, run: Run) -> tuple[int, ...]:
        return tuple(self.parameters[run.parameter].shape)

    def has_master(self, run: Run) -> bool:
        kept = run.pieces[0].range
        return kept.master is not kept.values

    def state_path(self, parameter: str, key: str) -> Path:
        return (self.name, STATE, parameter, key)

    def named_groups(self) -> list[dict[str, Any]]:
        return [
            {
                **{key: value for key, value in options.items() if key != "param_names"},
                "params": [self._names[id(p)] for p in options["params"]],
            }
            for options in self.optimizer.param_groups
        ]

    def collect(self, writes_leaves: bool) -> Contents:
        """This rank's pieces. writes_leaves: and what all ranks have alike."""
        found = Contents()
        for run in self.runs:
            if run.pieces[0].is_own:
                self._collect_run(run, found)
        if writes_leaves:
            found.leaves[self.name, GROUPS] = pickled(self.named_groups())
            found.leaves[self.name, NUM_STEPS] = pickled(self.optimizer.num_steps)
        return found

    def _collect_run(self, run: Run, found: Contents) -> None:
        assert self.inner is not None
        name, shape = self.name_of(run), self.shape_of(run)

        def ranged(path: Path, parts: list[torch.Tensor]) -> TensorRange:
            flat = tuple(part.detach().reshape(-1) for part in parts)
            return TensorRange(path, shape, flat[0].dtype, run.start, run.stop, flat)

        states = [self.inner.state.get(owned.tensor, {}) for owned in run.pieces]
        for key, value in states[0].items():
            path = self.state_path(name, key)
            if is_per_element(key, value, run.pieces[0].tensor.shape):
                found.ranges.append(ranged(path, [state[key] for state in states]))
            elif run.start > 0:
                continue  # Equal wherever a piece lives; who has the beginning writes it.
            elif isinstance(value, torch.Tensor) and value.numel() > 0:
                found.ranges.append(whole_of(path, value))
            else:
                found.leaves[path] = pickled(value)
        if self.has_master(run):
            masters: list[torch.Tensor] = [owned.tensor for owned in run.pieces]
            found.ranges.append(ranged(self.state_path(name, MASTER), masters))


def is_per_element(key: str, value: object, shape: torch.Size) -> bool:
    """Whether a tensor of the state has an element for each of the piece's, which has `shape`."""
    return isinstance(value, torch.Tensor) and value.shape == shape and key != "step"


def names_of(optimizer: ZeroRedundancyOptimizer) -> dict[int, str]:
    """Names of an optimizer's parameters by id: those that it knows, or else their numbers."""
    numbered = [p for options in optimizer.param_groups for p in options["params"]]
    names = {id(parameter): str(number) for number, parameter in enumerate(numbered)}
    return names | optimizer._names()


def _runs_of(pieces: Sequence[KeptPiece]) -> Iterator[Run]:
    """Pieces as the shard lists them, joined where one goes on where the last ended."""
    run: list[KeptPiece] = []
    for owned in pieces:
        if run:
            last = run[-1].piece
            goes_on = (
                owned.range is run[-1].range
                and owned.piece.parameter == last.parameter
                and owned.piece.parameter_start == last.parameter_start + last.numel
            )
            if not goes_on:
                yield Run(run[0].piece.parameter, tuple(run))
                run = []
        run.append(owned)
    if run:
        yield Run(run[0].piece.parameter, tuple(run))
