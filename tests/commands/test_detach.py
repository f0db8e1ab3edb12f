"""`chorusline run --detach`: it returns, and the run goes on."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import chorusline as cl
from chorusline.actors.messages.messages import Loss, RunFailed, WorkerInfo
from chorusline.actors.messages.outcomes import failure, raise_failure
from chorusline.actors.ray_calls.detached_actors import SESSION_HOST, names_of
from chorusline.runtime.commands import detached
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


WORKERS = tuple(WorkerInfo(f"w{seat}", seat, "n", "vm", 10 + seat, "cpu") for seat in range(2))


def of_rank_1(error: Exception) -> RunFailed:
    try:
        raise error
    except Exception as raised:
        return RunFailed(3, failure(1, raised), WORKERS, (), ())


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (
            of_rank_1(ValueError("no good")),
            ["in of_rank_1", "ValueError: no good", "raised by rank 1 of 2 in generation 3"],
        ),
        (of_rank_1(KeyError("no good")), ["in of_rank_1", "KeyError: 'no good'", "by rank 1"]),
        (
            RunFailed(3, Loss(1, WORKERS[1], "killed"), WORKERS, (0,), ()),
            ["WorkerLost: ", "rank 0 had returned from the function by then"],
        ),
    ],
)
def test_one_who_attaches_reads_of_a_failure_what_one_who_waits_for_the_run_reads(
    ending: RunFailed,
    said: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def results() -> None:
        raise_failure(ending)

    shown = attached(results, capsys, monkeypatch)
    assert all(words in shown for words in said), shown
    assert "show_attached" not in shown, "no frame of the command"


def test_an_error_of_the_one_who_attaches_is_not_told_as_the_end_of_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def results() -> None:
        raise OSError("no space left")

    assert attached(results, capsys, monkeypatch) == "OSError: no space left\n"


def attached(
    results: Callable[[], Awaitable[None]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """What `chorusline attach` prints on stderr of a session with these results."""

    @contextlib.asynccontextmanager
    async def attach(name: str, **_: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(results=results)

    monkeypatch.setattr(detached, "attach", attach)
    monkeypatch.setattr(detached.connecting, "connected", lambda _: contextlib.nullcontext())
    assert detached.show_attached("night", None) == 1
    return capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("script", "made"),
    [
        ("train.py", "train-"),
        ("sessions.py", "sessions-"),
        ("session.py", "run-session-"),
        ("session-2.py", "run-session-2-"),
        (f"session-{'x' * 70}.py", "run-session-xxx"),
    ],
)
def test_a_name_that_is_made_up_is_one_that_a_detached_session_can_have(
    script: str, made: str
) -> None:
    assert detached.name_for(Path(script), None).startswith(made)


@pytest.mark.parametrize("command", ["attach", "stop"])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a/b", "name must be of letters, digits"),
        ("", "name must be of letters, digits"),
        (
            "session-ba26d1e3",
            "'session-ba26d1e3' is a session that belongs to the program which has started it, and "
            "ends with it; only detached sessions can be attached to and stopped",
        ),
    ],
)
def test_a_name_that_no_detached_session_can_have_costs_no_cluster_and_exits_with_2(
    command: str, name: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main([command, name])
    assert exited.value.code == 2
    assert f"argument session: {sentence}" in capsys.readouterr().err
    with pytest.raises(ValueError, match=re.escape(sentence)):
        cl.attach(name)
