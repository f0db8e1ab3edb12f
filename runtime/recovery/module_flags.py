"""What a program sets of its modules beside tensors: which parameters are trained
(`requires_grad`), and which modules are in training (`train()`, `eval()`).

They are noted between two batches. In the middle of a body they may be others for a while: in a
validation, or while one of two models is frozen for the step of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..process.between_runs import between_runs
from ..process.registry import Registered
from ..process.sharded_tensors import has_shards


@dataclass(frozen=True, slots=True)
class ModuleFlags:
    """requires_grad: by name of a parameter. training: by name of a module within the module."""

    requires_grad: Mapping[str, bool]
    training: Mapping[str, bool]

    def set(self, module: torch.nn.Module) -> None:
        """Of what has got another name, or is new, the flags stay."""
        for name, parameter in module.named_parameters():
            if self.requires_grad.get(name, parameter.requires_grad) != parameter.requires_grad:
                parameter.requires_grad_(self.requires_grad[name])
        for name, part in module.named_modules():
            part.training = self.training.get(name, part.training)


class _NotedModule:
    """The parameters and modules of one module, listed once: a list takes long for each batch."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._is_sharded = has_shards(module)
        # FSDP2 has looked at `requires_grad` when it sharded the parameters.
        self._parameters = {} if self._is_sharded else dict(module.named_parameters())
        self._modules = dict(module.named_modules())
        self.buffers: dict[str, torch.Tensor] = {}
        self.note()
        self.keep_buffers()

    def keep_buffers(self) -> None:
        """Of a model of fully_shard: a DistributedDataParallel keeps its own."""
        if self._is_sharded:
            self.buffers = {
                name: buffer.detach().clone() for name, buffer in self._module.named_buffers()
            }

    def note(self) -> None:
        self._trained = [one.requires_grad for one in self._parameters.values()]
        self._training = [one.training for one in self._modules.values()]

    @property
    def flags(self) -> ModuleFlags:
        """As they were at the last `note`."""
        return ModuleFlags(
            dict(zip(self._parameters, self._trained, strict=True)),
            dict(zip(self._modules, self._training, strict=True)),
        )


class NotedFlags:
    """The flags of registered modules between the last two batches, in one call of the function.

    Also the buffers of models of fully_shard after the last step that counts, and what the body has
    written to them since, up to the next batch. A forward pass changes them, and may be made again.
    """

    def __init__(self) -> None:
        self._parts: dict[str, _NotedModule] = {}
        self._listed: tuple[int, list[str]] = (-1, [])
        self._has_stepped = False

    def step_counts(self, registry: Iterable[Registered]) -> None:
        self._list(registry)
        self._has_stepped = True
        for parts in self._parts.values():
            parts.keep_buffers()

    def note(self, registry: Iterable[Registered]) -> None:
        self._list(registry)
        for parts in self._parts.values():
            parts.note()
            if self._has_stepped:
                parts.keep_buffers()
        self._has_stepped = False

    def _list(self, registry: Iterable[Registered]) -> None:
        # Once for each batch, so modules are looked through only when one has come or grown.
        listed = between_runs().num_registrations, [one.name for one in registry]
        if listed != self._listed:
            self._listed = listed
            self._parts = {
                one.name: _NotedModule(module)
                for one in registry
                if (module := _module_of(one)) is not None
            }

    def by_name(self) -> dict[str, ModuleFlags]:
        """By name of the module; empty before the second batch."""
        return {name: parts.flags for name, parts in self._parts.items()}

    def buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """By name of a model of fully_shard; empty before the first step."""
        return {name: parts.buffers for name, parts in self._parts.items() if parts.buffers}


def flags_of(registry: Iterable[Registered]) -> dict[str, ModuleFlags]:
    """The present flags, by name of the module."""
    return {
        one.name: _NotedModule(module).flags
        for one in registry
        if (module := _module_of(one)) is not None
    }


def _module_of(entry: Registered) -> torch.nn.Module | None:
    """The module whose flags are equal on all ranks; None for another object."""
    module = entry.object
    if not isinstance(module, torch.nn.Module) or entry.per_rank:
        return None
    return module
