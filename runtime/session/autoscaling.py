"""Whether a cluster that is too small will grow: what its autoscaler says of it.

Ray has no public way to ask. Three places are read, as Ray's own libraries and `ray status` do:

- the cluster's configuration, with the most nodes of each kind, where the provider reports one;
- the state of the autoscaler (its second version): it lists the groups that it can never place;
- its status (the first version), which names the type of each node. Where nodes come by hand, Ray
  calls the type of each one after its id.

What a future Ray says otherwise is UNKNOWN, and waited for like a promise: up to a deadline.
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


class Outlook(enum.Enum):
    """GROWS: there is an autoscaler, and it has not said that it cannot. FIXED: nothing will come.
    UNKNOWN: nobody says."""

    GROWS = "grows"
    FIXED = "fixed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Prospect:
    """why: what was heard, as a part of a sentence."""

    outlook: Outlook
    why: str


def prospect(bundle: Mapping[str, float], fewest: int, group: str) -> Prospect:
    """What the autoscaler of the connected cluster says of a placement group that waits.

    group: its id in hex; it has `fewest` times `bundle`. Blocks for some questions to the cluster.
    """
    try:
        return _asked(bundle, fewest, group)
    except Exception as error:  # Whatever another Ray may do here, the group still waits.
        told = " ".join(str(error).split())
        return Prospect(
            Outlook.UNKNOWN,
            f"whether nodes come cannot be asked of this Ray ({type(error).__name__}: {told})",
        )


def _asked(bundle: Mapping[str, float], fewest: int, group: str) -> Prospect:
    from ray._private.state import state as cluster
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    maximum = cluster.get_max_resources_from_cluster_config()
    if maximum and (told := of_maximum(bundle, fewest, maximum)):
        return told
    if is_autoscaler_v2(fetch_from_server=True):
        return of_state(_state(), group)
    said = _internal_kv_get(_STATUS_KEY)
    return of_status(json.loads(said) if said else {})


def _state() -> Any:
    from ray._private import worker
    from ray.core.generated import autoscaler_pb2

    # Neither is there for a type checker: generated, and set when a process connects.
    messages: Any = autoscaler_pb2
    here: Any = worker.global_worker
    said = here.gcs_client.get_cluster_status(timeout_s=_ASK_S)
    reply = messages.GetClusterStatusReply.FromString(said)
    return reply.autoscaling_state if reply.HasField("autoscaling_state") else None


def of_maximum(
    bundle: Mapping[str, float], fewest: int, maximum: Mapping[str, float]
) -> Prospect | None:
    """What the configuration of all that the cluster may ever have says, if it settles it."""
    missing = {
        name: (amount * fewest, maximum.get(name, 0))
        for name, amount in bundle.items()
        if amount * fewest > maximum.get(name, 0) + 1e-6
    }
    if not missing:
        return None
    told = ", ".join(
        f"{name} {most:g} at the most, and {wanted:g} are asked for"
        for name, (wanted, most) in missing.items()
    )
    return Prospect(Outlook.FIXED, f"by its configuration it may grow to {told}")


def of_state(state: Any, group: str) -> Prospect:
    """What the second version says. state: an AutoscalingState, None where there is none yet."""
    if state is None:
        return Prospect(Outlook.UNKNOWN, "its autoscaler has said nothing yet")
    coming = sum(request.count for request in state.pending_instance_requests)
    coming += len(state.pending_instances)
    failed = [
        f"{request.count} of {request.ray_node_type_name!r} ({request.reason})"
        for request in state.failed_instance_requests
    ]
    if failed:
        told = "; ".join(failed)
        return Prospect(Outlook.GROWS, f"its autoscaler could not start {told}, and tries again")
    if coming:
        return Prospect(Outlook.GROWS, f"its autoscaler has {_nodes(coming)} on the way")
    # With nodes on the way it may say so too, of what the whole cluster will be able to do.
    never = (gang.details for gang in state.infeasible_gang_resource_requests)
    if any(details.startswith(f"{group}:") for details in never):
        return Prospect(
            Outlook.FIXED, "and its autoscaler says that it can bring no nodes that would do"
        )
    return Prospect(Outlook.GROWS, "its autoscaler has been asked")


def of_status(status: Mapping[str, Any]) -> Prospect:
    """What the first version says. status: its own, as it leaves it for `ray status`."""
    report = status.get("autoscaler_report") or {}
    types: Mapping[str, str] = report.get("node_type_mapping") or {}
    if not types:
        return Prospect(Outlook.UNKNOWN, "no autoscaler has said anything yet")
    if all(kind == f"node_{node}" for node, kind in types.items()):
        return Prospect(Outlook.FIXED, "and it has no autoscaler")
    coming = sum((report.get("pending_launches") or {}).values())
    coming += len(_listed(report, "pending_nodes"))
    if failed := len(_listed(report, "failed_nodes")):
        return Prospect(Outlook.GROWS, f"of its autoscaler's nodes, {failed} failed")
    if coming:
        return Prospect(Outlook.GROWS, f"its autoscaler has {_nodes(coming)} on the way")
    return Prospect(Outlook.GROWS, "its autoscaler has been asked")


def _listed(report: Mapping[str, Any], key: str) -> list[Any]:
    listed: Iterable[Any] = report.get(key) or ()
    return list(listed)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
