"""One call of the train function on one rank, as the runtime sees it under the function's Context.

Users see only the Context. Recovery, checkpoints, models and data use the FunctionCall: the rank's
place among the ranks, its registered objects, its place in the data, and the number of reports that
were sent. A function that runs again from the top gets a new Context and a new FunctionCall.
"""

from __future__ import annotations

import contextlib
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from chorusline.actors.messages.messages import Assignment, Report
from chorusline.actors.parcels.pickling import pickled
from chorusline.actors.reporting.report_buffer import ReportBuffer
from chorusline.collectives.contract.call_site import users_level
from chorusline.collectives.contract.errors import GroupAborted, fresh_copy, name_ranks
from chorusline.collectives.diagnosis.debug import logger
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import broadcast_object

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.saving import Saving
from ..data.cursor import Cursor, Used, check_parts, in_epoch, is_count, place_in_words
from ..data.dealer import Dealer
from ..data.fetching.fetchers import Fetchers
from ..data.streaming import Stream
from ..join.active import active_join
from ..join.engine import Joinable
from ..process.between_runs import LoopPlace, between_runs
from ..process.registry import Registry, Stateful
from ..process.step_boundary import boundary
from ..recovery.plain_optimizer_steps import is_plain
from ..recovery.recovery import Recovery

T = TypeVar("T")


