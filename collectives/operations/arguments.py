"""Callers' arrays, checked and converted to the form in which they travel.

A transport moves contiguous flat tensors of real numbers. This file converts a caller's argument
to that form, without a copy where possible:

- numpy arrays, CuPy arrays and anything with DLPack become tensors that share their memory;
- complex numbers travel as pairs of reals, bool as uint8;
- tensors that are not contiguous, and numpy arrays with negative strides, are copied; where the
  operation writes them, `Operation.finish` copies the result back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from ..contract.dtypes import DTYPE_INDEX, DTYPES
from ..contract.errors import UnsupportedOperation, with_article
from ..contract.modes import alias
from ..contract.operation import Finish, ReduceOp
from .tensor_subclasses import check_memory, unwrapped

Array = Any
"""A torch tensor, a numpy or CuPy array, or anything with DLPack."""


class Finisher(NamedTuple):
    """A copy that ends an operation. into: the tensor that it writes."""

    into: torch.Tensor
    copy: Callable[[], object]


_AS_THEY_ARE = frozenset(d for d in DTYPES if not d.is_complex and d is not torch.bool)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_FOR_COMPLEX = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
_OF_BOOL = {  # as uint8 of 0 and 1
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.BXOR: ReduceOp.BXOR,
}


def checked(
    value: Any, name: str, device: torch.device, backend: str, written: bool
) -> torch.Tensor:
    """`value` as a tensor without autograd, in the same memory; raises if an operation cannot use
    its type, dtype, device, layout or strides, or if it is a wrapper."""
    kind = type(value)
    tensor: torch.Tensor
    if kind is torch.Tensor or kind is torch.nn.Parameter:  # As most often: no look inside.
        tensor = value
    elif isinstance(value, torch.Tensor):
        tensor = unwrapped(value, name)
    else:
        tensor = _foreign(value, name, written)
    # Outside inference mode nothing may write to such a tensor, but to another view of its memory.
    if tensor.is_inference():
        tensor = alias(tensor)
    elif tensor.requires_grad:
        tensor = tensor.detach()
    # Before anything is sent: on another rank it would be a mismatch, and end the group.
    if tensor.dtype not in DTYPE_INDEX:
        raise UnsupportedOperation(
            f"{name} of dtype {tensor.dtype}", backend, f"use one of {', '.join(map(str, DTYPES))}"
        )
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}, but this group moves tensors on {device}; "
            f"call .to({str(device)!r}) first"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}; pass .to_dense()")
    # Such as expand() makes; torch knows it for certain only where it answers 1.
    if written and not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} has several "
            "elements in one place, so results cannot be written into it; pass .clone()"
        )
    check_memory(tensor, name)
    return tensor


def checked_list(
    values: Sequence[Any],
    name: str,
    size: int,
    device: torch.device,
    backend: str,
    *,
    written: bool,
) -> list[torch.Tensor]:
    """One tensor per rank, all of one dtype. Raises ValueError otherwise, and as `checked`."""
    if len(values) != size:
        raise ValueError(
            f"{name} has {len(values)} tensors; a group of {size} ranks needs one per rank, {size}"
        )
    tensors = [
        checked(value, f"{name}[{i}]", device, backend, written) for i, value in enumerate(values)
    ]
    for i, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"{name}[{i}] is {tensor.dtype} but {name}[0] is {tensors[0].dtype}; all tensors "
                "of one operation have one dtype"
            )
    return tensors


def same_dtype(operation: str, name: str, a: torch.Tensor, other: str, b: torch.Tensor) -> None:
    if a.dtype != b.dtype:
        raise ValueError(f"{operation}: {name} is {a.dtype} but {other} is {b.dtype}; convert one")


def _foreign(value: Any, name: str, written: bool) -> torch.Tensor:
    numpy = sys.modules.get("numpy")  # A caller with a numpy array has imported numpy.
    if numpy is not None and isinstance(value, numpy.ndarray):
        if not value.flags.writeable:
            if written:
                raise ValueError(f"{name} is a read-only numpy array; pass one that can be written")
            # torch warns of memory that it could write to and must not.
            value = value.copy()
        # torch has no negative strides.
        if any(stride < 0 for stride in value.strides):
            return _running_backwards(value)
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
    # CuPy, JAX and others share their memory by it.
    if hasattr(value, "__dlpack__"):
        try:
            return from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(
                f"{name}, {with_article(type(value))}, cannot be shared through DLPack: {error}"
            ) from error
    raise not_a_tensor(value, name)


def _running_backwards(array: Any) -> torch.Tensor:
    """A copy of a numpy array with negative strides, which tensors cannot have.

    The copy refers to the array as `_home`. It is not contiguous, so that `written` looks for that.
    """
    for axis in range(array.ndim):
        if array.strides[axis] < 0 and array.shape[axis] <= 1:
            array = array[(slice(None),) * axis + (slice(None, None, -1),)]  # same elements
    # What ran backwards had one element at the most along that axis.
    if array.size == 0 or all(stride >= 0 for stride in array.strides):
        return torch.from_numpy(array if array.size else array.copy())
    source = torch.from_numpy(array.copy())
    copy = source.new_empty(*array.shape, 2)[..., 0].copy_(source)
    copy._home = array  # type: ignore[attr-defined]
    return copy


# -- how tensors travel --------------------------------------------------------------------------


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether `tensor` travels as it is, as most often. It is asked first, because a view takes as
    long as the copy of a small tensor."""
    return tensor.stride() == (1,) and tensor.dtype in _AS_THEY_ARE and not tensor.is_neg()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of `tensor` holds exactly its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a plain tensor as (n,) real numbers."""
    if tensor.is_complex():
        return torch.view_as_real(tensor).view(-1)
    flat = tensor.view(-1)
    if flat.stride(0) != 1:  # A tensor of one element may have any stride.
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat


def read(tensor: torch.Tensor) -> torch.Tensor:
    """(n,) for a transport to read: the memory of `tensor` if it is plain, else a copy."""
    if _is_flat(tensor):
        return tensor
    if not is_plain(tensor):
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return _flat(tensor)


def written(
    tensor: torch.Tensor, finishers: list[Finisher], *, also_read: bool = False
) -> torch.Tensor:
    """(n,) for a transport to write. Adds to `finishers` the copies back to `tensor`, if any."""
    if _is_flat(tensor):
        return tensor
    if is_plain(tensor):
        return _flat(tensor)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    # An operation that only writes needs no copy of what was there.
    if also_read:
        staged.copy_(tensor)
    finishers.append(Finisher(tensor, lambda: tensor.copy_(staged)))
    home = getattr(tensor, "_home", None)
    if home is not None:
        finishers.append(Finisher(tensor, lambda: home.__setitem__(..., tensor.numpy())))
    return _flat(staged)


class _Finish:
    """All finishers of an operation, as `Operation.finish`."""

    def __init__(self, finishers: list[Finisher]) -> None:
        self._finishers = finishers
        self.tensors = [one.into for one in finishers]

    def __call__(self) -> None:
        for one in self._finishers:
            one.copy()


def finisher(finishers: list[Finisher]) -> Finish | None:
    """One function that calls all `finishers`; None if there are none."""
    return _Finish(finishers) if finishers else None


def share_memory(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor of `a` may overlap a tensor of `b`."""
    # By addresses: two arrays of numpy over one buffer have two storages, each with its own start.
    if len(a) == len(b) == 1 and a[0].is_contiguous() and b[0].is_contiguous():  # The usual case.
        first, second = a[0].data_ptr(), b[0].data_ptr()
        num_bytes, more = a[0].nbytes, b[0].nbytes
        return bool(num_bytes and more) and first < second + more and second < first + num_bytes
    some, others = _extents(a), _extents(b)
    return any(one[0] < other[1] and other[0] < one[1] for one in some for other in others)


