"""Libraries of other people, which the tests of this folder use where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

import torch


@cache
def can_import(name: str) -> bool:
    """Whether a library is installed and fits; afterwards it can be imported."""
    if importlib.util.find_spec(name) is None:
        return False
    if name == "torchvision":
        _import_torchvision()
        return True
    # timm needs torchvision; transformers, and peft with it, import it where it is installed.
    if name in ("timm", "transformers", "peft"):
        return can_import("torchvision") or name != "timm"
    return True


def _import_torchvision() -> None:
    """A build for another torch lacks its operators, whose names its modules use when imported."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        operators = _declared("nms", "qnms")
        importlib.import_module("torchvision").operators_that_are_declared = operators


def _declared(*names: str) -> torch.library.Library:
    """They exist as long as the returned object."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in names:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
