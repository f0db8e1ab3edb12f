"""What a survivor keeps of a plain script's last step, and which one writes it down."""

import random
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer

import chorusline as cl
from chorusline.runtime.process.running import running
from chorusline.runtime.program import accelerate_loop, last_step
from chorusline.runtime.program.last_step import HeldStep, LastStep, why_sharded, writer_of
from chorusline.runtime.program.plain_script import PlainScript, run_plain_script


@pytest.mark.parametrize(
    ("holdings", "writer"),
    [
        ({0: HeldStep(7), 2: HeldStep(7)}, 0),
        ({1: HeldStep(7), 2: HeldStep(7)}, 1),
        # The loss came while the last collective of step 8 was over on rank 2 only.
        ({0: HeldStep(7), 1: HeldStep(7), 2: HeldStep(8)}, 2),
        # Rank 0 was inside its optimizer's step.
        ({0: HeldStep(None), 2: HeldStep(7)}, 2),
        ({0: HeldStep(None), 1: HeldStep(None)}, None),
        ({0: HeldStep(7), 1: HeldStep(7, why_not="it is sharded")}, None),
        ({2: HeldStep(0)}, 2),
        ({}, None),
    ],
)
def test_the_lowest_rank_with_the_latest_step_writes(holdings, writer):
    assert writer_of(holdings) == writer


def test_a_rank_that_raises_is_no_loss_but_a_lost_one_behind_its_error_is():
    lost = cl.PeerLost("all_reduce", 0, [1], "process 5 ended")
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        assert last_step._lost(ValueError("nan"), group) is None
        with pytest.raises(RuntimeError) as caught:
            try:
                raise lost
            except cl.PeerLost:
                raise RuntimeError("backward")  # noqa: B904 - as torch's C++ does
        assert last_step._lost(caught.value, group) == {1}
        group.abort(lost)
        assert last_step._lost(KeyboardInterrupt(), group) == {1}


def kept(wrote):
    class Kept:
        def own_part(self):
            return repr((random.random(), numpy.random.rand(), torch.rand(1).item())).encode()

        def write(self, parts):
            wrote.append(parts)
            return "here"

    return Kept()


def test_buffers_and_generators_are_put_back_to_the_end_of_the_step():
    inner = torch.nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        last = LastStep(group)
        last._models.add(inner)
        inner(torch.randn(4, 3))
        last.keep(kept([]), 5)
        before = {name: one.clone() for name, one in inner.state_dict().items()}
        drawn = kept([]).own_part()
        # The forward pass of the next step, whose all-reduce the loss ends.
        inner(torch.randn(4, 3))
        assert not torch.equal(inner.running_mean, before["running_mean"])
        assert last._held_step() == HeldStep(5, part=drawn)
        for name, one in inner.state_dict().items():
            assert torch.equal(one, before[name]), name
        # A step that has begun may have changed any parameter.
        with last.watched():
            inner(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        assert last._held_step() == HeldStep(None)


def test_buffers_that_a_hook_changes_after_the_step_belong_to_it():
    """As a module's own on_train_batch_end under Lightning, which is called after our callback."""
    inner = torch.nn.BatchNorm1d(3)
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        last = LastStep(group)
        last._models.add(inner)
        last.keep(kept([]), 5)
        inner.running_mean.fill_(7)
        last.keep_buffers()
        last.begun += 1
        inner.running_mean.fill_(8)
        last.keep_buffers()  # The next step has begun: these are no longer of the last one.
        last.begun -= 1
        assert last._held_step().step == 5 and inner.running_mean.eq(7).all()


def test_parameters_that_were_changed_after_the_step_are_not_written():
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 2000))
    with torch.no_grad():
        model[0].bias.fill_(torch.nan)
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        last = LastStep(group)
        last._models.add(model)
        last.keep(kept([]), 5)
        assert last._held_step().step == 5
        own = model[1].weight.clone()
        model[1].weight.data.mul_(0.5)  # An average, to validate it.
        held = last._held_step()
        assert held.step is None and "has changed the parameters since" in held.why_not
        model[1].weight.data.copy_(own)
        assert last._held_step().step == 5


def test_a_step_with_a_closure_changes_nothing_before_the_closure_has_returned():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lost = cl.PeerLost("all_reduce", 0, [1], "process 5 ended")

    def closure(error=None):
        if error:
            raise error
        model(torch.ones(3)).sum().backward()
        return torch.zeros(())

    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        last = LastStep(group)
        with last.watched():
            assert optimizer.step(closure) == 0
            last.keep(kept([]), 1)
            with pytest.raises(cl.PeerLost):
                optimizer.step(closure=lambda: closure(lost))
            assert last._held_step().step == 1
            optimizer.step(closure=closure)
            assert last._held_step() == HeldStep(None)


def survive(group, steps):
    """Rank 2 of three is lost. steps: that the others hold, by rank."""
    last, wrote = LastStep(group), []
    if group.rank < 2:
        if (step := steps[group.rank]) is not None:
            last.keep(kept(wrote), step)
        last.write(cl.PeerLost("all_reduce", group.generation, [2], "process 5 ended"))
    return [[*parts] for parts in wrote]


@pytest.mark.parametrize(
    ("steps", "wrote"),
    [
        ((4, 4), ([[0, 1]], [])),
        # The generators of rank 0 are those of an earlier step.
        ((3, 4), ([], [[1]])),
        # Nothing was kept here, so this rank does not meet the other one.
        ((None, None), ([], [])),
    ],
)
def test_one_survivor_writes_the_parts_of_all_that_hold_its_step(ranks_of, steps, wrote):
    assert ranks_of(3).run(survive, steps) == [*wrote, []]


