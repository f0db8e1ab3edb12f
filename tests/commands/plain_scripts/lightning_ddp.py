"""A script for Lightning's own DDP: it has nothing of Chorusline in it."""

import warnings

import lightning
import torch

warnings.filterwarnings("ignore")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return (self.net(batch).squeeze(-1) - batch.sum(1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(rows, 4))
if trainer.is_global_zero:
    total = sum(one.double().abs().sum().item() for one in module.parameters())
    print(trainer.world_size, trainer.global_step, f"{total:.9f}")
