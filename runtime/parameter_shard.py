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

from collectives import Group
from collectives.buckets import BucketPlan
from collectives.shards import Piece, padded_numel, pieces_of, shard_numel

_CPU_TILE_NUMEL = 1 << 18
"""On a CPU a piece is stepped in tiles that stay in the cache: an optimizer goes over its tensors
ten times or more. AdamW over 6.3 M elements took 37 ms as one tensor, 12 ms in these tiles."""

_HALF = (torch.float16, torch.bfloat16)


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
        has_master = first.dtype in _HALF
        self.master = self.own.float() if has_master else self.own
        self.reduced = reduced
        self.gradient = reduced.float() if has_master and reduced is not None else reduced

    def take_gradient(self, divisor: float) -> None:
        """Make `gradient` of what the reducer left: the sum over the ranks, over `divisor`."""
        if self.gradient is None or self.reduced is None:
            return
        if self.gradient is not self.reduced:
            self.gradient.copy_(self.reduced)
        if divisor != 1:
            self.gradient.div_(divisor)

    def publish_master(self) -> None:
        """Round the stepped values to what is gathered."""
        if self.master is not self.own:
            self.own.copy_(self.master)


@dataclass(frozen=True, slots=True)
class OwnedPiece:
    """A piece of a parameter that this rank steps.

    tensor: view of the master, of shape (piece.numel,), or the parameter's where it is whole.
    """

    tensor: torch.nn.Parameter
    piece: Piece
    bucket: int


class ParameterShard:
    """The buckets of all parameters, and this rank's optimizer over its pieces of them.

    parameters: by number, as in the plans. reduced: where the reducer leaves each bucket's sum;
    empty where gradients are taken from `.grad`. elementwise: pieces are flat and may be cut
    anywhere; otherwise the plans cut no parameter, and its piece keeps the shape.
    optimizer: None on a rank that owns nothing.
    """

    def __init__(
        self,
        plans: Sequence[BucketPlan],
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        reduced: Sequence[torch.Tensor],
        *,
        elementwise: bool,
    ) -> None:
        self.group = group
        self.parameters = parameters
        self.buckets = [
            ParameterBucket(plan, parameters, group, reduced[i] if reduced else None)
            for i, plan in enumerate(plans)
        ]
        tile = _CPU_TILE_NUMEL if elementwise and group.device.type == "cpu" else sys.maxsize
        self.pieces: list[OwnedPiece] = []
        for number, bucket in enumerate(self.buckets):
            plan = bucket.plan
            for piece in pieces_of(group.rank, group.size, plan.content, plan.spans, tile):
                tensor = bucket.master[piece.shard_start : piece.shard_start + piece.numel]
                if not elementwise:
                    tensor = tensor.view(parameters[piece.parameter].shape)
                self.pieces.append(OwnedPiece(torch.nn.Parameter(tensor), piece, number))
        self.optimizer: torch.optim.Optimizer | None = None

    def make_optimizer(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]],
        defaults: Mapping[str, Any],
    ) -> None:
        """groups: the user's, with whole parameters; each becomes a group of this rank's pieces."""
        number_of = {id(parameter): n for n, parameter in enumerate(self.parameters)}
        owned: dict[int, list[torch.nn.Parameter]] = {}
        for mine in self.pieces:
            owned.setdefault(mine.piece.parameter, []).append(mine.tensor)
        if self.pieces:
            self.optimizer = optimizer_class(
                [
                    {
                        **options,
                        "params": [
                            tensor
                            for parameter in options["params"]
                            for tensor in owned.get(number_of[id(parameter)], ())
                        ],
                    }
                    for options in groups
                ],
                **defaults,
            )

    def squared_norm(self) -> torch.Tensor:
        """The squared 2-norm of the reduced, undivided gradient of this shard: (), float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        reduced = [bucket.reduced for bucket in self.buckets]
        local = [] if any(r is not None for r in reduced) else map(self._gradient_of, self.pieces)
        for gradient in (*reduced, *local):
            if gradient is not None:
                total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        return total

    def apply(
        self,
        groups: Sequence[Mapping[str, Any]],
        used: Sequence[bool],
        divisor: float,
        coefficient: float,
    ) -> None:
        """Step the pieces whose parameters have a gradient on some rank.

        groups: the user's, whose options count. used: per parameter. The summed gradient is
        divided by `divisor`, then multiplied with `coefficient`.
        """
        if self.optimizer is None:
            return
        for bucket in self.buckets:
            bucket.take_gradient(divisor)
        for mine in self.pieces:
            is_used = used[mine.piece.parameter]
            mine.tensor.grad = self._gradient_of(mine) if is_used else None
            if coefficient != 1 and mine.tensor.grad is not None:
                mine.tensor.grad = mine.tensor.grad * coefficient
        for options, ours in zip(groups, self.optimizer.param_groups, strict=True):
            # Schedulers and users change the groups that they see.
            ours.update({name: value for name, value in options.items() if name != "params"})
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.publish_master()

    def _gradient_of(self, mine: OwnedPiece) -> torch.Tensor | None:
        piece, gradient = mine.piece, self.buckets[mine.bucket].gradient
        if gradient is not None:
            return gradient[piece.shard_start : piece.shard_start + piece.numel]
        whole = self.parameters[piece.parameter].grad
        if whole is None:
            return None
        start = piece.parameter_start
        flat = whole.reshape(-1)[start : start + piece.numel].to(mine.tensor.dtype)
        return flat.view(mine.tensor.shape)

    def gather(self) -> None:
        """Bring every rank's part of the parameters to all ranks."""
        for work in [self.group.all_gather(b.flat, b.own) for b in self.buckets]:
            work.wait()
