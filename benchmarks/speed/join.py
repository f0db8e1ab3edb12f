"""What Join costs: collectives and elements per step, inside and outside, and the time of a step.

    python -m benchmarks.speed.join [--json] [--ranks 2]

Counted by the group's own statistics, for DistributedDataParallel alone and with
ZeroRedundancyOptimizer. The peer is torch's DDP, ZeroRedundancyOptimizer and Join over Gloo, in
alternation in the same processes. One thread a rank; even inputs, where Join should cost nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import chorusline as cl
from benchmarks.alternation import alternate, by_time, finish, parser, spawn, table

_STEPS = 20
_WIDTH = 256


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(
            layer
            for _ in range(6)
            for layer in (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.LayerNorm(_WIDTH))
        )
    )


def epoch_of(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    join: Callable[[], Any],
    batches: Callable[[], Any],
) -> Callable[[], None]:
    def run() -> None:
        with join():
            for batch in batches():
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    return run


def measure(rank: int, num_ranks: int, store_path: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_path + "-gloo", num_ranks),
        rank=rank,
        world_size=num_ranks,
    )
    group = cl.Group.create(cl.FileStore(store_path), rank, num_ranks)
    dataset = torch.randn(_STEPS * num_ranks, _WIDTH)
    shard = cl.Shard(dataset, 1, rank=rank, world_size=num_ranks, shuffle=False)
    mine = [dataset[i : i + 1] for i in shard.sample_ids]

    ddp = cl.DistributedDataParallel(make_model(), group)
    adamw = torch.optim.AdamW(ddp.parameters())
    sharded = cl.DistributedDataParallel(make_model(), group)
    zero = cl.ZeroRedundancyOptimizer(sharded, torch.optim.AdamW)
    torch_ddp = TorchDDP(make_model())
    torch_adamw = torch.optim.AdamW(torch_ddp.parameters())
    torch_sharded = TorchDDP(make_model())
    torch_zero = TorchZero(torch_sharded.parameters(), torch.optim.AdamW)

    ways = {
        "ddp/outside": epoch_of(ddp, adamw, nullcontext, lambda: shard),
        "ddp/inside": epoch_of(ddp, adamw, lambda: cl.Join([ddp]), lambda: shard),
        "zero/outside": epoch_of(sharded, zero, nullcontext, lambda: shard),
        "zero/inside": epoch_of(sharded, zero, lambda: cl.Join([sharded, zero]), lambda: shard),
        "torch ddp/outside": epoch_of(torch_ddp, torch_adamw, nullcontext, lambda: mine),
        "torch ddp/inside": epoch_of(
            torch_ddp, torch_adamw, lambda: TorchJoin([torch_ddp]), lambda: mine
        ),
        "torch zero/outside": epoch_of(torch_sharded, torch_zero, nullcontext, lambda: mine),
        "torch zero/inside": epoch_of(
            torch_sharded, torch_zero, lambda: TorchJoin([torch_sharded, torch_zero]), lambda: mine
        ),
    }
    counts = {}
    ways["ddp/outside"]()  # A model's first step lays its buckets out again.
    for name in ("ddp/outside", "ddp/inside", "zero/outside", "zero/inside"):
        before = group.statistics.snapshot()
        ways[name]()
        used = group.statistics.since(before)
        counts[name] = {
            "operations": {kind: n / _STEPS for kind, n in used.operations.items()},
            "elements_sent": {kind: n / _STEPS for kind, n in used.elements_sent.items()},
        }
    medians = alternate(ways, rounds=8, calls=1)
    group.barrier().wait()
    dist.destroy_process_group()
    group.close()
    num_parameters = sum(p.numel() for p in ddp.parameters())
    return {"counts": counts, "medians_s": medians, "parameters": num_parameters}


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--ranks", type=int, default=2)
    args = flags.parse_args()
    by_rank = spawn(measure, args.ranks)
    counts = by_rank[0]["counts"]
    step_s = {
        name: max((one["medians_s"][name] for one in by_rank), key=by_time) / _STEPS
        for name in by_rank[0]["medians_s"]
    }

    def told(numbers: dict[str, float]) -> str:
        return ", ".join(f"{kind} {n:g}" for kind, n in sorted(numbers.items()))

    table(
        f"per step and rank, {args.ranks} ranks, {by_rank[0]['parameters']} parameters",
        ("case", "ms", "operations", "elements sent"),
        [
            (
                name,
                f"{seconds * 1e3:.2f}",
                told(counts[name]["operations"]) if name in counts else "",
                told(counts[name]["elements_sent"]) if name in counts else "",
            )
            for name, seconds in step_s.items()
        ],
    )
    finish(
        args,
        {
            name: step_s[name] / step_s[f"torch {name}"]
            for name in ("ddp/outside", "ddp/inside", "zero/outside", "zero/inside")
        }
        | {
            f"join_cost/{kind}": step_s[f"{kind}/inside"] / step_s[f"{kind}/outside"]
            for kind in ("ddp", "zero")
        },
        {"counts": counts, "step_s": step_s, "parameters": by_rank[0]["parameters"]},
    )


if __name__ == "__main__":
    main()
