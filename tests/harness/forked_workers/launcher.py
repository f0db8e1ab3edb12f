"""What a node runs to start a worker, instead of Ray's setup_worker.py: it asks for a fork.

It imports nothing that costs. A worker whose environment says what Python or a library reads as it
starts, or that is to run with another Python, is started as Ray does it; one that Chorusline would
have forked by a server of its own (actors/forking) is forked here.
"""

# ruff: noqa: PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import json
import os
import random
import sys

from asking import asked

READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "TORCH")


def forks(flags: dict[str, str], context: dict) -> bool:
    executable = context.get("py_executable") or sys.executable
    return (
        flags.get("--language", "PYTHON") == "PYTHON"
        and (executable == sys.executable or "/actors/forking/launch.py " in executable)
        and not context.get("command_prefix")
        and not context.get("override_worker_entrypoint")
        and not any(name.startswith(READ_AT_START) for name in context.get("env_vars") or {})
    )


def main() -> None:
    program, *arguments = sys.argv[1:]
    ours = ("--serialized-runtime-env-context", "--language")
    flags = dict(one.partition("=")[::2] for one in arguments if one.startswith("--"))
    context = json.loads(flags.get(ours[0]) or "{}")
    folder = os.environ.get("CHORUSLINE_TESTS_FORK_SERVERS", "")
    try:
        servers = [one for one in os.listdir(folder) if one.isdigit()] if folder else []
    except FileNotFoundError:
        servers = []
    is_forked = bool(servers) and forks(flags, context)
    if servers:
        # One write to the end of a file: it is whole, whoever else writes.
        with open(os.path.join(folder, "starts"), "a") as starts:
            starts.write("forked\n" if is_forked else "started\n")
    if not is_forked:
        import ray

        setup = os.path.join(os.path.dirname(ray.__file__), "_private/workers/setup_worker.py")
        os.execv(sys.executable, [sys.executable, setup, *sys.argv[1:]])
    environment = dict(os.environ)
    for name, value in (context.get("env_vars") or {}).items():
        environment[name] = os.path.expandvars(value)
    of_worker = [program, *(one for one in arguments if not one.startswith(ours))]
    with asked(os.path.join(folder, random.choice(servers)), of_worker, environment) as answers:
        answers.recv(64)


main()
