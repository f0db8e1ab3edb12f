"""A Lightning module whose ranks have different numbers of batches: Trainer(strategy="chorusline").

The module tells from the counts of its bytes which package of Python's library a source file is
from. Lightning's own DistributedSampler deals the 61 files out, and none of them comes twice.

    python examples/lightning_module.py                two CPU workers, less than a minute

It needs Lightning: pip install -e '.[lightning]'
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import chorusline as cl

PACKAGES = ("asyncio", "email", "json", "unittest", "xml")
NUM_FILES = 61  # An odd number: one rank gets 31 files, the other 30.


def files() -> list[tuple[Tensor, int]]:
    """(256,) frequencies of the bytes, and the number of the package."""
    found = []
    library = Path(sysconfig.get_path("stdlib"))
    for label, package in enumerate(PACKAGES):
        for file in sorted((library / package).rglob("*.py")):
            if text := file.read_bytes():
                counts = torch.bincount(torch.tensor(list(text)), minlength=256)
                found.append((counts / len(text), label))
    return found[:NUM_FILES]


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, len(PACKAGES))
        )
        self.seen = 0

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        counts, labels = batch
        self.seen += len(labels)
        loss = F.cross_entropy(self.net(counts * 32), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        counts, labels = batch
        right = (self.net(counts * 32).argmax(1) == labels).float().mean()
        self.log("accuracy", right, on_epoch=True, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        model = self.trainer.model
        assert isinstance(model, cl.DistributedDataParallel)  # By the strategy.
        return cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=3e-3)


def train(ctx: cl.Context, epochs: int) -> tuple[int, float]:
    """Runs on every rank. Returns the samples that it has seen, and the accuracy over all ranks."""
    pl.seed_everything(0, verbose=False)
    samples: Any = files()  # A list is a dataset, but not to torch's types.
    module = Classifier()
    trainer = pl.Trainer(
        strategy="chorusline",
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(samples, 4, shuffle=True), DataLoader(samples, 4))
    return module.seen, trainer.callback_metrics["accuracy"].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    results = cl.run(train, num_workers=options.workers, epochs=options.epochs)
    for rank, (seen, _) in enumerate(results):
        print(f"rank {rank}: {seen} samples")
    print(f"accuracy {results[0][1]:.3f}")


if __name__ == "__main__":
    main()
