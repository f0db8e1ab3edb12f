"""torchft's Manager, over a process group of this backend that it reconfigures."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import Ranks
from tests.harness.torch_groups import tcp_store
from tests.references.training import batches_of, loss_of, make_model

torchft = pytest.importorskip("torchft", reason="torchft is not installed: torchft-nightly")
from torchft.coordination import LighthouseServer  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(dist.ProcessGroup, "reconfigure"),
        reason=f"torch {torch.__version__} has no ProcessGroup.reconfigure; torch 2.14 has",
    ),
]

VICTIM = 1
LIMIT = timedelta(seconds=30)


def replica(rank, lighthouse, port, is_new=False):
    """A replica group of one process; rank VICTIM dies once, after its third step."""
    from torchft.ddp import DistributedDataParallel
    from torchft.optim import OptimizerWrapper

    shared = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    own = tcp_store()
    dist.init_process_group(
        "chorusline",
        store=shared,
        rank=rank.rank,
        world_size=rank.size,
        timeout=LIMIT,
        enable_reconfigure=True,
    )
    pg = dist.group.WORLD
    net = make_model(torch.float32)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def load(state):
        net.load_state_dict(state["net"])
        sgd.load_state_dict(state["sgd"])

    manager = torchft.Manager(
        pg=pg,
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
        replica_id=f"replica {rank.rank}",
        store_addr="127.0.0.1",
        store_port=own.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=LIMIT,
        quorum_timeout=LIMIT,
    )
    model, optimizer = DistributedDataParallel(manager, net), OptimizerWrapper(manager, sgd)
    batches = batches_of(rank.rank, 1000, torch.float32)
    sizes = set()
    last = 10**9
    while manager.current_step() < last:
        step = manager.current_step()
        if rank.rank == VICTIM and step == 3 and not is_new:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(model, batches[step]).backward()
        optimizer.step()
        if manager.current_step() > step:
            sizes.add(pg.size())
        if is_new and manager.current_step() > step and last == 10**9:
            rank.store.set("last step", str(manager.current_step() + 5))
        if rank.store.check(["last step"]):
            last = int(rank.store.get("last step"))
    step = manager.current_step()
    rank.say("over")
    rank.store.wait([f"said/over/{other}" for other in range(rank.size)], 60)
    manager.shutdown(wait=False)
    dist.destroy_process_group()
    return step, sizes, [parameter.tolist() for parameter in net.parameters()]


@pytest.mark.timeout(240)
def test_torchft_trains_over_our_process_group_through_a_sigkill_and_heals_a_new_replica(tmp_path):
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    store = tcp_store()
    address = lighthouse.address()
    try:
        with Ranks(replica, 3, tmp_path, "shared-memory", address, store.port) as ranks:
            ranks._processes[VICTIM].join(120)
            ranks.start(VICTIM, address, store.port, True)
            first, *others = ranks.results(timeout_s=120)
    finally:
        lighthouse.shutdown()
    step, sizes, parameters = first
    assert {2, 3} <= sizes, "trained with all replicas, and with those that were left"
    for other, _, theirs in others:
        assert other == step
        assert theirs == parameters
