"""The tensors of what a forward returns, whatever holds them."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.nn.Module)
"""These refer to more than what was computed."""
_MOST = 10_000
"""Objects that are looked into: an output may hold a whole data set."""


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """Those in sequences and mappings, as torch's tree functions see them, and in the attributes of
    dataclasses, namespaces and objects of the user's classes."""
    pending, seen = tree_leaves(output), set[int]()
    while pending:
        leaf = pending.pop()
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, (*_PLAIN, *_OPAQUE)) and id(leaf) not in seen:
            if len(seen) == _MOST:
                return
            seen.add(id(leaf))
            pending += tree_leaves(_attributes(leaf))


def _attributes(holder: Any) -> list[Any]:
    if isinstance(holder, Mapping):  # Of a class that torch's tree functions do not know.
        return [*holder.values()]
    if isinstance(holder, list | tuple | set | frozenset):
        return [*holder]
    slots = [
        name
        for kind in type(holder).__mro__
        for given in (vars(kind).get("__slots__", ()),)
        for name in ([given] if isinstance(given, str) else given)
    ]
    in_slots = [getattr(holder, name, None) for name in slots if name != "__dict__"]
    return [*getattr(holder, "__dict__", {}).values(), *in_slots]
