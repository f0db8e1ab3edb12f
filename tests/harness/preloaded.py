"""What ranks and programs of tests would import each by itself, imported where they are forked."""

from __future__ import annotations

import gc

import numpy  # noqa: F401
import torch._dynamo  # The first optimizer imports it.
import torch.distributed.checkpoint  # noqa: F401

import chorusline
import chorusline.actors
import chorusline.collectives.shared_memory.algorithms
import chorusline.collectives.transports.gloo

for _name in chorusline.__all__:
    try:
        getattr(chorusline, _name)
    except ModuleNotFoundError:  # A machine with a GPU may lack Ray.
        continue
gc.collect()
gc.freeze()
