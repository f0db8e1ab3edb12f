"""A training script in the manner of torchtitan: a device mesh, FSDP2 over each block and the
whole, clipping over DTensors, a distributed checkpoint. torchtitan_like.py FOLDER [DIES_AT]
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

folder = Path(sys.argv[1])
dies_at = int(sys.argv[2]) if len(sys.argv) > 2 else None
steps, save_every = 9, 3

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
rank = dist.get_rank()
torch.manual_seed(0)
with torch.device("meta"):
    layers = [torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 8)]
    model = torch.nn.Sequential(*layers)
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh["dp"])
model.to_empty(device="cpu")
for number, parameter in enumerate(model.parameters()):
    whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 8
    local = dist.tensor.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    parameter.data.copy_(local)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)


class TrainState:
    """In the checkpoint beside the model: the steps taken."""

    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


train_state = TrainState()


def everything():
    weights, moments = get_state_dict(model, optim)
    return {"model": weights, "optim": moments, "train": train_state}


saved = sorted(folder.glob("step-*/.metadata"))
if saved:
    state = everything()
    dcp.load(state, checkpoint_id=saved[-1].parent)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
begun = train_state.step
while train_state.step < steps:
    generator = torch.Generator().manual_seed(100 * train_state.step + rank)
    batch = torch.randn(4, 8, generator=generator)
    loss = (model(batch) - batch.flip(1)).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optim.step()
    optim.zero_grad()
    train_state.step += 1
    if train_state.step % save_every == 0:
        dcp.save(everything(), checkpoint_id=folder / f"step-{train_state.step:03}")
    if train_state.step == dies_at and rank == mesh.size() - 1 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
total = sum(one.full_tensor().double().abs().sum().item() for one in model.parameters())
if rank == 0:
    print("begun", begun)
    print(mesh.size(), train_state.step, f"{total:.9f}", f"{norm.item():.6f}")
dist.destroy_process_group()
