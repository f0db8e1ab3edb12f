"""An operation in flight, as torch sees it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from ..contract.errors import CollectiveError
from ..contract.work import Work
from ..group import Group
from ..operations.composed_work import Coalesced
from .ordered_future import OrderedFuture, current_depth, thread_at
from .translation import seconds

_NONE = timedelta(0)
_KEPT = 256
_LOOK_S = 0.0005

_kept: OrderedDict[int, TorchWork] = OrderedDict()
"""Works that no thread has waited for. torch's C++ (DDP in Join) keeps only its own half of a work
that Python passes to it, and would call a Python half that is already collected. It waits for such
a work within the step."""


_TorchWork: Any = dist._Work  # type: ignore[attr-defined]


class TorchWork(_TorchWork):
    """inner: the work of a `Group`. outputs: the value of its future, tensors or lists of them.
    after: completes the outputs when the data has arrived, before anything may read them.
    name, shapes_of: its range in a profiler. ranks: of the process group, by their global numbers.

    Waiting raises Chorusline's errors, with the global numbers of the ranks. If its timeout passes,
    the generation ends.
    """

    def __init__(
        self,
        inner: Work,
        outputs: list[Any],
        name: str,
        after: Callable[[], None] | None = None,
        shapes_of: list[torch.Tensor] | None = None,
        *,
        ranks: tuple[int, ...],
    ) -> None:
        super().__init__()
        self._inner = inner
        self._outputs = outputs
        self._after = after
        self._ranks = ranks
        self._finishing = threading.Lock()
        self._is_completing = False
        self._depth = current_depth()
        self._future: OrderedFuture | None = None  # None: unless it was asked for
        self._span: Any = None
        # The work of a block has a range of its own, at the block's end.
        is_within_block = isinstance(inner, Coalesced) and inner.is_open
        if profiler._is_profiler_enabled and not is_within_block:
            self._profile(name, outputs if shapes_of is None else shapes_of)
        _kept[id(self)] = self
        if len(_kept) > _KEPT:
            _kept.popitem(last=False)

    def wait(self, timeout: timedelta = _NONE) -> bool:
        if isinstance(self._inner, Coalesced) and self._inner.is_open:
            return True  # torch's synchronous calls wait inside a block, which starts at its end.
        try:
            limit_s = seconds(timeout)
            if limit_s is not None and not self._inner.is_completed():
                self._wait_for(limit_s)
            self._inner.wait()
            self._finish()
            # torch promises that the future is complete when wait() returns. The thread of the
            # callbacks would come to it only after earlier works, which may not have ended.
            self._complete(None)
        except CollectiveError as error:
            counted = _by_global_ranks(error, self._ranks)
            raise counted from (None if counted is error else error)
        finally:
            _kept.pop(id(self), None)
        return True

    def get_future(self) -> OrderedFuture:
        if self._future is None:
            thread = thread_at(self._depth)
            self._future = OrderedFuture(thread, self._inner._cuda_devices(), self._arrive)
            thread.add(self._settle)
        return self._future

    def is_completed(self) -> bool:
        done = self._inner.is_completed()
        if done:
            if self._inner.error() is None:
                self._finish()
            _kept.pop(id(self), None)
        return done

    def is_success(self) -> bool:
        return self.is_completed() and self._inner.error() is None

    def exception(self) -> BaseException | None:
        error = self._inner.error() if self.is_completed() else None
        return None if error is None else _by_global_ranks(error, self._ranks)

    def result(self) -> list[Any]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._inner.source_rank

    _source_rank = source_rank

    def _finish(self) -> None:
        if self._after is not None:
            with self._finishing:
                # Cleared last: a thread that sees None reads the outputs.
                if self._after is not None:
                    self._after()
                    # The threads that wait have other streams, which nothing orders after this one,
                    # and so has the memory that it copies from.
                    for device in self._inner._cuda_devices():
                        torch.cuda.current_stream(device).synchronize()
                    self._after = None

    def _wait_for(self, limit_s: float) -> None:
        over = threading.Event()
        self._inner.add_done_callback(over.set)
        operation = self._inner.operation
        reason = f"{operation} was given up after wait()'s timeout of {limit_s:g} s"
        try:
            over.wait(limit_s)
        except BaseException as error:  # An interrupt: the other ranks wait for this one.
            reason = f"{type(error).__name__} during {operation}"
            raise
        finally:
            if not over.is_set():
                self._inner._end_generation(reason)

    def _settle(self) -> None:
        """Complete the future; called in the callback thread."""
        future = self._future
        assert future is not None
        with future._callbacks.streams(future._devices):
            self._arrive()
            future.has_its_turn = True
        _kept.pop(id(self), None)

    def _arrive(self) -> None:
        """Wait for the operation, and complete the future. An interrupt of this thread is no
        outcome of the operation."""
        failure: BaseException | None = None
        try:
            self._inner.wait()
            self._finish()
        except Exception as error:
            failure = _by_global_ranks(error, self._ranks)
        self._complete(failure)

    def _complete(self, failure: BaseException | None) -> None:
        """Give the future its value, once; it has it when this returns."""
        future = self._future
        if future is None:
            return
        while not future.done():
            with self._finishing:
                if future.done():  # By the thread that has cleared the flag.
                    return
                is_first, self._is_completing = not self._is_completing, True
            if not is_first:  # Another thread does it now.
                time.sleep(_LOOK_S)
                continue
            # Without the lock: what torch's C++ calls back, as of collect_all, runs in here, and
            # may wait for this work.
            try:
                if failure is None:
                    future.set_result(self._outputs)
                else:
                    future.fail(failure)
            finally:
                self._is_completing = False  # If it was interrupted, another thread has to do it.

    def _profile(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Begin a range from the issue to the end, with shapes, as torch's backends do."""
        self._span = torch._C._profiler._RecordFunctionFast(name, list(tensors))
        self._span.__enter__()
        # torch shows a range as asynchronous if another thread ends it than began it.
        thread = thread_at(self._depth)
        self._inner.add_done_callback(lambda: thread.add(self._end_span))

    def _end_span(self) -> None:
        self._span.__exit__(None, None, None)
        self._span = None  # torch records the dropping thread as the one that ended it.


def _by_global_ranks(error: BaseException, ranks: tuple[int, ...]) -> BaseException:
    """The error of a process group of `ranks` with the numbers that torch.distributed uses."""
    if not isinstance(error, CollectiveError) or not error.ranks:
        return error
    world = getattr(dist.group.WORLD, "group", None) if dist.is_initialized() else None
    if not isinstance(world, Group) or ranks == world.ranks:
        return error
    return world.as_counted_here(error)


def in_turn(*steps: Callable[[], None] | None) -> Callable[[], None]:
    """One function that calls those of `steps` that are not None."""

    def run() -> None:
        for step in steps:
            if step is not None:
                step()

    return run
