"""The steps that plain optimizers take, and whether those of all ranks are the same.

A plain optimizer steps each rank's own copy of the parameters, and no collective sees it: where a
rank steps with another learning rate, or once more than the others, the copies drift apart. So the
vote of each backward pass has a digest of the steps that the rank has taken since the vote before,
of the options that their optimizers have by now, and of whether their state (momentum) was made
again in a step: it was cleared or loaded before. Where digests differ, the ranks gather what these
stand for, and all of them raise the same error.

Optimizers are found when they step, by torch's global hook (distributed_data_parallel.py); nobody
has to list them.

No option tells what the body does to gradients (clipping) and to parameters (averages). So the vote
also has a digest of a few bits of one parameter, as the last of these steps has left it: of another
parameter in each step, so that what parts the ranks for good is noticed soon. A rank that has just
run out of data compares the last step that it took.

A rank that has run out of data, and lists no optimizer in step_along, misses steps. It gets the
parameters of another rank at the end of the Join, and keeps the old state of its optimizers
(momentum). If it steps by such a state, it warns.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch

from chorusline.collectives.contract.call_site import users_level
from chorusline.collectives.contract.errors import CollectiveMismatch, name_ranks
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object, all_gather_row

from ...process.agreement import Agreement, digest_of
from ...process.option_numbers import plain, told_apart
from .gradient_bucket import Gradients

_NO_STEPS = 1
"""The digest of an empty text: no optimizer has stepped."""

_SAMPLE_BYTES = 1024

_CHANGING = (torch.Tensor, np.ndarray, list)
"""Values of options that may change and stay the same object."""

_SAME_OPTIONS = (
    "Every rank must set the same options. A schedule that looks at a loss, such as "
    "ReduceLROnPlateau, takes one that all ranks have: schedule.step(ctx.reduce(loss)). Inside "
    "Join a rank without data does what step_along lists: Join([model], step_along=[optimizer, "
    "schedule]); and a schedule that the body steps with an argument is listed as a function that "
    "the body calls, too."
)
_SAME_STEPS = (
    "Every rank must step the same optimizers after each backward pass. Inside Join a rank "
    "without data steps what step_along lists, once after as many passes as the step before had, "
    "and in the very first step after one: run all passes of a step but the last one in "
    "model.no_sync(); and a batch without a backward pass must take no step either, or clear the "
    "gradients first (optimizer.zero_grad()), so that the step changes nothing. With a "
    "ZeroRedundancyOptimizer ranks without data need not know it."
)
_SAME_SCALE = (
    "Make the GradScaler with the same settings on every rank, and let each rank use it as often. "
    "Inside Join a rank without data does it by step_along=[functools.partial(scaler.step, "
    "optimizer), scaler.update]. It does not run the loop's body: set a scale (update(scale)) "
    "before or after the Join, or use a ZeroRedundancyOptimizer and chorusline.GradScaler."
)
_SCALE = "the scale of the GradScaler of"
_STATE = "the state (momentum and the like) of"
_SAME_STATE = (
    "Clear or load an optimizer's state (optimizer.state.clear(), load_state_dict()) on every rank "
    "between the same two steps, and load the same values. A condition for it must be the same on "
    "all ranks: ask ctx.reduce(loss), and not a rank's own loss. Ranks that have run out of data "
    "do not run the loop's body: put this into a function, together with the step, call it in the "
    "body, and list it in place of both, Join(..., step_along=[function])."
)
_REMEDIES = ((_SCALE, _SAME_SCALE), (_STATE, _SAME_STATE))
"""By the beginning of the label of what differs; _SAME_OPTIONS for all others."""

_SAME_PASSES = (
    "Run the last backward pass of each step outside no_sync(), on all ranks, so that what it "
    "steps with is the mean of all."
)


@dataclass(frozen=True, eq=False)
class _State:
    """That of an optimizer, as ranks compare it. bits: of its tensors; None: not known."""

    is_new: bool
    bits: int | None = None

    def __eq__(self, other: object) -> bool:
        # Made again on one rank, it may still be the same: loaded from what it was.
        return isinstance(other, _State) and (
            self.is_new == other.is_new or (self.bits is not None and self.bits == other.bits)
        )

    def __str__(self) -> str:
        return "made again in the last step" if self.is_new else "kept"


class _Steps:
    """Steps of one optimizer in a row. groups: the numbers of those of its parameter groups that
    have parameters of the model. unsent: whether `.grad` held gradients of no_sync() then.
    scaler: by which it steps. is_new: whether it has made its state in one of them; None: not to be
    compared. used: by step, the options with which it stepped, where they are
    kept."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[int],
        unsent: bool,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.optimizer, self.groups, self.unsent, self.count = optimizer, groups, unsent, 1
        self.scaler = scaler
        self.is_new: bool | None = False
        self.used: list[dict[str, Any]] = []

    def values(self) -> Iterator[Any]:
        """All that other ranks compare, as it is."""
        yield from (type(self.optimizer).__name__, self.unsent, self.count, self.is_new)
        yield self.scaler and self.scaler._scale
        for number in self.groups:
            options = self.optimizer.param_groups[number]
            for name in self.optimizer.defaults:
                yield options.get(name)

    def report(self) -> tuple[str, bool, int, dict[str, Any], list[dict[str, Any]]]:
        """The same for people: class, unsent, count, and the options by their names, as they are,
        and as they were in each step."""
        options = self.options()
        if self.is_new is not None:
            label = f"{_STATE} {type(self.optimizer).__name__}"
            options[label] = _State(self.is_new, _digest_of_all(_tensors_of(self.optimizer)))
        return type(self.optimizer).__name__, self.unsent, self.count, options, self.used

    def parameters(self) -> set[int]:
        """By id(), those in these groups."""
        groups = self.optimizer.param_groups
        return {id(one) for number in self.groups for one in groups[number]["params"]}

    def options(self) -> dict[str, Any]:
        optimizer = self.optimizer
        name, has_several = type(optimizer).__name__, len(optimizer.param_groups) > 1
        return {
            f"{option} of parameter group {number} of {name}"
            if has_several
            else f"{option} of {name}": _comparable(optimizer.param_groups[number].get(option))
            for number in self.groups
            for option in sorted(optimizer.defaults)
        } | {
            f"{_SCALE} {name}": _comparable(self.scaler and self.scaler._scale),
            f"{_STATE} {name}": None if self.is_new is None else _State(self.is_new),
        }


