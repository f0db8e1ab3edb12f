"""This rank's part of the parameters: its memory, its gradients and the optimizer that steps it.

Parameters move into flat buckets (parameter_bucket.py). A rank owns one range of each bucket,
and its optimizer steps the pieces of parameters in that range.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group

from ...data_parallel.gradients.gradient_bucket import GradientBucket
from ...partition.buckets import BucketPlan, plan_buckets
from ...partition.resharding import Range, kept_by
from ...partition.shards import Piece, pieces_of, shard_numel, whole_parameter_spans
from .exact_norm import as_reals, partial_sum
from .optimizer_state import gather_state
from .optimizer_trial import Shardability, keeps_state
from .parameter_bucket import Gather, ParameterBucket, ShardRange, in_format_of
from .shard_state import MASTER, Inventory, Layout, ShardState, address_of, complete, divided
from .shardable_optimizers import ELEMENTWISE

_BUCKET_BYTES = 25 << 20
_CPU_TILE_BYTES = 512 << 10
"""On a CPU the optimizer steps a piece in tiles that stay in the cache, because it reads and writes
its tensors ten times or more. AdamW over 6.3 M elements took 37 ms as one tensor, 10 ms in tiles.

Tiles of 1 MiB are as fast only if malloc keeps their temporary tensors for the next tile. Where the
process has freed nothing larger before, it gives them back to the kernel each time, and every page
of them is made again: up to 6272 page faults a step, and 20 ms. Tiles of 512 KiB had none.
"""


@dataclass(frozen=True, slots=True)
class KeptPiece:
    """A piece of a parameter that this rank steps, as part of its own shard or of a replica.

    tensor: view of the master; (piece.numel,), or the parameter's shape if parameters are not cut.
    place: the same memory, where an optimizer has rebound `tensor`.
    where: its range in the bucket. range: the shard or replica that contains it.
    """

    tensor: torch.nn.Parameter
    place: torch.Tensor
    piece: Piece
    where: Range
    range: ShardRange

    def bring_back(self) -> None:
        """The optimizer has stepped, and may have rebound what it steps (`p.data = …`)."""
        if self.tensor.data_ptr() != self.place.data_ptr():
            self.place.copy_(self.tensor.detach())
            self.tensor.data = self.place


class ParameterShard:
    """The buckets of all parameters, and this rank's optimizer over its pieces of them.

    verdict: how finely the optimizer's state may be cut.
    elementwise: pieces are flat and may be cut anywhere; otherwise no parameter is cut, and its
        piece keeps the shape.
    replicas: number of ranks that keep each shard, the owner included.
    parameters: by number, as in the plans.
    optimizer: None on a rank that owns no piece, if the class cannot step nothing, or is known to
        count nothing in its groups.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        group: Group,
        *,
        verdict: Shardability,
        replicas: int = 1,
    ) -> None:
        self.optimizer_class = optimizer_class
        self.defaults = defaults
        self.group = group
        self.optimizer: torch.optim.Optimizer | None = None  # None: as above
        self.parameters: list[torch.nn.Parameter] = []
        self.buckets: list[ParameterBucket] = []
        self.pieces: list[list[KeptPiece]] = []  # by bucket
        self.num_groups = 0
        self.replicas = replicas
        self.verdict = verdict
        self.elementwise = verdict.elementwise
        self.num_rewritten = 0
        """How often parameters or state were laid out, loaded or switched, outside a step."""
        self.parameters_have_come = True
        """Whether the parameters of all ranks are known to have come since the last step. Then what
        differs from the masters, the program has written. On a GPU a gather that is aborted leaves
        anything."""
        self.may_have_state = False
        """Whether some rank may have state of some parameter; equal on all ranks."""
        self._load = [0] * group.size  # elements per rank, where parameters are not cut

    def add(
        self,
        parameters: Sequence[torch.nn.Parameter],
        groups: Sequence[Mapping[str, Any]],
        reduced_in: Sequence[GradientBucket] | None,
    ) -> None:
        """Lay out `parameters` after the existing ones, which stay.

        groups: all parameter groups of the user's optimizer.
        reduced_in: the reducer's buckets of these parameters; None if `.grad` is read.
        """
        self.num_rewritten += 1
        before = len(self.parameters)
        self.parameters += parameters
        # The reducer's buckets are the shards' buckets: what a reduce-scatter leaves is one range.
        plans = (
            self._plan(parameters, before)
            if reduced_in is None
            else [bucket.plan for bucket in reduced_in]
        )
        fresh: list[KeptPiece] = []
        for number, plan in enumerate(plans):
            reduced = None if reduced_in is None else reduced_in[number].shard
            bucket = ParameterBucket(plan, self.parameters, self.group, reduced, self.replicas)
            pieces = self._pieces_of(len(self.buckets), bucket)
            self.buckets.append(bucket)
            self.pieces.append(pieces)
            fresh += pieces
        self._admit(fresh, groups)

    def _pieces_of(self, number: int, bucket: ParameterBucket) -> list[KeptPiece]:
        # On a GPU each kernel costs a launch, so that pieces are as large as can be.
        tile = sys.maxsize
        if self.elementwise and _is_on_cpu(self.group):
            tile = _CPU_TILE_BYTES // bucket.own.master.element_size()
        plan, size = bucket.plan, self.group.size
        pieces = []
        for kept in bucket.ranges:
            base = kept.owner * shard_numel(plan.content, size)
            for piece in pieces_of(kept.owner, size, plan.content, plan.spans, tile):
                if not (piece.numel or self.elementwise):
                    continue  # Those that look at whole parameters divide by their size.
                start, stop = piece.shard_start, piece.shard_start + piece.numel
                tensor = kept.master[start:stop]
                # An optimizer of rows and columns has to see them.
                if not self.elementwise:
                    tensor = tensor.view(self.parameters[piece.parameter].shape)
                where = Range(number, base + start, base + stop)
                pieces.append(KeptPiece(torch.nn.Parameter(tensor), tensor, piece, where, kept))
        return pieces

    def _plan(
        self, parameters: Sequence[torch.nn.Parameter], first_number: int
    ) -> list[BucketPlan]:
        """Plan buckets, each of one dtype and device, for parameters that no reducer laid out."""
        kinds = [(p.dtype, p.device) for p in parameters]
        numels = [p.numel() for p in parameters]
        if self.elementwise:
            plans = plan_buckets(
                numels,
                kinds,
                [p.element_size() for p in parameters],
                bucket_bytes=_BUCKET_BYTES,
                first_bucket_bytes=_BUCKET_BYTES,
            )
            return [plan.numbered_from(first_number) for plan in plans]
        # Optimizers that look at whole parameters get whole ones, so ranks are balanced by size.
        plans = []
        for kind in dict.fromkeys(kinds):
            same = [number for number, other in enumerate(kinds) if other == kind]
            spans, content = whole_parameter_spans(
                [numels[number] for number in same], self.group.size, self._load
            )
            plan = BucketPlan(tuple((same[i], at, n) for i, at, n in spans), content)
            plans.append(plan.numbered_from(first_number))
        return plans

    def _admit(self, pieces: Sequence[KeptPiece], groups: Sequence[Mapping[str, Any]]) -> None:
        """Add new pieces to the optimizer, each in the group of its parameter."""
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
        # Some optimizers (Adagrad) make state or check shapes in their constructor only. So new
        # pieces pass through a new optimizer, and the old one then adopts them and their state.
        is_made = pieces or (self.optimizer is None and self.verdict.steps_nothing)
        fresh = self.optimizer_class(wanted, **self.defaults) if is_made else None
        # The first pieces of this rank.
        if self.optimizer is None:
            self.optimizer = fresh
            return
        for number, options in enumerate(wanted):
            # A group that the user has added since has none here yet.
            if number < len(self.optimizer.param_groups):
                self.optimizer.param_groups[number]["params"].extend(options["params"])
            else:
                self.optimizer.add_param_group(options)
        if fresh is not None:
            self.optimizer.state.update(fresh.state)

    @property
    def portions(self) -> list[list[int]]:
        """Numbers of the buckets that are stepped together: each one alone, while earlier ones are
        gathered, if the optimizer is known to keep no state across parameters; otherwise all."""
        numbers = list(range(len(self.buckets)))
        # Others may take a norm over all their parameters, and would take it over one bucket.
        if self.optimizer_class in ELEMENTWISE:
            return [[number] for number in numbers]
        return [numbers]

    def add_squared_norm(self, total: torch.Tensor) -> None:
        """Add the squared 2-norm of the reduced, undivided gradient of this shard to `total`: (),
        float64."""
        for gradient in map(as_reals, self._own_gradients()):
            # In float64, so that the sum of the squares of all ranks neither overflows nor loses
            # digits.
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            total += norm.square().to(total.device)

    def exact_norm(self) -> list[float]:
        """This rank's part of the same norm over all ranks, in bits that do not depend on the cuts
        (exact_norm.py)."""
        return partial_sum(self._own_gradients())

    def _own_gradients(self) -> Iterator[torch.Tensor]:
        for bucket, pieces in zip(self.buckets, self.pieces, strict=True):
            reduced = bucket.own.reduced
            own = [mine for mine in pieces if mine.range is bucket.own]
            # Without a reducer the gradients are those of the program's own parameters.
            if reduced is not None:
                yield reduced
            else:
                gradients = map(self._gradient_of, own)
                yield from (gradient for gradient in gradients if gradient is not None)

    def apply(
        self,
        portion: Sequence[int],
        groups: Sequence[dict[str, Any]],
        used: Sequence[bool],
        divisor: float,
        coefficient: float,
    ) -> None:
        """Step the pieces whose parameters have a gradient on some rank.

        portion: numbers of the buckets.
        groups: the parameter groups of the user's optimizer, whose options apply; numbers that the
            optimizer keeps in its groups are written there.
        used: per parameter, whether some rank has a gradient.
        divisor: the summed gradient is divided by it.
        coefficient: the mean gradient is multiplied by it.
        """
        for number in portion:
            self.buckets[number].version += 1
            self.buckets[number].runs_ahead()
        self.parameters_have_come = False
        self.may_have_state = True
        if self.optimizer is None:
            return
        pieces = [mine for number in portion for mine in self.pieces[number]]
        kept = [kept for number in portion for kept in self.buckets[number].ranges]
        # On a GPU a whole range is scaled at once. On a CPU the tiles are: they stay in the cache.
        at_once = 1.0 if _is_on_cpu(self.group) else coefficient
        for part in kept:
            part.take_parameters()
            part.take_gradient(divisor, at_once)
        for mine in pieces:
            gradient = self._gradient_of(mine) if used[mine.piece.parameter] else None
            is_scaled = at_once == coefficient and mine.range.gradient is not None
            if coefficient != 1 and gradient is not None and not is_scaled:
                gradient = gradient * coefficient  # A program's own `.grad` stays as it is.
            mine.tensor.grad = gradient
        _call(self.optimizer, "step", groups)
        for mine in pieces:
            # Else the gradient would take its memory until the next step.
            mine.tensor.grad = None
            mine.bring_back()
        for part in kept:
            part.publish_master()

    def switch(self, mode: str, groups: Sequence[dict[str, Any]]) -> None:
        """Call the optimizer's `train()` or `eval()`, which may change the parameters.

        mode: the name of the method. groups: as in `apply`.
        """
        self.num_rewritten += 1
        kept = [kept for bucket in self.buckets for kept in bucket.ranges]
        for part in kept:
            part.take_parameters()
        optimizer = self.optimizer
        if optimizer is None:  # This rank owns no piece, and its groups follow all the same.
            nothing = [{**_options(options), "params": []} for options in groups]
            optimizer = self.optimizer_class(nothing, **self.defaults)
        _call(optimizer, mode, groups)
        for mine in (mine for pieces in self.pieces for mine in pieces):
            mine.bring_back()
        for part in kept:
            part.publish_master()
        for bucket in self.buckets:
            bucket.runs_ahead()
        self.parameters_have_come = False

    def _gradient_of(self, mine: KeptPiece) -> torch.Tensor | None:
        piece, gradient = mine.piece, mine.range.gradient
        if gradient is not None:
            reduced = gradient[piece.shard_start : piece.shard_start + piece.numel]
            return reduced.view(mine.tensor.shape)
        whole = self.parameters[piece.parameter].grad
        if whole is None:
            return None
        start = piece.parameter_start
        flat = whole.reshape(-1)[start : start + piece.numel].to(mine.tensor.dtype)
        return flat.view(mine.tensor.shape)

    def bring_home(self) -> None:
        """Take over what the program has done to parameters since the last step."""
        # All first: a program may have swapped the memory of two of them.
        rebound = [bucket.rebound() for bucket in self.buckets]
        # Now each may be written: nothing is read any more.
        for bucket, spans in zip(self.buckets, rebound, strict=True):
            bucket.bring_home(spans)

    def parameters_of(self, source: int) -> Iterator[tuple[ParameterBucket, torch.Tensor]]:
        """By bucket, the parameters of rank `source`, flat, where this rank has its own. All ranks
        go through it."""
        for bucket in self.buckets:
            flat = bucket.flat[: bucket.plan.content]
            theirs = flat.to(self.group.device, copy=True)
            # Known to have come: what is stopped on its way would become part of the state.
            self.group.broadcast(theirs, source).wait_on_host()
            yield bucket, theirs.to(flat.device)

    def gather(self) -> None:
        """All-gather all parameters. Also on a GPU it returns when they have come. A rank that has
        them all only sends its own."""
        if self.parameters_have_come:
            for bucket in self.buckets:
                bucket.send_own(self.group)
            return
        gathers = self.start_gather(range(len(self.buckets)))
        for gather in gathers:
            gather.wait()
        if gathers:
            gathers[-1].work.wait_on_host()  # It tells for all.
        self.parameters_have_come = True

    def start_gather(self, portion: Sequence[int]) -> list[Gather]:
        """Start the all-gathers of the parameters in these buckets."""
        return [self.buckets[number].start_gather(self.group) for number in portion]

    def start_replicating(self) -> list[Work]:
        """Start to send this rank's reduced gradients to the ranks with replicas of its shard."""
        return [work for bucket in self.buckets if (work := bucket.start_replicating(self.group))]

    # -- state by ranges -------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        return Layout(
            [tuple(parameter.shape) for parameter in self.parameters],
            [bucket.plan for bucket in self.buckets],
            [bucket.own.master.dtype for bucket in self.buckets],
            [bucket.own.has_master for bucket in self.buckets],
        )

    def kept(self, replicas: int | None = None) -> list[Range]:
        """The ranges that this rank keeps: its shard and its replicas; with 1 its shard alone."""
        contents = [bucket.plan.content for bucket in self.buckets]
        return kept_by(self.group.rank, self.group.size, contents, replicas or self.replicas)

    def held(self, without: Container[int] = (), *, takes_parameters: bool = False) -> ShardState:
        """All state that this rank keeps, without a copy: the optimizer steps these tensors.

        without: owners whose shards are left out.
        takes_parameters: what the program has written to parameters since the last step is in the
            masters too, as the next step would have it.
        """
        self.bring_home()
        # What a gather that was stopped has left there, the program has not written.
        if takes_parameters and self.parameters_have_come:
            for part in (part for bucket in self.buckets for part in bucket.ranges):
                part.take_parameters()
        held = ShardState(self.kept())
        for mine in (mine for pieces in self.pieces for mine in pieces):
            if mine.range.owner in without:
                continue
            assert self.optimizer is not None
            state = self.optimizer.state.get(mine.tensor, {})
            elements, whole = divided({**state, MASTER: mine.tensor}, mine.tensor.shape)
            held.put(mine.piece.parameter, mine.where, elements, whole)
        return held

    def apart(self, held: ShardState) -> ShardState:
        """`held` without the memory of the parameters, which it shares where they are stepped
        themselves: their module may be wrapped again, and is written to before that."""
        return held.apart_from({address_of(bucket.flat) for bucket in self.buckets})

    def complete(
        self,
        held: ShardState,
        inventories: Sequence[Inventory],
        group: Group,
        leaving: Sequence[int] = (),
    ) -> int:
        """Add to `held` all that this rank will keep in `group`, for `recut`; returns the bytes
        sent. The parameters are those of shard_state.complete."""
        return complete(held, inventories, self.layout, self.replicas, group, leaving)

    def recut(
        self,
        group: Group,
        reduced_in: Sequence[GradientBucket],
        groups: Sequence[Mapping[str, Any]],
        held: ShardState,
        *,
        keeps_parameters: bool = False,
    ) -> None:
        """Cut the shards again, for this rank of `group`.

        reduced_in, groups: as for `add`.
        held: values and state of at least all that this rank keeps in the new group.
        keeps_parameters: if this rank has ended the last step, its parameters count more: the
            program has written to them since, and on ranks that wait in that step it has not yet.
        """
        keeps = keeps_parameters and self.parameters_have_come
        self.group = group
        self.num_rewritten += 1
        self.may_have_state = True
        self.pieces = []
        for number, (bucket, reduced) in enumerate(zip(self.buckets, reduced_in, strict=True)):
            bucket.cut(group, reduced.shard, self.replicas)
            self.pieces.append(self._pieces_of(number, bucket))
            for mine in self.pieces[-1]:
                # Parameters in half precision have less than their masters: only what differs by
                # more than that is taken from them.
                if mine.range.has_master or not keeps:
                    held.cut(mine.where, MASTER, mine.tensor.data)
            for kept in bucket.ranges:
                if keeps:
                    kept.take_parameters()
                kept.publish_master()
            if not keeps:
                bucket.runs_ahead()
        self.parameters_have_come = keeps
        # The pieces are other tensors now, and an optimizer cannot exchange those that it has.
        self.optimizer = None
        pieces = [mine for of_bucket in self.pieces for mine in of_bucket]
        self._admit(pieces, groups)
        optimizer: torch.optim.Optimizer | None = self.optimizer
        for mine in pieces if optimizer is not None else ():
            # No state: the parameter has not been stepped yet, and gets its state when it is.
            state = held.state_of(mine.piece.parameter, mine.where, mine.tensor)
            if state and optimizer is not None:
                optimizer.state[mine.tensor] = state

    def publish(self, held: ShardState) -> None:
        """Copy the values in `held` to the parameters; other elements stay unchanged."""
        for everything in self.layout.everything():
            bucket = self.buckets[everything.bucket]
            held.cut(everything, MASTER, bucket.flat[: everything.stop])
            bucket.give_out()

    def drop_state(self, numbers: Container[int]) -> None:
        """Drop the state of these parameters: the next step starts without it."""
        self.num_rewritten += 1
        for mine in (mine for pieces in self.pieces for mine in pieces):
            if mine.piece.parameter in numbers and self.optimizer is not None:
                # The class makes it afresh, as it did in the first step.
                self.optimizer.state.pop(mine.tensor, None)
        # Otherwise parameters are left that may have some.
        if all(number in numbers for number in range(len(self.parameters))):
            self.may_have_state = False

    def load(self, states: Iterable[ShardState], groups: Sequence[Mapping[str, Any]]) -> None:
        """Load the optimizer's state from copies of `states`.

        states: one per bucket, each with at least all that this rank keeps. An iterator may make
            them one at a time: the optimizer changes only after the last one.
        groups: the parameter groups of the user's optimizer, whose options apply.
        """
        self.num_rewritten += 1
        self.may_have_state = True
        optimizer = self.optimizer
        # This rank owns no piece, and the loaded options are in the user's groups.
        if optimizer is None:
            return
        loaded: dict[int, dict[str, Any]] = {}
        masters: list[tuple[KeptPiece, torch.Tensor]] = []
        for held, pieces in zip(states, self.pieces, strict=True):
            for mine in pieces:
                state = held.state_of(mine.piece.parameter, mine.where, mine.tensor)
                loaded[id(mine.tensor)] = state
                # In full precision; where there is no copy the parameter itself is loaded with the
                # model.
                if mine.range.has_master:
                    master = held.cut(mine.where, MASTER, mine.tensor.detach().clone())
                    masters.append((mine, master))
        # By the optimizer's own load_state_dict, which casts, and sets what a class derives.
        plain = optimizer.state_dict()["param_groups"]
        for options, ours in zip(plain, groups, strict=True):
            options.update(_options(ours))
        tensors = [tensor for options in optimizer.param_groups for tensor in options["params"]]
        by_number = {n: state for n, tensor in enumerate(tensors) if (state := loaded[id(tensor)])}
        optimizer.load_state_dict({"state": by_number, "param_groups": plain})
        for mine, master in masters:
            mine.tensor.data.copy_(master)

    # -- state of whole parameters ---------------------------------------------------------------

    def gather_state(
        self, to: int, groups: Sequence[Mapping[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """State of all parameters, by their id(), on rank `to`; empty on the others. groups: the
        user's."""
        layout = self.layout
        # Without state a parameter has its float32 copy only.
        has_masters = any(layout.has_masters)
        stateless = {
            id(parameter)
            for options in groups
            if has_masters and not keeps_state(self.optimizer_class, options, self.defaults)
            for parameter in options["params"]
        }
        numbers = {n for n, parameter in enumerate(self.parameters) if id(parameter) in stateless}
        gathered = gather_state(layout, self.held(), self.group, to, numbers)
        numbered = [(self.parameters[number], state) for number, state in gathered.items()]
        return {id(p): {k: in_format_of(p, v) for k, v in s.items()} for p, s in numbered}

    def load_state(
        self, saved: Mapping[int, tuple[str, Mapping[str, Any]]], groups: Sequence[dict[str, Any]]
    ) -> None:
        """Load this rank's part of the state of whole parameters, which fits them. saved: by id()
        of a parameter, its name and its state. groups: the user's, with loaded options."""
        self.load(self._whole(saved), groups)

    def _whole(self, saved: Mapping[int, tuple[str, Mapping[str, Any]]]) -> Iterator[ShardState]:
        for number, bucket in enumerate(self.buckets):
            held = ShardState()
            for parameter, offset, numel in bucket.plan.spans:
                _, state = saved.get(id(self.parameters[parameter]), ("", {}))
                # One without state has had no gradient when it was saved.
                if state:
                    elements, whole = divided(state, self.parameters[parameter].shape)
                    held.put(parameter, Range(number, offset, offset + numel), elements, whole)
            yield held


def _call(optimizer: torch.optim.Optimizer, method: str, groups: Sequence[dict[str, Any]]) -> None:
    """Call a method of the inner optimizer with the options of the user's groups."""
    for options, ours in zip(groups, optimizer.param_groups, strict=True):
        # Schedulers and users change options in the groups of the user's optimizer.
        ours.update(_options(options))
    _without_hooks_of_all(optimizer, method)()
    for options, ours in zip(groups, optimizer.param_groups, strict=True):
        # The optimizer may count in its groups (schedule-free ones do).
        for key, value in ours.items():
            if key != "params" and options.get(key) is not value:
                options[key] = value


def _without_hooks_of_all(optimizer: torch.optim.Optimizer, method: str) -> Callable[[], object]:
    """Hooks on the steps of all optimizers have seen, or will see, the user's optimizer."""
    whole: Any = getattr(type(optimizer), method, None)
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    # As torch marks a step that it has wrapped; what the class itself has put there stays.
    if getattr(whole, "hooked", False) and method not in vars(optimizer) and not any(own):
        return partial(whole.__wrapped__, optimizer)
    return getattr(optimizer, method)  # type: ignore[no-any-return]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a user's group without its parameters and names, which pieces do not have."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _is_on_cpu(group: Group) -> bool:
    return group.device.type == "cpu"
