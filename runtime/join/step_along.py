"""What a joined rank does beside shadowing a step: the objects of `Join(..., step_along=[...])`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from chorusline.collectives.contract.errors import with_article

Follower = Callable[[], object]


def followers_of(given: object, joinables: Sequence[object]) -> list[Follower]:
    """What a joined rank calls in each step that it shadows, for step_along=given.

    Raises TypeError for what is no list of objects with a step(), functions and AveragedModels;
    ValueError for an object that is listed twice, and for an AveragedModel whose model the Join
    does not have, or does not keep up to date.
    """
    takes = isinstance(given, Sequence) and not isinstance(given, str)
    if not takes or not all(hasattr(each, "step") or callable(each) for each in given):  # type: ignore[attr-defined]
        got = repr(given) if isinstance(given, list | tuple | str) else with_article(type(given))
        raise TypeError(
            "step_along takes a list of objects with a step(), as in Join([model], "
            f"step_along=[optimizer, schedule]); got {got}. Functions without arguments, and an "
            "AveragedModel, are also possible"
        )
    assert isinstance(given, Sequence)
    _check_listed_once(given)
    return [_follower(number, each, given, joinables) for number, each in enumerate(given)]


def _check_listed_once(given: Sequence[Any]) -> None:
    """Raises ValueError for one object at two places, perhaps by its method. A function may have
    two: the body may call it before a step and after it."""
    does = [_step_or_update(each) for each in given]
    for number, method in enumerate(does):
        if method is not None and (first := does.index(method)) < number:
            verb = getattr(method, "__name__", "step")
            raise ValueError(
                f"step_along lists one {type(given[first]).__name__} at places {first} and "
                f"{number}, and a rank that has run out of data would call its {verb}() as often "
                f"in each step. List it once; if the body does so in a batch, write a function "
                "that makes all these calls, call that in the body, and list the function"
            )


def _step_or_update(each: Any) -> Any:
    """The method that a rank without data calls; None for a function, unless it is one's `step`."""
    if isinstance(each, AveragedModel):
        return each.update_parameters
    return getattr(each, "step", each if getattr(each, "__name__", "") == "step" else None)


def _follower(number: int, each: Any, given: Sequence[Any], joinables: Sequence[Any]) -> Follower:
    if isinstance(each, AveragedModel):
        model = _averaged(each, joinables)
        if model._ends_step() and not any(_may_step(other, model) for other in given[:number]):
            raise ValueError(
                "step_along has an AveragedModel, but a rank that has run out of data does not "
                "step the plain optimizer of the model, so it would average old parameters. List "
                "the optimizer before it: step_along=[optimizer, average]"
            )
        return lambda: each.update_parameters(model)
    _check_needs_nothing(number, each)
    if hasattr(each, "step"):
        return lambda: each.step()  # A schedule replaces the step of its optimizer.
    function: Follower = each
    return function


def _check_needs_nothing(number: int, each: Any) -> None:
    """Raises TypeError for what a joined rank cannot call, as it needs an argument or an await."""
    is_module = isinstance(each, torch.nn.Module)
    function = each.step if hasattr(each, "step") else each.forward if is_module else each
    if isinstance(each, torch.optim.Optimizer):
        # A schedule has replaced the method by a function whose signature shows a `self`.
        function = type(each).step.__get__(each)
    elif hasattr(getattr(function, "func", function), "_wrapped_by_lr_sched"):
        return  # That function by itself, or a partial of it: the optimizer is bound in it.
    named = getattr(each, "__name__", type(each).__name__)
    # A call of these runs nothing.
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        kind = "async" if inspect.iscoroutinefunction(function) else "a generator"
        raise TypeError(
            f"step_along[{number}], {named}, is {kind}, and a rank that has run out of data only "
            "calls it, which runs nothing of it. List a plain function, and call that in the body"
        )
    try:
        inspect.signature(function).bind()
    except ValueError:
        return  # Of a function without a signature, the call will tell.
    except TypeError as error:
        raise TypeError(
            f"step_along[{number}], {named}, cannot be called without arguments ({error}), and a "
            f"rank that has run out of data has no argument for it. {_in_place_of(each)}"
        ) from None


def _in_place_of(each: Any) -> str:
    """What to list in place of something that needs an argument."""
    if isinstance(each, torch.amp.GradScaler):
        return (
            "List what the body calls, in its order, in place of the optimizer too: "
            "step_along=[functools.partial(scaler.step, optimizer), scaler.update]"
        )
    if isinstance(each, ReduceLROnPlateau):
        return (
            "It takes a metric of the whole epoch: call its step(metric) after the Join, with "
            "ctx.reduce(metric)"
        )
    call = "step()" if hasattr(each, "step") else "it"
    return (
        f"List a function in its place that calls {call} with a value that is the same on all "
        "ranks, and call that function in the body"
    )


def _averaged(average: AveragedModel, joinables: Sequence[Any]) -> Any:
    """The joinable whose parameters it averages."""
    shapes = [parameter.shape for parameter in average.module.parameters()]
    models = [
        joinable
        for joinable in joinables
        if isinstance(joinable, torch.nn.Module)
        and [parameter.shape for parameter in joinable.parameters()] == shapes
    ]
    if len(models) != 1:
        raise ValueError(
            f"step_along has an AveragedModel, and {len(models)} of the listed models have its "
            "parameters. List a function that says which one it averages, and call it in the "
            "loop's body too: def update(): average.update_parameters(model.module)"
        )
    return models[0]


def _steps(follower: Any, model: torch.nn.Module) -> bool:
    """Whether it is an optimizer of the model's parameters."""
    own = {id(parameter) for parameter in model.parameters()}
    groups = getattr(follower, "param_groups", ())
    return any(id(parameter) in own for options in groups for parameter in options["params"])


def _may_step(follower: Any, model: torch.nn.Module) -> bool:
    """As `_steps`, or code of the user, which may step such an optimizer: where it does not, the
    end of the Join compares what is averaged."""
    known = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, AveragedModel)
    return _steps(follower, model) or not isinstance(follower, known)


def steps_any(given: Sequence[object], model: torch.nn.Module) -> bool:
    """Whether an optimizer of the model's parameters is among them."""
    return any(_steps(each, model) for each in given)
