"""What others have published of failures and of goodput at scale, and what the model makes of it.

- Llama 3: Grattafiori et al., The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4.
- RSC-1, RSC-2: Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research
  Clusters, HPCA 2025, arXiv:2410.21680.
- MegaScale: Jiang et al., MegaScale: Scaling Large Language Model Training to More Than 10,000
  GPUs, NSDI 2024, arXiv:2402.15627.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulation.goodput import Checkpointed, checkpointed, daly_s

DAY_S = 86_400.0
GPUS_PER_NODE = 8

FAILURES_PER_NODE_DAY = {
    "Llama 3": 419 / 54 / (16_384 / GPUS_PER_NODE),
    "RSC-1": 6.50e-3,
    "RSC-2": 2.34e-3,
}
"""Of one node of eight GPUs. Llama 3: the unexpected interruptions, without planned ones."""


def mtbf_s(workers: int, cluster: str) -> float:
    """Between two failures of a job of so many GPUs."""
    return DAY_S / (FAILURES_PER_NODE_DAY[cluster] * workers / GPUS_PER_NODE)


@dataclass(frozen=True)
class Known:
    """One published figure. said: what was published of the goodput. assumed: what was not
    published, and is taken here."""

    what: str
    said: str
    least: float
    model: float
    assumed: str


def known() -> list[Known]:
    """Published goodputs, each beside the model's with the same parameters."""
    llama_s = 54 * DAY_S / 466
    megascale_s = 21 * DAY_S / 100
    largest_s = mtbf_s(12_000, "RSC-1")
    half_hour_s = mtbf_s(4096, "RSC-1")
    future_s = mtbf_s(100_000, "RSC-2")
    minutes = 60.0
    return [
        Known(
            "Llama 3, 16,384 GPUs, 466 interruptions in 54 days",
            "over 0.90",
            0.90,
            checkpointed(llama_s, Checkpointed(5, 9 * minutes, daly_s(5, llama_s))),
            "saves that stall 5 s, at the best interval; 9 min until it trains again",
        ),
        Known(
            "MegaScale, over 10,000 GPUs, over 100 restarts in several weeks",
            "over 0.90",
            0.90,
            checkpointed(megascale_s, Checkpointed(5, 10 * minutes, 30 * minutes)),
            "three weeks; 10 min to find the cause; a save each half hour, 15 min lost on average",
        ),
        Known(
            "RSC-1, 4,096 GPUs, a save each hour",
            "over 0.90",
            0.90,
            checkpointed(half_hour_s, Checkpointed(0, 5 * minutes, 60 * minutes)),
            "saves that stall nothing; 5 min until it trains again",
        ),
        Known(
            "RSC-1, 12,000 GPUs, saves that stall 10 s",
            "0.90",
            0.90,
            checkpointed(largest_s, Checkpointed(10, 5 * minutes, daly_s(10, largest_s))),
            "the best interval; 5 min until it trains again",
        ),
        Known(
            "100,000 GPUs at the rate of RSC-2, interval and restart of 2 min",
            "0.90",
            0.90,
            checkpointed(future_s, Checkpointed(0, 2 * minutes, 2 * minutes)),
            "saves that stall nothing",
        ),
    ]


def connecting_s(workers: int) -> float:
    """Seconds to connect all GPUs, as MegaScale has published for its own job: 5 s with 2,048, and
    30 s with more than 10,000. Beyond that, in proportion; below, too."""
    if workers <= 2048:
        return 5.0 * workers / 2048
    return max(5.0 + 25.0 * (workers - 2048) / (10_000 - 2048), 5.0)