class LocalSteps:
    """The steps of one model on one rank since its last vote.

    gradients: those of the model.
    have_been_seen: whether an optimizer of its parameters has ever stepped.
    scaler: the one by which an optimizer has stepped last.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.have_been_seen = False
        self.scaler: torch.amp.GradScaler | None = None  # None: none in the last step
        self._scale_before: torch.Tensor | None = None  # at the vote before; None: no scaler then
        self._steps: list[_Steps] = []
        self._voted: list[_Steps] = []
        self.takes_samples = True
        """Whether this rank compares a few bits of its parameters after each step; no more once it
        has been said that they differ."""
        self._sample = 0
        self._is_known = True
        """Whether this rank has taken all steps since the vote before that a rank takes."""
        self._was_known = False
        self._raw: list[Any] = []
        self._texts: list[str] = []
        self._digest, self._is_fixed = 0, False
        self.has_stepped_along = False
        """Whether this rank has stepped without data in this Join, by whatever step_along lists,
        with an optimizer that keeps state. (Without state the parameters are all that counts, and
        they come from another rank in the end.)"""
        self._states: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, weakref.ref[torch.Tensor]
        ] = weakref.WeakKeyDictionary()
        """By optimizer, the first tensor in its state after its last step."""
        self._compares_states = True
        self._has_warned = False
        self._num_missed = 0
        """How many steps it has missed, if it has not stepped by old state since."""
        self._num_votes = 0
        """The number of votes since the last Join."""
        self._are_taken_in_loop = False
        """Whether such a vote, but for the first, tells of steps since the one before."""
        self._old: list[tuple[weakref.ref[torch.Tensor], int]] | None = None
        """Old state, and the versions of its tensors; None if no optimizer has stepped before."""

    def __bool__(self) -> bool:
        return bool(self._steps)

    def note(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[int],
        *,
        unsent: bool,
        has_joined: bool,
        keeps_options: bool,
        number: int,
    ) -> None:
        """An optimizer has stepped. groups, unsent: as in `_Steps`. has_joined: this rank has no
        data. keeps_options: a rank without data may be compared with this one: in a Join also a
            rank that lists nothing in step_along, by the steps of its last batch. number: of the
            votes so far, which says what is sampled."""
        self.has_stepped_along |= has_joined and keeps_state(optimizer)
        if self._num_missed:
            self._warn_of_old(optimizer)
        self.have_been_seen = True
        self.scaler = scaler = _scaler_of_this_step()
        last = self._steps[-1] if self._steps else None
        if last and last.optimizer is optimizer and last.unsent == unsent:
            last.count += 1
        else:
            self._steps.append(_Steps(optimizer, groups, unsent, scaler))
        if not self._compares_states:
            self._steps[-1].is_new = None
        elif self._has_new_state(optimizer):
            self._steps[-1].is_new = True
        if keeps_options:
            self._steps[-1].used.append(self._steps[-1].options())
        # The end of the Join compares all parameters of a rank without data that steps along.
        self._sample = 0
        if self.takes_samples and not (has_joined or unsent):
            self._sample = _sample_of(self.sampled(number)[1])

    def _has_new_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it has made its state in this step, by its first tensor."""
        each = (one for state in optimizer.state.values() for one in _values_of(state))
        first = next((one for one in each if isinstance(one, torch.Tensor)), None)
        if first is None:
            return False
        known = self._states.get(optimizer)
        if known is not None and known() is first:
            return False
        self._states[optimizer] = weakref.ref(first)
        return True

    def sampled(self, number: int) -> tuple[str, torch.Tensor]:
        """What is sampled after this number of votes: a parameter, with its name."""
        names, parameters = self._gradients.names, self._gradients.parameters
        return names[number % len(names)], parameters[number % len(names)]

    def sample(self) -> int:
        """The digest of it for this rank's vote; 0: none."""
        sample, self._sample = self._sample, 0
        return sample

    @property
    def were_skipped(self) -> bool:
        """Whether the scaler has left a step out since the vote before: it has shrunk its scale."""
        before = self._scale_before
        scale = None if self.scaler is None else self.scaler._scale
        # To read the scale waits for the GPU, so it is asked only where no step was seen.
        return before is not None and scale is not None and bool(scale < before)

    def forget(self) -> None:
        """The model continues among other ranks, or after its run: nothing is compared with what
        was before."""
        self._steps, self._voted, self._is_known = [], [], False
        self._num_missed = self._sample = 0
        self._states.clear()

    def leave_join(
        self,
        num_missed: int,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        somebody_missed: bool,
    ) -> None:
        """A Join ends. num_missed: the passes that this rank had no data for, where step_along
        lists no optimizer of the model. optimizers: those that have ever stepped here; none where
        the others have made state since, and these have none. somebody_missed: whether any rank has
        missed passes, whose state is older then, or is made later."""
        self._compares_states &= not somebody_missed
        # Stepped after the loop only, on all ranks. One vote tells of steps before the loop.
        has_steps = self._are_taken_in_loop or self._num_votes < 2
        self._num_votes, self._are_taken_in_loop = 0, False
        # Not stepped along, its momentum is older than the parameters that come from another rank.
        if num_missed and has_steps and not (self.has_stepped_along or self._has_warned):
            self._num_missed = num_missed
            state = [tensor for one in optimizers for tensor in _tensors_of(one)]
            self._old = [(weakref.ref(one), one._version) for one in state] if optimizers else None
        self.has_stepped_along = False

    def _warn_of_old(self, optimizer: torch.optim.Optimizer) -> None:
        state = _tensors_of(optimizer)
        # An optimizer that never stepped here, or kept nothing, has made its state since.
        old = state if self._old is None else [one() for one, _ in self._old]
        if any(one is other for one in state for other in old):
            name, missed = type(optimizer).__name__, self._num_missed
            warnings.warn(
                f"{name} keeps state from step to step, such as momentum, and this rank had no "
                f"data for {missed} step{'s' if missed > 1 else ''} of an earlier Join. There it "
                "got the parameters of another rank, but not this state, so from now on the ranks "
                "step differently, if the program has not reset theirs. List the optimizer, "
                "Join([model], step_along=[optimizer]), or use a ZeroRedundancyOptimizer",
                stacklevel=users_level(),
            )
            self._num_missed, self._has_warned = 0, True
            self.takes_samples = False

    def vote(self, takes_steps: bool) -> int:
        """The digest for this rank's vote, positive; 0 if it cannot be compared with the others'.

        takes_steps: whether this rank takes the steps after this vote; a rank without data that
            lists no optimizer in step_along gets the parameters of another rank later.
        """
        if self._num_missed and self._old is not None:
            # The program may have made the state alike, or have reset it, since the Join.
            pairs = [(one, version, one()) for one, version in self._old]
            self._old = [(r, v) for r, v, one in pairs if one is not None and one._version == v]
            self._num_missed = self._num_missed if self._old else 0
        digest = self._digest_now() if self._is_known else 0
        self._voted, self._was_known = self._steps, self._is_known
        self._steps, self._is_known = [], takes_steps
        return digest

    def agreed(self, agreement: Agreement, group: Group) -> None:
        """The votes are in. Raises CollectiveMismatch, on all ranks, if their steps differ."""
        voted, self._voted = self._voted, []  # They would keep the optimizers alive.
        if self._num_votes:
            self._are_taken_in_loop |= any(one > _NO_STEPS for one in agreement.digests)
        self._num_votes += 1
        if agreement.live:
            if self.scaler is not None and self.scaler._scale is not None:
                self._scale_before = self.scaler._scale.clone()
            _compare(voted, agreement.digests, group, agreement.live)
        else:  # No rank had data: all ranks vote once more on the same steps.
            self._steps, self._is_known = voted, self._was_known

    def compare(self, group: Group) -> None:
        """The same for the steps since the last vote, which all ranks have taken; collective."""
        digests = all_gather_row(group, [self._digest_now()])
        everybody = tuple(range(group.size))
        _compare(self._steps, [digest for (digest,) in digests], group, everybody)

    def _digest_now(self) -> int:
        if len(self._steps) > 1:
            self._steps = self._in_one_order()
        raw = [value for steps in self._steps for value in steps.values()]
        before = self._raw
        # Most often these are the very same objects as at the vote before.
        if self._is_fixed and len(raw) == len(before) and all(map(is_, raw, before)):
            return self._digest
        is_known = len(raw) == len(before)
        if not is_known:
            self._texts = [""] * len(raw)
        for at, value in enumerate(raw):
            # Text costs more than all the rest of the vote, so it is made of what is new only.
            if not is_known or value is not before[at] or isinstance(value, _CHANGING):
                self._texts[at] = repr(_comparable(value))
        self._raw, self._is_fixed = raw, not any(isinstance(value, _CHANGING) for value in raw)
        self._digest = digest_of(",".join(self._texts))
        return self._digest

    def _in_one_order(self) -> list[_Steps]:
        """Optimizers without a common parameter lead to the same in any order, so a rank need not
        keep to that of the others: their steps are compared in the order of the parameters."""
        numbers = {id(one): number for number, one in enumerate(self._gradients.parameters)}
        waiting = [(one, one.parameters()) for one in self._steps]
        ordered: list[_Steps] = []
        while waiting:
            # What steps a parameter after another one does, waits for that one.
            free = [
                place
                for place, (_, own) in enumerate(waiting)
                if all(own.isdisjoint(before) for _, before in waiting[:place])
            ]
            first = [min((numbers.get(one, -1) for one in waiting[n][1]), default=-1) for n in free]
            steps, _ = waiting.pop(free[first.index(min(first))])
            last = ordered[-1] if ordered else None
            if last and last.optimizer is steps.optimizer and last.unsent == steps.unsent:
                last.count += steps.count
                last.is_new = last.is_new or steps.is_new
                last.used += steps.used
            else:
                ordered.append(steps)
        return ordered


