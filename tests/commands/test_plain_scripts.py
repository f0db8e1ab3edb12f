"""Scripts that know nothing of Chorusline, started by `chorusline run --workers 2 script.py`: they
print what they print under torchrun, and begin again where a rank was killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray

import chorusline as cl
from chorusline.runtime.commands import plain_script
from chorusline.runtime.commands.command_line import main
from chorusline.runtime.process.torch_distributed import is_stock
from chorusline.runtime.program.plain_script import (
    PlainScript,
    _as_main,
    _is_in,
    _undone,
    run_plain_script,
)
from tests import ROOT

SCRIPTS = ROOT / "tests/commands/plain_scripts"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OURS = ["-m", "chorusline.runtime.commands.command_line", "run", "--workers", "2"]
ON_CPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}


def started(
    launcher: list[str], *words: str | Path, more: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        | {"PYTHONPATH": os.pathsep.join(sys.path)}
        | more,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def last_lines(done: subprocess.CompletedProcess[str], number: int = 1) -> list[str]:
    """Of rank 0, which alone prints them."""
    lines = [one.removeprefix("[rank 0] ") for one in done.stdout.strip().splitlines()]
    return lines[-number:]


def ours(*words: str | Path, more: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    return started(OURS, *words, more=address | more)


# ── One rank's process ───────────────────────────────────────────────────────────────────────────

LOOKS = """
import dataclasses, os, pickle, sys
import torch, torch.distributed as dist

@dataclasses.dataclass
class Mine:
    number: int = 0

assert dataclasses.fields(Mine)[0].type is int, "Python itself makes no text of it"

assert __name__ == "__main__" and type(pickle.loads(pickle.dumps(Mine()))) is Mine
assert not dist.is_initialized() and dist.is_torchelastic_launched()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
seen = [os.environ[name] for name in names]
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "2", os.environ
dist.init_process_group("cpu:gloo,cuda:nccl", rank=int(seen[0]), world_size=2)
total = torch.ones(3)
dist.all_reduce(total)
first = dist.get_backend(), total.tolist()
dist.destroy_process_group()
try:
    dist.init_process_group(rank=5, world_size=9)
except ValueError as error:
    refused = str(error)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
second = dist.get_backend(mesh.get_group())
with open(sys.argv[1] + seen[0], "w") as file:
    print(sys.argv[0], os.getcwd(), *seen, *first, second, refused, file=file)
