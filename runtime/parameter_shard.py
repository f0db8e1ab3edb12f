"""This rank's part of the parameters: the memory, the gradients and the optimizer that steps it.

Parameters become views of flat buckets, laid out like the buckets of their gradients. Of each
bucket a rank owns one range; the pieces of parameters in it are what the rank's optimizer steps.
Parameters in float16 and bfloat16 have a float32 copy of the owned range (the master), which is
what is stepped: in eight bits of mantissa most updates would round to nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from collectives import Group, Work
from collectives.buckets import BucketPlan, plan_buckets
from collectives.shards import (
    Piece,
    padded_numel,
    pieces_of,
    shard_numel,
    whole_parameter_spans,
)

from .optimizer_state import MASTER, BucketLayout, PieceState, check_fits, gather_state, slice_state
from .reducer import GradientBucket
from .shardable_optimizers import ELEMENTWISE

_BUCKET_BYTES = 25 << 20
_CPU_TILE_NUMEL = 1 << 18
"""On a CPU a piece is stepped in tiles that stay in the cache: an optimizer goes over its tensors
ten times or more. AdamW over 6.3 M elements took 37 ms as one tensor, 12 ms in these tiles."""

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Gather:
    """Parameters on their way to this rank; by way of `staged`, if that is given, to `target`."""

    work: Work
    staged: torch.Tensor | None = None
    target: torch.Tensor | None = None

    def wait(self) -> None:
        self.work.wait()
        if self.staged is not None and self.target is not None:
            self.target.copy_(self.staged)


class ParameterBucket:
    """Parameters that travel together, as views of one flat tensor.

    flat: (padded,) all parameters of the plan. own: (n,) this rank's range of it. master: (n,)
    what is stepped: `own` itself, or its float32 copy. gradient: (n,) in the master's dtype, or
    None where gradients stay with the parameters. reduced: (n,) where the reducer leaves the sum.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        reduced: torch.Tensor | None,
    ) -> None:
        first = parameters[plan.spans[0][0]]
        length = shard_numel(plan.content, group.size)
        self.plan = plan
        self.flat = torch.zeros(
            padded_numel(plan.content, group.size), dtype=first.dtype, device=first.device
        )
        for number, offset, numel in plan.spans:
            parameter = parameters[number]
            view = self.flat[offset : offset + numel].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        self.own = self.flat[group.rank * length : (group.rank + 1) * length]
        self.has_master = first.dtype in _HALF
        self.master = self.own.float() if self.has_master else self.own
        self.version = 0
        """Steps that this rank has taken with its range since the bucket was laid out."""
        self.reduced = reduced
        self.gradient = reduced.float() if self.has_master and reduced is not None else reduced

    def take_gradient(self, divisor: float) -> None:
        """Make `gradient` of what the reducer left: the sum over the ranks, over `divisor`."""
        if self.gradient is None or self.reduced is None:
            return
        if self.gradient is not self.reduced:
            self.gradient.copy_(self.reduced)
        if divisor != 1:
            self.gradient.div_(divisor)

    def take_parameters(self) -> None:
        """Where somebody wrote to the parameters (a loaded checkpoint, an average), the master
        does not round to them any more, and takes their value; elsewhere it keeps its own."""
        if self.has_master:
            is_ours = self.master.to(self.own.dtype) == self.own
            self.master.copy_(torch.where(is_ours, self.master, self.own.float()))

    def publish_master(self) -> None:
        """Round the stepped values to what is gathered."""
        if self.has_master:
            self.own.copy_(self.master)

    def start_gather(self, group: Group) -> Gather:
        """Begin to bring all ranks' ranges of `flat` to all ranks."""
        if self.flat.device == group.device:
            return Gather(group.all_gather(self.flat, self.own))
        # A group's operations take tensors of its device. Parameters of a model that is spread
        # over several travel by way of it.
        staged = torch.empty_like(self.flat, device=group.device)
        return Gather(group.all_gather(staged, self.own.to(group.device)), staged, self.flat)


@dataclass(frozen=True, slots=True)
class OwnedPiece:
    """A piece of a parameter that this rank steps.

    tensor: view of the master, of shape (piece.numel,), or the parameter's where it is whole.
    """

    tensor: torch.nn.Parameter
    piece: Piece
    bucket: ParameterBucket


