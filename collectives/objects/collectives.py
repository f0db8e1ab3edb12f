"""The half of `Group` that moves Python objects.

objects/channel.py carries them between all ranks, objects/messages.py between two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..contract.deadlines import Seconds
from ..contract.operation import Kind, Operation
from ..contract.torch_words import object_operation
from ..operations.operations import Operations
from ..stores.signed_store import Seal
from .blocking import all_gather_bytes, broadcast_bytes, gather_bytes, scatter_bytes
from .channel import ObjectChannel, ObjectWork
from .messages import ObjectMessages, ScriptedWork
from .payloads import MapLocation, dumps, sealed


class ObjectCollectives(ABC):
    """Collectives of anything that pickles, each as a `Work` whose result is the objects.

    Object collectives may be in flight together with the group's tensor collectives. All ranks
    issue object collectives in the same order. The first one connects the channel that they use.

    Ranks unpickle what other ranks of the group sent, and unpickling runs code that the sender
    chooses: use them only among processes of one user, as all ranks of a group are. With a secret
    (stores/signed_store.py), what no rank of the group has signed ends the group, unread.

    map_location: where tensors inside the objects go, as in torch.load; by default the device with
    the number of the sender's device. timeout_s: in seconds, by default the group's.

    A call raises TypeError if an object cannot be pickled, before anything is sent. A work raises
    PayloadUnreadable on all ranks if a rank cannot unpickle (the group stays usable), and what
    works of tensors raise.
    """

    rank: int
    size: int
    seal: Seal | None

    @abstractmethod
    def _objects(self) -> ObjectChannel: ...

    @abstractmethod
    def _count_objects(self, kind: Kind, timeout_s: Seconds | None) -> float:
        """Check that the group is open, count the operation, and return the timeout in seconds."""

    @abstractmethod
    def _check_rank(self, rank: int, name: str) -> None: ...

    @abstractmethod
    def _check_peer(self, rank: int, name: str) -> None: ...

    @abstractmethod
    def _check_source(self, src: int | None) -> int: ...

    @abstractmethod
    def _begin_between_two(
        self, kind: Kind, numel: int, dtype: int, peer: int, tag: int, timeout_s: Seconds | None
    ) -> Operation: ...

    @abstractmethod
    def _object_messages(self, operation: str) -> ObjectMessages: ...

    def _payload(self, value: Any, argument: str) -> bytes:
        return sealed(self.seal, dumps(value, argument), self.rank)

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
        self._check_rank(root, "root")
        if not isinstance(objects, list):
            raise TypeError(f"objects must be a list, got {type(objects).__name__}")
        is_root = self.rank == root
        payload = self._payload(objects, "objects") if is_root else b""

        def body(group: Operations, lengths: list[int]) -> dict[int, bytes]:
            received = broadcast_bytes(group, payload, root, lengths[root])
            return {} if is_root else {root: received}

        def read(values: dict[int, Any]) -> list[Any]:
            if not is_root:
                objects[:] = values[root]
            return objects

        timeout_s = self._count_objects(Kind.BROADCAST_OBJECT_LIST, timeout_s)
        return self._objects().issue(
            Kind.BROADCAST_OBJECT_LIST,
            root,
            len(objects),
            payload,
            timeout_s,
            body,
            read,
            map_location,
        )

    @object_operation(object_list="it is the result of the Work", obj="write value=")
    def all_gather_object(
        self, value: Any, *, map_location: MapLocation = None, timeout_s: Seconds | None = None
    ) -> ObjectWork:
        """The result on every rank is the values of all ranks, in rank order, all of them copies.

        Every rank unpickles what all ranks sent.
        """
        payload = self._payload(value, "value")

        def body(group: Operations, lengths: list[int]) -> dict[int, bytes]:
            return dict(enumerate(all_gather_bytes(group, payload, lengths)))

        timeout_s = self._count_objects(Kind.ALL_GATHER_OBJECT, timeout_s)
        return self._objects().issue(
            Kind.ALL_GATHER_OBJECT, -1, -1, payload, timeout_s, body, _in_order, map_location
        )

    @object_operation(
        obj="write value=", object_gather_list="it is the result of the Work", dst="write root="
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
        self._check_rank(root, "root")
        payload = self._payload(value, "value")
        is_root = self.rank == root

        def body(group: Operations, lengths: list[int]) -> dict[int, bytes]:
            return dict(enumerate(gather_bytes(group, payload, root, lengths) or ()))

        def read(values: dict[int, Any]) -> list[Any] | None:
            return _in_order(values) if is_root else None

        timeout_s = self._count_objects(Kind.GATHER_OBJECT, timeout_s)
        return self._objects().issue(
            Kind.GATHER_OBJECT, root, -1, payload, timeout_s, body, read, map_location
        )

    @object_operation(
        scatter_object_output_list="the object is the result of the Work",
        scatter_object_input_list="write objects=",
        src="write root=",
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
        self._check_rank(root, "root")
        parts: list[bytes] | None = None
        if self.rank == root:
            if objects is None or len(objects) != self.size:
                got = "None" if objects is None else f"{len(objects)} objects"
                raise ValueError(
                    f"scatter_object_list: rank {root} is the root and must pass one object for "
                    f"each of the {self.size} ranks, got {got}"
                )
            parts = [self._payload(value, f"objects[{i}]") for i, value in enumerate(objects)]

        def body(group: Operations, lengths: list[int]) -> dict[int, bytes]:
            return {root: scatter_bytes(group, parts, root)}

        timeout_s = self._count_objects(Kind.SCATTER_OBJECT_LIST, timeout_s)
        return self._objects().issue(
            Kind.SCATTER_OBJECT_LIST,
            root,
            -1,
            b"",
            timeout_s,
            body,
            lambda values: values[root],
            map_location,
        )

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
        self._check_peer(dst, "dst")
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


def _in_order(values: dict[int, Any]) -> list[Any]:
    return [values[rank] for rank in sorted(values)]
