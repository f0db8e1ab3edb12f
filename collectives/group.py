"""`Group`: the ranks of one generation, how they meet, and how it numbers what they issue.

What they can do together is in operations.py and objects/collectives.py; the groups that are made
of a group, and how all of them end, in subgroups.py.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import torch
from torch.autograd import profiler

from .contract.communicator import Communicator
from .contract.errors import GroupClosed
from .contract.inference import outside_inference_mode
from .contract.operation import Kind, Operation
from .contract.work import Work
from .diagnosis.debug import DebugLevel, get_debug_level
from .diagnosis.flight_recorder import Activity, FlightRecorder
from .diagnosis.profiling import begin_span
from .diagnosis.statistics import Statistics
from .family import Family
from .meeting import meet
from .objects.channel import ObjectChannel
from .objects.collectives import ObjectCollectives
from .objects.messages import ObjectMessages
from .operations.composed_work import Coalesced, MonitoredBarrier
from .operations.operations import Operations
from .stores.rendezvous import store_from_url
from .stores.store import Store
from .subgroups import Subgroups
from .transports.backends import backend_for
from .transports.interfaces import network_of

DEFAULT_TIMEOUT_S = 60.0

Announce = Callable[[Kind, int, int, int], None]
"""Called with the kind, numel, dtype and detail of an operation, as `Operation` has them."""


@dataclass(frozen=True)
class GroupDescription:
    """What a group is, for people and for `doctor`.

    ranks: the root group's number of each rank. network: the interfaces that its transport uses,
    and what chose them. operations: those issued so far, those of objects left out.
    """

    name: str
    generation: int
    rank: int
    size: int
    ranks: tuple[int, ...]
    backend: str
    device: str
    network: str
    timeout_s: float
    operations: int
    is_open: bool


class Group(Operations, ObjectCollectives, Subgroups):
    """An immutable membership of `size` ranks that run collectives together.

    Make one with `Group.create`; no Ray is needed. Every rank issues the same operations in the
    same order. Each returns a `Work` at once; `.wait()` or `await` it before using the tensors.

    A failure on any rank (a death, a timeout, a mismatch, `abort`) ends the group for all ranks:
    pending and later works raise the same error everywhere, naming the culprits. There is no way
    back; the ranks that are left form a new group with the next generation number.

    rank, size: this process and the number of them. generation: number of the membership.
    device: where tensors must live. timeout_s: seconds an operation may take, counted from its
    issue, unless the call says otherwise. statistics: operations and elements so far.
    ranks: the number of each rank in the root group, from which `new_group` and `split` made this
    one; of a root group 0, 1, 2… parent: the group it was made of, or None.

    A group belongs to the process that made it; a fork of it may only drop it.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        generation: int,
        timeout_s: float,
        name: str,
        store: Store,
        backend: str | None = None,
    ) -> None:
        """store: where its ranks have met; nobody else uses it. backend: as it was asked for."""
        self._communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size
        self.device = communicator.device
        self.backend = communicator.backend
        self.generation = generation
        self.timeout_s = timeout_s
        self.name = name
        self.statistics = Statistics()
        self.ranks: tuple[int, ...] = tuple(range(self.size))
        self.parent = None
        self._recorder = FlightRecorder(self.rank, self.size, name, generation)
        # At DETAIL: shapes that were checked, and the frame of the operation they belong to.
        self._shapes: list[tuple[FrameType, tuple[int, ...]]] = []
        self._notes_shapes = communicator.compares
        self._has_nvtx = self.device.type == "cuda"
        self._next_sequence = 0
        self._store = store
        self._asked_backend = backend
        self._pid = os.getpid()
        self._closed = False
        self._children = []
        self._children_made = itertools.count()
        self._family = Family()
        self._channel = None
        self._messages: ObjectMessages | None = None
        self._family.add(self)
        self._coalesced: Coalesced | None = None  # the block that is open
        self._wire_ops = {}
        self._announce: Announce | None = None

    @classmethod
    @outside_inference_mode
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
        backend: str | None = None,
    ) -> Self:
        """Meet the other ranks in `store` and connect. Blocks until all have come.

        Ranks pick the same `size`, `generation` and `name`; a second group of the same name and
        generation through the same store is told apart by the order of creation.

        backend: None takes what serves the device: NCCL on CUDA; on CPU shared memory where all
        ranks are on one host, else Gloo. Or "shared-memory", "gloo", "nccl", or the name of one of
        your own (`register_backend`); the same on all ranks.

        Raises StoreTimeout naming the ranks that did not come within `timeout_s`. It may be called
        again then, also by ranks that had given up before the others first came.
        """
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), got {rank}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        device = torch.device(device)
        chosen = backend_for(backend, device)
        communicator, rendezvous = meet(
            chosen,
            store,
            rank,
            size,
            device,
            generation=generation,
            timeout_s=timeout_s,
            name=name,
        )
        if get_debug_level() >= DebugLevel.DETAIL:
            from .transports.comparing import comparing

            communicator = comparing(communicator, rendezvous, generation, name)
        return cls(
            communicator,
            generation=generation,
            timeout_s=timeout_s,
            name=name,
            store=rendezvous,
            backend=backend,
        )

    @classmethod
    def from_url(
        cls,
        url: str,
        rank: int | None = None,
        size: int | None = None,
        device: torch.device | str = "cpu",
        *,
        generation: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        name: str = "default",
    ) -> Self:
        """Meet the other ranks at a URL and connect, for processes that are not our actors.

        url: tcp://host:port, file:///path or env://, as in rendezvous.py, which says who listens
        where. rank, size: what the URL or the environment does not say.

        For several groups or generations, keep what `store_from_url` returns, and `create` them
        through its store. Raises what `store_from_url` and `create` raise.
        """
        store, rank, size = store_from_url(url, rank, size, timeout_s=timeout_s)
        return cls.create(
            store, rank, size, device, generation=generation, timeout_s=timeout_s, name=name
        )

    # -- tensors ---------------------------------------------------------------------------------

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
        deadline_s = self._deadline_s(Kind.COALESCED, timeout_s)
        if self._announce is not None:
            self._announce(Kind.COALESCED, 0, -1, -1)
        operation = Operation(
            Kind.COALESCED, self._next_sequence, self.generation, 0, -1, -1, deadline_s
        )

        def end() -> None:
            self._coalesced = None
            self._communicator.end_together()

        self._communicator.begin_together()
        self._coalesced = Coalesced(operation, end)
        return self._coalesced

    def monitored_barrier(
        self, timeout_s: float | None = None, wait_all_ranks: bool = False
    ) -> Work:
        """A barrier to find out who is missing: its CollectiveTimeout names the first rank that is.

        wait_all_ranks: name all that are missing. The error comes to all ranks that are there, and
        ends the generation, as every timeout does. On every backend; torch's only on Gloo.
        """
        return MonitoredBarrier(self.barrier(timeout_s=timeout_s), wait_all_ranks)

    def meet(self) -> Work:
        """A barrier before the ranks are used for something else: none of the user's operations, so
        in no statistics and in no recording. It takes a number, as all operations do."""
        deadline_s = self._deadline_s(Kind.BARRIER, None)
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        operation = Operation(Kind.BARRIER, sequence, self.generation, 0, -1, -1, deadline_s)
        return self._communicator.barrier(operation)

    def announce_to(self, announce: Announce | None) -> None:
        """Call `announce` before each operation that this rank issues, before it is numbered; None:
        no more. It may run operations of this group first, or raise: then nothing is issued.
        """
        self._announce = announce

    @property
    def waits_on_issue(self) -> bool:
        """Whether an operation waits for all ranks before it is issued: at debug level DETAIL."""
        return self._communicator.compares

    # --------------------------------------------------------------------------------------------

    def describe(self) -> GroupDescription:
        """What this group is and uses, as a frozen record; needs no other rank."""
        return GroupDescription(
            self.name,
            self.generation,
            self.rank,
            self.size,
            self.ranks,
            self.backend,
            str(self.device),
            network_of(self.backend),
            self.timeout_s,
            self._next_sequence,
            not self._closed and self._communicator.failure() is None,
        )

    def activity(self, since: float, until: float) -> Activity:
        """How busy this group was, between two times of time.monotonic()."""
        return self._recorder.activity(since, until)

    def __enter__(self) -> Self:
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
        deadline_s = self._deadline_s(kind, timeout_s)
        if self._announce is not None:
            self._announce(kind, numel, dtype, detail)
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        self.statistics.count(kind, elements)
        operation = Operation(
            kind, sequence, self.generation, numel, dtype, detail, deadline_s, finish=finish
        )
        self._recorder.record(operation, sys._getframe(2))
        if self._notes_shapes:
            if self._announce is None:  # Else ranks may take part that know no shape.
                frame = sys._getframe(1)
                operation.shapes = tuple(shape for of, shape in self._shapes if of is frame)
            self._shapes.clear()  # Also what an operation left behind that was refused.
        if profiler._is_profiler_enabled or self._has_nvtx:
            operation.span = begin_span(operation, self._has_nvtx)
        return operation

    def _begin_between_two(
        self, kind: Kind, numel: int, dtype: int, peer: int, tag: int, timeout_s: float | None
    ) -> Operation:
        deadline_s = self._deadline_s(kind, timeout_s)
        if self._announce is not None:
            self._announce(kind, numel, dtype, peer)
        self.statistics.count(kind, numel if kind is Kind.SEND else 0)
        last = self._next_sequence - 1
        operation = Operation(
            kind, last, self.generation, numel, dtype, -1, deadline_s, peer=peer, tag=tag
        )
        self._recorder.record(operation, sys._getframe(2))
        self._shapes.clear()
        if profiler._is_profiler_enabled or self._has_nvtx:
            operation.span = begin_span(operation, self._has_nvtx)
        return operation

    def _deadline_s(self, kind: Kind, timeout_s: float | None) -> float:
        """The seconds that an operation has, if it may be issued here and now."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{kind.name.lower()}: this group belongs to process {self._pid}, and this is a "
                f"fork of it, process {os.getpid()}, which is no rank and has none of its threads; "
                "call Group.create after the fork"
            )
        if self._closed:
            raise GroupClosed(kind.name.lower(), self.generation)
        usual_s = self.timeout_s if self._coalesced is None else self._coalesced.operation.timeout_s
        deadline_s = usual_s if timeout_s is None else timeout_s
        if deadline_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {deadline_s}")
        return deadline_s

    def _count_objects(self, kind: Kind, timeout_s: float | None) -> float:
        deadline_s = self._deadline_s(kind, timeout_s)
        if self._announce is not None:
            self._announce(kind, 0, -1, -1)
        self.statistics.count(kind, 0)
        return deadline_s

    def _object_messages(self, operation: str) -> ObjectMessages:
        if self._coalesced is not None and not self._communicator.has_tags:
            raise RuntimeError(
                f"{operation} inside coalesce(): on the {self.backend} backend its length must "
                "arrive before the rest can be issued; move it out of the block"
            )
        if self._messages is None:
            self._messages = ObjectMessages(self._communicator, self.abort)
        return self._messages

    def _objects(self) -> ObjectChannel:
        if self._channel is None:
            self._channel = ObjectChannel(self, self._channel_group)
            failure = self.failure()
            if failure is not None:
                self._channel.fail(failure)
        return self._channel

    def _issued(self, work: Work, output: Any = None) -> Work:
        if self._coalesced is None:
            return work._giving(output)
        self._coalesced.add(work)
        return self._coalesced
