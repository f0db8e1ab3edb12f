"""What belongs to a group is not copied or pickled: a sentence says what to save in its place."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import chorusline as cl
from chorusline.actors.parcels.pickling import pickled

WAYS: dict[str, Callable[[Any], object]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda value: torch.save(value, io.BytesIO()),
    "as an argument": pickled,
}


class Grouped(torch.nn.Linear):
    """A layer with a group of its own, as one for tensor parallelism has."""

    def __init__(self, group: cl.Group) -> None:
        super().__init__(4, 3)
        self.group = group


def objects_of(group: cl.Group) -> dict[str, tuple[Any, str]]:
    """Each with the remedy."""
    model = cl.DistributedDataParallel(Grouped(group), group)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {
        "model": (model, r"copy model\.module"),
        "optimizer": (optimizer, r"consolidate_state_dict\(\) on all ranks and then state_dict"),
        "schedule": (schedule, r"consolidate_state_dict\(\) on all ranks and then state_dict"),
        "scaler": (cl.GradScaler(optimizer), r"save scaler\.state_dict\(\)"),
        "state": (optimizer.state, r"To read it, consolidate_state_dict\(\) and state_dict\(\)"),
        "state of one": (optimizer.state[model.module.weight], "To read it, consolidate_state_d"),
        "group": (group, r"in a train function ctx\.group"),
        "layer": (model.module, r"in a train function ctx\.group"),
    }


@pytest.mark.parametrize("way", WAYS)
def test_what_belongs_to_a_group_says_how_to_save_it(way: str, alone: cl.Group) -> None:
    for name, (one, says) in objects_of(alone).items():
        # A schedule itself is an object of this process; a group is the same in a copy.
        if (way, name) == ("copy", "schedule") or ("copy" in way and name in ("group", "layer")):
            continue
        with pytest.raises((TypeError, RuntimeError), match=says):
            WAYS[way](one)


def test_a_copy_of_a_layer_has_its_group(alone: cl.Group) -> None:
    assert copy.copy(alone) is copy.deepcopy(alone) is alone
    layer = Grouped(alone)
    average = AveragedModel(layer)
    assert average.module.group is alone and average.module.weight is not layer.weight
