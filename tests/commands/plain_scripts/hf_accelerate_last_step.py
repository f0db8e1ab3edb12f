"""A loop over accelerate: hf_accelerate_last_step.py FOLDER STEPS PACE_S

It has nothing of Chorusline in it, unless LINE says so. It goes on from its last state in FOLDER.
Each rank writes its process and the steps that it has taken, for whoever kills it from outside, and
takes PACE_S for each.
"""

import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

import chorusline as cl

folder, num_steps, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


class Progress:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


accelerator = Accelerator(gradient_accumulation_steps=2)
rank = accelerator.process_index
torch.manual_seed(0)
layers = [torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
rows = torch.randn(144, 4, generator=torch.Generator().manual_seed(1))
# Without a generator of its own, a loader that begins takes a number from torch's.
loader = torch.utils.data.DataLoader(rows, 4, generator=torch.Generator())
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
progress = Progress()
accelerator.register_for_checkpointing(progress)
# With LINE, the number of the step is in the name of the folder.
is_numbered = "LINE" in os.environ
saved = sorted(folder.glob("state*"), key=lambda one: int(one.name[6:] or 0))
if saved:
    accelerator.load_state(str(saved[-1]))
begun = progress.step
(folder / f"pid-{rank}").write_text(str(os.getpid()))
in_epoch = len(loader) // 2  # Steps of two batches.
for epoch in range(begun // in_epoch, -(-num_steps // in_epoch)):
    done, is_first = (progress.step - epoch * in_epoch) * 2, True
    for batch in accelerator.skip_first_batches(loader, done):
        progress.step += is_first
        is_first = not is_first  # Of the two batches of a step.
        with accelerator.accumulate(model):
            loss = (model(batch).squeeze(-1) - batch.sum(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        name = str(folder / (f"state-{progress.step}" if is_numbered else "state"))
        if is_numbered:
            cl.before_restart(accelerator.save_state, name)
        if not accelerator.sync_gradients:
            continue
        with (folder / f"steps-{rank}").open("a") as file:
            print(progress.step, time.time(), file=file)
        if progress.step % 20 == 0:
            accelerator.save_state(name)
            accelerator.wait_for_everyone()
        time.sleep(pace_s)
        if progress.step == num_steps:
            break
if rank == 0:
    inner = accelerator.unwrap_model(model)
    weights = sum(one.double().abs().sum().item() for one in inner.parameters())
    means = inner[1].running_mean.double().abs().sum().item()
    print("begun", begun)
    print(os.environ["WORLD_SIZE"], num_steps, f"{weights:.9f}", f"{means:.9f}")
