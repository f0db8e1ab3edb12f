"""The tensors of what a forward returns, whatever holds them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
_OPAQUE = (type, types.ModuleType)
"""These refer to more than what was computed."""
_OF_ANY_MODULE = frozenset(vars(torch.nn.Module()))
"""Parameters, buffers, other modules and hooks."""
_MOST = 10_000
"""Objects that are looked into: an output may hold a whole data set."""


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """Those in sequences and mappings, as torch's tree functions see them; in the attributes of
    dataclasses, namespaces, modules and objects of the user's classes; and in what functions,
    references, exceptions and futures hold."""
    pending, seen = tree_leaves(output), set[int]()
    while pending:
        leaf = pending.pop()
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, (*_PLAIN, *_OPAQUE)) and id(leaf) not in seen:
            # An output may refer to anything: half of a program is not looked through in each pass.
            if len(seen) == _MOST:
                return
            seen.add(id(leaf))
            pending += tree_leaves(_attributes(leaf))


def _attributes(holder: Any) -> list[Any]:
    if isinstance(holder, Mapping):  # Of a class that torch's tree functions do not know.
        return [*holder.values()]
    if isinstance(holder, list | tuple | set | frozenset):
        return [*holder]
    if isinstance(holder, torch.nn.Module):
        return [one for name, one in vars(holder).items() if name not in _OF_ANY_MODULE]
    if isinstance(holder, types.FunctionType):
        return [cell.cell_contents for cell in holder.__closure__ or () if _is_full(cell)]
    if isinstance(holder, types.MethodType):
        return [holder.__self__]
    if isinstance(holder, functools.partial):
        return [holder.func, *holder.args, *holder.keywords.values()]
    if isinstance(holder, weakref.ReferenceType):
        return [holder()]
    if isinstance(holder, asyncio.Future | torch.futures.Future):
        return _result_of(holder)
    if isinstance(holder, np.ndarray):
        return holder.ravel().tolist() if holder.dtype == object else []
    slots = [
        name
        for kind in type(holder).__mro__
        for given in (vars(kind).get("__slots__", ()),)
        for name in ([given] if isinstance(given, str) else given)
    ]
    in_slots = [getattr(holder, name, None) for name in slots if name != "__dict__"]
    arguments = holder.args if isinstance(holder, BaseException) else ()
    return [*getattr(holder, "__dict__", {}).values(), *in_slots, *arguments]


def _result_of(future: Any) -> list[Any]:
    if future.done():
        # What has failed, or was cancelled, says so where the program asks for it.
        with contextlib.suppress(Exception, asyncio.CancelledError):
            return [future.value() if isinstance(future, torch.futures.Future) else future.result()]
    return []


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # Of a variable that has no value yet.
        return False
