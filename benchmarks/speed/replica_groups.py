"""Seconds from a SIGKILL to the next step of replicas of a fully_shard model, beside torchft.

    python -m benchmarks.speed.replica_groups [--rounds 3] [--kills 3] [--seed 0] [--json]

Four ranks train two replicas of one model, of two ranks each: torch's `fully_shard` in both. In
each round each system is started, and one of its ranks after another is killed: which one, and at
what instant, is drawn by the seed. Timed are the second step that nobody had taken before, as one
may have been under way, with whichever ranks are left, and the second one of all four. Counted are
the forward and backward passes of a rank that is left whose step was not taken.

Ours: `Session(num_workers=(2, 4), replica_size=2)` with and without a spare worker, on a cluster
that is up. torchft: a Manager in each replica, whose gradients travel by the hook that fully_shard
has for that, and torchrun, which starts a replica again that has lost a rank. It has no spare.
`pip install torchft-nightly==2026.10.26` first; where it cannot be imported, its row says "failed".
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

import ray
import torch
from ray import cloudpickle
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

import chorusline as cl
from benchmarks.alternation import as_installed, attempt, cell, finish, median_of, parser, table
from benchmarks.speed.recovery_training import PATIENCE_S, STEP_S, Log, batch_of, make_model
from benchmarks.speed.startup import cluster
from benchmarks.trials.replicated import LIGHTHOUSE

cloudpickle.register_pickle_by_value(sys.modules[__name__])

RANKS, SIZE = 4, 2
SETTLE_S = 6.0
"""After all ranks take steps again, until the next kill: a new spare worker has started by then."""

FAILED = dict.fromkeys(("step_s", "all_s", "passes_again"), math.nan)
"""Of a kill that torchft did not survive, and of those that would have followed it."""

_TIMEOUT = timedelta(seconds=5)
_PROGRAM = (sys.executable, "-m", "benchmarks.speed.replica_groups")


def sharded(mesh: DeviceMesh) -> torch.nn.Module:
    model = make_model()
    for part in model.children():
        if next(part.parameters(), None) is not None:
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def is_over(folder: Path) -> bool:
    return (folder / "stop").exists()


# -- ours ------------------------------------------------------------------------------------------


def train(ctx: cl.Context, folder: Path) -> None:
    torch.set_num_threads(1)
    log = Log(str(folder / "logs"), str(os.getpid()))
    ctx.init_torch_distributed()
    shape = (ctx.world_size // SIZE, SIZE)
    model = sharded(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)  # It counts the steps.
    for part in ("model", model), ("optimizer", optimizer), ("schedule", schedule):
        ctx.register(*part)
    for _ in ctx.epochs(1):
        with cl.Join([model], step_along=[optimizer, schedule], skew_warning=None):
            while not is_over(folder):
                step = schedule.last_epoch
                log.note("pass", step + 1)
                time.sleep(STEP_S)
                model(batch_of(ctx.rank, step)).square().mean().backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                log.note(f"step-of-{ctx.world_size}", schedule.last_epoch)


async def our_session(folder: Path, spares: int) -> None:
    ray.init(log_to_driver=False)
    async with cl.Session(
        (SIZE, RANKS),
        replica_size=SIZE,
        spares=spares,
        max_failures=None,
        resources_per_worker={"CPU": 0.1},
    ) as session:
        await session.run(train, folder=folder)


# -- torchft ---------------------------------------------------------------------------------------


def torchft_replicas(folder: Path) -> None:
    """A lighthouse, and a torchrun for each replica, which starts both of its ranks again."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", **LIGHTHOUSE)
    agents = []
    for replica in range(RANKS // SIZE):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(SIZE)),
            *("--standalone", "--max-restarts", "1000", "--monitor-interval", "0.1"),
            *(*_PROGRAM[1:], "--as", "torchft rank", "--folder", str(folder)),
        ]
        told = {"LIGHTHOUSE": lighthouse.address(), "REPLICA": str(replica)}
        # Otherwise the ranks of a restart read the addresses of those before: pytorch#135712.
        told["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        agents.append(subprocess.Popen(command, env={**os.environ, **told}))
    for agent in agents:
        agent.wait()
    lighthouse.shutdown()


def torchft_rank(folder: Path) -> None:
    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    log = Log(str(folder / "logs"), str(os.getpid()))
    dist.init_process_group("gloo", timeout=2 * _TIMEOUT)
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("shard",))
    model = sharded(mesh)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def state() -> dict[str, Any]:
        shards = {name: _local(value) for name, value in model.state_dict().items()}
        moments = [{k: _local(v) for k, v in plain.state[p].items()} for p in model.parameters()]
        return {"model": shards, "moments": moments}

    def load(state: dict[str, Any]) -> None:
        for name, value in model.state_dict().items():
            _local(value).copy_(state["model"][name])
        for parameter, moments in zip(model.parameters(), state["moments"], strict=True):
            plain.state[parameter] = {
                name: DTensor.from_local(value, mesh, [Shard(0)]) if value.dim() else value
                for name, value in moments.items()
            }

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=_TIMEOUT,
        quorum_timeout=2 * _TIMEOUT,
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        replica_id=f"replica_{os.environ['REPLICA']}",
    )

    def reduce(gradients: torch.Tensor) -> None:
        manager.allreduce(gradients).wait()

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(reduce)
    optimizer = Optimizer(manager, plain)
    while not is_over(folder):
        optimizer.zero_grad()  # It asks the lighthouse who takes part.
        step = manager.current_step()
        log.note("pass", step + 1)
        time.sleep(STEP_S)
        place = (manager.participating_rank() or 0) * SIZE + dist.get_rank()
        model(batch_of(place, step)).square().mean().backward()
        optimizer.step()
        if manager.current_step() > step:
            log.note(f"step-of-{manager.num_participants() * SIZE}", manager.current_step())
    os._exit(0)  # The other replica may be in a step with this one.


