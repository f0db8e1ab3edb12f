"""torchft's training, a replica of one rank each: what torchft by itself and Ray Train's with
TorchftConfig have in common.

A replica's samples are its own, as in torchft's example: what belongs to steps in which it is away
is used by nobody. The gradients go through `Manager.allreduce`, since torchft's wrapper of a model
fails an assertion in the surviving replicas when Gloo reports that one is lost (torchft 0.2.0,
ddp.py: `assert fut._fut`), so that all would begin from nothing.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from .workload import Ledger, Workload

_TIMEOUT = timedelta(seconds=5)
LIGHTHOUSE = {
    "min_replicas": 1,
    "join_timeout_ms": 1000,
    "quorum_tick_ms": 100,
    "heartbeat_timeout_ms": 1000,
}


def train_replica(workload: Workload, replica: int, lighthouse: str) -> None:
    """One replica, to the end of the training. lighthouse: its address."""
    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo

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
    optim = Optimizer(manager, plain)
    while (step := manager.current_step()) < workload.num_steps:
        if any(Path(workload.folder).glob("parameters-*")):
            break  # The others have finished: this replica would train alone, from the beginning.
        optim.zero_grad()
        first = step * workload.global_batch + replica * workload.batch
        last = min(first + workload.batch, workload.num_samples)
        workload.work(replica, module)
        module(torch.arange(first, max(first, last))).backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
            manager.allreduce(parameter.grad).wait()
        optim.step()
        if manager.current_step() > step:
            workload.log("step", replica, manager.current_step())
    else:
        workload.finish(replica, module)
    manager.shutdown()


def _meet(workload: Workload) -> None:
    """Return when every replica has been there once: the first would begin without the rest."""
    while len({*Path(workload.folder).glob("log-*")}) < workload.num_workers:
        time.sleep(0.02)
