"""On GPUs: our collectives and steps against torch's ProcessGroupNCCL, DDP, ZeRO and FSDP2.

    python -m benchmarks.speed.gpu [--json] [--out FILE] [--ranks N] [--sizes 2M,25M,100M]
                             [--bytes 4B,64KiB,1MiB,16MiB,256MiB] [--rounds 9] [--device cpu]

`make bench-gpu` installs what it needs. All ways take turns in the same processes, one for each
GPU; with a single GPU two ranks share it, in turns of milliseconds: with `--ranks 1` it shows what
the calls themselves cost. Times end when the GPU has ended. Every collective is
compared with the peer's result, and every model with torch's after as many steps; what is wrong
ends the run. `--device cpu` runs the same code without a GPU, against Gloo: its figures say nothing
of GPUs. Without a GPU and without that flag it says so, and the exit status is 3.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import chorusline as cl
from benchmarks.alternation import alternate, by_time, finish, parser, spawn, table
from benchmarks.speed.gpu_machine import NO_GPU, seen, show, why_no_ranks

_WIDTHS = {"tiny": (16, 2), "2M": (512, 8), "25M": (1024, 24), "100M": (2048, 24)}
"""Width and number of square layers."""
_BYTES = {"4B": 4, "64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20, "256MiB": 256 << 20}
_BATCH = 32
_LR = 1e-4
_APART = 2e-2
"""How far apart parameters may be, as a part of the largest change of one: sums of two libraries in
two orders differ in the last bits, which AdamW's first steps make larger."""

Way = Callable[[], object]


class Wrong(Exception):
    """A result that is not the peer's."""


def measure(
    rank: int,
    num_ranks: int,
    store_path: str,
    kind: str,
    sizes: list[str],
    lengths: list[str],
    rounds: int,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    on_gpu = kind == "cuda"
    device = torch.device(kind, rank % torch.cuda.device_count()) if on_gpu else torch.device(kind)
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # First ours: where ranks share a GPU it sets what NCCL needs, which torch's NCCL reads as well.
    group = cl.Group.create(cl.FileStore(store_path), rank, num_ranks, device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(store_path + "-torch", num_ranks),
        rank=rank,
        world_size=num_ranks,
    )
    # Ranks that share a GPU have more than the machine's.
    environment = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "GLOO_"))}
    found: dict[str, Any] = {
        "collectives": {},
        "steps": {},
        "backend": group.backend,
        "environment": environment,
    }
    for length in lengths:
        found["collectives"] |= collectives(group, length, rounds)
    for size in sizes:
        found["steps"][size] = steps(group, size, rounds)
    group.barrier().wait()
    dist.destroy_process_group()
    group.close()
    return found


def settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- collectives -------------------------------------------------------------------------------


