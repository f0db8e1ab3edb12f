"""A whole training step against torch's: DDP + AdamW, and DDP + ZeroRedundancyOptimizer.

    python -m benchmarks.speed.step [--json] [--sizes 2M,25M] [--ranks 2] [--rounds 7]

Models with little arithmetic per parameter (linear layers, batch 16), one thread a rank, the same
optimizer flags on both sides, in alternation in the same processes. The peer runs over Gloo, with
its gradients and parameters as views of its buckets, which is faster than its default. The
medians are those of all rounds after the warm-up, on the rank where they are largest; beside them
stand the quartiles. A way in which ours is slower than torch's is listed below the ratios.
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
from benchmarks.alternation import by_time, finish, parser, quartiles, spawn, table, timed
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of

_WIDTHS = {"2M": (512, 8), "25M": (1024, 24)}  # width and number of square layers
_BATCH = 16
_PEERS = ("zero/", "zero_vs_ddp/", "ddp/", "zero_in_join/", "ddp_in_join/")  # ratios to torch
_FLAGS: dict[str, Any] = {"lr": 1e-4}


def make_model(size: str) -> torch.nn.Module:
    torch.manual_seed(0)
    width, num_layers = _WIDTHS[size]
    layers: list[torch.nn.Module] = []
    for _ in range(num_layers):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def steps_of(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    join: Callable[[], Any],
    batch: torch.Tensor,
    num_steps: int,
) -> Callable[[], None]:
    def run() -> None:
        with join():
            for _ in range(num_steps):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    return run


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def measure(rank: int, num_ranks: int, store_path: str, size: str, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_path + "-gloo", num_ranks),
        rank=rank,
        world_size=num_ranks,
    )
    group = cl.Group.create(cl.FileStore(store_path), rank, num_ranks)
    num_steps = 10 if size == "2M" else 3
    batch = torch.randn(_BATCH, _WIDTHS[size][0])

    ddp = cl.DistributedDataParallel(make_model(size), group)
    adamw = torch.optim.AdamW(ddp.parameters(), **_FLAGS)
    sharded = cl.DistributedDataParallel(make_model(size), group)
    zero = cl.ZeroRedundancyOptimizer(sharded, torch.optim.AdamW, **_FLAGS)
    guarded = cl.DistributedDataParallel(make_model(size), group)
    replicated = cl.ZeroRedundancyOptimizer(guarded, torch.optim.AdamW, replicas=2, **_FLAGS)
    torch_ddp = TorchDDP(make_model(size), gradient_as_bucket_view=True)
    torch_adamw = torch.optim.AdamW(torch_ddp.parameters(), **_FLAGS)
    torch_sharded = TorchDDP(make_model(size), gradient_as_bucket_view=True)
    torch_zero = TorchZero(
        torch_sharded.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        **_FLAGS,
    )
    alone = make_model(size)
    alone_adamw = torch.optim.AdamW(alone.parameters(), **_FLAGS)

    def way(model: Any, optimizer: Any, join: Callable[[], Any] = nullcontext) -> Any:
        return steps_of(model, optimizer, join, batch, num_steps)

    engine = optimizer_engine_of(zero)

    def ballots() -> None:
        for _ in range(num_steps):
            engine._ballot.hold(engine._vote(True))

    ways = {
        "no communication": way(alone, alone_adamw),
        "zero": way(sharded, zero),
        "zero, 2 replicas": way(guarded, replicated),
        "the ballot alone": ballots,
        "torch zero": way(torch_sharded, torch_zero),
        "ddp": way(ddp, adamw),
        "torch ddp": way(torch_ddp, torch_adamw),
        "zero in Join": way(sharded, zero, lambda: cl.Join([sharded, zero])),
        "torch zero in Join": way(
            torch_sharded, torch_zero, lambda: TorchJoin([torch_sharded, torch_zero])
        ),
        "ddp in Join": way(ddp, adamw, lambda: cl.Join([ddp])),
        "torch ddp in Join": way(torch_ddp, torch_adamw, lambda: TorchJoin([torch_ddp])),
    }
    # Of a model's first 16 steps five sum the gradients to find uncounted writes, later ones hardly
    # ever (`Reducer._takes_sums`).
    times = timed(ways, rounds=rounds, calls=1, warm_up=3)

    def sent_by(name: str) -> float:
        """Elements per step."""
        before = group.statistics.snapshot()
        ways[name]()
        return group.statistics.since(before).total_elements_sent() / num_steps

    assert zero.shard_optimizer is not None and replicated.shard_optimizer is not None
    result = {
        "quartiles_s": {
            name: [seconds / num_steps for seconds in quartiles(of_way)]
            for name, of_way in times.items()
        },
        "elements_sent": sent_by("zero"),
        "elements_sent_with_2_replicas": sent_by("zero, 2 replicas"),
        "parameters": sum(p.numel() for p in alone.parameters()),
        "state_bytes": state_bytes(zero.shard_optimizer),
        "state_bytes_with_2_replicas": state_bytes(replicated.shard_optimizer),
        "replicated_state_bytes": state_bytes(adamw),
    }
    group.barrier().wait()
    dist.destroy_process_group()
    group.close()
    return result


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--sizes", default=",".join(_WIDTHS))
    flags.add_argument("--rounds", type=int, default=7)
    args = flags.parse_args()
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {}
    for size in args.sizes.split(","):
        by_rank = spawn(measure, args.ranks, size, args.rounds)
        first = by_rank[0]
        spreads = {
            name: max(
                (one["quartiles_s"][name] for one in by_rank),
                key=lambda quarters: by_time(quarters[1]),
            )
            for name in first["quartiles_s"]
        }
        step_s = {name: median for name, (_, median, _) in spreads.items()}
        ratios |= {
            f"zero/{size}": step_s["zero"] / step_s["torch zero"],
            f"replicas_2/{size}": step_s["zero, 2 replicas"] / step_s["zero"],
            f"ballot/{size}": step_s["the ballot alone"] / step_s["zero"],
            f"zero_vs_ddp/{size}": step_s["zero"] / step_s["torch ddp"],
            f"ddp/{size}": step_s["ddp"] / step_s["torch ddp"],
            f"zero_in_join/{size}": step_s["zero in Join"] / step_s["torch zero in Join"],
            f"ddp_in_join/{size}": step_s["ddp in Join"] / step_s["torch ddp in Join"],
            f"join_cost/{size}": step_s["zero in Join"] / step_s["zero"],
        }
        expected = 2 * first["parameters"] * (args.ranks - 1) / args.ranks
        with_replicas = expected + first["parameters"] / args.ranks
        figures[size] = {
            **first,
            "medians_s": step_s,
            "quartiles_s": spreads,
            "elements_sent_over_2P(N-1)/N": first["elements_sent"] / expected,
            "elements_sent_with_2_replicas_over_expected": (
                first["elements_sent_with_2_replicas"] / with_replicas
            ),
            "state_share": [one["state_bytes"] / one["replicated_state_bytes"] for one in by_rank],
            "state_share_with_2_replicas": [
                one["state_bytes_with_2_replicas"] / one["replicated_state_bytes"]
                for one in by_rank
            ],
        }
        table(
            f"{size} parameters ({first['parameters']}), {args.ranks} ranks, ms a step; "
            f"torch {torch.__version__}",
            ("way", "ms", "quartiles"),
            [
                (name, f"{median * 1e3:.2f}", f"({low * 1e3:.2f}, {high * 1e3:.2f})")
                for name, (low, median, high) in spreads.items()
            ],
        )
        print(
            f"elements sent per step and rank: {first['elements_sent']:.0f}, "
            f"{first['elements_sent'] / expected:.4f} of 2P(N-1)/N; optimizer state per rank: "
            + ", ".join(f"{share:.4f}" for share in figures[size]["state_share"])
            + " of the replicated one\n"
            f"with 2 replicas: {first['elements_sent_with_2_replicas']:.0f} elements, "
            f"{first['elements_sent_with_2_replicas'] / with_replicas:.4f} of 2P(N-1)/N + P/N; "
            "optimizer state: "
            + ", ".join(f"{x:.4f}" for x in figures[size]["state_share_with_2_replicas"])
        )
    table("ratios", ("case", "ratio"), [(name, f"{ratio:.3f}") for name, ratio in ratios.items()])
    lost = [name for name, ratio in ratios.items() if name.startswith(_PEERS) and ratio > 1]
    print(f"slower than torch: {', '.join(lost) or 'none'}")
    finish(args, ratios, figures)


if __name__ == "__main__":
    main()
