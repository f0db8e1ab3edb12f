"""All optimizers of five libraries, and one training that any of them can do."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import chorusline as cl
from tests.real_models.libraries import can_import

LIBRARIES = ("torch.optim", "timm.optim", "pytorch_optimizer", "schedulefree", "prodigyopt")
STEPS = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "pytorch_optimizer.BSAM": {"num_data": 64},
    "pytorch_optimizer.Ranger21": {"num_iterations": STEPS},
    "timm.optim.SGDP": {"lr": 0.01},
}
"""Arguments without which an optimizer cannot be made."""
MATRICES_ONLY = ("torch.optim.Muon", "pytorch_optimizer.SpectralSphere")
"""Optimizers that refuse other parameters than matrices."""
USE_MUON = ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")
"""Optimizers of pytorch_optimizer whose groups say whether they hold matrices."""


def names() -> list[str]:
    """`library.class` of each optimizer, under the first library that has it; `library` alone for
    one that is not installed."""
    found: dict[type, str] = {torch.optim.Optimizer: ""}
    missing = []
    for library in LIBRARIES:
        if not can_import(library.split(".")[0]):
            missing.append(library)
            continue
        module = importlib.import_module(library)
        for name in sorted(dir(module)):
            value = getattr(module, name)
            if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer):
                found.setdefault(value, f"{library}.{value.__name__}")
    return [name for name in found.values() if name] + missing


def optimizer_named(name: str) -> type[torch.optim.Optimizer]:
    library, _, kind = name.rpartition(".")
    assert can_import(library.split(".")[0])
    found: type[torch.optim.Optimizer] = getattr(importlib.import_module(library), kind)
    return found


class Small(torch.nn.Module):
    """Parameters of no, one, two and four dimensions; some too large for one shard."""

    def __init__(self, matrices_only: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(48, 90, bias=not matrices_only)
        self.last = torch.nn.Linear(90, 3, bias=not matrices_only)
        self.others = torch.nn.ModuleList()
        if not matrices_only:
            self.others.append(torch.nn.Conv2d(3, 8, 3))
            self.others.append(torch.nn.BatchNorm2d(8))
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.others:
            conv, norm = self.others
            x = torch.cat([x, self.scale * norm(conv(x.view(-1, 3, 4, 4))).mean((2, 3))], 1)[
                :, -48:
            ]
        return self.last(torch.tanh(self.first(x))).square().mean()


def groups_of(module: torch.nn.Module, name: str) -> list[dict[str, Any]]:
    """Two groups: matrices, and all else; or two of matrices."""
    given = list(module.parameters())
    split = [[p for p in given if p.dim() >= 2], [p for p in given if p.dim() < 2]]
    if not split[1]:
        split = [given[:1], given[1:]]
    groups: list[dict[str, Any]] = [{"params": params} for params in split]
    library, _, kind = name.rpartition(".")
    if library == "pytorch_optimizer" and kind in USE_MUON:
        for use_muon, group in zip((True, False), groups, strict=True):
            group["use_muon"] = use_muon
    return groups


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what the libraries print and warn of."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def train(group: cl.Group | None, name: str, num_ranks: int) -> tuple[Any, Any, str]:
    """The parameters and the optimizer's whole state, and how its state is cut; or why it is not.

    group: None for one process, which takes the batches of all ranks.
    """
    kind, options = optimizer_named(name), OPTIONS.get(name, {})
    module = Small(name in MATRICES_ONLY)
    optimizer: Any
    with quietly():
        if group is None:
            model: torch.nn.Module = module
            optimizer = kind(groups_of(module, name), **options)
        else:
            model = cl.DistributedDataParallel(module, group)
            try:
                optimizer = cl.ZeroRedundancyOptimizer(groups_of(module, name), kind, **options)
            except (ImportError, TypeError, ValueError) as error:
                return None, None, f"{type(error).__name__}: {error}"
        if hasattr(optimizer, "train"):
            optimizer.train()
        seen: list[torch.Tensor] = []  # what an evaluation in the middle would use
        ranks = range(num_ranks) if group is None else [group.rank]
        for step in range(STEPS):
            for rank in ranks:
                drawn = torch.Generator().manual_seed(100 * step + rank)
                loss = model(torch.randn(5, 48, generator=drawn))
                (loss / (num_ranks if group is None else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == STEPS // 2 and hasattr(optimizer, "eval"):
                optimizer.eval()
                seen += [p.detach().clone() for p in module.parameters()]
                optimizer.train()
    how = ""
    if group is not None:
        how = "flat" if optimizer._engine.shard.elementwise else "whole"
        optimizer.consolidate_state_dict(0)
    state = None if group is not None and group.rank else optimizer.state_dict()["state"]
    return [*seen, *(p.detach().clone() for p in module.parameters())], state, how


def train_alone(_: cl.Group, name: str, num_ranks: int) -> tuple[Any, Any, str]:
    """As one process does it, in a process of one thread, like the ranks."""
    return train(None, name, num_ranks)
