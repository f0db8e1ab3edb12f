"""What is written behind `chorusline`, and what comes back: values, sentences, exit codes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import enum
import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import typing
from pathlib import Path
from urllib.request import urlopen

import pytest
import ray
import torch
from ray.job_submission import JobSubmissionClient
from rich.console import Console

import chorusline as cl
from chorusline.actors.ray_calls.detached_actors import INCARNATION, NAMESPACE
from chorusline.actors.worker.devices import VISIBLE
from chorusline.collectives.shared_memory.compiled import library
from chorusline.runtime.commands import function_flags
from chorusline.runtime.commands.arguments import (
    WrongUsage,
    keywords,
    script_and_function,
    workers,
)
from chorusline.runtime.commands.bench import OPERATIONS, Row, _case, bus_factor, nbytes, table
from chorusline.runtime.commands.command_line import main
from chorusline.runtime.commands.doctor import Severity, _address, _exits, _links, _nccl_finds, _ray
from chorusline.runtime.commands.status import _show, survey
from chorusline.runtime.commands.visible_gpus import traps
from chorusline.runtime.session import connecting
from tests import ROOT
from tests.checkpoint.failures.test_forgeries import _write
from tests.data.fetching.test_fetcher import runs
from tests.harness.forked_workers import python
from tests.harness.head_node import free_ports, head_node, wait_until
from tests.harness.reused_ranks import ReusedRanks

if typing.TYPE_CHECKING:
    from chorusline import Context as OfCheckers

CHORUSLINE = [sys.executable, "-m", "chorusline.runtime.commands.command_line"]
SCRIPT = """
import sys, time
from typing import NoReturn

def train(ctx, lr: float, steps: int = 2, name="plain"):
    print("hello from", name)
    print("a bar 50%\\ra bar 100%", file=sys.stderr)
    for step in range(steps):
        ctx.barrier()
        ctx.report(loss=lr / (step + 1), batches_left=steps - step - 1)
    if name == "bad" and ctx.rank == 1:
        raise ValueError("no good")
    if name == "endless":
        print("ready")
        time.sleep(600)
    print("no end of line", end="")
    return lr * (ctx.rank + 1)

