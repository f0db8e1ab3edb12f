"""The way of an operation through torch's dispatcher, for calls that have to take it.

torch's own process groups are called in three steps: torch's binding parses the arguments, an
operator (`c10d::allreduce_`) is dispatched, and its kernel calls the backend. A method of a process
group in Python is called at once, which saves the dispatcher's time, but then

- a tensor that is a wrapper (a class with `__torch_dispatch__`) is not asked what its operators
  mean: torch passes the operator to the class, which unwraps what it can, or raises;
- modes (CommDebugMode, FakeTensorMode) see no collective;
- of the forms of a call that torch's binding knows, there is but one.

So a method takes a plain call itself, and hands every other one to torch's binding (1). The binding
calls no override from within that override; it dispatches the operator (2), to wrappers and modes
as for any backend. After them our kernel takes the operator (3) if the process group is ours. It
has the key BackendSelect, the only one that comes after modes and before the backends' kernels,
so it replaces no kernel of torch, and it is installed when the first such call is made.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from .translation import factor_of

_KEY = "BackendSelect"

Run = Callable[..., Any]

_runs: dict[str, tuple[Run, int, tuple[str, ...]]] = {}
"""By operator: the method that does it, how many arguments are tensors, the names of the others."""

_here = threading.local()
_installing = threading.Lock()
_library: Any = None
_functional: Any = None


def is_plain(value: Any) -> bool:
    """Whether `value`, a tensor or lists of them, holds no object of a subclass."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return True
    return (kind is list or kind is tuple) and all(map(is_plain, value))


def operation(
    operator: str,
    num_tensors: int,
    options: Any = None,
    others: Sequence[str] = (),
    *,
    single: bool = False,
) -> Callable[[Run], Run]:
    """A decorator for a method of a process group that does the operator `c10d::<operator>`.

    The method takes `num_tensors` lists of tensors, or tensors if it is `single`; the arguments
    `others`; and last the options, an object of the class `options`, or None.
    """

    def decorate(run: Run) -> Run:
        _runs[operator] = run, num_tensors, tuple(others)
        return called_by(run, run.__name__, num_tensors, options, len(others), single)

    return decorate


def called_by(
    run: Run, name: str, num_tensors: int, options: Any, num_others: int, single: bool
) -> Run:
    """The method that torch calls by `name`; `run` does the operation."""
    num_plain = num_tensors + num_others
    stack_len = torch._C._len_torch_dispatch_stack
    of_torch: Any = getattr(dist.ProcessGroup, name, None)  # Early versions lack the new names.

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(kwargs) == 1 and "opts" in kwargs:
            args, kwargs = (*args, kwargs["opts"]), {}  # as dist.barrier calls
        count = len(args)
        if (
            (count == num_plain or (count == num_plain + 1 and type(args[-1]) is options))
            and not kwargs
            # A mode of torch, as of FakeTensor, has to see the call, and this path would bypass it.
            and not stack_len()
            and all(is_plain(a) and (single or type(a) is list) for a in args[:num_tensors])
        ):
            return run(self, *args)
        install()
        before, _here.op = getattr(_here, "op", None), _reduction(args, kwargs)
        try:
            return of_torch(self, *args, **kwargs)  # 1
        finally:
            _here.op = before

    # pybind11 knows by the name of the calling function that it is the override that calls.
    call.__code__ = call.__code__.replace(co_name=name)
    functools.update_wrapper(call, run)
    call.__name__ = name
    called: Any = _not_traced(call)
    called.made_of = run, num_tensors, options, num_others, single
    result: Run = called
    return result


