"""A thread for the callbacks of a program: they may block, and nothing else depends on it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch


class CallbackThread:
    """Completes futures and runs their callbacks, in order: a thread on which no transfer depends,
    so they may block. It never ends."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)

    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                task()
            except Exception as error:  # Later futures need this thread.
                report_uncaught(error)
            del task  # An idle thread must not keep tensors alive.

    @contextlib.contextmanager
    def streams(self, devices: list[torch.device]) -> Iterator[None]:
        """Use this thread's own streams on GPUs, because the program uses the default stream."""
        if devices:
            # The end of `torch.cuda.stream` would open a context on GPU 0.
            torch.cuda.set_device(devices[0])
        with contextlib.ExitStack() as stack:
            for device in devices:
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield


_threads: dict[str, CallbackThread] = {}
_making = threading.Lock()


def callback_thread(name: str, first: Callable[[], object] | None = None) -> CallbackThread:
    """This process's thread of that name; made when needed, with `first` as its first task."""
    with _making:
        thread = _threads.get(name)
        if thread is None:
            thread = _threads[name] = CallbackThread(name)
            if first is not None:
                thread.add(first)
        return thread


def _forget_threads() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _making
    _threads.clear()
    _making = threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)


def report_uncaught(error: BaseException) -> None:
    """Hand an error of a callback, which nobody else will raise, to threading.excepthook."""
    frames, thread = error.__traceback__, threading.current_thread()
    threading.excepthook(threading.ExceptHookArgs((type(error), error, frames, thread)))
