"""Predicts how many agreements come in a batch, and after which of them the optimizer steps.

A rank that looks ahead knows which batch is its last one, but not how many more steps the loop's
body takes in it. A rank without data takes part in the agreement at the end of each backward pass,
but does not see after which passes the other ranks step their optimizers. The loop's body does the
same in every batch, so both are predicted from the batches before. A wrong prediction is noticed in
a later agreement.
"""

from __future__ import annotations


class PassPattern:
    """The pattern of passes and steps of one joinable on one rank. It is kept from one Join to the
    next.

    of_batch: number of agreements in the current batch so far.
    """

    def __init__(self) -> None:
        self.of_batch = 0
        self._most_of_batch: int | None = None  # None: no batch is over
        self._of_step = 0  # passes since the last step, the present one included
        self._usual = 1  # passes of a step

    def begin(self) -> None:
        """A Join begins."""
        self._end_batch()
        self._of_step = 0

    def begin_batch(self) -> None:
        self._end_batch()

    def _end_batch(self) -> None:
        if self.of_batch:
            self._most_of_batch = max(self._most_of_batch or 1, self.of_batch)
        self.of_batch = 0

    @property
    def may_repeat(self) -> bool:
        """Whether the body may ask for another agreement after the next one, in one batch. In the
        very first batch it may; if it does not, the ranks take part in one needlessly."""
        return self._most_of_batch is None or self.of_batch + 1 < self._most_of_batch

    @property
    def expects_step(self) -> bool:
        """Whether an optimizer steps after the present pass."""
        return self._of_step >= self._usual

    def note(self, has_stepped: bool) -> bool:
        """A pass of the ranks with data is agreed on. has_stepped: whether an optimizer of theirs
        has stepped since their pass before. Returns whether that was expected."""
        was_expected = self._of_step == 0 or has_stepped == self.expects_step
        if has_stepped and self._of_step:
            self._usual = self._of_step
            self._of_step = 0
        # One more pass in a row than any step has had: the usual number was too small.
        elif not has_stepped:
            self._usual = max(self._usual, self._of_step + 1)
        self._of_step += 1
        return was_expected
