"""Several backward passes for one step, where each pass is reduced by itself.

After a pass `.grad` holds the mean over all ranks. If the program runs another pass before it
clears the gradients, autograd adds to that mean. When every rank has data, and no loss is weighted,
the mean of such sums is right as it is: the first mean is the same on all ranks. But a rank that
has run out of data contributes zeros, and weights divide each pass by a number of its own. So in
these cases the earlier mean is set aside while the pass is reduced, and added at its end. It takes
the memory of the gradients for that time.

A pass that autograd enters elsewhere than at the model's output, gradients that no_sync has added
to a mean, and tensors that the program has put in the place of gradients cannot be told apart any
more (`MIXES`). They are refused where they would be wrong.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

import torch

from chorusline.collectives.contract.errors import listed, name_ranks

from ...process.agreement import Agreement, Note
from .gradient_bucket import Gradients
from .local_steps import LocalSteps


class Pass(enum.Enum):
    """The state of a backward pass."""

    NONE = "no such pass runs"
    QUIET = "a pass in no_sync runs, whose gradients only add up; autograd will report the end"
    ENTERED = "the output has its gradient, no parameter has; autograd will report the end"
    SENDING = "parameters get gradients, full buckets are launched; autograd will report the end"
    SENDING_AT_END = "parameters get gradients; autograd will report the end, which launches them"
    KEEPING = "parameters get gradients, which `step()` will send; autograd will report the end"


_IN_NO_SYNC = (
    "a backward pass in no_sync() was added to gradients that an earlier pass had reduced already"
)
_OUTSIDE_LAST = (
    "Run the earlier passes of a step in no_sync(), and only the last one outside; or clear the "
    "gradients before"
)
_INSIDE = (
    "a backward pass did not begin at an output of this DistributedDataParallel, so its "
    "gradients cannot be distinguished from those that an earlier pass had reduced already: the "
    "loss comes from the module inside (net(x), model.module(x)), from a parameter itself, from a "
    "tensor that the output computes only on access, or from another model that has one of the "
    "same parameters"
)
_REPLACED = (
    "the program has set .grad to tensors of its own before a backward pass, so they cannot be "
    "distinguished from gradients that an earlier pass had reduced already"
)
_CHANGE_LAST = (
    "Add a term to the loss for what the gradients shall also contain, or change them after the "
    "last pass of a step, in a function that calls optimizer.step() too and is in "
    "Join(..., step_along=[function])"
)
_CALL_MODEL = (
    "Call the wrapped model, model(x), and compute the loss from tensors that its output holds. "
    "Models that share a parameter belong in one module, and that in one DistributedDataParallel"
)


class EarlierPasses:
    """What one rank holds of the passes before the present one.

    has_mean: whether a pass was reduced, whose mean `.grad` may still hold.
    kept: the parameters whose gradients were not cleared since, where the present pass is added to
        any. A body may clear those of one of several optimizers only.
    """

    def __init__(self, gradients: Gradients) -> None:
        self.has_mean = False
        self.kept: Collection[int] = ()
        self._gradients = gradients
        self._kind: Note | None = None  # CONTINUES or MIXES; None: no pass was added to a mean
        self._why: Note | None = None  # it MIXES: BEGINS_INSIDE or REPLACED; None: in no_sync
        self._aside: dict[int, torch.Tensor] = {}
        self._weights: dict[int, float] = {}  # by parameter, of the losses of the mean

    def forget(self) -> None:
        self.has_mean = False
        self._kind, self._aside, self._weights = None, {}, {}
        self._why, self.kept = None, ()

    def described_means(self, usage: Sequence[bool], keeps_own: bool) -> list[float]:
        """For other ranks: by parameter, one more than the weight of the mean that `.grad` holds; 0
        for none, and -1 where it holds what is not a mean (keeps_own)."""
        weights = self._weights
        return [
            (-1.0 if keeps_own else 1.0 + weights.get(number, 0.0)) if is_held else 0.0
            for number, is_held in enumerate(usage)
        ]

    def take_means(self, means: Sequence[float]) -> None:
        """`.grad` holds another rank's means from now on. means: as it describes them."""
        self.forget()
        self._weights = {number: one - 1.0 for number, one in enumerate(means) if one > 0}
        self.has_mean = bool(self._weights)

    def begin_pass(
        self,
        *,
        set_aside: bool,
        has_leftover: bool,
        begins_inside: bool = False,
        cleared: Collection[int] = (),
    ) -> None:
        """A pass begins, and no gradient has arrived yet.

        cleared: the parameters whose gradients the program has cleared since the pass before.
        begins_inside: it began inside the model, so some gradients have arrived already.
        has_leftover: gradients from no_sync are still to be sent, so this is not the first pass
            since the mean.
        """
        held = {
            number: parameter.grad.detach()
            for number, parameter in enumerate(self._gradients.parameters)
            if parameter.grad is not None
        }
        if not held or (self.has_mean and _are_zero(held.values())):
            self.forget()  # The program has cleared them, to None or to zeros.
        # What is held is local, and its sum with this pass is what is reduced.
        elif not self.has_mean or has_leftover:
            return
        # Of a gradient that the program has made itself nobody knows whether all ranks have it.
        elif any(map(self._gradients.is_replaced, held)):
            self._kind, self._why = Note.MIXES, Note.REPLACED
        # Sent along with the pass, a mean of all ranks stays that mean; the vote tells of it.
        elif not set_aside:
            self._kind, self._why = Note.MIXES, Note.BEGINS_INSIDE if begins_inside else None
        else:
            self._kind = Note.CONTINUES
            self._aside = {number: gradient.clone() for number, gradient in held.items()}
            self.kept = {*range(len(self._gradients.parameters))}.difference(cleared)
            for gradient in held.values():
                gradient.zero_()

    def restore(self) -> None:
        """The pass has brought no parameter a gradient, as `torch.autograd.grad` does."""
        for number, aside in self._aside.items():
            gradient = self._gradients.parameters[number].grad
            assert gradient is not None
            gradient.detach().add_(aside)
        self._aside, self.kept = {}, ()
        # What a pass in no_sync has mixed stays so.
        self._kind = None if self._kind is Note.CONTINUES else self._kind

    def notes_on_leftovers(self) -> list[Note]:
        """What this rank says of gradients from no_sync, when it has run out of data."""
        return [Note.MIXES] if self._kind is Note.MIXES else []

    def notes(self, steps: LocalSteps) -> list[Note]:
        """What this rank's vote says of its pass. steps: since the pass before."""
        noted = [self._kind] if self._kind is not None else []
        if self._why is not None:
            noted.append(self._why)
        has_stepped = steps or (self._kind is None and steps.were_skipped)
        if not has_stepped and (steps.have_been_seen or self._kind is not None):
            noted.append(Note.UNSTEPPED)
        return noted

    def end_pass(self, agreement: Agreement) -> None:
        """The buckets hold the mean of the present pass: add that of the passes before."""
        kept = {number for number, ranks in enumerate(agreement.kept) if ranks}
        weights = {number: self._weights.get(number, 0.0) for number in kept}
        weight = agreement.weight
        # A rank without data does not clear what the others clear: what they keep counts.
        for number, before in weights.items():
            view, aside, share = self._gradients.views[number], self._aside.get(number), 1.0
            if before and weight:  # The mean over the samples of all passes.
                view.mul_(weight / (before + weight))
                share = before / (before + weight)
            if aside is not None:
                view.add_(aside, alpha=share)
        self._aside, self._kind, self._why, self.kept = {}, None, None, ()
        self.has_mean = True
        numbers = range(len(self._gradients.parameters)) if weight else kept
        self._weights = {number: weights.get(number, 0.0) + weight for number in numbers}