class FunctionCall:
    """One call of the train function. rank, world_size, local_rank, local_world_size, node_rank,
    generation and group are those of the current generation: they change when the run continues
    without a lost worker."""

    def __init__(
        self,
        assignment: Assignment,
        group: Group,
        report_buffer: ReportBuffer,
        recovery: Recovery | None,
        before: FunctionCall | None = None,
        *,
        run_id: str = "",
    ) -> None:
        """recovery: None if the run ends with the first loss.
        before: the function's last call in this run, if it runs again from the top.
        run_id: distinguishes the run from all others."""
        self.origin: str = before.origin if before is not None else run_id
        """The id of the run; of the first one, in a chain of runs that resume from checkpoints."""
        self.steps_before: int = before.steps_before if before is not None else 0
        """Steps that earlier runs of that chain have taken. Less than 0 if this run has gone back
        to a checkpoint of its own."""
        self.device = group.device
        self.dealer = Dealer(
            assignment.rank, assignment.world_size, (run_id, assignment.generation)
        )
        self.recovery = recovery
        self.registry = Registry()
        self.checkpoints: Checkpoints | None = None  # None: until the program sets it.
        self.last_step: object = None  # Of a plain script, which sets it (last_step.py).
        self.cursor = Cursor()
        self.fetchers = Fetchers()
        self.dealt_as: set[tuple[int, int]] = set()  # By samplers of torch (strategy.py).
        self.is_resumed = False
        """Whether the place in the data is that of a checkpoint, or of the function's last call."""
        self.named_loop: str | None = None
        """The loop over `ctx.epochs(..., resume=name)` that is inside an epoch; None: none is."""
        self._dealt_without_epoch: object = None
        self._report_buffer = report_buffer
        self._num_reports: int = before._num_reports if before is not None else 0
        self._step_reported = 0  # The global_step of the last report.
        self._optimizers_before = between_runs().num_optimizers
        self._boundaries = 0
        self._boundaries_of_step: int | None = None  # None: no step yet
        self._notes_steps = False  # Whether a plain optimizer is registered.
        self._has_stepped = False  # Since the last boundary, one of them.
        self.taken_before = 0
        """The steps that were taken when this call began."""
        self._stepped_at = 0
        """The number of boundaries at the last one that came after a step of them."""
        self._stepped_before = 0
        """The same, of the one before that."""
        self.enter(assignment, group)
        if recovery is not None:
            recovery.attach(self)

    def enter(self, assignment: Assignment, group: Group) -> None:
        """Become a rank of another generation. Groups made from the former group have ended."""
        self.rank = assignment.rank
        self.world_size = assignment.world_size
        self.local_rank = assignment.local_rank
        self.local_world_size = assignment.local_world_size
        self.node_rank = assignment.node_rank
        self.generation = assignment.generation
        self.group = group
        between_runs().follow(group)
        boundary().change_ranks()
        if self.checkpoints is not None:
            self.checkpoints.change_group(group)

    def finish(self) -> None:
        """The function has returned: wait for the other ranks, if they may still need this one."""
        self.keep_place()  # A rank that is lost from now on takes its samples along.
        if self.recovery is not None:
            self.recovery.finish()

    def epoch_of(self, dataset: object, *, is_shuffled: bool) -> int:
        """The epoch of a shard that is made without one. dataset: as the user gave it."""
        # Inside `for epoch in ctx.epochs(n)` the loop says which one it is.
        if self.cursor.epoch_under_way is not None:
            return self.cursor.epoch_under_way
        if not (is_shuffled and torch.is_grad_enabled()):
            return 0  # It is evaluated only.
        if isinstance(dataset, Stream) and not dataset.has_epochs:
            return 0  # The rows come in their order in every epoch.
        # The second time only: a loop that reads its data once needs no epoch.
        if self.rank == 0 and self._dealt_without_epoch is dataset:
            if isinstance(dataset, Stream):
                what = "reads the same Stream again without epoch=, so it calls set_epoch(0) again"
                beside = ""
            else:
                what = "gives the same dataset again without epoch=, so in the same order"
                beside = "; for a dataset that is only evaluated, shuffle=False"
            warnings.warn(
                f"ctx.shard {what}. Write `for epoch in ctx.epochs(n):`, or epoch=epoch{beside}",
                stacklevel=users_level(),
            )
        self._dealt_without_epoch = dataset
        return 0

    def check_all_take_part(self, call: str) -> None:
        """Raises RuntimeError if some rank is known to have run out of data inside a Join: it does
        not come to this collective. call: as the user wrote it."""
        join = active_join()
        absent = join.absent_ranks if join is not None else []
        if absent:
            raise RuntimeError(
                f"{call} inside Join, but {name_ranks(absent, 'has', 'have')} run out of data, and "
                "ranks without data do not run the loop's body. Call it after the Join; or make a "
                "group for the collectives of the body, beside = "
                "ctx.group.new_group(range(ctx.world_size)), let the Join follow it, Join([...], "
                "groups=[beside]), and write beside.all_reduce(tensor).wait()"
            )

    def broadcast(self, value: T, root: int = 0) -> T:
        """The value of rank `root`, on every rank; anything that pickles."""
        received: T = broadcast_object(self.group, value, root, pickled)
        return received

    # -- What survives -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """As `Context.step`."""
        return max(self._counts(), default=self._boundaries)

    def _counts(self) -> list[int]:
        """The numbers of steps of the registered optimizers that count them."""
        return [
            entry.object.num_steps
            for entry in self.registry
            if isinstance(entry.object, Joinable) and hasattr(entry.object, "num_steps")
        ]

    @property
    def resumed_from(self) -> str | None:
        """As `Context.resumed_from`."""
        reader = self.checkpoints.reader if self.checkpoints else None
        return reader.path if reader else None

    def register(self, name: str, stateful: Stateful, *, per_rank: bool, required: bool) -> None:
        """As `Context.register`."""
        entry = self.registry.add(name, stateful, per_rank=per_rank)
        self._warn_of_late(name)
        # Those of one rank may step when the others' do not.
        if is_plain(stateful) and not per_rank and not self._notes_steps:
            self._note_steps()
        is_loaded = False
        # First what this run has kept, then what is in a checkpoint.
        if self.recovery is not None:
            self.recovery.watch_registered(entry)
            # A later state than any checkpoint's.
            with self.group.unkept():
                is_loaded = self.recovery.restore(entry, self.group)
        if not is_loaded and self.checkpoints is not None:
            with self.group.unkept():
                is_loaded = self.checkpoints.restore(entry, required=required)
        if is_loaded:
            self.registry.note_loaded(entry, (boundary().status.taken, self._boundaries))

    def _warn_of_late(self, name: str) -> None:
        # What is kept is dropped after the first step: it takes as much memory as the objects do.
        has_stepped = boundary().status.taken > self.taken_before
        if has_stepped and self.recovery is not None and self.rank == 0:
            warnings.warn(
                f"{name!r} is registered after a step: where a worker is lost and the functions "
                "run again, it begins with a new state. Call ctx.register before the first step",
                stacklevel=users_level(),
            )

    def _note_steps(self) -> None:
        """Note from now on that a registered plain optimizer has stepped."""
        self._notes_steps = True
        mine = weakref.ref(self)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            call = mine()
            # By a parameter: an optimizer inside the registered one may step, as that of SAM does.
            if call is not None and any(
                is_plain(entry.object) and _first_of(entry.object) is _first_of(optimizer)
                for entry in call.registry
                if not entry.per_rank
            ):
                call._has_stepped = True

        # An optimizer may live on in a later run, with another call.
        weakref.finalize(self, register_optimizer_step_post_hook(after).remove)

    def save(self, path: str | Path | None) -> Saving:
        """As `Context.save`."""
        if self.recovery is not None and self.recovery.arrivals.is_dry_run:
            self.recovery.arrivals.refuse("it calls ctx.save() before its first step")
        if self.checkpoints is None:
            raise RuntimeError("this Context was made outside a session, so it has no checkpoints")
        join = active_join()
        if join is not None and (joined := join.absent_ranks):
            raise RuntimeError(
                f"ctx.save() inside Join, but {name_ranks(joined, 'has', 'have')} run out of data, "
                "and ranks without data no longer run the loop's body; call ctx.save() after the "
                "Join, or set CheckpointConfig(every_n_steps=...), which saves on those ranks too"
            )
        return self.checkpoints.save(path, self.step, range(self.world_size))

    # -- Its place in the data -----------------------------------------------------------------

    @property
    def counts_samples(self) -> bool:
        """Whether the samples of a lost rank can be dealt to the others."""
        return self.recovery is not None and self.recovery.counts_samples

    def epochs(self, num_epochs: int, ended: Callable[[int], None] | None = None) -> Iterator[int]:
        """The numbers of the epochs of one loop that are not over yet. ended: called with each of
        them when the loop's body has ended."""
        for epoch in self.cursor.epochs(num_epochs):
            place = self.cursor.place
            if self.recovery is not None:
                self.recovery.from_the_top.set_flags()
            with self.recovery.arrivals.in_body() if self.recovery else contextlib.nullcontext():
                yield epoch
            # Another loop may have run inside this one: then the checkpoint has the place of that.
            if self.checkpoints is not None and self.cursor.place == place:
                self.checkpoints.note_epoch_end(self.step)
            if ended is not None:
                ended(epoch)

    def resume_from(self, checkpoints: Checkpoints, taken: int = 0) -> None:
        """Resume in the data from the checkpoint that was chosen, and say so on one rank. taken:
        optimizer steps of this run so far."""
        reader, is_end = checkpoints.reader, checkpoints.resumes_at_epoch_end
        assert reader is not None
        parts = reader.manifest.progress
        self.resume_data(parts, epoch_is_over=is_end)
        self.steps_before = reader.manifest.step - taken
        if self.rank == 0:
            place = place_in_words([part["data"] for part in parts], epoch_is_over=is_end)
            logger.warning(
                "the run resumes from %s, of step %d%s (CheckpointConfig(resume='never'), or "
                "chorusline run --fresh, starts afresh)",
                reader.path,
                reader.manifest.step,
                f", {place}" if place else "",
            )

    def resume_data(self, parts: Sequence[dict[str, Any]], *, epoch_is_over: bool = False) -> None:
        """Resume in the data. parts: the results of `data_state`, by rank of the earlier run.
        epoch_is_over: with the epoch after theirs."""
        between_runs().places.clear()  # The state is not that of the last run, nor is the place.
        self.is_resumed = True
        self._boundaries = self._stepped_at = max(part["boundaries"] for part in parts)
        self._stepped_before = max(part.get("stepped_at", 0) for part in parts)
        self.origin = parts[0]["origin"]
        self.steps_before = parts[0]["steps_before"]
        self.cursor.resume([part["data"] for part in parts], epoch_is_over=epoch_is_over)

    @staticmethod
    def check_progress(parts: Sequence[Any]) -> None:
        """Raise ValueError unless `resume_from` takes `parts`, of a checkpoint that anybody may
        have written."""
        for part in parts:
            if (
                not isinstance(part, dict)
                or not is_count(part.get("boundaries"))
                or not is_count(part.get("stepped_at", 0))
                or not is_count(part.get("steps_before"), least=-(1 << 63))
                # Trackers name files by it.
                or not isinstance(part.get("origin"), str)
                or not re.fullmatch(r"[0-9A-Za-z_-]{0,64}", part["origin"])
            ):
                raise ValueError("the place of a rank in the run has another form")
        if not parts:
            raise ValueError("it has no rank's place")
        check_parts([part.get("data") for part in parts])

    def data_state(self, *, committed: bool = False) -> dict[str, Any]:
        """This rank's place in the data, as plain data for a checkpoint. committed: its place after
        the last step that counts, and where it was after the step before that."""
        of_step = self._boundaries_of_step if committed else None
        boundaries = self._boundaries if of_step is None else of_step
        is_at_step = committed and self._stepped_at == boundaries
        used = Used.COMMITTED if committed else Used.GIVEN
        return {
            "boundaries": boundaries,
            "data": self.cursor.state(used, by_id=committed or self._has_recovered),
            "origin": self.origin,
            "reports": self._num_reports,
            "steps_before": self.steps_before,
            "stepped_at": self._stepped_before if is_at_step else self._stepped_at,
        }

    def take_data(self, data: dict[str, Any]) -> None:
        """This rank comes to others between two steps. data: the `data_state` of one of them; its
        place in the samples comes with the steps."""
        self._boundaries, self.origin = data["boundaries"], data["origin"]
        self.steps_before, self._stepped_at = data["steps_before"], data["stepped_at"]
        self.number_reports([data])

    def number_reports(self, parts: Sequence[dict[str, Any]]) -> None:
        """A worker that has come numbers its reports as the others do. parts: the results of
        `data_state` in this run."""
        self._num_reports = max(part["reports"] for part in parts)

    @property
    def _has_recovered(self) -> bool:
        recovery = self.recovery
        return bool(self.dealer.lost) or (recovery is not None and recovery.num_recoveries > 0)

    def keep_place(self) -> None:
        """Keep this rank's place in the named loop for the next run, if the function is leaving
        that loop in the middle of an epoch."""
        name, self.named_loop = self.named_loop, None
        # A loop without a name begins with its first epoch in the next run.
        if name is None or (was_live := boundary().was_live) is None:
            return  # Before the epoch's first step the place is that after the epoch before.
        data = self.cursor.state(Used.AGREED, by_id=self._has_recovered)
        seat = self.rank, self.world_size
        between_runs().places[name] = LoopPlace(
            data["epoch"], seat, was_live, in_epoch(data["iterations"])
        )

    def count_step(self) -> None:
        """A plain optimizer has stepped with the current batch, which ends the batch."""
        self._boundaries_of_step = self._boundaries + 1

    def at_boundary(self) -> None:
        """Called between two batches; on a joined rank, after each step that it shadows."""
        self._boundaries += 1
        # It may leave the function here, which then saves nothing: it is about to go back.
        if self.recovery is not None:
            self.recovery.note_flags()
            self.recovery.pass_boundary()
            # A body that catches the error of each batch would train no more, to the end.
            failure = self.group.failure()
            if failure is not None and self.recovery.has_failed_plainly:
                raise fresh_copy(failure)
        if self.checkpoints is not None:
            self._save_if_due(self.checkpoints)
        # After the last batch no step comes in which a leaving rank could hand over.
        if self.recovery is not None and boundary().status.batches_left:
            self.recovery.before_step()

    def _save_if_due(self, checkpoints: Checkpoints) -> None:
        # The steps of a sharded optimizer are counted; without any optimizer each batch is one.
        if not self._notes_steps or self._counts():
            checkpoints.save_if_due(self.step)
            return
        # Gradients are in no checkpoint, so a save that is due between two passes of one step waits
        # for the step. Ranks without data do not know of it: then each batch counts as a step.
        live = join.last_step_live if (join := active_join()) is not None else ()
        if self._has_stepped or 0 < len(live) < self.world_size:
            self._stepped_before, self._stepped_at = self._stepped_at, self._boundaries
            self._has_stepped = False
            checkpoints.save_if_due(self._boundaries, self._stepped_before)

    def at_first_batch(self) -> None:
        """The function runs again from the top. It may have been left right after a step, before
        the boundary at which that step is saved; or the save was given up, as a rank was lost."""
        if self.recovery is not None:  # Of a function without ctx.epochs.
            self.recovery.from_the_top.set_flags()
        if self.checkpoints is not None and len(self.registry):
            by_batches = self._notes_steps and not self._counts()
            before = self._stepped_before if by_batches else None
            self.checkpoints.save_if_due(self.step, before)

    def without_reader(self, error: Exception) -> Exception:
        """The error to raise when the reader of a Stream is gone: one that makes all ranks run
        again from the top, if they can, else `error`."""
        # An error of one rank would end the run; an ended generation has all ranks begin again.
        if self.recovery is None or not self.recovery.can_begin_again:
            return error
        ends = GroupAborted(self.group.generation, [], str(error))
        self.group.abort(ends)
        return fresh_copy(ends)

    # -- Reports -------------------------------------------------------------------------------

    def report(self, values: Mapping[str, Any]) -> None:
        """Send the values of one step to the session."""
        if self.recovery is not None and self.recovery.arrivals.is_dry_run:
            return  # The others have sent theirs at the beginning.
        taken, number = boundary().status.taken, self._num_reports
        self._num_reports += 1
        # One of an earlier run may step unregistered: its steps then wait for the last number here.
        made = between_runs().num_optimizers > self._optimizers_before
        has_steps = taken or made or self._counts()
        overall = self.steps_before + (taken if has_steps else self._num_reports)
        self._step_reported = max(self._step_reported, overall)
        self._report_buffer.append(
            Report(self.rank, number, time.time(), dict(values), taken, self._step_reported)
        )

    def show(self, figure: bytes) -> None:
        """Show a picture (PNG) between the lines that this rank prints."""
        if self._report_buffer.output is not None:
            self._report_buffer.output.show(figure)


def _first_of(optimizer: torch.optim.Optimizer) -> object:
    return next((one for group in optimizer.param_groups for one in group["params"]), optimizer)
