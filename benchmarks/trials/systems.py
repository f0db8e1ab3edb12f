"""The systems under test: each is a command that trains the workload, and what coordinates it.

To add one, write a program that takes a Workload (workload.py) as its last argument, trains it with
`num_workers` ranks, logs "process" and "step", and ends when every rank has called `finish`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from .workload import Workload


@dataclass(frozen=True)
class System:
    """command: that trains a workload. is_coordinator: whether a process coordinates the ranks, by
    its command line and whether it is the command's own process. needs: a module that is not among
    our extras."""

    name: str
    command: Callable[[Workload], list[str]]
    is_coordinator: Callable[[str, bool], bool]
    needs: str = ""

    def why_not(self) -> str | None:
        """The reason why this system cannot run here; None if it can."""
        if not self.needs:
            return None
        command = [sys.executable, "-c", f"import {self.needs}"]
        tried = subprocess.run(command, capture_output=True, text=True)
        if not tried.returncode:
            return None
        return f"`import {self.needs}` ends with {tried.stderr.strip().splitlines()[-1]}"


def _ours(way: str, spares: int = 1) -> Callable[[Workload], list[str]]:
    program = ("-m", "benchmarks.trials.with_chorusline")
    return lambda workload: [sys.executable, *program, way, str(spares), workload.as_json()]


def _torchrun(workload: Workload) -> list[str]:
    return [
        # Otherwise the ranks of a restart read the addresses of those before: pytorch#135712.
        *("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(workload.num_workers), "--max-restarts", "1000"),
        *("--monitor-interval", "0.1"),
        *("-m", "benchmarks.trials.with_torchrun", workload.as_json()),
    ]


def _program(name: str) -> Callable[[Workload], list[str]]:
    module = f"benchmarks.trials.{name}"
    return lambda workload: [sys.executable, "-m", module, workload.as_json()]


def _is_driver(command: str, is_root: bool) -> bool:
    return command.startswith("ray::Driver")


def _is_controller(command: str, is_root: bool) -> bool:
    return command.startswith("ray::TrainController")


WITHOUT_SPARES = System("chorusline", _ours("zero", spares=0), _is_driver)
"""As a session is by default."""

SYSTEMS = {
    one.name: one
    for one in (
        System("chorusline zero", _ours("zero"), _is_driver),
        System("chorusline plain", _ours("plain"), _is_driver),
        System("chorusline steps", _ours("steps"), _is_driver),
        System("ray-train checkpoints", _program("with_ray_train"), _is_controller),
        System("ray-train torchft", _program("with_ray_torchft"), _is_controller, "torchft"),
        System("torchrun checkpoints", _torchrun, lambda command, is_root: is_root),
        System(
            "torchft",
            _program("with_torchft"),
            lambda command, is_root: "with_torchft lighthouse" in command,
            "torchft",
        ),
    )
}
