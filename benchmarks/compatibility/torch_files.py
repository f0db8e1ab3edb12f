"""The runner of PyTorch's test files: each test in a process of its own, with a deadline.

A file is imported in a fork of this process, a test runs in a fork of that, and its ranks are forks
once more: a fresh interpreter takes seconds to import torch. So a test that hangs, dies or leaves
threads running costs the others nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import logging
import math
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

IMPORT = "(import)"
"""The name under which a file that cannot be imported tells why."""

_KEPT = 3000  # characters of what a failed test said


def run_files(
    paths: Sequence[Path], source: Path, wanted: str, limit_s: float, on_cpu: bool
) -> dict[str, dict[str, Any]]:
    """By file and test: its `outcome` ("passed", "skipped", or the end of what it said), and
    `reached`: how many process groups it made in Gloo's place, 0 if nothing stands there.

    source: the folder test/distributed of PyTorch. wanted: a part of tests' names.
    limit_s: seconds for one test. on_cpu: tests for GPUs take CPUs instead.
    """
    import torch
    import torch.multiprocessing
    from torch.testing._internal import common_distributed

    context = torch.multiprocessing.get_context("fork")
    replaced: Any = torch.multiprocessing
    replaced.get_context = lambda method=None: context
    replaced.set_start_method = lambda *_, **__: None
    logging.getLogger(common_distributed.__name__).setLevel(logging.CRITICAL)
    common_distributed.TIMEOUT_DEFAULT = int(limit_s)
    common_distributed.TIMEOUT_OVERRIDE = {}
    if on_cpu:
        _let_tests_for_gpus_run()
    outcomes = {}
    for path in paths:
        run = functools.partial(_run_file, path, source, wanted, limit_s, on_cpu)
        told = _in_a_fork(run, None, None)
        died = {IMPORT: {"outcome": "the process of the file died", "reached": 0}}
        outcomes[str(path.relative_to(source))] = json.loads(told) if told else died
    return outcomes


def _run_file(
    path: Path, source: Path, wanted: str, limit_s: float, on_cpu: bool
) -> dict[str, dict[str, Any]]:
    sys.path[:0] = [str(path.parent), str(source), str(source.parent)]
    sys.argv = [str(path)]
    try:
        suite = unittest.defaultTestLoader.loadTestsFromModule(_imported(path, on_cpu))
    except (Exception, SystemExit):
        return {IMPORT: {"outcome": traceback.format_exc()[-_KEPT:], "reached": 0}}
    outcomes = {}
    for test in _tests_of(suite):
        name = ".".join(test.id().split(".")[-2:])
        if wanted not in name:
            continue
        began_at = time.monotonic()
        # The file's own deadline comes first: it says where the ranks are.
        outcomes[name] = _run_test(test, limit_s + 20)
        outcome, seconds = outcomes[name]["outcome"], time.monotonic() - began_at
        word = outcome if outcome in ("passed", "skipped") else "FAILED"
        print(f"{path.name}: {name} {word} {seconds:.1f} s", file=sys.stderr, flush=True)
    return outcomes


def reached_a_process_group() -> None:
    """Called where a process group is made in Gloo's place; the ranks inherit the file."""
    with contextlib.suppress(KeyError), Path(os.environ["CHORUSLINE_REACHED"]).open("ab") as file:
        file.write(b".")


_FOR_CPUS = (
    (r"\bcpu:gloo,cuda:nccl\b", "gloo"),
    (r"\.cuda\([^()]*\)", ".cpu()"),
    (r"\bcuda\b", "cpu"),
    (r"\bnccl\b", "gloo"),
    (r"\bNCCL\b", "GLOO"),
)
"""The words of a test for GPUs, and those that make it one for CPUs: torch.cpu has the functions of
torch.cuda. What has none (memory, streams) fails on Gloo as well."""


def _let_tests_for_gpus_run() -> None:
    import torch
    from torch.testing._internal import common_distributed

    counting: Any = [torch.accelerator, torch.cpu]
    for module in counting:
        module.device_count = lambda: 4
    every: Any = common_distributed
    every.skip_if_lt_x_gpu = every.requires_nccl = lambda *_, **__: lambda test: test
    every.skip_unless_torch_gpu = lambda test: test
    every.at_least_x_gpu = lambda _: True
    from torch.testing._internal import common_fsdp  # It takes those names as it is imported.

    common_fsdp.DEVICE_COUNT = 2


def _imported(path: Path, on_cpu: bool) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    text = path.read_text()
    for gpu, cpu in _FOR_CPUS if on_cpu else ():
        text = re.sub(gpu, cpu, text)
    exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    return module


def _tests_of(suite: unittest.TestSuite | unittest.TestCase) -> Iterator[unittest.TestCase]:
    if isinstance(suite, unittest.TestCase):
        yield suite
    else:
        for part in suite:
            yield from _tests_of(part)


def _run_test(test: unittest.TestCase, limit_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch, Path(scratch, "said").open("wb") as said:
        reached = Path(scratch, "reached")

        def run() -> str:
            os.environ["CHORUSLINE_REACHED"] = str(reached)
            os.environ["TMPDIR"] = tempfile.tempdir = scratch
            return _outcome(test)

        told = _in_a_fork(run, limit_s, said.fileno())
        if told:
            outcome = json.loads(told)
        else:
            outcome = "the process of the test died"
            if told is None:
                outcome = f"no end within {limit_s:g} s"
            outcome += "\n" + Path(scratch, "said").read_text(errors="replace")[-_KEPT:]
        count = reached.stat().st_size if reached.exists() else 0
        return {"outcome": outcome, "reached": count}


def _in_a_fork(run: Callable[[], Any], limit_s: float | None, said: int | None) -> bytes | None:
    """What `run` returns, as JSON; nothing if its process died, None if it did not end in time.

    said: a file that receives its output. At the end its ranks are killed, if any are left.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            if said is not None:
                os.dup2(said, 1)
                os.dup2(said, 2)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(json.dumps(run()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        return _read(reading, limit_s)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _outcome(test: unittest.TestCase) -> str:
    # A suite also runs the fixtures of the class.
    result = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.TestSuite([test]))
    told = [text for _, text in result.errors + result.failures]
    if result.unexpectedSuccesses:
        told.append("passed, and was expected to fail")
    if told:
        # The first rank's own words are enough.
        return told[0].split("\nTo execute this test")[0].rstrip()[-_KEPT:]
    # Some tests have as many ranks as there are GPUs.
    return "skipped" if result.skipped or getattr(test, "world_size", 1) == 0 else "passed"


def _read(reading: int, limit_s: float | None) -> bytes | None:
    """All that comes through the pipe; None if it does not end in time.

    Ranks inherit the other end, so the outcome counts as soon as it is whole.
    """
    deadline, told = time.monotonic() + (limit_s or math.inf), b""
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([reading], [], [], None if limit_s is None else left_s)[0]:
            break
        part = os.read(reading, 1 << 16)
        told += part
        if not part:
            return told
        with contextlib.suppress(ValueError):
            json.loads(told)
            return told
    return None
