"""The objects that the train function of a rank has made, and their facts for a report.

Sharded optimizers and models are numbered in the order in which they were made, which is the same
on all ranks. An object that the user has dropped leaves a gap.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from chorusline.actors.messages.messages import DROPPED, Assignment, OptimizerProgress
from chorusline.collectives.contract.operation import State
from chorusline.collectives.diagnosis.flight_recorder import RecordedCollective
from chorusline.collectives.group import Group

from ..checkpoint.checkpoints import Checkpoints
from ..data.dealer import Dealer
from ..data_parallel.distributed_data_parallel import ModelEngine
from ..join import active
from ..process.registry import Registry
from ..process.sharded_tensors import has_shards, sharded_parameters
from ..process.step_boundary import boundary
from ..zero.zero_redundancy_optimizer import OptimizerEngine
from .fully_sharded import why_not_in_replicas
from .module_flags import NotedFlags
from .plain_optimizer_steps import OnTaken, PlainSteps
from .rank_state import Facts


class RunningCall(Protocol):
    """The call of the train function (function_call.py), as far as recovery uses it."""

    dealer: Dealer
    registry: Registry
    checkpoints: Checkpoints | None  # None: the session keeps none
    group: Group
    rank: int

    @property
    def step(self) -> int: ...

    def enter(self, assignment: Assignment, group: Group) -> None: ...

    def count_step(self) -> None: ...

    def data_state(self, *, committed: bool = False) -> dict[str, Any]: ...

    def take_data(self, data: dict[str, Any]) -> None: ...


class LiveObjects:
    """The objects of one rank in one run, made in the latest call of the function.

    plain: the steps of optimizers that are not sharded.
    on_plain_step, vote: as in PlainSteps.
    replica_size: ranks that have a model of fully_shard between them (fully_sharded.py).
    """

    def __init__(
        self, on_plain_step: OnTaken, vote: Callable[[], None], replica_size: int = 1
    ) -> None:
        self.plain = PlainSteps(on_plain_step, vote)
        self.replica_size = replica_size
        # Nobody reads it: it keeps the optimizer alive, which `made_optimizers` does not.
        self.stepped_last: OptimizerEngine | None = None
        """The optimizer whose step ended last on this rank; None before the first. Other ranks may
        still be in that step, and need this rank's state, even after the function has returned.
        When another step has ended here, they have left it."""
        self.flags = NotedFlags()
        self.makes_model = False
        """Whether the function has begun to make a model."""
        self._call: RunningCall | None = None  # None: before the first call
        self._began_at = 0.0
        self.made_optimizers: list[weakref.ref[OptimizerEngine]] = []
        self.made_models: list[weakref.ref[ModelEngine]] = []

    def begin(self, call: RunningCall) -> None:
        """The function is called, and makes all its objects again."""
        for model in self.models().values():
            model.let_go()
        self.plain.begin()
        self._call, self._began_at = call, time.time()
        self.made_optimizers, self.made_models = [], []
        self.stepped_last, self.makes_model = None, False
        self.flags = NotedFlags()

    @property
    def call(self) -> RunningCall:
        assert self._call is not None
        return self._call

    def optimizers(self) -> dict[int, OptimizerEngine]:
        """The optimizers that still exist, by number."""
        return {n: one for n, made in enumerate(self.made_optimizers) if (one := made())}

    def models(self) -> dict[int, ModelEngine]:
        """The models that still exist, by number."""
        return {n: one for n, made in enumerate(self.made_models) if (one := made())}

    @property
    def are_being_made(self) -> bool:
        """Whether the function was left while it made and registered its first objects: it has sent
        no gradients, so no rank has taken a step, and all may begin afresh."""
        has_sent = any(model.reducer.num_passes for model in self.models().values())
        return self.makes_model and not has_sent and bool(self._missing())

    def has_taken_part(self) -> bool:
        """Whether any collective of the function has completed. If not, no other rank has received
        anything from this rank."""
        return any(one.state is State.DONE for one in self._collectives())

    def has_met_failure(self) -> bool:
        """Whether a collective of the function has failed, in a generation that has ended."""
        return any(one.state is not State.DONE for one in self._collectives())

    def _collectives(self) -> Iterator[RecordedCollective]:
        """Those of the function that the flight recorders still know."""
        for recording in self.call.group.flight_recorders():
            for one in recording.collectives:
                if one.issued_at >= self._began_at:
                    yield one

    def facts(self) -> Facts:
        """The current facts of the objects. Read them after the end of the generation, when none of
        its operations can complete any more."""
        if self._call is None:  # A newcomer, before the first call.
            return Facts()
        optimizers, checkpoints = self.optimizers(), self._call.checkpoints
        return Facts(
            # Dropped optimizers keep their place.
            (
                *(one.progress if (one := made()) else DROPPED for made in self.made_optimizers),
                *self.plain.votes,
            ),
            self._missing(),
            self.plain.place[0],
            self.plain.has_begun,
            min((one.shard.replicas - 1 for one in optimizers.values()), default=None),
            self._call.group.size // self.replica_size - 1 if self.plain.is_watching else 0,
            active.follows_groups(),
            boundary().is_after_loop,
            bool(self._call.dealer.unused()),
            checkpoints is not None and checkpoints.config is not None,
        )

    def _missing(self) -> str:
        """The reason why the function cannot run again: an optimizer or model that is missing or
        not registered, or a plain optimizer's. Empty if it can."""
        registered = {id(entry.object) for entry in self.call.registry}
        optimizers, models = self.optimizers().values(), self.models().values()
        sharded = [one for one in self.call.registry if has_shards(one.object)]
        # A model of fully_shard has no engine here: its replicas and its optimizer are asked.
        for one in sharded:
            if why := why_not_in_replicas(
                one.object, one.name, self.replica_size, self.call.group
            ) or self.plain.why_not_stepped(one.name, sharded_parameters(one.object)):
                return why
        if sharded and (optimizers or models):
            return (
                "it has a DistributedDataParallel or a ZeroRedundancyOptimizer beside a model of "
                "fully_shard, whose steps count by themselves; give each a run of its own"
            )
        # What a plain optimizer steps is checked last: its model has to be known first.
        if not optimizers and not models and not sharded:
            return (
                "it has not registered a DistributedDataParallel of the session's group with its "
                "optimizer (ctx.register)"
            )
        if any(id(one.optimizer) not in registered for one in optimizers):
            return "it has not registered its model and its ZeroRedundancyOptimizer (ctx.register)"
        for why in (*(one.why_not_again for one in optimizers), self.plain.why_regrouped()):
            if why:
                return why
        return self.plain.why_not_again(self.call.registry, models)

    def catch_up(self, progress: Sequence[OptimizerProgress]) -> None:
        """Take the steps whose ballots other ranks have seen. progress: of the optimizers, as
        decided by the driver."""
        for number, optimizer in self.optimizers().items():
            optimizer.catch_up(progress[number])
        if self.plain.votes and progress:
            self.plain.catch_up(progress[-1], self.call.dealer.inside())

    def launch_again(self, passes: Sequence[Mapping[int, int]]) -> None:
        """Reduce again the kept buckets of steps that do not count yet.

        They are launched in the order of the first time, which is also the order of ranks that have
        yet to launch them.
        passes: by rank, and by number of a model, how often its gradients were sent.

        A rank that is a pass late holds gradients that no rank will use: a loss of one
        model went through another one, whose own next pass the others have sent already.
        """
        models = self.models()
        kept = [
            (bucket.launched_at, number, bucket)
            for number, model in models.items()
            if all(number in one for one in passes)
            and model.reducer.num_passes == max(one[number] for one in passes)
            for bucket in model.reducer.kept()
        ]
        for _, number, bucket in sorted(kept, key=lambda one: one[0]):
            models[number].reducer.launch_again(bucket)
