"""A training script in the manner of nanoGPT: the variables of torchrun, DDP, accumulation of
gradients, a checkpoint that the master writes. nanogpt_like.py FOLDER [DIES_AT]
"""

import math
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

folder = Path(sys.argv[1])
dies_at = int(sys.argv[2]) if len(sys.argv) > 2 else None
max_iters, save_every, block, batch_size, accumulation = 12, 4, 16, 2, 4


@dataclass
class GPTConfig:
    n_embd: int = 16
    n_head: int = 2


class Block(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.ln = torch.nn.LayerNorm(config.n_embd)
        self.attn = torch.nn.Linear(config.n_embd, 3 * config.n_embd)
        self.mlp = torch.nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        b, t, c = x.shape
        heads = self.attn(self.ln(x)).view(b, t, 3, self.config.n_head, -1).transpose(1, 3)
        q, k, v = heads.unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(y.transpose(1, 2).reshape(b, t, c))


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = torch.nn.Embedding(256, config.n_embd)
        self.wpe = torch.nn.Embedding(block, config.n_embd)
        self.block = Block(config)
        self.lm_head = torch.nn.Linear(config.n_embd, 256, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        return F.cross_entropy(self.lm_head(self.block(x)).flatten(0, 1), targets.flatten())


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
else:
    rank, world_size = 0, 1
assert accumulation % world_size == 0
accumulation //= world_size
text = torch.tensor(list(Path(__file__).read_bytes()))


def get_batch(iteration, micro_step):
    """The same sequences at any number of ranks."""
    seed = iteration * 100 + micro_step * world_size + rank
    starts = torch.randint(
        len(text) - block - 1, (batch_size,), generator=torch.Generator().manual_seed(seed)
    )
    rows = torch.stack([text[one : one + block + 1] for one in starts])
    return rows[:, :-1], rows[:, 1:]


torch.manual_seed(1337)
config = GPTConfig()
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
iteration = 0
if (folder / "ckpt.pt").exists():
    # The checkpoint has a class of this script in it, whose module is __main__.
    checkpoint = torch.load(folder / "ckpt.pt", weights_only=False)
    assert asdict(checkpoint["config"]) == asdict(config)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iteration = checkpoint["iteration"]
begun = iteration
raw_model = model
if ddp:
    model = DDP(model)
while iteration < max_iters:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * iteration / max_iters))
    for micro_step in range(accumulation):
        if ddp:
            model.require_backward_grad_sync = micro_step == accumulation - 1
        (model(*get_batch(iteration, micro_step)) / accumulation).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
    if iteration % save_every == 0 and rank == 0:
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"iteration": iteration, "config": config}, folder / "ckpt.tmp")
        (folder / "ckpt.tmp").replace(folder / "ckpt.pt")
    if iteration == dies_at and rank == world_size - 1 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    total = sum(one.double().abs().sum().item() for one in raw_model.parameters())
    print("begun", begun)
    print(world_size, iteration, f"{total:.6f}")
if ddp:
    destroy_process_group()
