"""`Group`: the ranks of one generation, how they meet, and how their operations are numbered.

The operations are in operations/operations.py and objects/collectives.py. subgroups.py makes
groups of a group's ranks, and ends and closes groups.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.autograd import profiler

from .contract.argument_kinds import check_kinds, check_range, checked_device, checked_place
from .contract.communicator import Communicator
from .contract.deadlines import Seconds, checked_seconds
from .contract.errors import GroupClosed, UnsupportedOperation
from .contract.modes import outside_modes
from .contract.operation import Finish, Kind, Operation
from .contract.torch_words import instead_of_method, says
from .contract.work import Work
from .diagnosis.debug import DebugLevel, get_debug_level
from .diagnosis.flight_recorder import Activity, FlightRecorder
from .diagnosis.profiling import begin_span, nvtx_is_recorded
from .diagnosis.statistics import Statistics
from .family import Family
from .kept_results import KeepingCommunicator, KeptResults, keeping
from .meeting import meet
from .objects.channel import ObjectChannel
from .objects.collectives import ObjectCollectives
from .objects.messages import ObjectMessages
from .operations.composed_work import Coalesced, MonitoredBarrier
from .operations.host_reads import HostReads
from .stores.rendezvous import store_from_url
from .stores.signed_store import Seal, signed
from .stores.store import Store
from .subgroups import Subgroups
from .transports.backends import backend_for
from .transports.interfaces import network_of

DEFAULT_TIMEOUT_S = 60.0
_LONGEST_NAME = 1000  # characters; a subgroup's name begins with that of its group

Announce = Callable[[Kind, int, int, int], None]
"""Called with the kind, numel, dtype and detail of an operation, as `Operation` has them."""


@dataclass(frozen=True)
class GroupDescription:
    """The facts about a group, for users and for `doctor`.

        description = group.describe()
        print(description.backend, description.network, description.operations)
        assert description.is_open

    ranks: the root group's number of each rank. network: the interfaces that the transport uses,
    and what chose them. operations: the number issued so far, without operations on objects.
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


