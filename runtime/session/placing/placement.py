"""Where a session's workers run: a bundle of resources for each of them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from chorusline.actors.errors import StartupError
from chorusline.actors.ray_calls.detached_actors import new_group_name
from chorusline.collectives.contract.argument_kinds import check_text
from chorusline.collectives.contract.plain_numbers import real

from .autoscaling import Growth, prospect

NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_OF_ACCELERATOR, _SOME = "accelerator_type:", 0.001
"""Nodes with a GPU of a type have 1 of the resource of that name, and Ray takes so much for one who
wants to be there."""

_LEAST_LOCAL_CPU = 0.125
"""The smallest share of a CPU that a worker gets on a cluster that the session has started: sixteen
workers on two cores are an experiment, a thousand are a slip of the keyboard."""

_LEAST, _MOST = 1e-4, 1e14  # of a resource: Ray counts in ten-thousandths, in 64 bits
_GIVE_BACK_S = 1.0
_ELASTIC_TRY_S = 5.0  # for placing more workers than the minimum
_LOOK_S = 0.5  # between two questions to the autoscaler
_DIVIDE_S = 5.0  # for groups of one bundle in the place of a group that was placed

_log = logging.getLogger("chorusline")


def check(resources: Mapping[str, float] | None, use_gpu: bool, strategy: str) -> None:
    """Raise ValueError for resources of a worker, or a strategy, that no cluster could place."""
    resources = resources or {}
    for name, amount in resources.items():
        if not isinstance(name, str) or not name:  # Ray ends the process for a name without text.
            raise TypeError(f"the names in resources_per_worker must be strings, got {name!r}")
        check_text("resources_per_worker", name)
        number = real(amount)
        if number is None or not (number == 0 or _LEAST <= number < _MOST):
            raise ValueError(
                f"resources_per_worker[{name!r}] must be 0, or a number of at least {_LEAST:g} and "
                f"less than {_MOST:g}, got {amount!r}"
            )
    if "GPU" in resources and (resources["GPU"] > 0) != use_gpu:
        raise ValueError(
            f"resources_per_worker asks for {resources['GPU']:g} GPU, but use_gpu is {use_gpu}; "
            "use_gpu decides where tensors live, so set both to match"
        )
    # The default CPU counts unless it was set to 0.
    if not use_gpu and not any({"CPU": 1.0, **resources}.values()):
        raise ValueError(
            "resources_per_worker asks for nothing, and Ray places no such worker; ask for a small "
            "share, such as {'CPU': 0.01}"
        )
    if strategy not in STRATEGIES:
        raise ValueError(
            f"placement_strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}"
        )


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
    # A laptop with two cores may run four workers, to try things out.
    if is_local:
        share = ray.cluster_resources().get("CPU", 1.0) / num_workers
        # Ray counts in ten-thousandths. Round down: three shares rounded up would not fit.
        num_cpus = max(_LEAST_LOCAL_CPU, math.floor(min(1.0, share) * 10_000) / 10_000)
    bundle = {"CPU": num_cpus} | ({"GPU": 1.0} if use_gpu else {})
    bundle |= resources_per_worker or {}
    if accelerator_type is not None:
        bundle[f"{_OF_ACCELERATOR}{accelerator_type}"] = _SOME
    return {name: float(amount) for name, amount in bundle.items() if amount > 0}


@dataclass(frozen=True, slots=True)
class Needs:
    """What each worker of a session needs.

    bundle: its resources.
    strategy: one of STRATEGIES.
    labels: of the nodes, as Ray's label selectors are written.
    detached: the name of a detached session, whose groups stay when its host dies (Ray removes
        others with it).
    """

    bundle: dict[str, float]
    strategy: str
    labels: dict[str, str]
    detached: str = ""

    def group(self, num_workers: int = 1) -> PlacementGroup:
        """A new placement group, which Ray places when it can."""
        options: dict[str, Any] = {}
        if self.labels:
            options["bundle_label_selector"] = [dict(self.labels) for _ in range(num_workers)]
        if self.detached:
            options |= {"name": new_group_name(self.detached), "lifetime": "detached"}
        bundles = [dict(self.bundle) for _ in range(num_workers)]
        group: PlacementGroup = placement_group(bundles, strategy=self.strategy, **options)
        return group

    def apart_from(self, nodes: set[str]) -> Needs:
        """The same, on none of these nodes."""
        # No blanks: Ray silently reads ", b" as a node other than "b".
        avoided = {NODE_ID: f"!in({','.join(sorted(nodes))})"} if nodes else {}
        return replace(self, labels={**avoided, **self.labels})

    def in_words(self, num_workers: int) -> str:
        on = f", label_selector={self.labels}" if self.labels else ""
        return (
            f"num_workers={num_workers} with {_each(self.bundle)} each "
            f"(placement_strategy={self.strategy!r}{on})"
        )


async def place(
    needs: Needs, fewest: int, most: int, timeout_s: float, *, may_grow: bool, survives_loss: bool
) -> tuple[PlacementGroup, ...]:
    """Place one bundle per worker: as many as fit now, `fewest` to `most`. Returns one group, or a
    group for each bundle (`_divided`).

    survives_loss: the session's runs continue when workers are lost.
    may_grow: whether the cluster may have an autoscaler. If it may, and the whole cluster is too
    small for `fewest` workers, a pending placement group makes the autoscaler start nodes.

    Raises StartupError at once if the whole cluster is too small and cannot grow, else when
    `fewest` workers were not placed within `timeout_s`. (Ray would wait forever, silently.)
    """
    give_up_at, left_s = time.monotonic() + timeout_s, timeout_s
    while True:
        group = await _place_together(needs, fewest, most, left_s, may_grow=may_grow)
        if group is None:
            raise StartupError(
                needs.in_words(fewest),
                f"not placed within {timeout_s:g} s: {_resources_and_remedy(needs.bundle)}. If "
                "nodes are still starting, raise startup_timeout_s: in a cloud they take minutes",
            )
        # One group will do: any lost worker ends the run, or all are on one node.
        if not survives_loss or needs.strategy == "STRICT_PACK":
            return (group,)
        groups = await _divided(group, needs)
        if groups:
            return groups
        # Others took the room while the group was divided: place it once more.
        left_s = max(0.0, give_up_at - time.monotonic())


async def _divided(group: PlacementGroup, needs: Needs) -> tuple[PlacementGroup, ...]:
    """In the place of a group that was placed, a group for each bundle; with SPREAD, where it was,
    or on a node without any of the others. Empty if others have taken the room meanwhile.

    When a node is lost, Ray looks for another place for a whole group at once: two lost bundles get
    none before there is room for both, and until then Ray leaves all other pending groups waiting
    (2.60). The group stays as it is on the node of this process, without which there is no session.
    """
    nodes = placement_group_table(group)["bundles_to_node_id"]
    if set(nodes.values()) == {ray.get_runtime_context().get_node_id()}:
        return (group,)
    remove_placement_group(group)
    # A node by its name would do now; but when it dies, Ray could not move the group of a worker
    # that is starting. So with SPREAD a group names the others' nodes, which it avoids.
    in_order = [nodes[index] for index in range(group.bundle_count)]
    others = [{node for node in in_order if node != own} for own in in_order]
    spreads = "SPREAD" in needs.strategy
    groups = tuple((needs.apart_from(taken) if spreads else needs).group() for taken in others)
    return groups if await _are_placed(groups, _DIVIDE_S) else ()


async def _place_together(
    needs: Needs, fewest: int, most: int, timeout_s: float, *, may_grow: bool
) -> PlacementGroup | None:
    """As `place`, in one group; None where it was not placed within `timeout_s`."""
    # By the sums, which need no placing: what does not fit in sum fits nowhere.
    is_too_small = _fitting(needs.bundle, ray.cluster_resources()) < fewest
    if is_too_small and not may_grow:
        raise _too_small(needs, fewest)
    wanted = max(fewest, min(most, _fitting(needs.bundle, ray.available_resources())))
    if wanted > fewest:
        # What is free in sum may not fit on the nodes. This try has a deadline of its own, and
        # leaves the whole timeout_s to the minimum.
        group = await _try_to_place(needs, wanted, min(_ELASTIC_TRY_S, timeout_s))
        if group is not None:
            return group
    if is_too_small:  # Only new nodes help: wait for them, and ask whether any can come.
        return await _place_on_new_nodes(needs, fewest, timeout_s)
    # Others may free their resources.
    return await _try_to_place(needs, fewest, timeout_s)


async def _place_on_new_nodes(needs: Needs, fewest: int, timeout_s: float) -> PlacementGroup | None:
    """Wait for new nodes; None if they did not come within `timeout_s`. Raises StartupError as soon
    as the cluster says that none can come."""

    async def until_hopeless(group: PlacementGroup) -> str:
        has_warned = False
        while True:
            future = await asyncio.to_thread(prospect, group.id.hex())
            # The cluster may have grown meanwhile; then Ray places the group in a moment.
            is_too_small = _fitting(needs.bundle, ray.cluster_resources()) < fewest
            if future.growth is Growth.FIXED and is_too_small:
                return future.why
            if not has_warned:
                has_warned = True
                _log.warning(
                    "%s: %s; %s. Waiting for nodes, up to %g s (startup_timeout_s)",
                    needs.in_words(fewest),
                    _resources_of_cluster(needs.bundle),
                    future.why,
                    timeout_s,
                )
            await asyncio.sleep(_LOOK_S)

    group = needs.group(fewest)
    placing = asyncio.ensure_future(group.ready())
    watching = asyncio.create_task(until_hopeless(group), name="autoscaler-watch")
    both: set[asyncio.Future[Any]] = {placing, watching}
    is_placed = False
    try:
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if placing.done():
            placing.result()
            is_placed = True
            return group
        if watching.done():
            raise _too_small(needs, fewest, watching.result())
        return None
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)
        if not is_placed:
            remove_placement_group(group)


async def give_back(groups: Sequence[PlacementGroup]) -> None:
    """End the groups and all actors in them; return when Ray counts their resources as free.

    Ray does so a moment after the removal (0.2 s on a busy machine). A session that started before
    that would count them as taken, and be smaller than it could be.
    """
    reserved: Counter[str] = Counter()
    for group in groups:
        for bundle in group.bundle_specs:
            reserved.update(bundle)
    # Compared with what was free before, since others take and give meanwhile.
    before = ray.available_resources()
    for group in groups:
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
    survive either. If that node takes no actors, the worker group does without these options.

    The affinity is a hard one: for an actor that asks for no resources, Ray takes a soft affinity
    for none, and picks a node at random."""
    here = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}


