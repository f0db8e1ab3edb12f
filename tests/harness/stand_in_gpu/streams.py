"""Streams and events: a thread for each stream, which runs kernels later, in order, with jitter."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

DEPTH = 1000
"""Kernels that a stream holds before a launch blocks, as with the driver's queue."""

_INSIDE = ("collectives/contract/work.py", "collectives/contract/modes.py")

Kernel = Callable[[], object]

_ENDED, _NOT_READY = 0, 600


@dataclass
class Machine:
    """What this process knows of its GPU.

    guard: the library of guard.cpp; guard_with_lock: whose calls keep Python's lock.
    seed, jitter_s: one kernel of ten waits up to `jitter_s` seconds.
    launches: kernels by stream.
    waits: by place in the code, how often the host waited for the GPU there; only while `counts`.
    misuses: what would be undefined on a GPU, in words.
    unchosen: threads that used the GPU without choosing a device, by name.
    users: threads that have launched something.
    capturing: whether the current stream is being captured in a CUDA graph.
    strict: our own code must not read on the host what depends on a collective, unless a wait on
        the host has told that it has succeeded (heard.py).
    """

    guard: ctypes.CDLL
    guard_with_lock: ctypes.PyDLL
    seed: int = 0
    jitter_s: float = 0.0005
    launches: Counter[int] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    counts: bool = False
    misuses: list[str] = field(default_factory=list)
    unchosen: set[str] = field(default_factory=set)
    users: set[int] = field(default_factory=set)
    capturing: bool = False
    strict: bool = False
    threads: dict[int, StreamThread] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)  # Finalizers may take it.


_machines: list[Machine] = []  # One, from `set_up` on.


def set_up(guard: ctypes.CDLL, seed: int, jitter_s: float) -> None:
    with_lock = ctypes.PyDLL(guard._name)
    with_lock.cuEventQuery.argtypes = [ctypes.c_void_p]
    _machines.append(Machine(guard, with_lock, seed, jitter_s))


def machine() -> Machine:
    return _machines[0]


class StreamThread:
    """Runs the kernels of one stream."""

    def __init__(self, number: int) -> None:
        here = machine()
        self.number = number
        self.kernels: SimpleQueue[Kernel] = SimpleQueue()  # Finalizers may put.
        self.launched = 0
        self.ended = 0
        self._jitter_s = here.jitter_s
        self._random = random.Random(f"{here.seed} {number}")
        name = f"gpu-stream-{number}"
        self.thread = threading.Thread(target=self._run, daemon=True, name=name)

    def launch(self, kernel: Kernel, *, always: bool = False) -> None:
        """always: also if the queue is full."""
        while not always and self.launched - self.ended >= DEPTH:
            time.sleep(0.0002)
        other, kernels = ctypes.c_longlong(), ctypes.c_longlong()
        guard = machine().guard
        while guard.stand_in_take_wait(self.number, other, kernels):
            self._put(thread_of(other.value).waiter(kernels.value))
        self._put(kernel)

    def _put(self, kernel: Kernel) -> None:
        self.launched += 1
        machine().guard.stand_in_count_launch(self.number)
        self.kernels.put(kernel)

    def waiter(self, kernels: int) -> Kernel:
        """A kernel of another stream that ends when so many of this one have."""

        def wait() -> None:
            while self.ended < kernels:
                time.sleep(0.0001)

        return wait

    def drain(self) -> None:
        reached = threading.Event()
        self.launch(reached.set, always=True)
        reached.wait()

    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            kernel = self.kernels.get()
            if self._jitter_s and self._random.random() < 0.1:
                time.sleep(self._random.random() * self._jitter_s)
            try:
                kernel()
            except BaseException:
                machine().misuses.append(f"a kernel failed: {traceback.format_exc()}")
            del kernel  # It holds memory.
            self.ended += 1


def thread_of(number: int) -> StreamThread:
    here = machine()
    with here.lock:
        is_new = number not in here.threads
        if is_new:
            here.threads[number] = StreamThread(number)
        stream = here.threads[number]
    if is_new:
        # Without the lock: whoever starts a thread waits for its first lines, in which a garbage
        # collection may run finalizers, which take the lock.
        stream.thread.start()
    return stream


