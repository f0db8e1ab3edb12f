"""The systems under test: each is a command that trains the workload, and what coordinates it.

To add one, write a program that takes a Workload (workload.py) as its last argument, trains it with
`num_workers` ranks, logs "process" and "step", and ends when every rank has called `finish`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .workload import Workload

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class System:
    """command: that trains a workload. is_coordinator: whether a process coordinates the ranks, by
    its command line and whether it is the command's own process."""

    name: str
    command: Callable[[Workload], list[str]]
    is_coordinator: Callable[[str, bool], bool]


def _ours(way: str) -> Callable[[Workload], list[str]]:
    program = str(_HERE / "with_chorusline.py")
    return lambda workload: [sys.executable, program, way, workload.as_json()]


def _torchrun(workload: Workload) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(workload.num_workers), "--max-restarts", "1000"),
        *("--monitor-interval", "0.1"),
        *(str(_HERE / "with_torchrun.py"), workload.as_json()),
    ]


def _ray_train(workload: Workload) -> list[str]:
    return [sys.executable, str(_HERE / "with_ray_train.py"), workload.as_json()]


def _torchft(workload: Workload) -> list[str]:
    return [sys.executable, str(_HERE / "with_torchft.py"), workload.as_json()]


def _is_driver(command: str, is_root: bool) -> bool:
    return command.startswith("ray::Driver")


SYSTEMS = {
    one.name: one
    for one in (
        System("chorusline zero", _ours("zero"), _is_driver),
        System("chorusline plain", _ours("plain"), _is_driver),
        System("chorusline steps", _ours("steps"), _is_driver),
        System(
            "ray-train checkpoints",
            _ray_train,
            lambda command, is_root: command.startswith("ray::TrainController"),
        ),
        System("torchrun checkpoints", _torchrun, lambda command, is_root: is_root),
        System("torchft", _torchft, lambda command, is_root: is_root),
    )
}
