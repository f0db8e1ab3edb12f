"""Tensors of `cuda:0`: each operation becomes a kernel on the current stream.

A tensor has memory on the host that only kernels touch. An operation that needs a value on the
host waits for the stream, as on a GPU, and is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from . import heard, pinned, streams
from .memory import Allocation, Block, allocate

aten = torch.ops.aten

_READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.is_nonzero.default,
    aten.allclose.default,
    aten._unique2.default,
}
"""Operations whose result or shape the host needs."""
_OF_SHAPES = {aten._debug_has_internal_overlap.default, aten.is_pinned.default}
_NEVER = {aten.set_.source_Storage_storage_offset, aten.resize_.default}


class GpuTensor(torch.Tensor):
    """memory: on the host; kernels alone may touch it."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    memory: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, memory: torch.Tensor, block: Block, requires_grad: bool = False) -> GpuTensor:
        made: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device="cuda:0",
            requires_grad=requires_grad,
        )
        made.memory, made.block = memory, block
        return made

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def untyped_storage(self) -> Any:
        return self.memory.untyped_storage()

    def record_stream(self, stream: streams.Stream) -> None:
        self.block.allocation.recorded.add(stream.cuda_stream)

    def is_conj(self) -> bool:
        return self.memory.is_conj()

    def is_neg(self) -> bool:
        return self.memory.is_neg()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.to("cpu")

    def cuda(self, *_: Any, **__: Any) -> GpuTensor:
        return self

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy: torch.Tensor = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy

    @property
    def data(self) -> torch.Tensor:
        return GpuTensor(self.memory, self.block)

    @data.setter
    def data(self, new: GpuTensor) -> None:
        torch._C.TensorBase.data.__set__(self, new)
        self.memory, self.block = new.memory, new.block

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():
            return func.decompose(*args, **kwargs)  # Elsewhere autograd has done that.
        if func in _OF_SHAPES:
            return func(*tree_map(memory_of, args), **kwargs)
        if func in _READS:
            return _read(func, args, kwargs)
        device = kwargs.get("device")
        if func is aten._to_copy.default and device is not None and not is_cuda(device):
            _wait_and_read("copy to the host", args[:1])
            return args[0].memory.to(dtype=kwargs.get("dtype"), copy=True)
        if func is aten.copy_.default and not all(isinstance(t, GpuTensor) for t in args[:2]):
            return _copy_across(*args, **kwargs)
        if func in _NEVER:
            raise NotImplementedError(f"{func} on the stand-in GPU")
        if func._schema.is_mutable:
            return _change(func, args, kwargs)
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return _view(func, args, kwargs)
        return _compute(func, args, kwargs)


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def memory_of(value: Any) -> Any:
    return value.memory if isinstance(value, GpuTensor) else value


def empty(size: Any, stride: Any, dtype: torch.dtype) -> GpuTensor:
    block = allocate(size, stride, dtype)
    return GpuTensor(block.allocation.memory, block)


def upload(tensor: torch.Tensor, *, asynchronous: bool = False) -> GpuTensor:
    """A copy of a host tensor on the GPU, made in the order of the stream."""
    stride = tensor.stride() if tensor.layout is torch.strided else None
    made = empty(tensor.size(), stride, tensor.dtype)
    source, target = _sent(tensor, asynchronous), made.memory
    streams.launch(lambda: target.copy_(source))
    return made


def _sent(tensor: torch.Tensor, asynchronous: bool) -> torch.Tensor:
    """What a copy up reads: memory that is not pinned is copied at the launch."""
    if asynchronous and pinned.is_pinned(tensor):
        return tensor
    return tensor.detach().clone()


def _allocations(tensors: list[Any]) -> list[Allocation]:
    found = {id(t.block): t.block.allocation for t in tensors if isinstance(t, GpuTensor)}
    return list(found.values())


def _kernel(
    func: Any, tensors: list[Any], run: Callable[[], object], written: list[Any] | None = None
) -> None:
    """Launch `run`, which uses `tensors`, and writes to `written`; to all of them by default."""
    stream = streams.current()
    used = _allocations(tensors)
    heard.write(used if written is None else _allocations(written), heard.of(used))
    name = func if isinstance(func, str) else func.__name__

    def kernel() -> None:
        for allocation in used:
            allocation.touch(stream, name)
        with torch.no_grad():
            run()

    streams.launch(kernel)


def _wait_and_read(what: str, tensors: Any) -> None:
    streams.wait_for_stream(what)
    heard.check_read(heard.of(_allocations(tree_flatten(tensors)[0])), what)


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    _wait_and_read(func.__name__.partition(".")[0], (args, kwargs))
    found = func(*tree_map(memory_of, args), **tree_map(memory_of, kwargs))
    return tree_map(lambda x: upload(x) if isinstance(x, torch.Tensor) else x, found)