def _sample_of(parameter: torch.Tensor) -> int:
    """A digest of its first elements; 0 on a GPU, for which the host would wait, and where they are
    in no memory of its own: a class that wraps other tensors, a storage that was emptied."""
    if type(parameter) is not torch.nn.Parameter or not parameter.is_cpu:
        return 0
    address = parameter.data_ptr() if parameter.is_contiguous() else 0
    num_bytes = min(parameter.numel() * parameter.element_size(), _SAMPLE_BYTES)
    # As bytes: a view as a tensor of numpy takes six times as long.
    return digest_of(ctypes.string_at(address, num_bytes)) if address and num_bytes else 0


def keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    return bool(_tensors_of(optimizer))


def _digest_of_all(tensors: Sequence[torch.Tensor]) -> int:
    dense = [one.detach().cpu() for one in tensors if one.layout is torch.strided]
    flat = [one.reshape(-1).view(torch.uint8).numpy().tobytes() for one in dense]
    return digest_of(repr([*map(digest_of, flat)]))


def _values_of(state: Any) -> Iterable[Any]:
    return state.values() if isinstance(state, Mapping) else ()


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those in the optimizer's state."""
    each = (one for state in optimizer.state.values() for one in _values_of(state))
    return [one for one in each if isinstance(one, torch.Tensor)]


