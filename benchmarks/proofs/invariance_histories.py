"""Histories of a training, drawn from a seed: what happens to its ranks, and where."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from benchmarks.faults.chaos_faults import IN_A_STEP, PHASES, Fault
from benchmarks.proofs.invariance_training import (
    IN_THE_LOOP,
    MODELS,
    NUM_STEPS,
    OPTIMIZERS,
    Plan,
    Training,
)

TRAININGS = [
    Training(model, optimizer, sharded, max_norm, weighs)
    for (model, optimizer, sharded), (max_norm, weighs) in zip(
        itertools.product(MODELS, OPTIMIZERS, (True, False)),
        itertools.cycle([(None, False), (0.5, False), (0.5, True), (None, True), (None, False)]),
        strict=False,
    )
]
"""Each model with each optimizer, with and without ZeRO: thirty; some clip, some weigh."""

_NUM_WORKERS = (3, 4, 2, 1)
"""At the start, in turns of five seeds: it takes seconds to change the number of nodes."""

SIZES = (0.001, 0.004, 25.0)
"""Of buckets, in MiB: many, some, one."""


def draw(seed: int, *, has_nodes: bool = True) -> Plan:
    """Fewer workers end at once than keep a shard, and somebody is left.

    has_nodes: whether there are nodes to drain and add; if not, the workers are always three.
    """
    rng = random.Random(seed)
    training = TRAININGS[seed * 7 % len(TRAININGS)]
    num_workers = _NUM_WORKERS[seed // 5 % len(_NUM_WORKERS)] if has_nodes else 3
    replicas = rng.choice((2, 3)) if num_workers > 2 else 2
    if training.needs_whole_parameters:
        replicas = 1
    # A plain optimizer's ranks continue from the top of the function only, so it registers.
    registers = not training.sharded or num_workers == 1 or rng.random() < 0.6
    plan = Plan(
        seed,
        training,
        num_workers,
        replicas,
        rng.choice(SIZES),
        _ends(rng, num_workers, training, replicas, has_nodes),
        registers,
    )
    others: list[Fault] = []
    for kind, chance in (("driver", 0.2), ("add", 0.3 if has_nodes and registers else 0.0)):
        if rng.random() < chance:
            where = rng.randrange(num_workers), rng.randint(0, NUM_STEPS // 2)
            others.append(Fault(*where, kind, rng.choice(_phases(training, is_first=True))))
    is_slow = registers and (rng.random() < 0.5 or any(f.kind == "add" for f in others))
    plan = replace(plan, faults=plan.faults + tuple(others), step_s=0.2 if is_slow else 0.0)
    if rng.random() < 0.3:
        plan = replace(plan, throttled=(rng.randrange(num_workers),))
    if registers and rng.random() < 0.3:
        resumes_with = rng.randint(1, 4) if has_nodes else 3
        plan = replace(plan, saves_at=rng.randint(2, NUM_STEPS - 2), resumes_with=resumes_with)
    return plan


def _ends(
    rng: random.Random, num_workers: int, training: Training, replicas: int, has_nodes: bool
) -> tuple[Fault, ...]:
    kinds = {"leave": 0.06} | ({"drain": 0.15} if has_nodes else {})
    if not training.needs_whole_parameters:  # No other rank has a copy of the state.
        kinds |= {"kill": 0.71, "stop": 0.08}
    most = num_workers - 1 if not training.sharded else min(num_workers - 1, max(replicas, 2))
    seats = rng.sample(range(num_workers), rng.randint(min(1, most), most))
    faults: list[Fault] = []
    at = rng.randint(0, 3)
    for number, seat in enumerate(seats):
        if number:
            # Apart, where there would be more deaths at once than copies.
            is_near = number < replicas - 1
            at += rng.randint(0, 2) if is_near else rng.randint(2, 4)
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        phases = _phases(training, is_first=number == 0)
        faults.append(Fault(seat, min(at, NUM_STEPS - 1), kind, rng.choice(phases)))
    return tuple(faults)


def _phases(training: Training, *, is_first: bool) -> list[str]:
    """Before the first loss there is no recovery that a fault could wait for."""
    if not training.sharded:
        return list(IN_THE_LOOP)
    return [*IN_THE_LOOP, *(IN_A_STEP if is_first else PHASES)]