number = 3
"""


def call(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, variables = python()
    return subprocess.run(
        [*command, *CHORUSLINE[1:], *args],
        capture_output=True,
        text=True,
        timeout=100,
        env={key: v for key, v in os.environ.items() if key != "RAY_ADDRESS"}
        | environment
        | variables,
    )


# ── Words ────────────────────────────────────────────────────────────────────────────────────────


def test_workers_are_a_number_or_a_range() -> None:
    assert (workers("4"), workers("2..8"), workers("3..3")) == (4, (2, 8), (3, 3))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("two", "'two' is not a number of workers; write 4, or 2..8"),
        ("2-8", "'2-8' is not a number of workers"),
        ("0", "'0' is too few; at least 1 worker"),
        ("8..2", "'8..2' is not ascending; write 2..8"),
        ("1..99999999", "'1..99999999' is too many; write at most 65536"),
    ],
)
def test_a_worker_count_that_is_none_is_told_how_to_be_written(text: str, sentence: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        workers(text)
    assert sentence in str(raised.value)


def test_a_function_is_named_behind_the_last_colon(tmp_path: Path) -> None:
    odd = tmp_path / "a:b.py"
    odd.touch()
    assert script_and_function("train.py:main") == (Path("train.py"), "main")
    assert script_and_function("train.py") == (Path("train.py"), None)
    assert script_and_function(str(odd)) == (odd, None)


def train(ctx: object, lr: float, steps: int = 3, name: str = "x", fast=False, sizes=None) -> None:
    """Takes one argument of each kind."""


def test_arguments_get_the_types_of_the_parameters() -> None:
    words = ["--lr", "1", "--steps=-4", "--name", "7", "--fast", "--sizes", "[1,2]"]
    assert keywords(words, train) == {
        "lr": 1.0,
        "steps": -4,
        "name": "7",
        "fast": True,
        "sizes": [1, 2],
    }
    assert isinstance(keywords(["--lr", "1"], train)["lr"], float)


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


@dataclasses.dataclass
class Schedule:
    warmup: int
    decay: float = 0.1


def of_types(
    ctx: object,
    *,
    data: Path = Path(),
    betas: tuple[float, float] = (0.9, 0.999),
    layers: list[int] | None = None,
    mode: typing.Literal["train", "test"] = "train",
    size: Size = Size.SMALL,
    schedule: Schedule | None = None,
    seed: int | None = None,
    anything: typing.Any = None,
) -> None: ...


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--data", "a b/c"], Path("a b/c")),
        (["--betas", "[0.9, 0.95]"], (0.9, 0.95)),
        (["--layers", "[1, 2]"], [1, 2]),
        (["--layers", "None"], None),
        (["--mode", "test"], "test"),
        (["--size", "large"], Size.LARGE),
        (["--schedule", "{'warmup': 5}"], Schedule(5)),
        (["--seed", "7"], 7),
        (["--seed", "None"], None),
        (["--anything", "(1, 'a')"], (1, "a")),
    ],
)
def test_arguments_get_whatever_type_the_annotation_says(words: list[str], value: object) -> None:
    (found,) = keywords(words, of_types).values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--mode", "predict"],
            "--mode takes Literal, got 'predict': Input should be 'train' or 'test'",
        ),
        (["--size", "huge"], "--size takes Size, got 'huge': Input should be 'small' or 'large'"),
        (["--layers", "[1, 2.5]"], "--layers takes"),
        (["--schedule", "{'warm': 5}"], "Field required at 'warmup'"),
    ],
)
def test_a_word_of_another_type_is_refused_with_what_fits(words: list[str], sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        keywords(words, of_types)
    assert sentence in str(raised.value)


def test_an_annotation_that_only_type_checkers_can_read_leaves_the_others_theirs() -> None:
    def main(ctx: OfCheckers, lr: float, *, size: Size, more: OfCheckers) -> OfCheckers: ...

    words = ["--lr", "1", "--size", "small", "--more", "2"]
    assert keywords(words, main) == {"lr": 1.0, "size": Size.SMALL, "more": 2}
    assert type(keywords(words, main)["lr"]) is float


def test_a_type_that_no_word_can_be_is_refused_with_what_fits() -> None:
    def main(ctx: object, device: torch.device) -> None: ...

    says = "--device takes device, which no word of a command line can be; annotate it as str"
    with pytest.raises(ValueError, match=says):
        keywords(["--device", "cpu"], main)


def test_a_function_of_any_keywords_gets_them_all() -> None:
    def takes_any(ctx: object, **options: object) -> None: ...

    assert keywords(["--learning-rate", "0.1", "--mode=a b"], takes_any) == {
        "learning_rate": 0.1,
        "mode": "a b",
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--lr 0.1 --speed 3", "no parameter 'speed'; it takes --lr, --steps, --name"),
        ("--steps 2", "the function needs --lr"),
        ("--lr much", "--lr takes float, got 'much'"),
        ("--lr 1 --steps 2.5", "--steps takes int, got '2.5'"),
        ("--lr 1 --fast perhaps", "--fast takes bool, got 'perhaps'"),
        ("--lr 1 --lr 2", "--lr is given twice"),
        ("0.1", "'0.1' is not an argument of a function; write --name value"),
    ],
)
def test_arguments_that_do_not_fit_are_told_with_what_does(words: str, sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        keywords(words.split(), train)
    assert sentence in str(raised.value)


def test_an_interrupt_of_status_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(address: str | None) -> typing.NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(connecting, "connected", interrupted)
    assert main(["status"]) == 130


# ── run ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((":nope",), "has no function named 'nope'; it has train"),
        ((":trian",), "has no function named 'trian'; did you mean 'train'?"),
        ((":train", "--wrkers", "2"), "the function's own after --; did you mean '--workers'?"),
        ((":number",), "has an int, not a function, named 'number'"),
        ((":train", "--fresh"), "--fresh configures checkpoints; write --checkpoint DIR"),
        ((":train", "--checkpoint", "x", "--fresh", "--resume", "y"), "not allowed with argument"),
        ((":train", "--keep", "0"), "'0' is not a whole number of at least 1"),
        ((":train", "--workers", "8..2"), "'8..2' is not ascending; write 2..8"),
        ((":train", "--lr", "1"), "unrecognized arguments: --lr 1; write the function's own after"),
        ((":train", "--", "--speed", "1"), "the function has no parameter 'speed'"),
        (
            (":train", "--timeout", "-1"),
            "--timeout: the number of seconds must be positive, got -1",
        ),
        ((":train", "--timeout", "soon"), "--timeout: 'soon' is not a number of seconds; write 60"),
        ((":train", "--startup-timeout", "0"), "--startup-timeout: the number of seconds must be"),
        ((":train", "--workers", "99999999"), "--workers: '99999999' is too many"),
        ((":train", "--env", "A=\udcff", "--", "--lr", "1"), "env_vars['A'] has '\\udcff' in it"),
        ((":train", "--checkpoint", "", "--", "--lr", "1"), "--checkpoint: storage_path must be"),
    ],
)
def test_wrong_usage_of_a_function_costs_no_cluster_and_exits_with_2(
    script: str,
    args: tuple[str, ...],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend("")  # What the command adds to the path goes with it.
    monkeypatch.delitem(sys.modules, "script", raising=False)
    with pytest.raises(SystemExit) as exited:
        main(["run", script + args[0], *args[1:]])
    assert exited.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_file_of_a_function_may_have_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("")
    monkeypatch.delitem(sys.modules, "program", raising=False)
    (tmp_path / "program").write_text(SCRIPT)
    with pytest.raises(SystemExit) as exited:
        main(["run", f"{tmp_path}/program:nope"])
    assert exited.value.code == 2
    assert "program has no function named 'nope'; it has train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["stauts"], "did you mean 'status'?"),
        (["status", "--onec"], "did you mean '--once'?"),
        (["run", "--wrkers", "2", "train.py"], "did you mean '--workers'?"),
        (["checkpoint", "lst", "x"], "did you mean 'list'?"),
    ],
)
def test_an_unknown_command_or_flag_is_told_with_the_nearest(
    args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(args)
    assert exited.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_help_of_run_explains_each_flag_and_the_version_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for args in (["run", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as exited:
            main(args)
        assert exited.value.code == 0
        said = capsys.readouterr().out
        if args == ["--version"]:
            assert said == f"chorusline {cl.__version__}\n"
        else:
            parsers = function_flags.made(""), function_flags.made_for_script("")
            flags = {flag for one in parsers for flag in one._option_string_actions}
            assert {"--workers", "--tracker", "--max-restarts"} <= flags
            for flag in sorted(
                flag for flag in flags if flag.startswith("--") and flag != "--help"
            ):
                begins = rf"^  (?:-\w(?: \S+)?, )?{flag}\b"
                assert re.search(
                    rf"{begins}.* {{2,}}\w|{begins}.*\n {{20,}}\w", said, re.MULTILINE
                ), flag


def test_a_cluster_that_does_not_answer_is_a_failed_run(script: str) -> None:
    done = call("run", f"{script}:train", "--address", "127.0.0.1:1", "--", "--lr", "1")
    assert "no Ray cluster answers at '127.0.0.1:1'" in done.stderr
    assert "`ray start --head`" in done.stderr
    assert done.returncode == 1


@pytest.mark.slow
def test_ranks_print_whole_lines_with_their_rank_and_the_results_come_last(
    script: str, cluster: None
) -> None:
    done = on_cluster("run", f"{script}:train", "--workers", "1..2", "--", "--lr", "0.5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [
            f"[rank {rank}] hello from plain",
            f"[rank {rank}] no end of line",
            f"[rank {rank}] returned {0.5 * (rank + 1)}",
        ]
        assert f"[rank {rank}] a bar 100%" in done.stderr.splitlines()
    assert all(line.startswith("[rank ") for line in lines), lines
    assert re.search(r"^step 2  loss 0.250  .*2 workers", done.stderr, re.MULTILINE)


COUNTING = """
import torch, chorusline as cl

