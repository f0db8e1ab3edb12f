"""Where a session runs: the cluster it connects to, and a bundle of resources for each worker."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from actors.errors import NoCluster, StartupError

from ..notebook import in_kernel
from ..process.running import is_running
from .autoscaling import Outlook, prospect
from .detached.standing import needs_cluster
from .interrupts import show_in_one_line

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_OF_ACCELERATOR, _SOME = "accelerator_type:", 0.001
"""Nodes with a GPU of a type have 1 of the resource of that name, and Ray takes so much for one who
wants to be there."""

_LEAST_LOCAL_CPU = 0.125
"""The smallest share of a CPU that a worker gets on a cluster that the session has started: sixteen
workers on two cores are an experiment, a thousand are a slip of the keyboard."""

_CONNECT_S = 5.0  # for a TCP connection to the cluster's head
_GIVE_BACK_S = 1.0
_ELASTIC_TRY_S = 5.0  # for placing more workers than the minimum
_LOOK_S = 0.5  # between two questions to the autoscaler

_log = logging.getLogger("chorusline")


def check(resources: Mapping[str, float] | None, use_gpu: bool, strategy: str) -> None:
    """Raise ValueError for resources of a worker, or a strategy, that no cluster could place."""
    resources = resources or {}
    for name, amount in resources.items():
        if not isinstance(amount, int | float) or not amount >= 0:
            raise ValueError(
                f"resources_per_worker[{name!r}] must be a number of at least 0, got {amount!r}"
            )
    if "GPU" in resources and (resources["GPU"] > 0) != use_gpu:
        raise ValueError(
            f"resources_per_worker asks for {resources['GPU']:g} GPU, but use_gpu is {use_gpu}; "
            "use_gpu decides where tensors live, so set both alike"
        )
    if not use_gpu and not any({"CPU": 1.0, **resources}.values()):
        raise ValueError(
            "resources_per_worker asks for nothing, and Ray cannot place nothing; ask for a small "
            "share, such as {'CPU': 0.01}"
        )
    if strategy not in STRATEGIES:
        raise ValueError(
            f"placement_strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}"
        )


def connect(address: str | None, log_to_driver: bool = True, *, may_start: bool = True) -> bool:
    """Connect this process to Ray; return True if it started a local cluster, which the caller
    must stop.

    An existing connection is used first; else `address`; else RAY_ADDRESS (set in each Ray job);
    else a new cluster on this machine, or, without may_start, the one that runs here.

    It blocks the calling thread for seconds: Ray installs its SIGTERM handler only from the main
    thread, and a start in another thread could not be cancelled.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        return _connect(address, log_to_driver, may_start)
    finally:
        _restore_sigterm(before)
        show_in_one_line()


def check_stays(name: str, address: str | None) -> None:
    """Raise NoCluster if the cluster for the detached session `name` would end with this process:
    this process has started it, or address says that it should."""
    is_ours = (address or os.environ.get("RAY_ADDRESS")) == "local"
    if ray.is_initialized():
        node: Any = ray._private.worker._global_node  # No public call says who has started it.
        is_ours = node is not None and node.head
    if is_ours:
        show_in_one_line()
        raise needs_cluster(name)


def _check_not_on_a_rank() -> None:
    if is_running():
        raise RuntimeError(
            "a Session was started inside a train function: its workers would wait for the "
            "resources that the workers of this one hold. Start sessions in the program, and call "
            "what this function should run directly, as other(ctx)"
        )


def _connect(address: str | None, log_to_driver: bool, may_start: bool) -> bool:
    _check_not_on_a_rank()
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or ("local" if may_start else "auto")
    options: dict[str, Any] = {"log_to_driver": log_to_driver}
    if in_kernel():  # A notebook shows what Ray says of the connection as if it were an error.
        options["logging_level"] = logging.WARNING
    if address == "local" and may_start:
        ray.init(address="local", include_dashboard=False, **options)
        return True
    join(address, may_start=may_start, **options)
    return False


