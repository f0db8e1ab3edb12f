"""A session inside a Ray Tune trial: its workers run in the bundles that the trial holds.

A trial is an actor in the first bundle of a placement group, which Tune places for it. A placement
group of the session's own would come on top: Tune starts as many trials as fit, and their sessions
would wait for one another. And Ray removes such a group with the job only, not with a trial that
Tune stops. Workers in the trial's bundles end with the trial in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import ray
from ray.util import get_current_placement_group

from .placement import Needs
from .seats import Borrowed

_log = logging.getLogger("chorusline")


def of_this_trial(needs: Needs, fewest: int, spares: int) -> Borrowed | None:
    """The bundles for a session's workers in the group that this process is in; None if it is in
    none that its children share, or if these do not suffice, which is told."""
    group = get_current_placement_group()
    if group is None or needs.labels:
        return None
    # A trial whose first bundle is empty is in none.
    has_own = bool(ray.get_runtime_context().get_assigned_resources())
    indices = suitable(group.bundle_specs, needs.bundle, int(has_own))
    if len(indices) >= fewest + spares:
        return Borrowed(group, indices)
    each = ", ".join(f'"{name}": {amount:g}' for name, amount in needs.bundle.items())
    _log.warning(
        "this process is in a placement group (usually of a Ray Tune trial) with %d bundles for "
        "workers, and the session needs %d with {%s} each; it asks the cluster for others, and may "
        "wait for other trials that do the same. Reserve them for the trial: "
        'tune.with_resources(trainable, tune.PlacementGroupFactory([{"CPU": 1}] + [{%s}] * %d))',
        len(indices),
        fewest + spares,
        each,
        each,
        fewest + spares,
    )
    return None


def suitable(
    bundles: Sequence[Mapping[str, float]], bundle: Mapping[str, float], num_taken: int
) -> tuple[int, ...]:
    """The bundles of a group in which a worker fits. num_taken: bundles at the beginning that are
    not for workers. Pure."""
    return tuple(
        index
        for index, one in enumerate(bundles)
        if index >= num_taken
        and all(one.get(name, 0.0) >= amount for name, amount in bundle.items())
    )
