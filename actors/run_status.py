"""Where a rank stands in its run, between its training thread and its control loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RunStatus:
    """The training thread writes all fields but `stop_is_wanted`, and the control loop reads them.
    Each field is one word, so nothing is locked.

    rank: in this run.
    stop_is_wanted: set by the control loop; this rank's next vote passes it on to all ranks.
    taken: optimizer steps in this run, on all ranks together.
    num_epochs: of the loop over `ctx.epochs`; None outside.
    epoch, batches_taken, batches_left: of the shard that is iterated; None outside.
    samples: that this rank has taken for training.
    has_joined: this rank has run out of data, and shadows the steps of others.
    waited_s: seconds for which steps waited for their gradients with nothing else to do.
    device_memory_bytes: of tensors on the GPU, when the training thread last looked.
    """

    rank: int | None = None
    stop_is_wanted: bool = False
    taken: int = 0
    num_epochs: int | None = None
    epoch: int | None = None
    samples: int = 0
    batches_taken: int = 0
    batches_left: int | None = None
    has_joined: bool = False
    waited_s: float = 0.0
    device_memory_bytes: int = 0
