"""LoRA with peft: a small GPT-2 is trained on one package of Python's library, then only its
adapters on another.

The weights are random at first, so nothing is downloaded: a token is a byte. Only the adapters have
gradients in the second part, so only they travel between the ranks, and only their optimizer state
is sharded. Each source file goes to one rank as a whole, so the ranks have different numbers of
batches.

    python examples/lora_fine_tuning.py                two CPU workers, less than a minute

It needs transformers and peft: pip install -e '.[real]'
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

import chorusline as cl

BLOCK = 64  # bytes


class Blocks(torch.utils.data.Dataset[Tensor]):
    """Blocks of the sources of a package. file_of: by block, its file."""

    def __init__(self, package: str, most_files: int) -> None:
        folder = Path(sysconfig.get_path("stdlib")) / package
        self.blocks: list[Tensor] = []
        self.file_of: list[str] = []
        for file in sorted(folder.glob("*.py"))[:most_files]:
            text = torch.tensor(list(file.read_bytes()[: 48 * BLOCK]), dtype=torch.long)
            blocks = text[: len(text) // BLOCK * BLOCK].view(-1, BLOCK)
            self.blocks += list(blocks)
            self.file_of += [file.name] * len(blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> Tensor:
        return self.blocks[number]


def learn(ctx: cl.Context, net: torch.nn.Module, blocks: Blocks, epochs: int, lr: float) -> float:
    """Train what has gradients; return the mean loss of the last epoch, over all ranks."""
    model = cl.DistributedDataParallel(net)
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=lr)
    losses: list[float] = []
    for epoch in ctx.epochs(epochs):
        losses = []
        with cl.Join([model, optim]):
            for batch in ctx.shard(blocks, 16, epoch=epoch, keep_together=blocks.file_of):
                tokens = batch.to(ctx.device)
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optim.step()
                optim.zero_grad()
                losses.append(loss.item())
                ctx.report(loss=loss)
    return ctx.reduce(sum(losses) / len(losses), weight=len(losses))


def train(ctx: cl.Context, epochs: int, files: int) -> dict[str, float]:
    """Runs on every rank."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    ctx.seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=BLOCK,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    base = GPT2LMHeadModel(config).to(ctx.device)
    before = learn(ctx, base, Blocks("asyncio", files), epochs, lr=3e-3)
    frozen = {name: one.detach().clone() for name, one in base.named_parameters()}

    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    net = get_peft_model(base, lora)
    adapters = sum(one.numel() for one in net.parameters() if one.requires_grad)
    other = Blocks("email", files)
    first = learn(ctx, net, other, 1, lr=1e-2)
    after = learn(ctx, net, other, epochs, lr=1e-2)
    kept = dict(net.get_base_model().named_parameters())
    moved = sum(
        not torch.equal(kept[name if name in kept else adapted(name)], one)
        for name, one in frozen.items()
    )
    return {
        "loss of the base": before,
        "loss before": first,
        "loss after": after,
        "adapters": adapters,
        "parameters": sum(one.numel() for one in frozen.values()),
        "base tensors that moved": moved,
    }


def adapted(name: str) -> str:
    """The name of a parameter of a layer that has got an adapter."""
    layer, _, kind = name.rpartition(".")
    return f"{layer}.base_layer.{kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--files", type=int, default=9)
    options = parser.parse_args()
    results = cl.run(train, num_workers=options.workers, epochs=options.epochs, files=options.files)
    for name, value in results[0].items():
        print(f"{name}: {value:,.3f}" if isinstance(value, float) else f"{name}: {value:,}")


if __name__ == "__main__":
    main()
