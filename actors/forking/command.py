"""Which workers are forked, and the command by which Ray starts them then.

A worker that Ray starts imports Ray twice and torch once: three to four seconds of a CPU, which the
ranks on the same cores miss. Ray lets a runtime environment name the program that stands for
`python` (`py_executable`). Here that is `launch.py`, which asks a server for a fork (`serve.py`),
and starts the server if there is none.
"""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from .launch import virtual_environment

_SAME_PYTHON = {"env_vars", "working_dir", "py_modules", "config"}
"""What a runtime environment may have. Others bring a Python of their own, or a program that starts
it (pip, uv, conda, a container, a profiler), or run something before torch is imported."""

_KILLS_ORPHANS = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
"""With it a raylet kills processes whose parents have ended, the server's among them."""


def forked(
    environment: Mapping[str, Any], num_cpus: float, modules: Sequence[str]
) -> dict[str, Any]:
    """Ray's runtime environment of a worker that is forked, on a node that this process has
    started; `environment` itself where it cannot be.

    num_cpus: of the worker. modules: which it is to have.
    """
    of_job = ray.get_runtime_context().runtime_env
    same_python = {*environment, *of_job} <= _SAME_PYTHON
    if not same_python or os.environ.get(_KILLS_ORPHANS) or not _can_watch():
        return dict(environment)
    launch = Path(__file__).with_name("launch.py")
    threads = str(max(1, int(num_cpus)))  # As Ray has it.
    words = [sys.executable, "-S", str(launch), uuid.uuid4().hex, virtual_environment(os.environ)]
    words += [str(os.getpid()), threads, ",".join(modules)]
    return {**environment, "py_executable": shlex.join(words)}


def _can_watch() -> bool:
    """Whether a server can wait for the end of this process: on Linux, from 5.3 on, where Python
    was not built for older ones (conda's 3.11)."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True
