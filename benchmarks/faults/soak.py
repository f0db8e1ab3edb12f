"""What a session holds while it loses a worker every ten seconds, for as long as you like.

    python -m benchmarks.faults.soak [--minutes 60] [--seed 0] [--plot docs/images/soak.svg]
        [--json]

Three workers train on an endless stream, save checkpoints, and report numbers. Every ten seconds
one of them is killed with SIGKILL, which one by the seed, and replaced. The first process of rank 0
is never killed: it lives from the first step to the last. Every five seconds the program notes the
memory, the descriptors and the threads of itself, of the driver, of the stream's reader, of that
first worker and of the other workers (the largest of them), and the keys in the driver's store. At
the end it compares the medians of the second and of the last quarter of the time, and exits with 1
if one of them has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import html
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

import ray
import torch
from ray import cloudpickle

import chorusline as cl
from benchmarks.alternation import commit
from benchmarks.faults.chaos_outside import actors

LOSS_EVERY_S, LOOK_EVERY_S = 10.0, 5.0
BATCH, STEP_S, SAVE_EVERY = 4, 0.02, 250
NUM_WORKERS = 3
FEW = {"CPU": 0.1}

ROLES = ("program", "driver", "reader", "first worker", "other workers")
QUANTITIES = {"memory": "MB", "descriptors": "", "threads": "", "keys": ""}

SLACK = {"memory": 24.0, "descriptors": 24.0, "threads": 8.0, "keys": 40.0}
"""What the medians of the second and of the last quarter may differ by, as they do by chance: a
rank has more sockets while it meets a new one. In an hour there are 360 losses."""

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# -- the training ----------------------------------------------------------------------------------


class Rows:
    """Numbers, until there is a file of this name."""

    def __init__(self, stop: str) -> None:
        self._stop = stop

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            if number % 64 == 0 and os.path.exists(self._stop):  # noqa: PTH110 (in each 64th row)
                return
            yield number


def as_batch(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor([[number % 1000 / 1000] for number in numbers])


def train(ctx: cl.Context, stream: cl.Stream, folder: str) -> int:
    """Trains until the stream ends. Returns how many steps the optimizer has taken."""
    torch.set_num_threads(1)
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 64))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-3, replicas=2)
    ctx.register("model", model)
    ctx.register("optim", optim)
    (Path(folder) / f"{ctx.rank}-{os.getpid()}").touch()  # From now on it may be killed.
    for epoch in ctx.epochs(1):
        with cl.Join([model, optim]):
            for batch in ctx.shard(stream, BATCH, epoch=epoch, collate_fn=as_batch):
                time.sleep(STEP_S)
                model(batch).square().mean().backward()
                optim.step()
                optim.zero_grad()
                ctx.report(steps=optim.num_steps)
    return optim.num_steps


# -- what is there ---------------------------------------------------------------------------------


def held_by(pid: int) -> dict[str, float]:
    """The memory that is not a file's, in MB, the descriptors and the threads of a process."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    memory = sum(int(status[key].split()[0]) for key in ("RssAnon", "RssShmem")) / 1000
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"memory": memory, "descriptors": descriptors, "threads": int(status["Threads"])}


def keys_in_store() -> int:
    """Of the session's driver."""
    (name,) = [
        one["name"]
        for one in ray.util.list_named_actors(all_namespaces=True)
        if "/driver-" in one["name"]
    ]
    return int(ray.get(ray.get_actor(name, "chorusline").store_call.remote("num_keys"), timeout=10))


