"""One call of the train function on one rank: what the runtime knows of it, behind its Context.

The Context is what a user types at. Here is what recovery, checkpoints, models and the data of a
rank ask of the function that runs: its place among the ranks, what it has registered, how far it is
in its data, and how many of its reports were sent. A function that runs again from the top has a
new Context and a new call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ray import cloudpickle

from actors.journal import Journal
from actors.messages import Assignment, Report
from collectives.contract.errors import GroupAborted, fresh_copy
from collectives.group import Group
from collectives.objects.blocking import broadcast_object

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.saving import Saving
from ..data.cursor import Cursor
from ..data.dealer import Dealer
from ..join.join import Joinable, active_join
from ..process.between_runs import between_runs
from ..process.registry import Registry, Stateful
from ..process.step_boundary import boundary
from ..recovery.recovery import Recovery

T = TypeVar("T")


class FunctionCall:
    """rank, world_size, local_rank, local_world_size, node_rank, generation, group: of the
    generation that the rank is in; they change when the run goes on without a lost worker."""

    def __init__(
        self,
        assignment: Assignment,
        group: Group,
        journal: Journal,
        recovery: Recovery | None,
        before: FunctionCall | None = None,
        *,
        run_id: str = "",
    ) -> None:
        """recovery: where the run goes on after a loss.
        before: the function's last call in this run, if it runs again.
        run_id: distinguishes the run from all others."""
        self.device = group.device
        self.dealer = Dealer(
            assignment.rank, assignment.world_size, (run_id, assignment.generation)
        )
        self.recovery = recovery
        self.runs_again = before is not None
        self.registry = Registry()
        self.checkpoints: Checkpoints | None = None  # The program sets it before the call.
        self.cursor = Cursor()
        self._journal = journal
        self._num_reports: int = before._num_reports if before is not None else 0
        self._boundaries = 0
        self._boundaries_of_step: int | None = None
        self.enter(assignment, group)
        if recovery is not None:
            recovery.attach(self)

    def enter(self, assignment: Assignment, group: Group) -> None:
        """Be a rank of another generation. What was made of the former group has ended with it."""
        self.rank = assignment.rank
        self.world_size = assignment.world_size
        self.local_rank = assignment.local_rank
        self.local_world_size = assignment.local_world_size
        self.node_rank = assignment.node_rank
        self.generation = assignment.generation
        self.group = group
        between_runs().follow(group)
        if (place := boundary().place) is not None:  # Inside a run, so after a loss.
            place.is_dealt_anew = True
        if self.checkpoints is not None:
            self.checkpoints.change_group(group)

    def finish(self) -> None:
        """The function has returned: wait for the other ranks, if they may still need this one."""
        if self.recovery is not None:
            self.recovery.finish()

    def broadcast(self, value: T, root: int = 0) -> T:
        """The value of rank `root`, on every rank; anything that pickles."""
        received: T = broadcast_object(self.group, value, root, cloudpickle.dumps)
        return received

    # -- What survives -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps that were applied: of the registered ZeroRedundancyOptimizer, or else the batches
        of `ctx.shard`."""
        counts = [
            entry.object.num_steps
            for entry in self.registry
            if isinstance(entry.object, Joinable) and hasattr(entry.object, "num_steps")
        ]
        return max(counts, default=self._boundaries)

    @property
    def resumed_from(self) -> str | None:
        """The path of the checkpoint that this run goes on from, None if it starts afresh."""
        reader = self.checkpoints.reader if self.checkpoints else None
        return reader.path if reader else None

    def register(self, name: str, stateful: Stateful, *, per_rank: bool, required: bool) -> None:
        """As `Context.register`."""
        entry = self.registry.add(name, stateful, per_rank=per_rank)
        if self.recovery is not None:
            self.recovery.watch_registered(entry)
            if self.recovery.restore(entry, self.group):
                return
        if self.checkpoints is not None:
            self.checkpoints.restore(entry, required=required)

    def has_checkpoint(self, group: Group) -> bool:
        """Whether there is a checkpoint to go on from, among those of the session's
        CheckpointConfig. All ranks of `group` ask."""
        return self.checkpoints is not None and self.checkpoints.has_any(group)

    def save(self, path: str | Path | None) -> Saving:
        """As `Context.save`."""
        if self.checkpoints is None:
            raise RuntimeError("this Context was made outside a session, which keeps checkpoints")
        join = active_join()
        if join is not None and 0 < len(join.last_step_live) < self.world_size:
            joined = [r for r in range(self.world_size) if r not in join.last_step_live]
            raise RuntimeError(
                f"ctx.save() inside Join, and ranks {joined} have run out of data and are not in "
                "the loop's body any more; save behind the Join, or let "
                "CheckpointConfig(every_n_steps=...) do it, which reaches them too"
            )
        return self.checkpoints.save(path, self.step, range(self.world_size))

    # -- Its place in the data -----------------------------------------------------------------

    @property
    def counts_samples(self) -> bool:
        """Whether the samples of a lost rank can be dealt to the others."""
        return self.recovery is not None and self.recovery.counts_samples

    def resume_data(self, told: Sequence[dict[str, Any]]) -> None:
        """Go on in the data where a checkpoint was. told: of its ranks, as `told_data` gave it."""
        self._boundaries = max(part["boundaries"] for part in told)
        self.cursor.resume([part["data"] for part in told])

    def told_data(self, *, committed: bool = False) -> dict[str, Any]:
        """Where this rank is in its data, as plain data for a checkpoint. committed: up to the last
        step that counts, not in the middle of one."""
        has_recovered = self.recovery is not None and self.recovery.num_recoveries > 0
        of_step = self._boundaries_of_step if committed else None
        return {
            "boundaries": self._boundaries if of_step is None else of_step,
            "data": self.cursor.told(by_id=committed or has_recovered, committed=committed),
        }

    def count_step(self) -> None:
        """A plain optimizer has stepped with the current batch, which is over with that."""
        self._boundaries_of_step = self._boundaries + 1

    def at_boundary(self) -> None:
        """Between two batches, when the step of the one before is over; on a rank that has joined,
        behind each step that it shadowed."""
        self._boundaries += 1
        if self.recovery is not None:
            self.recovery.pass_boundary()
        if self.checkpoints is not None:
            self.checkpoints.save_if_due(self.step)

    def without_reader(self, error: Exception) -> Exception:
        """What to raise where the reader of a Stream is gone: what has all ranks run again from the
        top, if they can."""
        if self.recovery is None or not self.recovery.can_begin_again:
            return error
        ends = GroupAborted(self.group.generation, [], str(error))
        self.group.abort(ends)
        return fresh_copy(ends)

    # -- Reports -------------------------------------------------------------------------------

    def report(self, values: Mapping[str, float | int | str]) -> None:
        """Tell the session the values of one step."""
        self._append(values, boundary().steps.taken)
        self._num_reports += 1

    def say(self, values: Mapping[str, float | int | str]) -> None:
        """Send something with the reports, in their order, that does not count as one of them."""
        self._append(values)

    def _append(self, values: Mapping[str, float | int | str], *taken: int) -> None:
        report = Report(self.rank, self._num_reports, time.time(), dict(values), *taken)
        self._journal.append(report)