def current() -> int:
    """The number of this thread's stream."""
    return int(machine().guard.stand_in_stream())


def launch(kernel: Kernel) -> None:
    """On this thread's stream."""
    note_thread()
    number = current()
    machine().launches[number] += 1
    thread_of(number).launch(kernel)


def wait_for_stream(what: str) -> None:
    """The host waits for this thread's stream."""
    note_wait(what)
    thread_of(current()).drain()


def note_wait(what: str) -> None:
    """Count that the host waits, by place."""
    here = machine()
    if not here.counts:
        return
    here.waits[f"{what}, {_place()}"] += 1


def _place() -> str:
    """The line that is not torch's and not of this folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def place_of_ours() -> str:
    """The line, if it is one of our own code; else empty."""
    place = _place()
    ours = any(f"/{package}/" in place for package in ("collectives", "runtime", "actors"))
    return place if ours and "/tests/" not in place else ""


def _is_inside(path: str) -> bool:
    return path.endswith(_INSIDE) or "/stand_in_gpu/" in path or "/torch/" in path


def note_thread() -> None:
    """A thread that uses the GPU must have chosen its device; the main thread has GPU 0."""
    here = machine()
    here.users.add(threading.get_ident())
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and not here.guard.stand_in_device_was_set():
        here.unchosen.add(threading.current_thread().name)


@contextlib.contextmanager
def counting_waits() -> Iterator[Counter[str]]:
    here = machine()
    synchronize()
    here.waits.clear()
    here.counts = True
    try:
        yield here.waits
    finally:
        here.counts = False


# -- what stands for the names of torch.cuda -------------------------------------------------------


living: weakref.WeakSet[Stream] = weakref.WeakSet()
"""Streams that somebody has made and still holds."""


class Stream:
    _last = 0
    is_new = True

    def __init__(self, device: object = None, priority: int = 0, number: int | None = None) -> None:
        if number is None:
            with machine().lock:
                Stream._last += 1
                number = Stream._last
        else:
            self.is_new = False
        self.cuda_stream = self.stream_id = number
        self.device = torch.device("cuda", 0)
        self.device_index = 0
        self.thread = thread_of(number)
        if self.is_new:
            living.add(self)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        note_wait("stream.synchronize")
        self.thread.drain()

    def query(self) -> bool:
        return self.thread.launched == self.thread.ended

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class Event:
    """An event that was never recorded counts as complete, as in CUDA."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._reached: threading.Event | None = None
        self.at = (0, 0)
        """The stream on which it was recorded, and how many kernels had been launched there."""
        self._status = ctypes.c_int(_ENDED)

    @property
    def cuda_event(self) -> int:
        """What cuEventQuery of guard.cpp takes."""
        return ctypes.addressof(self._status)

    def record(self, stream: Stream | None = None) -> None:
        note_thread()
        reached = self._reached = threading.Event()
        status = self._status = ctypes.c_int(_NOT_READY)

        def end() -> None:
            status.value = _ENDED
            reached.set()

        thread = (stream or current_stream()).thread
        thread.launch(end)
        self.at = thread.number, thread.launched

    def wait(self, stream: Stream | None = None) -> None:
        note_thread()
        if self._reached is not None:
            (stream or current_stream()).thread.launch(self._reached.wait)

    def query(self) -> bool:
        note_thread()
        # As torch's does, this holds Python's lock while the driver is busy.
        return bool(machine().guard_with_lock.cuEventQuery(self.cuda_event) == _ENDED)

    def synchronize(self) -> None:
        note_wait("event.synchronize")
        if self._reached is not None:
            self._reached.wait()


def current_stream(device: object = None) -> Stream:
    return Stream(number=current())


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    before = current()
    if chosen is not None:
        machine().guard.stand_in_set_stream(chosen.cuda_stream)
    try:
        yield
    finally:
        machine().guard.stand_in_set_stream(before)


class device:
    def __init__(self, _: object) -> None:
        machine().guard.stand_in_set_device(0)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def synchronize(device: object = None) -> None:
    note_wait("cuda.synchronize")
    here = machine()
    with here.lock:
        threads = list(here.threads.values())
    for thread in threads:
        thread.drain()
