"""What a train function has made that goes from one generation to the next with it.

Sharded optimizers and models, numbered in the order of their making, which is alike on all ranks.
Those that the user has dropped leave a gap.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

from actors.messages import DROPPED, Progress

from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer


class LiveObjects:
    """Of one rank; of the function as it runs now."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[ZeroRedundancyOptimizer]] = []
        self._models: list[weakref.ref[DistributedDataParallel]] = []
        self.stepped_last: ZeroRedundancyOptimizer | None = None
        """Its step is over here. Others may still be in it, and need what this rank holds, also
        when the function has returned; they have ended it when another step is over."""

    def begin(self) -> None:
        """The function runs, and makes all anew."""
        for model in self.models().values():
            model.let_go()
        self._optimizers, self._models = [], []
        self.stepped_last = None

    def add_optimizer(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))

    def add_model(self, model: DistributedDataParallel) -> None:
        self._models.append(weakref.ref(model))

    def optimizers(self) -> dict[int, ZeroRedundancyOptimizer]:
        """By number, those that are still there."""
        return {n: one for n, made in enumerate(self._optimizers) if (one := made())}

    def models(self) -> dict[int, DistributedDataParallel]:
        """As `optimizers`."""
        return {n: one for n, made in enumerate(self._models) if (one := made())}

    def progress(self) -> list[Progress]:
        """Of the optimizers, the dropped ones too."""
        return [one.progress if (one := made()) else DROPPED for made in self._optimizers]

    def catch_up(self, progress: Sequence[Progress]) -> None:
        """Take the steps that others have seen the ballots of. progress: of the optimizers, as it
        was decided."""
        for number, optimizer in self.optimizers().items():
            optimizer.catch_up(progress[number])

    def launch_again(self, passes: Sequence[Mapping[int, int]]) -> None:
        """Send what was kept of steps that do not count yet, in the order of the first time, in
        which ranks that are not as far yet will launch. passes: by rank, of each model that it has
        how often its gradients were sent.

        Who is a pass behind others holds gradients that nobody will step with: a loss of one model
        that went through another one, whose own next pass the others have sent already.
        """
        models = self.models()
        kept = [
            (bucket.launch_number, number, bucket)
            for number, model in models.items()
            if all(number in one for one in passes)
            and model.reducer.num_passes == max(one[number] for one in passes)
            for bucket in model.reducer.kept()
        ]
        for _, number, bucket in sorted(kept, key=lambda one: one[0]):
            models[number].reducer.launch_again(bucket)