def _not_traced(call: Run) -> Run:
    """`call`, which torch.compile leaves alone, with all that it calls.

    torch._dynamo.disable does the same, but importing torch._dynamo takes seconds, which the first
    operation of a process that compiles nothing would spend while other ranks wait.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(call.__code__, strategy)
    except (ImportError, AttributeError):  # These names are torch's own.
        return _disable_dynamo(call)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def formerly(of: Any, name: str) -> Run:
    """The same method, for torch to call by a former name.

    Where torch knows both names, its own method of the former name calls ours of the new one,
    unless it is one that it calls straight (`_allgather_base`).
    """
    run, num_tensors, options, num_others, single = of.made_of
    if name[0] != "_" and hasattr(dist.ProcessGroup, of.__name__):
        of_torch: Run = vars(dist.ProcessGroup)[name]  # getattr would unbind it.
        return of_torch
    return called_by(run, name, num_tensors, options, num_others, single)


def _reduction(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The ReduceOp of a call. What torch passes on to Python kernels does not show the factor of a
    PREMUL_SUM, and in torch 2.8 nothing else either."""
    for value in (*args, *kwargs.values()):
        op = getattr(value, "reduceOp", value)
        if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
            return op
    return dist.ReduceOp.SUM


def install() -> None:
    """Have the operators call our kernel, which calls torch's for other process groups."""
    global _library
    if _library is not None:
        return
    with _installing:
        if _library is None:
            library = torch.library.Library("c10d", "IMPL")
            for operator in _runs:
                if not hasattr(torch.ops.c10d, operator):
                    continue  # `gather_into_tensor_` came with torch 2.14.
                kernel = functools.partial(_kernel, operator)
                library.impl(operator, kernel, _KEY, with_keyset=True)
            _library = library


def _kernel(operator: str, keys: Any, *args: Any) -> Any:  # 3
    overload = getattr(torch.ops.c10d, operator).default
    arguments = overload._schema.arguments
    names = [argument.name for argument in arguments]
    place = names.index("process_group")
    group = dist.ProcessGroup.unbox(args[place])
    if not hasattr(group, "_device_groups") or _is_meta(args[0]):
        return overload.redispatch(keys & _behind(), *args)
    # Defaults at the end are not passed.
    given = {argument.name: argument.default_value for argument in arguments}
    given.update(zip(names, args, strict=False))
    run, num_tensors, others = _runs[operator]
    work = run(group, *args[:num_tensors], *(given[name] for name in others), _options(given))
    boxed = work.boxed()
    return (args[0], boxed) if len(overload._schema.returns) == 2 else boxed


def _is_meta(tensors: Any) -> bool:
    """Whether the first of `tensors` has no data, as FakeTensorMode passes it to a kernel."""
    while type(tensors) is list and tensors:
        tensors = tensors[0]
    return isinstance(tensors, torch.Tensor) and tensors.is_meta


def hand_on_functional_operators() -> None:
    """Have our kernel installed before a functional operator needs it.

    torch's C++ calls a process group in Python for all of them but this one, which it does by the
    operator `c10d::_allgather_base_`. Called when the first process group is made.
    """
    global _functional
    with _installing:
        if _functional is None:
            _functional = torch.library.Library("_c10d_functional", "IMPL")
            _functional.impl(
                "all_gather_into_tensor_out", _all_gather_into_tensor_out, _KEY, with_keyset=True
            )


def _all_gather_into_tensor_out(keys: Any, *args: Any, **kwargs: Any) -> Any:
    install()
    overload = torch.ops._c10d_functional.all_gather_into_tensor_out.default
    return overload.redispatch(keys & _behind(), *args, **kwargs)


def _behind() -> Any:
    """The keys of the kernels after ours, which are torch's own."""
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _options(given: dict[str, Any]) -> SimpleNamespace:
    """The arguments of an operator as options, under the names that torch gives them there."""
    options = SimpleNamespace(
        timeout=timedelta(milliseconds=given.get("timeout", -1)),
        rootRank=given.get("root_rank", 0),
        rootTensor=given.get("root_tensor", 0),
    )
    if "reduce_op" in given:
        called_with = getattr(_here, "op", None)  # None: the operator was called by itself
        kind = getattr(called_with, "op", called_with)
        if given["reduce_op"]._has_method("op"):
            kind = dist.ReduceOp.RedOpType(given["reduce_op"].op())
        is_scaled = getattr(called_with, "op", None) == dist.ReduceOp.PREMUL_SUM
        factor = factor_of(called_with) if is_scaled else None
        options.reduceOp = SimpleNamespace(op=kind, factor=factor)
    if "tensor" in given:
        options.device = given["tensor"].device
    return options
