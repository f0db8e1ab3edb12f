"""`Group`: the ranks of one generation, how they meet, and what they do together.

Names of operations, their meanings and the order of their positional arguments are those of
torch.distributed; a few arguments have names of our own (contract/torch_hints.py names them to a
caller), and those that torch has after `group` do not exist. Where torch has one function for a
list of tensors and one for a single tensor (all_gather and all_gather_into_tensor), there is one
method here, and the type of the argument chooses: a list or tuple has one tensor per rank; a tensor
holds the parts of all ranks in rank order, each as a contiguous range.

A tensor may be anything that operations/arguments.py accepts: a torch tensor of any strides, a
numpy or CuPy array, anything with DLPack, on the group's device. Results are written into the
caller's memory. Dtypes: float64, float32, float16, bfloat16, int64 to int8, uint8, bool,
complex128, complex64.

Each operation checks its arguments, is counted, recorded and handed to the communicator, and
returns a `Work` at once. A caller's mistake raises ValueError or TypeError before anything is
enqueued, and UnsupportedOperation if this backend lacks the operation. Written tensors are
undefined until the work is done; until then no other code may touch the tensors that an operation
reads or writes.

Objects travel between all ranks through objects/channel.py, between two through
objects/messages.py.

Groups of a group's ranks meet in the store in which their group met. All of them are one family,
with one generation, and end together: see group_family.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch

from .contract.argument_kinds import check_kinds, check_range, checked_device, checked_place
from .contract.arithmetic import reduce_into
from .contract.communicator import Communicator
from .contract.deadlines import Seconds, checked_seconds
from .contract.dtypes import DTYPE_INDEX
from .contract.endpoint import Endpoint
from .contract.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PeerLost,
    StoreTimeout,
    UnsupportedOperation,
    fresh_copy,
    with_article,
)
from .contract.modes import outside_modes
from .contract.operation import (
    ANY_RANK,
    FIRST_OBJECT_TAG,
    UNEVEN,
    Finish,
    Kind,
    Operation,
    ReduceOp,
    root_and_op,
)
from .contract.plain_numbers import whole
from .contract.torch_hints import (
    TOO_FEW,
    TOO_MANY,
    instead_of_method,
    object_operation,
    says,
    tensor_operation,
)
from .contract.work import Work
from .diagnosis.blame import usual_and_blamed
from .diagnosis.debug import DebugLevel, get_debug_level
from .diagnosis.flight_recorder import Activity, FlightRecorder, FlightRecording
from .diagnosis.profiling import nvtx_is_recorded, span_of
from .diagnosis.statistics import Statistics
from .group_family import Family
from .kept_results import KeepingCommunicator, KeptResults
from .meeting import WatchedStore, meet, own_part, ranks_of_keys
from .objects.blocking import (
    BytesGroup,
    all_gather_bytes,
    broadcast_bytes,
    gather_bytes,
    scatter_bytes,
)
from .objects.channel import ObjectChannel, ObjectWork, RecorderOnBehalf
from .objects.messages import ObjectMessages, ScriptedWork
from .objects.payloads import MapLocation, dumps, sealed
from .operations.arguments import (
    Array,
    Finisher,
    checked,
    checked_list,
    checked_op,
    finisher,
    read,
    same_dtype,
    share_memory,
    travelling_dtype,
    unshared,
    written,
)
from .operations.composed_work import Coalesced, MonitoredBarrier
from .operations.host_reads import Reading
from .stores.rendezvous import store_from_url
from .stores.signed_store import Seal, signed
from .stores.store import PrefixStore, Store
from .transports.backends import backend_for
from .transports.interfaces import network_of

if TYPE_CHECKING:
    from .transports.host import PreparedEndpoint

DEFAULT_TIMEOUT_S = 60.0
_OF_THE_RUNTIME = re.compile(
    "activity|all_reduce_and_read|announce_to|another_store|as_counted_here|broadcast_and_read|"
    "connect_child|end_with|failure|has_misled|keep_results|meet|is_dry_run|recorder|rest|"
    "seal|turn|unkept|waits_on_issue"
)
"""What Tab does not show of a group, and the reference leaves out: users have no use for it."""

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


class Group:
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

    is_dry_run = False
    """Whether this rank runs its function by itself, without peers (dry_run.py)."""

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
        self.parent: Self | None = None  # None: of a root group
        self.recorder = FlightRecorder(self.rank, self.size, name, generation)
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
        self._children: list[Self] = []
        self._children_made = itertools.count()
        """Equal on all ranks, because making a group is a collective."""
        self._family = Family()
        self._channel: ObjectChannel | None = None  # None: until objects travel, and after `close`
        self._messages: ObjectMessages | None = None  # None: until objects travel between two ranks
        self._family.add(self)
        self._coalesced: Coalesced | None = None  # the open block; None: no block is open
        self._wire_ops: dict[tuple[ReduceOp, torch.dtype], ReduceOp] = {}  # known to be valid
        self._announce: Announce | None = None  # None: unless ranks follow this one
        self._kept: KeptResults | None = None  # None: unless a worker may come and need the results

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
        met = meet(
            chosen,
            signed(store),
            rank,
            size,
            device,
            generation=generation,
            timeout_s=timeout_s,
            name=name,
        )
        return cls._of_met(
            *met, generation=generation, timeout_s=timeout_s, name=name, backend=backend
        )

    @classmethod
    @outside_modes
    def _create_prepared(
        cls,
        prepared: PreparedEndpoint,
        endpoints: Sequence[Endpoint],
        look: Callable[[], None],
        store: Store,
        rank: int,
        *,
        generation: int,
        timeout_s: float,
    ) -> Self:
        """As `create`, on a CPU, of ranks on one host that know each other's endpoints. look: as in
        PreparedEndpoint.connect."""
        name = "default"
        communicator = prepared.connect(endpoints, rank, generation, timeout_s, look)
        own = own_part(signed(store), name, generation, 0, timeout_s)
        return cls._of_met(
            *(communicator, own, None),
            generation=generation,
            timeout_s=timeout_s,
            name=name,
            backend=None,
        )

    @classmethod
    def _of_met(
        cls,
        communicator: Communicator,
        rendezvous: PrefixStore,
        seal: Seal | None,
        *,
        generation: int,
        timeout_s: float,
        name: str,
        backend: str | None,
    ) -> Self:
        # Imported when it is asked for: it costs each operation a comparison by all ranks.
        if get_debug_level() >= DebugLevel.DETAIL:
            from .transports.comparing import ComparingCommunicator

            communicator = ComparingCommunicator(  # type: ignore[abstract]
                communicator, rendezvous, generation, name
            )
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

    # -- one tensor, all ranks ---------------------------------------------------------------------

    @tensor_operation()
    def all_reduce(
        self,
        tensor: Array,
        op: ReduceOp = ReduceOp.SUM,
        *,
        factor: complex | None = None,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Reduce `tensor` over all ranks, in place, to the same bits on every rank.

        tensor: any shape; same number of elements and dtype on all ranks. factor: for PREMUL_SUM.
        """
        return self._all_reduce(tensor, op, factor, timeout_s)

    def _all_reduce(
        self,
        tensor: Array,
        op: ReduceOp = ReduceOp.SUM,
        factor: complex | None = None,
        timeout_s: Seconds | None = None,
        finishers: Sequence[Finisher] = (),
    ) -> Work:
        """finishers: what else ends the operation."""
        tensor = self._checked(tensor, "tensor", True)
        wire_op = self._checked_op("all_reduce", op, factor, tensor)
        finishers = [*finishers]
        flat = written(tensor, finishers, also_read=True)
        if factor is not None:
            flat = _scaled(flat, tensor, factor, finishers)
        numel = tensor.numel()
        operation = self._begin(
            Kind.ALL_REDUCE,
            numel,
            DTYPE_INDEX[tensor.dtype],
            op,
            timeout_s,
            2 * numel * (self.size - 1) / self.size,
            finisher(finishers),
        )
        return self._issued(self._communicator.all_reduce(operation, flat, wire_op), tensor)

    @tensor_operation(root="write dst=")
    def reduce(
        self,
        tensor: Array,
        dst: int = 0,
        op: ReduceOp = ReduceOp.SUM,
        *,
        factor: complex | None = None,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Reduce `tensor` over all ranks into `tensor` of rank `dst`; the others keep theirs.

        tensor: any shape; same number of elements and dtype on all ranks. factor: for PREMUL_SUM.
        """
        dst = self._check_rank(dst, "dst")
        is_root = dst == self.rank
        tensor = self._checked(tensor, "tensor", is_root)
        wire_op = self._checked_op("reduce", op, factor, tensor)
        finishers: list[Finisher] = []
        flat = written(tensor, finishers, also_read=True) if is_root else read(tensor)
        if factor is not None:
            flat = _scaled(flat, tensor, factor, finishers if is_root else None)
        numel = tensor.numel()
        operation = self._begin(
            Kind.REDUCE,
            numel,
            DTYPE_INDEX[tensor.dtype],
            root_and_op(dst, op),
            timeout_s,
            0 if is_root else numel,
            finisher(finishers),
        )
        return self._issued(self._communicator.reduce(operation, flat, dst, wire_op), tensor)

    @tensor_operation(src="write root=")
    def broadcast(self, tensor: Array, root: int = 0, *, timeout_s: Seconds | None = None) -> Work:
        """Copy `tensor` of rank `root` into `tensor` of every other rank.

        tensor: any shape; same number of elements and dtype on all ranks.
        """
        return self._broadcast(tensor, root, timeout_s)

    def _broadcast(
        self,
        tensor: Array,
        root: int,
        timeout_s: Seconds | None = None,
        finishers: Sequence[Finisher] = (),
    ) -> Work:
        """finishers: what else ends the operation."""
        root = self._check_rank(root, "root")
        is_root = root == self.rank and not self.is_dry_run
        tensor = self._checked(tensor, "tensor", not is_root)
        finishers = [*finishers]
        flat = read(tensor) if is_root else written(tensor, finishers)
        numel = tensor.numel()
        operation = self._begin(
            Kind.BROADCAST,
            numel,
            DTYPE_INDEX[tensor.dtype],
            root,
            timeout_s,
            numel if is_root else 0,
            finisher(finishers),
        )
        return self._issued(self._communicator.broadcast(operation, flat, root), tensor)

    @tensor_operation(device_ids="a group has one device, and its barrier uses that; leave it out")
    def barrier(self, *, timeout_s: Seconds | None = None) -> Work:
        """Wait until every rank has called barrier()."""
        operation = self._begin(Kind.BARRIER, 0, -1, -1, timeout_s, 0)
        return self._issued(self._communicator.barrier(operation))

    @says(timeout="write timeout_s=, in seconds", group="call it on that group")
    def monitored_barrier(
        self, timeout_s: Seconds | None = None, wait_all_ranks: bool = False
    ) -> Work:
        """A barrier that finds missing ranks: its CollectiveTimeout names the first one.

        wait_all_ranks: name all missing ranks. All ranks that are present raise the error, which
        ends the generation, as every timeout does. Every backend has it; in torch, only Gloo.
        """
        return MonitoredBarrier(self.barrier(timeout_s=timeout_s), wait_all_ranks)

    # -- parts of all ranks ------------------------------------------------------------------------

    @tensor_operation(input_list="write input=")
    def reduce_scatter(
        self,
        output: Array,
        input: Array | Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        factor: complex | None = None,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Reduce `input` over all ranks and leave this rank's part in `output`.

        output: n elements, or as many as tensor `rank` of the list; same dtype as `input`.
        input: size * n elements, unchanged; or a list of size tensors, of which tensor r goes to
            rank r. Tensor r has the same size on all ranks; sizes may differ within the list.
        factor: for PREMUL_SUM.

        Parts of different sizes are added after all have arrived, in size * n elements of memory.
        """
        output = self._checked(output, "output", True)
        wire_op = self._checked_op("reduce_scatter", op, factor, output)
        if isinstance(input, list | tuple):
            inputs = self._checked_list(input, "input", written=False)
            same_dtype("reduce_scatter", "input", inputs[0], "output", output)
            self._check_own("reduce_scatter", "output", output, "input", inputs)
            parts = [read(tensor) for tensor in inputs]
            numel = sum(tensor.numel() for tensor in inputs)
            even = all(tensor.numel() == output.numel() for tensor in inputs)
            # One size on all ranks is what every transport reduces while it moves; other sizes are
            # exchanged whole, and added here.
            whole = torch.cat(parts) if even else None
            if factor is not None and whole is None:
                parts = [part.clone() for part in parts]
                for part in parts:
                    _scale(part, output, factor)
        else:
            input = self._checked(input, "input", False)
            self._check_parts("reduce_scatter", "input", input, "output", output)
            parts, numel, whole = [], input.numel(), read(input)
        # `input` stays as it is.
        if whole is not None and factor is not None:
            whole = whole.clone()
            _scale(whole, output, factor)
        elif share_memory([output], [whole] if whole is not None else parts):
            # A transport writes chunks of the output before it has read all of the input.
            whole = None if whole is None else whole.clone()
            parts = [part.clone() for part in parts]
        finishers: list[Finisher] = []
        flat = written(output, finishers)
        dtype = DTYPE_INDEX[output.dtype]
        sent = numel - output.numel()
        if whole is not None:
            operation = self._begin(
                Kind.REDUCE_SCATTER, numel, dtype, op, timeout_s, sent, finisher(finishers)
            )
            work = self._communicator.reduce_scatter(operation, flat, whole, wire_op)
            return self._issued(work, output)
        received = flat.new_empty(self.size, flat.numel())
        # First: what follows copies the result into the caller's strided tensor.
        finishers.insert(0, Finisher(flat, lambda: reduce_into(flat, received.unbind(), wire_op)))
        operation = self._begin(
            Kind.REDUCE_SCATTER, numel, dtype, op | UNEVEN, timeout_s, sent, finisher(finishers)
        )
        return self._issued(self._communicator.exchange(operation, list(received), parts), output)

    @tensor_operation(tensor_list="write output=", tensor="write input=")
    def all_gather(
        self, output: Array | Sequence[Array], input: Array, *, timeout_s: Seconds | None = None
    ) -> Work:
        """Put the `input` of all ranks, in rank order, into `output` on every rank.

        output: size * n elements; or a list of size tensors, of which tensor r receives the input
            of rank r. Tensor r has the same size on all ranks; sizes may differ within the list.
        input: n elements, same dtype; it may be this rank's part of `output` itself.
        """
        input = self._checked(input, "input", False)
        dtype = DTYPE_INDEX[input.dtype]
        finishers: list[Finisher] = []
        flat = read(input)
        if not isinstance(output, list | tuple):
            output = self._checked(output, "output", True)
            self._check_parts("all_gather", "output", output, "input", input)
            whole = written(output, finishers)
            numel = output.numel()
            flat = unshared(flat, whole.data_ptr() + self.rank * flat.nbytes, [whole])
        else:
            outputs = self._checked_list(output, "output", written=True)
            same_dtype("all_gather", "output", outputs[0], "input", input)
            self._check_own("all_gather", "input", input, "output", outputs)
            numel = sum(tensor.numel() for tensor in outputs)
            if any(tensor.numel() != input.numel() for tensor in outputs):
                parts = [written(tensor, finishers) for tensor in outputs]
                flat = unshared(flat, parts[self.rank].data_ptr(), parts)
                sent = input.numel() * (self.size - 1)
                operation = self._begin(
                    Kind.ALL_GATHER, numel, dtype, UNEVEN, timeout_s, sent, finisher(finishers)
                )
                work = self._communicator.exchange(operation, parts, [flat] * self.size)
                return self._issued(work, output)
            whole = flat.new_empty(self.size * flat.numel())
            rows = whole.view(self.size, -1)
            for row, tensor in zip(rows, outputs, strict=True):
                copied: list[Finisher] = []
                target = written(tensor, copied)
                finishers.append(_copying(target, row))
                finishers += copied
        operation = self._begin(
            Kind.ALL_GATHER,
            numel,
            dtype,
            -1,
            timeout_s,
            numel - input.numel(),
            finisher(finishers),
        )
        return self._issued(self._communicator.all_gather(operation, whole, flat), output)

    @tensor_operation(gather_list="write output=", root="write dst=")
    def gather(
        self,
        tensor: Array,
        output: Array | Sequence[Array] | None = None,
        dst: int = 0,
        *,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Put the `tensor` of all ranks, in rank order, into `output` on rank `dst`.

        tensor: n elements; in the list form, n may differ between ranks.
        output: on `dst`, size * n elements or a list of size tensors; None on all other ranks.
        """
        dst = self._check_rank(dst, "dst")
        tensor = self._checked(tensor, "tensor", False)
        self._check_given("output", output, "dst", dst)
        finishers: list[Finisher] = []
        outputs = self._nothing(tensor)
        if output is not None:
            outputs = self._parts("gather", output, "output", tensor, "tensor", finishers)
        inputs = self._nothing(tensor)
        inputs[dst] = unshared(read(tensor), outputs[dst].data_ptr(), outputs)
        sent = 0 if dst == self.rank else tensor.numel()
        return self._exchange(
            Kind.GATHER, tensor, dst, timeout_s, sent, outputs, inputs, finishers, output
        )

    @tensor_operation(scatter_list="write input=", root="write src=")
    def scatter(
        self,
        tensor: Array,
        input: Array | Sequence[Array] | None = None,
        src: int = 0,
        *,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Put part r of `input` of rank `src` into `tensor` of rank r.

        tensor: n elements; in the list form, n may differ between ranks.
        input: on `src`, size * n elements or a list of size tensors; None on all other ranks.
        """
        src = self._check_rank(src, "src")
        tensor = self._checked(tensor, "tensor", True)
        self._check_given("input", input, "src", src)
        finishers: list[Finisher] = []
        outputs = self._nothing(tensor)
        outputs[src] = written(tensor, finishers)
        inputs = self._nothing(tensor)
        if input is not None:
            inputs = self._parts("scatter", input, "input", tensor, "tensor", None)
        sent = sum(self._numel(part, tensor) for part in inputs)
        sent -= self._numel(inputs[self.rank], tensor)
        return self._exchange(
            Kind.SCATTER, tensor, src, timeout_s, sent, outputs, inputs, finishers, tensor
        )

    @tensor_operation(output_tensor_list="write output=", input_tensor_list="write input=")
    def all_to_all(
        self,
        output: Array | Sequence[Array],
        input: Array | Sequence[Array],
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Send part r of `input` to rank r, and put what rank r sends into part r of `output`.

        output, input: both tensors, or both lists of size tensors, one per rank, of any sizes.
            One dtype on all ranks. A rank sends as many elements as the receiver expects.
        output_split_sizes, input_split_sizes: rows (along the first dimension) of each part, for
            tensors; by default all parts have the same number.
        """
        finishers: list[Finisher] = []
        if isinstance(output, list | tuple) != isinstance(input, list | tuple):
            raise TypeError(
                f"output is {with_article(type(output))} and input {with_article(type(input))}; "
                "pass two lists of tensors or two tensors"
            )
        if isinstance(output, list | tuple):
            if output_split_sizes is not None or input_split_sizes is not None:
                raise ValueError(
                    "split sizes are for tensors; in lists, the tensors have their own sizes"
                )
            outputs = self._checked_list(output, "output", written=True)
            inputs = self._checked_list(input, "input", written=False)
            dtype_of, other = outputs[0], inputs[0]
            into = [written(tensor, finishers) for tensor in outputs]
            parts = [read(tensor) for tensor in inputs]
            overlap = share_memory(into, parts)
        else:
            dtype_of = self._checked(output, "output", True)
            other = self._checked(input, "input", False)
            sending, receiving = read(other), written(dtype_of, finishers)
            parts = self._split(other, sending, input_split_sizes, "input")
            into = self._split(dtype_of, receiving, output_split_sizes, "output")
            overlap = share_memory([receiving], [sending])
        same_dtype("all_to_all", "output", dtype_of, "input", other)
        own_in, own_out = parts[self.rank].numel(), into[self.rank].numel()
        if own_in != own_out:
            raise ValueError(
                f"all_to_all: part {self.rank} of input, which this rank sends to itself, has "
                f"{own_in} elements, and part {self.rank} of output {own_out}; make them equal"
            )
        # What arrives first would overwrite what is still to be sent.
        if overlap:
            parts = [part.clone() for part in parts]
        sent = sum(self._numel(part, other) for part in parts) - self._numel(
            parts[self.rank], other
        )
        return self._exchange(
            Kind.ALL_TO_ALL, dtype_of, -1, timeout_s, sent, into, parts, finishers, output
        )

    def _exchange(
        self,
        kind: Kind,
        tensor: torch.Tensor,
        detail: int,
        timeout_s: Seconds | None,
        sent: float,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        finishers: list[Finisher],
        given: Any,
    ) -> Work:
        """given: what the caller passed to be written; it is the work's result."""
        dtype = DTYPE_INDEX[tensor.dtype]
        operation = self._begin(kind, -1, dtype, detail, timeout_s, sent, finisher(finishers))
        return self._issued(self._communicator.exchange(operation, outputs, inputs), given)

    # -- between two ranks -------------------------------------------------------------------------

    @tensor_operation()
    def send(
        self, tensor: Array, dst: int, tag: int = 0, *, timeout_s: Seconds | None = None
    ) -> Work:
        """Send `tensor` to rank `dst`, which receives it with the same tag.

        Messages of one tag between two ranks arrive in the order in which they were sent. The work
        is done when `tensor` may be written again, which may be before it is received. On CPU,
        sends and receives delay neither collectives nor each other. On NCCL all operations of a
        group run in the order of issue, so an exchange belongs inside `coalesce()`; NCCL has no
        tags.
        """
        tensor = self._checked(tensor, "tensor", False)
        dst = self._check_peer(dst, "dst")
        tag = self._check_tag(tag)
        operation = self._begin_between_two(
            Kind.SEND, tensor.numel(), DTYPE_INDEX[tensor.dtype], dst, tag, timeout_s
        )
        return self._issued(self._communicator.send(operation, read(tensor)))

    @tensor_operation()
    def recv(
        self,
        tensor: Array,
        src: int | None = None,
        tag: int = 0,
        *,
        timeout_s: Seconds | None = None,
    ) -> Work:
        """Receive into `tensor` what rank `src` sends with the same tag.

        tensor: with the number of elements and the dtype that were sent; anything else ends the
        group with CollectiveMismatch.
        src: None, on CPU only: whatever rank sends first. The work's `source_rank` says which.
        """
        tensor = self._checked(tensor, "tensor", True)
        peer = self._check_source(src)
        tag = self._check_tag(tag)
        finishers: list[Finisher] = []
        flat = written(tensor, finishers)
        operation = self._begin_between_two(
            Kind.RECV, tensor.numel(), DTYPE_INDEX[tensor.dtype], peer, tag, timeout_s
        )
        operation.finish = finisher(finishers)
        return self._issued(self._communicator.recv(operation, flat), tensor)

    # -- several as one; memory of all ranks -------------------------------------------------------

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
        # A rank that shadows cannot take part in a block, and has to say so before others wait.
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

    # -- read by the host --------------------------------------------------------------------------
    #
    # As a step does with its agreement. `part` is what the host reads: a contiguous part of the
    # tensor, or the whole.

    def all_reduce_and_read(
        self, tensor: torch.Tensor, part: torch.Tensor | None = None
    ) -> Reading:
        """`all_reduce` of a contiguous tensor; the sums of `part` are read."""
        finishers: list[Finisher] = []
        on_host = self._brought_down(tensor if part is None else part, finishers)
        return Reading(self._all_reduce(tensor, finishers=finishers), on_host)

    def broadcast_and_read(self, tensor: torch.Tensor, root: int) -> Reading:
        """`broadcast` of a contiguous tensor, which is read."""
        finishers: list[Finisher] = []
        on_host = self._brought_down(tensor, finishers)
        return Reading(self._broadcast(tensor, root, finishers=finishers), on_host)

    def _brought_down(self, part: torch.Tensor, finishers: list[Finisher]) -> torch.Tensor:
        """Where the host will find `part`. Adds the copy to `finishers`, if there is one."""
        # The host reads it where it is.
        if part.device.type == "cpu":
            return part
        # Taken again for each vote: an abort may have held up a copy into the one before.
        on_host = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
        finishers.append(Finisher(part, lambda: on_host.copy_(part, non_blocking=True)))
        return on_host

    # -- objects -----------------------------------------------------------------------------------
    #
    # Object collectives may be in flight together with the group's tensor collectives. All ranks
    # issue object collectives in the same order. The first one connects the channel that they use.
    #
    # Ranks unpickle what other ranks of the group sent, and unpickling runs code that the sender
    # chooses: use them only among processes of one user, as all ranks of a group are. With a secret
    # (stores/signed_store.py), what no rank of the group has signed ends the group, unread.
    #
    # map_location: where tensors inside the objects go, as in torch.load; by default the device
    # with the number of the sender's device.
    #
    # A call raises TypeError if an object cannot be pickled, before anything is sent. A work raises
    # PayloadUnreadable on all ranks if a rank cannot unpickle (the group stays usable), and what
    # works of tensors raise.

    @object_operation(object_list="write objects=", src="write root=", device="write map_location=")
    def broadcast_object_list(
        self,
        objects: list[Any],
        root: int = 0,
        *,
        map_location: MapLocation = None,
        timeout_s: Seconds | None = None,
    ) -> ObjectWork:
        """Replace the elements of `objects` by those of rank `root`. The result is `objects`.

        objects: a list of the same length on all ranks; unchanged on `root`.
        All other ranks unpickle what rank `root` sent.
        """
        root = self._check_rank(root, "root")
        if not isinstance(objects, list):
            raise TypeError(f"objects must be a list, got {type(objects).__name__}")
        is_root = self.rank == root
        # At once: the caller may change the objects while the work is under way.
        payload = self._payload(objects, "objects") if is_root else b""

        def body(group: BytesGroup, lengths: list[int]) -> dict[int, bytes]:
            received = broadcast_bytes(group, payload, root, lengths[root])
            return {} if is_root else {root: received}

        def read(values: dict[int, Any]) -> list[Any]:
            if not is_root:
                objects[:] = values[root]
            return objects

        kind, num = Kind.BROADCAST_OBJECT_LIST, len(objects)
        return self._issue_objects(kind, root, num, payload, timeout_s, body, read, map_location)

    @object_operation(
        object_list="it is the result of the Work",
        obj="write value=",
        **{
            TOO_MANY: "write all_gather_object(value); the list of all values is the result of the "
            "Work"
        },
    )
    def all_gather_object(
        self, value: Any, *, map_location: MapLocation = None, timeout_s: Seconds | None = None
    ) -> ObjectWork:
        """The result on every rank is the values of all ranks, in rank order, all of them copies.

        Every rank unpickles what all ranks sent.
        """
        payload = self._payload(value, "value")

        def body(group: BytesGroup, lengths: list[int]) -> dict[int, bytes]:
            return dict(enumerate(all_gather_bytes(group, payload, lengths)))

        kind = Kind.ALL_GATHER_OBJECT
        return self._issue_objects(kind, -1, -1, payload, timeout_s, body, _in_order, map_location)

    @object_operation(
        obj="write value=",
        object_gather_list="it is the result of the Work",
        dst="write root=",
        **{
            TOO_MANY: "write gather_object(value, root); the list of all values is the result of "
            "the Work on that rank"
        },
    )
    def gather_object(
        self,
        value: Any,
        root: int = 0,
        *,
        map_location: MapLocation = None,
        timeout_s: Seconds | None = None,
    ) -> ObjectWork:
        """The result is the values of all ranks, in rank order, on rank `root`; None elsewhere.

        Rank `root` unpickles what all ranks sent.
        """
        root = self._check_rank(root, "root")
        payload = self._payload(value, "value")
        is_root = self.rank == root

        def body(group: BytesGroup, lengths: list[int]) -> dict[int, bytes]:
            return dict(enumerate(gather_bytes(group, payload, root, lengths) or ()))

        def read(values: dict[int, Any]) -> list[Any] | None:
            return _in_order(values) if is_root else None

        kind = Kind.GATHER_OBJECT
        return self._issue_objects(kind, root, -1, payload, timeout_s, body, read, map_location)

    @object_operation(
        scatter_object_output_list="the object is the result of the Work",
        scatter_object_input_list="write objects=",
        src="write root=",
        **{
            TOO_MANY: "write scatter_object_list(objects, root); this rank's object is the result "
            "of the Work"
        },
    )
    def scatter_object_list(
        self,
        objects: Sequence[Any] | None = None,
        root: int = 0,
        *,
        map_location: MapLocation = None,
        timeout_s: Seconds | None = None,
    ) -> ObjectWork:
        """The result on rank r is `objects[r]` of rank `root`: a copy, even on `root`.

        objects: one per rank on `root`; ignored elsewhere.
        Every rank unpickles what rank `root` sent to it.
        """
        root = self._check_rank(root, "root")
        parts: list[bytes] | None = None
        if self.rank == root:
            if objects is None or len(objects) != self.size:
                got = "None" if objects is None else f"{len(objects)} objects"
                raise ValueError(
                    f"scatter_object_list: rank {root} is the root and must pass one object for "
                    f"each of the {self.size} ranks, got {got}"
                )
            parts = [self._payload(value, f"objects[{i}]") for i, value in enumerate(objects)]

        def body(group: BytesGroup, lengths: list[int]) -> dict[int, bytes]:
            return {root: scatter_bytes(group, parts, root)}

        def read(values: dict[int, Any]) -> Any:
            return values[root]

        kind = Kind.SCATTER_OBJECT_LIST
        return self._issue_objects(kind, root, -1, b"", timeout_s, body, read, map_location)

    @object_operation(
        object_list="write objects=", device="the objects say where their tensors are; leave it out"
    )
    def send_object_list(
        self, objects: Sequence[Any], dst: int, *, timeout_s: Seconds | None = None
    ) -> ScriptedWork:
        """Send `objects` to rank `dst`, which calls `recv_object_list` with as many.

        The objects are pickled at once, and may be changed afterwards. As with `send`, the work is
        done when the data is on its way, lists between two ranks arrive in the order of sending,
        and no other operation is delayed, except on NCCL, where all operations run in the order of
        issue. If `dst` cannot unpickle the list, only `dst` raises an error.
        """
        dst = self._check_peer(dst, "dst")
        payload = self._payload(list(objects), "objects")
        messages = self._object_messages("send_object_list")
        operation = self._begin_between_two(
            Kind.SEND_OBJECT_LIST, len(objects), -1, dst, 0, timeout_s
        )
        return messages.send(operation, payload)

    @object_operation(object_list="write objects=", device="write map_location=")
    def recv_object_list(
        self,
        objects: list[Any],
        src: int | None = None,
        *,
        map_location: MapLocation = None,
        timeout_s: Seconds | None = None,
    ) -> ScriptedWork:
        """Replace the elements of `objects` by those that rank `src` sends; None: any rank, on CPU.

        objects: a list of the length that was sent; another length ends the group with
        CollectiveMismatch. The work's result is `objects`; its `source_rank` is the sender.

        This rank unpickles what the sender sent, in the thread that first detects its arrival. If
        that fails, the work raises PayloadUnreadable here only; the group stays usable. On NCCL
        the call blocks until the length has arrived.
        """
        if not isinstance(objects, list):
            raise TypeError(f"objects must be a list, got {type(objects).__name__}")
        peer = self._check_source(src)
        messages = self._object_messages("recv_object_list")
        operation = self._begin_between_two(
            Kind.RECV_OBJECT_LIST, len(objects), -1, peer, 0, timeout_s
        )
        return messages.recv(operation, objects, map_location)

    def _payload(self, value: Any, argument: str) -> bytes:
        return sealed(self.seal, dumps(value, argument), self.rank)

    # -- groups of its ranks -----------------------------------------------------------------------

    @says(
        timeout="a new group has the timeout_s of its group; pass timeout_s= to an operation",
        backend=(
            "a new group has the backend of its group; Group.create(store, rank, size, "
            "backend=...) makes an independent group"
        ),
        pg_options="there are none; leave it out",
        use_local_synchronization="all ranks of this group call new_group(); leave it out",
        group_desc="write name=",
        device_id="a new group has the device of its group; leave it out",
        **{TOO_FEW: "for all ranks write new_group(range(group.size))"},
    )
    def new_group(self, ranks: Sequence[int], name: str | None = None) -> Self | None:
        """A group of `ranks` of this group, in that order; None on the other ranks.

        All ranks of this group call it with the same arguments. It blocks; in a coroutine, use
        asyncio.to_thread. The groups share a generation: if either fails, so does the other.
        name: for errors and `describe`; by default this group's name with a number.

        Raises ValueError for ranks that are out of range or named twice, CollectiveMismatch on all
        ranks if they pass different arguments.
        """
        ranks = [_whole(rank, "ranks must be whole numbers") for rank in ranks]
        outside = [rank for rank in ranks if not 0 <= rank < self.size]
        if outside:
            raise ValueError(
                f"ranks must be in [0, {self.size}), the ranks of group {self.name!r}; "
                f"got {outside}"
            )
        if not ranks:
            raise ValueError("ranks must name at least one rank, got none")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks must name each rank once, got {ranks}")
        # Compared before anything is made: ranks of different groups would wait for one another.
        number, choices = self._agree((ranks, name))
        _, blamed = usual_and_blamed(choices)
        if blamed:
            passed = ", ".join(
                f"rank {r} passed {what[0]}, name {what[1]!r}" for r, what in enumerate(choices)
            )
            remedy = "Every rank must call new_group with the same ranks and name, in one order."
            raise CollectiveMismatch(
                f"new_group #{number}", self.generation, blamed, passed, remedy
            )
        return self._make(ranks, name, f"{number}")

    def split(
        self, color: int | None, key: int | None = None, name: str | None = None
    ) -> Self | None:
        """One group for each color, of the ranks that pass that color; None if color is None.

        All ranks of this group call it, and it blocks, as `new_group`. key: orders the ranks of
        the new group; ranks with equal keys keep their order. See MPI_Comm_split.

        Raises CollectiveMismatch on all ranks if ranks of one color pass different names.
        """
        if color is not None:
            color = _whole(color, "color must be a whole number or None")
        place = 0 if key is None else _whole(key, "key must be a whole number or None")
        number, choices = self._agree((color, place, name))
        # Compared before anything is made: ranks with different names would wait for one another.
        for one in dict.fromkeys(choice[0] for choice in choices if choice[0] is not None):
            names = {r: choice[2] for r, choice in enumerate(choices) if choice[0] == one}
            _, unlike = usual_and_blamed(list(names.values()))
            if unlike:
                blamed = [list(names)[at] for at in unlike]
                passed = ", ".join(f"rank {r} passed name {what!r}" for r, what in names.items())
                remedy = "Every rank of a color must call split with the same name."
                raise CollectiveMismatch(
                    f"split #{number}, color {one}", self.generation, blamed, passed, remedy
                )
        if color is None:
            return None
        members = [rank for rank in range(self.size) if choices[rank][0] == color]
        members.sort(key=lambda rank: (choices[rank][1], rank))
        return self._make(members, name, f"{number}.{color}")

    @outside_modes
    def connect_child(
        self,
        members: Sequence[int],
        prefix: str,
        *,
        name: str,
        device: torch.device,
        timeout_s: float,
        what: str | None = None,
        limit_s: float | None = None,
    ) -> Self:
        """Connect `members` of this group, after all of them have agreed to connect.

        If a member does not come, this group's generation ends as well.

        members: ranks of this group, in the order of the new group; this rank is among them.
        prefix: where they meet, within the store in which this group met.
        what, timeout_s: for errors; `what` is by default the making of a group.
        limit_s: seconds until all members have met; by default timeout_s.
        """
        what = what or f"the making of group {name!r}"
        group: Self | None = None
        try:
            limit_s = timeout_s if limit_s is None else limit_s
            with self._communicator.watching(members, what, limit_s):
                group = self.create(
                    self._meeting_place(prefix, members),
                    members.index(self.rank),
                    len(members),
                    device,
                    generation=self.generation,
                    timeout_s=limit_s,
                    name=name,
                    # The backend that the caller chose serves only the device of this group.
                    backend=self._asked_backend if device.type == self.device.type else None,
                )
                self._adopt(group, members)  # From here on a failure of it ends this group.
        except (CollectiveError, StoreTimeout) as error:
            # `close` ends the children that it knows; this one came too late.
            if group is not None and self._closed:
                group.close()
            failure = self.failure()
            if failure is None:
                # This group has not ended: the ranks of the new one have not met, and none of them
                # may continue alone.
                failure = self._not_met(error, what, members, timeout_s)
                self.abort(failure)
            raise fresh_copy(failure) from error
        if self._closed:  # Another thread closed this group and could not know the new one.
            group.close()
            raise GroupClosed(what, self.generation)
        return group

    def another_store(self) -> Store:
        """A part of this group's store with keys of its own, for other agreements between ranks.
        All ranks call it in the same order, also relative to `new_group` and `split`."""
        return PrefixStore(f"others/{next(self._children_made)}", self._store)

    def global_rank(self, group_rank: int) -> int:
        """The root group's number of rank `group_rank` of this group."""
        if not 0 <= group_rank < self.size:
            raise ValueError(f"group_rank must be a rank in [0, {self.size}), got {group_rank}")
        return self.ranks[group_rank]

    def group_rank(self, global_rank: int) -> int:
        """This group's number of rank `global_rank` of the root group."""
        if global_rank not in self.ranks:
            raise ValueError(
                f"global_rank {global_rank} is not in group {self.name!r}, whose global ranks are "
                f"{list(self.ranks)}"
            )
        return self.ranks.index(global_rank)

    def _agree(self, mine: Any) -> tuple[int, list[Any]]:
        """The number of the group to be made, and the arguments of all ranks."""
        choices = self.all_gather_object(mine).wait()
        return next(self._children_made), choices

    def _make(self, members: Sequence[int], name: str | None, key: str) -> Self | None:
        """members: ranks of this group, in the order of the new group."""
        if self.rank not in members:
            return None
        return self.connect_child(
            members,
            f"children/{key}",
            name=name or f"{self.name}.{key}",
            device=self.device,
            timeout_s=self.timeout_s,
        )

    def _channel_group(self, operation: Operation) -> tuple[Self, RecorderOnBehalf]:
        """The CPU group of the same ranks for the `ObjectChannel`, and its recorder.

        operation: the first operation that needs the group; its deadline applies.
        """
        left_s = operation.issued_at + operation.timeout_s - time.monotonic()
        group = self.connect_child(
            range(self.size),
            "objects",
            name=f"{self.name}, objects",
            device=torch.device("cpu"),
            timeout_s=operation.timeout_s,
            what=str(operation),
            limit_s=max(left_s, 0.001),
        )
        recorder = RecorderOnBehalf(group.rank, group.size, group.name, group.generation)
        group.recorder = recorder
        return group, recorder

    def _meeting_place(self, prefix: str, members: Sequence[int]) -> WatchedStore:
        """The part of this group's store in which a group of `members` meets.

        A rank that waits there raises at once if a member is lost or this group ends; with the
        store alone it would wait until the deadline.
        """

        def look() -> None:
            failure = self.failure()
            if failure is not None:
                raise fresh_copy(failure)
            gone = self._communicator.gone()
            lost = [number for number, rank in enumerate(members) if rank in gone]
            if lost:
                how = "; ".join(gone[members[number]] for number in lost)
                raise PeerLost("rendezvous", self.generation, lost, how)

        return WatchedStore(prefix, self._store, look)

    def _adopt(self, child: Self, members: Sequence[int]) -> None:
        """Add `child`, a group of `members` of this group in order, to this family."""
        child.parent = self
        child.ranks = tuple(self.ranks[rank] for rank in members)
        child._family.remove(child)
        child._family = self._family
        self._children.append(child)
        child._family.add(child)
        # A rank that is late in this group may wait in that one: a deadline here blames whom it
        # waits for.
        child._communicator.on_wait(
            lambda ranks, since: self._communicator.show_waits([members[r] for r in ranks], since)
        )

    def _not_met(
        self,
        error: CollectiveError | StoreTimeout,
        what: str,
        members: Sequence[int],
        timeout_s: float,
    ) -> CollectiveError:
        """Why `members` did not meet, with this group's numbers of the ranks."""
        if isinstance(error, StoreTimeout):
            late = sorted(members[number] for number in ranks_of_keys(error.keys))
            return CollectiveTimeout(what, self.generation, late, timeout_s)
        ranks = sorted(members[rank] for rank in error.ranks)
        match error:
            # With the words of the error, and the caller's own operation and ranks.
            case CollectiveTimeout():
                return CollectiveTimeout(what, self.generation, ranks, timeout_s, error.whereabouts)
            case PeerLost():
                return PeerLost(what, self.generation, ranks, error.detail)
            case _:
                return GroupAborted(self.generation, ranks, f"{what} failed: {error}")

    # -- its end -----------------------------------------------------------------------------------

    def abort(self, reason: str | BaseException | CollectiveError) -> None:
        """End this generation on all ranks; may be called from any thread.

        Every pending and later work raises on all ranks: a CollectiveError unchanged, any other
        reason as GroupAborted by this rank, with the traceback if it is an exception. Groups made
        of this group, and its parent, end as well.
        """
        if isinstance(reason, CollectiveError):
            error = reason
        elif isinstance(reason, BaseException):
            text = "".join(traceback.format_exception_only(reason)).strip()
            trace = "".join(traceback.format_exception(reason))
            error = GroupAborted(self.generation, [self.rank], text, trace)
        else:
            error = GroupAborted(self.generation, [self.rank], reason)
        # A fork is no rank; and after `close` there is nothing that could wait.
        if os.getpid() != self._pid or self._closed:
            return
        self.end_with(error)
        self._family.end(self, error)

    def end_with(self, error: CollectiveError) -> None:
        """Abort this group and its object channel. Its family, which calls this, ends the rest."""
        self._communicator.abort(error)
        channel = self._channel
        if channel is not None:
            channel.fail(error)

    def _ended_ranks(self) -> set[int]:
        """Those whose process has ended for certain, as far as this rank can see."""
        return self._communicator.ended_ranks()

    def failure(self) -> CollectiveError | None:
        """The error that ended this generation, as far as this rank knows; None while it lives."""
        return self._communicator.failure()

    def close(self) -> None:
        """Free memory and threads; peers that still wait for this rank raise PeerLost.

        Closes the groups made of this one first.
        """
        if self._closed or os.getpid() != self._pid:  # A fork shares the rank's memory segment.
            return
        self._closed = True
        # They meet in this group's store, and end with it in any case.
        for child in list(self._children):
            child.close()
        failure = self._communicator.failure()
        if failure is not None and not isinstance(failure, GroupClosed):
            self._family.end(self, failure)  # The family does not poll a group that has left.
        self._family.remove(self)
        if self.parent is not None and self in self.parent._children:
            self.parent._children.remove(self)
        if self._channel is not None:
            self._channel.close(GroupClosed("close", self.generation))
            self._channel = None  # It refers to this group, whose memory would outlive its users.
        self._communicator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is known of it -----------------------------------------------------------------------

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

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """The group itself: a copy of a layer that holds it is of the same ranks."""
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a Group is the place of one process among the ranks, with memory and connections of "
            "that process, and cannot be pickled; take it where it is used (in a train function "
            "ctx.group), and leave it out of what is saved"
        )

    def __repr__(self) -> str:
        return (
            f"Group({self.name!r}, rank={self.rank}, size={self.size}, "
            f"generation={self.generation}, backend={self.backend!r}, device={str(self.device)!r})"
        )

    @property
    def flight_recorder(self) -> FlightRecording:
        """The last collectives of this rank and their current states; print it when a run hangs."""
        return self.recorder.read(self.ranks)

    def flight_recorders(self) -> list[FlightRecording]:
        """The recordings of this group, its family and their object channels."""
        return self._family.recordings()

    def as_counted_here(self, error: CollectiveError) -> CollectiveError:
        """`error`, which a group of this family may have raised, with this group's rank numbers."""
        return self._family.as_seen_from(self, error)

    @property
    def has_misled(self) -> bool:
        """Whether this program has continued after `Work.wait()` of an operation (of the last 512)
        that has not succeeded, in this group or one of its family. On a GPU `wait()` returns before
        that is known; what was computed since may come from an operation that was stopped."""
        return self._family.has_misled

    def activity(self, since: float, until: float) -> Activity:
        """How busy this group was, between two times of time.monotonic()."""
        return self.recorder.activity(since, until)

    @property
    def waits_on_issue(self) -> bool:
        """Whether operations wait for all ranks before they are issued, as at level DETAIL."""
        return self._communicator.compares

    if not TYPE_CHECKING:  # A type checker would take every attribute for known.

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(text + instead_of_method(name), name=name, obj=self)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not _OF_THE_RUNTIME.fullmatch(name)]

    # -- what the runtime asks of it ---------------------------------------------------------------

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
        # Not with an operation in flight: its peers may still get what they wait for.
        if not self._closed and not self.recorder.has_pending:
            self._communicator.rest(self._next_sequence)

    def announce_to(self, announce: Announce | None) -> None:
        """Call `announce` before this rank issues and numbers an operation; None ends that.

        `announce` may run operations of this group first. If it raises, nothing is issued."""
        self._announce = announce

    def keep_results(self, kept: KeptResults | None) -> None:
        """Keep the results of the operations that are issued from here on; None ends that."""
        inner = self._communicator
        # One at a time: the last function's is put aside.
        if isinstance(inner, KeepingCommunicator):
            inner = inner.inner
        self._kept = kept
        if kept is not None:
            inner = KeepingCommunicator(inner, kept)  # type: ignore[abstract]
        self._communicator = inner

    @contextlib.contextmanager
    def unkept(self) -> Iterator[None]:
        """A block whose results are not kept: its operations are not the function's own."""
        with self._kept.paused() if self._kept is not None else contextlib.nullcontext():
            yield

    # -- how an operation is issued ----------------------------------------------------------------

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
        """Number, count and record an operation."""
        deadline_s = self._deadline_s(kind, timeout_s)
        # Before the number is taken: what is announced may run operations of this group first.
        if self._announce is not None:
            self._announce(kind, numel, dtype, detail)
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        self.statistics.count(kind, elements)
        operation = Operation(
            kind, sequence, self.generation, numel, dtype, detail, deadline_s, finish=finish
        )
        self.recorder.record(operation, sys._getframe(2))
        if self._notes_shapes:
            if self._announce is None:  # Otherwise ranks may take part that know no shapes.
                frame = sys._getframe(1)
                operation.shapes = tuple(shape for of, shape in self._shapes if of is frame)
            self._shapes.clear()  # Also removes shapes of operations that a check refused.
        operation.span = span_of(operation, self._with_nvtx)
        return operation

    def _begin_between_two(
        self, kind: Kind, numel: int, dtype: int, peer: int, tag: int, timeout_s: Seconds | None
    ) -> Operation:
        """Count and record a send or recv."""
        deadline_s = self._deadline_s(kind, timeout_s)
        if self._announce is not None:
            self._announce(kind, numel, dtype, peer)
        self.statistics.count(kind, numel if kind is Kind.SEND else 0)
        last = self._next_sequence - 1
        operation = Operation(
            kind, last, self.generation, numel, dtype, -1, deadline_s, peer=peer, tag=tag
        )
        self.recorder.record(operation, sys._getframe(2))
        self._shapes.clear()
        operation.span = span_of(operation, self._with_nvtx)
        return operation

    def _deadline_s(self, kind: Kind, timeout_s: Seconds | None) -> float:
        """The seconds that an operation has; raises if it may not be issued here and now."""
        # A fork has the memory of its parent and none of its threads: it would wait forever.
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
        if timeout_s is not None:
            return checked_seconds(timeout_s)
        if self._coalesced is None or (block := self._block_here()) is None:
            return self.timeout_s
        return block.operation.timeout_s  # An operation has what its block has.

    def _issued(self, work: Work, output: Any = None) -> Work:
        """The work for the caller: `work`, or that of the coalesced block that is open.

        output: what the work's `result()` returns.
        """
        if self._coalesced is None or (block := self._block_here()) is None:
            work._output = output
            return work
        block.add(work)
        return block

    def _block_here(self) -> Coalesced | None:
        """The coalesced block that is open, if what this thread issues belongs to it."""
        block = self._coalesced
        if block is None or (block.thread != get_ident() and self.device.type == "cpu"):
            return None
        return block

    def _issue_objects(
        self,
        kind: Kind,
        root: int,
        count: int,
        payload: bytes,
        timeout_s: Seconds | None,
        *reading: Any,
    ) -> ObjectWork:
        """As ObjectChannel.issue, whose last parameters are `reading`."""
        deadline_s = self._deadline_s(kind, timeout_s)
        if self._announce is not None:
            self._announce(kind, 0, -1, -1)
        if self._kept is not None:
            self._kept.spoil("it sends objects through its group before its first step")
        self.statistics.count(kind, 0)
        if self._channel is None:
            self._channel = ObjectChannel(self, self._channel_group, self._with_nvtx)
            failure = self.failure()
            # The group had ended before the channel was made, and could not tell it.
            if failure is not None:
                self._channel.fail(failure)
        return self._channel.issue(kind, root, count, payload, deadline_s, *reading)

    def _object_messages(self, operation: str) -> ObjectMessages:
        if self._block_here() is not None and not self._communicator.has_tags:
            raise RuntimeError(
                f"{operation} inside coalesce(): on the {self.backend} backend its length must "
                "arrive before the rest can be issued; move it out of the block"
            )
        if self._messages is None:
            self._messages = ObjectMessages(self._communicator, self.abort, self.seal)
        return self._messages

    # -- arguments, checked before anything is enqueued --------------------------------------------

    def _checked(self, value: Array, name: str, written: bool) -> torch.Tensor:
        tensor = checked(value, name, self.device, self.backend, written)
        if self._notes_shapes:
            self._shapes.append((sys._getframe(1), tuple(tensor.shape)))
        return tensor

    def _checked_list(
        self, values: Sequence[Array], name: str, *, written: bool
    ) -> list[torch.Tensor]:
        return checked_list(values, name, self.size, self.device, self.backend, written=written)

    def _checked_op(
        self, name: str, op: ReduceOp, factor: complex | None, tensor: torch.Tensor
    ) -> ReduceOp:
        """The reduction that travels, from a cache for pairs of op and dtype already checked."""
        known = (op, tensor.dtype)
        # torch's ReduceOp equals ours of the same number, which is another reduction.
        if factor is None and op.__class__ is ReduceOp:
            known_op = self._wire_ops.get(known)
            if known_op is not None:
                return known_op
        wire_op = checked_op(name, op, factor, tensor.dtype, self.backend)
        # A transport may have fewer than the contract: refused here, before other ranks wait.
        remedy = self._communicator.lacks(wire_op, travelling_dtype(tensor.dtype))
        if remedy:
            what = f"{name} of {tensor.dtype} with {ReduceOp(op).name}"
            raise UnsupportedOperation(what, self.backend, remedy)
        # A factor is checked each time, as it may be another number.
        if factor is None:
            self._wire_ops[known] = wire_op
        return wire_op

    def _check_rank(self, rank: int, name: str) -> int:
        rank = _whole(rank, f"{name} must be a whole number")
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} must be a rank in [0, {self.size}), got {rank}")
        return rank

    def _check_peer(self, rank: int, name: str) -> int:
        rank = self._check_rank(rank, name)
        if rank == self.rank:
            raise ValueError(f"{name} is {rank}, this rank itself; name another rank")
        return rank

    def _check_source(self, src: int | None) -> int:
        """The peer of a recv from `src`."""
        if src is not None:
            return self._check_peer(src, "src")
        if not self._communicator.receives_from_any:
            raise UnsupportedOperation("recv from any rank", self.backend, "name the rank with src")
        # It would wait until its deadline.
        if self.size == 1:
            raise ValueError("recv from any rank in a group of one: nobody can send")
        return ANY_RANK

    def _check_tag(self, tag: int) -> int:
        tag = _whole(tag, "tag must be a whole number")
        if not 0 <= tag < FIRST_OBJECT_TAG:
            raise ValueError(f"tag must be in [0, 2**29), got {tag}")
        if tag and not self._communicator.has_tags:
            raise UnsupportedOperation(
                f"tag {tag}", self.backend, "messages between two ranks arrive in order; use tag 0"
            )
        return tag

    def _check_given(self, name: str, value: object, root_name: str, root: int) -> None:
        if (value is not None) != (root == self.rank):
            has = "missing" if value is None else "given"
            where = "only rank" if value is not None else "rank"
            raise ValueError(
                f"{name} is {has} on rank {self.rank}, but {root_name} is {root}; {where} {root} "
                f"passes {name}, the others None"
            )

    def _check_own(
        self,
        operation: str,
        name: str,
        own: torch.Tensor,
        list_name: str,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        numel = tensors[self.rank].numel()
        if own.numel() != numel:
            raise ValueError(
                f"{operation}: {name} has {own.numel()} elements, but {list_name}[{self.rank}], "
                f"this rank's part, has {numel}; make them equal"
            )

    def _check_parts(
        self, name: str, whole_name: str, whole: torch.Tensor, part_name: str, part: torch.Tensor
    ) -> None:
        if whole.dtype != part.dtype:
            raise ValueError(
                f"{name}: {whole_name} is {whole.dtype} but {part_name} is {part.dtype}"
            )
        if whole.numel() != self.size * part.numel():
            raise ValueError(
                f"{name}: {whole_name} has {whole.numel()} elements, {part_name} "
                f"{part.numel()}; with {self.size} ranks {whole_name} must have "
                f"{self.size} * {part.numel()} = {self.size * part.numel()}"
            )

    def _parts(
        self,
        operation: str,
        value: Array | Sequence[Array],
        name: str,
        own: torch.Tensor,
        own_name: str,
        finishers: list[Finisher] | None,
    ) -> list[torch.Tensor]:
        """One flat part per rank, to be written (if there are finishers) or read."""
        writes = finishers is not None

        def travelling(tensor: torch.Tensor) -> torch.Tensor:
            return read(tensor) if finishers is None else written(tensor, finishers)

        if isinstance(value, list | tuple):
            tensors = self._checked_list(value, name, written=writes)
            same_dtype(operation, name, tensors[0], own_name, own)
            self._check_own(operation, own_name, own, name, tensors)
            return [travelling(tensor) for tensor in tensors]
        whole = self._checked(value, name, writes)
        self._check_parts(operation, name, whole, own_name, own)
        return list(travelling(whole).view(self.size, -1 if whole.numel() else 0))

    def _split(
        self, tensor: torch.Tensor, flat: torch.Tensor, rows: Sequence[int] | None, name: str
    ) -> list[torch.Tensor]:
        """`flat`, the elements of `tensor`, split into one part per rank."""
        num_rows = tensor.shape[0] if tensor.dim() else 1
        if rows is None:
            if num_rows % self.size:
                raise ValueError(
                    f"all_to_all: {name} has {num_rows} rows, which {self.size} ranks cannot share "
                    f"equally; pass {name}_split_sizes"
                )
            rows = [num_rows // self.size] * self.size
        if len(rows) != self.size or min(rows) < 0 or sum(rows) != num_rows:
            raise ValueError(
                f"{name}_split_sizes must be {self.size} numbers, one per rank, not negative, "
                f"with the sum {num_rows} of the rows of {name}; got {list(rows)}"
            )
        # In `flat` a row has as many elements as it has numbers, two for a complex one.
        width = flat.numel() // num_rows if num_rows else 0
        return list(flat.split_with_sizes([n * width for n in rows]))

    def _nothing(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        dtype = travelling_dtype(tensor.dtype)
        return [torch.empty(0, dtype=dtype, device=self.device)] * self.size

    def _numel(self, flat: torch.Tensor, tensor: torch.Tensor) -> int:
        """The number of elements as the caller counts them: a complex number is one."""
        return flat.numel() // 2 if tensor.is_complex() else flat.numel()


def _scale(flat: torch.Tensor, tensor: torch.Tensor, factor: complex) -> None:
    """Multiply `flat`, the travelling form of `tensor` or of a part of that dtype, by `factor`."""
    if tensor.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    flat.mul_(factor)


def _scaled(
    flat: torch.Tensor, tensor: torch.Tensor, factor: complex, finishers: list[Finisher] | None
) -> torch.Tensor:
    """A scaled copy of `flat`; the result is copied back by `finishers`. The caller's tensor stays
    as it is where the ranks turn out to disagree, or the operation is refused."""
    scaled = flat.clone()
    _scale(scaled, tensor, factor)
    if finishers is not None:
        finishers.insert(0, _copying(flat, scaled))
    return scaled


def _copying(target: torch.Tensor, source: torch.Tensor) -> Finisher:
    return Finisher(target, lambda: target.copy_(source))


def _in_order(values: dict[int, Any]) -> list[Any]:
    return [values[rank] for rank in sorted(values)]


def _whole(number: object, rule: str) -> int:
    if (plain := whole(number)) is None:
        raise TypeError(f"{rule}, got {number!r}")
    return plain
