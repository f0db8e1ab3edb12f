"""A process group of torch.distributed over `Group`: made and ended.

The class also has parts of `Backend`'s interface, because torch calls `_get_backend(device)` for
them, which returns the process group itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore as TorchPrefixStore

from ..contract.errors import UnsupportedOperation
from ..group import Group
from ..stores.torch_store import StoreFromTorch
from .depths import Depths
from .dispatcher import hand_on_functional_operators
from .options import Options
from .registration import NAME
from .torch_operations import TorchOperations


def create(arguments: Any, options: Options | None) -> ChoruslineProcessGroup:
    """Make a process group; torch calls it on every rank. Blocks until all ranks have come.

    arguments: torch's _DistributedBackendOptions.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"pg_options must be chorusline's Options or None, got {type(options).__name__}; this "
            "backend cannot use the options of other backends"
        )
    name = f"torch {arguments.group_id}"
    timeout_s = arguments.timeout.total_seconds()
    parent = None if options is None else options.parent
    members = list(range(arguments.group_size))
    if parent is None and dist.is_initialized():
        world = dist.group.WORLD
        if isinstance(world, ChoruslineProcessGroup):
            parent, members = world.group, list(arguments.global_ranks_in_group)
    if parent is None:
        store = StoreFromTorch(arguments.store)
        size = arguments.group_size
        host = Group.create(store, arguments.group_rank, size, timeout_s=timeout_s, name=name)
    else:
        # The ranks meet in the parent's store, where no rank waits for a lost one.
        host = _on_host(parent, members, name, timeout_s)
    return ChoruslineProcessGroup(host, arguments.store)


def _on_host(parent: Group, members: Sequence[int], name: str, timeout_s: float) -> Group:
    return parent.connect_child(
        members, name, name=name, device=torch.device("cpu"), timeout_s=timeout_s
    )


# Untyped, because no Python method can match the overloads in torch's stubs for its C++.
_TorchProcessGroup: Any = dist.ProcessGroup


class ChoruslineProcessGroup(TorchOperations, _TorchProcessGroup):
    """`size` ranks of torch.distributed, over one `Group` for each device and depth.

    group: the group for the program's tensors on the host. It has the flight recorder,
    `describe()` and `failure()`.
    """

    def __init__(self, host: Group, torch_store: Any) -> None:
        """torch_store: returned to torch as the store of this process group."""
        _TorchProcessGroup.__init__(self, host.rank, host.size)
        TorchOperations.__init__(self, Depths(host))
        hand_on_functional_operators()
        self._torch_store = torch_store
        self._group_name = host.name
        self._group_desc = "undefined"
        self._splits = 0

    # -- groups ----------------------------------------------------------------------------------

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ChoruslineProcessGroup | None:
        """A process group of some ranks of this one; None on a rank that is not among them.

        new_ranks: this group's numbers of this rank's split; other ranks may pass other splits.
        """
        self._splits += 1
        ranks = list(new_ranks)
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self._group_name}:split:{self._splits}"
        # The ranks of a split agree on this name, which no other split has.
        host = _on_host(
            self.group,
            ranks,
            f"torch {name} of ranks {ranks}",
            self.group.timeout_s if timeout is None else timeout.total_seconds(),
        )
        made = ChoruslineProcessGroup(host, TorchPrefixStore(host.name, self._torch_store))
        made._set_group_name(name)
        made._set_group_desc(group_desc or f"{self._group_desc}:split")
        return made

    splitGroup = split_group

    def merge_remote_group(self, *_: Any, **__: Any) -> ChoruslineProcessGroup:
        raise UnsupportedOperation(
            "merge_remote_group",
            NAME,
            "a group's membership never changes; destroy the process groups and initialise a new "
            "one of all ranks",
        )

    mergeRemoteGroup = merge_remote_group

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def options(self) -> None:
        """The options that torch passes on to `split_group`."""

    def comm_split_count(self) -> int:
        return self._splits

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside a new group do not take part in making it."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._depths.group(device)

    # -- identity --------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    _get_backend_name = name = getBackendName

    def getRank(self) -> int:
        return self.group.rank

    def getSize(self) -> int:
        return self.group.size

    rank, size = getRank, getSize

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        types = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in types]

    def _get_backend(self, device: torch.device) -> ChoruslineProcessGroup:
        # A build of torch for CUDA asks for its accelerator where there is none, too.
        if device.type not in [one.type for one in self._device_types]:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def get_group_store(self) -> Any:
        return self._torch_store

    def _get_sequence_number_for_group(self) -> int:
        return self._next_sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: this class counts from the start."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Do nothing: no works are pending in threads of C++."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._depths.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    # -- the end ---------------------------------------------------------------------------------

    def abort(self) -> None:
        """End the generation on all ranks: works in flight raise GroupAborted."""
        self._depths.abort("the process group was aborted")
        self._depths.close()

    def shutdown(self) -> None:
        self._depths.close()

    def __repr__(self) -> str:
        return f"<ChoruslineProcessGroup {self._group_name!r} over {self.group!r}>"
