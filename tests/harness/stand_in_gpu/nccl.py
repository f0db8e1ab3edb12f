"""`cupy.cuda.nccl` that is not there, with the semantics of NCCL 2.30 as its sources have them.

init      blocks until all ranks have come, forever if need be; refuses two ranks whose hosts
          have one hash and whose devices have one PCI address, unless the environment of this rank
          allows it: from 2.30 on also if both are other ranks. What must be the same on all ranks
          and is not is undefined
environment  is read once in a process
kernels   run in the order of their stream and meet those of the other ranks; they wait for ranks
          that never come forever, and report nothing
groupEnd  with the first send or recv between two ranks connects them, and blocks the host until
          the other rank does too (group.cc, ncclP2PPreconnectFunc); an abort frees it by an error
abort     ends kernels that run or are queued. They run to their end on what they have, write it to
          their outputs, and post it with valid flags (prims_simple.h: postPeer follows an aborted
          waitPeer), so that kernels of the next rank may complete, with wrong data and no error.
          Returns when they have ended
arguments are ints and bytes only, as Cython has them
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import secrets
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import memory, streams
from .hub import Garbage, Line

GARBAGE = 77
"""What aborted kernels leave in half of the elements."""

_ERRORS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR",
    2: "NCCL_ERROR_SYSTEM_ERROR",
    3: "NCCL_ERROR_INTERNAL_ERROR",
    4: "NCCL_ERROR_INVALID_ARGUMENT",
    5: "NCCL_ERROR_INVALID_USAGE",
    6: "NCCL_ERROR_REMOTE_ERROR",
}
_DTYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}
_SUM, _PRODUCT, _MAX, _MIN, _AVG = range(5)


@dataclass
class Settings:
    """hub: path of its socket. abort_s: how long an abort takes at least. calls: the kernels that
    were launched, each as the names of the operations in it. broken: the number of an error that
    NCCL's own threads have found. breaks: kernels then wait forever. kernel_s: how long a kernel
    takes at least. entering: called by each communicator that is about to be made, with its
    rank. bus: the PCI address of the GPU; "" for one that no other rank has. version: of NCCL."""

    hub: str = ""
    abort_s: float = 0.0
    calls: list[tuple[str, ...]] = field(default_factory=list)
    broken: int = 0
    breaks: bool = False
    kernel_s: float = 0.0
    entering: Callable[[int], object] = lambda rank: None
    bus: str = os.environ.get("STAND_IN_GPU_BUS", "")
    version: int = int(os.environ.get("STAND_IN_NCCL", 23203))


settings = Settings()


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"{_ERRORS[status]}: stand-in")


class Call(NamedTuple):
    """One operation of a group call, as its communicator was asked for it."""

    kind: str
    stream: int
    given: dict[str, int]


class _Group(threading.local):
    """The open group call of a thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[tuple[NcclCommunicator, Call]] = []


_group = _Group()


def groupStart() -> None:
    _group.depth += 1


def groupEnd() -> None:
    if _group.depth == 0:
        raise NcclError(5)
    _group.depth -= 1
    if _group.depth:
        return
    calls, _group.calls = _group.calls, []
    for communicator in dict.fromkeys(one for one, _ in calls):
        communicator.launch([call for one, call in calls if one is communicator])


def _method(kind: str, *names: str) -> Callable[..., None]:
    """A method of the communicator that takes integers called `names`, and then a stream."""

    def method(self: NcclCommunicator, *values: int) -> None:
        for name, value in zip((*names, "stream"), values, strict=True):
            if type(value) is not int:
                what = type(value).__name__
                raise TypeError(f"{kind}: {name} is {what}, an integer is required")
        if not self.is_alive:
            streams.machine().misuses.append(f"{kind} on a communicator that was freed")
            raise NcclError(4)
        groupStart()
        _group.calls.append((self, Call(kind, values[-1], dict(zip(names, values, strict=False)))))
        groupEnd()

    return method


@functools.cache
def _variable(name: str, otherwise: str = "") -> str:
    """As NCCL has read it, once in this process (NCCL_PARAM, getHostHashOnce)."""
    return os.environ.get(name, otherwise)


def _bus() -> str:
    return settings.bus or f"a bus of process {os.getpid()}"


class Told(NamedTuple):
    """What ranks tell each other when they connect.

    place: hash of the host, and device. ctas: as many channels the rank will have.
    network: by which it connects to other hosts.
    """

    place: tuple[str, str]
    ctas: str
    network: tuple[str, str]


