"""A loop over torch's DDP that loses no step: last_step.py FOLDER STEPS PACE_S

It has one line of Chorusline in it. Each rank writes its process and the steps that it has taken,
for whoever kills it from outside, and takes PACE_S for each.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

import chorusline as cl

folder, num_steps, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
layers = [torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
parts = {"model": model, "optimizer": optimizer, "schedule": schedule}


def save(step):
    time.sleep(float(os.environ.get("SAVE_S", 0)))
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save(state | {"step": step, "random": torch.get_rng_state()}, folder / "last.tmp")
    (folder / "last.tmp").replace(folder / "last.pt")


begun = 0
if (folder / "last.pt").exists():
    state = torch.load(folder / "last.pt")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["random"])
    begun = state["step"]
(folder / f"pid-{rank}").write_text(str(os.getpid()))
for step in range(begun, num_steps):
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = (ddp(rows).squeeze(-1) - rows.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    cl.before_restart(save, step + 1)
    with (folder / f"steps-{rank}").open("a") as file:
        print(step + 1, time.time(), file=file)
    if (step + 1) % 20 == 0 and rank == 0:
        save(step + 1)
    time.sleep(pace_s)
if rank == 0:
    weights = sum(one.double().abs().sum().item() for one in model.parameters())
    means = model[1].running_mean.double().abs().sum().item()
    print("begun", begun)
    print(os.environ["WORLD_SIZE"], num_steps, f"{weights:.9f}", f"{means:.9f}")
destroy_process_group()
