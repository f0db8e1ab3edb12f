"""Which optimizers can be sharded, how finely, and what their options are."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from chorusline.collectives.contract.errors import with_article
from chorusline.collectives.group import Group

from ...process.between_runs import between_runs
from ...process.option_numbers import entries, is_number, plain
from .optimizer_trial import Shardability, compared, is_known, trial_groups, try_out
from .parameter_bucket import has_own_format

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Optimizers whose update of an element depends on that element alone, so any cut is exact. For all
others, subclasses of these too, a trial finds out (optimizer_trial.py)."""

_REFUSED = {
    torch.optim.LBFGS: (
        "its line search evaluates the closure with all parameters at once, and its directions "
        "are inner products over all of them"
    ),
    torch.optim.SparseAdam: "only dense gradients are reduced; use Adam and dense embeddings",
}


_OPTIONS = {
    "learning_rate": "write lr=",
    "process_group": "write group=",
    "overlap_with_ddp": "leave it out: step() comes after the backward pass",
}
"""Names that are not those of an optimizer's options, and what to write."""

_NO_PARAMETERS = {
    "model": "a model",
    "module": "a model",
    "optimizer": "an optimizer",
    "base_optimizer": "an optimizer",
}
"""Names of a constructor's first argument, and what it is."""


def check_arguments(
    params: object, optimizer_class: object, group: object, defaults: Mapping[str, Any]
) -> None:
    """Raises TypeError, with what to write, for arguments that are mistaken for others."""
    if isinstance(optimizer_class, torch.optim.Optimizer):
        kind = type(optimizer_class).__name__
        raise TypeError(
            f"optimizer_class must be a class, got an optimizer; write "
            f"ZeroRedundancyOptimizer(model, torch.optim.{kind}, lr=...), which makes its own"
        )
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            f"optimizer_class must be a class of optimizers, such as torch.optim.AdamW, got "
            f"{optimizer_class!r}"
        )
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"params is {with_article(type(params))} that chorusline has not wrapped; write "
            "ZeroRedundancyOptimizer(DistributedDataParallel(module), ...). If your own code makes "
            "the gradients equal on all ranks, pass module.parameters()"
        )
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"group must be a chorusline Group, got {type(group).__name__}")
    known = inspect.signature(optimizer_class).parameters
    # By name alone: what such a class does with parameters is an error deep inside of it.
    first = next(iter(known), "")
    if first in _NO_PARAMETERS:
        raise TypeError(
            f"{optimizer_class.__name__} cannot be sharded: it takes {_NO_PARAMETERS[first]}, not "
            "parameters, and shards are made of these. Use it without ZeroRedundancyOptimizer, on "
            "a DistributedDataParallel"
        )
    for name, instead in _OPTIONS.items():
        if name in defaults and name not in known:
            raise TypeError(f"{optimizer_class.__name__} has no option {name!r}; {instead}")


def check_dense(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for a sparse parameter."""
    for number, options in enumerate(groups):
        for parameter in options["params"]:
            if parameter.layout is not torch.strided:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} in group {number} is "
                    f"{parameter.layout}, and shards are cut from dense parameters only; use "
                    "parameter.to_dense(), or a separate optimizer without "
                    "ZeroRedundancyOptimizer"
                )


def check_own_memory(
    parameters: Sequence[torch.nn.Parameter], named: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Raises ValueError for a parameter that shares memory with another tensor: it moves to other
    memory, in which a step of the one does not change the other.

    parameters: of the optimizer. named: these, and what else the module has."""
    own = {id(parameter) for parameter in parameters}
    ranges = [
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name, tensor)
        for name, tensor in named
        # Of others the addresses between the first element and the last may be another's.
        if tensor.numel() and (tensor.is_contiguous() or has_own_format(tensor))
    ]
    ranges.sort(key=lambda one: one[:4])
    for (device, _, end, name, one), (at, begin, _, other_name, other) in itertools.pairwise(
        ranges
    ):
        # A parameter that is given twice is warned of.
        if device == at and begin < end and one is not other and {id(one), id(other)} & own:
            raise ValueError(
                f"{name} and {other_name} share memory, and a ZeroRedundancyOptimizer moves the "
                "parameters to memory of its own, where a step of one would not change the other. "
                "Make them one Parameter, as in decoder.weight = encoder.weight, or copy one, "
                ".clone()"
            )


def check_shardable(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Raises ValueError, with the reason, for an optimizer that cannot be sharded."""
    for refused, reason in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise ValueError(f"{optimizer_class.__name__} cannot be sharded: {reason}")


def verdict_on(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> Shardability:
    """How finely the optimizer's state may be cut. groups: with all options.

    The answer is remembered. Raises ValueError, with the reason and what to use instead, for an
    optimizer that cannot be sharded.
    """
    if optimizer_class in ELEMENTWISE:
        return Shardability(elementwise=True)
    tried = trial_groups(groups)
    known = between_runs().verdicts.setdefault(optimizer_class, {})
    key = compared((tried, defaults))
    verdict: Shardability | None = known.get(key)
    if verdict is None:
        verdict = try_out(optimizer_class, tried, defaults)
        # Objects without a value of their own may be changed by the program: tried each time.
        if is_known(key):
            known[key] = verdict
    if verdict.refusal:
        raise ValueError(verdict.refusal)
    return verdict


def complete_options(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[dict[str, Any]],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Add the optimizer's defaults to the groups, in place, because schedulers read them there;
    returns the defaults.

    They come from an optimizer over empty tensors. It makes no state, and it raises its errors for
    unsupported options or dimensions on all ranks, not only on those that own the parameter.
    """
    empty = [
        {
            **options,
            "params": [
                torch.nn.Parameter(p.new_empty((0,) * max(1, p.dim()))) for p in options["params"]
            ],
        }
        for options in groups
    ]
    try:
        probe = optimizer_class(empty, **defaults)
    except Exception:
        optimizer_class([dict(options) for options in groups], **defaults)  # It names real shapes.
        raise
    for options, complete in zip(groups, probe.param_groups, strict=True):
        for name, value in complete.items():
            options.setdefault(name, value)
    return probe.defaults


def describe_parameters(
    groups: Sequence[Mapping[str, Any]],
    first_group: int,
    defaults: Mapping[str, Any],
    verdict: Shardability,
) -> list[str]:
    """One text per parameter with all that must be equal on all ranks: shape, dtype, options that
    are plain values, and the verdict. first_group: the number of groups[0]."""
    cut = "cut anywhere" if verdict.elementwise else "never cut"
    descriptions = []
    for number, options in enumerate(groups, start=first_group):
        # Other objects are left out: their texts may differ from process to process.
        options_alike = {
            name: plain(value)
            for name, value in options.items()
            if name in defaults and (isinstance(value, str) or any(map(is_number, entries(value))))
        }
        text = "; ".join(f"{name} {value}" for name, value in sorted(options_alike.items()))
        descriptions += [
            f"{tuple(p.shape)} {p.dtype}, {'trainable' if p.requires_grad else 'frozen'}, in "
            f"group {number}; {text}; {cut}"
            for p in options["params"]
        ]
    return descriptions
