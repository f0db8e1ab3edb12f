"""Shards go from the ranks of one group to those of another, as in a recovery; no Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.collectives.objects.blocking import all_gather_object, broadcast_object
from chorusline.runtime.checkpoint.format.pieces import Contents
from chorusline.runtime.checkpoint.format.reader import CheckpointReader
from chorusline.runtime.checkpoint.format.storage import Folder
from chorusline.runtime.checkpoint.sharded_state import SavedOptimizer
from chorusline.runtime.partition.resharding import plan_transfers
from chorusline.runtime.process.registry import Registry
from chorusline.runtime.recovery import last_checkpoint
from chorusline.runtime.recovery.last_checkpoint import Saveable
from chorusline.runtime.recovery.restart import OptimizerOptions, RestartState
from chorusline.runtime.zero.shards.shard_state import ShardState
from chorusline.runtime.zero.zero_redundancy_optimizer import Additions, optimizer_engine_of
from tests.references.sharded_training import assert_same_state
from tests.references.training import batches_of, loss_of, make_model


def take_steps(model: Any, optimizer: Any, rank: int, steps: range, dtype: torch.dtype) -> None:
    for batch in batches_of(rank, steps.stop, dtype)[steps.start :]:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def make(group: cl.Group, dtype: torch.dtype) -> tuple[Any, Any]:
    model = cl.DistributedDataParallel(make_model(dtype), group, bucket_cap_mb=0.0002)
    return model, cl.ZeroRedundancyOptimizer(model, torch.optim.NAdam, lr=0.1, replicas=2)


def whole(optimizer: Any, group: cl.Group) -> Any:
    optimizer.consolidate_state_dict()
    return broadcast_object(group, optimizer.state_dict() if group.rank == 0 else None)


def tensors(parts: list[Contents]) -> dict[Any, torch.Tensor]:
    """What several ranks write, put together; every element once."""
    found: dict[Any, torch.Tensor] = {}
    written: dict[Any, int] = {}
    for one in (ranged for part in parts for ranged in part.ranges):
        flat = found.setdefault(one.path, torch.zeros(one.shape, dtype=one.dtype)).view(-1)
        flat[one.start : one.stop] = torch.cat(one.parts)
        written[one.path] = written.get(one.path, 0) + one.stop - one.start
    assert all(written[path] == tensor.numel() for path, tensor in found.items())
    return found


def shrink_and_grow(group: cl.Group, dtype: torch.dtype) -> list[int]:
    """Rank 1 is lost, and its shard comes from a replica; then all begin anew with a rank that has
    nothing. Returns the bytes that this rank has sent in both."""
    model, optimizer = make(group, dtype)
    take_steps(model, optimizer, group.rank, range(3), dtype)
    before, options = whole(optimizer, group), optimizer.param_groups
    options = [{k: v for k, v in one.items() if k != "params"} for one in options]
    engine = optimizer_engine_of(optimizer)
    held, sent = engine.shard.held(), []

    # What two of three ranks write of what they hold is what all three write of their own.
    saved, mine = SavedOptimizer.of("optimizer", optimizer), Contents()
    saved.collect(held, engine.shard.kept(1), mine)
    inventories = all_gather_object(group, held.inventory)
    survivors = {rank: inventories[rank].ranges for rank in (0, 2)}
    plan = plan_transfers(survivors, {-1: saved.layout.everything()})
    theirs = Contents()
    saved.collect(held, [one.range for one in plan if one.source == group.rank], theirs)
    usual, last = (tensors(all_gather_object(group, parts)) for parts in (mine, theirs))
    assert usual.keys() == last.keys()
    assert all(torch.equal(usual[path], last[path]) for path in usual)

    fewer = group.new_group([0, 2])
    if fewer is not None:
        inventories = all_gather_object(fewer, held.inventory)
        sent.append(engine.shard.complete(held, inventories, fewer))
        engine.change_group(fewer, held)
        assert_same_state(whole(optimizer, fewer), before)
        held = engine.shard.held()
    else:
        held = ShardState()
    group.barrier().wait()

    again_model, again = make(group, dtype)
    with torch.no_grad():
        for parameter in again_model.parameters():
            parameter.zero_()
    inventories = all_gather_object(group, held.inventory)
    progress = broadcast_object(group, engine.progress)
    again_engine = optimizer_engine_of(again)
    OptimizerOptions(3, options, None, Additions()).load(again)
    sent.append(again_engine.take_over(held, inventories, progress))
    assert_same_state(whole(again, group), before)
    assert again.num_steps == 3

    # And it goes on as a run that was never interrupted.
    take_steps(again_model, again, group.rank, range(3, 5), dtype)
    expected_model, expected = make(group, dtype)
    take_steps(expected_model, expected, group.rank, range(5), dtype)
    assert_same_state(whole(again, group), whole(expected, group))
    for one, other in zip(again_model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(one, other)
    return sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_lost_rank_had_comes_from_replicas_and_a_new_rank_gets_its_part(
    ranks_of, dtype: torch.dtype
) -> None:
    first, lost, last = ranks_of(3).run(shrink_and_grow, dtype)
    assert len(first) == len(last) == 2 and sum(first) + sum(last) > 0
    assert lost == [0], "it had nothing to send"


def shrink_after_a_write(
    group: cl.Group, dtype: torch.dtype, waits: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """Rank 1 is lost after the program has written to parameters, and while rank `waits` is in the
    step before that. What they are before, and after; and the largest number that is stepped."""
    model, optimizer = make(group, dtype)
    take_steps(model, optimizer, group.rank, range(3), dtype)
    engine = optimizer_engine_of(optimizer)
    if group.rank == waits:
        engine.shard.parameters_have_come = False  # As while the parameters of that step come.
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.05, 0.05)
    before = [p.detach().clone() for p in model.parameters()]
    held, largest = engine.shard.held(takes_parameters=True), 0.0
    fewer = group.new_group([0, 2])
    if fewer is not None:
        engine.shard.complete(held, all_gather_object(fewer, held.inventory), fewer)
        engine.last_live = (0, 1)
        engine.change_group(fewer, held)
        ranges = [part for bucket in engine.shard.buckets for part in bucket.ranges]
        largest = max(float(part.master.abs().max()) for part in ranges)
        engine.shard.gather()
    group.barrier().wait()
    return before, [p.detach().clone() for p in model.parameters()], largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_that_the_program_has_written_stay_when_shards_are_cut_again(
    ranks_of, dtype: torch.dtype
) -> None:
    for before, after, _ in ranks_of(3).run(shrink_after_a_write, dtype, -1)[::2]:
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("waits", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rank_that_has_ended_the_step_keeps_what_the_program_has_written_since(
    ranks_of, dtype: torch.dtype, waits: int
) -> None:
    """The other rank, which still waits in the step, writes it when it has ended that."""
    results = ranks_of(3).run(shrink_after_a_write, dtype, waits)
    before, after, largest = results[2 - waits]
    assert largest <= 0.0501
    for one, other, theirs in zip(before, after, results[waits][1], strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, theirs.clamp(-0.05, 0.05))


def restarted_after(group: cl.Group, change: str, num_steps: int, folder: Path) -> Any:
    """Rank 0 changes the state after some steps, and all begin anew before rank 1 does it. The
    whole state before, that of each rank then, and what a last checkpoint has of it; or the
    error."""
    dtype = torch.float32
    model, optimizer = make(group, dtype)
    take_steps(model, optimizer, group.rank, range(num_steps), dtype)
    before = whole(optimizer, group)
    if group.rank == 0 and change == "clear":
        optimizer.state.clear()
    elif group.rank == 0:
        optimizer.load_state_dict(before)
    registry = Registry()
    registry.add("optimizer", optimizer)
    kept = RestartState.of(registry, (num_steps, 0), {})
    summaries = all_gather_object(group, kept.summary(True, None))
    again = Registry().add("optimizer", make(group, dtype)[1])
    try:
        kept.restore(again, summaries, group)
    except cl.CollectiveMismatch as error:
        return str(error)
    states = all_gather_object(
        group, [*optimizer_engine_of(again.object).shard.optimizer.state.values()]
    )
    data = {"boundaries": 1, "data": None, "origin": "", "steps_before": 0}
    saveable, config = Saveable.of(registry, kept, num_steps), cl.CheckpointConfig(folder)
    path = last_checkpoint.save(saveable, kept, True, data, group, config)
    saved = CheckpointReader(Folder(path), "").below("optimizer", "state")
    return before["state"], states, [*saved]


def test_state_that_one_rank_has_cleared_is_cleared_on_all_that_run_again(
    ranks_of: Any, tmp_path: Path
) -> None:
    for before, states, saved in ranks_of(2).run(restarted_after, "clear", 3, tmp_path):
        assert before and states == [[], []] and not saved


def test_state_that_one_rank_has_loaded_is_refused_where_all_run_again(
    ranks_of: Any, tmp_path: Path
) -> None:
    for text in ranks_of(2).run(restarted_after, "load", 3, tmp_path):
        assert "0 dropped, 1 loaded on rank 0, 0 dropped, 0 loaded on rank 1" in text
        assert "Resume from the last checkpoint" in text


def test_state_that_is_loaded_before_the_first_step_is_loaded_again(
    ranks_of: Any, tmp_path: Path
) -> None:
    assert ranks_of(2).run(restarted_after, "load", 0, tmp_path) == [({}, [[], []], [])] * 2