sys.exit(int(sys.argv[2]))
"""


async def test_a_script_sees_what_torchrun_would_show_it_and_leaves_nothing(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looks.py").write_text(LOOKS)
    monkeypatch.chdir(tmp_path)

    def script(code: int) -> PlainScript:
        return PlainScript.read(Path("looks.py"), (f"{tmp_path}/seen", str(code)), "name")

    def left(ctx: cl.Context) -> tuple[object, ...]:
        import torch.distributed as dist

        names = [one for one in os.environ if one.startswith(("TORCHELASTIC", "MASTER_", "RANK"))]
        return (
            names,
            sys.argv[0] == "looks.py",
            dist.is_initialized(),
            hasattr(sys.modules["__main__"], "Mine"),
        )

    async with cl.Session(num_workers=2, resources_per_worker={"CPU": 0.1}) as session:
        await session.run(run_plain_script, script=script(0), num_restarts=2)
        for rank in range(2):
            refused = (
                f"init_process_group(rank=5, world_size=9) on rank {rank} of 2; leave both out, or "
                "take them from RANK and WORLD_SIZE"
            )
            assert (tmp_path / f"seen{rank}").read_text().strip() == (
                f"looks.py {tmp_path} {rank} 2 {rank} 2 0 chorusline [2.0, 2.0, 2.0] chorusline "
                f"{refused}"
            )
        assert await session.run(left) == [([], False, False, False)] * 2
        with pytest.raises(RuntimeError, match=r"looks.py has called sys.exit\(7\) on rank"):
            await session.run(run_plain_script, script=script(7), num_restarts=2)


def test_only_torchs_own_backends_are_replaced_by_ours() -> None:
    for ours in (None, "gloo", "nccl", "NCCL", "cpu:gloo,cuda:nccl", "cuda:nccl", "chorusline"):
        assert is_stock(ours), ours
    for theirs in ("hccl", "cpu:gloo,xpu:xccl", "fake", "mine"):
        assert not is_stock(theirs), theirs


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--workers", "2", "x.py:train"], "its flags come after it: chorusline run x.py:train"),
        (["--workers", "2", "nowhere.py"], "there is no file 'nowhere.py' in"),
        (["--workers", "0", "x.py"], "'0' is too few; at least 1 worker"),
        (["--max-restarts", "many", "x.py"], "'many' is not a number; write 3, or 0"),
        (["--spares", "1", "x.py"], "write --max-restarts 3 as well"),
        (["--checkpoint", "kept", "x.py"], "unrecognized arguments: --checkpoint"),
        (["--workers", "2", "--name", "night", "x.py"], "write --detach"),
        (["--detach", "--max-restarts", "1", "x.py"], "leave one of them out"),
        (["--detach", "--name", "a/b", __file__], "--name: name must be of letters"),
        (["--timeout", "nan", __file__], "--timeout: the number of seconds must be positive"),
        (
            ["--max-restarts", "1", "--spares", "99999999", __file__],
            "spares must be a number of workers, 0 to 65536, got 99999999",
        ),
    ],
)
def test_wrong_usage_of_a_script_on_ranks_costs_no_cluster_and_exits_with_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["run", *words])
    assert exited.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--", "--x"], ["--", "--"], ["a", "--", "-h"], ["--x"], []])
def test_all_that_follows_a_script_on_ranks_is_its_own(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[list[str]] = []
    monkeypatch.setattr(plain_script, "run_on_ranks", lambda _, options: got.append(options.args))
    main(["run", "--workers", "2", __file__, *words])
    assert got == [words]


LEAVES_MUCH = """
import builtins, json, logging, multiprocessing, os, random, sys, torch, counted
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
found = [counted.number, os.environ.get("LEFT"), str(torch.get_default_dtype()), random.random()]
found += [torch.rand(()).item(), len(logging.root.handlers), torch.is_grad_enabled()]
found += [len(modules._global_forward_hooks), len(optimizers._global_optimizer_pre_hooks)]
found += [torch.are_deterministic_algorithms_enabled(), sys.argv, "not_here" in sys.path]
found += [type(print).__name__, type(sys.stdout).__name__, str(torch.ones(()).device)]
loggers = [logging.getLogger(name) for name in ("chorusline", "__main__", "mine")]
found += [[len(one.handlers) for one in loggers], torch.get_float32_matmul_precision()]
found += [getattr(torch.backends.mkldnn.matmul, "fp32_precision", "")]
print(json.dumps(found), file=open("found", "a"))
multiprocessing.set_start_method("spawn")
builtins.print = lambda *args, **kwargs: None
sys.stdout = open("log", "a")
counted.number += 1
os.environ["LEFT"] = "yes"
os.environ.pop("PATH")
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_float32_matmul_precision("medium")
torch.backends.fp32_precision = "tf32"
for one in loggers:
    one.addHandler(logging.StreamHandler())
logging.root.addHandler(logging.StreamHandler())
torch.set_grad_enabled(False)
modules.register_module_forward_hook(lambda *_: None)
optimizers.register_optimizer_step_pre_hook(lambda *_: None)
torch.use_deterministic_algorithms(True)
sys.path.append("not_here")
raise KeyError("lost")
"""


def test_what_a_script_changes_in_its_process_is_undone_before_it_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counted.py").write_text("number = 0\n")
    (tmp_path / "train.py").write_text(LEAVES_MUCH)
    monkeypatch.chdir(tmp_path)
    # An earlier test of this process may have started processes, which chooses the method.
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    script = PlainScript.read(Path("train.py"), ("4",), "id")
    environment = dict(os.environ)
    for _ in range(2):
        with pytest.raises(KeyError, match="lost"), _undone(script), _as_main(script) as main:
            exec(compile(script.source, script.path, "exec"), main.__dict__)
        assert dict(os.environ) == environment
    first, second = (tmp_path / "found").read_text().splitlines()
    assert first == second


def test_the_state_of_accelerate_is_that_of_a_new_process_when_a_script_begins_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It holds the process group of the ranks before. accelerate need not be installed."""
    resets: list[object] = []
    state: Any = ModuleType("accelerate.state")
    state.AcceleratorState = SimpleNamespace(
        _reset_state=lambda reset_partial_state: resets.append(reset_partial_state)
    )
    state.GradientState = SimpleNamespace(_reset_state=lambda: resets.append("gradients"))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    (tmp_path / "train.py").write_text("")
    with _undone(PlainScript.read(tmp_path / "train.py", (), "id")):
        assert resets == []
    assert resets == [True, "gradients"]