def join(address: str | None, *, may_start: bool = False, **options: Any) -> None:
    """Connect to a running cluster. Raises StartupError; NoCluster if there is none.

    address: host:port; "auto" for the cluster of this machine; None for RAY_ADDRESS, or "auto".
    may_start: whether the caller could have started a cluster, which an error then mentions.
    options: those of ray.init.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in address:
        raise StartupError(
            f"address={address!r}",
            "a session connects as a part of the cluster, to host:port (6379 as a rule) or 'auto'. "
            "From outside, submit the script: ray job submit --address ... -- python ...",
        )
    try:
        ray.init(address=_reached(address), **options)
    except OSError as error:  # Ray's ConnectionError is an OSError.
        raise no_cluster(address, error.strerror or str(error), may_start) from None
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        raise StartupError(
            f"the cluster at {address!r} runs other versions than this process",
            f"{' '.join(str(error).split())} Use the cluster's Python and Ray here (its image, or "
            "a job that runs on it), or start the cluster with these",
        ) from None


def no_cluster(address: str, reason: str, may_start: bool) -> NoCluster:
    """reason: why `address` could not be connected to. may_start: as of `join`."""
    or_ours = "; without an address the session starts a cluster of its own" if may_start else ""
    if address == "auto":
        return NoCluster(
            "no Ray cluster runs on this machine",
            "start one with `ray start --head`, or name one that runs elsewhere, host:6379, as "
            f"address=, as --address of a command, or in RAY_ADDRESS{or_ours}",
        )
    return NoCluster(
        f"no Ray cluster answers at {address!r} ({reason})",
        "start one there with `ray start --head`, or correct address=, --address or RAY_ADDRESS; "
        f"'auto' is the cluster of this machine{or_ours}",
    )


def _restore_sigterm(before: Any) -> None:
    """Make SIGTERM unwind this process, so that sessions are closed, as after an interrupt.

    ray.init replaces the handler with its own, which ends the process with a stack dump.
    before: the handler before ray.init; a handler of the user is put back.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    is_rays = getattr(before, "__module__", "").startswith("ray.")
    is_users = callable(before) and before is not signal.SIG_DFL and not is_rays
    signal.signal(signal.SIGTERM, before if is_users else _end_by_signal)


def _end_by_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _reached(address: str) -> str:
    """The address of the cluster, as host:port. Raises OSError at once where nothing listens: Ray
    itself tries again for a minute, also with the address that a cluster has left behind which was
    killed."""
    if address == "auto":
        address = ray._private.services.canonicalize_bootstrap_address("auto") or ""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise OSError("an address is host:port")
    socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    return address


def bundle_of_worker(
    num_workers: int,
    *,
    use_gpu: bool,
    resources_per_worker: Mapping[str, float] | None,
    is_local: bool,
    accelerator_type: str | None = None,
) -> dict[str, float]:
    """The resources of one worker: a CPU and, with use_gpu, a GPU, unless resources_per_worker says
    otherwise. On a cluster that the session started, workers share the CPUs, in fractions if needed
    (is_local)."""
    num_cpus = 1.0
    if is_local:
        share = ray.cluster_resources().get("CPU", 1.0) / num_workers
        # Ray counts in ten-thousandths. Round down: three shares rounded up would not fit.
        num_cpus = max(_LEAST_LOCAL_CPU, math.floor(min(1.0, share) * 10_000) / 10_000)
    bundle = {"CPU": num_cpus} | ({"GPU": 1.0} if use_gpu else {})
    bundle |= resources_per_worker or {}
    if accelerator_type is not None:
        bundle[f"{_OF_ACCELERATOR}{accelerator_type}"] = _SOME
    return {name: float(amount) for name, amount in bundle.items() if amount > 0}


