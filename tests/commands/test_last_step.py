"""A rank of a plain script is killed from outside, at a random instant: the script begins again
from the step before that, and ends with the digits of a run that nobody has disturbed."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import chorusline as cl
from chorusline.runtime.program.accelerate_loop import AccelerateCheckpoint, call_after_bodies
from chorusline.runtime.program.last_step import LastStep
from tests import ROOT
from tests.harness.forked_workers import python

SCRIPTS = ROOT / "tests/commands/plain_scripts"
STEPS, SAVED_AT, RANKS = 50, 20, 3
"""The script saves by itself every 20 steps, so that one that is killed would lose up to 19."""


@dataclass
class Run:
    told: list[str]
    errors: str
    steps: list[list[int]]
    """By rank, those that it has ended, in their order."""
    pids: list[list[str]]
    """Each time that the script has begun, by rank."""


def taken(folder: Path, rank: int) -> list[int]:
    file = folder / f"steps-{rank}"
    return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []


def latest_of(folder: Path) -> list[int]:
    return [max(taken(folder, rank), default=0) for rank in range(RANKS)]


def pids_of(folder: Path) -> list[str]:
    """By rank."""
    files = [folder / f"pid-{rank}" for rank in range(RANKS)]
    return [file.read_text() if file.exists() else "" for file in files]


def run(
    script: str,
    folder: Path,
    pace_s: float,
    victims: list[int],
    chance: random.Random,
    more: str,
) -> Run:
    """victims: ranks that are killed, one after another, the first soon after step 20 and each of
    the others soon after the script has begun again."""
    folder.mkdir()
    interpreter, variables = python()
    command = "-m chorusline.runtime.commands.command_line run --workers 3 --max-restarts 5"
    command += f" --env {more}"
    process = subprocess.Popen(
        [*interpreter, *command.split(), SCRIPTS / script, folder, str(STEPS), str(pace_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ
        | variables
        | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
    )
    begun = []
    latest = SAVED_AT
    for victim in victims:
        latest += chance.randrange(1, 5)
        while latest > min(latest_of(folder)):
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        time.sleep(chance.random() * 2 * pace_s)
        begun.append(pids_of(folder))
        os.kill(int(begun[-1][victim]), signal.SIGKILL)
        time.sleep(2 * pace_s)  # The others have met with the loss.
        latest = max(latest_of(folder))
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, out + errors
    told = [line.removeprefix("[rank 0] ") for line in out.splitlines()]
    steps = [taken(folder, rank) for rank in range(RANKS)]
    return Run(told[-2:], errors, steps, [*begun, pids_of(folder)])


def check(script: str, folder: Path, victims: list[int], more: str = "SAVE_S=0") -> None:
    """more: an environment variable of the script."""
    seed, pace_s = random.randrange(10**6), 0.1
    print("seed", seed)  # Of a test that fails, pytest shows it.
    whole = run(script, folder / "whole", 0.0, [], random.Random(seed), "SAVE_S=0")
    assert whole.told[0] == "begun 0"
    killed = run(script, folder / "killed", pace_s, victims, random.Random(seed), more)
    # Without rank 0 its statistics of BatchNorm are lost; they are no part of a step.
    told = 3 if 0 in victims else 4
    assert killed.told[1].split()[:told] == whole.told[1].split()[:told]
    begun = int(killed.told[0].removeprefix("begun "))
    # A folder that is always the same has no number.
    name = f"([-( ]{begun}\\b|/state\n)"
    assert re.search(f"last completed step is written down: .*{name}", killed.errors)
    assert f"restart {len(victims)} of 5" in killed.errors
    # The others run the script again in their processes.
    for victim, (before, after) in zip(victims, itertools.pairwise(killed.pids), strict=True):
        assert [rank for rank in range(RANKS) if before[rank] != after[rank]] == [victim]
    for steps in killed.steps:
        assert len(steps) - len({*steps}) <= len(victims), f"steps taken again: {steps}"
    assert {*killed.steps[0], *killed.steps[1], *killed.steps[2]} == {*range(1, STEPS + 1)}
    assert begun >= SAVED_AT + len(victims)  # Each is killed after one more step, or several.


@pytest.mark.timeout(240)
def test_a_loop_with_one_line_more_loses_at_most_the_step_in_flight(
    cluster: None, tmp_path: Path
) -> None:
    check("last_step.py", tmp_path, [2])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victims", [[0], [1, 0], [2, 2, 1]])
def test_ranks_of_a_loop_are_killed_one_after_another(
    cluster: None, tmp_path: Path, victims: list[int]
) -> None:
    check("last_step.py", tmp_path, victims)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_survivor_has_the_time_that_its_checkpoint_takes(cluster: None, tmp_path: Path) -> None:
    """Longer than the others have to stop, and than a rank is left alone before an interrupt."""
    check("last_step.py", tmp_path, [2], "SAVE_S=8")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victims", [[2], [0], [1, 0]])
def test_an_unmodified_trainer_loses_at_most_the_step_in_flight(
    cluster: None, tmp_path: Path, victims: list[int]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    check("hf_last_step.py", tmp_path, victims)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "victims", [[2], *(pytest.param(few, marks=pytest.mark.slow) for few in ([0], [1, 0]))]
)
def test_an_unmodified_trainer_of_lightning_loses_at_most_the_step_in_flight(
    cluster: None, tmp_path: Path, victims: list[int]
) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    check("lightning_last_step.py", tmp_path, victims)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("victims", "more"),
    [([2], "NO=LINE"), ([0], "LINE=1"), ([1, 0], "NO=LINE"), ([1, 2], "LINE=1")],
)
def test_a_loop_over_accelerate_loses_at_most_the_step_in_flight(
    cluster: None, tmp_path: Path, victims: list[int], more: str
) -> None:
    """With its state in one folder it needs no line; with a folder for each step it needs one."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    check("hf_accelerate_last_step.py", tmp_path, victims, more)


