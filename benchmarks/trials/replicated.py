"""torchft's training, a replica of one rank each: what torchft by itself and Ray Train's with
TorchftConfig have in common.

A step has a batch for each of `num_workers` replicas. Where fewer take part in it, the batches of
the others are used by nobody; where more do, those that are left over hand in zeros, as spares.
(torchft's FIXED_WITH_SPARES does the latter as well, but counts no step of fewer replicas.)
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
    "join_timeout_ms": 300,
    "quorum_tick_ms": 100,
    "heartbeat_timeout_ms": 300,
}
"""Short waits, as they are a part of every recovery; a step of the workload is shorter still."""


def train_replica(workload: Workload, replica: int, lighthouse: str) -> None:
    """One replica, to the end of the training. lighthouse: its address."""
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
        if any(Path(workload.folder).glob("parameters-*")):
            break  # The others have finished: this replica would train alone, from the beginning.
        optim.zero_grad()  # It asks the lighthouse who takes part.
        workload.work(replica, module)
        place, number = manager.participating_rank(), manager.num_participants()
        has_batch = place is not None and place < workload.num_workers  # None: it is being healed.
        first = step * workload.global_batch + (place or 0) * workload.batch
        last = min(first + workload.batch, workload.num_samples) if has_batch else first
        # The manager divides by all that take part; a step is the mean over those with a batch.
        scale = number / min(number, workload.num_workers)
        model(torch.arange(first, max(first, last)), scale).backward()
        optim.step()
        if has_batch and manager.current_step() > step:
            workload.log("step", replica, manager.current_step())
    else:
        workload.finish(replica, module)
    manager.shutdown()


def _meet(workload: Workload) -> None:
    """Return when every replica has been there once: the first would begin without the rest."""
    while len({*Path(workload.folder).glob("log-*")}) < workload.num_workers:
        time.sleep(0.02)