def collectives(group: cl.Group, length: str, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of one operation: {"all_reduce/4B": {"ours": …, "torch": …}, …}."""
    device, size, rank = group.device, group.size, group.rank
    numel = max(1, _BYTES[length] // 4 // size) * size
    whole = torch.arange(numel, device=device, dtype=torch.float32).remainder_(251) + rank
    part = whole[: numel // size].clone()

    def blank(like: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(like) for _ in range(2)]

    scattered, gathered, received = map(blank, (part, whole, whole))
    summed, sent = ([whole.clone(), whole.clone()] for _ in range(2))
    peer: Any = dist.group.WORLD  # Its methods are torch's fastest form.
    pairs: dict[str, tuple[Way, Way, list[torch.Tensor]]] = {
        "all_reduce": (
            lambda: group.all_reduce(summed[0]).wait(),
            lambda: peer.allreduce([summed[1]]).wait(),
            summed,
        ),
        "reduce_scatter": (
            lambda: group.reduce_scatter(scattered[0], whole).wait(),
            lambda: peer._reduce_scatter_base(scattered[1], whole).wait(),
            scattered,
        ),
        "all_gather": (
            lambda: group.all_gather(gathered[0], part).wait(),
            lambda: peer._allgather_base(gathered[1], part).wait(),
            gathered,
        ),
        "broadcast": (
            lambda: group.broadcast(sent[0], 0).wait(),
            lambda: peer.broadcast(sent[1], 0).wait(),
            sent,
        ),
        "all_to_all": (
            lambda: group.all_to_all(received[0], whole).wait(),
            lambda: peer.alltoall_base(received[1], whole, [], []).wait(),
            received,
        ),
    }
    medians = {}
    for name, (ours, peers, results) in pairs.items():
        case = f"{name}/{length}"
        ours()
        peers()
        if not torch.equal(*(result.cpu() for result in results)):
            raise Wrong(f"{case}: rank {rank} has another result than torch")
        if name == "all_reduce":
            for result in results:
                result.zero_()  # Sums grow, and arithmetic on infinities takes another time.
        calls = 20 if _BYTES[length] <= 1 << 20 else 3
        ways = {"ours": _several(ours, calls, device), "torch": _several(peers, calls, device)}
        found = alternate(ways, rounds=rounds, calls=1)
        medians[case] = {way: seconds / calls for way, seconds in found.items()}
    return medians


def _several(way: Way, calls: int, device: torch.device) -> Way:
    def run() -> None:
        for _ in range(calls):
            way()
        settled(device)

    return run


# -- steps -------------------------------------------------------------------------------------


def make_model(size: str, device: torch.device) -> torch.nn.Sequential:
    torch.manual_seed(0)
    width, num_layers = _WIDTHS[size]
    layers: list[torch.nn.Module] = []
    for _ in range(num_layers):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers).to(device)


def fsdp2(size: str, device: torch.device) -> torch.nn.Module:
    model = make_model(size, device)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def steps(group: cl.Group, size: str, rounds: int) -> dict[str, Any]:
    """Median seconds of a step by way, calls that synchronize, and how far models are apart."""
    device = group.device
    flags: dict[str, Any] = {"lr": _LR, "fused": device.type == "cuda"}
    num_steps = 10 if _WIDTHS[size][0] < 1024 else 4
    torch.manual_seed(group.rank)
    batch = torch.randn(_BATCH, _WIDTHS[size][0]).to(device)
    adamw = torch.optim.AdamW

    ours = cl.DistributedDataParallel(make_model(size, device), group)
    sharded = cl.DistributedDataParallel(make_model(size, device), group)
    peer = TorchDDP(make_model(size, device), gradient_as_bucket_view=True)
    peer_sharded = TorchDDP(make_model(size, device), gradient_as_bucket_view=True)
    peer_zero = TorchZero(peer_sharded.parameters(), adamw, parameters_as_bucket_view=True, **flags)
    whole_shards = fsdp2(size, device)
    alone = make_model(size, device)
    made: dict[str, tuple[Any, Any]] = {
        "ddp": (ours, adamw(ours.parameters(), **flags)),
        "torch ddp": (peer, adamw(peer.parameters(), **flags)),
        "zero": (sharded, cl.ZeroRedundancyOptimizer(sharded, adamw, **flags)),
        "torch zero": (peer_sharded, peer_zero),
        "torch fsdp2": (whole_shards, adamw(whole_shards.parameters(), **flags)),
        "no communication": (alone, adamw(alone.parameters(), **flags)),
    }

    def one_step(model: Any, optimizer: Any) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    ways = {
        name: _several(lambda pair=pair: one_step(*pair), num_steps, device)
        for name, pair in made.items()
    }
    found = alternate(ways, rounds=rounds, calls=1, warm_up=2)
    apart = {
        name: _apart(made[name][0].module, made[f"torch {reference}"][0].module, size, device)
        for name, reference in (("ddp", "ddp"), ("zero", "zero"))
    }
    for name, distance in apart.items():
        if not distance < _APART:
            raise Wrong(f"{name}/{size}: parameters are {distance:g} of their change off torch's")
    syncs = {name: _host_syncs(way) / num_steps for name, way in ways.items()}
    return {
        "medians_s": {name: seconds / num_steps for name, seconds in found.items()},
        "parameters": sum(p.numel() for p in alone.parameters()),
        "apart": apart,
        "host_syncs_a_step": syncs if device.type == "cuda" else {},
    }


def _apart(ours: Any, peers: Any, size: str, device: torch.device) -> float:
    """The largest difference of a parameter, over the largest change since the beginning."""
    start = list(make_model(size, device).parameters())
    trained = list(zip(ours.parameters(), peers.parameters(), start, strict=True))
    change = max((b - c).detach().abs().max().item() for _, b, c in trained)
    return max((a - b).detach().abs().max().item() for a, b, _ in trained) / change


def _host_syncs(way: Way) -> int:
    """How many calls of a turn of `way` synchronize, as torch warns of them: copies to the host and
    the like. It does not see the host wait for an event."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            way()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


# -- the table ---------------------------------------------------------------------------------


def slowest(by_rank: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max((one[name] for one in by_rank), key=by_time) for name in by_rank[0]}


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parser((__doc__ or "").splitlines()[0])
    flags.add_argument("--ranks", type=int, default=0, help="default: one a GPU, or 2 on one GPU")
    flags.add_argument("--sizes", default="2M,25M,100M")
    flags.add_argument("--bytes", default=",".join(_BYTES))
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    flags.add_argument("--out", type=Path, help="write the JSON object to this file, too")
    args = flags.parse_args(arguments)
    sizes, lengths = args.sizes.split(","), args.bytes.split(",")
    for flag, given, known in (("--sizes", sizes, _WIDTHS), ("--bytes", lengths, _BYTES)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            flags.error(f"{flag} knows {', '.join(known)}; got {', '.join(unknown)}")
    if args.ranks < 0:
        flags.error(f"--ranks must be at least 1, got {args.ranks}")
    num_ranks = args.ranks or max(2, torch.cuda.device_count() if args.device == "cuda" else 0)
    if args.device == "cuda":
        reason = why_no_ranks()
        if reason:
            print(reason)
            return NO_GPU
    machine = seen()
    show(machine)
    by_rank = spawn(measure, num_ranks, args.device, sizes, lengths, args.rounds)

    ratios: dict[str, float] = {}
    medians: dict[str, dict[str, float]] = {}
    for case in by_rank[0]["collectives"]:
        medians[case] = slowest([one["collectives"][case] for one in by_rank])
        ratios[case] = medians[case]["ours"] / medians[case]["torch"]
    backend = "NCCL" if args.device == "cuda" else "Gloo"
    table(
        f"collective/bytes, {num_ranks} ranks, microseconds; torch's is {backend}",
        ("case", "ours", "torch", "ours/torch"),
        [
            (case, f"{m['ours'] * 1e6:.1f}", f"{m['torch'] * 1e6:.1f}", f"{ratios[case]:.3f}")
            for case, m in medians.items()
        ],
    )
    steps_found: dict[str, Any] = {}
    for size in sizes:
        first = by_rank[0]["steps"][size]
        step_s = slowest([one["steps"][size]["medians_s"] for one in by_rank])
        steps_found[size] = {**first, "medians_s": step_s}
        ratios |= {
            f"ddp/{size}": step_s["ddp"] / step_s["torch ddp"],
            f"zero/{size}": step_s["zero"] / step_s["torch zero"],
            f"zero_vs_fsdp2/{size}": step_s["zero"] / step_s["torch fsdp2"],
            f"zero_vs_ddp/{size}": step_s["zero"] / step_s["torch ddp"],
        }
        syncs = first["host_syncs_a_step"]
        table(
            f"{size} parameters ({first['parameters']}), {num_ranks} ranks, a step",
            ("way", "ms", "synchronizing calls"),
            [
                (name, f"{seconds * 1e3:.2f}", f"{syncs[name]:g}" if syncs else "")
                for name, seconds in step_s.items()
            ],
        )
    table("ratios", ("case", "ratio"), [(name, f"{ratio:.3f}") for name, ratio in ratios.items()])
    figures = {
        "device": args.device,
        "ranks": num_ranks,
        "seen": machine,
        "backend": by_rank[0]["backend"],
        "environment_of_ranks": [one["environment"] for one in by_rank],
        "medians_s": medians,
        "steps": steps_found,
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"ratios": ratios, "figures": figures}, indent=1) + "\n")
        print(f"\nwritten: {args.out}")
    finish(args, ratios, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