class Group(HostReads, ObjectCollectives, Subgroups):
    """An immutable membership of `size` ranks that run collectives together.

        with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
            tensor = torch.ones(4)
            group.all_reduce(tensor).wait()

    `Group.create` makes one; no Ray is needed. Every rank issues the same operations in the same
    order. Each returns a `Work` at once; `.wait()` or `await` it before using the tensors.

    A failure on any rank (a death, a timeout, a mismatch, `abort`) ends the group for all ranks:
    pending and later works raise the same error everywhere, naming the culprits. An ended group
    stays ended; the surviving ranks make a new group with the next generation number.

    rank, size: the number of this process, and of all processes.
    generation: number of the membership.
    device: where tensors must live.
    timeout_s: seconds an operation may take from its issue, unless the call passes its own.
    statistics: operations and elements so far.
    ranks: the number of each rank in the root group; 0, 1, 2… if this group is the root.
    parent: the group from which `new_group` or `split` made this one, or None.

    A group belongs to the process that made it; a fork of the process may only drop it.
    """

    rehearses = False
    """Whether this rank runs its function by itself, without peers (rehearsal.py)."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        generation: int,
        timeout_s: float,
        name: str,
        store: Store,
        backend: str | None = None,
        seal: Seal | None = None,
    ) -> None:
        """store: where the ranks have met, for this group alone. backend: as passed to `create`.
        seal: signs the objects that ranks send each other; None: they are not signed."""
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
        # At debug level DETAIL: the checked shapes, each with the frame of its operation.
        self._shapes: list[tuple[FrameType, tuple[int, ...]]] = []
        self._notes_shapes = communicator.compares
        self._on_cuda = self.device.type == "cuda"
        self._with_nvtx = nvtx_is_recorded(self.device)
        self._next_sequence = 0
        self._store = store
        self.seal = seal
        self._asked_backend = backend
        self._pid = os.getpid()
        self._closed = False
        self._children = []
        self._children_made = itertools.count()
        self._family = Family()
        self._channel = None
        self._messages: ObjectMessages | None = None
        self._family.add(self)
        self._coalesced: Coalesced | None = None  # the open block
        self._wire_ops = {}
        self._announce: Announce | None = None
        self._kept: KeptResults | None = None

    @classmethod
    @outside_modes
    def create(
        cls,
        store: Store,
        rank: int,
        size: int,
        device: torch.device | str | int = "cpu",
        *,
        generation: int = 0,
        timeout_s: Seconds = DEFAULT_TIMEOUT_S,
        name: str = "default",
        backend: str | None = None,
    ) -> Self:
        """Meet the other ranks in `store` and connect. Blocks until all ranks have come.

        All ranks pass the same `size`, `generation` and `name`. Groups of the same name and
        generation in one store are distinguished by the order of their creation.

        backend: None chooses by device: NCCL on CUDA; on CPU shared memory if all ranks are on one
        host, else Gloo. Otherwise "shared-memory", "gloo", "nccl", or a name that
        `register_backend` has registered; the same on all ranks.

        With a secret (of the store, or CHORUSLINE_SECRET), what ranks read in the store must be
        signed with it, and between hosts their objects as well: stores/signed_store.py.

        Raises StoreTimeout naming the ranks that did not come within `timeout_s`, SecretMismatch if
        the ranks have different secrets. After a timeout the ranks may call it again, at different
        times; those that call again meet.
        """
        if not isinstance(store, Store):
            raise TypeError(
                f"store must be a chorusline.Store, got {type(store).__name__}; "
                "StoreFromTorch(store) makes one of a store of torch"
            )
        check_kinds(cls.create, locals())
        rank, size = checked_place(rank, size)
        timeout_s = checked_seconds(timeout_s)
        generation = int(generation)
        if not 0 <= generation < 2**63:
            raise ValueError(f"generation must be in [0, 2**63), got {generation}")
        if not 0 < len(name) <= _LONGEST_NAME:
            raise ValueError(
                f"name must have 1 to {_LONGEST_NAME} characters, got one of {len(name)}"
            )
        device = checked_device(device)
        chosen = backend_for(backend, device)
        communicator, rendezvous, seal = meet(
            chosen,
            signed(store),
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
            seal=seal,
        )

    @classmethod
    def from_url(
        cls,
        url: str,
        rank: int | None = None,
        size: int | None = None,
        device: torch.device | str | int = "cpu",
        *,
        generation: int = 0,
        timeout_s: Seconds = DEFAULT_TIMEOUT_S,
        name: str = "default",
        secret: str | bytes | None = None,
    ) -> Self:
        """Meet the other ranks at a URL and connect, for processes that Chorusline did not start.

        url: tcp://host:port, file:///path or env://; stores/rendezvous.py says which rank listens.
        rank, size: needed where neither the URL nor the environment gives them.
        secret: as in `store_from_url`.

        For several groups or generations, call `store_from_url` once and pass its store to
        `create`. Raises what `store_from_url` and `create` raise.
        """
        store, rank, size = store_from_url(url, rank, size, timeout_s=timeout_s, secret=secret)
        return cls.create(
            store, rank, size, device, generation=generation, timeout_s=timeout_s, name=name
        )

    # -- tensors ---------------------------------------------------------------------------------

    def empty_symmetric(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor, (numel,), not initialised, whose memory the other ranks read where it lies.

        Where all ranks of one host pass such tensors, or views of them, an `all_reduce`,
        `reduce_scatter` or `all_gather` of more than 4 MiB copies nothing into memory between them,
        if there is a core for each rank. The results are the same, bit for bit.

        Only this rank writes to it. A rank makes it without the other ranks, and may use it with
        any group, including one of a later generation. Between hosts, on GPUs, and where the limits
        of the process allow no such memory (`chorusline doctor`), it is an ordinary tensor on the
        group's device. A forked process shares its memory. torch uses the same name for such
        tensors on GPUs.

        Raises TypeError or ValueError for a `numel` that no tensor has, and RuntimeError where
        there is no memory for it.
        """
        check_kinds(Group.empty_symmetric, locals())
        check_range("numel", numel, 0, (2**63 - 1) // dtype.itemsize)
        return self._communicator.empty_symmetric(numel, dtype)

    def coalesce(self, *, timeout_s: Seconds | None = None) -> Coalesced:
        """A block whose operations are one work: `with group.coalesce() as work:`.

        Messages may be in any order; collectives are in the same order on all ranks.

        `with` launches the operations at its end; call `work.wait()` or `await work` after it.
        `async with` also awaits at its end. Every rank issues the same operations in its block. On
        NCCL the block is one group call. timeout_s: seconds, for operations that pass none.

        ::

            async with group.coalesce():  # Either order is right, on all backends.
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

    @says(timeout="write timeout_s=, in seconds", group="call it on that group")
    def monitored_barrier(
        self, timeout_s: Seconds | None = None, wait_all_ranks: bool = False
    ) -> Work:
        """A barrier that finds missing ranks: its CollectiveTimeout names the first one.

        wait_all_ranks: name all missing ranks. All ranks that are present raise the error, which
        ends the generation, as every timeout does. Every backend has it; in torch, only Gloo.
        """
        return MonitoredBarrier(self.barrier(timeout_s=timeout_s), wait_all_ranks)

    def meet(self) -> Work:
        """A barrier before the ranks turn to another task. It is numbered as all operations are,
        but not a user's operation, so statistics and recordings leave it out."""
        self.turn()
        deadline_s = self._deadline_s(Kind.BARRIER, None)
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        operation = Operation(Kind.BARRIER, sequence, self.generation, 0, -1, -1, deadline_s)
        return self._communicator.barrier(operation)

    def turn(self) -> None:
        """All ranks turn to another task: none of them rests any longer."""
        self._communicator.turn()

    def rest(self) -> None:
        """This rank issues nothing more before the next `meet` or `turn`: peers whose collectives
        wait for it fail at once, with a CollectiveMismatch, instead of at their deadline."""
        if not self._closed and not self._recorder.has_pending:
            self._communicator.rest(self._next_sequence)

    def announce_to(self, announce: Announce | None) -> None:
        """Call `announce` before this rank issues and numbers an operation; None ends that.

        `announce` may run operations of this group first. If it raises, nothing is issued."""
        self._announce = announce

    def keep_results(self, kept: KeptResults | None) -> None:
        """Keep the results of the operations that are issued from here on; None ends that."""
        inner = self._communicator
        if isinstance(inner, KeepingCommunicator):
            inner = inner.inner
        self._kept = kept
        self._communicator = keeping(inner, kept) if kept is not None else inner

    @contextlib.contextmanager
    def unkept(self) -> Iterator[None]:
        """A block whose results are not kept: its operations are not the function's own."""
        with self._kept.paused() if self._kept is not None else contextlib.nullcontext():
            yield

    @property
    def waits_on_issue(self) -> bool:
        """Whether operations wait for all ranks before they are issued, as at level DETAIL."""
        return self._communicator.compares

    # --------------------------------------------------------------------------------------------

    def describe(self) -> GroupDescription:
        """The facts about this group, as a frozen record; needs no other rank."""
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

    @property
    def has_misled(self) -> bool:
        """Whether this program has continued after `Work.wait()` of an operation (of the last 512)
        that has not succeeded, in this group or one of its family. On a GPU `wait()` returns before
        that is known; what was computed since may come from an operation that was stopped."""
        return self._family.has_misled

    def activity(self, since: float, until: float) -> Activity:
        """How busy this group was, between two times of time.monotonic()."""
        return self._recorder.activity(since, until)

    if not TYPE_CHECKING:  # A type checker would take every attribute for known.

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(text + instead_of_method(name), name=name, obj=self)

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
        timeout_s: Seconds | None,
        elements: float,
        finish: Finish | None = None,
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
            if self._announce is None:  # Otherwise ranks may take part that know no shapes.
                frame = sys._getframe(1)
                operation.shapes = tuple(shape for of, shape in self._shapes if of is frame)
            self._shapes.clear()  # Also removes shapes of operations that a check refused.
        if profiler._is_profiler_enabled or self._with_nvtx:
            operation.span = begin_span(operation, self._with_nvtx)
        return operation

    def _begin_between_two(
        self, kind: Kind, numel: int, dtype: int, peer: int, tag: int, timeout_s: Seconds | None
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
        if profiler._is_profiler_enabled or self._with_nvtx:
            operation.span = begin_span(operation, self._with_nvtx)
        return operation

    def _deadline_s(self, kind: Kind, timeout_s: Seconds | None) -> float:
        """The seconds that an operation has; raises if it may not be issued here and now."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{kind.name.lower()}: this group belongs to process {self._pid}, and this is a "
                f"fork of it, process {os.getpid()}, which is not a rank and has none of its "
                "threads; call Group.create after the fork"
            )
        if self._closed:
            raise GroupClosed(kind.name.lower(), self.generation)
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedOperation(
                f"{kind.name.lower()} in a CUDA graph",
                self.backend,
                "a replayed graph would run it without the deadlines and the errors of its "
                "group; capture the computation only, and issue collectives between replays",
            )
        block = self._block_here()
        usual_s = self.timeout_s if block is None else block.operation.timeout_s
        return usual_s if timeout_s is None else checked_seconds(timeout_s)

    def _count_objects(self, kind: Kind, timeout_s: Seconds | None) -> float:
        deadline_s = self._deadline_s(kind, timeout_s)
        if self._announce is not None:
            self._announce(kind, 0, -1, -1)
        if self._kept is not None:
            self._kept.spoil("it sends objects through its group before its first step")
        self.statistics.count(kind, 0)
        return deadline_s

    def _object_messages(self, operation: str) -> ObjectMessages:
        if self._block_here() is not None and not self._communicator.has_tags:
            raise RuntimeError(
                f"{operation} inside coalesce(): on the {self.backend} backend its length must "
                "arrive before the rest can be issued; move it out of the block"
            )
        if self._messages is None:
            self._messages = ObjectMessages(self._communicator, self.abort, self.seal)
        return self._messages

    def _objects(self) -> ObjectChannel:
        if self._channel is None:
            self._channel = ObjectChannel(self, self._channel_group)
            failure = self.failure()
            if failure is not None:
                self._channel.fail(failure)
        return self._channel

    def _issued(self, work: Work, output: Any = None) -> Work:
        block = self._block_here()
        if block is None:
            return work._giving(output)
        block.add(work)
        return block

    def _block_here(self) -> Coalesced | None:
        """The coalesced block that is open, if what this thread issues belongs to it."""
        block = self._coalesced
        if block is None or (block.thread != get_ident() and self.device.type == "cpu"):
            return None
        return block
