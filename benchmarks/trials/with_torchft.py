"""torchft by itself: replicas of one rank each, over Gloo, with a lighthouse.

A replica that is lost is started again by this program, as a scheduler would, and gets the state
from the others. A replica's samples are its own, as in torchft's example: what belongs to steps in
which it is away is used by nobody.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.trials.workload import Ledger, Workload

_TIMEOUT = timedelta(seconds=5)


def train(workload: Workload, replica: int, lighthouse: str) -> None:
    """One replica, to the end of the training."""
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    module = Ledger(workload.num_samples)
    plain = torch.optim.SGD(module.groups())

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        plain.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optim": plain.state_dict()},
        min_replica_size=1,
        init_sync=False,  # All begin with zeros.
        timeout=_TIMEOUT,
        quorum_timeout=2 * _TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
    )
    workload.log("process", replica)
    _meet(workload)
    model, optim = DistributedDataParallel(manager, module), Optimizer(manager, plain)
    while (step := manager.current_step()) < workload.num_steps:
        optim.zero_grad()
        first = step * workload.global_batch + replica * workload.batch
        last = min(first + workload.batch, workload.num_samples)
        time.sleep(workload.batch_s)
        model(torch.arange(first, max(first, last))).backward()
        optim.step()
        if manager.current_step() > step:
            workload.log("step", replica, manager.current_step())
    workload.finish(replica, module)
    manager.shutdown()


def _meet(workload: Workload) -> None:
    """Return when every replica has been there once: the first would begin without the rest."""
    while len({*Path(workload.folder).glob("log-*")}) < workload.num_workers:
        time.sleep(0.02)


def main() -> None:
    workload = Workload.of(sys.argv[-1])
    if len(sys.argv) == 4:
        train(workload, int(sys.argv[1]), sys.argv[2])
        return
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=1000,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=1000,
    )

    def start(replica: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, str(replica), lighthouse.address(), sys.argv[-1]]
        return subprocess.Popen(command)

    replicas = {number: start(number) for number in range(workload.num_workers)}
    while replicas:
        time.sleep(0.05)
        for number, process in list(replicas.items()):
            if process.poll() == 0:
                del replicas[number]
            elif process.poll() is not None:
                replicas[number] = start(number)
        if any(_has_finished(workload, number) for number in range(workload.num_workers)):
            # Whoever comes now would train alone, from the beginning.
            for number in [n for n, one in replicas.items() if one.poll() not in (None, 0)]:
                del replicas[number]
    with contextlib.suppress(Exception):
        lighthouse.shutdown()
    os._exit(0)  # Threads of the lighthouse stay otherwise.


def _has_finished(workload: Workload, replica: int) -> bool:
    return (Path(workload.folder) / f"parameters-{replica}.pt").exists()


if __name__ == "__main__":
    main()