class Soak:
    """One session under losses. samples: by the second, role -> quantity -> number."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._began_at = 0.0
        self.losses: list[float] = []
        self.samples: list[tuple[float, dict[str, dict[str, float]]]] = []
        self.num_steps: list[int] = []
        self._first: int | None = None

    async def run(self, minutes: float) -> None:
        stream = cl.Stream(Rows(str(self._folder / "stop")))
        config = cl.CheckpointConfig(
            self._folder / "place", num_to_keep=2, every_n_steps=SAVE_EVERY, resume="never"
        )
        async with cl.Session(
            (1, NUM_WORKERS),
            spares=1,
            resources_per_worker=FEW,
            max_failures=None,
            checkpoint=config,
            progress=False,
            live_view=False,
        ) as session:
            told = asyncio.create_task(session.run(train, stream=stream, folder=str(self._folder)))
            while len(self._ranks()) < NUM_WORKERS and not told.done():  # noqa: ASYNC110 (files)
                await asyncio.sleep(0.2)
            self._began_at = time.monotonic()
            self._first = next(pid for rank, pid in self._ranks() if rank == 0)
            tasks = [asyncio.create_task(one) for one in (self._look(), self._lose())]
            await asyncio.wait({told, *tasks}, timeout=minutes * 60, return_when="FIRST_COMPLETED")
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended
            (self._folder / "stop").touch()
            self.num_steps = await told
        stream.close()

    def _ranks(self) -> list[tuple[int, int]]:
        """Rank and pid of the processes that train, or have begun to. The pid of a worker that is
        gone may belong to somebody else by now."""
        workers = actors("ray::Worker")
        noted = [map(int, path.name.split("-")) for path in self._folder.glob("*-*")]
        return sorted((rank, pid) for rank, pid in noted if pid in workers)

    async def _lose(self) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(self._began_at + number * LOSS_EVERY_S - time.monotonic())
            others = [pid for _, pid in self._ranks() if pid != self._first]
            if others:  # If not, none has come since the last loss.
                os.kill(self._random.choice(others), signal.SIGKILL)
                self.losses.append(time.monotonic() - self._began_at)

    async def _look(self) -> None:
        for number in itertools.count(1):
            at = time.monotonic() - self._began_at
            with contextlib.suppress(
                OSError, KeyError, ValueError, ray.exceptions.RayError
            ):  # One died.
                self.samples.append((at, await asyncio.to_thread(self._sample)))
            await asyncio.sleep(max(0, self._began_at + number * LOOK_EVERY_S - time.monotonic()))

    def _sample(self) -> dict[str, dict[str, float]]:
        assert self._first is not None
        found = {"program": held_by(os.getpid()), "first worker": held_by(self._first)}
        found["driver"] = {**held_by(min(actors("ray::Driver"))), "keys": keys_in_store()}
        found["reader"] = held_by(min(actors("ray::RowReader")))
        others = []
        for _, pid in self._ranks():
            if pid != self._first:
                with contextlib.suppress(OSError, KeyError):  # It dies now.
                    others.append(held_by(pid))
        if others:
            found["other workers"] = {key: max(one[key] for one in others) for key in others[0]}
        return found

    # -- what came of it ---------------------------------------------------------------------------

    def line(self, role: str, quantity: str) -> list[tuple[float, float]]:
        return [
            (at, found[role][quantity])
            for at, found in self.samples
            if quantity in found.get(role, ())
        ]

    def figures(self) -> dict[str, dict[str, list[float]]]:
        """By quantity and role, the medians of the second and of the last quarter of the time."""
        end = self.samples[-1][0]
        found: dict[str, dict[str, list[float]]] = {}
        for quantity in QUANTITIES:
            for role in ROLES:
                points = self.line(role, quantity)
                quarters = [
                    [number for at, number in points if first * end <= at <= last * end]
                    for first, last in ((0.25, 0.5), (0.75, 1.0))
                ]
                if all(quarters):
                    medians = [round(statistics.median(one), 1) for one in quarters]
                    found.setdefault(quantity, {})[role] = medians
        return found

    def grown(self) -> list[str]:
        return [
            f"{quantity} of the {role}: {before:g} to {after:g}"
            for quantity, by_role in self.figures().items()
            for role, (before, after) in by_role.items()
            if after - before > SLACK[quantity]
        ]


# -- the picture -----------------------------------------------------------------------------------

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP = 860, 150, 70, 690, 46
_COLOURS = dict(zip(ROLES, ("#868e96", "#e8590c", "#2b8a3e", "#1c3fa8", "#ae3ec9"), strict=True))
_STYLE = """
  text { font: 14px sans-serif; fill: #222; }
  .small { font-size: 12px; fill: #555; }
  .mid { text-anchor: middle; }
  .end { text-anchor: end; }
  .axis { stroke: #888; fill: none; }
  .grid { stroke: #e5e5e5; }
  .line { stroke-width: 1.5; fill: none; stroke-linejoin: round; }
"""


def picture(soak: Soak, caption: str) -> str:
    """SVG: a panel for each quantity, with a line for each role."""
    end = soak.samples[-1][0]
    height = _TOP + len(QUANTITIES) * (_PANEL + 40) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">',
        f"<title>{html.escape(caption)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="20">{html.escape(caption)}</text>',
    ]
    for number, (quantity, unit) in enumerate(QUANTITIES.items()):
        top = _TOP + number * (_PANEL + 40)
        bottom = top + _PANEL - 20
        lines = {role: soak.line(role, quantity) for role in ROLES}
        highest = 1.1 * max((value for points in lines.values() for _, value in points), default=1)

        def x(at: float) -> float:
            return _LEFT + (_RIGHT - _LEFT) * at / end

        def y(
            value: float, bottom: float = bottom, top: float = top, most: float = highest
        ) -> float:
            return bottom - (bottom - top) * value / most

        for share in (0, 0.5, 1):
            value = highest * share / 1.1
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y(value):.1f}" '
                f'y2="{y(value):.1f}"/>'
                f'<text class="small end" x="{_LEFT - 8}" y="{y(value) + 4:.1f}">{value:.0f}</text>'
            )
        for tenth in range(11):
            minutes = end / 60 * tenth / 10
            parts.append(
                f'<text class="small mid" x="{x(minutes * 60):.1f}" y="{bottom + 16}">'
                f"{minutes:.3g}</text>"
            )
        parts.append(f'<path class="axis" d="M{_LEFT} {top} V{bottom} H{_RIGHT}"/>')
        parts.append(f'<text x="{_RIGHT + 14}" y="{top + 6}">{quantity} {unit}</text>')
        for row, (role, points) in enumerate(one for one in lines.items() if one[1]):
            drawn = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
            colour = _COLOURS[role]
            parts.append(f'<polyline class="line" stroke="{colour}" points="{drawn}"/>')
            parts.append(
                f'<text class="small" style="fill: {colour}" x="{_RIGHT + 14}" '
                f'y="{top + 26 + 17 * row}">{role}: {points[-1][1]:.0f}</text>'
            )
    parts.append(
        f'<text class="small mid" x="{(_LEFT + _RIGHT) / 2}" y="{height - 14}">minutes</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--minutes", type=float, default=60.0)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--plot", type=Path, help="an SVG file")
    flags.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = flags.parse_args()
    made, load = commit(), [os.getloadavg()[0]]
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            soak = Soak(Path(folder), args.seed)
            asyncio.run(soak.run(args.minutes))
    finally:
        ray.shutdown()
    load.append(os.getloadavg()[0])
    figures, grown = soak.figures(), soak.grown()
    minutes = soak.samples[-1][0] / 60
    caption = (
        f"{minutes:.0f} minutes, {len(soak.losses)} losses, {max(soak.num_steps)} steps; "
        f"commit {made}, load {load[0]:.1f} to {load[1]:.1f}"
    )
    print(caption)
    for quantity, by_role in figures.items():
        for role, (before, after) in by_role.items():
            print(f"  {quantity:12} {role:14} {before:10.1f} {after:10.1f}")
    for one in grown:
        print(f"grown: {one}")
    if args.plot:
        args.plot.write_text(picture(soak, caption))
    if args.json:
        told = {
            "commit": made,
            "minutes": round(minutes, 2),
            "losses": len(soak.losses),
            "steps": soak.num_steps,
            "load": load,
            "grown": grown,
            "figures": figures,
        }
        print(json.dumps(told))
    if grown or not soak.losses:
        sys.exit(1)


if __name__ == "__main__":
    main()