def test_accelerate_writes_where_the_script_saves_or_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, in this process: it takes a step, saves, takes another, and writes."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    class Counter:
        def __init__(self, step: int) -> None:
            self.step = step

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step = state["step"]

    named = tmp_path / "checkpoints"

    def second(
        folder: Path | None, adds: int, **kwargs: bool
    ) -> tuple[AccelerateCheckpoint, Counter]:
        naming = accelerate.utils.ProjectConfiguration(
            str(tmp_path), automatic_checkpoint_naming=folder is named
        )
        accelerator = accelerate.Accelerator(project_config=naming)
        model = torch.nn.Linear(1, 1)
        loader = torch.utils.data.DataLoader(torch.ones(2, 1))
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader
        )
        accelerator.register_for_checkpointing(counter := Counter(0))
        last = LastStep(group)
        with last.watched():
            call_after_bodies(accelerator, last)
            for number, batch in enumerate(loader):
                counter.step += adds
                accelerator.backward(model(batch).sum())
                optimizer.step()
                if folder is not None and number == 0:
                    accelerator.save_state(str(folder), **kwargs)
        assert last._kept is not None
        counter.step += 5  # The step after that has begun.
        return last._kept.written, counter

    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        for folder, adds, sentence in (
            (None, 1, "has not saved or loaded, so nobody knows where; write cl.before_restart"),
            (tmp_path / "step_1", 1, "the number in .*step_1' may belong to another step"),
            (tmp_path / "out/state", 0, "no object in register_for_checkpointing counts the steps"),
        ):
            with pytest.raises(RuntimeError, match=sentence):
                second(folder, adds)[0].write({0: b""})
        written, counter = second(tmp_path / "out/state", 1)
        (tmp_path / "out/state/mine.txt").write_text("mine")
        assert written.write({0: written.own_part()}) == str(tmp_path / "out/state")
        # By torch's pickles: weights by safetensors would be loaded in place of those saved later.
        written, _ = second(tmp_path / "out/pickled", 1, safe_serialization=False)
        before = torch.load(tmp_path / "out/pickled/pytorch_model.bin")
        written.write({0: written.own_part()})
        assert not torch.equal(
            torch.load(tmp_path / "out/pickled/pytorch_model.bin")["weight"], before["weight"]
        )
        assert not (tmp_path / "out/pickled/model.safetensors").exists()
        written, _ = second(named, 1)
        assert written.write({0: written.own_part()}) == str(named / "checkpoint_1")
    assert (counter.step, (tmp_path / "out/state/mine.txt").read_text()) == (2, "mine")
    for folder in (tmp_path / "out/state", named / "checkpoint_1"):
        assert torch.load(folder / "custom_checkpoint_0.pkl") == {"step": 2}
    assert [*tmp_path.rglob(".chorusline*")] == []
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Mean(torch.nn.Module):
    """Ends with a loss in the forward pass number `at` of its training."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.linear, self.at, self.passes = torch.nn.Linear(4, 1), at, 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.passes += self.training
        if self.training and self.passes == self.at:
            raise cl.PeerLost("all_reduce", 0, [1], "process 5 ended")
        return {"loss": (self.linear(input_ids).squeeze(-1) - labels).square().mean()}


def trainer_of(model: Mean, folder: Path, **options: object) -> Any:
    """Of two micro-batches of one sample a step."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class WritesACard(transformers.Trainer):  # As those of TRL do.
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            super()._save_checkpoint(*args, **kwargs)
            Path(self.args.output_dir, "README.md").write_text("trained")

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    rows = [{"input_ids": torch.ones(4) * one, "labels": torch.ones(())} for one in range(4)]
    return WritesACard(model, arguments, train_dataset=rows, eval_dataset=rows)


def test_the_last_step_of_a_trainer_is_its_checkpoint_and_may_be_the_best_one(
    tmp_path: Path,
) -> None:
    """On one rank, in this process: the loss ends the second micro-batch of step 2."""
    options = {
        "include_num_input_tokens_seen": "all",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 100,
        "load_best_model_at_end": True,
    }
    trainer = trainer_of(model := Mean(4), tmp_path, **options)
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        last = LastStep(group)
        last._models.add(model)
        with last.watched(), pytest.raises(cl.PeerLost):
            trainer.train()
        held = last._held_step()
        assert held.step == 1 and last._kept is not None
        checkpoint = tmp_path / "checkpoint-1"
        assert last._kept.written.write({0: held.part}) == str(checkpoint)
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint-1"]
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    kept = state["best_model_checkpoint"], state["num_input_tokens_seen"]
    assert kept == (str(checkpoint), 2 * 4)


def test_an_evaluation_after_the_training_of_a_trainer_keeps_no_step(tmp_path: Path) -> None:
    trainer = trainer_of(model := Mean(), tmp_path)
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        last = LastStep(group)
        last._models.add(model)
        with last.watched():
            trainer.train()
            assert last._held_step().step == 2
            model.linear.weight.data.mul_(0.5)  # As weights of another step, loaded to compare.
            trainer.evaluate()
        assert last._held_step().step is None
