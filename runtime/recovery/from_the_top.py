"""How a function that was left runs again from the top, and continues where it was.

    (a) When the function has been left, the state of its registered objects is kept (restart.py).
    (b) All ranks meet in the next generation, newcomers too. First, ranks that wait inside a step
        that counts get its parameters (waiting_steps.py), and leave their functions at the next
        boundary.
    (c) The ranks exchange summaries of the kept state, and choose a leader, whose step and position
        in the data apply to all.
    (d) The functions make their objects again, and each registered object gets its state back.

After a failure in one of the phases the ranks begin again at (b). If the run is given up, they
write a checkpoint in place of (c) (last_checkpoint.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from chorusline.actors.errors import LOADS_SHARDS, RESUMES, StateLost, ends_a_generation
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.collectives.contract.errors import ChoruslineError, CollectiveError, GroupAborted
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object

from ..checkpoint.config import CheckpointConfig
from ..process.registry import Registered
from ..zero.shards.shard_state import ShardState
from ..zero.zero_redundancy_optimizer import OptimizerEngine
from . import last_checkpoint, waiting_steps
from .last_checkpoint import Saveable
from .live_objects import LiveObjects
from .rank_state import RankState
from .restart import RestartState, Summary, leader_of, up_to_date


class FromTheTop:
    """These phases on one rank, for one run."""

    def __init__(self, lifeline: Lifeline, state: RankState, objects: LiveObjects) -> None:
        self._lifeline = lifeline
        self._state = state
        self._objects = objects
        self._on_the_way: Mapping[int, ShardState] = {}
        """By id() of an optimizer engine, the state that attempts to continue in place brought.
        Other ranks may have entered that generation, and dropped their copies."""
        self.forget()

    def forget(self) -> None:
        """Drop the kept state: it is not needed any more, or this rank has none."""
        self._retained = RestartState()
        self._saveable = Saveable()
        self._data: dict[str, Any] = {}
        self._summaries: list[Summary] = []

    def begin_call(self) -> None:
        """The function makes its objects again."""
        self._on_the_way = {}
        self._retained.to_set.clear()

    def keep_on_the_way(self, held: Mapping[int, ShardState]) -> None:
        """held: by number of an optimizer, the state that attempts to continue in place brought."""
        optimizers = self._objects.optimizers()
        self._on_the_way = {id(optimizers[number]): one for number, one in held.items()}

    def retain(self) -> None:
        """(a) The function has been left, and has taken all steps that count."""
        facts = self._objects.facts()
        # The kept state of an earlier call stays valid until a step counts in this one. A newcomer
        # that leaves while it meets the others has had no call.
        if not self._state.has_kept:
            call = self._objects.call
            self._retained = RestartState.of(
                call.registry,
                self._objects.plain.place,
                self._on_the_way,
                call.rank % self._lifeline.replica_size,
            )
            self._retained.flags = self._objects.flags.by_name()
            for name, buffers in self._objects.flags.buffers().items():
                self._retained.states[name].update(buffers)
            self._data = call.data_state(committed=True)
            if facts.is_worth_saving:
                self._saveable = Saveable.of(call.registry, self._retained, call.step)
        self._state.left(facts)

    def meet_waiting(self, optimizer: OptimizerEngine) -> None:
        """(b) on a rank that waits in a step of `optimizer` that counts."""
        registry = self._objects.call.registry
        has = waiting_steps.Holdings.of_live(registry, self._on_the_way)
        group = self._lifeline.connect()
        waiting_steps.complete(group, has, registry, optimizer)
        self._state.met(group.generation)

    def connect(self) -> Group:
        """The group of the generation in which the function will run. A rank that has waited in a
        step is connected already."""
        group, generation = self._lifeline.group, self._lifeline.generation
        if group is not None and group.generation == generation and self._state.has_met(generation):
            return group
        return self._lifeline.connect()

    def meet(self, group: Group) -> None:
        """(b) on a newcomer, or a rank that has left its function: once in a generation."""
        if not self._state.has_met(group.generation):
            waiting_steps.complete(group, waiting_steps.Holdings.of_retained(self._retained))
            self._state.met(group.generation)

    def begin_again(self, group: Group, status: RunStatus) -> list[dict[str, Any]]:
        """(c) Returns the ranks' positions in their data, the leader's first.

        status: this rank's; a newcomer takes over the number of steps from the other ranks."""
        plain, retained = self._objects.plain, self._retained
        self._state.runs_again(group.generation)
        # Once: after a failure in a later phase `status.taken` is that of the leader already.
        if retained.steps_taken is None:
            # Steps that were agreed on, and that this rank has not taken, are taken again.
            retained.steps_taken = status.taken - plain.num_untaken
        mine = retained.summary(not self._state.is_newcomer, self._data)
        self._summaries = all_gather_object(group, mine)
        # Newcomers alone have no state: whatever they began with would be another run.
        if not any(one.was_there for one in self._summaries):
            remedy = LOADS_SHARDS if self._lifeline.replica_size > 1 else RESUMES
            raise StateLost(group.generation, 0, "every rank that had taken a step died", remedy)
        leader = self._summaries[leader_of(self._summaries)]
        # Ranks with a step fewer know less of the samples that were used.
        newest = [one for one in up_to_date(self._summaries) if one is not leader]
        status.taken = max(one.steps_taken for one in (leader, *newest))
        plain.continue_at(leader.place[0])
        self._state.num_recoveries += 1
        return [one.data for one in (leader, *newest)]

    def restore(self, entry: Registered, group: Group) -> bool:
        """(d) for one object. Returns False if the function runs for the first time, or had no
        object of this name."""
        # It is the first call of the function in this run.
        if not self._summaries:
            return False
        # Ranks come here in the order in which they register, which is the same on all.
        size = self._lifeline.replica_size
        sent_bytes = self._retained.restore(entry, self._summaries, group, size)
        self._state.bytes_moved += sent_bytes or 0
        return sent_bytes is not None

    def set_flags(self) -> None:
        """(d) for what its body has set of modules: before that begins, and may set it again."""
        for module, flags in self._retained.to_set:
            flags.set(module)
        self._retained.to_set.clear()

    def save_last(self, group: Group, config: CheckpointConfig) -> CollectiveError:
        """The run is given up: save the kept state in a checkpoint. Returns the error for the last
        freeze; raises errors that end the group."""
        was_there = not self._state.is_newcomer
        try:
            path = last_checkpoint.save(
                self._saveable, self._retained, was_there, self._data, group, config
            )
            self._state.saved(path)
            outcome = f"it is saved in {path}"
        except Exception as error:  # The run still ends with the error for which it was given up.
            if ends_a_generation(error):
                raise
            last = None
            with contextlib.suppress(Exception):  # The storage may have failed.
                last = last_checkpoint.newest(config)
            is_ours = isinstance(error, ChoruslineError)
            outcome = str(error) if is_ours else f"{type(error).__name__}: {error}"
            outcome += f" (the last checkpoint is {last})" if last else ""
        return GroupAborted(group.generation, [], outcome)