def _check(told: list[Told], mine: Told) -> None:
    """Raises NcclError as initTransportsRank does, and notes what would hang instead."""
    places = [one.place for one in told]
    equal = [a == b for at, a in enumerate(places) for b in places[:at]]
    if settings.version < 23000:
        refused = places.count(mine.place) > 1  # "Duplicate GPU detected"
    else:
        nvls = _variable("NCCL_NVLS_ENABLE", "2")
        allowed = _variable("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and nvls != "1"
        refused = any(equal) and not allowed
        # Before 2.31.2 the last pair decides whether there is NVLS (nccl#2257).
        does_without = settings.version >= 23102 or nvls == "0" or equal[-1:] == [True]
        if any(equal) and not does_without:
            streams.machine().misuses.append("NVLS with two ranks on one device")
    if refused:
        raise NcclError(5)
    if len({one.ctas for one in told}) > 1:
        streams.machine().misuses.append("ranks differ in NCCL_MAX_CTAS, and wait forever")
    if len({host for host, _ in places}) > 1 and len({one.network for one in told}) > 1:
        streams.machine().misuses.append("ranks connect by different networks")


living: weakref.WeakSet[NcclCommunicator] = weakref.WeakSet()
"""Communicators that were neither aborted nor destroyed."""


class NcclCommunicator:
    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        if type(commId) is not bytes or len(commId) != 128:
            raise TypeError(f"commId must be 128 bytes, got {type(commId).__name__}")
        self.name = commId.hex()[:16]
        self.size, self.rank = ndev, rank
        self.is_alive = True
        self.aborted = threading.Event()
        self._sequence = 0
        self._messages: dict[tuple[int, int], int] = {}  # number of messages, by way
        self._connected: set[tuple[int, int]] = set()
        self._last_kernel: threading.Event | None = None
        self._launching = 0
        streams.note_thread()  # NCCL takes the current device of the thread.
        settings.entering(rank)
        self._host_line, self._kernel_line = Line(settings.hub), Line(settings.hub)
        everybody = frozenset(range(ndev))
        mine = Told(
            (_variable("NCCL_HOSTID", "the host's name"), _bus()),
            _variable("NCCL_MAX_CTAS"),
            (_variable("NCCL_SOCKET_IFNAME"), _variable("NCCL_IB_DISABLE")),
        )
        met = self._host_line.meet(("init", self.name), rank, tuple(mine), everybody, takers=ndev)
        _check([Told(*met[one]) for one in range(ndev)] if met else [mine], mine)
        living.add(self)

    allReduce = _method("allReduce", "send", "recv", "count", "dtype", "op")
    reduce = _method("reduce", "send", "recv", "count", "dtype", "op", "root")
    broadcast = _method("broadcast", "send", "recv", "count", "dtype", "root")
    reduceScatter = _method("reduceScatter", "send", "recv", "count", "dtype", "op")
    allGather = _method("allGather", "send", "recv", "count", "dtype")
    send = _method("send", "send", "count", "dtype", "peer")
    recv = _method("recv", "recv", "count", "dtype", "peer")

    def abort(self) -> None:
        if not self.is_alive:
            return
        self.aborted.set()
        time.sleep(settings.abort_s)
        if self._last_kernel is not None:
            self._last_kernel.wait()
        if self._launching:
            give_up_at = time.monotonic() + 1  # Freed by the error, it is about to leave.
            while self._launching and time.monotonic() < give_up_at:
                time.sleep(0.001)
        if self._launching:
            streams.machine().misuses.append("a communicator was freed inside one of its calls")
        self.is_alive = False
        living.discard(self)

    def destroy(self) -> None:
        if self.is_alive and self._last_kernel is not None:
            self._last_kernel.wait()
        self.is_alive = False
        living.discard(self)

    def check_async_error(self) -> None:
        if not self.is_alive:
            streams.machine().misuses.append("check_async_error after the communicator was freed")
        if settings.broken:
            raise NcclError(settings.broken)

    # -- launches --------------------------------------------------------------------------------

    def launch(self, calls: list[Call]) -> None:
        self._launching += 1
        try:
            self._connect([self._way(call) for call in calls if self._is_message(call)])
            kernels = [(call, self._key(call)) for call in calls]
            memories = [_memories(call, "send", "recv") for call in calls]
            settings.calls.append(tuple(call.kind for call in calls))
            ended = self._last_kernel = threading.Event()
            stream = calls[0].stream
            streams.note_thread()
            streams.machine().launches[stream] += 1
            thread = streams.thread_of(stream)
            thread.launch(lambda: self._run(kernels, memories, stream, ended))
            for call in calls:
                for allocation in _memories(call, "recv"):
                    allocation.heard = {stream: thread.launched}
        finally:
            self._launching -= 1

    def _connect(self, ways: list[tuple[int, int]]) -> None:
        """Both ends of each way that is new; the host waits for the other ranks."""
        new = [way for way in dict.fromkeys(ways) if way not in self._connected]
        for way in new:
            self._host_line.give(("connected", self.name, way), self.rank, None)
        for way in new:
            key = ("connected", self.name, way)
            ends = frozenset(way)
            found = self._host_line.meet(key, self.rank, None, ends, self.aborted, takers=2)
            if found is None:
                raise NcclError(3)
            self._connected.add(way)

    def _is_message(self, call: Call) -> bool:
        return call.kind in ("send", "recv") and call.given["peer"] != self.rank

    def _way(self, call: Call) -> tuple[int, int]:
        peer = call.given["peer"]
        return (self.rank, peer) if call.kind == "send" else (peer, self.rank)

    def _key(self, call: Call) -> tuple[Any, ...]:
        """What is the same on all ranks of one operation."""
        if call.kind in ("send", "recv"):
            way = self._way(call)
            number = self._messages[way] = self._messages.get(way, -1) + 1
            return (self.name, way, number)
        self._sequence += 1
        return (self.name, self._sequence)

    # -- kernels ---------------------------------------------------------------------------------

    def _run(
        self,
        kernels: list[tuple[Call, tuple[Any, ...]]],
        memories: list[list[memory.Allocation]],
        stream: int,
        ended: threading.Event,
    ) -> None:
        try:
            time.sleep(settings.kernel_s)
            if settings.breaks and settings.broken:
                self.aborted.wait()  # Nothing comes through the connection any more.
            for (call, _), used in zip(kernels, memories, strict=True):
                for allocation in used:
                    allocation.touch(stream, call.kind)
            for call, key in kernels:  # Sends first, so that no recv of the same call waits.
                if call.kind == "send":
                    self._send(call, key)
            for call, key in kernels:
                if call.kind == "recv":
                    self._recv(call, key)
                elif call.kind != "send":
                    self._run_collective(call, key)
        except (EOFError, OSError):
            pass  # The test is over.
        finally:
            ended.set()

    def _send(self, call: Call, key: tuple[Any, ...]) -> None:
        data = _bytes_at(call.given["send"], call.given["count"], call.given["dtype"])
        payload = Garbage(data) if self.aborted.is_set() else data
        self._kernel_line.give(key, "sender", payload)

    def _recv(self, call: Call, key: tuple[Any, ...]) -> None:
        found = None
        if not self.aborted.is_set():
            needs = frozenset(["sender"])
            found = self._kernel_line.meet(key, "receiver", None, needs, self.aborted, takers=1)
        count, dtype = call.given["count"], call.given["dtype"]
        data = Garbage(None) if found is None else found["sender"]
        if isinstance(data, Garbage):
            _put(call.given["recv"], count, dtype, None)
        else:
            _put(call.given["recv"], count, dtype, _from_bytes(data, dtype)[:count])

    def _run_collective(self, call: Call, key: tuple[Any, ...]) -> None:
        count, dtype = call.given["count"], call.given["dtype"]
        numel = count * (self.size if call.kind == "reduceScatter" else 1)
        mine = (_bytes_at(call.given["send"], numel, dtype), call.kind, count)
        if self.aborted.is_set():
            self._kernel_line.give(key, self.rank, Garbage(mine))
            self._spoil(call)
            return
        needs = frozenset(range(self.size))
        found = self._kernel_line.meet(
            key, self.rank, mine, needs, self.aborted, takers=self.size, ring=True
        )
        if found is None:  # Aborted while it waited.
            self._kernel_line.give(key, self.rank, Garbage(mine))
            self._spoil(call)
            return
        parts = [found.get(rank, Garbage(None)) for rank in range(self.size)]
        if any(isinstance(p, Garbage) for p in parts) or len({p[1:] for p in parts}) > 1:
            self._spoil(call)
            return
        tensors = [_from_bytes(part[0], dtype) for part in parts]
        op = call.given.get("op", _SUM)
        if call.kind == "allReduce":
            result = _reduced(tensors, op)
        elif call.kind == "reduce":
            if self.rank != call.given["root"]:
                return
            result = _reduced(tensors, op)
        elif call.kind == "broadcast":
            result = tensors[call.given["root"]]
        elif call.kind == "allGather":
            result, count = torch.cat(tensors), count * self.size
        else:
            own = slice(self.rank * count, (self.rank + 1) * count)
            result = _reduced([tensor[own] for tensor in tensors], op)
        _put(call.given["recv"], count, dtype, result)

    def _spoil(self, call: Call) -> None:
        """Leave anything in what the kernel writes: an all-gather in all chunks, in place not in
        the rank's own one; a broadcast everywhere but on the root, and a reduce only there."""
        count, dtype, root = call.given["count"], call.given["dtype"], call.given.get("root")
        if call.kind == "broadcast" and root == self.rank:
            return
        if call.kind == "reduce" and root != self.rank:
            return
        if call.kind != "allGather":
            _put(call.given["recv"], count, dtype, None)
            return
        begin, itemsize = call.given["recv"], _DTYPES[dtype].itemsize
        for rank in range(self.size):
            address = begin + rank * count * itemsize
            if address != call.given["send"]:
                _put(address, count, dtype, None)


def _memories(call: Call, *names: str) -> list[memory.Allocation]:
    """What the kernel uses; a kernel at an address that nothing is at would end the process.
    names: "send", "recv"."""
    found = []
    for name in names:
        address = call.given.get(name, 0)
        if address and call.given["count"]:
            allocation = memory.allocation_at(address)
            if allocation is None:
                streams.machine().misuses.append(f"{call.kind}: nothing is allocated at its {name}")
            else:
                found.append(allocation)
    return found


def _tensor_at(address: int, count: int, dtype: int) -> torch.Tensor:
    kind = _DTYPES[dtype]
    if count == 0:
        return torch.empty(0, dtype=kind)
    size = count * kind.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=kind)