async def place(
    bundle: Mapping[str, float],
    fewest: int,
    most: int,
    strategy: str,
    timeout_s: float,
    *,
    may_grow: bool,
    labels: Mapping[str, str],
    lasting: str = "",
) -> PlacementGroup:
    """Place a placement group of one bundle per worker: as many as fit now, `fewest` to `most`.

    labels: of the nodes, as Ray's label selectors are written.
    lasting: the name of the detached session that the group is for.

    may_grow: whether the cluster may have an autoscaler. If it may, and the whole cluster is too
    small for `fewest` workers, a pending placement group makes the autoscaler start nodes.

    Raises StartupError at once if the whole cluster is too small and cannot grow, else when
    `fewest` workers were not placed within `timeout_s`. (Ray would wait for ever, silently.)
    """
    is_too_small = _fitting(bundle, ray.cluster_resources()) < fewest
    if is_too_small and not may_grow:
        raise _too_small(bundle, fewest, strategy, "", labels)
    wanted = max(fewest, min(most, _fitting(bundle, ray.available_resources())))
    if wanted > fewest:
        # What is free in sum may not fit on the nodes. This try has a deadline of its own, and
        # leaves the whole timeout_s to the minimum.
        group = await _try_to_place(
            bundle, wanted, strategy, min(_ELASTIC_TRY_S, timeout_s), labels, lasting
        )
        if group is not None:
            return group
    if is_too_small:  # Only new nodes help: wait for them, and ask whether any can come.
        group = await _place_on_new_nodes(bundle, fewest, strategy, timeout_s, labels, lasting)
    else:  # Others may free their resources.
        group = await _try_to_place(bundle, fewest, strategy, timeout_s, labels, lasting)
    if group is None:
        raise StartupError(
            _asked(bundle, fewest, strategy, labels),
            f"not placed within {timeout_s:g} s: {_resources_and_remedy(bundle)}. If nodes are "
            "still on their way, raise startup_timeout_s: in a cloud they take minutes",
        )
    return group


async def _place_on_new_nodes(
    bundle: Mapping[str, float],
    fewest: int,
    strategy: str,
    timeout_s: float,
    labels: Mapping[str, str],
    lasting: str,
) -> PlacementGroup | None:
    """Wait for new nodes; None if they did not come within `timeout_s`. Raises StartupError as soon
    as the cluster says that none can come."""

    async def until_hopeless(group: PlacementGroup) -> str:
        has_warned = False
        while True:
            future = await asyncio.to_thread(prospect, bundle, fewest, group.id.hex())
            # The cluster may have grown meanwhile; then Ray places the group in a moment.
            is_too_small = _fitting(bundle, ray.cluster_resources()) < fewest
            if future.outlook is Outlook.FIXED and is_too_small:
                return future.why
            if not has_warned:
                has_warned = True
                _log.warning(
                    "%s: %s; %s. Waiting for nodes, up to %g s (startup_timeout_s)",
                    _asked(bundle, fewest, strategy, labels),
                    _resources_of_cluster(bundle),
                    future.why,
                    timeout_s,
                )
            await asyncio.sleep(_LOOK_S)

    group = group_of(bundle, fewest, strategy, labels, lasting)
    placing = asyncio.create_task(_placed(group), name="placement")
    watching = asyncio.create_task(until_hopeless(group), name="autoscaler-watch")
    both = {placing, watching}
    is_placed = False
    try:
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if placing.done():
            placing.result()
            is_placed = True
            return group
        if watching.done():
            raise _too_small(bundle, fewest, strategy, watching.result(), labels)
        return None
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)
        if not is_placed:
            remove_placement_group(group)


async def give_back(group: PlacementGroup) -> None:
    """End the group and all actors in it; return when Ray counts its resources as free.

    Ray does so a moment after the removal (0.2 s on a busy machine). A session that started before
    that would count them as taken, and be smaller than it could be.
    """
    reserved: Counter[str] = Counter()
    for bundle in group.bundle_specs:
        reserved.update(bundle)
    before = ray.available_resources()
    remove_placement_group(group)
    give_up_at = time.monotonic() + _GIVE_BACK_S  # Another job may have taken them already.
    while time.monotonic() < give_up_at:
        free = ray.available_resources()
        if all(
            free.get(name, 0.0) > before.get(name, 0.0) + amount / 2
            for name, amount in reserved.items()
        ):
            return
        await asyncio.sleep(0.02)


