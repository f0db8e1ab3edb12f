"""What is torn, foreign, unwritable or killed: what is said, and that the checkpoint before it is
the one that loads."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import chorusline as cl
from chorusline.runtime.checkpoint.checkpoints import Checkpoints
from chorusline.runtime.checkpoint.format.catalog import newest_whole
from chorusline.runtime.checkpoint.format.reader import CheckpointReader
from chorusline.runtime.checkpoint.format.shard_file import write_part
from chorusline.runtime.checkpoint.format.storage import open_storage
from chorusline.runtime.process.registry import Registry
from tests.harness.ranks import SHARED_MEMORY, Rank, Ranks, run_ranks
from tests.harness.reused_ranks import ReusedRanks
from tests.references.checkpoint_places import (
    DAMAGES,
    flip,
    folder_of,
    resume_and_listen,
    steps_in,
    write_two,
)
from tests.references.checkpoint_runs import Parts, in_run, make_model, run_train


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_is_used(
    ranks_of, tmp_path, damage
):
    write_two(ranks_of, tmp_path)
    DAMAGES[damage](folder_of(tmp_path, 4))
    (step, words), (other_step, _) = ranks_of(2).run(
        resume_and_listen, cl.CheckpointConfig(tmp_path)
    )
    assert (step, other_step) == (2, 2)
    (word,) = words
    assert f"{folder_of(tmp_path, 4)}/" in word
    assert "is torn or corrupted" in word
    assert f"The checkpoint {folder_of(tmp_path, 2)}, of step 2, is used instead" in word


def _save_across_generations(group: cl.Group, place: Path) -> list[float]:
    """The weights of two checkpoints, the first of which is still being written when the group
    changes and the second is saved; by step."""
    gates = {step: threading.Event() for step in (1, 2)}

    def write_late(storage: Any, folder: str, rank: int, step: int, *content: Any) -> Any:
        gates[step].wait(20)
        return write_part(storage, folder, rank, step, *content)

    registry = Registry()
    model = torch.nn.Linear(3, 3)
    registry.add("model", model)
    checkpoints = Checkpoints(group, registry, cl.CheckpointConfig(place))
    with pytest.MonkeyPatch.context() as patch, checkpoints:
        patch.setattr("chorusline.runtime.checkpoint.checkpoints.write_part", write_late)
        savings = []
        for step in (1, 2):
            torch.nn.init.constant_(model.weight, step)
            savings.append(checkpoints.save(None, step, [0]))
            checkpoints.change_group(group)
        for saving in savings:  # Not together: a whole one deletes what is not whole and older.
            gates[saving.step].set()
            saving.wait(20)
    storage = open_storage(place)
    readers = [CheckpointReader(storage, folder) for folder in sorted(storage.children())]
    for reader in readers:
        reader.verify()
    return [reader.tensor(reader.below("model", "weight")[0]).mean().item() for reader in readers]


def test_a_save_under_way_keeps_its_step_when_the_next_generation_saves(ranks_of, tmp_path):
    assert ranks_of(1).run(_save_across_generations, tmp_path) == [[1.0, 2.0]]


async def _save_and_stop_waiting(group: cl.Group, place: Path) -> list[float]:
    """The weights of two checkpoints, by step; the wait for the first one is cancelled while it is
    still being written."""
    gate = threading.Event()

    def write_late(*args: Any) -> Any:
        gate.wait(20)
        return write_part(*args)

    registry = Registry()
    model = torch.nn.Linear(3, 3)
    registry.add("model", model)
    config = cl.CheckpointConfig(place)
    with pytest.MonkeyPatch.context() as patch, Checkpoints(group, registry, config) as checkpoints:
        patch.setattr("chorusline.runtime.checkpoint.checkpoints.write_part", write_late)
        torch.nn.init.constant_(model.weight, 1)
        first = checkpoints.save(None, 1, [0])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first, 0.01)
        assert not first.is_ready and not first.is_observed
        # The next save waits for the first one, and so is called in another thread.
        torch.nn.init.constant_(model.weight, 2)
        second = asyncio.create_task(asyncio.to_thread(checkpoints.save, None, 2, [0]))
        assert not (await asyncio.wait([second], timeout=0.3))[0]
        gate.set()
        for saving in (first, await second):
            await saving
    storage = open_storage(place)
    readers = [CheckpointReader(storage, folder) for folder in sorted(storage.children())]
    return [reader.tensor(reader.below("model", "weight")[0]).mean().item() for reader in readers]


def test_a_cancelled_wait_for_a_save_leaves_it_in_flight(alone, tmp_path):
    assert asyncio.run(_save_and_stop_waiting(alone, tmp_path)) == [1.0, 2.0]


def test_a_save_whose_wait_was_cancelled_is_waited_for_at_the_end_of_the_run(alone, tmp_path):
    def write_late(*args: Any) -> Any:
        time.sleep(0.3)
        return write_part(*args)

    async def save() -> None:
        registry = Registry()
        registry.add("model", torch.nn.Linear(3, 3))
        with Checkpoints(alone, registry, cl.CheckpointConfig(tmp_path)) as checkpoints:
            waiting = asyncio.ensure_future(checkpoints.save(None, 1, [0]))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chorusline.runtime.checkpoint.checkpoints.write_part", write_late)
        asyncio.run(save())
    assert newest_whole(open_storage(tmp_path)).manifest.step == 1


def test_if_all_are_damaged_the_run_does_not_start_afresh_in_silence(ranks_of, tmp_path):
    write_two(ranks_of, tmp_path)
    for step in (2, 4):
        flip(folder_of(tmp_path, step) / "rank-0.distcp", 700)
    for step, (word,) in ranks_of(2).run(resume_and_listen, cl.CheckpointConfig(tmp_path)):
        assert step == -1
        assert word.startswith("CheckpointCorrupted: ")
        assert f"{folder_of(tmp_path, 4)}/rank-0.distcp is torn or corrupted: bytes " in word


def test_resume_takes_a_path_or_starts_afresh(ranks_of, tmp_path):
    write_two(ranks_of, tmp_path)

    def resume(path: str | Path) -> tuple[int, list[str]]:
        config = cl.CheckpointConfig(tmp_path, resume=path)
        return ranks_of(2).run(resume_and_listen, config)[0]

    assert resume("auto") == (4, [])
    assert resume("never") == (0, [])
    assert resume(folder_of(tmp_path, 2)) == (2, [])
    step, (word,) = resume(tmp_path / "nothing")
    assert step == -1
    assert word == (
        f"CheckpointNotFound: checkpoint {tmp_path / 'nothing'}: "
        "there is no complete checkpoint here"
    )


def _train_with(
    group: cl.Group, config: cl.CheckpointConfig, lr: float, wd: float, max_norm: float = 1.0
) -> list[str]:
    """What is said at the beginning of a run of one step."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    def train(ctx: cl.Context) -> None:
        model = cl.DistributedDataParallel(make_model())
        optim = cl.ZeroRedundancyOptimizer(
            model, torch.optim.AdamW, lr=lr, weight_decay=wd, max_norm=max_norm
        )
        ctx.register("optim", optim)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
        ctx.register("schedule", schedule)
        model(torch.ones(2, 7)).sum().backward()
        optim.step()
        schedule.step()
        ctx.save()

    ear = Ear()
    logging.getLogger("chorusline").addHandler(ear)
    try:
        in_run(group, train, config)
    finally:
        logging.getLogger("chorusline").removeHandler(ear)
    return heard


