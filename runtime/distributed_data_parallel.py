"""`DistributedDataParallel`: one model on every rank, one gradient for all."""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from collectives import CollectiveMismatch, Group
from collectives.debug import is_informing

from .agreement import Agreement
from .boundary import boundary
from .context import current_group
from .join import Join, Joinable, JoinHook
from .kept import kept
from .reducer import Mode, Reducer
from .replication import broadcast_tensors
from .step_statistics import StepClock, StepStatistics, UnusedParameters, tell_choice

_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to its model


def owner_of(parameters: Sequence[torch.Tensor]) -> DistributedDataParallel | None:
    """The model that reduces exactly these parameters, if there is one."""
    reference = _owners.get(parameters[0])
    owner: DistributedDataParallel | None = reference() if reference else None
    if owner and {id(p) for p in owner.reducer.parameters} == {id(p) for p in parameters}:
        return owner
    return None


class DistributedDataParallel(torch.nn.Module, Joinable):
    """A module whose gradients are the mean over all ranks, as in torch.nn.parallel.

    module: the same on all ranks; it starts from rank 0's parameters and buffers.
    group: where gradients are reduced; the session's group by default.
    bucket_cap_mb: MiB of gradients that travel together.
    broadcast_buffers: after each step that is synchronised, all ranks take the buffers of one:
    rank 0, or inside Join the largest rank that took the step.

    find_unused_parameters, gradient_as_bucket_view, static_graph: accepted from scripts written
    for torch, and without effect. Parameters that took no part in a rank's forward pass need no
    flag (they count as zero where other ranks have a gradient, and keep none where nobody has),
    `.grad` is always a view of a bucket, and nothing is assumed of the graph.

    Raises ValueError for a module without trainable parameters, for parameters on several
    devices, or on another one than the group's; CollectiveMismatch, on all ranks, if the models
    differ, naming the first parameter that does.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: Group | None = None,
        *,
        bucket_cap_mb: float = 25.0,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter "
                "that requires a gradient."
            )
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}")
        self.module = module
        self.group = group if group is not None else current_group()
        self.broadcast_buffers = broadcast_buffers
        _check_devices(named, self.group)
        _check_same_model(list(module.named_parameters()), self.group)
        state = [*module.parameters(), *module.buffers()]
        broadcast_tensors([tensor.detach() for tensor in state], 0, self.group)
        self.reducer = Reducer(
            [parameter for _, parameter in named],
            self.group,
            int(bucket_cap_mb * (1 << 20)),
            on_agreement=self._on_agreement,
            has_next=self._has_next,
        )
        if is_informing():
            names = [name for name, _ in named]
            self.reducer.clock = StepClock()
            self.reducer.unused = UnusedParameters(self.group.rank, names)
            tell_choice(self.reducer, names)
        for _, parameter in named:
            _owners[parameter] = weakref.ref(self)
        kept().wrap(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        boundary().begin_forward()
        Join.notify_join_context(self)
        clock = self.reducer.clock
        if clock is None:
            return self.module(*inputs, **kwargs)
        began_at = time.monotonic()
        output = self.module(*inputs, **kwargs)
        clock.forward_ran(began_at)
        return output

    def statistics(self) -> StepStatistics:
        """Where the time of the last hundred steps went, on average, on this rank.

        Raises RuntimeError if the model was made below debug level INFO: then nothing is timed.
        """
        if self.reducer.clock is None:
            raise RuntimeError(
                "steps are timed at debug level INFO and above; set CHORUSLINE_DEBUG=INFO, or call "
                "set_debug_level(DebugLevel.INFO) before the model is wrapped"
            )
        return self.reducer.clock.average(self.reducer.buckets)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside sends the sum."""
        before = self.reducer.is_syncing
        self.reducer.is_syncing = False
        try:
            yield
        finally:
            self.reducer.is_syncing = before

    def weigh(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """`loss * weight`; the sum over all ranks is then divided by the sum of all weights.

        For a loss that is a mean over what differs between ranks: with the number of samples or
        tokens as weight the gradient is the mean over all samples of all ranks. Every rank that
        takes the step calls it, for every loss that it runs backward on.
        """
        if not weight >= 0:
            raise ValueError(f"weight must be at least 0, got {weight}")
        self.reducer.weight = (self.reducer.weight or 0.0) + weight
        return loss * weight

    def move_to(self, group: Group) -> None:
        """Go on in a group of the same ranks, at the beginning of a step."""
        self.group = group
        self.reducer.move_to(group)

    def sync_buffers(self, live: Sequence[int]) -> None:
        """Take the buffers of one of the ranks that took this step."""
        buffers = list(self.module.buffers())
        if self.broadcast_buffers and buffers and live:
            broadcast_tensors(buffers, max(live) if self._join else 0, self.group)

    # -- Join ----------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        return self.group.device

    @property
    def join_group(self) -> Group:
        return self.group

    def _carries_agreement(self) -> bool:
        return True

    def _ends_step(self) -> bool:
        return self.reducer.mode is Mode.ALL_REDUCE

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        if self.reducer.mode is Mode.REDUCE_SCATTER and not any(
            getattr(other, "reducer", None) is self.reducer
            for other in joinables
            if other is not self
        ):
            raise ValueError(
                "the ZeroRedundancyOptimizer of this model finishes its steps, so it has to be "
                "joined with it: Join([model, optimizer])"
            )

    def _has_next(self) -> bool:
        return self._join.ledger.has_next if self._join else True

    def _on_agreement(self, agreement: Agreement) -> float:
        """A step was reduced in full; what to divide it by."""
        if self._join:
            self._join.record(self, agreement)
        self.sync_buffers(agreement.live)
        if self._join:
            return self._join.ledger.divisor(agreement)
        return agreement.weight or self.group.size


class _Hook(JoinHook):
    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def main_hook(self) -> None:
        # A sharded step is shadowed by its optimizer, from the first phase to the last.
        model = self._model
        if model.reducer.mode is Mode.ALL_REDUCE:
            assert model._join is not None
            model.reducer.shadow()
            # With gradients that were left over from no_sync, this rank does take the step.
            model._join.ledger.live = model.reducer.is_live

    def post_hook(self, is_last_joiner: bool) -> None:
        """Ranks that joined earlier did not step: they take the state of a last joiner."""
        model = self._model
        assert model._join is not None
        ledger = model._join.ledger
        state: list[torch.Tensor] = []
        # With sharded state every rank took every step, of its shard, and gathered the rest.
        if model.reducer.mode is Mode.ALL_REDUCE and ledger.somebody_missed_a_step:
            state += [*model.module.parameters(), *model.module.buffers()]
        elif not model.broadcast_buffers:
            state += model.module.buffers()
        if state:
            root = max(ledger.last_live)
            broadcast_tensors([tensor.detach() for tensor in state], root, model.group)


def _check_devices(named: list[tuple[str, torch.nn.Parameter]], group: Group) -> None:
    first_name, first = named[0]
    for name, parameter in named:
        if parameter.device != first.device:
            raise ValueError(
                f"parameters are on several devices: {first_name} on {first.device}, {name} on "
                f"{parameter.device}. A rank owns one device; move the module with "
                f".to({str(group.device)!r})"
            )
    if first.device != group.device:
        raise ValueError(
            f"the module is on {first.device}, but this rank's group reduces on {group.device}; "
            f"move the module with .to({str(group.device)!r}) (in a session: ctx.device)"
        )


def _check_same_model(named: list[tuple[str, torch.nn.Parameter]], group: Group) -> None:
    """Compare names, shapes, dtypes and trainability by number before anything is overwritten."""
    told = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in named]
    digests = [
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
        for text in told
    ]
    counts = _gathered([len(digests)], group)
    if len({count for (count,) in counts}) > 1:
        by_rank = {rank: count for rank, (count,) in enumerate(counts)}
        differing = [rank for rank, count in by_rank.items() if count != by_rank[0]]
        raise CollectiveMismatch(
            "DistributedDataParallel",
            group.generation,
            differing,
            f"the models have different numbers of parameters, by rank: {by_rank}",
        )
    everybody = _gathered(digests, group)
    for number, text in enumerate(told):
        differing = [
            r for r, theirs in enumerate(everybody) if theirs[number] != everybody[0][number]
        ]
        if differing:
            raise CollectiveMismatch(
                "DistributedDataParallel",
                group.generation,
                differing,
                f"parameter {number} differs from rank 0's; on rank {group.rank} it is {text}",
            )


def _gathered(values: list[int], group: Group) -> list[list[int]]:
    """The values of all ranks, by rank; each gives the same number of them."""
    mine = torch.tensor(values, dtype=torch.int64, device=group.device)
    everybody = mine.new_empty(group.size * len(values))
    group.all_gather(everybody, mine).wait()
    rows: list[list[int]] = everybody.view(group.size, -1).tolist()
    return rows