def options_of_bundle(
    group: PlacementGroup, index: int, bundle: Mapping[str, float]
) -> dict[str, Any]:
    """Ray's actor options for a worker in bundle `index` of a group."""
    special = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options |= {special[name]: amount for name, amount in bundle.items() if name in special}
    # The bundle is on a node with the right accelerator already.
    options["resources"] = {
        name: amount
        for name, amount in bundle.items()
        if name not in special and not name.startswith(_OF_ACCELERATOR)
    }
    options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    return options


def options_of_driver() -> dict[str, Any]:
    """Ray's actor options for the driver: it runs on the session's node, which the session cannot
    survive either. If that node takes no actors, the crew does without these options.

    The affinity is a hard one: for an actor that asks for no resources, Ray takes a soft affinity
    for none, and picks a node at random."""
    here = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}


async def _try_to_place(
    bundle: Mapping[str, float],
    num_workers: int,
    strategy: str,
    timeout_s: float,
    labels: Mapping[str, str],
    lasting: str,
) -> PlacementGroup | None:
    group = group_of(bundle, num_workers, strategy, labels, lasting)
    is_placed = False
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
        is_placed = True
    except TimeoutError:
        return None
    finally:
        if not is_placed:
            remove_placement_group(group)
    return group


def group_of(
    bundle: Mapping[str, float],
    num_workers: int,
    strategy: str,
    labels: Mapping[str, str],
    lasting: str = "",
) -> PlacementGroup:
    """A new placement group, which Ray places when it can. lasting: of the detached session of this
    name; the group stays until it is removed (Ray removes others with a keeper that dies)."""
    bundles = [dict(bundle) for _ in range(num_workers)]
    selectors: dict[str, Any] = {}
    if labels:
        selectors["bundle_label_selector"] = [dict(labels) for _ in bundles]
    if lasting:
        selectors |= {"name": f"{lasting}/{uuid.uuid4().hex}", "lifetime": "detached"}
    group: PlacementGroup = placement_group(bundles, strategy=strategy, **selectors)
    return group


async def _placed(group: PlacementGroup) -> None:
    await group.ready()


def _fitting(bundle: Mapping[str, float], resources: Mapping[str, float]) -> int:
    """For how many bundles the resources suffice in sum, whatever node they are on."""
    return min(
        (int(resources.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items()),
        default=0,
    )


def shortage(bundle: Mapping[str, float], num_workers: int) -> str:
    """Why so many workers do not fit now; empty if they do, in sum."""
    if _fitting(bundle, ray.available_resources()) >= num_workers:
        return ""
    each = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return f"there is no room for {workers} with {each} now, {_resources_of_cluster(bundle)}"


def _asked(
    bundle: Mapping[str, float], num_workers: int, strategy: str, labels: Mapping[str, str]
) -> str:
    each = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    on = f", label_selector={dict(labels)}" if labels else ""
    return f"num_workers={num_workers} with {each} each (placement_strategy={strategy!r}{on})"


def _too_small(
    bundle: Mapping[str, float],
    num_workers: int,
    strategy: str,
    why_fixed: str,
    labels: Mapping[str, str],
) -> StartupError:
    """why_fixed: why no nodes can come; empty for a cluster that the session has started."""
    also = f", {why_fixed}" if why_fixed else ""
    if "GPU" in bundle and not ray.cluster_resources().get("GPU"):
        return StartupError(
            "use_gpu=True",
            f"the cluster has no GPU{also}; leave use_gpu out, or connect to one that has",
        )
    return StartupError(
        _asked(bundle, num_workers, strategy, labels),
        f"that cannot be placed: {_resources_and_remedy(bundle, also)}",
    )


def _resources_and_remedy(bundle: Mapping[str, float], also: str = "") -> str:
    return (
        f"{_resources_of_cluster(bundle)}{also}. Lower num_workers, ask for less with "
        "resources_per_worker, or add nodes"
    )


def _resources_of_cluster(bundle: Mapping[str, float]) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    has = ", ".join(
        f"{name} {total.get(name, 0.0):g} ({free.get(name, 0.0):g} free)" for name in bundle
    )
    num_nodes = sum(1 for node in ray.nodes() if node["Alive"])
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
    return f"the cluster has {has} on {nodes}"
