"""Puts the stand-in in the place of `torch.cuda` and of the functions that make tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from chorusline.collectives.operations import arguments
from chorusline.collectives.transports import cuda_events
from chorusline.runtime.zero.shards import parameter_bucket

from . import heard, memory, pinned, streams
from .tensors import GpuTensor, empty, is_cuda, upload

_FACTORIES = (
    *("zeros", "ones", "empty", "full", "tensor", "arange", "randn", "rand", "eye", "as_tensor"),
    *("empty_strided", "linspace", "randperm", "scalar_tensor"),
)


def install() -> None:
    """In this process, for good."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.Stream, cuda.Event = streams.Stream, streams.Event
    cuda.stream, cuda.device = streams.stream, streams.device
    cuda.current_stream, cuda.synchronize = streams.current_stream, streams.synchronize
    cuda.default_stream = lambda device=None: streams.Stream(number=0)
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: streams.machine().guard.stand_in_set_device(0)
    cuda.memory_allocated = lambda device=None: memory.allocated()
    cuda.empty_cache = memory.empty_cache
    cuda.get_rng_state = lambda *_: torch.zeros(1, dtype=torch.uint8)
    cuda.set_rng_state = lambda *_: None
    cuda.get_device_name = lambda *_: "stand-in"
    cuda.is_current_stream_capturing = lambda: streams.machine().capturing
    cuda.nvtx.range_start = lambda name: 1
    cuda.nvtx.range_end = lambda number: None
    _install_factories()
    _install_moves()
    _install_kernels()
    _install_futures()
    _install_in_chorusline()
    heard.install()
    pinned.install()


def _install_factories() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_gpu(name, getattr(torch, name)))
    plain_like = torch.empty_like

    def empty_like(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if is_cuda(kwargs.get("device")) and not isinstance(tensor, GpuTensor):
            dtype = kwargs.get("dtype", tensor.dtype)
            return torch.empty(tensor.shape, dtype=dtype, device="cuda:0")
        return plain_like(tensor, **kwargs)

    torch.empty_like = empty_like  # type: ignore[assignment]


def _on_gpu(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def factory(*args: Any, **kwargs: Any) -> Any:
        if not is_cuda(kwargs.get("device")):
            is_pinned = kwargs.pop("pin_memory", False)
            made = plain(*args, **kwargs)
            return pinned.pin(made) if is_pinned else made
        requires_grad = kwargs.pop("requires_grad", False)
        del kwargs["device"]
        copies = name in ("tensor", "as_tensor")
        if copies and isinstance(args[0], GpuTensor):
            return args[0]
        made = plain(*args, **kwargs)
        if name.startswith("empty"):
            return empty(made.size(), made.stride(), made.dtype).requires_grad_(requires_grad)
        uploaded = upload(made)
        if copies:
            streams.wait_for_stream("copy from the host")
        return uploaded.requires_grad_(requires_grad)

    return factory


class _Upload(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return upload(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.cpu()


def _install_moves() -> None:
    plain = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, torch.Tensor):
            target = target.device
        moves = isinstance(target, str | torch.device | int) and is_cuda(target)
        if isinstance(self, GpuTensor) or not moves:
            return plain(self, *args, **kwargs)
        dtypes = [one for one in args if isinstance(one, torch.dtype)]
        dtype = kwargs.get("dtype") or next(iter(dtypes), None)
        source = self if dtype is None else plain(self, dtype)
        by_autograd = self.requires_grad and torch.is_grad_enabled()
        asynchronous = bool(kwargs.get("non_blocking"))
        if by_autograd:
            moved: torch.Tensor = _Upload.apply(source)
        else:
            moved = upload(source, asynchronous=asynchronous)
        if not asynchronous:
            streams.wait_for_stream("copy from the host")
        return moved

    torch.Tensor.to = to  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self.to("cuda:0")  # type: ignore[method-assign]


_kernels = torch.library.Library("aten", "IMPL")


def _install_kernels() -> None:
    """For what C++ allocates itself: the engine's zeros in the place of gradients."""

    def of_size(size: Any, dtype: Any = None, *_: Any, **__: Any) -> GpuTensor:
        return empty(size, None, dtype or torch.get_default_dtype())

    def of_stride(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> GpuTensor:
        return empty(size, stride, dtype or torch.get_default_dtype())

    _kernels.impl("empty.memory_format", of_size, "CUDA")
    _kernels.impl("empty_strided", of_stride, "CUDA")


def _install_futures() -> None:
    """Who takes the value of a future keeps its memory; torch does so by storages, which the
    stand-in's tensors do not have. The order of streams is that of torch, by events."""
    future: Any = torch._C.Future
    plain_wait, plain_value = future.wait, future.value

    def record(value: Any) -> Any:
        for tensor in tree_flatten(value)[0]:
            if isinstance(tensor, GpuTensor):
                tensor.record_stream(streams.current_stream())
        return value

    future.wait = lambda self: record(plain_wait(self))
    future.value = lambda self: record(plain_value(self))


def _install_in_chorusline() -> None:
    """The stand-in's tensors are wrappers for torch only, and no capsule can carry them."""
    cuda_events.driver = lambda: streams.machine().guard  # type: ignore[assignment]
    plain_unwrapped, plain_alias = arguments.unwrapped, arguments.alias
    plain_from_dlpack = arguments.from_dlpack

    def unwrapped(value: torch.Tensor, name: str) -> torch.Tensor:
        return value if isinstance(value, GpuTensor) else plain_unwrapped(value, name)

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, GpuTensor):
            return GpuTensor(tensor.memory, tensor.block)
        return plain_alias(tensor)

    def from_dlpack(value: Any) -> torch.Tensor:
        held = value if isinstance(value, GpuTensor) else getattr(value, "tensor", None)
        return alias(held) if isinstance(held, GpuTensor) else plain_from_dlpack(value)

    arguments.unwrapped, arguments.alias = unwrapped, alias
    for module in (arguments, parameter_bucket):
        module.from_dlpack = from_dlpack  # type: ignore[attr-defined]
