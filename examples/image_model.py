"""A convolutional network with SyncBatchNorm learns to read letters, drawn in matplotlib's fonts.

The statistics of a batch are those of all ranks, even of the last batch, which is smaller, and with
a rank that has run out of letters. All letters of a font go to one rank. One font is kept for the
test.

    python examples/image_model.py                     two CPU workers, less than a minute

It needs matplotlib and Pillow: pip install -e '.[examples]'
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import chorusline as cl

LETTERS = "abcdefghij"
SIZE = 20  # pixels
UNSEEN = "DejaVuSansMono.ttf"


def fonts() -> list[Path]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return sorted([*folder.glob("DejaVuS*.ttf"), *folder.glob("STIXGeneral*.ttf")])


def drawn(file: Path, letter: str, height: int, shift: tuple[int, int]) -> Tensor:
    """(1, SIZE, SIZE), from 0 to 1."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("L", (SIZE, SIZE))
    place = (SIZE / 2 + shift[0], SIZE / 2 + shift[1])
    ImageDraw.Draw(picture).text(
        place, letter, fill=255, anchor="mm", font=ImageFont.truetype(str(file), height)
    )
    return torch.tensor(list(picture.tobytes())).view(1, SIZE, SIZE) / 255


class Letters(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Each letter of each font in several sizes and places. font_of: by picture."""

    def __init__(self, files: list[Path]) -> None:
        self.pictures: list[tuple[Tensor, int]] = []
        self.font_of: list[str] = []
        for file in files:
            for label, letter in enumerate(LETTERS):
                for height, shift in ((12, (0, 0)), (14, (1, 0)), (14, (-1, 1)), (16, (0, -1))):
                    self.pictures.append((drawn(file, letter, height, shift), label))
                    self.font_of.append(file.name)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.pictures[number]


def network() -> nn.Module:
    def block(channels: int, width: int) -> nn.Sequential:
        convolution = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU())

    return nn.Sequential(
        *(block(1, 16), block(16, 32), block(32, 64)), nn.Flatten(), nn.Linear(64 * 9, len(LETTERS))
    )


def train(ctx: cl.Context, epochs: int) -> tuple[list[int], float, float]:
    """Runs on every rank. Returns the numbers of batches by rank, the accuracy on a font that was
    not trained with, and the first running mean of the first SyncBatchNorm."""
    ctx.seed(0)
    letters = Letters([font for font in fonts() if font.name != UNSEEN])
    net = cl.SyncBatchNorm.convert_sync_batchnorm(network().to(ctx.device))
    model = cl.DistributedDataParallel(net)
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=3e-3)
    for epoch in ctx.epochs(epochs):
        shard = ctx.shard(letters, 16, epoch=epoch, keep_together=letters.font_of)
        with cl.Join([model, optim]):
            for pictures, labels in shard:
                logits = model(pictures.to(ctx.device))
                loss = nn.functional.cross_entropy(logits, labels.to(ctx.device))
                loss.backward()
                optim.step()
                optim.zero_grad()
                ctx.report(loss=loss)
    model.eval()
    test = Letters([font for font in fonts() if font.name == UNSEEN])
    with torch.no_grad():
        logits = net(torch.stack([picture for picture, _ in test.pictures]).to(ctx.device)).cpu()
    right = logits.argmax(1) == torch.tensor([label for _, label in test.pictures])
    mean = net.get_buffer("0.1.running_mean")[0].item()
    return shard.batches_per_rank, right.float().mean().item(), mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    results = cl.run(train, num_workers=options.workers, epochs=options.epochs)
    for rank, batches in enumerate(results[0][0]):
        print(f"rank {rank}: {batches} batches in the last epoch")
    print(f"statistics {'equal' if len({one[2] for one in results}) == 1 else 'different'}")
    print(f"accuracy {results[0][1]:.3f}")


if __name__ == "__main__":
    main()