def _copy_across(to: Any, source: Any, non_blocking: bool = False) -> Any:
    """`to.copy_(source)` between the host and the GPU."""
    if isinstance(to, GpuTensor):
        target, sent = to.memory, _sent(source, non_blocking)
        _kernel("copy_", [to], lambda: target.copy_(sent))
        if not non_blocking and source.dim():
            streams.wait_for_stream("copy from the host")
        return to
    kept = source.memory
    if non_blocking and pinned.is_pinned(to):
        pinned.begin_down(to, source.block.allocation)
        _kernel("copy_", [source], lambda: to.copy_(kept))
    else:
        _wait_and_read("copy to the host", [source])
        to.copy_(kept)
    return to


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    source = next(one for one in args if isinstance(one, GpuTensor))
    with torch.inference_mode(False), torch.no_grad():
        found = func(*tree_map(memory_of, args), **tree_map(memory_of, kwargs))
    with torch.inference_mode(source.is_inference()):  # A view is of its source's kind.
        return tree_map(
            lambda x: GpuTensor(x, source.block) if isinstance(x, torch.Tensor) else x, found
        )


def _on_host(value: Any) -> Any:
    """The argument for a kernel: host tensors are copied at the launch."""
    if isinstance(value, torch.Tensor) and not isinstance(value, GpuTensor):
        return value.detach().clone()
    return memory_of(value)


def _drawing(func: Any) -> Callable[..., Any]:
    """What a kernel calls in the place of `func`. Random numbers are those of the generator's state
    at the launch, as on a GPU: when the kernel runs, the host may have drawn or seeded again."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func  # type: ignore[no-any-return]
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
    if func is aten.native_dropout.default:
        return functools.partial(_dropout, generator)
    if all(argument.name != "generator" for argument in func._schema.arguments):
        raise NotImplementedError(f"{func} on the stand-in GPU: it takes no generator")
    return functools.partial(func, generator=generator)


def _dropout(
    generator: torch.Generator, given: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or p == 0:
        return given.clone(), torch.ones_like(given, dtype=torch.bool)
    mask = torch.empty_like(given, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return given * mask / (1 - p), mask


def _change(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation that writes its arguments."""
    inner, inner_kwargs = tree_map(_on_host, args), tree_map(_on_host, kwargs)
    kernel = _drawing(func)
    given = {
        frozenset(argument.alias_info.before_set): (
            args[at] if at < len(args) else kwargs.get(argument.name)
        )
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
    }
    returned = [
        given[frozenset(one.alias_info.before_set)]
        for one in func._schema.returns
        if one.alias_info is not None
    ]
    written = tree_flatten(list(given.values()))[0]
    used = tree_flatten((args, kwargs))[0]
    _kernel(func, used, lambda: kernel(*inner, **inner_kwargs), written)
    if not returned:
        return None
    return returned[0] if len(returned) == 1 else tuple(returned)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation with new results, whose shapes the meta device tells."""
    wanted = kwargs.get("device")
    host_kwargs = dict(kwargs)
    if is_cuda(wanted):
        host_kwargs["device"] = torch.device("cpu")
    inner, inner_kwargs = tree_map(_on_host, args), tree_map(_on_host, host_kwargs)
    if wanted is not None and not is_cuda(wanted):  # new_empty(..., device="cpu")
        return func(*inner, **inner_kwargs)
    meta_kwargs = dict(kwargs)
    if wanted is not None or "new_" in func.__name__ or "_like" in func.__name__:
        meta_kwargs["device"] = torch.device("meta")
    meta_kwargs.pop("pin_memory", None)
    shapes = func(*tree_map(_on_meta, args), **tree_map(_on_meta, meta_kwargs))
    flat, spec = tree_flatten(shapes)
    results = [
        empty(one.size(), one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one
        for one in flat
    ]
    targets = [memory_of(one) for one in results]
    kernel = _drawing(func)

    def run() -> None:
        found, _ = tree_flatten(kernel(*inner, **inner_kwargs))
        for target, value in zip(targets, found, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(value)

    if not func.__name__.startswith(("empty", "new_empty")):
        _kernel(func, [*tree_flatten((args, kwargs))[0], *results], run, results)
    return tree_unflatten(results, spec)


def _on_meta(value: Any) -> Any:
    if isinstance(value, GpuTensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.Tensor) and value.dim():
        return value.to("meta")
    return value