def test_a_resume_is_told_with_its_step_and_the_options_that_are_not_those_given(
    ranks_of, tmp_path
):
    config = cl.CheckpointConfig(tmp_path)
    assert ranks_of(2).run(_train_with, config, 0.1, 0.0) == [[], []]
    (told,), others = ranks_of(2).run(_train_with, config, 0.1, 0.0)
    assert told.startswith(f"the run resumes from {folder_of(tmp_path, 1)}, of step 1 ")
    assert others == []
    (told, changed), others = ranks_of(2).run(_train_with, config, 0.2, 0.01)
    assert ", of step 2 (CheckpointConfig(resume='never'), or" in told
    assert "'optim' resumes with the options of the checkpoint" in changed
    assert "lr 0.1, not 0.2; weight_decay 0.0, not 0.01. To use yours instead" in changed
    assert others == []
    (_, changed), _ = ranks_of(2).run(_train_with, config, 0.1, 0.0, 0.5)
    assert "max_norm 1.0, not 0.5. To use yours instead" in changed
    assert "as in optimizer.max_norm = 0.5;" in changed


def _begins_with(group: cl.Group, place: Path, kind: str, takes_line: bool) -> list[float]:
    """The rates of the first steps of a run, after one of three steps at another rate."""
    heard: list[str] = []
    logger = logging.getLogger("chorusline")
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]

    def train(ctx: cl.Context, lr: float) -> list[float]:
        model = cl.DistributedDataParallel(make_model())
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=lr)
        ctx.register("optim", optimizer)
        schedule = ctx.register("schedule", KINDS_OF_SCHEDULE[kind](optimizer))
        for line in re.findall(r"as in (optimizer\.[^;]*);", heard[-1] if heard else ""):
            if takes_line:
                exec(line, {"optimizer": optimizer})
                schedule.base_lrs = [lr]
        rates = []
        for _ in range(3):
            rates.append(optimizer.param_groups[0]["lr"])
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
            schedule.step()
        ctx.save()
        return rates

    logger.addHandler(listener)
    try:
        in_run(group, train, cl.CheckpointConfig(place), lr=0.1)
        return in_run(group, train, cl.CheckpointConfig(place), lr=0.01)
    finally:
        logger.removeHandler(listener)


