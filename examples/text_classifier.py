"""A classifier of transformers learns whether a piece of text is Python, C++ or English.

The model is a small BERT with random weights, made from a config, and the texts are those of
installed packages, so nothing is downloaded: a token is a byte. Each text goes to one rank as a
whole, so the ranks have different numbers of batches. The run continues when a worker is lost.

    python examples/text_classifier.py                 two CPU workers, less than a minute
    python examples/text_classifier.py --workers 4

It needs transformers: pip install -e '.[real]'
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

import chorusline as cl

KINDS = ("Python", "C++", "English")
PIECE = 64  # bytes


def texts(kind: str) -> list[bytes]:
    """What Python's library, torch's headers and Python's own help have of that kind."""
    if kind == "English":
        return [topic.encode() for _, topic in sorted(topics.items())]
    python = Path(sysconfig.get_path("stdlib")) / "email"
    headers = Path(torch.__file__).parent / "include" / "c10" / "util"
    found = python.glob("*.py") if kind == "Python" else headers.glob("*.h")
    return [one.read_bytes() for one in sorted(found)]


class Pieces(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pieces of texts, with the number of their kind. text_of: by piece, its text."""

    def __init__(self, texts_per_kind: int) -> None:
        self.pieces: list[tuple[bytes, int]] = []
        self.text_of: list[tuple[int, int]] = []
        for label, kind in enumerate(KINDS):
            long = [one for one in texts(kind) if len(one) > 8 * PIECE][:texts_per_kind]
            for number, text in enumerate(long):
                starts = range(0, min(len(text) - PIECE, 40 * PIECE), PIECE)
                self.pieces += [(text[start : start + PIECE], label) for start in starts]
                self.text_of += [(label, number)] * len(starts)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        piece, label = self.pieces[number]
        return {"input_ids": torch.tensor(list(piece)), "labels": torch.tensor(label)}


def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=256,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=PIECE,
        num_labels=len(KINDS),
    )
    net: torch.nn.Module = BertForSequenceClassification(config)
    return net


def train(ctx: cl.Context, epochs: int, texts_per_kind: int) -> tuple[int, float]:
    """Runs on every rank. Returns its number of batches, and the accuracy over all samples."""
    ctx.seed(0)
    pieces = Pieces(texts_per_kind)
    model = ctx.register("model", cl.DistributedDataParallel(bert().to(ctx.device)))
    optim = ctx.register(
        "optim", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=3e-3, replicas=2)
    )
    batches = 0
    for epoch in ctx.epochs(epochs):
        shard = ctx.shard(pieces, 16, epoch=epoch, keep_together=pieces.text_of)
        with cl.Join([model, optim]):
            for batch in shard:
                loss = model(**{name: one.to(ctx.device) for name, one in batch.items()}).loss
                loss.backward()
                optim.step()
                optim.zero_grad()
                batches += 1
                ctx.report(loss=loss)
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for batch in ctx.shard(pieces, 64, shuffle=False):
            logits = model.module(input_ids=batch["input_ids"].to(ctx.device)).logits
            right += int((logits.argmax(1).cpu() == batch["labels"]).sum())
            seen += len(batch["labels"])
    return batches, ctx.reduce(right, "sum") / ctx.reduce(seen, "sum")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--texts", type=int, default=9, help="of each kind")
    options = parser.parse_args()
    results = cl.run(
        train, num_workers=(1, options.workers), epochs=options.epochs, texts_per_kind=options.texts
    )
    for rank, (batches, _) in enumerate(results):
        print(f"rank {rank}: {batches} batches")
    print(f"accuracy {results[0][1]:.3f}")


if __name__ == "__main__":
    main()