def test_a_script_below_the_root_takes_no_installed_module_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, file, is_own in [
        ("helpers", "/helpers.py", True),
        ("vision", "/usr/lib/python3/dist-packages/vision/__init__.py", False),
        ("cuts", "/opt/lib/site-packages/cuts.py", False),
        ("json", json.__file__, False),
    ]:
        module = ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
        assert _is_in({Path("/")}, name) is is_own, name


# ── Whole scripts ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("hf_accelerate.py", "accelerate"),
        ("lightning_ddp.py", "lightning"),
        ("nanogpt_like.py", "torch"),
        ("torchtitan_like.py", "torch"),
        ("hf_trainer.py", "transformers"),
    ],
)
def test_a_script_prints_the_same_digits_as_under_torchrun(
    cluster: None, tmp_path: Path, name: str, library: str
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    words: dict[str, list[str]] = {
        "hf_accelerate.py": ["folder", "4"],
        "lightning_ddp.py": [],
        "hf_trainer.py": ["folder", "4"],
    }

    def told(launcher: str) -> list[str]:
        folder = tmp_path / launcher
        folder.mkdir()
        of_script = [str(folder) if one == "folder" else one for one in words.get(name, ["folder"])]
        if launcher == "ours":
            return last_lines(ours(SCRIPTS / name, *of_script))
        return last_lines(started(TORCHRUN, SCRIPTS / name, *of_script, more=ON_CPU))

    assert told("ours") == told("torchrun")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "words", "dies_at", "begun"),
    [
        ("hf_accelerate.py", ["4"], "6", "6"),  # A surviving rank has written its last step.
        ("nanogpt_like.py", [], "6", "4"),
        ("torchtitan_like.py", [], "5", "3"),
    ],
)
def test_a_killed_rank_costs_the_steps_since_the_newest_checkpoint(
    cluster: None, tmp_path: Path, name: str, words: list[str], dies_at: str, begun: str
) -> None:
    if name.startswith("hf_"):
        pytest.importorskip("accelerate", reason="accelerate is not installed")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    expected = last_lines(ours(SCRIPTS / name, whole, *words), 2)
    assert expected[0] == "begun 0"
    done = ours("--max-restarts", "2", SCRIPTS / name, killed, *words, dies_at)
    assert last_lines(done, 2) == [f"begun {begun}", expected[1]]
    assert "restart 1 of 2" in done.stderr and "restart 2 of 2" not in done.stderr
    assert re.search(r"WorkerLost: rank 1 .* died: ", done.stderr)
    assert "write --max-restarts" not in done.stderr, "it was written"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("more", [{}, {"SHARDED": "yes"}], ids=["plain", "zero"])
def test_the_trainer_on_two_ranks_trains_as_in_one_process(
    cluster: None, tmp_path: Path, more: dict[str, str]
) -> None:
    """Of the same samples: half the batch on twice the ranks. Sums of float32 in another order."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    script = SCRIPTS / "hf_trainer.py"
    alone = last_lines(started([], script, tmp_path / "alone", "8", more=ON_CPU))[0].split()
    both = last_lines(ours(script, tmp_path / "both", "4", more=more))[0].split()
    assert (alone[:2], both[:2]) == (["1", "16"], ["2", "16"])
    assert float(both[2]) == pytest.approx(float(alone[2]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_cluster_of_the_command_stays_when_the_script_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE")  # As for a visitor: Ray asks for a token by itself.
    monkeypatch.setenv("HOME", str(tmp_path))
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys\n"
        "restarts = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('restarts', restarts)\n"
        "sys.exit(3 if restarts < 2 else 0)\n"
    )
    done = started([*OURS[:3], "--workers", "1", "--max-restarts", "2"], script)
    assert last_lines(done) == ["restarts 2"]
    assert done.stderr.count("Started a local Ray instance") == 1, done.stderr
    assert "Token authentication" not in done.stderr
