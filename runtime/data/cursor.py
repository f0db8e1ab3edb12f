"""Where a run is in its data: its loops of epochs, and the samples that each rank was given.

Each rank keeps its own part in a `Cursor`. As plain data the part goes

- into a checkpoint;
- to the function's next call, when the function runs again from the top after a death;
- to the session's next run, for a loop over `ctx.epochs(..., resume=name)` that was left.

`Used` says which samples each of them counts. `resume` makes a rank's new cursor from the parts of
all ranks, whose number may have been another one.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch

from chorusline.actors.errors import StreamLost

from ..process.step_boundary import boundary
from .dealer import ShardIteration
from .dealing import Remainder
from .number_set import MOST, NumberSet


class Used(Enum):
    """Which samples count as used.

    GIVEN: all that this rank was given; for a checkpoint, which is made between two steps.
    AGREED: those that this rank was given before the last step that all ranks agreed on; for the
        session's next run, since this run may have been aborted in the middle of a step.
    COMMITTED: those of all ranks, by number, in steps that count; for a function that runs again
        from the top, since some ranks are lost.
    """

    GIVEN = auto()
    AGREED = auto()
    COMMITTED = auto()


_OF_ORDER = {"seed", "shuffle", "global_batch_size", "keep_together"}
"""What decides, beside the dataset and the epoch, which samples an iteration gives first. Steps are
counted in steps, and all other iterations in samples, whatever their batch size."""

_START_OVER = (
    "ctx.forget() on all ranks lets a loop of ctx.epochs(resume=...) start over, and "
    "CheckpointConfig(resume='never') a run"
)


_OUTSIDE = "@"
"""In the name of an iteration outside all loops over epochs; the number of the last loop follows,
-1 before the first one."""


class Cursor:
    """Where this rank is in its data.

    An iteration without gradients (evaluation under `torch.no_grad`) is not counted: a resumed run
    takes it again as a whole, so its result is that of all samples.
    """

    def __init__(self) -> None:
        self._loop = -1
        self._epoch: int | None = None  # None: no loop over ctx.epochs has given one
        self.epoch_under_way: int | None = None
        """The epoch of the loop whose body runs; None: no body runs."""
        self._rests: dict[str, Remainder] = {}
        """By name (`_name`), what was left of iterations when the run resumed inside them; and
        those outside all loops that are over."""
        self._begun: dict[str, ShardIteration] = {}
        """The iterations that have begun since; a copy where the object counts again."""
        self._seen: dict[str, int] = {}
        """By key, with the place outside all loops as in a name, how many have begun."""
        self._inner: dict[str, dict[str, int]] = {}
        """By name and key, how many iterations had begun in the bodies of an iteration that this
        run resumes: those that begin in its further bodies come after them."""
        self._resumed = (-1, 0)
        """The loop and the epoch with which this cursor began."""

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs of one loop that are not over yet."""
        self._loop += 1
        loop, first = self._resumed
        if self._loop < loop:  # The whole loop is over.
            return
        first = first if self._loop == loop else 0
        for epoch in range(first, num_epochs):
            self._enter(epoch)
            self.epoch_under_way = epoch
            boundary().epoch = epoch + 1
            try:
                yield epoch
            finally:  # Also when the function leaves the loop.
                self.epoch_under_way = None
                boundary().epoch = 0
        # Also where no epoch was left: a checkpoint after the loop resumes after it.
        self._enter(max(first, num_epochs))  # The last epoch is over.

    def _enter(self, epoch: int) -> None:
        self._epoch = epoch
        # Only the resumed epoch has iterations that are partly done.
        self._leave(keeps_epoch=(self._loop, epoch) == self._resumed)

    def _leave(self, *, keeps_epoch: bool) -> None:
        """Another epoch begins. The iterations outside all loops that have trained and are over
        stay so; those that were left before their end begin again in a run that resumes."""
        rests = {
            name: rest for name, rest in self._rests.items() if keeps_epoch or _OUTSIDE in name
        }
        for name, one in self._begun.items():
            # In this run, or in one before.
            has_trained = one.counts.num_agreed > 0 or one.rest != Remainder()
            if _OUTSIDE in name:
                rests.pop(name, None)
                if has_trained and (one.is_over or one.rest.given is None):
                    # Without the dataset, which lives as long as its iteration.
                    rests[name] = Remainder((), None)
            if not keeps_epoch or _OUTSIDE in name:
                one.counts.await_no_step()  # Its samples are dealt again no more.
        inner = self._inner_now(Used.GIVEN)
        self._inner = {name: one for name, one in inner.items() if keeps_epoch or _OUTSIDE in name}
        self._rests = rests
        self._begun = {
            name: one for name, one in self._begun.items() if keeps_epoch and _OUTSIDE not in name
        }
        self._seen = {key: number for key, number in self._seen.items() if _OUTSIDE in key}

    @property
    def place(self) -> tuple[int, int]:
        """The number of the loop that was begun last, and its epoch; before the function is at
        the place where it resumes, that place."""
        return max((self._loop, self._epoch or 0), self._resumed)

    def rest_of(self, key: str) -> Remainder:
        """What is left of the coming iteration over the data that `key` identifies."""
        return self._rests.get(self._name(key), Remainder())

    def num_begun(self, ending: str) -> int:
        """How many iterations over data whose key ends so have begun: in this epoch or, outside all
        loops, after the last one."""
        ending += self._outside
        return sum(number for key, number in self._seen.items() if key.endswith(ending))

    def _name(self, key: str) -> str:
        """The coming iteration over the data that `key` identifies: its number in the epoch or,
        outside all loops, after the last one."""
        return f"{key}#{self._seen.get(key + self._outside, 0)}{self._outside}"

    @property
    def _outside(self) -> str:
        return f"{_OUTSIDE}{self._loop}" if self.epoch_under_way is None else ""

    def begin(self, key: str, shard: ShardIteration) -> None:
        """`shard` begins to count. Each iteration of an epoch over the same data is recorded, but
        for evaluations.

        Raises ValueError if the iteration had begun before the resume, over another number of
        samples or in another order.
        """
        for name, one in self._begun.items():
            if one is shard:
                # The object counts from 0 again; what this iteration has to tell is in the copy.
                self._begun[name] = before = copy.copy(shard)
                before.is_in_progress = False
        shard.rest, shard.iteration, shard.is_over = Remainder(), "", False
        if not torch.is_grad_enabled():
            return
        name = self._name(key)
        self._check_same(name)
        shard.rest = self.rest_of(key)
        # A loop that is left out after a resume has no epoch.
        epoch = self._epoch if self.epoch_under_way is not None else ""
        shard.iteration = f"{self._loop}/{epoch}/{name}"
        self._begun[name] = shard
        for begun, more in ((key, 1), *self._inner.get(name, {}).items()):
            seen = begun + self._outside
            self._seen[seen] = self._seen.get(seen, 0) + more

    def _check_same(self, name: str) -> None:
        if name in self._rests:
            return  # Another dataset of this epoch may have another length.
        key, _, number = name.rpartition("#")
        now = _fields(key)
        for name_before, left in self._rests.items():
            key_before, _, number_before = name_before.rpartition("#")
            before = _fields(key_before)
            if name_before in self._begun or number_before != number:
                continue
            if before.keys() != now.keys():
                continue
            others = {field for field in now if now[field] != before[field]}
            # What was over before an epoch began may have another length since.
            is_past = _OUTSIDE in name and left.given is None
            # Other samples have other keys.
            if others - {"keep_together"} == {"samples"} and left != Remainder() and not is_past:
                raise ValueError(
                    f"the dataset has {now['samples']} samples, and had {before['samples']} when "
                    "this epoch started, so it is not known which samples are left. Restore the "
                    f"dataset, and change it only between two epochs; {_START_OVER}"
                )
            is_within = left.given is not None and left != Remainder()
            if others and others <= _OF_ORDER and is_within:
                if "keep_together" in others:
                    raise ValueError(
                        "this epoch was begun with other groups of keep_together, so it is not "
                        "known which samples are left. Keep the same samples together until the "
                        f"epoch is over, and change that only between two epochs; {_START_OVER}"
                    )
                one, two = (
                    ", ".join(f"{field}={of[field]}" for field in now if field in others)
                    for of in (before, now)
                )
                raise ValueError(
                    f"this epoch was begun with {one}, and continues with {two}, so it is not "
                    f"known which samples are left. Write {one} until the epoch is over, and "
                    f"change it only between two epochs; {_START_OVER}"
                )

    def state(self, used: Used = Used.GIVEN, *, by_id: bool = False) -> dict[str, Any]:
        """As plain data. by_id: the run has lost ranks."""
        loop, epoch = self.place
        rests = self._rests | {name: one.rest for name, one in self._begun.items()}
        within, inner = self._within(used), self._inner_now(used)
        return {
            "loop": loop,
            "epoch": epoch,
            "iterations": {
                name: _state(self._begun.get(name), rest, used, by_id, is_within=name in within)
                | {"inner": inner.get(name, {})}
                for name, rest in rests.items()
            },
        }

    def _within(self, used: Used) -> set[str]:
        """The iterations whose last batch a run that resumes has to be given again, since a loop
        in its body is not over. But no batch that was in a step before the first of these loops
        began: no sample is trained twice."""
        inside: set[tuple[str, int]] = set()
        unused: set[tuple[str, int]] = set()
        for one in self._begun.values():
            # For a checkpoint the function runs; for all else an error has left all of its loops.
            is_inside = one.is_in_progress if used is Used.GIVEN else not one.is_over
            for iteration, num_taken, num_agreed in one.around:
                if is_inside and one.leads is not False:
                    inside.add((iteration, num_taken))
                if num_agreed < num_taken:
                    unused.add((iteration, num_taken))
        return {
            name
            for name, one in self._begun.items()
            if (one.iteration, one.counts.num_taken) in inside & unused
            and one.counts.num_ended < one.counts.num_taken
            and one.repeats_batch
        }

    def _inner_now(self, used: Used) -> dict[str, dict[str, int]]:
        """As `_inner`, for a run that resumes here."""
        within = self._within(used)
        inner = {name: dict(one) for name, one in self._inner.items()}
        names = {one.iteration: name for name, one in self._begun.items()}
        keys = {name: name.rpartition("#")[0] for name in self._begun}
        last = {key: name for name, key in keys.items()}
        for inner_name, one in self._begun.items():
            key = keys[inner_name]
            # What a variable or a generator holds continues in the next body.
            is_last = last[key] == inner_name and not one.is_over
            if one.leads is False and (one.is_in_progress if used is Used.GIVEN else is_last):
                continue
            for iteration, num_taken, _ in one.around:
                name = names.get(iteration)
                if name is None:
                    continue
                counts = self._begun[name].counts
                given = counts.num_taken if used is Used.GIVEN else counts.num_agreed
                if name in within:
                    given = min(given, counts.num_ended)
                if num_taken > given:
                    continue  # This body runs again, and the iteration begins there again.
                of_name = inner.setdefault(name, {})
                of_name[key] = of_name.get(key, 0) + 1
        return inner

    def resume(self, parts: Sequence[dict[str, Any]], *, epoch_is_over: bool = False) -> None:
        """Resume. parts: what `state` gave on each rank, by rank. epoch_is_over: resume with the
        epoch after theirs."""
        loop, epoch = parts[0]["loop"], parts[0]["epoch"]
        iterations = [part["iterations"] for part in parts]
        # The body of the epoch has ended, so that what it was given does not matter any more.
        if epoch_is_over:
            iterations = [
                {name: one for name, one in of_rank.items() if _OUTSIDE in name}
                for of_rank in iterations
            ]
        self._resume_at(loop, epoch + epoch_is_over, iterations)

    def resume_next_loop(self, epoch: int, iterations: Sequence[dict[str, Any]]) -> None:
        """Resume the coming loop in this epoch. iterations: as in `state`, by rank."""
        self._leave(keeps_epoch=False)
        outside, inner = self._rests, self._inner
        self._resume_at(self._loop + 1, epoch, [*map(in_epoch, iterations)])
        self._rests |= outside
        self._inner |= inner

    def _resume_at(self, loop: int, epoch: int, iterations: Sequence[dict[str, Any]]) -> None:
        self._resumed = loop, epoch
        self._begun = {}
        self._rests = {
            name: _rest([of_rank.get(name) for of_rank in iterations], most_of(name))
            for name in sorted({name for of_rank in iterations for name in of_rank})
        }
        self._inner = {}
        for of_rank in iterations:
            for name, one in of_rank.items():
                most = self._inner.setdefault(name, {})
                for key, number in one["inner"].items():
                    # A rank without data has begun fewer.
                    most[key] = max(most.get(key, 0), number)