def _are_zero(gradients: Collection[torch.Tensor]) -> bool:
    # On a GPU the host would have to wait; there zeros are set aside as well.
    return not any(one.device.type != "cpu" or bool(one.any()) for one in gradients)


def _named(numbers: Sequence[int], names: Sequence[str]) -> str:
    return listed([names[number] for number in numbers], 3)


def check_passes(agreement: Agreement, num_ranks: int, names: Sequence[str]) -> None:
    """Raise RuntimeError, on all ranks alike, for passes whose mean would be wrong. names: of the
    parameters."""
    if not any(agreement.notes):
        return
    # Each of these holds on all ranks alike, since all read the same votes.
    live = list(agreement.live)
    mixes, is_alone = agreement.says(Note.MIXES), agreement.says(Note.MIXES) < len(live)
    # A mean that is reduced once more stays the mean, if all ranks have it, and as much weight.
    if mixes and (agreement.weight or is_alone or len(live) < num_ranks):
        absent = [rank for rank in range(num_ranks) if rank not in live]
        why = "losses are weighted"
        if absent:
            why = f"{name_ranks(absent, 'has', 'have')} run out of data"
        elif is_alone:
            why = f"only {mixes} of the ranks {live} did so"
        what, remedy = _IN_NO_SYNC, _OUTSIDE_LAST
        if agreement.says(Note.BEGINS_INSIDE):
            what, remedy = _INSIDE, _CALL_MODEL
        elif agreement.says(Note.REPLACED):
            what, remedy = _REPLACED, _CHANGE_LAST
        raise RuntimeError(f"{what}. Since {why}, the mean would be wrong. {remedy}")
    # zero_grad() on some ranks only: their means would be of one pass, and those of others of two.
    if 0 < (continuing := agreement.says(Note.CONTINUES)) < len(live):
        raise RuntimeError(
            f"{continuing} of the ranks {live} did not clear their gradients before this backward "
            "pass, and the others did, so their gradients would differ. All ranks with data must "
            "call zero_grad() between the same two passes"
        )
    if unlike := [number for number, ranks in enumerate(agreement.kept) if 0 < ranks < len(live)]:
        raise RuntimeError(
            f"some of the ranks {live} did not clear the gradients of {_named(unlike, names)} "
            "before this backward pass, and others did. All ranks with data must clear the same "
            "gradients between the same two passes"
        )