_BY_SCALER = torch.amp.GradScaler.step.__code__
_FRAMES = 16  # Between it and `note` are torch's hooks, ours, and those of schedules.


def _scaler_of_this_step() -> torch.amp.GradScaler | None:
    """The GradScaler whose `step` has called the optimizer's: no hook of torch names it."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_code is _BY_SCALER:
            scaler: torch.amp.GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _compare(
    steps: Sequence[_Steps], digests: Sequence[int], group: Group, live: Sequence[int]
) -> None:
    """steps: that this rank's digest stands for. digests: by rank. live: the ranks with data."""
    # Zero: not to be compared. The objects are exchanged only where digests differ.
    if len({digest for digest in digests if digest > 0}) < 2:
        return
    everybodys = all_gather_object(group, [one.report() for one in steps])
    compared = {rank: reports for rank, reports in enumerate(everybodys) if digests[rank] > 0}
    if any(rank not in live for rank in compared) and _have_same_options(compared, live):
        # What the body sets before its pass, for the coming step, step_along sets after the vote.
        compared = {
            rank: [(*one[:3], one[4][-1], one[4]) for one in reports]
            for rank, reports in compared.items()
        }
    reference = next(iter(compared.values()))
    unlike = [
        rank
        for rank, reports in compared.items()
        if [one[:4] for one in reports] != [one[:4] for one in reference]
    ]
    if not unlike:
        return
    detail, remedy = _difference(reference, compared[unlike[0]], compared)
    raise CollectiveMismatch("step()", group.generation, unlike, detail, remedy)


