"""What `.grad` holds on one rank, and how often the program has cleared it (process/leftovers.py).

torch tells nobody that a gradient was cleared. `zero_grad` of the model and of its sharded
optimizer say so themselves. What else clears, `parameter.grad = None` or a plain optimizer's
`zero_grad`, is found before the next pass, and before a vote: a gradient that a pass has brought is
gone, or it was written to, and is zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable

import torch

from ...process.agreement import Agreement, Note
from ...process.leftovers import MOST_EDITS, LeftoverVote
from .gradient_bucket import GradientBucket, Gradients

ClearPattern = tuple[int, int, int]
"""When the ranks with data have cleared the gradients of their last step: the counts of it."""


class HeldGradients:
    """The gradients that one model holds on one rank.

    calls, passes, cleared_at, edits: as in LeftoverVote.
    cleared: the parameters whose means the program has cleared since the last pass.
    are_means: whether `.grad` holds means of all ranks, which programs do change (clipping).
    """

    def __init__(self, gradients: Gradients) -> None:
        self.perturbed: int | None = None
        """The crc32 of the parameters which the program has changed between the passes of a sharded
        step, probably by the gradients of the first; None: it has not."""
        self.are_means = True
        self.clears_to_zeros = False
        """Whether the program has cleared to zeros the last time: an optimizer steps by these, and
        not by None."""
        self._others_clear_to_zeros = False
        """The same of the ranks with data, where this one has run out of it."""
        self._begin()
        self._gradients = gradients
        self._held: set[int] = set()
        self._zeros: set[int] = set()
        """Of the held ones, those that hold zeros which this class has written."""
        self._witness: int | None = None
        """A held parameter whose gradient was not blank when it came; None: there is none, or every
        rank has data."""
        self._looks = False
        """Whether clears count in the pass that runs, or has run."""
        self.last_used: Collection[int] = ()
        """The parameters of which some rank had a gradient in the last step."""
        self.cleared: set[int] = set()
        self.clear_pattern: ClearPattern = self.counts
        """A model that is made again after a worker was lost takes it over: in its first steps a
        rank may have no data, and then it has to know what the others do."""
        self.taken_weight: float | None = None  # None: no loss was weighted
        """Sum of the weights of the losses whose gradients are held."""
        self._coming: list[list[float]] = []
        """Weights of the pass that runs, or comes next, each in a list of its own."""
        self._coming_in = -1
        """torch's number of that pass."""
        self._versions = 0
        """The sum of the versions of all parameters, at the first pass of a sharded step."""

    # -- the weights of the losses -----------------------------------------------------------------

    @property
    def weight(self) -> float | None:
        """Sum of the weights of the losses whose gradients are held, or come in the pass that runs,
        or runs next; None without any `weigh`."""
        if self.taken_weight is None and not self._coming:
            return None
        return (self.taken_weight or 0.0) + sum(weight for (weight,) in self._coming)

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self.take_weights()
        self.taken_weight = weight

    def weigh(self, weight: list[float]) -> None:
        """A pass has come to a loss. weight: of it; empty if it was taken with an earlier pass."""
        task = torch._C._current_graph_task_id()
        if task != self._coming_in:  # The pass before has brought no parameter a gradient.
            self._coming, self._coming_in = [], task
        if weight and not any(one is weight for one in self._coming):
            self._coming.append(weight)

    def take_weights(self) -> None:
        """The pass has brought gradients, so that the weights of its losses count, and once."""
        if self._coming:
            self.taken_weight = self.weight
            for one in self._coming:
                one.clear()
            self._coming = []

    def drop_weights(self, *, keeps_those_of: int | None = None) -> None:
        """A pass has brought no parameter a gradient: its losses may come once more.

        keeps_those_of: torch's number of the pass that runs; None: none does."""
        if self._coming_in != keeps_those_of:
            self._coming = []

    # -- passes and clears -------------------------------------------------------------------------

    def begin_pass(self, *, looks: bool) -> None:
        """A pass begins, and has brought no gradient yet. looks: whether clears count now."""
        self._looks = looks
        if looks or self.taken_weight is not None:
            self.look()
        if looks:
            self.mark_zeros()
        if not self.are_means:
            self._look_for_perturbation()
        self.passes += 1

    def _look_for_perturbation(self) -> None:
        """A program that clears the gradients of a pass unstepped, and has changed the parameters
        since, has used the gradients for that, as SAM does."""
        parameters = self._gradients.parameters
        versions = sum(parameter._version for parameter in parameters)
        if self.passes == 0:
            self._versions = versions
        elif versions != self._versions and self.perturbed is None:
            self.look()
            if self.cleared_at > 0:
                crc32 = 0
                for parameter in parameters:
                    content = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
                    crc32 = zlib.crc32(content.numpy().data, crc32)
                self.perturbed = crc32

    def has_come(self, number: int, bucket: GradientBucket) -> None:
        """A pass has brought this gradient."""
        self.take_weights()
        self._held.add(number)
        self._zeros.discard(number)
        bucket.held_version = bucket.flat._version
        if self._looks and self._witness is None:
            gradient = self._gradients.parameters[number].grad
            if gradient is not None and gradient.device.type == "cpu" and bool(gradient.any()):
                self._witness = number

    def hold(self, numbers: Collection[int]) -> None:
        """The ranks' means are there, for these parameters."""
        self._held, self._zeros, self.cleared = set(numbers), set(), set()
        # Gradients of several ranks may add up to nothing.
        if self._witness is not None and self._is_blank(self._witness):
            self._witness = None
        self.note_writes()

    def note_writes(self) -> None:
        """What was written to the buckets until now was not written by the program."""
        for bucket in self._gradients.buckets:
            bucket.held_version = bucket.flat._version

    def was_cleared(self, *, to_none: bool) -> None:
        """`zero_grad` was called, for all gradients."""
        # Where gradients are None, as after an earlier clear, they stay None.
        self.clears_to_zeros = not to_none and any(self._gradients.usage())
        self.calls += 1
        self.drop_weights()  # Of a pass that has failed.
        self._note_clear()

    def _note_clear(self) -> None:
        self.cleared_at, self.edits = self.passes, 0
        self._forget()

    def _forget(self) -> None:
        self._held.clear()
        self._zeros.clear()
        self._witness = None
        self.taken_weight = None

    def look(self) -> None:
        """Find out what the program has done to the gradients since the last pass."""
        gone: set[int] = set()
        is_edited, to_zeros = False, True
        # Writes to `.grad.data` are counted by nobody.
        is_blank = self._witness is not None and self._is_blank(self._witness)
        only_ours = self._held == self._zeros
        for bucket in self._gradients.buckets:
            known = (bucket.held_version, bucket.launched_version)
            is_written = bucket.flat._version not in known
            for number in self._held.intersection(bucket.views):
                gradient = self._gradients.parameters[number].grad
                if gradient is None:
                    to_zeros = False
                    gone.add(number)
                elif is_written or is_blank or self._gradients.is_replaced(number):
                    # Local gradients are seldom written to. To read means, the host would wait for
                    # the GPU in each step.
                    is_readable = not self.are_means or gradient.device.type == "cpu"
                    if is_readable and self._is_blank(number, only_ours=only_ours and is_written):
                        gone.add(number)
                    elif not (number in self._zeros and is_readable and not gradient.any()):
                        is_edited = True
            bucket.held_version = bucket.flat._version
        self.cleared |= gone
        # Zeros that stay, of a part that was cleared before, leave nothing of a gradient.
        if gone and gone >= (self._held - self._zeros or self._zeros):
            # A clear of a part, in another way, says nothing of what happens to the rest.
            self.clears_to_zeros = to_zeros
            self._note_clear()
        elif gone or is_edited:
            described = repr((self.edits, sorted(gone), is_edited)).encode()
            self.edits = zlib.crc32(described) % (MOST_EDITS - 1) + 1
            self._held -= gone
            self._zeros -= gone

    def mark_zeros(self) -> None:
        """Gradients that were cleared to zeros are held too, so that a second clear shows: another
        rank may hold what that one clears."""
        # On a GPU the host would have to wait.
        self._hold_zeros(
            number
            for number, parameter in enumerate(self._gradients.parameters)
            if number not in self._held
            and parameter.grad is not None
            and parameter.grad.device.type == "cpu"
            and self._is_blank(number)
        )

    # -- steps -------------------------------------------------------------------------------------

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.calls, self.cleared_at, self.edits

    @property
    def expects_clear(self) -> bool:
        """Whether the program will clear the gradients before the coming step, as it did for the
        step before."""
        calls, cleared_at, _ = self.clear_pattern
        return calls > self.calls or cleared_at >= self.passes

    def begin(self, agreement: Agreement, *, knows_edits: bool = True) -> None:
        """The ranks have agreed on a step, or where each pass has a vote, on a pass. knows_edits:
        whether this rank has changed its gradients as the others have theirs since the last one."""
        live = [agreement.leftovers[rank] for rank in agreement.live]
        if live:
            self.clear_pattern = max(o.calls for o in live), max(o.cleared_at for o in live), 0
        self._begin()
        self.edits = 0 if knows_edits else MOST_EDITS

    def _begin(self) -> None:
        self.calls, self.passes, self.cleared_at, self.edits = 0, 0, -1, 0
        self.perturbed = None

    def leftovers(self, *, is_live: bool, holds: bool, hands_in: bool = False) -> LeftoverVote:
        has_left = holds and not is_live
        hands_in = hands_in and has_left
        usage = enumerate(self._gradients.usage() if hands_in else ())
        return LeftoverVote(
            is_live,
            self.calls,
            self.passes,
            self.cleared_at,
            self.edits,
            has_left,
            hands_in,
            is_blank=hands_in and all(number in self._zeros for number, held in usage if held),
        )

    def agreed(self, agreement: Agreement) -> None:
        """The ranks have agreed on a step, or a pass."""
        if agreement.live:
            self.last_used = [number for number, used in enumerate(agreement.used) if used]
            self._others_clear_to_zeros = agreement.says(Note.ZEROES) > 0

    def drop(self) -> None:
        """The other ranks have cleared their gradients, and this one has run out of data."""
        self._forget()
        if not self._others_clear_to_zeros:
            self._gradients.drop()
            return
        usage = enumerate(self._gradients.usage())
        self._hold_zeros(number for number, is_held in usage if is_held)

    def hold_zeros(self, numbers: Iterable[int]) -> None:
        """Where this rank holds no gradient of these parameters."""
        parameters = self._gradients.parameters
        self._hold_zeros(
            number
            for number in numbers
            if parameters[number].grad is None and parameters[number].requires_grad
        )

    def _hold_zeros(self, numbers: Iterable[int]) -> None:
        """Negative ones: they change no sum, and when the program clears them to zeros, it shows
        as if they had been gradients."""
        for number in numbers:
            self._gradients.parameters[number].grad = gradient = self._gradients.given(number)
            gradient.fill_(-0.0)
            self._held.add(number)
            self._zeros.add(number)
            self._witness = number if self._witness is None else self._witness
        self.note_writes()

    def _is_blank(self, number: int, *, only_ours: bool = False) -> bool:
        """Whether a gradient holds zeros alone; where it held our own, positive ones. only_ours: we
        wrote all of them, and the program has written to them: a product with 0 leaves a sign."""
        gradient = self._gradients.parameters[number].grad
        if gradient is None or bool(gradient.any()):
            return False
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        return only_ours or number not in self._zeros or not bool(real.signbit().any())