def _local(value: Any) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


# -- the kills -------------------------------------------------------------------------------------

WAYS = {
    "a spare worker": ("ours", "--spares", "1"),
    "no spare worker": ("ours",),
    "torchft": ("torchft",),
}

Entry = tuple[str, float, str, int]
"""As Log.read says: pid, seconds, word, number."""


def strike(folder: Path, process: subprocess.Popen[bytes], draw: random.Random) -> dict[str, float]:
    """Kill one of four ranks that take steps, and wait until four do."""

    def entries() -> list[Entry]:
        return list(Log.read(str(folder / "logs")))

    def until(condition: Callable[[], Any]) -> Any:
        give_up_at = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError((folder / "output").read_text()[-1000:])
            time.sleep(0.02)
        return found

    def ranks(since: float) -> set[str]:
        word = f"step-of-{RANKS}"
        return {pid for pid, at, said, _ in entries() if said == word and at > since}

    began_at = time.monotonic()
    until(lambda: len(ranks(began_at)) == RANKS)
    time.sleep(SETTLE_S + draw.random())
    living = sorted(ranks(time.monotonic() - 1.0), key=int)
    victim = draw.choice(living)
    killed_at = time.monotonic()
    os.kill(int(victim), signal.SIGKILL)
    before = max(n for _, at, said, n in entries() if said.startswith("step") and at < killed_at)

    def new(word: str) -> list[float]:
        """When the second step that nobody had taken was taken, by the ranks that take it."""
        told = entries()
        return [at for _, at, said, n in told if said.startswith(word) and n >= before + 2]

    next_at = min(until(lambda: new("step")))
    all_at = min(until(lambda: new(f"step-of-{RANKS}")))
    left = [pid for pid in living if pid != victim]
    again = max(
        passes_again([one for one in entries() if one[0] == pid], killed_at) for pid in left
    )
    return {"step_s": next_at - killed_at, "all_s": all_at - killed_at, "passes_again": again}


def passes_again(entries: list[Entry], since: float) -> int:
    """The passes of one rank after which its step was not taken, and which it made again."""
    again, passes = 0, 0
    for _, at, word, _ in entries:
        if word == "pass":
            passes += 1
        else:
            again += passes - 1 if at > since else 0
            passes = 0
    return again


def of_one_run(way: str, kills: int, seed: int, found: list[dict[str, float]]) -> None:
    """found: to which each kill is added that the way has survived."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                [*_PROGRAM, "--as", *WAYS[way], "--folder", name],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            for _ in range(kills):
                found.append(strike(folder, process, draw))
        finally:
            (folder / "stop").touch()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main() -> None:
    os.environ.pop("RAY_ADDRESS", None)
    flags = parser("Seconds from a SIGKILL to the next step of replicas of a fully_shard model.")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--kills", type=int, default=3, help="in each run of a system")
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args()
    as_installed()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with cluster(RANKS + 1):
        for number in range(args.rounds):
            for way, of_way in found.items():
                run = partial(of_one_run, way, args.kills, args.seed + number, of_way)
                if way != "torchft":
                    run()
                    continue
                attempt(way, run, None)
                of_way += [FAILED] * (args.kills * (number + 1) - len(of_way))
    columns = {
        way: {name: [one[name] for one in of_way] for name in FAILED}
        for way, of_way in found.items()
    }
    rows = [
        [way, str(len(found[way])), *(cell(columns[way][name], max) for name in FAILED)]
        for way in WAYS
    ]
    table(
        "from SIGKILL of one of two ranks of a replica: medians (worst)",
        ["", "kills", "s to a step", "s to a step of all", "passes made again"],
        rows,
    )
    ratios = {
        f"{way}/{name}": median_of(columns[way][name]) / median_of(columns["torchft"][name])
        for way in WAYS
        if way != "torchft"
        for name in ("step_s", "all_s")
    }
    finish(args, ratios, {way: found[way] for way in WAYS})


def take_part() -> None:
    """As one of the programs of main()."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--as", dest="kind", choices=("ours", "torchft", "torchft rank"))
    flags.add_argument("--folder", type=Path)
    flags.add_argument("--spares", type=int, default=0)
    args = flags.parse_args()
    match args.kind:
        case "ours":
            asyncio.run(our_session(args.folder, args.spares))
        case "torchft":
            torchft_replicas(args.folder)
        case "torchft rank":
            torchft_rank(args.folder)


if __name__ == "__main__":
    take_part() if "--as" in sys.argv else main()