async def _try_to_place(needs: Needs, num_workers: int, timeout_s: float) -> PlacementGroup | None:
    group = needs.group(num_workers)
    return group if await _are_placed((group,), timeout_s) else None


async def _are_placed(groups: Sequence[PlacementGroup], timeout_s: float) -> bool:
    """Whether Ray places all of them in time; otherwise they are removed."""
    are_placed = False
    try:
        async with asyncio.timeout(timeout_s):
            for group in groups:
                await group.ready()
        are_placed = True
    except TimeoutError:
        pass
    finally:
        if not are_placed:
            for group in groups:
                remove_placement_group(group)
    return are_placed


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
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    has = _resources_of_cluster(bundle)
    return f"there is no room for {workers} with {_each(bundle)} now, {has}"


def _each(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())


def _too_small(needs: Needs, num_workers: int, why_fixed: str = "") -> StartupError:
    """why_fixed: why no nodes can come; empty for a cluster that the session has started."""
    also = f", {why_fixed}" if why_fixed else ""
    # The usual reason, with the usual remedy.
    if "GPU" in needs.bundle and not ray.cluster_resources().get("GPU"):
        return StartupError(
            "use_gpu=True",
            f"the cluster has no GPU{also}; leave use_gpu out, or connect to one that has",
        )
    return StartupError(
        needs.in_words(num_workers),
        f"that cannot be placed: {_resources_and_remedy(needs.bundle, also)}",
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