def train(ctx, epochs: int):
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(4, 1)))
    optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1))
    first = ctx.step
    for epoch in ctx.epochs(epochs):
        for batch in ctx.shard(torch.ones(24, 4), 4):
            model(batch).square().mean().backward()
            optim.step()
    return first, ctx.step
"""


@pytest.mark.slow
def test_a_run_saves_goes_on_and_begins_afresh_as_its_flags_say(
    tmp_path: Path, cluster: None
) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    place = tmp_path / "kept"

    def returned(epochs: int, *flags: str) -> tuple[str, str]:
        called = ["run", f"{tmp_path}/counting.py:train", "--workers", "2", *flags]
        done = on_cluster(*called, "--", "--epochs", str(epochs))
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1], done.stdout + done.stderr

    keeps = ("--checkpoint", str(place), "--save-every", "3", "--keep", "2")
    assert returned(2, *keeps)[0] == "[rank 1] returned (0, 6)"
    assert len([*place.iterdir()]) == 2
    last, said = returned(3, *keeps)
    assert last == "[rank 1] returned (6, 9)"
    assert "the run resumes from" in said and "before epoch 2" in said
    assert returned(1, *keeps, "--fresh")[0] == "[rank 1] returned (0, 3)"
    elsewhere = ("--checkpoint", str(tmp_path / "other"), "--resume", str(place))
    assert returned(2, *elsewhere)[0] == "[rank 1] returned (3, 6)"


@pytest.mark.slow
def test_a_failed_function_shows_the_ranks_own_error_and_exits_with_1(
    script: str, cluster: None
) -> None:
    done = on_cluster(
        *("run", f"{script}:train", "--workers", "2", "--", "--lr", "1", "--name", "bad")
    )
    assert done.returncode == 1
    assert 'raise ValueError("no good")' in done.stderr
    assert "raised by rank 1 of 2" in done.stderr
    assert "[rank 0] hello from bad" in done.stdout
    assert "runtime/commands/function.py" not in done.stderr, "only the user's frames"


async def test_sigterm_stops_the_ranks_and_exits_with_143_and_status_follows_them_until_then(
    script: str, cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is left behind: the fixture of `cluster` looks. On a terminal the table is drawn
    anew every second."""
    others = set(await survey(None))  # Of other tests.
    command, variables = python()
    with subprocess.Popen(
        [
            *(*command, *CHORUSLINE[1:], "run", f"{script}:train", "--workers", "2"),
            *("--address", address(), "--", "--lr", "1", "--name", "endless"),
        ],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "[rank 0] ready\n":
                break
        console = Console(width=200, force_terminal=False)
        (name,) = set(await survey(None)) - others
        seen = await _show(name, console, once=True), capsys.readouterr()
        gone = await _show("session-0", console, once=True), capsys.readouterr()
        terminal = Console(width=200, force_terminal=True, file=io.StringIO())
        assert isinstance(terminal.file, io.StringIO)
        live = asyncio.create_task(_show(name, terminal, once=False))
        async with asyncio.timeout(30):
            while len(set(re.findall(r"training +(\d+) s", terminal.file.getvalue()))) < 2:
                await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.to_thread(process.communicate, timeout=60)
        assert await asyncio.wait_for(live, 30) == 0
    assert process.returncode == 143, errors
    assert terminal.file.getvalue().endswith("The session has ended.\n")
    assert errors.endswith("Terminated: all ranks were stopped.\n")

    assert seen[0] == 0
    title, header, *rows = seen[1].out.splitlines()
    assert ": run 0, generation 0, 2 of 2 live" in title
    assert header.split()[:4] == ["rank", "worker", "device", "state"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert all("training" in row and "#1  loss 0.5  batches_left 0" in row for row in rows)
    assert gone[0] == 1
    told = "the session 'session-0' is gone, or was never on this cluster; there are session-"
    assert told in gone[1].err


@pytest.mark.slow
def test_a_cluster_of_another_version_is_told_with_the_mend(cluster: None) -> None:
    """Ray compares what a process says of itself with what the cluster was started with."""
    program = (
        "import sys, ray; ray.__version__ = '1.0.0'\n"
        "from chorusline.runtime.commands.command_line import main\n"
        f"sys.exit(main(['status', '--address', {address()!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert f"the cluster at {address()!r} runs other versions than this process" in done.stderr
    assert "Use the cluster's Python and Ray here" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


class OtherDriver:
    def survey(self) -> None:
        """Takes no time limit, as one of another version might."""


async def test_status_says_which_session_is_of_another_version(
    cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"session-old{INCARNATION}0"
    driver = ray.remote(OtherDriver).options(name=name, namespace=NAMESPACE, num_cpus=0).remote()
    assert await _show("session-old", Console(width=200), once=True) == 0
    told = capsys.readouterr().out
    assert told.startswith("session-old: its driver has another version of chorusline than this")
    ray.kill(driver)


def address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def on_cluster(*args: str) -> subprocess.CompletedProcess[str]:
    return call(*args, RAY_ADDRESS=address())


TERMINATED_EXPORT = """
import os, signal, sys, torch
from chorusline.runtime.commands.command_line import main

def save(states, file):
    file.write(b"half of it")
    os.kill(os.getpid(), signal.SIGTERM)

torch.save = save
sys.exit(main(["checkpoint", "export", *sys.argv[1:]]))
"""


def test_an_export_that_is_ended_by_sigterm_leaves_nothing(tmp_path: Path) -> None:
    place, target = tmp_path / "place", tmp_path / "target"
    _write(place)
    command, variables = python()
    done = subprocess.run(
        [*command, "-c", TERMINATED_EXPORT, str(place), str(target / "states.pt")],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (143, "")
    assert [*target.iterdir()] == []


# ── doctor, bench ────────────────────────────────────────────────────────────────────────────────


def test_the_doctor_tells_each_thing_and_finds_nothing_that_prevents_running(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    for words in ("python", "torch", "ray", "nccl", "/dev/shm", "links", "ports", "auth mode"):
        assert words in told
    assert "ranks of this host can share memory" in told
    assert f"run them in {'C' if library() is not None else 'Python'}" in told
    assert told.endswith("nothing prevents running here\n")


def test_the_doctor_tells_the_mend_of_what_is_wrong_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib7")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("RAY_AUTH_MODE", "perhaps")
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    lines = told.splitlines()
    wrong = {line.split()[1]: lines[n + 1] for n, line in enumerate(lines) if "WRONG" in line}
    assert set(wrong) == {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RAY_ADDRESS", "ray's"}
    assert "export GLOO_SOCKET_IFNAME=" in wrong["GLOO_SOCKET_IFNAME"]
    assert "`ray start --head` there" in wrong["RAY_ADDRESS"]
    assert "RAY_AUTH_MODE=disabled" in wrong["ray's"]
    assert told.endswith("4 things prevent running here\n")


@pytest.mark.parametrize(
    ("wanted", "finds"),
    [
        *(("eth", True), ("ib,eth1", True), ("=eth", False), ("=eth0,ib", True), ("ib", False)),
        *(("^eth", True), ("^=eth", True), ("^lo,eth", False), ("^=lo,eth0,eth1", False)),
    ],
)
def test_the_doctor_reads_the_interfaces_of_nccl_as_nccl_does(wanted: str, finds: bool) -> None:
    assert _nccl_finds(wanted, ["lo", "eth0", "eth1"]) is finds


def test_the_doctor_tells_the_interfaces_that_were_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    told = {one.topic: one for one in _links({})}
    assert told["host name"].severity is Severity.POOR
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(told)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    told = {one.topic: one for one in _links({"NCCL_SOCKET_IFNAME": "=lo"})}
    assert {one.severity for one in told.values()} == {Severity.FINE}
    assert "'lo'" in told["GLOO_SOCKET_IFNAME"].says
    assert "'=lo'" in told["NCCL_SOCKET_IFNAME"].says
    assert "host name" not in told, "Gloo does not ask for its address"


def test_the_doctor_finds_the_cluster_of_this_machine_by_auto(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ray.get_runtime_context().gcs_address

    def ours(address: str) -> str:  # Ray would look at the clusters of other tests as well.
        return here

    monkeypatch.setattr(ray._private.services, "canonicalize_bootstrap_address", ours)
    [found] = _address({"RAY_ADDRESS": "auto"})
    assert (found.severity, found.says) == (Severity.FINE, f"a cluster answers at {here}")

    def nowhere(address: str) -> str:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray._private.services, "canonicalize_bootstrap_address", nowhere)
    [found] = _address({"RAY_ADDRESS": "auto"})
    assert found.severity is Severity.BROKEN
    assert found.says == "auto, and no Ray cluster answers on this machine"
    assert found.remedy.endswith("`ray start --head` here")


def test_the_doctor_reaches_an_address_of_ipv6() -> None:
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    address = f"[::1]:{listening.getsockname()[1]}"
    with listening:
        [found] = _address({"RAY_ADDRESS": address})
        assert (found.severity, found.says) == (Severity.FINE, f"a cluster answers at {address}")
    [found] = _address({"RAY_ADDRESS": address})
    assert found.severity is Severity.BROKEN and "refused" in found.says


def test_what_the_doctor_cannot_examine_is_a_line_and_the_others_follow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bare container: no /dev/shm, no settings of the network, no HOME of an unknown user."""
    disk_usage, read_text = shutil.disk_usage, Path.read_text

    def usage(path: str) -> object:
        return disk_usage("/nowhere" if path == "/dev/shm" else path)

    def text(path: Path, **options: str) -> str:
        is_missing = path.name == "ip_local_port_range"
        return read_text(Path("/nowhere") if is_missing else path, **options)

    def home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(Path, "read_text", text)
    monkeypatch.setattr(Path, "expanduser", home)
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    notes = re.findall(r"^ note  (.+?)  +could not be examined", told, re.MULTILINE)
    assert notes == ["shared memory", "ports", "ray"]


def test_the_doctor_tells_that_a_kernel_does_not_say_when_a_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(_exits()) == []

    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refused)
    [found] = _exits()
    assert "pidfd_open: Function not implemented" in found.says
    assert found.severity is Severity.POOR


@pytest.mark.parametrize("mode", ["disabled", ""])
def test_the_doctor_warns_where_a_cluster_asks_nobody_for_a_token(
    mode: str, tmp_path: Path
) -> None:
    environment = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}
    (found,) = _ray(environment)
    assert found.severity is Severity.POOR
    assert "runs code as you" in found.says
    assert "ray get-auth-token --generate" in found.remedy


@pytest.mark.parametrize(
    ("visible", "on_machine", "says"),
    [
        (None, 8, None),
        ("0,1", 0, None),
        ("0,1,2,3", 4, None),
        ("GPU-a,GPU-b", 2, None),
        ("0", 8, "shows 1 of the 8 GPUs here: NCCL's first operation may take seconds, or hang"),
        ("GPU-a", 2, "shows 1 of the 2"),
        ("", 2, "hides all 2 GPUs"),
        ("NoDevFiles", 2, "hides all 2 GPUs"),
        ("0,-1,1", 3, "CUDA stops reading at '-1', and shows 1 GPUs"),
        ("0,1,0", 3, "CUDA stops reading at '0', and shows 2 GPUs"),
        ("MIG-a,MIG-b", 1, "parts of GPUs (MIG-a, MIG-b)"),
    ],
)
def test_the_doctor_names_what_hides_gpus(
    visible: str | None, on_machine: int, says: str | None
) -> None:
    found = list(traps({} if visible is None else {VISIBLE: visible}, on_machine))
    assert len(found) == (says is not None)
    for told, mend in found:
        assert says is not None and says in told
        assert mend


def test_the_doctor_tells_that_a_terminal_does_not_find_the_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin")
    assert main(["doctor"]) == 0
    assert f"command          {here / 'chorusline'}\n" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert f"{here / 'chorusline'} is not on the PATH" in told
    assert f"source {here / 'activate'}, also before `ray start`" in told
    other = tmp_path / "chorusline"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["doctor"]) == 0
    assert f"`chorusline` is {other}, and not the one beside" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_doctor_tells_that_jobs_of_a_cluster_do_not_find_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And jobs end as it says, unless they name the program with its path."""
    gcs, board, client, agent = free_ports(4)
    address = f"http://127.0.0.1:{board}"
    flags = [
        *(f"--port={gcs}", "--num-cpus=1", "--include-dashboard=true"),
        *(f"--dashboard-port={board}", f"--dashboard-agent-listen-port={agent}"),
        f"--ray-client-server-port={client}",
    ]

    def answers() -> bool:
        with contextlib.suppress(OSError), urlopen(f"{address}/api/version", timeout=5):
            return True
        return False

    bare = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    with head_node(*flags, is_up=answers, environment=bare):

        def is_told() -> bool:
            main(["doctor"])
            pids = re.search(r"pid of the node: ([\d, ]+)\) where", capsys.readouterr().out)
            named = pids[1].split(", ") if pids else []
            return any(f":{gcs}" in Path("/proc", pid, "cmdline").read_text() for pid in named)

        wait_until(is_told, 60)  # The dashboard answers before the node is there.
        assert is_told()
        jobs = JobSubmissionClient(address)
        program = Path(sys.executable).with_name("chorusline")
        ends = {"chorusline --help": "FAILED", f"{program} --help": "SUCCEEDED"}
        for entrypoint, status in ends.items():
            job = jobs.submit_job(entrypoint=entrypoint)
            wait_until(lambda job=job: jobs.get_job_status(job).is_terminal(), 60)
            assert jobs.get_job_status(job) == status, jobs.get_job_logs(job)
            if status == "FAILED":
                assert "chorusline: not found" in jobs.get_job_logs(job)


@pytest.mark.slow
def test_the_bench_counts_wrong_elements_of_every_operation_and_finds_none() -> None:
    done = call("bench", "--op", "all", "--sizes", "52", "--json")
    assert done.returncode == 0, done.stderr
    rows = [Row(**row) for row in json.loads(done.stdout)["rows"]]
    assert len(rows) == 7 + 1
    for row in rows:
        assert row.wrong == 0 and row.time_us > 0
        assert row.busbw == pytest.approx(row.algbw * bus_factor(row.op, 2))
        assert row.algbw == pytest.approx(row.size / row.time_us / 1e3)


class Idle:
    """A group whose operations move nothing."""

    def __init__(self, group: cl.Group) -> None:
        self.rank, self.size, self.device = group.rank, group.size, group.device
        self._group = group

    def __getattr__(self, operation: str) -> typing.Any:
        return lambda *arguments: self._group.barrier()


def wrong_elements(group: cl.Group, is_idle: bool) -> dict[str, int]:
    measured: typing.Any = Idle(group) if is_idle else group
    wrong = {}
    for op in OPERATIONS:
        call, count_wrong, _ = _case(measured, op, 52)
        call()
        wrong[op] = count_wrong()
    return wrong


def test_the_bench_sees_what_an_operation_has_not_done(
    ranks_of: typing.Callable[[int], ReusedRanks],
) -> None:
    for is_idle in (False, True):
        by_rank = ranks_of(2).run(wrong_elements, is_idle)
        wrong = {op for op in OPERATIONS if sum(of_rank[op] for of_rank in by_rank)}
        assert wrong == ({*OPERATIONS} - {"barrier"} if is_idle else set())


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_ranks_of_a_bench_end_with_it(tmp_path: Path, how: signal.Signals) -> None:
    """SIGTERM leaves no folder either; a process that is killed can remove nothing."""
    with subprocess.Popen(
        [*CHORUSLINE, "bench", "--op", "all", "--sizes", ",".join(["1M"] * 20)],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as bench:
        wait_until(lambda: any(tmp_path.glob("*/store*")), 60)
        children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
        bench.send_signal(how)
        wait_until(lambda: bench.poll() is not None, 10)
        wait_until(lambda: not any(runs(int(pid)) for pid in children), 10)
        left = [pid for pid in children if runs(int(pid))]
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
        assert bench.stderr is not None
        told = bench.stderr.read()
    assert len(children) >= 2 and not left
    if how is signal.SIGTERM:
        assert (bench.returncode, told, [*tmp_path.iterdir()]) == (143, "", [])


def test_the_benchs_table_has_nccl_tests_columns() -> None:
    told = table([Row("all_reduce", 1 << 20, 1 << 18, 5, 500.0, 2.097152, 2.097152, 0)])
    header, units, row, mean = told.splitlines()[2:]
    assert header.split() == ["size", "count", "time", "algbw", "busbw", "#wrong"]
    assert units.split() == ["(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)"]
    assert row.split() == ["1048576", "262144", "500.0", "2.10", "2.10", "0"]
    assert mean == "# average bus bandwidth: 2.10 GB/s"
    assert bus_factor("all_reduce", 4) == 1.5 and bus_factor("all_gather", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1


@pytest.mark.parametrize("text", ["", "4X", "K", "-4", "0"])
def test_sizes_that_are_none_are_told_how_to_be_written(text: str) -> None:
    assert nbytes("64K") == 65536
    with pytest.raises(WrongUsage, match="as 4,64K,1M"):
        nbytes(text)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--op", "sing"], "--op knows all_reduce"),
        (["--ranks", "1"], "--ranks must be at least 2, got 1"),
    ],
)
def test_unknown_operations_and_too_few_ranks_exit_with_2(
    args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["bench", *args])
    assert exited.value.code == 2
    assert sentence in capsys.readouterr().err