def test_before_restart_keeps_arguments_of_its_step_and_without_a_run_does_nothing():
    saved = []
    cl.before_restart(saved.append, 1)
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        last = LastStep(group)
        script = SimpleNamespace(last_step=last)
        with running(script):
            for step in range(3):
                cl.before_restart(saved.append, step)
        script.last_step = None
        with running(script), pytest.raises(RuntimeError, match="registers what survives"):
            cl.before_restart(saved.append, 3)
        held = last._held_step()
        assert (held, saved) == (HeldStep(3), [])
        assert last._kept.written.write({0: b""}) == "by list.append(2)"
        assert saved == [2]


LEAVES = """
import sys
import chorusline as cl
cl.before_restart(lambda step: open(sys.argv[1], "w").write(str(step)), 4)
try:
    raise cl.PeerLost("all_reduce", 0, [1], "process 5 ended")
except cl.PeerLost:
    sys.exit(1)
"""


def test_a_script_that_answers_a_loss_by_an_exit_code_has_its_last_step_written(tmp_path):
    (tmp_path / "train.py").write_text(LEAVES)
    script = PlainScript.read(tmp_path / "train.py", (str(tmp_path / "saved"),), "id")
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        place = {"local_rank": 0, "local_world_size": 1, "node_rank": 0}
        call = SimpleNamespace(group=group, rank=0, world_size=1, device=group.device, **place)
        with running(call), pytest.raises(RuntimeError, match=r"has called sys.exit\(1\)"):
            run_plain_script(SimpleNamespace(_call=call, group=group, rank=0), script)
    assert (tmp_path / "saved").read_text() == "4"


class LoopSteps:
    """What a loop over accelerate sees of the steps: each body takes one."""

    def __init__(self):
        self.at_end, self.begun, self.is_kept, self.why_not_yet = ExitStack(), 0, False, []

    def keep(self, written):
        self.why_not_yet.append(written.why_not_yet)


def why_not_yet(monkeypatch, bodies):
    """After each step of a loop over accelerate. bodies: by step, what the counter adds, and the
    folders in which it saves."""
    names = ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader")
    loaders = {name: type(name, (list,), {}) for name in names}
    monkeypatch.setitem(sys.modules, "accelerate.data_loader", SimpleNamespace(**loaders))
    saves, loads, state = [], [], {"step": 0}
    accelerator = SimpleNamespace(
        project_configuration=SimpleNamespace(automatic_checkpoint_naming=False),
        register_save_state_pre_hook=saves.append,
        register_load_state_pre_hook=loads.append,
        save_state=lambda output_dir=None, safe_serialization=True: None,
        step=0,
        _custom_objects=[SimpleNamespace(state_dict=lambda: dict(state))],
        _schedulers=[],
    )
    steps = LoopSteps()
    with steps.at_end:
        accelerate_loop.call_after_bodies(accelerator, steps)
        for adds, *folders in loaders["DataLoaderShard"](bodies):
            steps.begun += 1
            state["step"] += adds
            for folder in folders:
                saves[0]([], [], folder)
    return steps.why_not_yet


SEVERAL = "the script saves and loads in several folders, 'out/best' and 'out/last'"
UNCOUNTED = "no object in register_for_checkpointing counts the steps"


@pytest.mark.parametrize(
    ("bodies", "sentences"),
    [
        ([(1, "out/last"), (1,), (1, Path("out/last/"))], ["", "", ""]),
        # Its last step goes neither over the best one nor where the script does not look.
        ([(1, "out/last"), (1, "out/best"), (1, "out/last")], ["", SEVERAL, SEVERAL]),
        *(
            ([(1, folder)], [f"the number in '{Path(folder)}' may belong to another step"])
            for folder in ("out/epoch_0/", "out/step_2/state", "out/checkpoint-2-ema", "step_1")
        ),
        # An object that counts the epochs.
        ([(0, "out"), (0,), (1,), (0,)], [UNCOUNTED] * 4),
        # One that counts them as well changes together with that which counts the steps.
        ([(1, "out"), (1,), (2,), (1,)], [""] * 4),
    ],
)
def test_accelerate_writes_where_it_saves_each_time_and_something_counts_the_steps(
    monkeypatch, bodies, sentences
):
    assert why_not_yet(monkeypatch, bodies) == sentences


def test_a_trainer_that_cannot_be_written_does_not_speak_for_the_next_one():
    first, second, followed = kept([]), kept([]), []
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        last = LastStep(group)
        last._follows(first, lambda _: "it saves nothing", lambda: followed.append(first))
        assert last._held_step() == HeldStep(None, "it saves nothing")
        last._follows(second, lambda _: "", lambda: followed.append(second))
        last.keep(kept([]), 1)
        assert followed == [second] and last._held_step().step == 1
        # A model or an optimizer in shards is in the way of all.
        last._has_module(type("DeepSpeedEngine", (torch.nn.Module,), {})(), "", None)
        last._follows(kept([]), lambda _: "", lambda: followed.append(None))
        assert followed == [second] and "in shards" in last._held_step().why_not


def test_state_in_shards_is_refused_by_a_sentence():
    model = torch.nn.Linear(2, 1)
    assert why_sharded(torch.optim.AdamW(model.parameters())) == ""
    assert ZeroRedundancyOptimizer.__name__ == cl.ZeroRedundancyOptimizer.__name__
    sharded = object.__new__(ZeroRedundancyOptimizer)
    assert why_sharded(sharded).startswith("a ZeroRedundancyOptimizer has its state in shards")
    model = torch.nn.Linear(2, 1)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
            last = LastStep(group)
            with last.watched():
                FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    finally:
        torch.distributed.destroy_process_group()
    assert last.why_not.startswith("a model of FullyShardedDataParallel is in shards")
