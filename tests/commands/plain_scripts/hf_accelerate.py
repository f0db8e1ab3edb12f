"""A script for accelerate: hf_accelerate.py FOLDER BATCH_SIZE [DIES_AT]

It has nothing of Chorusline in it. It goes on from the state in FOLDER, if there is one.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches

folder, batch_size = Path(sys.argv[1]), int(sys.argv[2])
dies_at = int(sys.argv[3]) if len(sys.argv) > 3 else None


class Progress:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(rows, batch_size)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
progress = Progress()
accelerator.register_for_checkpointing(progress)
if (folder / "state").exists():
    accelerator.load_state(str(folder / "state"))
begun = progress.step
for epoch in range(progress.step // len(loader), 2):
    for batch in skip_first_batches(loader, progress.step - epoch * len(loader)):
        with accelerator.accumulate(model):
            loss = (model(batch).squeeze(-1) - batch.sum(1)).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        progress.step += 1
        if progress.step % 4 == 0:
            accelerator.save_state(str(folder / "state"))
            accelerator.wait_for_everyone()
        last = accelerator.process_index == accelerator.num_processes - 1
        if last and progress.step == dies_at and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
total = sum(one.double().abs().sum().item() for one in model.parameters())
accelerator.print("begun", begun)
accelerator.print(accelerator.num_processes, progress.step, f"{total:.9f}", f"{mean:.9f}")
