"""What every system under test trains: a model whose parameters are their own ledger.

Each sample has a parameter that only this sample moves, and the further it has come the less: after
one use it has one of a few values, one for each number of ranks that may have shared the step, and
after two uses it has none of these. Another parameter, the clock, gets the same gradient in each
step, with momentum: its value says how many steps were taken, and that none was taken back, and no
state of the optimizer was lost. MOMENTUM is chosen so: a velocity that is lost once the clock runs
evenly costs it MOMENTUM / (1 - MOMENTUM) = 4.88 steps, which is no whole number.

A training process says who it is (`log("process")`), and each step that the program sees as taken
(`log("step")`). These lines give pids and times only; what counted is read from the parameters.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RATE, CLOCK_RATE, MOMENTUM = 0.37, 0.001, 0.83
PLANTED = "an exception that the trial has planted"


@dataclass(frozen=True)
class Workload:
    """num_workers ranks take `batch` samples each to a step, which takes `batch_s` seconds for each
    batch besides. Systems that keep checkpoints make one every `save_every` steps."""

    folder: str
    num_workers: int = 3
    num_samples: int = 1200
    batch: int = 2
    batch_s: float = 0.03
    save_every: int = 20

    @property
    def global_batch(self) -> int:
        return self.num_workers * self.batch

    @property
    def disk(self) -> Path:
        """Where checkpoints are kept."""
        return Path(self.folder) / "disk"

    @property
    def num_steps(self) -> int:
        """With all workers in each of them."""
        return -(-self.num_samples // self.global_batch)

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Workload:
        return Workload(**json.loads(text))

    def log(self, word: str, rank: int, number: int = 0) -> None:
        """One line, which a SIGKILL after this call cannot take back."""
        line = json.dumps([time.time(), word, rank, os.getpid(), number]) + "\n"
        with (Path(self.folder) / f"log-{os.getpid()}").open("a") as log:
            log.write(line)

    def work(self, rank: int, ledger: Ledger) -> None:
        """What a batch costs besides; call it before each. Raises what the trial has planted."""
        planted = Path(self.folder) / f"raise-{os.getpid()}"
        if planted.exists():
            planted.unlink()
            raise RuntimeError(PLANTED)
        if (Path(self.folder) / "stop").exists():  # The time of a storm is over.
            self.finish(rank, ledger)
            time.sleep(3600)
        time.sleep(self.batch_s)

    def finish(self, rank: int, ledger: Ledger) -> None:
        """The training has ended on this rank: what the trial is judged by."""
        place = Path(self.folder) / f"parameters-{rank}.pt"
        state = {name: p.detach().clone() for name, p in ledger.named_parameters()}
        torch.save(state, place.with_suffix(".part"))
        place.with_suffix(".part").rename(place)


class Ledger(torch.nn.Module):
    """Counts each use of each sample in one parameter, and its steps in another one."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.zeros(num_samples, dtype=torch.float64))
        self.clock = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, numbers: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """The loss: a sum over the samples, times `scale`, and the clock."""
        return scale * 0.5 * (self.used[numbers] - 1).square().sum() + self.clock.sum()

    def groups(self) -> list[dict[str, Any]]:
        """For the optimizer, an SGD."""
        return [
            {"params": [self.used], "lr": RATE, "momentum": 0.0},
            {"params": [self.clock], "lr": CLOCK_RATE, "momentum": MOMENTUM},
        ]


@dataclass(frozen=True)
class Ending:
    """What the parameters say. never, again: samples that counted in no step, and in several.
    num_steps: that the clock has counted; None where no number of steps leads to its value.
    differ: whether ranks ended with different parameters. counted: samples that counted once.
    off: how far the parameters of these are from what one use makes of them, at most."""

    never: int
    again: int
    num_steps: int | None
    differ: bool
    counted: int
    off: float


def judged(states: list[dict[str, torch.Tensor]], workload: Workload) -> Ending:
    """states: of the ranks that have finished, at least one."""
    used, clock = states[0]["used"], states[0]["clock"]
    shares = [*range(1, workload.num_workers + 1), workload.global_batch]
    # Of a last step that is smaller.
    shares += range(workload.num_samples % workload.global_batch, 0, -1)
    once = RATE / torch.tensor(shares, dtype=torch.float64)
    distances = (used[:, None] - once).abs().min(1).values
    is_once = distances < 1e-9
    steps = [n for n, value in enumerate(clock_values(workload.num_samples)) if _near(value, clock)]
    return Ending(
        never=int((used == 0).sum()),
        again=int((~is_once & (used != 0)).sum()),
        num_steps=steps[0] + 1 if steps else None,
        differ=any(not torch.equal(one[name], states[0][name]) for one in states for name in one),
        counted=int(is_once.sum()),
        off=distances[is_once].max().item() if is_once.any() else 0.0,
    )


def _near(value: float, clock: torch.Tensor) -> bool:
    return abs(value - clock.item()) <= 1e-9 * max(1.0, abs(value))


def clock_values(most: int) -> list[float]:
    """The clock after 1, 2, … steps."""
    value, velocity, values = 0.0, 0.0, []
    for _ in range(most):
        velocity = MOMENTUM * velocity + 1.0
        value -= CLOCK_RATE * velocity
        values.append(value)
    return values
