"""Whether a cluster that is too small will grow, according to its autoscaler.

Ray has no public API for this. One source is read for each autoscaler, as `ray status` does:

- the state of version 2, which lists the groups that it can never place;
- the status of version 1, which names the type of each node. For nodes that were started by hand,
  the type is made from the node's id; such a cluster is the usual one of a machine of one's own.

An answer that this file does not know (a future Ray) is UNKNOWN: the session waits, up to its
deadline.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ray.experimental.internal_kv import _internal_kv_get

_STATUS_KEY = "__autoscaling_status"
_ASK_S = 5


class Growth(enum.Enum):
    """GROWS: there is an autoscaler, and it has not refused. FIXED: no node will come. UNKNOWN: no
    source says which."""

    GROWS = "grows"
    FIXED = "fixed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Prospect:
    """growth: whether nodes can come. why: the reason, as a part of a sentence."""

    growth: Growth
    why: str


def prospect(group: str) -> Prospect:
    """Whether the autoscaler of the connected cluster can make room for a pending placement group.

    group: its id in hex. Blocks for several calls to the cluster.
    """
    try:
        return _asked(group)
    except Exception as error:  # Private APIs: with another Ray the group must still be waited for.
        text = " ".join(str(error).split())
        return Prospect(
            Growth.UNKNOWN,
            "this version of Ray cannot say whether nodes are being added "
            f"({type(error).__name__}: {text})",
        )


def _asked(group: str) -> Prospect:
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    if is_autoscaler_v2(fetch_from_server=True):
        return of_state(_state(), group)
    status = _internal_kv_get(_STATUS_KEY)
    return of_status(json.loads(status) if status else {})


def _state() -> Any:
    from ray._private import worker
    from ray.core.generated import autoscaler_pb2

    # A type checker sees neither: one is generated, the other set when a process connects.
    messages: Any = autoscaler_pb2
    here: Any = worker.global_worker
    status = here.gcs_client.get_cluster_status(timeout_s=_ASK_S)
    reply = messages.GetClusterStatusReply.FromString(status)
    return reply.autoscaling_state if reply.HasField("autoscaling_state") else None


def of_state(state: Any, group: str) -> Prospect:
    """The answer of version 2. state: an AutoscalingState, None where there is none yet."""
    if state is None:
        return Prospect(Growth.UNKNOWN, "its autoscaler has not reported yet")
    coming = sum(request.count for request in state.pending_instance_requests)
    coming += len(state.pending_instances)
    failed = [
        f"{request.count} of {request.ray_node_type_name!r} ({request.reason})"
        for request in state.failed_instance_requests
    ]
    if failed:
        nodes = "; ".join(failed)
        return Prospect(Growth.GROWS, f"its autoscaler could not start {nodes}, and tries again")
    if coming:
        return Prospect(Growth.GROWS, f"its autoscaler has {_nodes(coming)} on the way")
    # Read this last: while nodes are on the way, the list may name a group that they will hold.
    never = (gang.details for gang in state.infeasible_gang_resource_requests)
    if any(details.startswith(f"{group}:") for details in never):
        return Prospect(
            Growth.FIXED, "and its autoscaler reports that it cannot add suitable nodes"
        )
    return Prospect(Growth.GROWS, "its autoscaler has been asked")


def of_status(status: Mapping[str, Any]) -> Prospect:
    """The answer of version 1. status: what the autoscaler writes for `ray status`."""
    report = status.get("autoscaler_report") or {}
    types: Mapping[str, str] = report.get("node_type_mapping") or {}
    if not types:
        return Prospect(Growth.UNKNOWN, "no autoscaler has reported yet")
    if all(kind == f"node_{node}" for node, kind in types.items()):  # All were started by hand.
        return Prospect(Growth.FIXED, "and it has no autoscaler")
    coming = sum((report.get("pending_launches") or {}).values())
    coming += len(_listed(report, "pending_nodes"))
    if failed := len(_listed(report, "failed_nodes")):
        return Prospect(Growth.GROWS, f"of its autoscaler's nodes, {failed} failed")
    if coming:
        return Prospect(Growth.GROWS, f"its autoscaler has {_nodes(coming)} on the way")
    return Prospect(Growth.GROWS, "its autoscaler has been asked")


def _listed(report: Mapping[str, Any], key: str) -> list[Any]:
    listed: Iterable[Any] = report.get(key) or ()
    return list(listed)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
