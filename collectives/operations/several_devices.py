"""What is not there on purpose: one process that moves tensors of several devices."""

from __future__ import annotations

import torch


def not_a_tensor(given: object, argument: str) -> Exception:
    """The error for `given` where a tensor belongs.

    torch had operations on one tensor per device (`all_reduce_multigpu`) and has removed them;
    ray.util.collective has them still. Who comes from there is told the way.
    """
    if isinstance(given, list | tuple):
        devices = sorted({str(t.device) for t in given if isinstance(t, torch.Tensor)})
        if len(devices) > 1:
            return ValueError(
                f"{argument} holds tensors on {', '.join(devices)}, but a rank has one device. "
                "Start one rank per device and pass each its own tensor: docs/collectives.md, "
                "'One rank, one device'"
            )
    return TypeError(
        f"{argument} must be a torch.Tensor, a numpy array or something with __dlpack__, got "
        f"{type(given).__name__}"
    )
