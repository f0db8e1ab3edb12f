"""What stays on a rank from one run to the next: objects by name, places in loops, wrapped models.

    objects   what `ctx.keep` made; also the namespace of `%%ranks`.
    places    where a loop over `ctx.epochs(..., resume=name)` stands.
    wrapped   models and sharded optimizers that live: when a generation has ended, they go on in
              the group of the next one, as long as the ranks are the same.

One of it per process, as a worker process serves one rank of one session.

An aborted run may have ended inside a step: some ranks applied it and others did not, or the
parameters were not gathered. Every rank counts the steps that it began to apply and notes one that
it did not finish, so that `keep` can refuse such objects instead of training on with them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

from collectives import Group


class Wrapped(Protocol):
    """What holds a group and can go on in another one of the same ranks."""

    @property
    def group(self) -> Group: ...

    def move_to(self, group: Group) -> None:
        """Go on in `group`, at the beginning of a step: gradients of a step that was not finished
        are dropped."""

    def leave_run(self) -> None:
        """The run that it was used in is over, and with it what would have taken it into the next
        generation inside a step: a later run that loses a worker ends with that."""


@dataclass(slots=True)
class Place:
    """Where a loop over epochs stands on this rank.

    epoch: in progress. samples_done: by shard of that epoch, whose steps were taken.
    is_resumed: whether this run came back into the epoch. last_live: ranks that took the last step.
    is_dealt_anew: a rank was lost in the epoch, and the others have got its samples, so that counts
    do not tell any more which ones are done.
    """

    epoch: int = 0
    samples_done: dict[object, int] = field(default_factory=dict)
    is_resumed: bool = False
    last_live: tuple[int, ...] = ()
    is_dealt_anew: bool = False

    def next_epoch(self) -> None:
        self.epoch += 1
        self.samples_done.clear()
        self.is_resumed = False
        self.last_live = ()
        self.is_dealt_anew = False


class BetweenRuns:
    """All that stays. No collectives in here."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.places: dict[str, Place] = {}
        self._wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._group: Group | None = None
        self._made_at: dict[str, int] = {}  # num_steps when `keep` made it
        self._num_steps = 0  # that this process began to apply
        self._is_applying = False
        self._torn_at = -1

    def enter(self, group: Group) -> None:
        """A run begins: what lived in the last run's group goes on in this one."""
        before, self._group = self._group, group
        self._note_torn_step()
        for wrapped in list(self._wrapped):
            wrapped.leave_run()
        if before is None or before is group:
            return
        if (before.rank, before.size) != (group.rank, group.size):
            return  # Shards are cut for their rank. Whoever uses them is told of a closed group.
        for wrapped in [each for each in self._wrapped if each.group is before]:
            wrapped.move_to(group)

    def begin_again(self) -> None:
        """The function runs again from the top, in the same run. It makes anew what `keep` made, as
        some ranks may not have it: what is registered is brought to where it was."""
        for name in tuple(self._made_at):
            self.forget((name,))  # One by one: forget without any names forgets all.
        self.places.clear()
        self._is_applying = False

    def follow(self, group: Group) -> None:
        """The run goes on in another generation, and has taken its objects there itself."""
        self._group = group

    def wrap(self, wrapped: Wrapped) -> None:
        if wrapped.group is self._group:
            self._wrapped.add(wrapped)

    def begin_applying(self, group: Group) -> None:
        """All ranks have agreed on a step; what follows changes parameters."""
        if group is self._group:
            self._num_steps += 1
            self._is_applying = True

    def end_applying(self) -> None:
        self._is_applying = False

    def tear(self) -> None:
        """A step was applied in part, before all had agreed on it."""
        self._num_steps += 1
        self._torn_at = self._num_steps

    def put(self, name: str, value: Any) -> None:
        self.objects[name] = value
        self._made_at[name] = self._num_steps

    def age_of(self, name: str) -> tuple[bool, int, bool]:
        """Whether it is here, how many steps were taken since it was made, and whether one of them
        was not finished."""
        if name not in self.objects:
            return False, 0, False
        made_at = self._made_at.get(name, 0)
        return True, self._num_steps - made_at, self._torn_at > made_at

    def forget(self, names: tuple[str, ...]) -> None:
        """These objects; without names everything, places too."""
        for name in names or tuple(self.objects):
            self.objects.pop(name, None)
            self._made_at.pop(name, None)
        if not names:
            self.places.clear()

    def _note_torn_step(self) -> None:
        if self._is_applying:
            self._torn_at = self._num_steps
            self._is_applying = False


_kept = BetweenRuns()


def between_runs() -> BetweenRuns:
    return _kept