def _extents(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """The addresses of the first byte of each tensor, and of the byte after its last one."""
    found = []
    for tensor in tensors:
        if tensor.numel():
            first, num_bytes = tensor.data_ptr(), tensor.nbytes
            if not tensor.is_contiguous():
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                last = sum((length - 1) * stride for length, stride in steps)
                num_bytes = (last + 1) * tensor.element_size()
            found.append((first, first + num_bytes))
    return found


def unshared(input: torch.Tensor, own: int, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """`input`, or a copy if it may overlap `outputs` elsewhere than at `own`, the address of this
    rank's part of them: what arrives first would overwrite what is still to be sent."""
    is_apart = input.data_ptr() == own or not share_memory(outputs, [input])
    return input if is_apart else input.clone()


# -- reductions ----------------------------------------------------------------------------------


def checked_op(
    name: str, given: object, factor: complex | None, dtype: torch.dtype, backend: str
) -> ReduceOp:
    """The reduction of the real numbers that travel; PREMUL_SUM becomes SUM of scaled tensors."""
    # torch's ReduceOp has the same names and other numbers: it would be taken for another one.
    if not isinstance(given, int):
        of_torch = getattr(given, "name", None) if "torch" in type(given).__module__ else None
        remedy = f"; that is torch's: write chorusline.ReduceOp.{of_torch}" if of_torch else ""
        if isinstance(given, str) and given.upper() in ReduceOp.__members__:
            remedy = f"; write chorusline.ReduceOp.{given.upper()}"
        raise TypeError(f"op must be a ReduceOp, got {given!r}{remedy}")
    try:
        op = ReduceOp(given)
    except ValueError:
        raise TypeError(f"op must be a ReduceOp, got {given!r}") from None
    # Silently dropped, a factor would change results.
    if (factor is not None) != (op is ReduceOp.PREMUL_SUM):
        raise ValueError(
            f"factor belongs to ReduceOp.PREMUL_SUM, which needs one; got op {op.name} and factor "
            f"{factor!r}"
        )
    what = f"{name} of {dtype} with {op.name}"
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise UnsupportedOperation(what, backend, "bitwise operations are for integers and bool")
    if dtype.is_complex and op not in _FOR_COMPLEX:
        raise UnsupportedOperation(what, backend, "complex numbers have SUM, AVG and PREMUL_SUM")
    # Travels as bytes of 0 and 1, whose sum would be neither.
    if dtype is torch.bool:
        if op not in _OF_BOOL:
            raise UnsupportedOperation(what, backend, "convert to an integer or a float first")
        return _OF_BOOL[op]
    # What follows is about PREMUL_SUM: the scaled tensor has the dtype of the tensor.
    if factor is None:
        return op
    if isinstance(factor, complex) and not dtype.is_complex:
        raise ValueError(f"factor {factor!r} is complex, but the tensor is {dtype}")
    integer = not (dtype.is_floating_point or dtype.is_complex)
    if integer and not isinstance(factor, int):
        raise ValueError(f"factor {factor!r} must be an int, because the tensor is {dtype}")
    # Tried on one element, for an error that names the factor.
    if not hasattr(factor, "numel"):  # A tensor of one element serves as well.
        try:
            torch.ones((), dtype=dtype, device="cpu").mul_(factor)
        except TypeError:
            raise TypeError(f"factor must be a number, got {factor!r}") from None
        except (RuntimeError, OverflowError):
            raise ValueError(f"factor {factor!r} is too large for {dtype}") from None
    return ReduceOp.SUM


def travelling_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype is torch.bool:
        return torch.uint8
    return dtype.to_real() if dtype.is_complex else dtype


def not_a_tensor(given: object, argument: str) -> Exception:
    """The error for an argument that is `given` instead of a tensor.

    torch had operations on one tensor per device (`all_reduce_multigpu`), and ray.util.collective
    still has them. For a caller who expects them, the error names the alternative.
    """
    if isinstance(given, list | tuple):
        devices = sorted({str(t.device) for t in given if isinstance(t, torch.Tensor)})
        if len(devices) > 1:
            return ValueError(
                f"{argument} holds tensors on {', '.join(devices)}, but a rank has one device. "
                "Start one rank per device and pass each its own tensor: docs/collectives.md, "
                "'One rank, one device'"
            )
    return TypeError(
        f"{argument} must be a torch.Tensor, a numpy array or something with __dlpack__, got "
        f"{type(given).__name__}"
    )
