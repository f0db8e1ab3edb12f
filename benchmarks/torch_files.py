"""The runner of one of PyTorch's test files: each test in a process of its own, with a deadline.

A fork that has imported the file runs one test, and the ranks of that test are forks of it: a fresh
interpreter for each rank takes seconds. So a test that hangs, dies or leaves threads behind costs
the others nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IMPORT = "(import)"
"""The name under which a file that cannot be imported tells why."""

_KEPT = 6000  # characters of what a failed test said


def run_file(path: Path, source: Path, wanted: str, limit_s: float) -> dict[str, dict[str, Any]]:
    """By test: its outcome ("passed", "skipped", or the end of what it said), and `reached`:
    how many process groups it made in Gloo's place, 0 if that place was left as it is.

    path: the file. source: the folder test/distributed of PyTorch. wanted: a part of tests' names.
    limit_s: seconds for one test.
    """
    import torch
    import torch.multiprocessing
    from torch.testing._internal import common_distributed

    context = torch.multiprocessing.get_context("fork")
    replaced: Any = torch.multiprocessing
    replaced.get_context = lambda method=None: context
    replaced.set_start_method = lambda *_, **__: None
    torch.set_num_threads(1)
    logging.getLogger(common_distributed.__name__).setLevel(logging.ERROR)
    common_distributed.TIMEOUT_DEFAULT = int(limit_s)
    common_distributed.TIMEOUT_OVERRIDE = {}
    sys.path[:0] = [str(path.parent), str(source), str(source.parent)]
    sys.argv = [str(path)]
    try:
        suite = unittest.defaultTestLoader.loadTestsFromModule(_imported(path))
    except (Exception, SystemExit):
        return {IMPORT: {"outcome": traceback.format_exc()[-_KEPT:], "reached": 0}}
    outcomes = {}
    for test in _tests_of(suite):
        name = ".".join(test.id().split(".")[-2:])
        if wanted not in name:
            continue
        began_at = time.monotonic()
        # The file's own deadline comes first: it says where the ranks are.
        outcomes[name] = _in_a_fork(test, limit_s + 20)
        outcome, seconds = outcomes[name]["outcome"], time.monotonic() - began_at
        word = outcome if outcome in ("passed", "skipped") else "FAILED"
        print(f"{path.name}: {name} {word} {seconds:.1f} s", file=sys.stderr, flush=True)
    return outcomes


def reached_a_process_group() -> None:
    """Called where a process group is made in Gloo's place; the ranks inherit the file."""
    with contextlib.suppress(KeyError), Path(os.environ["CHORUSLINE_REACHED"]).open("ab") as file:
        file.write(b".")


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _tests_of(suite: unittest.TestSuite | unittest.TestCase) -> Iterator[unittest.TestCase]:
    if isinstance(suite, unittest.TestCase):
        yield suite
    else:
        for part in suite:
            yield from _tests_of(part)


def _in_a_fork(test: unittest.TestCase, limit_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        reached = Path(scratch) / "reached"
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.environ["CHORUSLINE_REACHED"] = str(reached)
                os.environ["TMPDIR"] = scratch
                tempfile.tempdir = scratch
                said = os.open(f"{scratch}/said", os.O_WRONLY | os.O_CREAT)
                os.dup2(said, 1)
                os.dup2(said, 2)
                os.write(writing, json.dumps(_outcome(test)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        told = _read(reading, limit_s)
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # Ranks that are left, and the test if it hangs.
        os.waitpid(pid, 0)
        if told is None:
            outcome = f"no end within {limit_s:g} s"
        else:
            outcome = json.loads(told) if told else "the process of the test died"
        if outcome not in ("passed", "skipped"):
            with contextlib.suppress(FileNotFoundError):
                outcome += "\n" + Path(f"{scratch}/said").read_text(errors="replace")[-_KEPT:]
        count = reached.stat().st_size if reached.exists() else 0
        return {"outcome": outcome, "reached": count}


def _outcome(test: unittest.TestCase) -> str:
    # A suite also runs the fixtures of the class.
    result = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.TestSuite([test]))
    told = [text for _, text in result.errors + result.failures]
    if result.unexpectedSuccesses:
        told.append("passed, and was expected to fail")
    if told:
        return told[0][-_KEPT:]
    return "skipped" if result.skipped else "passed"


def _read(reading: int, limit_s: float) -> bytes | None:
    """All that comes through the pipe; None if it does not end in time.

    Ranks inherit the other end, so the outcome counts as soon as it is whole.
    """
    deadline, told = time.monotonic() + limit_s, b""
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([reading], [], [], left_s)[0]:
            break
        part = os.read(reading, 1 << 16)
        told += part
        if not part:
            return told
        with contextlib.suppress(ValueError):
            json.loads(told)
            return told
    return None
