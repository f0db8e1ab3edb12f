"""A small GPT learns Python from Python's own standard library, on data of uneven lengths.

The corpus is on every machine with Python: the library's source files, as bytes. Each file goes to
one rank as a whole, so the ranks get different numbers of batches. The run survives a lost worker:
kill one while it trains, with the line that the program prints. Read `train` first; the
rest is its data, its model and its output.

    python examples/stdlib_gpt.py                    two CPU workers, about a minute
    python examples/stdlib_gpt.py --strike           one of them is killed after a third of the run
    python examples/stdlib_gpt.py --verify           also compare with PyTorch in one process
    python examples/stdlib_gpt.py --gpu --workers 8 --preset large --files 400
    ray job submit --working-dir . -- python examples/stdlib_gpt.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chorusline as cl


@dataclass(frozen=True)
class Plan:
    """What is trained, and how: equal for all ranks and for the one-process reference."""

    model: GPTConfig
    epochs: int
    batch_size: int
    lr: float
    seed: int


@dataclass(frozen=True)
class Trained:
    """The result of rank 0."""

    parameters: dict[str, Tensor]  # on the CPU
    sample: str
    samples_used: int | None  # in the last epoch, by all ranks
    num_threads: int  # of torch; with the same number the reference sums in the same order


def train(ctx: cl.Context, corpus: Corpus, plan: Plan) -> Trained | None:
    """Runs on every rank. It is plain PyTorch except for two wrappers, `Join` and `ctx.shard`.

    Two things let it survive a lost worker: with `replicas=2` two ranks hold each part of the
    optimizer's state, and a new worker gets the state of what is registered.
    """
    torch.manual_seed(plan.seed)
    net = GPT(plan.model).to(ctx.device)
    model = ctx.register("model", cl.DistributedDataParallel(net))
    optim = ctx.register(
        "optim", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=plan.lr, replicas=2)
    )
    # Where a worker comes in at the last step of all, this function runs again without an epoch.
    samples_used = None
    for epoch in ctx.epochs(plan.epochs):
        batches = ctx.shard(
            corpus,
            batch_size=plan.batch_size,
            epoch=epoch,
            seed=plan.seed,
            keep_together=corpus.file_of,
        )
        with cl.Join([model, optim], skew_warning=None):  # The files are of very uneven lengths.
            for number, batch in enumerate(batches, start=1):
                loss = model(batch.to(ctx.device))
                loss.backward()
                optim.step()
                optim.zero_grad()
                ctx.report(
                    loss=loss,
                    tokens=batch[:, 1:].numel(),
                    epoch=epoch,
                    batches_left=len(batches) - number,
                )
        samples_used = batches.num_used
    if ctx.rank != 0:
        return None
    return Trained(
        parameters={name: value.cpu() for name, value in net.state_dict().items()},
        sample=generate(net, prompt="def ", num_bytes=300),
        samples_used=samples_used,
        num_threads=torch.get_num_threads(),
    )


# The corpus

# Left out: packages that are not of the library, and files that read least like it (tests, tables).
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
NOT_LIBRARY |= {"encodings", "lib2to3", "pydoc_data", "tkinter", "turtledemo", "ensurepip"}


class Corpus:
    """Blocks of `block` + 1 bytes (the last one is only a target), each within one file."""

    def __init__(self, files: Sequence[bytes], block: int) -> None:
        self.files = [torch.frombuffer(bytearray(f), dtype=torch.uint8) for f in files if f]
        self.block = block
        self.blocks = [  # each by the number of its file, and its first byte there
            (number, start)
            for number, file in enumerate(self.files)
            for start in range(0, len(file) - block, block)
        ]

    @property
    def file_of(self) -> list[int]:
        """By sample."""
        return [number for number, _ in self.blocks]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, sample: int) -> Tensor:
        """(block + 1,) int64."""
        number, start = self.blocks[sample]
        return self.files[number][start : start + self.block + 1].long()


def library_files(limit: int) -> list[Path]:
    """The first `limit` source files of the running interpreter's library, by name."""
    library = sysconfig.get_path("stdlib")
    files: list[Path] = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda file: file.relative_to(library).as_posix())[:limit]