def in_epoch(iterations: dict[str, Any]) -> dict[str, Any]:
    """Of the iterations of `Cursor.state`, those of the epoch."""
    return {name: one for name, one in iterations.items() if _OUTSIDE not in name}


def _fields(key: str) -> dict[str, str]:
    """What a key says, by name."""
    parts = key.split("/")
    if parts[-2:-1] != ["steps"] or len(parts) < 4:  # Of `ctx.shard`.
        fields = dict(zip(("samples", "epoch", "seed", "shuffle"), parts, strict=False))
        return fields | {"keep_together": "/".join(parts[4:])}
    *first, global_batch_size, _, epoch = parts
    fields = dict(zip(("samples", "seed", "shuffle"), first, strict=False))
    return fields | {"global_batch_size": global_batch_size, "epoch": epoch}


def _state(
    shard: ShardIteration | None,
    rest: Remainder,
    used: Used,
    by_id: bool,
    *,
    is_within: bool = False,
) -> dict[str, Any]:
    """An iteration as plain data. shard: None if it has not begun since the resume. rest: what was
    left when it began. by_id: tell the sample numbers, since hands were dealt again when ranks were
    lost, and a count does not identify samples. is_within: its last batch is given again."""
    is_over, given, num_ids = False, 0, 0
    ids, again = rest.given or NumberSet(), NumberSet()
    needs_ids = by_id or bool(len(ids))
    if shard is not None:
        taken = shard.counts.num_taken
        given = shard.counts.num_agreed if used is Used.AGREED else taken
        # The batches that no step has used are taken again, by a run that continues from here.
        is_over = shard.is_over and given == taken
        if used is Used.COMMITTED:
            is_over = is_over and not shard.counts.awaits_step
        if is_within:
            given = min(given, shard.counts.num_ended)
        needs_ids = needs_ids or shard.needs_ids
        # An iteration that is over on one rank is so on all, unless the run was aborted then.
        if needs_ids and (used is Used.AGREED or not is_over):
            if shard.needs_ids and used is not Used.GIVEN:
                num_ids = len(ids) + shard.num_committed
            if used is Used.COMMITTED:
                ids |= NumberSet(shard.committed_ids)
                # Other ranks know that they were in a step, and not in which batch this rank is.
                again = NumberSet(shard.taken_ids[given:])
            else:
                ids |= NumberSet(shard.taken_ids[:given]) | NumberSet(shard.ids_of_the_lost)
    return {
        "runs": tuple((len(counts), counts) for counts in rest.runs),
        "given": given,
        "ids": ids.text() if needs_ids else None,
        "again": again.text(),
        "is_over": is_over or rest.given is None,
        "num_ids": num_ids,
    }