def _bytes_at(address: int, count: int, dtype: int) -> bytes:
    return _tensor_at(address, count, dtype).view(torch.uint8).numpy().tobytes()


def _from_bytes(data: bytes, dtype: int) -> torch.Tensor:
    kind = _DTYPES[dtype]
    return torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)


def _put(address: int, count: int, dtype: int, value: torch.Tensor | None) -> None:
    target = _tensor_at(address, count, dtype)
    if value is None:
        target[: max(1, count // 2)] = GARBAGE
    else:
        target.copy_(value)


def _reduced(parts: list[torch.Tensor], op: int) -> torch.Tensor:
    """Integers are added in their own type, as NCCL does. Means of floats are rounded once; NCCL
    scales each part first, which is the same for powers of two."""
    is_float = parts[0].is_floating_point()
    if op == _AVG and is_float:
        return torch.stack(parts).double().mean(0).to(parts[0].dtype)
    total = parts[0].clone()
    for part in parts[1:]:
        if op in (_SUM, _AVG):
            total = total + part
        elif op == _PRODUCT:
            total = total * part
        elif op == _MAX:
            total = torch.maximum(total, part)
        else:
            total = torch.minimum(total, part)
    if op == _AVG:
        total = torch.div(total, len(parts), rounding_mode="trunc")
    return total


def install(hub: str) -> None:
    """Modules `cupy`, `cupy.cuda` and `cupy.cuda.nccl` in this process."""
    settings.hub = hub
    nccl: Any = types.ModuleType("cupy.cuda.nccl")
    nccl.available = True
    nccl.NcclError, nccl.NcclCommunicator = NcclError, NcclCommunicator
    nccl.groupStart, nccl.groupEnd = groupStart, groupEnd
    nccl.get_unique_id = lambda: secrets.token_bytes(128)
    nccl.get_version = lambda: settings.version
    cupy: Any = types.ModuleType("cupy")
    cuda: Any = types.ModuleType("cupy.cuda")
    runtime: Any = types.ModuleType("cupy.cuda.runtime")
    runtime.deviceGetPCIBusId = lambda index: _bus()
    cupy.cuda, cuda.nccl, cuda.runtime = cuda, nccl, runtime
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    sys.modules.update({"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl})
    sys.modules["cupy.cuda.runtime"] = runtime
    os.environ.pop("NCCL_DEBUG", None)
