"""What buckets in the order that was measured save, where layers are registered backwards.

    python -m benchmarks.speed.bucket_order [--json] [--layers 12] [--width 512] [--batch 64]

Two ranks on this host, one thread each, DistributedDataParallel without an optimizer; the same
model with its buckets laid out in the measured order, and left in the reverse of the order of
registration, in turns in the same processes. `head start`: how long before the end of the backward
pass a byte was sent, on average over the bytes of a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import chorusline as cl
from benchmarks.alternation import alternate, finish, parser, spawn, table
from chorusline.runtime.data_parallel.distributed_data_parallel import engine_of


class Backwards(torch.nn.Module):
    """The layer that is used last is registered first."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def measure(
    rank: int, num_ranks: int, store_path: str, layers: int, width: int, batch: int
) -> dict[str, Any]:
    torch.set_num_threads(1)
    group = cl.Group.create(cl.FileStore(store_path), rank, num_ranks)
    x = torch.randn(batch, width)
    models = {
        name: cl.DistributedDataParallel(Backwards(layers, width), group, bucket_cap_mb=4)
        for name in ("measured", "registered")
    }
    head_start_s = {}

    def step_of(model: cl.DistributedDataParallel) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()

        return step

    ways = {name: step_of(model) for name, model in models.items()}
    for name, model in models.items():
        ways[name]()
        reducer = engine_of(model).reducer
        if name == "registered":
            reducer.lay_out(list(reversed(range(len(reducer.parameters)))))
        head_start_s[name] = _head_start_s(reducer, ways[name])
    medians = alternate(ways, rounds=30, calls=2)
    group.barrier().wait()
    group.close()
    return {"medians_s": medians, "head_start_s": head_start_s}


def _head_start_s(reducer: Any, step: Callable[[], None]) -> float:
    seconds: list[float] = []
    launch_rest = reducer._launch_rest

    def noting() -> None:
        ended_at = time.monotonic()
        launched = reducer.buckets[: reducer._num_launched]
        saved = sum(b.flat.nbytes * (ended_at - b.work.operation.issued_at) for b in launched)
        seconds.append(saved / sum(b.flat.nbytes for b in reducer.buckets))
        launch_rest()

    reducer._launch_rest = noting
    for _ in range(5):
        step()
    del reducer._launch_rest
    return statistics.median(seconds)


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--layers", type=int, default=12)
    flags.add_argument("--width", type=int, default=512)
    flags.add_argument("--batch", type=int, default=64)
    args = flags.parse_args()
    by_rank = spawn(measure, 2, args.layers, args.width, args.batch)
    step_s = {
        name: max(one["medians_s"][name] for one in by_rank) for name in by_rank[0]["head_start_s"]
    }
    head_start_s = by_rank[0]["head_start_s"]
    table(
        f"forward and backward, {args.layers} layers of {args.width}, batch {args.batch}, 2 ranks",
        ("order of buckets", "ms", "head start, ms"),
        [(name, f"{s * 1e3:.2f}", f"{head_start_s[name] * 1e3:.2f}") for name, s in step_s.items()],
    )
    ratio = step_s["measured"] / step_s["registered"]
    finish(args, {"bucket_order": ratio}, {"step_s": step_s, "head_start_s": head_start_s})


if __name__ == "__main__":
    main()
