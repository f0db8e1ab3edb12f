"""`Group`: the ranks of one generation. What they can do together is in operations.py."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from .coalesce import Coalesced
from .communicator import Communicator
from .errors import CollectiveError, GroupAborted, StoreTimeout
from .operation import Kind, Operation
from .operations import Operations
from .statistics import Statistics
from .store import PrefixStore, Store
from .work import Work

DEFAULT_TIMEOUT_S = 60.0


class Group(Operations):
    """An immutable membership of `size` ranks that run collectives together.

    Make one with `Group.create`; no Ray is needed. Every rank issues the same operations in the
    same order. Each returns a `Work` at once; `.wait()` or `await` it before using the tensors.

    A failure on any rank (a death, a timeout, a mismatch, `abort`) ends the group for all ranks:
    pending and later works raise the same error everywhere, naming the culprits. There is no way
    back; the ranks that are left form a new group with the next generation number.

    rank, size: this process and the number of them. generation: number of the membership.
    device: where tensors must live. timeout_s: seconds an operation may take, counted from its
    issue, unless the call says otherwise. statistics: operations and elements so far.
    """

    def __init__(
        self, communicator: Communicator, *, generation: int, timeout_s: float, name: str
    ) -> None:
        self._communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size
        self.device = communicator.device
        self.backend = communicator.backend
        self.generation = generation
        self.timeout_s = timeout_s
        self.name = name
        self.statistics = Statistics()
        self._next_sequence = 0
        self._coalesced: Coalesced | None = None  # the block that is open
        self._wire_ops = {}

    @classmethod
    def create(
        cls,
        store: Store,
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
        *,
        generation: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        name: str = "default",
    ) -> Group:
        """Meet the other ranks in `store` and connect. Blocks until all have come.

        Ranks pick the same `size`, `generation` and `name`; a second group of the same name and
        generation through the same store is told apart by the order of creation.

        Raises StoreTimeout naming the ranks that did not come within `timeout_s`.
        """
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), got {rank}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        device = torch.device(device)
        round_ = store.add(f"group/{name}/{generation}/created_by/{rank}", 1)
        rendezvous = PrefixStore(f"group/{name}/{generation}/{round_}", store)
        rendezvous.set_timeout(timeout_s)
        connect: Callable[[Store, int, int, torch.device, int], Communicator]
        if device.type == "cuda":
            from .nccl import connect
        elif device.type == "cpu":
            from .host import connect
        else:
            raise ValueError(f"device must be a cpu or cuda device, got {device}")
        try:
            communicator = connect(rendezvous, rank, size, device, generation)
        except StoreTimeout as error:
            absent = sorted({int(key.rsplit("/", 1)[-1]) for key in error.keys})
            raise StoreTimeout(
                error.keys,
                error.waited_s,
                f"ranks {absent} of {size} did not come to generation {generation} of group "
                f"{name!r}. Check that they run, and that all use the same store, size, name and "
                "generation",
            ) from error
        return cls(communicator, generation=generation, timeout_s=timeout_s, name=name)

    def coalesce(self, *, timeout_s: float | None = None) -> Coalesced:
        """A block whose operations are one work: `with group.coalesce() as work:`.

        `with` launches at its end, and `work.wait()` or `await work` comes after it; `async with`
        awaits at its end as well. Every rank puts the same operations into its block. On NCCL it
        is one group call. timeout_s: seconds, of operations that do not say their own.

        ::

            async with group.coalesce():  # no order is wrong here, on any backend
                group.send(mine, dst=right)
                group.recv(theirs, src=left)

        Raises RuntimeError inside another such block.
        """
        if self._coalesced is not None:
            raise RuntimeError("coalesce() inside coalesce(): end the outer block first")
        deadline_s = self._deadline(timeout_s)
        operation = Operation(
            Kind.COALESCED, self._next_sequence, self.generation, 0, -1, -1, deadline_s
        )

        def end() -> None:
            self._coalesced = None
            self._communicator.end_together()

        self._communicator.begin_together()
        self._coalesced = Coalesced(operation, end)
        return self._coalesced

    def abort(self, reason: str | BaseException | CollectiveError) -> None:
        """End this generation on all ranks; may be called from any thread.

        Every pending and later work raises, everywhere: a CollectiveError as it is, anything else
        as GroupAborted by this rank, with the reason (of an exception: its traceback as well).
        """
        if isinstance(reason, CollectiveError):
            error = reason
        elif isinstance(reason, BaseException):
            told = "".join(traceback.format_exception_only(reason)).strip()
            trace = "".join(traceback.format_exception(reason))
            error = GroupAborted(self.generation, [self.rank], told, trace)
        else:
            error = GroupAborted(self.generation, [self.rank], reason)
        self._communicator.abort(error)

    def close(self) -> None:
        """Give back memory and threads; peers that still wait for this rank raise PeerLost."""
        self._communicator.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Group({self.name!r}, rank={self.rank}, size={self.size}, "
            f"generation={self.generation}, backend={self.backend!r}, device={str(self.device)!r})"
        )

    def _begin(
        self,
        kind: Kind,
        numel: int,
        dtype: int,
        detail: int,
        timeout_s: float | None,
        elements: float,
        finish: Callable[[], None] | None = None,
    ) -> Operation:
        deadline_s = self._deadline(timeout_s)
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        self.statistics.count(kind, elements)
        return Operation(
            kind, sequence, self.generation, numel, dtype, detail, deadline_s, finish=finish
        )

    def _begin_between_two(
        self, kind: Kind, numel: int, dtype: int, peer: int, tag: int, timeout_s: float | None
    ) -> Operation:
        deadline_s = self._deadline(timeout_s)
        self.statistics.count(kind, numel if kind is Kind.SEND else 0)
        last = self._next_sequence - 1
        return Operation(
            kind, last, self.generation, numel, dtype, -1, deadline_s, peer=peer, tag=tag
        )

    def _deadline(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            together = self._coalesced
            return self.timeout_s if together is None else together.operation.timeout_s
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        return timeout_s

    def _issued(self, work: Work) -> Work:
        if self._coalesced is None:
            return work
        self._coalesced.add(work)
        return self._coalesced
