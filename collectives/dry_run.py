"""The group of a rank that runs its function by itself, before it joins the others.

A worker that comes to a run in progress first runs the function up to its first step, while the
other ranks train. It has the rank and the number of ranks that it will have, and no peers. A
collective of the function returns what it returned on the other ranks, which have kept the results
of their own beginning (kept_results.py). If no rank has kept a result, the dry run ends.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch

from .contract.communicator import Communicator
from .contract.errors import CollectiveError, GroupAborted, fresh_copy
from .contract.operation import Kind, Operation, ReduceOp
from .contract.work import SettledWork, Work
from .group import Group
from .kept_results import KeptResult, name_of, signature_of
from .objects.messages import ObjectMessages
from .shared_memory.symmetric_memory import empty_symmetric
from .stores.store import Store


class DryRunRefused(BaseException):
    """The function cannot run by itself up to its first step; the text says why. It unwinds the
    function, and is not an Exception, so that only the runtime catches it."""


class DryRunGroup(Group):
    """See above."""

    is_dry_run = True

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        *,
        generation: int,
        timeout_s: float,
        store: Store,
    ) -> None:
        self._answers = _Answers(rank, size, device, generation)
        super().__init__(
            self._answers,
            generation=generation,
            timeout_s=timeout_s,
            name="dry run",
            store=store,
        )

    def answer_with(self, results: Sequence[KeptResult]) -> None:
        """results: those that the other ranks have kept, in the order of issue."""
        self._answers.results = list(results)

    @property
    def refusal(self) -> str:
        """Why an operation could not be answered, even if the function has continued; else
        empty."""
        return self._answers.refusal

    def _refuse(self, why: str) -> NoReturn:
        self._answers.refuse(why)

    def _issue_objects(self, *_: Any) -> NoReturn:
        self._refuse("it sends objects to other ranks through its group before its first step")

    def _object_messages(self, operation: str) -> ObjectMessages:
        self._refuse(f"it calls {operation} before its first step")

    def another_store(self) -> Store:
        self._refuse("it agrees on something with the other ranks before its first step")

    def connect_child(self, *_: Any, **__: Any) -> Self:
        self._refuse("it makes another group of the ranks before its first step")


class _Answered(SettledWork):
    """A work that is done when it is issued."""

    def __init__(self, operation: Operation, lock: threading.Lock) -> None:
        super().__init__(operation, lock)
        if operation.finish is not None:
            operation.finish()
        self.settle(None)

    def _block(self) -> None:
        pass

    def _end_generation(self, reason: str) -> None:
        pass


class _Answers(Communicator):
    """Answers each operation with the next kept result."""

    backend = "dry run"

    def __init__(self, rank: int, size: int, device: torch.device, generation: int) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.refusal = ""
        self.results: list[KeptResult] = []
        self._generation = generation
        self._failure: CollectiveError | None = None  # None: the dry run is not over
        self._lock = threading.Lock()

    def empty_symmetric(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # It belongs to no group: the ranks among which this one comes can read it.
        if self.device.type == "cpu":
            return empty_symmetric(numel, dtype)
        return super().empty_symmetric(numel, dtype)

    def refuse(self, why: str) -> NoReturn:
        # The first reason: what follows it may come of code that has caught it.
        self.refusal = self.refusal or why
        raise DryRunRefused(why)

    def _answer(self, operation: Operation, tensor: torch.Tensor) -> Work:
        self._check()
        what = name_of(operation, tensor)
        # More operations than the others ran: the function has taken another way here.
        if not self.results:
            self.refuse(
                f"it runs {what} before its first step, of which the other ranks have kept no "
                "result"
            )
        kept = self.results.pop(0)
        # By kind, size and dtype: results are matched by their order, so one that differs ends it.
        if kept.signature != signature_of(operation, tensor) or kept.values is None:
            self.refuse(
                f"it runs {what} before its first step, whose result the other ranks cannot give: "
                f"theirs was of {kept.name}"
            )
        tensor.copy_(kept.values)
        return _Answered(operation, self._lock)

    def _check(self) -> None:
        if self._failure is not None:
            raise fresh_copy(self._failure)

    def all_reduce(self, operation: Operation, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return self._answer(operation, tensor)

    def broadcast(self, operation: Operation, tensor: torch.Tensor, root: int) -> Work:
        return self._answer(operation, tensor)

    def all_gather(self, operation: Operation, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._answer(operation, output)

    def barrier(self, operation: Operation) -> Work:
        # It says only that all have come, which they have in the run of the others.
        self._check()
        return _Answered(operation, self._lock)

    def _of_a_rank(self, operation: Operation, *_: Any, **__: Any) -> NoReturn:
        self._check()
        kind = Kind(operation.kind).name.lower()
        self.refuse(
            f"it calls {kind} before its first step, whose result differs from rank to rank"
        )

    reduce = reduce_scatter = exchange = send = recv = _of_a_rank

    def abort(self, error: CollectiveError) -> None:
        self._failure = self._failure or error

    def failure(self) -> CollectiveError | None:
        return self._failure

    def close(self) -> None:
        self.abort(GroupAborted(self._generation, [self.rank], "the dry run is over"))
