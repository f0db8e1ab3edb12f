"""`chorusline run`: what reaches the script, and what comes back as the exit code."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

CHORUSLINE = Path(sys.executable).with_name("chorusline")


@pytest.fixture
def chorusline(tmp_path):
    def call(*args, script=""):
        (tmp_path / "script.py").write_text(script)
        return subprocess.run(
            [CHORUSLINE, *args], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    return call


def test_script_runs_as_main_with_its_arguments_and_its_folder(chorusline, tmp_path):
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "neighbour.py").write_text("name = 'neighbour'")
    (tmp_path / "beside" / "ours.py").write_text(
        "import sys, neighbour\nprint(__name__, neighbour.name, sys.argv)"
    )
    done = chorusline("run", "beside/ours.py", "--", "--epochs", "3", "-h", "--")
    assert (
        done.stdout == "__main__ neighbour ['beside/ours.py', '--', '--epochs', '3', '-h', '--']\n"
    )
    assert done.returncode == 0


def test_functions_of_the_script_are_pickled_by_value(chorusline):
    script = "from ray import cloudpickle\ndef train(): return 'unique words'\n"
    script += "print(b'unique words' in cloudpickle.dumps(train))"
    assert chorusline("run", "script.py", script=script).stdout == "True\n"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["run", "missing.py"], "argument script: there is no file 'missing.py' in "),
        (["run", "."], "argument script: '.' is not a file; name a Python script"),
        (["run"], "the following arguments are required: script"),
        ([], "the following arguments are required: command"),
        (["sing"], "invalid choice: 'sing'"),
    ],
)
def test_wrong_usage_is_told_in_a_sentence(chorusline, args, sentence):
    done = chorusline(*args)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_failed_script_shows_its_own_frames_only(chorusline):
    script = "def train():\n    raise ValueError('no good')\ntrain()"
    done = chorusline("run", "script.py", script=script)
    assert done.returncode == 1
    assert done.stderr.startswith('Traceback (most recent call last):\n  File "script.py", line 3')
    assert done.stderr.endswith("ValueError: no good\n")


def test_syntax_error_says_where_it_is(chorusline):
    done = chorusline("run", "script.py", script="x = = 1")
    assert done.returncode == 1
    assert 'File "script.py", line 1' in done.stderr
    assert "runpy" not in done.stderr


def test_script_keeps_its_own_exit_code(chorusline):
    assert chorusline("run", "script.py", script="raise SystemExit(143)").returncode == 143


def test_interrupt_exits_with_130(tmp_path):
    (tmp_path / "script.py").write_text("import time; print('ready', flush=True); time.sleep(60)")
    with subprocess.Popen(
        [CHORUSLINE, "run", "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "Interrupted.\n"
