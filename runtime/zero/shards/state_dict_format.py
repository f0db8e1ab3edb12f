"""The state dictionary of the plain optimizer, with parameters by number or by name.

The form by number is that of `torch.optim.Optimizer.state_dict()`. The form by name is that of
torch.distributed.checkpoint's `get_optimizer_state_dict`: names replace the numbers, in `state` and
in the groups, and groups and parameters may be in another order than the optimizer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from chorusline.collectives.contract.errors import listed

from ...process.option_numbers import copied_options


def plain_state(
    gathered: Mapping[int, dict[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The dictionary by number. gathered: the states, by id() of the parameter."""
    state: dict[int, dict[str, Any]] = {}
    plain, number = [], 0
    for options in groups:
        first = number
        for parameter in options["params"]:
            if id(parameter) in gathered:
                state[number] = gathered[id(parameter)]
            number += 1
        plain.append({**options, "params": list(range(first, number))})
    return {"state": state, "param_groups": plain}


def with_names(plain: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Convert a dictionary by number to one by name. Both share the tensors."""
    groups = []
    for saved in plain["param_groups"]:
        options = {k: v for k, v in saved.items() if k not in ("params", "param_names")}
        groups.append({**options, "params": [names[number] for number in saved["params"]]})
    return {
        "state": {names[number]: state for number, state in plain["state"].items()},
        "param_groups": groups,
    }


def match_state(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]
) -> tuple[dict[int, tuple[str, Mapping[str, Any]]], list[dict[str, Any]]]:
    """Find the saved state of each parameter in `groups`.

    state_dict: in either form; stays unchanged. names: of the parameters, by id().
    Returns two things: by id() of a parameter, its name for errors and its state; and a copy of the
    options of each group.

    Raises ValueError if groups or parameters differ.
    """
    by_name = any(isinstance(p, str) for g in state_dict["param_groups"] for p in g["params"])
    # Numbers mean the same groups in the same order, as in torch; names may be in other groups.
    saved = _by_our_groups(state_dict, groups, names) if by_name else state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of "
            "optimizer's group"
        )
    found = {}
    for ours, theirs in zip(groups, saved, strict=True):
        for parameter, key in zip(ours["params"], theirs["params"], strict=True):
            name = names.get(id(parameter))
            label = str(key) if by_name or name is None else f"{key} ({name})"
            # No state: the parameter has had no gradient so far.
            found[id(parameter)] = (label, state_dict["state"].get(key, {}))
    return found, copied_options(saved)


def _by_our_groups(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Saved groups rearranged like `groups`, each with the saved options of its parameters."""
    options_of = {
        name: {k: v for k, v in saved.items() if k not in ("params", "param_names")}
        for saved in state_dict["param_groups"]
        for name in saved["params"]
    }
    ours = [[parameter_name(p, names) for p in options["params"]] for options in groups]
    wanted = [name for group in ours for name in group]
    for what, differing in (
        ("lacks the parameters", sorted(set(wanted) - options_of.keys())),
        (
            "has parameters that the optimizer does not have:",
            sorted(options_of.keys() - set(wanted)),
        ),
    ):
        if differing:
            raise ValueError(f"loaded state dict {what} {listed(differing, 5)}")
    regrouped = []
    for group in ours:
        options = options_of[group[0]] if group else {}
        for name in group:
            # No single value would be right for a group that was two.
            if options_of[name] != options:
                raise ValueError(
                    f"{group[0]} and {name} are in one parameter group, but were saved with "
                    f"different options: {options} and {options_of[name]}"
                )
        regrouped.append({**options, "params": group})
    return regrouped


def parameter_name(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    """The parameter's name. Raises ValueError if it is not known."""
    name = names.get(id(parameter))
    if name is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has no name. Pass a chorusline "
            "DistributedDataParallel to the optimizer, or named_parameters()"
        )
    return name
