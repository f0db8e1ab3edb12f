"""A disk, and the memory of the host, that fill up while a training runs on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAINS = """
import json, os, sys, time
from pathlib import Path
import torch
import chorusline as cl
from tests.references.checkpoint_runs import Parts, in_run

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
place = folder / "place"

def fill(path):
    with open(path, "ab", buffering=0) as blocker:
        for size in (1 << 16, 16):
            try:
                while blocker.write(bytes(size)):
                    pass
            except OSError as error:
                assert error.errno == 28, error

def train(ctx):
    parts, said = Parts(ctx, width=2000), []
    for step in range(1, 7):
        if step == 3:
            if ctx.rank == 0:
                fill("/dev/shm/full")
                fill(place / "full")
            ctx.barrier()
            # Who meets anew meanwhile has to come by memory, too.
            ctx.group.new_group(range(ctx.world_size)).barrier().wait()
        if step == 6:
            if ctx.rank == 0:
                (place / "full").unlink()
            ctx.barrier()
        parts.step()
        if step in (2, 4, 6):
            try:
                ctx.save().wait()
            except cl.CheckpointWriteFailed as error:
                said.append([step, str(error)])
            else:
                said.append([step, ""])
    return said, [float(p.double().sum()) for p in parts.model.parameters()]

def train_without(ctx):
    parts = Parts(ctx, width=2000)
    for _ in range(6):
        parts.step()
    return [float(p.double().sum()) for p in parts.model.parameters()]

torch.set_num_threads(1)
config = cl.CheckpointConfig(place)
with cl.Group.create(cl.FileStore(folder / "store"), rank, 2, timeout_s=30) as group:
    expected = in_run(group, train_without, None)
    said, parameters = in_run(group, train, config)
whole = sorted(path.parent.name[:13] for path in place.glob("*/chorusline.json"))
print(json.dumps([said, parameters == expected, whole]))
"""

RUNS = """
mount -t tmpfs -o size=64k tmpfs /dev/shm && mkdir "$2/place" &&
mount -t tmpfs -o size=2m tmpfs "$2/place" || exit 77
"$0" "$1" 1 "$2" > "$2/said-1" 2>&1 &
"$0" "$1" 0 "$2"
ended=$?
wait $! || ended=$?
exit $ended
"""


@pytest.mark.promise("a full disk, a full /dev/shm")
def test_a_training_goes_on_when_its_disk_and_dev_shm_are_full_and_saves_when_there_is_room(
    tmp_path: Path,
) -> None:
    """In a mount namespace of its own: a checkpoint takes a third of the place."""
    program = tmp_path / "train.py"
    program.write_text(TRAINS)
    done = subprocess.run(
        [
            *("unshare", "--mount", "--map-root-user", "sh", "-c", RUNS, sys.executable),
            *(str(program), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this machine allows no mount namespace, so no disk of ours can be full")
    other = tmp_path / "said-1"
    assert done.returncode == 0, done.stderr + other.read_text()
    for words in (done.stdout, other.read_text()):
        said, as_without, whole = json.loads(words.splitlines()[-1])
        assert [step for step, error in said if not error] == [2, 6]
        (failed,) = [error for step, error in said if step == 4]
        assert "[Errno 28] No space left on device" in failed
        assert "Earlier checkpoints are complete and stay; make room" in failed
        assert as_without, "a save that fails changes nothing of the training"
        assert whole == ["step-00000002", "step-00000006"]


SLIPS = """
import sys, torch
import chorusline as cl
from tests.references.checkpoint_runs import in_run

def train(ctx):
    layers = [torch.nn.Linear(1500, 1500) for _ in range(8)]
    ctx.register("model", cl.DistributedDataParallel(torch.nn.Sequential(*layers)))
    ctx.save()
    raise LookupError("a slip of the user's")

with cl.Group.create(cl.HashStore(), 0, 1) as group:
    in_run(group, train, cl.CheckpointConfig(sys.argv[1]))
"""


def test_a_program_that_fails_while_a_checkpoint_is_written_ends_with_its_own_error(
    tmp_path: Path,
) -> None:
    """A thread that was writing when the interpreter went ended the process by abort()."""
    done = subprocess.run(
        [sys.executable, "-c", SLIPS, str(tmp_path / "place")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert done.stderr.rstrip().endswith("LookupError: a slip of the user's")
