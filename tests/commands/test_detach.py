"""`chorusline run --detach`: it returns, and the run goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import chorusline as cl
from chorusline.actors.ray_calls.detached_actors import SESSION_HOST, names_of
from chorusline.runtime.commands.command_line import main
from tests.harness.programs import completed

SCRIPT = """
import time
import beside

def train(ctx, steps: int, pause_s: float = 0.0):
    for step in range(steps):
        ctx.barrier()
        ctx.report(step=step)
        time.sleep(pause_s)
    return beside.NUMBER + ctx.rank
"""


async def test_a_detached_run_prints_its_name_and_goes_on_for_one_who_attaches(
    cluster: None, on_cluster: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("NUMBER = 40\n")
    begun = completed(
        *(
            "-m",
            "chorusline.runtime.commands.command_line",
            "run",
            f"{tmp_path / 'train.py'}:train",
        ),
        *("--workers", "2", "--detach", "--", "--steps", "50", "--pause-s", "0.05"),
        timeout_s=120,
        environment=on_cluster,
    )
    name = begun.stdout.strip()
    assert name.startswith("train-")
    async with cl.attach(name) as session:
        try:
            assert f"trains in the background: `chorusline attach {name}`" in begun.stderr
            assert f"`chorusline stop {name}` ends it" in begun.stderr
            assert await session.results() == [40, 41]
            assert len(await session.reports()) == 100
        finally:
            await session.stop()


TORCHRUNS_SCRIPT = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(int(sys.argv[1])):
    total = torch.full((1,), float(step))
    dist.all_reduce(total)
    time.sleep(0.05)
print(f"total {total.item():g}", flush=True)
"""


@pytest.mark.slow
async def test_a_detached_script_that_torchrun_could_start_goes_on_for_one_who_attaches(
    cluster: None,
    on_cluster: dict[str, str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "plain.py").write_text(TORCHRUNS_SCRIPT)
    begun = completed(
        *("-m", "chorusline.runtime.commands.command_line", "run", "--workers", "2", "--detach"),
        *("--name", "plain-night", tmp_path / "plain.py", "60"),
        timeout_s=120,
        environment=on_cluster,
    )
    assert begun.stdout == "plain-night\n"
    async with cl.attach("plain-night") as session:
        try:
            assert await session.results() == [None, None]
            said = capfd.readouterr().out
            assert "[rank 0] total 118" in said and "[rank 1] total 118" in said
        finally:
            await session.stop()


@pytest.mark.slow
def test_a_run_that_cannot_begin_leaves_no_session(
    cluster: None, on_cluster: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import threading\nlock = threading.Lock()\n\ndef train(ctx):\n    lock\n")
    with pytest.raises(AssertionError, match="cannot be sent to the workers"):
        completed(
            *("-m", "chorusline.runtime.commands.command_line", "run", f"{script}:train"),
            *("-d", "--name", "unsendable"),
            timeout_s=120,
            environment=on_cluster,
        )
    assert "unsendable" not in names_of(SESSION_HOST)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--name", "night"], "write --detach"),
        (["--detach", "--tracker", "tensorboard"], "leave one of them out"),
        (["--detach", "--name", "a/b"], "--name: name must be of letters"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_with_the_mend(
    flags: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    script = tmp_path / "train_here.py"
    script.write_text("def train(ctx):\n    pass\n")
    with pytest.raises(SystemExit) as exit:
        main(["run", f"{script}:train", *flags])
    assert exit.value.code == 2
    assert sentence in capsys.readouterr().err