KINDS_OF_SCHEDULE: dict[str, Callable[[Any], Any]] = {
    "step": lambda optim: torch.optim.lr_scheduler.StepLR(optim, 1, 0.5),
    "lambda": lambda optim: torch.optim.lr_scheduler.LambdaLR(optim, lambda n: 1 / (1 + n)),
    "exponential": lambda optim: torch.optim.lr_scheduler.ExponentialLR(optim, 0.5),
}


@pytest.mark.parametrize("kind", KINDS_OF_SCHEDULE)
def test_the_line_that_undoes_an_option_of_the_checkpoint_is_one_that_works(alone, tmp_path, kind):
    loaded = _begins_with(alone, tmp_path / "loaded", kind, False)
    assert loaded[0] == pytest.approx({"lambda": 0.1 / 4}.get(kind, 0.1 / 8))
    undone = _begins_with(alone, tmp_path / "undone", kind, True)
    assert undone[0] == 0.01
    # From there on as the schedule goes: by its own base rate, or from the rate before.
    after = [0.01 / 5, 0.01 / 6] if kind == "lambda" else [0.01 / 2, 0.01 / 4]
    assert undone[1:] == pytest.approx(after)


def _train_otherwise(group: cl.Group, config: cl.CheckpointConfig, case: str) -> str:
    def other(ctx: cl.Context) -> None:
        if case == "width":
            Parts(ctx, width=11)
        elif case == "dtype":
            Parts(ctx, dtype=torch.bfloat16)
        elif case == "name":
            ctx.register("network", cl.DistributedDataParallel(make_model()))
        elif case == "optimizer":
            model = cl.DistributedDataParallel(torch.nn.Sequential(make_model(), make_model()))
            optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW)
            ctx.register("optimizer", optim)

    with pytest.raises(cl.CheckpointMismatch) as raised:
        in_run(group, other, config)
    return str(raised.value)


