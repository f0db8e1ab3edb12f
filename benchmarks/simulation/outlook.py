"""What the simulation says of 1,000 to 100,000 workers: how long a change takes, in two ways; the
goodput; the memory of the driver.

Here every worker has its own cores, and the driver too. The two ways of a change:

- *calls*: the driver calls each worker, and each makes four requests of the driver's store.
- *tree*: what the driver says goes down a tree of workers, and reports come up it, each node adding
  up what its children report; the cards of all ranks go up and down it as well.

Only the first one is built.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulation import trees
from benchmarks.simulation.constants import Constants, Cost
from benchmarks.simulation.goodput import Checkpointed, InPlace, checkpointed, daly_s, in_place
from benchmarks.simulation.model import Cluster, Place
from benchmarks.simulation.published import connecting_s, mtbf_s
from benchmarks.simulation.scale import measure as scale_of

CARD_BYTES = 120.0
LINK_BYTES_S = 1.25e9
"""Of a worker's link for control messages: 10 Gb/s."""
WIRE_S = 50e-6
"""Of a message between two hosts of a data centre."""

STEP_S = 10.0
DETECTION_S = 14.0
"""Until Ray has given up a silent node, as it is set by itself; a dead process is heard of at once.
"""
PARAMETERS_BYTES = 20e9
"""Gathered again at the end of a change: of 10 billion parameters, two bytes each."""
FABRIC_BYTES_S = 50e9
"""Of the link of one GPU: 400 Gb/s."""
SPARE_S = 60.0
"""Until a spare worker has taken the seat; then the others take it in by another change."""
SAVE_S = 10.0
RESTART_S = {"a restart of 10 min": 600.0, "a restart of 2 min": 120.0}


@dataclass(frozen=True)
class Outlook:
    """Of one number of workers.

    change_s: by way, without detection and without connecting. decided_s: by calls, until every
        rank knows how it continues.
    slowest_s: by calls, until an operation of the store is answered. A rank gives it up after 10 s
        (actors/ray_calls/actor_store.py).
    fan_out: the best one of the tree. memory_bytes: of the driver's state.
    goodput: by cluster whose failure rate it is, and by way.
    """

    workers: int
    change_s: dict[str, float]
    decided_s: float
    fan_out: int
    memory_bytes: int
    slowest_s: float
    goodput: dict[str, dict[str, float]]


def _total(cost: Cost) -> float:
    return cost.serial_s + cost.beside_s


def tree_s(constants: Constants, workers: int) -> tuple[float, int]:
    """The seconds of a change by a tree, and its fan-out."""
    send_s, receive_s = _total(constants.call_out), _total(constants.call_in)
    fan_out = trees.best_fan_out(workers, send_s, WIRE_S, receive_s)
    down_s = trees.down_s(workers, fan_out, send_s, WIRE_S, receive_s)
    up_s = trees.up_s(workers, fan_out, send_s, WIRE_S, receive_s)
    # A node hands the cards of all to each of its children, one after the other.
    levels = trees.depth(workers, fan_out)
    cards_s = levels * fan_out * workers * CARD_BYTES / LINK_BYTES_S
    own_s = constants.freeze_s.fixed + constants.connect_s.fixed + constants.meet_s.fixed
    # Freeze down, reports up, decisions down; cards up, cards down.
    return 3 * down_s + 2 * up_s + cards_s + own_s, fan_out


def outlook(constants: Constants, workers: int) -> Outlook:
    told = Cluster(constants, workers + 1, Place(one_host=False, step_s=0.0)).lose_one()
    heard_s = constants.exit_s + constants.death_s
    of_tree_s, fan_out = tree_s(constants, workers)
    change_s = {"calls": told.met_s - heard_s, "tree": of_tree_s}
    return Outlook(
        workers,
        change_s,
        told.decided_s - heard_s,
        fan_out,
        scale_of(workers).memory_bytes,
        told.slowest_s,
        {name: goodputs(change_s, workers, name) for name in ("Llama 3", "RSC-2")},
    )


def goodputs(change_s: dict[str, float], workers: int, cluster: str) -> dict[str, float]:
    """By way: restarts from checkpoints at the best interval, and changes in place."""
    between_s = mtbf_s(workers, cluster)
    found = {
        name: checkpointed(between_s, Checkpointed(SAVE_S, restart_s, daly_s(SAVE_S, between_s)))
        for name, restart_s in RESTART_S.items()
    }
    for way, seconds in change_s.items():
        moved_s = PARAMETERS_BYTES / FABRIC_BYTES_S
        each_s = seconds + connecting_s(workers) + moved_s + STEP_S / 2
        lost = InPlace(
            change_s=DETECTION_S + each_s,
            arrival_s=each_s,
            replace_s=SPARE_S,
            workers=workers,
            lost_at_once=8,
        )
        found[f"in place, {way}"] = in_place(between_s, lost)
    return found
