"""A step of a fixed global batch, as the data, the models and the optimizers of a rank see it.

`ctx.steps` (data/steps/) cuts the samples of a step into micro-batches, and deals these to the
ranks. Models sum the gradients of their micro-batches, and end the step together with the other
ranks. Data know no models, so a protocol here says what data ask of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The step under way. Equal on all ranks.

    number: of the step in its epoch.
    shares: of each micro-batch, its number of samples over that of a whole one.
    holders: of each micro-batch, the rank that computes it. The ranks are those of the present
        generation; when ranks are lost, theirs are dealt to others.
    deterministic: whether the sum has the same bits whatever the holders are.
    """

    number: int
    shares: tuple[float, ...]
    holders: list[int]
    deterministic: bool = True

    @property
    def num_micro_batches(self) -> int:
        return len(self.shares)

    def held_by(self, rank: int) -> list[int]:
        """The micro-batches of a rank, ascending."""
        return [number for number, holder in enumerate(self.holders) if holder == rank]


def in_common(signatures: Sequence[Sequence[str]], rank: int) -> list[int]:
    """Which models of `rank` all ranks have, in an order that is the same on all of them.

    signatures: by rank, of its living models, in the order of their making. A rank may still hold a
    model that is garbage elsewhere, from a function that has failed: of equal ones the latest made
    belong together.
    """
    counts = [Counter(of_rank) for of_rank in signatures]
    everywhere = {one: min(count[one] for count in counts) for one in counts[0]}
    chosen, taken = [], Counter[str]()
    for place in range(len(signatures[rank]) - 1, -1, -1):
        one = signatures[rank][place]
        if taken[one] < everywhere.get(one, 0):
            taken[one] += 1
            chosen.append((one, taken[one], place))
    return [place for *_, place in sorted(chosen)]


class SummableModel(Protocol):
    """A model whose gradients may be summed over the micro-batches of a step: it takes part in the
    step if a micro-batch uses it."""

    @property
    def signature(self) -> str:
        """Equal for the same model on all ranks."""

    @property
    def is_under_way(self) -> bool:
        """Whether the model takes part in the step under way."""

    @property
    def weight(self) -> float | None:
        """Sum of the weights of the losses since the last micro-batch; None without any."""

    @property
    def has_gradient(self) -> bool:
        """Whether a micro-batch of this rank has brought the model a gradient in this step."""

    @property
    def can_wait(self) -> bool:
        """Whether the model can wait at the end of a step for the ranks of another generation."""

    @property
    def buffers_have_changed(self) -> bool:
        """Whether the last micro-batch of the step was computed here, and has changed buffers."""

    def send_buffers(self, root: int) -> None:
        """Give all ranks the buffers that the last micro-batch has left on rank `root`."""

    def begin_step(self, plan: StepPlan) -> None:
        """A step begins. If the model takes part, what `.grad` holds is dropped then."""

    def begin_micro_batch(self) -> None:
        """The forward and backward passes of one micro-batch begin."""

    def end_micro_batch(self, number: int) -> None:
        """They have run: add the gradient to the sums of this rank."""

    def launch(self) -> None:
        """Begin to sum over all ranks; `end_step` does it otherwise. All ranks call it, or none."""

    def end_step(self, divisor: float) -> None:
        """Sum over all ranks, and agree on the step. Raises what ends a generation.

        divisor: the sum is divided by it."""

    def leave_steps(self) -> None:
        """The loop over the steps was left: backward passes reduce their gradients again."""

    def wait_for_next_generation(self, error: BaseException) -> bool:
        """Return in the next generation. Returns whether the step was agreed on; if not, some of
        its micro-batches may have been dealt again."""
