"""The picture of docs/same-result.md: the losses of two runs, one of them with four deaths.

    python -m benchmarks.proofs.loss_curves [--out docs/images]

Both runs train the transformer of invariance_training.py. One has one worker and nothing happens
to it. The other begins with five, of which four are killed, one after another, while they train.
Each point is the mean over the samples of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
import torch
from ray import cloudpickle

import chorusline as cl
from benchmarks.faults.chaos_faults import FAULTS, append, entries_of
from benchmarks.proofs.invariance_training import Transformer, digest

NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS = 128, 32, 4, 10
STEPS_OF_EPOCH = NUM_SAMPLES // GLOBAL_BATCH
NUM_WORKERS = 5
DEATHS = {6: 1, 14: 0, 23: 2, 31: 1}
"""By step, the rank that is killed in it, between the forward and the backward pass."""

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Words:
    """Samples (number, 6 tokens, one of them)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(0, 17, (NUM_SAMPLES, 6), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return number, self._tokens[number], self._tokens[number, 0]


def train(ctx: cl.Context, deaths: dict[int, int], folder: str) -> str:
    """The digest of the parameters. Losses of micro-batches go to a file of this process."""
    torch.set_num_threads(1)
    diary = Path(folder) / f"{os.getpid()}.losses"
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(Transformer())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01, replicas=2)
    for epoch in ctx.epochs(EPOCHS):
        for step in ctx.steps(Words(), GLOBAL_BATCH, MICRO_BATCH, epoch=epoch):
            at = epoch * STEPS_OF_EPOCH + step.number
            for numbers, inputs, targets in step:
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                struck = set(entries_of(Path(folder) / "struck"))
                if deaths.get(at) == ctx.rank and at not in struck:
                    append(Path(folder) / "struck", at)
                    FAULTS["kill"](ctx, Path(folder))
                loss.backward()
                append(diary, (at, int(numbers[0]), loss.item()))
            optim.step()
            optim.zero_grad()
    return digest(dict(model.module.state_dict()))


@dataclass(frozen=True)
class Curve:
    """losses: by step. deaths: the steps in which a worker was killed."""

    losses: list[float]
    deaths: list[int]
    parameters: str


def noted_in(folder: Path) -> tuple[list[float], list[int]]:
    """By step, the mean loss; and the steps in which a worker was killed."""
    # A micro-batch that was computed again has the same loss again: it counts once.
    by_step: dict[int, dict[int, float]] = defaultdict(dict)
    for path in folder.glob("*.losses"):
        for at, first, loss in entries_of(path):
            if by_step[at].setdefault(first, loss) != loss:
                raise RuntimeError(f"step {at}: a micro-batch has two losses")
    losses = [
        sum(x for _, x in sorted(one.items())) / len(one) for _, one in sorted(by_step.items())
    ]
    return losses, sorted(entries_of(folder / "struck"))


async def curve_of(num_workers: int, deaths: dict[int, int]) -> Curve:
    few: Any = {"CPU": 0.1}
    with tempfile.TemporaryDirectory() as folder:
        async with cl.Session(
            (1, num_workers), resources_per_worker=few, max_failures=None, progress=False
        ) as session:
            told = await session.run(train, deaths=deaths, folder=folder)
        losses, struck = noted_in(Path(folder))
    [parameters] = set(told)
    return Curve(losses, struck, parameters)


# -- the picture -----------------------------------------------------------------------------------

_LEFT, _TOP, _BOTTOM = 40, 60, 310

_STYLE = """
  text { font: 14px sans-serif; fill: #222; }
  .small { font-size: 12px; fill: #555; }
  .mid { text-anchor: middle; }
  .end { text-anchor: end; }
  .axis { stroke: #888; fill: none; }
  .grid { stroke: #e5e5e5; }
  .alone { stroke: #bac8ff; stroke-width: 9; fill: none; stroke-linejoin: round; }
  .struck { stroke: #1c3fa8; stroke-width: 1.8; fill: none; }
  .death { stroke: #fa5252; stroke-dasharray: 4 3; }
  .lost { fill: #e03131; }
"""


def picture(alone: Curve, struck: Curve, width: int = 860) -> str:
    """SVG: the curve without deaths wide and light, that with deaths thin and dark upon it.

    width: 400 for the site on a telephone, where the words are fewer and the key has two rows."""
    is_narrow = width < 600
    height, right = 400 if is_narrow else 380, width - 20
    highest = max(*alone.losses, *struck.losses)
    num_steps = len(alone.losses)

    def x(step: float) -> float:
        return _LEFT + (right - _LEFT) * step / (num_steps - 1)

    def y(loss: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * loss / (highest * 1.05)

    def line(losses: Sequence[float], kind: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))
        return f'<polyline class="{kind}" points="{points}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        "<title>The losses of two runs, of which one loses four workers: they coincide</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for loss in range(int(highest) + 1):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"/>'
        )
        parts.append(f'<text class="small end" x="{_LEFT - 8}" y="{y(loss) + 4:.1f}">{loss}</text>')
    for step in range(0, num_steps, 5):
        parts.append(f'<text class="small mid" x="{x(step):.1f}" y="{_BOTTOM + 18}">{step}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_TOP} V{_BOTTOM} H{right}"/>')
    parts.append(f'<text class="mid" x="{(_LEFT + right) / 2}" y="{_BOTTOM + 38}">step</text>')
    parts.append(f'<text x="15" y="{_TOP - 12}">loss</text>')
    death = "killed" if is_narrow else "a worker dies"
    for at in struck.deaths:
        parts.append(
            f'<line class="death" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>'
        )
        parts.append(f'<text class="small mid lost" x="{x(at):.1f}" y="{_TOP - 6}">{death}</text>')
    parts += [line(alone.losses, "alone"), line(struck.losses, "struck")]
    first, second = ((_LEFT, 57), (_LEFT, 77)) if is_narrow else ((_LEFT, 57), (_LEFT + 160, 57))
    for (left, below), kind, words in (
        (first, "alone", "one worker"),
        (second, "struck", "five workers, four are killed with SIGKILL"),
    ):
        key = _BOTTOM + below
        parts.append(f'<path class="{kind}" d="M{left} {key - 5} h36"/>')
        parts.append(f'<text x="{left + 46}" y="{key}">{words}</text>')
    return "\n".join([*parts, "</svg>", ""])


async def curves() -> tuple[Curve, Curve]:
    return await curve_of(1, {}), await curve_of(NUM_WORKERS, DEATHS)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--out", type=Path, default=Path("docs/images"))
    args = flags.parse_args()
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        alone, struck = asyncio.run(curves())
    finally:
        ray.shutdown()
    same = alone.parameters == struck.parameters and alone.losses == struck.losses
    print(
        f"{len(struck.deaths)} deaths in {len(struck.losses)} steps; parameters and losses of the"
    )
    print(f"two runs {'have the same bits' if same else 'DIFFER'}: {struck.parameters}")
    if not same or len(struck.deaths) != len(DEATHS):
        sys.exit(1)
    (args.out / "loss_curves.svg").write_text(picture(alone, struck))
    (args.out / "loss_curves-narrow.svg").write_text(picture(alone, struck, width=400))


if __name__ == "__main__":
    main()