def check_parts(parts: Sequence[Any]) -> None:
    """Raise ValueError unless `Cursor.resume` takes `parts`, of a checkpoint that anybody may have
    written."""
    for part in parts:
        iterations = part["iterations"] if isinstance(part, dict) and "iterations" in part else None
        if (
            not isinstance(iterations, dict)
            # -1: saved before the first loop over epochs.
            or not is_count(part.get("loop"), least=-1)
            or not is_count(part.get("epoch"))
            or not all(isinstance(one, dict) for one in iterations.values())
        ):
            raise ValueError("the place of a rank in its data has another form")
        for key, iteration in iterations.items():
            _check_iteration(iteration, most_of(key))


def _check_iteration(iteration: dict[str, Any], most: int) -> None:
    # Line by line, since each line reads what the one before has found to be of its type.
    runs = iteration.get("runs")
    if (
        not isinstance(runs, list | tuple)
        or not all(isinstance(run, list | tuple) and len(run) == 2 for run in runs)
        or not all(isinstance(counts, list | tuple) for _, counts in runs)
        or not all(size == len(counts) and size > 0 for size, counts in runs)
        or not all(is_count(count) for _, counts in runs for count in counts)
        or not is_count(iteration.get("given"))
        or type(iteration.get("is_over")) is not bool
        or not is_count(iteration.get("num_ids"))
        or not isinstance(iteration.get("ids", 0), str | None)
        or not isinstance(iteration.get("again"), str)
        or not isinstance(inner := iteration.get("inner"), dict)
        or not all(map(is_count, inner.values()))
    ):
        raise ValueError("the samples that a rank was given are not listed as a run lists them")
    NumberSet.from_text(iteration["ids"] or "", most)
    NumberSet.from_text(iteration["again"], most)