class ParameterShard:
    """The buckets of all parameters, and this rank's optimizer over its pieces of them.

    elementwise: pieces are flat and may be cut anywhere; otherwise no parameter is cut, and its
    piece keeps the shape.
    parameters: by number, as in the plans. optimizer: None on a rank that owns nothing.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        group: Group,
        *,
        elementwise: bool,
    ) -> None:
        self.optimizer_class = optimizer_class
        self.defaults = defaults
        self.group = group
        self.optimizer: torch.optim.Optimizer | None = None
        self.parameters: list[torch.nn.Parameter] = []
        self.buckets: list[ParameterBucket] = []
        self.pieces: list[list[OwnedPiece]] = []  # by bucket
        self.num_groups = 0
        self._elementwise = elementwise
        self._load = [0] * group.size  # elements per rank, where parameters are not cut

    def add(
        self,
        parameters: Sequence[torch.nn.Parameter],
        groups: Sequence[Mapping[str, Any]],
        reduced_in: Sequence[GradientBucket] | None,
    ) -> None:
        """Lay out `parameters` too, numbered from the last one on; what is there stays.

        groups: the user's, all of them. reduced_in: the reducer's buckets of the parameters, which
        leave the sums of gradients; None where gradients are taken from `.grad`.
        """
        before = len(self.parameters)
        self.parameters += parameters
        plans = (
            self._plan(parameters, before)
            if reduced_in is None
            else [bucket.plan for bucket in reduced_in]
        )
        tile = _CPU_TILE_NUMEL if self._elementwise and _is_on_cpu(self.group) else sys.maxsize
        fresh: list[OwnedPiece] = []
        for number, plan in enumerate(plans):
            reduced = None if reduced_in is None else reduced_in[number].shard
            bucket = ParameterBucket(plan, self.parameters, self.group, reduced)
            pieces = pieces_of(self.group.rank, self.group.size, plan.content, plan.spans, tile)
            owned = [self._own(bucket, piece) for piece in pieces]
            self.buckets.append(bucket)
            self.pieces.append(owned)
            fresh += owned
        self._admit(fresh, groups)

    def _plan(
        self, parameters: Sequence[torch.nn.Parameter], first_number: int
    ) -> list[BucketPlan]:
        """Buckets for parameters that no reducer has laid out, one per dtype and device."""
        kinds = [(p.dtype, p.device) for p in parameters]
        numels = [p.numel() for p in parameters]
        if self._elementwise:
            plans = plan_buckets(
                numels,
                kinds,
                [p.element_size() for p in parameters],
                bucket_bytes=_BUCKET_BYTES,
                first_bucket_bytes=_BUCKET_BYTES,
            )
            return [plan.numbered_from(first_number) for plan in plans]
        plans = []
        for kind in dict.fromkeys(kinds):
            same = [number for number, other in enumerate(kinds) if other == kind]
            spans, content = whole_parameter_spans(
                [numels[number] for number in same], self.group.size, self._load
            )
            plan = BucketPlan(tuple((same[i], at, n) for i, at, n in spans), content)
            plans.append(plan.numbered_from(first_number))
        return plans

    def _own(self, bucket: ParameterBucket, piece: Piece) -> OwnedPiece:
        tensor = bucket.master[piece.shard_start : piece.shard_start + piece.numel]
        if not self._elementwise:
            tensor = tensor.view(self.parameters[piece.parameter].shape)
        return OwnedPiece(torch.nn.Parameter(tensor), piece, bucket)

    def _admit(self, pieces: Sequence[OwnedPiece], groups: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer new pieces, each in the group that its parameter is in."""
        self.num_groups = len(groups)
        number_of = {id(parameter): n for n, parameter in enumerate(self.parameters)}
        owned: dict[int, list[torch.nn.Parameter]] = {}
        for mine in pieces:
            owned.setdefault(mine.piece.parameter, []).append(mine.tensor)
        wanted: list[dict[str, Any]] = [
            {
                **_options(options),
                "params": [
                    tensor
                    for parameter in dict.fromkeys(options["params"])
                    for tensor in owned.get(number_of.get(id(parameter), -1), ())
                ],
            }
            for options in groups
        ]
        # Some optimizers (Adagrad) make state, or look at shapes, in their constructor only: so
        # new pieces go through it, and are then taken over.
        fresh = self.optimizer_class(wanted, **self.defaults) if pieces else None
        if self.optimizer is None:
            self.optimizer = fresh
            return
        for number, options in enumerate(wanted):
            if number < len(self.optimizer.param_groups):
                self.optimizer.param_groups[number]["params"].extend(options["params"])
            else:
                self.optimizer.add_param_group(options)
        if fresh is not None:
            self.optimizer.state.update(fresh.state)

    @property
    def portions(self) -> list[list[int]]:
        """Numbers of the buckets that are stepped together. One by one, while the ones before
        travel, where the optimizer is known to keep no state but a parameter's own."""
        numbers = list(range(len(self.buckets)))
        if self.optimizer_class in ELEMENTWISE:
            return [[number] for number in numbers]
        return [numbers]

    def squared_norm(self) -> torch.Tensor:
        """The squared 2-norm of the reduced, undivided gradient of this shard: (), float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        for bucket, pieces in zip(self.buckets, self.pieces, strict=True):
            reduced = bucket.reduced
            local = map(self._gradient_of, pieces) if reduced is None else [reduced]
            for gradient in local:
                if gradient is not None:
                    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
                    total += norm.square().to(total.device)
        return total

    def apply(
        self,
        portion: Sequence[int],
        groups: Sequence[Mapping[str, Any]],
        used: Sequence[bool],
        divisor: float,
        coefficient: float,
    ) -> None:
        """Step the pieces whose parameters have a gradient on some rank.

        portion: numbers of the buckets. groups: the user's, whose options count. used: per
        parameter. The summed gradient is divided by `divisor`, then multiplied with `coefficient`.
        """
        for number in portion:
            self.buckets[number].version += 1
        if self.optimizer is None:
            return
        pieces = [mine for number in portion for mine in self.pieces[number]]
        for number in portion:
            self.buckets[number].take_parameters()
            self.buckets[number].take_gradient(divisor)
        for mine in pieces:
            gradient = self._gradient_of(mine) if used[mine.piece.parameter] else None
            if coefficient != 1 and gradient is not None:
                gradient = gradient * coefficient
            mine.tensor.grad = gradient
        for options, ours in zip(groups, self.optimizer.param_groups, strict=True):
            # Schedulers and users change the groups that they see.
            ours.update(_options(options))
        self.optimizer.step()
        for mine in pieces:
            mine.tensor.grad = None
        for number in portion:
            self.buckets[number].publish_master()

    def _gradient_of(self, mine: OwnedPiece) -> torch.Tensor | None:
        piece, gradient = mine.piece, mine.bucket.gradient
        if gradient is not None:
            reduced = gradient[piece.shard_start : piece.shard_start + piece.numel]
            return reduced.view(mine.tensor.shape)
        whole = self.parameters[piece.parameter].grad
        if whole is None:
            return None
        start = piece.parameter_start
        flat = whole.reshape(-1)[start : start + piece.numel].to(mine.tensor.dtype)
        return flat.view(mine.tensor.shape)

    def start_gather(self, portion: Sequence[int]) -> list[Gather]:
        """Begin to bring every rank's part of the parameters to all ranks."""
        return [self.buckets[number].start_gather(self.group) for number in portion]

    # -- state ---------------------------------------------------------------------------------

    def gather_state(self, to: int) -> dict[int, dict[str, Any]]:
        """State of all parameters, by their id(), on rank `to`; empty on the others."""
        layouts = [
            BucketLayout(
                bucket.plan.content,
                bucket.plan.spans,
                [PieceState(m.piece, m.tensor.shape, self._state_of(m)) for m in pieces],
            )
            for bucket, pieces in zip(self.buckets, self.pieces, strict=True)
        ]
        shapes = [parameter.shape for parameter in self.parameters]
        gathered = gather_state(layouts, shapes, self.group, to)
        return {id(self.parameters[number]): state for number, state in gathered.items()}

    def _state_of(self, mine: OwnedPiece) -> dict[str, Any]:
        assert self.optimizer is not None
        state = dict(self.optimizer.state.get(mine.tensor, {}))
        if mine.bucket.has_master:
            state[MASTER] = mine.tensor.detach()
        return state

    def check_fits(self, saved: Mapping[int, tuple[str, Mapping[str, Any]]]) -> None:
        """Raises ValueError for state that does not fit its parameter, whoever owns it. saved: as
        in `load_state`."""
        for parameter in self.parameters:
            name, state = saved.get(id(parameter), ("", {}))
            check_fits(state, parameter.shape, name, may_be_cut=self._elementwise)

    def load_state(
        self, saved: Mapping[int, tuple[str, Mapping[str, Any]]], groups: Sequence[dict[str, Any]]
    ) -> None:
        """Take this rank's part of what fits. saved: by id() of a parameter its name, for errors,
        and its state. groups: the user's, with the options as they were loaded."""
        optimizer = self.optimizer
        if optimizer is None:
            return
        place = {
            id(tensor): number
            for number, tensor in enumerate(p for g in optimizer.param_groups for p in g["params"])
        }
        sliced: dict[int, dict[str, Any]] = {}
        masters: list[tuple[OwnedPiece, torch.Tensor]] = []
        for mine in (mine for pieces in self.pieces for mine in pieces):
            parameter = self.parameters[mine.piece.parameter]
            _, whole = saved.get(id(parameter), ("", {}))
            if not whole:
                continue
            state = slice_state(whole, mine.piece, mine.tensor.shape, parameter.shape)
            master = state.pop(MASTER, None)
            if master is not None and mine.bucket.has_master:
                masters.append((mine, master))
            if state:
                sliced[place[id(mine.tensor)]] = state
        plain = optimizer.state_dict()["param_groups"]
        for options, ours in zip(plain, groups, strict=True):
            options.update(_options(ours))
        optimizer.load_state_dict({"state": sliced, "param_groups": plain})
        for mine, master in masters:
            mine.tensor.data.copy_(master)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a user's group says of ours, whose tensors are pieces and have no names."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _is_on_cpu(group: Group) -> bool:
    return group.device.type == "cpu"
