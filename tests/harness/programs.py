"""Programs in processes of their own, which find the packages that the tests find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness.forked_workers import python


def completed(
    *arguments: str | Path,
    timeout_s: float,
    environment: Mapping[str, str] = os.environ,
    is_forked: bool = True,
) -> subprocess.CompletedProcess[str]:
    """`python *arguments`, when it is done; where it fails, an error with all that it said.

    is_forked: it has imported torch, Ray and Chorusline already (tests/harness/forked_workers).
    """
    command, variables = python(is_forked=is_forked)
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**environment, **variables, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def output_of(*arguments: str | Path, **more: Any) -> str:
    """What `python *arguments` prints. more: as of `completed`."""
    return completed(*arguments, **more).stdout


def last_line_of(*arguments: str | Path, **more: Any) -> Any:
    """The last line that `python *arguments` prints, from JSON. more: as of `completed`."""
    return json.loads(output_of(*arguments, **more).splitlines()[-1])


def figures_of(benchmark: str, *flags: str, **more: Any) -> Any:
    """benchmark: its module, in benchmarks. more: as of `completed`."""
    command = ("-m", f"benchmarks.{benchmark}", *flags, "--json")
    return last_line_of(*command, **more)["figures"]