def is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


def place_in_words(parts: Sequence[dict[str, Any]], *, epoch_is_over: bool) -> str:
    """Where a function resumes, for people; empty without a loop over `ctx.epochs`. The arguments
    are those of `Cursor.resume`. Pure."""
    loop, epoch = parts[0]["loop"], parts[0]["epoch"]
    iterations = [one for part in parts for one in in_epoch(part["iterations"]).values()]
    if loop < 0:
        return ""
    if epoch_is_over or not iterations:
        return f"before epoch {epoch + epoch_is_over}"
    if all(iteration["is_over"] for iteration in iterations):
        return f"in epoch {epoch} after its batches, so the rest of its body runs now"
    return f"in epoch {epoch}"


def most_of(key: str) -> int:
    """No sample of the iteration with this key has a number as large as that: the key of a dataset
    begins with its length, and a stream has none."""
    length = key.partition("/")[0]
    return min(int(length), MOST) if length.isdecimal() and len(length) < 20 else MOST


def _rest(parts: Sequence[dict[str, Any] | None], most: int) -> Remainder:
    """What is left of an iteration. parts: by rank; None: the rank has not begun it. most: as in
    `most_of`."""
    begun = [part for part in parts if part is not None]
    runs = tuple(tuple(counts) for _, counts in begun[0]["runs"])
    if all(part["is_over"] for part in begun):
        return Remainder(runs, None)
    if any(part["ids"] is not None for part in begun):  # Counts identify no samples.
        sets = (NumberSet.from_text(part["ids"] or "", most) for part in begun)
        given = functools.reduce(operator.or_, sets)
        missing = max(part["num_ids"] for part in begun) - len(given)
        if missing > 0:
            raise StreamLost(
                "it died together with a rank",
                f"Of those, {missing} belong to steps that count, but it is no longer known "
                "which. Run the epoch again, or resume from a checkpoint",
            )
        # What was in a step counts, but for the batch in which a rank is inside another loop.
        again = (NumberSet.from_text(part["again"], most) for part in begun)
        return Remainder(runs, functools.reduce(NumberSet.__sub__, again, given))
    # Hands are dealt again from the seed, and a count says how far each rank was in its own.
    counts = tuple(0 if part is None else part["given"] for part in parts)
    return Remainder((*runs, counts))
