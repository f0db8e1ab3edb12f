"""Training on torch.distributed over our groups against the same over Gloo, in alternation.

    python -m benchmarks.speed.torch_backend [--json] [--sizes 2M,25M] [--ranks 2]

Stock DDP, FSDP2 and ZeroRedundancyOptimizer, unmodified, on both backends in the same processes:
linear layers, batch 16, AdamW, one thread a rank. And single operations of torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import chorusline as cl
from benchmarks.alternation import alternate, by_time, finish, parser, spawn, table
from benchmarks.speed.step import _BATCH, _FLAGS, _WIDTHS, make_model

_BACKENDS = ("chorusline", "gloo")
_SIZES = {"4 B": 1, "64 KiB": 16384, "1 MiB": 1 << 18, "16 MiB": 1 << 22}


def init(rank: int, num_ranks: int, store_path: str) -> dict[str, Any]:
    """A process group of each backend; the default one is ours."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    assert cl.__version__  # Importing it is what makes the backend known.
    store = dist.FileStore(store_path, num_ranks)
    dist.init_process_group("chorusline", store=store, rank=rank, world_size=num_ranks)
    return {"chorusline": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}


def ddp(size: str, group: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(make_model(size), process_group=group)
    return model, torch.optim.AdamW(model.parameters(), **_FLAGS)


def zero(size: str, group: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(make_model(size), process_group=group)
    return model, ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, **_FLAGS
    )


def fsdp2(size: str, group: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model(size)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), **_FLAGS)


def steps_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, num_steps: int
) -> Callable[[], None]:
    def run() -> None:
        for _ in range(num_steps):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def measure_training(rank: int, num_ranks: int, store_path: str, size: str) -> dict[str, float]:
    """Median seconds of a step, by kind and backend."""
    groups = init(rank, num_ranks, store_path)
    num_steps = 10 if size == "2M" else 3
    batch = torch.randn(_BATCH, _WIDTHS[size][0])
    medians: dict[str, float] = {}
    for kind in (ddp, zero, fsdp2):
        ways = {
            f"{kind.__name__} {backend}": steps_of(*kind(size, groups[backend]), batch, num_steps)
            for backend in _BACKENDS
        }
        medians |= alternate(ways, rounds=7, calls=1, warm_up=2)
    dist.barrier()
    dist.destroy_process_group()
    return {name: seconds / num_steps for name, seconds in medians.items()}


def measure_operations(rank: int, num_ranks: int, store_path: str) -> dict[str, float]:
    """Median seconds of an operation, by size and backend."""
    groups = init(rank, num_ranks, store_path)
    medians: dict[str, float] = {}
    for name, numel in _SIZES.items():
        tensor = torch.zeros(numel)
        ways: dict[str, Callable[[], object]] = {
            f"all_reduce {name} {backend}": lambda g=group, t=tensor: dist.all_reduce(t, group=g)
            for backend, group in groups.items()
        }
        medians |= alternate(ways, rounds=9, calls=20 if numel < 1 << 20 else 5)
    dist.barrier()
    dist.destroy_process_group()
    return medians


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--sizes", default=",".join(_WIDTHS))
    args = flags.parse_args()
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {}
    rows = []
    runs = {f"{size} parameters": (measure_training, size) for size in args.sizes.split(",")}
    for title, (function, *arguments) in {**runs, "operations": (measure_operations,)}.items():
        by_rank = spawn(function, args.ranks, *arguments)
        slowest = {name: max((one[name] for one in by_rank), key=by_time) for name in by_rank[0]}
        figures[title] = {"medians_s": slowest}
        for name in [name for name in slowest if name.endswith(" chorusline")]:
            case = name.removesuffix(" chorusline")
            label = case if title == "operations" else f"{case}/{arguments[0]}"
            ours, gloo = slowest[name], slowest[f"{case} gloo"]
            ratios[label] = ours / gloo
            rows.append((label, f"{ours * 1e3:.3f}", f"{gloo * 1e3:.3f}", f"{ours / gloo:.2f}"))
    title = f"torch.distributed, {args.ranks} ranks: ms of a step, or of an operation"
    table(title, ("case", "ours", "gloo", "ours/gloo"), rows)
    finish(args, ratios, figures)


if __name__ == "__main__":
    main()