def schedule(corpus: Corpus, plan: Plan, num_ranks: int, epoch: int) -> list[list[list[int]]]:
    """By rank, the sample numbers of each batch, as `ctx.shard` deals them in `train`."""
    hands = cl.deal(
        len(corpus),
        world_size=num_ranks,
        seed=plan.seed,
        epoch=epoch,
        shuffle=True,
        keep_together=corpus.file_of,
    )
    size = plan.batch_size
    return [[hand[i : i + size] for i in range(0, len(hand), size)] for hand in hands]


def longest_epoch(corpus: Corpus, plan: Plan, num_ranks: int) -> int:
    """The most batches that a rank has in an epoch."""
    epochs = range(plan.epochs)
    return max(len(own) for epoch in epochs for own in schedule(corpus, plan, num_ranks, epoch))


def cut(corpus: Corpus, plan: Plan, num_ranks: int, num_steps: int) -> None:
    """Leave only so many blocks, of all files, that no epoch has more steps.

    The loop of `train` is not cut instead: where workers change, it begins again, with the samples
    that are left.
    """
    while (longest := longest_epoch(corpus, plan, num_ranks)) > num_steps:
        num_kept = len(corpus) * num_steps // longest
        corpus.blocks = [corpus.blocks[i * len(corpus) // num_kept] for i in range(num_kept)]


# The model


@dataclass(frozen=True)
class GPTConfig:
    num_layers: int
    num_heads: int
    width: int
    block: int = 128  # bytes of context


PRESETS = {
    "tiny": GPTConfig(num_layers=2, num_heads=2, width=32),  # 41 thousand parameters
    "small": GPTConfig(num_layers=3, num_heads=4, width=96),  # 381 thousand
    "medium": GPTConfig(num_layers=8, num_heads=8, width=256),  # 6.4 million
    "large": GPTConfig(num_layers=12, num_heads=12, width=768),  # 85 million
}


class Layer(nn.Module):
    """Attention, then a perceptron; each reads the normalized residual stream and adds to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.widen = nn.Linear(config.width, 4 * config.width, bias=False)
        self.narrow = nn.Linear(4 * config.width, config.width, bias=False)
        nn.init.zeros_(self.attention_out.weight)  # At first each layer is the identity.
        nn.init.zeros_(self.narrow.weight)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(norm(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        q, k = norm(rotated(q)), norm(rotated(k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        perceived: Tensor = self.narrow(F.relu(self.widen(norm(x))).square())
        return x + perceived


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.block = config.block
        self.embedding = nn.Embedding(256, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.head = nn.Linear(config.width, 256, bias=False)
        nn.init.zeros_(self.head.weight)  # The first loss is that of equal odds: ln 256 = 5.55.

    def logits(self, tokens: Tensor) -> Tensor:
        """(batch, length) int64 -> (batch, length, 256)."""
        x = norm(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(norm(x))
        return logits

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length + 1) int64 -> mean loss of predicting the next byte, in nats per byte."""
        return F.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotated(x: Tensor) -> Tensor:
    """(…, length, size): each pair rotated by an angle that grows with the position, more slowly
    from pair to pair.

    Source: Su et al., RoFormer, arXiv:2104.09864, section 3.4.
    """
    length, half = x.shape[-2], x.shape[-1] // 2
    speeds = 10_000 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(length, device=x.device), speeds)
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


@torch.no_grad()
def generate(model: GPT, prompt: str, num_bytes: int, temperature: float = 0.8) -> str:
    tokens = torch.tensor([list(prompt.encode())], device=model.head.weight.device)
    for _ in range(num_bytes):
        logits = model.logits(tokens[:, -model.block :])[:, -1] / temperature
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


# The reference


def train_in_one_process(
    corpus: Corpus, plan: Plan, num_ranks: int, device: str
) -> dict[str, Tensor]:
    """The same schedule without Chorusline: one model, torch's AdamW, the ranks' batches in turn.

    A step's gradient is the sum over the ranks that still have data, divided by the number of all
    ranks, which is the default of torch's Join.
    """
    torch.manual_seed(plan.seed)
    model = GPT(plan.model).to(device)
    optim = torch.optim.AdamW(model.parameters(), lr=plan.lr)
    for epoch in range(plan.epochs):
        batches = schedule(corpus, plan, num_ranks, epoch)
        for step in range(max(map(len, batches))):
            for rank in range(num_ranks):
                if step < len(batches[rank]):
                    batch = torch.stack([corpus[sample] for sample in batches[rank][step]])
                    model(batch.to(device)).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= num_ranks
            optim.step()
            optim.zero_grad()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def compare(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> str:
    difference = max(float((ours[name] - reference[name]).abs().max()) for name in reference)
    largest = max(float(value.abs().max()) for value in reference.values())
    return (
        f"parameters against one process with torch.optim.AdamW: largest difference "
        f"{difference:.1e}, relative to the largest parameter {difference / largest:.1e}"
        + (" (equal bit for bit)" if difference == 0 else "")
    )


# The output: metrics.jsonl, loss.png


def metrics(reports: Sequence[cl.Report], num_ranks: int) -> list[dict[str, Any]]:
    """One record per step, from the reports of its ranks. A rank without a report has run out of
    data, or, if it had batches left when it reported last, is lost."""
    live_at: dict[int, dict[int, cl.Report]] = defaultdict(dict)
    for report in reports:
        live_at[report.taken][report.rank] = report
    start = min((report.time for report in reports), default=0.0)
    batches_left = dict.fromkeys(range(num_ranks), 1)
    records = []
    for step, live in sorted(live_at.items()):
        for rank, report in live.items():
            batches_left[rank] = report.values["batches_left"]
        absent = [rank for rank in range(num_ranks) if rank not in live]
        records.append(
            {
                "step": step,
                "epoch": min(report.values["epoch"] for report in live.values()),
                "loss": mean(report.values["loss"] for report in live.values()),
                "loss_by_rank": [
                    live[rank].values["loss"] if rank in live else None for rank in range(num_ranks)
                ],
                "out_of_data": [rank for rank in absent if not batches_left[rank]],
                "lost": [rank for rank in absent if batches_left[rank]],
                "tokens": sum(report.values["tokens"] for report in live.values()),
                "seconds": round(max(report.time for report in live.values()) - start, 3),
            }
        )
    return records


def num_repeated(reports: Sequence[cl.Report]) -> int:
    """Steps that a rank has taken more than once."""
    times = Counter((report.rank, report.taken) for report in reports)
    return len({step for (_, step), count in times.items() if count > 1})


def plot_loss(records: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """The loss over the steps; below it one lane per rank, coloured while the rank has data."""
    from matplotlib.figure import Figure  # Optional: only the plot needs it.

    num_ranks = len(records[0]["loss_by_rank"])
    steps = [record["step"] for record in records]
    losses = [record["loss"] for record in records]
    smooth = []
    for i in range(len(steps)):
        reach = min(1 + len(steps) // 50, i, len(steps) - 1 - i)  # equal on both sides
        smooth.append(mean(losses[i - reach : i + reach + 1]))
    somebody_is_out = [bool(record["out_of_data"]) for record in records]

    figure = Figure(figsize=(9, 5), layout="constrained")
    heights = [6, min(0.4 + 0.4 * num_ranks, 4)]
    loss, lanes = figure.subplots(2, sharex=True, height_ratios=heights)
    loss.fill_between(
        steps, 0, 1, where=somebody_is_out, step="mid", transform=loss.get_xaxis_transform(),
        color="0.93", linewidth=0, label="a rank is out of data",
    )  # fmt: skip
    for before, record in pairwise(records):
        if len(record["lost"]) > len(before["lost"]):
            for axes in (loss, lanes):
                axes.axvline(record["step"], color="crimson", linewidth=1, linestyle="--")
    for rank in range(num_ranks):
        own = [record["loss_by_rank"][rank] for record in records]
        present = [value is not None for value in own]
        color = f"C{rank % 10}"
        name = f"rank {rank}" if num_ranks <= 8 else None
        loss.plot(
            steps,
            [nan if x is None else x for x in own],
            color=color,
            alpha=0.45,
            linewidth=0.8,
            label=name,
        )
        lane = {"y1": rank - 0.35, "y2": rank + 0.35, "step": "mid", "linewidth": 0}
        lanes.fill_between(steps, where=present, color=color, alpha=0.8, **lane)
        lanes.fill_between(steps, where=[not p for p in present], color="0.85", **lane)
    loss.plot(steps, smooth, color="black", linewidth=1.8, label="mean, smoothed")
    loss.set(ylabel="loss, nats a byte", title=title)
    loss.legend(frameon=False, ncols=2)
    loss.grid(axis="y", color="0.9")
    lanes.set(xlabel="step (coloured: the rank has data; dashed: a worker is lost)", xlim=(0, None))
    lanes.set(ylabel="rank", ylim=(num_ranks - 0.5, -0.5))
    lanes.yaxis.get_major_locator().set_params(integer=True)
    lanes.spines[:].set_visible(False)
    loss.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# The program


async def main() -> None:
    args, plan, corpus = from_command_line()
    print(
        f"{len(corpus.files)} library files, {len(corpus)} blocks of {corpus.block} bytes; "
        f"GPT with {sum(p.numel() for p in GPT(plan.model).parameters()):,} parameters",
        flush=True,
    )
    reports: list[cl.Report] = []
    try:
        with cl.Progress() as progress:
            async with cl.Session(
                num_workers=(1, args.workers),
                use_gpu=args.gpu,
                on_report=reports.append,
                progress=progress,
            ) as session:
                num_ranks = session.num_workers
                await tell_how_to_kill(session)
                trained, *_ = await session.run(train, corpus=corpus, plan=plan)
    finally:  # The reports of a failed run are worth reading, too.
        records = metrics(reports, args.workers)
        (args.out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))

    print(summary(records))
    count = num_repeated(reports)
    repeated = f"{count} step{'s' * (count != 1)} repeated"
    if trained.samples_used is None:
        print(repeated)
    else:
        lost = max(0, len(corpus) - trained.samples_used)
        print(f"{repeated}, {lost} of {len(corpus)} samples lost")
    try:
        day = time.strftime("%Y-%m-%d")
        plot_loss(records, args.out / "loss.png", f"stdlib_gpt --preset {args.preset}, {day}")
        print(f"written: {args.out / 'loss.png'}, {args.out / 'metrics.jsonl'}")
    except ModuleNotFoundError as error:
        print(f"written: {args.out / 'metrics.jsonl'}; no loss.png, since there is no {error.name}")
        print("For the plot: pip install matplotlib")
    print(f"sample:\n{trained.sample}\n")
    if args.verify and any(record["lost"] for record in records):
        print("not compared with one process: a worker was lost, and its batches went to others")
    elif args.verify:
        print("training again, in one process …", flush=True)
        torch.set_num_threads(trained.num_threads)
        device = "cuda" if args.gpu and torch.cuda.is_available() else "cpu"
        reference = train_in_one_process(corpus, plan, num_ranks, device)
        print(compare(trained.parameters, reference))


async def tell_how_to_kill(session: cl.Session) -> None:
    """Print the pids of the workers, and the line that kills one of them."""
    workers = [one for one in (await session.snapshot()).workers if not isinstance(one, str)]
    for worker in workers:
        print(f"worker {worker.info.seat} is process {worker.info.pid}")
    if len(workers) > 1:
        print(
            f"Kill one while it trains, in another terminal: kill -9 {workers[-1].info.pid}",
            flush=True,
        )


def strike(corpus: Corpus, plan: Plan, num_ranks: int) -> None:
    """Order the death of the last worker after a third of the first epoch's steps."""
    num_steps = max(map(len, schedule(corpus, plan, num_ranks, epoch=0)))
    os.environ["CHORUSLINE_FAULT_PLAN"] = f"kill {num_ranks - 1} at vote {1 + num_steps // 3}"


def summary(records: Sequence[dict[str, Any]]) -> str:
    seconds = records[-1]["seconds"] - records[0]["seconds"]
    lines = [
        f"{len(records)} steps in {seconds:.0f} s; "
        f"loss {records[0]['loss']:.2f} -> {records[-1]['loss']:.2f} nats a byte"
    ]
    for rank in range(len(records[0]["loss_by_rank"])):
        batches = sum(record["loss_by_rank"][rank] is not None for record in records)
        without = sum(rank in record["out_of_data"] for record in records)
        more = f", and {without} steps without data of its own" if without else ""
        lines.append(f"rank {rank}: {batches} batches{more}")
    return "\n".join(lines)


def from_command_line() -> tuple[argparse.Namespace, Plan, Corpus]:
    """Parse and check all arguments, before Ray starts."""
    parser = argparse.ArgumentParser(
        description="Trains a byte-level GPT on the source of Python's standard library."
    )
    add = parser.add_argument
    add("--workers", type=whole(1), default=2, help="at most, one device each (%(default)s)")
    add("--strike", action="store_true", help="kill one of them after a third of the run")
    add("--gpu", action="store_true", help="a GPU for each worker")
    add("--preset", choices=PRESETS, default="small", help="size of the model (%(default)s)")
    add("--files", type=whole(1), default=56, help="library files to read (%(default)s)")
    add("--epochs", type=whole(1), default=1, help="how often to read them (%(default)s)")
    add("--steps", type=whole(1), help="at most so many in an epoch, from fewer blocks (all)")
    add("--batch-size", type=whole(1), default=16, help="blocks in a rank's batch (%(default)s)")
    add("--block", type=whole(1), default=128, help="bytes the model looks back (%(default)s)")
    add("--lr", type=positive, help="AdamW's (0.3 / width of the model)")
    add("--seed", type=whole(0, 2**31 - 1), default=0, help="of parameters and deal (%(default)s)")
    add("--out", type=Path, default=Path("out"), help="folder of what is written (%(default)s)")
    add("--verify", action="store_true", help="compare with a one-process run of the schedule")
    args = parser.parse_args()

    corpus = Corpus([file.read_bytes() for file in library_files(args.files)], args.block)
    if not corpus.files:
        parser.error(f"argument --files: no source files in {sysconfig.get_path('stdlib')}")
    if not len(corpus):
        parser.error(f"argument --block: none of the files is longer than {args.block} bytes")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot make the folder {str(args.out)!r}: {error.strerror}")
    model = replace(PRESETS[args.preset], block=args.block)
    plan = Plan(
        model=model,
        epochs=args.epochs,
        batch_size=args.batch_size,
        lr=args.lr or 0.3 / model.width,
        seed=args.seed,
    )
    if args.steps:
        cut(corpus, plan, args.workers, args.steps)
    if args.strike:
        if args.workers < 2:
            parser.error("argument --strike: needs --workers 2 or more, so that one is left")
        strike(corpus, plan, args.workers)
    return args, plan, corpus


def whole(at_least: int, at_most: int = 10**9) -> Callable[[str], int]:
    def parse(text: str) -> int:
        with suppress(ValueError):
            if at_least <= int(text) <= at_most:
                return int(text)
        raise argparse.ArgumentTypeError(f"needs a whole number from {at_least}, not {text!r}")

    return parse


def positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"needs a number above 0, not {text!r}")


if __name__ == "__main__":
    asyncio.run(main())
