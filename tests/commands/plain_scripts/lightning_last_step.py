"""A script for the Trainer of Lightning: lightning_last_step.py FOLDER STEPS PACE_S

It has nothing of Chorusline in it. It goes on from the last checkpoint in FOLDER. Each rank writes
its process and the steps that it has taken, for whoever kills it from outside, and takes PACE_S for
each.
"""

import os
import sys
import time
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

warnings.filterwarnings("ignore")
folder, num_steps, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


class Batches:
    """Of one rank, with a place that Lightning saves."""

    def __init__(self, rank):
        self.rank, self.taken = rank, 0

    def __len__(self):
        return 8

    def __iter__(self):
        while self.taken < len(self):
            self.taken += 1
            yield torch.randn(
                8, 4, generator=torch.Generator().manual_seed(100 * self.taken + self.rank)
            )
        self.taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)]
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, rows, _):
        return (self.net(rows).squeeze(-1) - rows.sum(1)).square().mean()

    def validation_step(self, rows, _):
        self.log("error", self.training_step(rows, _), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Writes(Callback):
    begun = 0

    def on_train_start(self, trainer, module):
        self.begun = trainer.global_step

    def on_train_batch_end(self, trainer, *_):
        with (folder / f"steps-{trainer.global_rank}").open("a") as file:
            print(trainer.global_step, time.time(), file=file)
        time.sleep(pace_s)


writes, rank = Writes(), int(os.environ["RANK"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=-1,
    max_steps=num_steps,
    callbacks=[writes, ModelCheckpoint(folder, save_last=True, every_n_train_steps=20)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, Batches(rank), Batches(rank), ckpt_path="last")
if rank == 0:
    weights = sum(one.double().abs().sum().item() for one in module.parameters())
    means = module.net[1].running_mean.double().abs().sum().item()
    print("begun", writes.begun)
    print(trainer.world_size, trainer.global_step, f"{weights:.9f}", f"{means:.9f}")
