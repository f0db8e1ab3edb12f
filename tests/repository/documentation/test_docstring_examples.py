"""Every public name has an example in its docstring. Those that need no session run as they stand
there, on ranks without Ray; of the others each call fits the signature of what it calls."""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

import chorusline as cl
from chorusline.collectives.transports import backends
from tests.harness.reused_ranks import another_group

WITH_A_SESSION = {
    "ActorStore",
    "CheckpointCorrupted",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointPlaceUnusable",
    "CheckpointUntrusted",
    "CheckpointWriteFailed",
    "Context",
    "DriverLost",
    "Interrupted",
    "JSONLinesTracker",
    "MLflowTracker",
    "OpenTelemetryTracker",
    "Progress",
    "RandomState",
    "RankFailed",
    "Report",
    "Saving",
    "SavingTimes",
    "Session",
    "SessionSnapshot",
    "SessionState",
    "Shard",
    "StartupError",
    "StateLost",
    "Step",
    "Steps",
    "Stream",
    "StreamLost",
    "StreamShard",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "WorkerLost",
    "attach",
    "run",
}
"""Names whose examples need Ray."""
RUN = sorted({*cl.__all__} - WITH_A_SESSION - {"StoreLost"})  # StoreLost's needs a dead server.


def example_of(name: str) -> str:
    """The first block of code in the docstring of a name."""
    block = re.search(r"\n\n((?: {4}.*\n)+)", f"{inspect.getdoc(getattr(cl, name))}\n")
    assert block, f"the docstring of {name} has no example"
    return textwrap.dedent(block[1])


@pytest.mark.parametrize("name", cl.__all__)
def test_a_public_name_has_an_example_of_a_few_lines_with_itself_in_it(name):
    example = example_of(name)
    assert len(example.splitlines()) <= 7
    assert name in re.findall(r"\w+", example) or name in OBTAINED
    for call, called in calls_in(ast.parse(example)):
        assert called is not None, f"no {ast.unparse(call.func)} exists"
        inspect.signature(called).bind(
            *call.args, **{word.arg: word.value for word in call.keywords if word.arg}
        )


OBTAINED = {
    "Context": "def train(ctx)",
    "FlightRecording": "group.flight_recorder",
    "GroupDescription": "group.describe()",
    "RecordedCollective": "group.flight_recorder.collectives",
    "Rendezvous": "cl.store_from_url",
    "Report": "on_report=",
    "Saving": "ctx.save()",
    "SavingTimes": "ctx.save().wait()",
    "SessionSnapshot": "session.snapshot()",
    "Shard": "ctx.shard(",
    "Statistics": "group.statistics",
    "Step": "for step in ctx.steps(",
    "StepStatistics": "model.statistics()",
    "Steps": "steps = ctx.steps(",
    "StreamShard": "ctx.shard(",
    "TrackedEvent": "def event(self, event)",
    "TrackedRun": "def begin(self, run)",
    "Work": "work = group.",
}
"""Names that a user does not call, and how one gets such an object."""


@pytest.mark.parametrize("name", OBTAINED)
def test_the_example_of_an_object_that_others_make_shows_how_to_get_it(name):
    assert OBTAINED[name] in example_of(name)


OBJECTS = {"cl": cl, "ctx": cl.Context, "group": cl.Group, "session": cl.Session}


def calls_in(example: ast.AST) -> Iterator[tuple[ast.Call, Any]]:
    """Calls of names of ours, and of methods of the objects that examples find."""
    for call in ast.walk(example):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner = call.func.value
            if isinstance(owner, ast.Name) and owner.id in OBJECTS:
                called = getattr(OBJECTS[owner.id], call.func.attr, None)
                if inspect.isfunction(called) and owner.id != "cl":
                    called = called.__get__(owner)
                if owner.id != "cl" or call.func.attr != "run":
                    yield call, called


@pytest.mark.parametrize("name", cl.__all__)
def test_what_an_example_reads_of_an_error_is_a_field_of_it(name):
    """Many of them do not happen where the example runs."""
    for handler in ast.walk(ast.parse(example_of(name))):
        if isinstance(handler, ast.ExceptHandler) and handler.name:
            read = {
                node.attr
                for node in ast.walk(handler)
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == handler.name
            }
            kind = eval(ast.unparse(handler.type), {"cl": cl})
            fields = set(inspect.signature(kind.__init__).parameters) | set(dir(kind))
            assert read <= fields


@pytest.mark.parametrize("name", RUN)
def test_the_example_of_a_docstring_runs_on_ranks(ranks_of, name, tmp_path):
    ranks_of(2).run(run_example, name, str(tmp_path))


def run_example(group: cl.Group, name: str, folder: str) -> None:
    """group, net and folder are what an example finds."""
    torch.manual_seed(0)
    names = {"cl": cl, "os": os, "torch": torch, "net": torch.nn.Linear(8, 1), "folder": folder}
    level = cl.get_debug_level()
    with (
        another_group(group) as names["group"],
        patch.dict(os.environ),
        patch.dict(backends._backends),
    ):
        try:
            exec(example_of(name), names)
        finally:
            cl.set_debug_level(level)


def test_what_the_example_of_deal_says_it_gives_is_what_it_gives() -> None:
    call, comment = example_of("deal").strip().split("  # ")
    assert [list(hand) for hand in eval(call, {"cl": cl})] == eval(comment)