def _have_same_options(compared: Mapping[int, Sequence[Any]], live: Sequence[int]) -> bool:
    """Whether the ranks with data have the same ones now, and all ranks have kept those of their
    steps."""
    now = [[one[3] for one in compared[rank]] for rank in live if rank in compared]
    is_kept = all(one[4] for reports in compared.values() for one in reports)
    return is_kept and all(one == now[0] for one in now)


def _comparable(value: Any) -> Any:
    """An option as all ranks write it, whatever holds its numbers; None for what has no such form,
    and for a number on a GPU, for which the host would wait."""
    if type(value) in (float, int, bool):  # Most are; what follows takes its time.
        return float(value)
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return None
    value = plain(value)
    if isinstance(value, list):
        return [entry if isinstance(entry, float | str) else None for entry in value]
    return value if isinstance(value, float | str) else None


def _difference(
    mine: Sequence[Any], theirs: Sequence[Any], compared: Mapping[int, Sequence[Any]]
) -> tuple[str, str]:
    """What differs, and the remedy. mine, theirs: of two ranks. compared: of all."""
    # First the steps themselves: where their number differs, their options say nothing.
    if [(one[0], one[2]) for one in mine] != [(one[0], one[2]) for one in theirs]:
        each = ", ".join(
            f"{_counted(reports)} on rank {rank}" for rank, reports in compared.items()
        )
        return (
            f"since the backward pass before, the model's optimizers have stepped: {each}, so the "
            "parameters of the ranks drift apart",
            _SAME_PASSES
            if any(one[1] for reports in compared.values() for one in reports)
            else _SAME_STEPS,
        )
    for number, (ours, other) in enumerate(zip(mine, theirs, strict=True)):
        (name, unsent, _, options, _), (_, theirs_unsent, _, theirs_options, _) = ours, other
        if unsent != theirs_unsent:
            alone = [rank for rank, reports in compared.items() if reports[number][1]]
            return (
                f"{name} has stepped with gradients of a backward pass in no_sync() that were not "
                f"reduced on {name_ranks(alone)}, and with reduced ones on the others, so the "
                "parameters of the ranks drift apart",
                _SAME_PASSES,
            )
        # A group may have an option on one of the ranks alone.
        for label in (*options, *theirs_options):
            if options.get(label) != theirs_options.get(label):
                shown = _shown([reports[number][3].get(label) for reports in compared.values()])
                each = ", ".join(
                    f"{text} on rank {rank}" for rank, text in zip(compared, shown, strict=True)
                )
                return (
                    f"{label} is {each}, so the parameters of the ranks drift apart",
                    next((r for of, r in _REMEDIES if label.startswith(of)), _SAME_OPTIONS),
                )
    raise AssertionError("equal steps have equal digests")


def _counted(reports: Sequence[Any]) -> str:
    times = [
        name
        + (f" {count} times" if count > 1 else "")
        + (" by gradients of no_sync() that were not reduced" if unsent else "")
        for name, unsent, count, *_ in reports
    ]
    return " and ".join(times) or "none"


def _shown(values: Sequence[Any]) -> list[str]:
    texts = iter(told_apart([one for one in values if isinstance(one, float)]))
    return [next(texts) if isinstance(one, float) else str(one) for one in values]