def test_a_checkpoint_of_another_model_is_refused_before_the_first_step(ranks_of, tmp_path):
    config = cl.CheckpointConfig(tmp_path)
    ranks_of(2).run(run_train, config, {"until": 1, "save_at": 1})
    path = folder_of(tmp_path, 1)
    said = {
        case: ranks_of(2).run(_train_otherwise, config, case)
        for case in ("width", "dtype", "name", "optimizer")
    }
    for words in said.values():
        assert words[0] == words[1]  # on all ranks
        assert words[0].startswith(f"checkpoint {path} does not fit: ")
    assert (
        "the models differ: model.0.weight is (13, 7) float32 in it, and (11, 7)"
        in (said["width"][0])
    )
    assert "; and " in said["width"][0] and " more. Build the same objects" in said["width"][0]
    assert "model.0.weight is (13, 7) float32 in it, and (13, 7) bfloat16 here" in said["dtype"][0]
    assert "nothing that was registered as 'network', only 'model', 'optimizer'" in said["name"][0]
    assert "group 0 has 6 parameters in it, and 12 here" in said["optimizer"][0]


class _Extended(torch.optim.SGD):
    """It converts what the class that it extends has saved, with an option of another name."""

    def __init__(self, params: Any, lr: float, inertia: float = 0.5) -> None:
        super().__init__(params, lr)
        self.defaults["inertia"] = inertia
        for group in self.param_groups:
            group["inertia"] = inertia

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            group["inertia"] = group.pop("drag", 0.5)
        super().load_state_dict(state_dict)


def _train_by(
    group: cl.Group,
    place: Path,
    made: Any,
    is_sharded: bool,
    options: dict[str, Any],
    saves: bool,
    converts: bool = False,
) -> str:
    def body(ctx: cl.Context) -> None:
        model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(4, 4)))
        optim = (
            cl.ZeroRedundancyOptimizer(model, made, lr=0.1, **options)
            if is_sharded
            else made(model.parameters(), lr=0.1, **options)
        )
        if converts:
            optim.register_load_state_dict_pre_hook(lambda made, _: made.state_dict())
        ctx.register("optim", optim)
        model(torch.ones(2, 4)).square().mean().backward()
        optim.step()
        if saves:
            ctx.save().wait()

    try:
        in_run(group, body, cl.CheckpointConfig(place))
    except cl.CheckpointMismatch as error:
        return str(error)
    return ""


_ADAMW = torch.optim.AdamW


@pytest.mark.parametrize("saved_sharded", [True, False])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_the_state_of_an_optimizer_of_another_class_is_refused(
    alone, tmp_path, saved_sharded, is_sharded
):
    assert not _train_by(alone, tmp_path, _ADAMW, saved_sharded, {}, True)
    for made in (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.RAdam):
        said = _train_by(alone, tmp_path, made, is_sharded, {}, False)
        assert f"'optim' was saved by an AdamW, and is an {made.__name__} here" in said
        assert "register the new one under another name with required=False" in said
    for made, options in ((torch.optim.Adam, {}), (_ADAMW, {"maximize": True})):
        assert not _train_by(alone, tmp_path, made, is_sharded, options, False)


class _Sharp(torch.optim.Optimizer):
    """It has another optimizer inside, as SAM does."""

    def __init__(self, params: Any, lr: float, base: Any) -> None:
        self.base_optimizer = base(params, lr=lr)
        super().__init__(self.base_optimizer.param_groups, self.base_optimizer.defaults)
        self.state = self.base_optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base_optimizer.load_state_dict(state_dict)
        self.state = self.base_optimizer.state
        self.param_groups = self.base_optimizer.param_groups


class _Ahead(_Sharp):
    """It names the optimizer inside as Lookahead and Accelerate do."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.base_optimizer


@pytest.mark.parametrize("wrapper", [_Sharp, _Ahead])
def test_an_optimizer_is_judged_by_the_one_that_it_has_inside(alone, tmp_path, wrapper):
    assert not _train_by(alone, tmp_path, wrapper, False, {"base": _ADAMW}, True)
    said = _train_by(alone, tmp_path, wrapper, False, {"base": torch.optim.RMSprop}, False)
    name = wrapper.__name__
    assert f"was saved by a {name} of AdamW, and is a {name} of RMSprop here" in said
    assert "register_load_state_dict_pre_hook" in said
    assert not _train_by(alone, tmp_path, wrapper, False, {"base": torch.optim.Adam}, False)

    def converting(params: Any, lr: float) -> torch.optim.Optimizer:
        made = torch.optim.Adam(params, lr)
        made.register_load_state_dict_pre_hook(lambda made, _: made.state_dict())
        return made

    other = tmp_path / "other"
    assert not _train_by(alone, other, wrapper, False, {"base": torch.optim.RMSprop}, True)
    assert not _train_by(alone, other, wrapper, False, {"base": converting}, False)


def test_an_optimizer_goes_on_with_another_implementation_of_its_step(alone, tmp_path):
    saved, resumed = tmp_path / "saved", {"foreach": True}
    assert not _train_by(alone, saved, _ADAMW, True, {}, True)
    assert not _train_by(alone, saved, _ADAMW, True, resumed, False)
    assert not _train_by(alone, tmp_path / "other", _ADAMW, True, resumed, True)
    assert not _train_by(alone, tmp_path / "other", _ADAMW, True, {"fused": True}, False)


def test_an_optimizer_that_converts_what_another_has_saved_is_asked_itself(alone, tmp_path):
    assert not _train_by(alone, tmp_path, torch.optim.SGD, False, {}, True)
    assert not _train_by(alone, tmp_path, _Extended, False, {}, False)
    assert _train_by(alone, tmp_path, _ADAMW, False, {}, False)
    assert _train_by(alone, tmp_path, _ADAMW, True, {}, False, converts=True), "it runs no hooks"
    assert not _train_by(alone, tmp_path, _ADAMW, False, {"eps": 1e-6}, False, converts=True)


def test_a_place_that_cannot_be_written_to_is_an_error_before_training(ranks_of, tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "below"
    for step, (word,) in ranks_of(2).run(resume_and_listen, cl.CheckpointConfig(place)):
        assert step == -1
        assert word.startswith(
            f"CheckpointPlaceUnusable: checkpoints cannot be kept in {place}: rank 0 on "
        )
        assert "cannot write there (NotADirectoryError" in word
        assert "a folder that all ranks can see and write to" in word


def test_a_place_that_ranks_do_not_share_is_found_out_before_training(ranks_of):
    config = cl.CheckpointConfig("memory://not-shared")
    for step, (word,) in ranks_of(2).run(resume_and_listen, config):
        assert step == -1
        assert "what rank 1 on " in word and "the path names a different place for each" in word


def _fill_the_disk(group: cl.Group, place: Path) -> tuple[list[str], int]:
    """Save, save with no room on rank 1, and save again; what was said, and the last step."""
    said = []

    def fill(ctx: cl.Context) -> int:
        parts = Parts(ctx, width=40_000)
        parts.step()
        ctx.save().wait()
        parts.step()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if ctx.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
        saving = ctx.save()
        while not saving.is_ready:
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        try:
            saving.wait()
        except cl.CheckpointWriteFailed as error:
            said.append(str(error))
        said.append(newest_whole(open_storage(place)).path)
        ctx.barrier()
        ctx.save()  # and the end of the run waits for it
        return ctx.step

    return said, in_run(group, fill, cl.CheckpointConfig(place))


def test_a_full_disk_is_a_typed_error_on_all_ranks_and_the_earlier_checkpoint_stays(tmp_path):
    # The limit holds for the file of their store too, in which other tests have written much.
    ranks = ReusedRanks(2)
    try:
        told = ranks.run(_fill_the_disk, tmp_path)
    finally:
        ranks.stop()
    for (word, newest), step in told:
        assert step == 2
        assert "was not written, on rank 1: OSError: [Errno 27] File too large" in word
        assert "Earlier checkpoints are complete and stay; make room" in word
        assert newest == str(folder_of(tmp_path, 1))
    assert steps_in(tmp_path) == [1, 2]  # Of the one that failed nothing is left.


def _write_until_killed(rank: Rank, place: str) -> str:
    def body(ctx: cl.Context) -> str:
        parts = Parts(ctx)
        ctx.register("ballast", _Ballast())
        parts.step()
        ctx.save().wait()
        rank.say("saved")
        parts.step()
        ctx.save()
        while True:
            parts.step()

    with pytest.raises(cl.PeerLost) as raised:
        in_run(rank.group(timeout_s=20), body, cl.CheckpointConfig(place))
    return str(raised.value)


class _Ballast:
    """Enough to be caught while it is written."""

    def __init__(self) -> None:
        self.state = {"ballast": torch.zeros(8_000_000)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.promise("a death while a checkpoint is written")
def test_if_a_rank_is_killed_while_it_writes_the_checkpoint_before_is_the_one_that_loads(
    ranks_of, tmp_path
):
    place = tmp_path / "place"
    with Ranks(_write_until_killed, 2, tmp_path, "shared-memory", str(place)) as ranks:
        ranks.wait_for("saved")
        deadline = time.monotonic() + 60
        while not list(place.glob("step-00000002-*/rank-1.distcp.tmp")):
            assert time.monotonic() < deadline
        ranks.signal(1, signal.SIGKILL)
        (survivor,) = ranks.results(ranks=[0])
        assert "rank 1" in survivor or "[1]" in survivor
    assert newest_whole(open_storage(place)).manifest.step == 1
    told = ranks_of(1).run(resume_and_listen, cl.CheckpointConfig(place))
    assert told == [(1, [])]
    assert steps_in(place) == [1]


def _save_alone(group: cl.Group, config: cl.CheckpointConfig) -> str:
    def body(ctx: cl.Context) -> str:
        Parts(ctx)
        try:
            if ctx.rank == 0:
                ctx.save().wait()
        except cl.CheckpointWriteFailed as error:
            return str(error)
        finally:
            ctx.barrier()
        return ""

    return in_run(group, body, config)


def test_a_rank_whose_part_does_not_come_is_named_after_the_deadline(ranks_of, tmp_path):
    config = cl.CheckpointConfig(tmp_path, timeout_s=0.2)
    word, _ = ranks_of(2).run(_save_alone, config)
    assert "was not written, on rank 1: it did not call ctx.save() within 0.2 s, which" in word
    assert list(tmp_path.iterdir()) == []


def _save_on(rank: Rank, alone: int, place: str) -> str:
    """Save on one rank. The other one meanwhile does something else, which is no collective."""
    is_over = Path(place).with_name("over")

    def body(ctx: cl.Context) -> str:
        Parts(ctx)
        said = ""
        if ctx.rank == alone:
            with pytest.raises(cl.CheckpointWriteFailed) as raised:
                ctx.save().wait()
            said = str(raised.value)
            is_over.touch()
        while not is_over.exists():
            time.sleep(0.02)
        ctx.barrier()
        return said

    return in_run(rank.group(timeout_s=4), body, cl.CheckpointConfig(place))


@pytest.mark.parametrize("alone", [0, 1])
def test_a_save_on_one_rank_ends_with_the_groups_deadline_and_names_the_others(tmp_path, alone):
    said = run_ranks(_save_on, 2, tmp_path, SHARED_MEMORY, alone, str(tmp_path / "place"))
    assert said[1 - alone] == ""
    assert (
        f"was not written, on rank {1 - alone}: it did not call ctx.save() within 4 s, which rank "
        f"{alone} called at test_checkpoint_failures.py:" in said[alone]
    )
    assert "call ctx.save() on all ranks, after the same step, and run again" in said[alone]


def _write_slowly(rank: Rank, place: str) -> int:
    def write_late(*args: Any) -> Any:
        if rank.rank == 1:
            time.sleep(5)
        return write_part(*args)

    def body(ctx: cl.Context) -> int:
        Parts(ctx)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("chorusline.runtime.checkpoint.checkpoints.write_part", write_late)
            ctx.save().wait()
        return ctx.step

    return in_run(rank.group(timeout_s=4), body, cl.CheckpointConfig(place))


def test_writing_may_take_longer_than_a_collective(tmp_path):
    place = tmp_path / "place"
    assert run_ranks(_write_slowly, 2, tmp_path, SHARED_MEMORY, str(place)) == [0, 0]
    assert newest_whole(open_storage(place)).manifest.step == 0


def test_a_relative_place_is_that_of_the_process_that_names_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = cl.CheckpointConfig("here", resume="there")
    assert (config.storage_path, config.resume) == (str(tmp_path / "here"), str(tmp_path / "there"))
    assert cl.CheckpointConfig("s3://bucket/run").storage_path == "s3://bucket/run"


def test_a_place_of_an_unknown_kind_is_told_before_training():
    with pytest.raises(cl.CheckpointPlaceUnusable, match=r"nosuch://x.*Protocol not known: nosuch"):
        open_storage("nosuch://x")


def _save_wrongly(group: cl.Group, place: Path) -> list[str]:
    def body(ctx: cl.Context) -> list[str]:
        said = []

        def expect(kind, call):
            try:
                call()
            except kind as error:
                said.append(str(error))

        expect(RuntimeError, lambda: ctx.save(place))
        parts = Parts(ctx)
        expect(RuntimeError, ctx.save)
        ctx.save(place).wait()
        expect(FileExistsError, lambda: ctx.save(place))
        dcp.save({"weight": torch.ones(3)}, checkpoint_id=place / "dcp", no_dist=True)
        metadata = (place / "dcp" / ".metadata").read_bytes()
        expect(FileExistsError, lambda: ctx.save(place / "dcp"))
        assert (place / "dcp" / ".metadata").read_bytes() == metadata
        expect(ValueError, lambda: ctx.register("model", parts.model))
        expect(TypeError, lambda: ctx.register("number", 5))
        expect(ValueError, lambda: ctx.register("a/b", parts.model))
        expect(ValueError, lambda: ctx.register("m\udcff", parts.model))
        return said

    return in_run(group, body, None)


def test_what_is_used_wrongly_says_what_to_do(ranks_of, tmp_path):
    (said,) = ranks_of(1).run(_save_wrongly, tmp_path)
    assert [word.split(";")[0] for word in said] == [
        "nothing is registered, so there is nothing to save",
        "the session has no storage for checkpoints",
        f"{tmp_path} holds a checkpoint already, and overwriting it would leave none if this "
        "process died",
        f"{tmp_path / 'dcp'} holds .metadata of a checkpoint that this version of chorusline has "
        "not completed, such as one of torch.distributed.checkpoint, and a save would overwrite it",
        "'model' is registered already, for a DistributedDataParallel",
        "register('number', ...) takes an object with state_dict and load_state_dict, got int",
        "a name must be a non-empty string without a slash, such as 'model'",
        r"a name has '\udcff' in it, half of a surrogate pair: 'm\udcff'",
    ]


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"storage_path": 5}, TypeError, "storage_path must be a path or a URL, got int 5"),
        ({"storage_path": "x", "num_to_keep": 0}, ValueError, "num_to_keep must be a whole number"),
        ({"storage_path": "x", "every_n_steps": 1.5}, ValueError, "of at least 1, got 1.5"),
        ({"storage_path": "x", "resume": None}, TypeError, '"auto", "never" or the path of a'),
        ({"storage_path": "x", "timeout_s": 0}, ValueError, "timeout_s must be positive, got 0"),
        ({"storage_path": "x", "weights_only": 1}, TypeError, "must be True or False, got int 1"),
    ],
)
def test_a_wrong_config_is_refused_where_it_is_written(options, kind, text):
    with pytest.raises(kind, match=text):
        cl.CheckpointConfig(**options)


def test_a_session_wants_a_checkpoint_config():
    with pytest.raises(TypeError, match="checkpoint must be a CheckpointConfig, got str"):
        cl.Session(checkpoint="/somewhere")


@pytest.mark.parametrize(
    "error",
    [
        cl.CheckpointError("p", "d"),
        cl.CheckpointPlaceUnusable("p", "d"),
        cl.CheckpointWriteFailed("p", "d", (0, 2)),
        cl.CheckpointNotFound("p", "d"),
        cl.CheckpointCorrupted("p", "d"),
        cl.CheckpointMismatch("p", "d"),
        cl.CheckpointUntrusted("p", "d"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_of_checkpoints_survives_pickle(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), vars(copy), str(copy)) == (type(error), vars(error), str(error))
