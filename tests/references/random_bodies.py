"""Bodies of training loops: a list of what one batch does, run on ranks and in one process.

A body is plain data. Each of its acts belongs to one of two models and says in which batches it is
done, so two batches need not be alike. In one process the acts of a batch are done in their order:
each backward pass for all ranks that have the batch, and each clear and each step once, for all.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import chorusline as cl
from tests.harness.standing_ranks import another_group

CLEARS = (
    *("optimizer", "optimizer, to zeros", "model", "module"),
    *("by hand", "by hand, to zeros", "by hand, zeros in .data", "by hand, zeros by a product"),
)
WRITES = ("weights", "weights, replaced", "rate", "state")
"""What a body writes beside gradients: the weights, in place or as new tensors, the learning rate,
and the state of the optimizer, which it drops."""


@dataclass(frozen=True)
class Act:
    """kind: "pass", "pass in no_sync", "pass through both", "step", or one of CLEARS or WRITES.
    model: the number of the model, 0 or 1. every, at: in which batches."""

    kind: str
    model: int = 0
    every: int = 1
    at: int = 0

    def is_done_in(self, batch: int) -> bool:
        return batch % self.every == self.at % self.every


Place = tuple[int, int, int]
"""An epoch, a batch, and the number of an act in the body."""


def steps_of(body: Sequence[Act], num_batches: int, epochs: int) -> set[Place]:
    """Where a step can be taken: a pass has sent gradients since the last one, and none came after
    that are still to be sent."""
    sent, found = set[int](), set[Place]()
    for epoch, batch in itertools.product(range(epochs), range(num_batches)):
        for number, act in enumerate(body):
            if not act.is_done_in(batch):
                continue
            if act.kind == "pass":
                sent.add(act.model)
            elif act.kind == "pass through both":
                sent = {0, 1}
            elif act.kind == "pass in no_sync":
                sent.discard(act.model)
            elif act.kind == "step" and act.model in sent:
                sent.remove(act.model)
                found.add((epoch, batch, number))
    return found


class Model:
    """A small network, and its optimizer; alone, or on one of several ranks."""

    def __init__(self, number: int, momentum: float, group: Any = None, way: str = "") -> None:
        generator = torch.Generator().manual_seed(number + 5)
        self.net: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)).double()
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator).double() / 2)
        self.module = self.net
        self.optimizer: Any
        if group is not None:
            self.net = cl.DistributedDataParallel(self.module, group, bucket_cap_mb=1e-4)
        if way == "zero":
            self.optimizer = cl.ZeroRedundancyOptimizer(
                self.net, torch.optim.SGD, lr=0.01, momentum=momentum
            )
        else:
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=momentum)
        self.num_steps = 0
        self.average = torch.zeros(4, 3).double()

    def hook(self) -> None:
        """Each step shrinks the weights before it, and averages them after it."""
        weight = self.module[0].weight

        @torch.no_grad()
        def before(*_: object) -> None:
            weight.mul_(0.95)

        @torch.no_grad()
        def after(*_: object) -> None:
            self.average.mul_(0.9).add_(weight)

        self.optimizer.register_step_pre_hook(before)
        self.optimizer.register_step_post_hook(after)

    @torch.no_grad()
    def write(self, what: str, batch: int) -> None:
        if what == "rate":
            self.optimizer.param_groups[0]["lr"] = 0.01 * (1 + batch % 3)
        elif what == "state":
            self.optimizer.state.clear()
        for parameter in self.module.parameters() if what.startswith("weights") else ():
            if "replaced" in what:
                parameter.data = parameter.data * 0.9
            else:
                parameter.clamp_(-0.3, 0.4)

    def clear(self, how: str) -> None:
        if how.startswith("optimizer"):
            self.optimizer.zero_grad(set_to_none="zeros" not in how)
        elif how in ("model", "module"):
            (self.net if how == "model" else self.module).zero_grad()
        else:
            for parameter in self.net.parameters():
                if "zeros" not in how:
                    parameter.grad = None
                elif parameter.grad is not None and "product" in how:
                    parameter.grad *= 0
                elif parameter.grad is not None:
                    (parameter.grad.data if ".data" in how else parameter.grad).zero_()


def of_epoch(lengths: Sequence[int], epoch: int) -> Sequence[int]:
    """By rank, its number of batches: in every second epoch in reversed order."""
    return lengths[::-1] if epoch % 2 else lengths


def data_of(rank: int, batch: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 50 * batch + number)
    return torch.randn(2, 3, generator=generator, dtype=torch.float64)


def loss_of(models: Sequence[Model], act: Act, data: torch.Tensor) -> torch.Tensor:
    first, *others = [models[act.model], *models]
    if act.kind == "pass through both":
        for other in others:
            if other is not first:
                return other.net(first.net(data)).sin().mean()
    return first.net(data).sin().mean() / 2


def _act(
    models: Sequence[Model], act: Act, batch: int, passes: Sequence[tuple[torch.Tensor, float]]
) -> None:
    """batch: its number. passes: the batches, and what the loss of each is divided by."""
    model = models[act.model]
    if act.kind == "step":
        model.optimizer.step()
        model.num_steps += 1
    elif act.kind in WRITES:
        model.write(act.kind, batch)
    elif "pass" not in act.kind:
        model.clear(act.kind)
    for data, divisor in passes if "pass" in act.kind else ():
        is_quiet = "no_sync" in act.kind and model.net is not model.module
        with model.net.no_sync() if is_quiet else contextlib.nullcontext():
            (loss_of(models, act, data) / divisor).backward()


def in_one_process(
    body: Sequence[Act],
    lengths: Sequence[int],
    num_models: int,
    epochs: int,
    momentum: float,
    hooks: bool = False,
) -> list[torch.Tensor]:
    models = [Model(number, momentum) for number in range(num_models)]
    for model in models if hooks else ():
        model.hook()
    steps = steps_of(body, max(lengths), epochs)
    for epoch in range(epochs):
        for batch in range(max(lengths)):
            numbers = enumerate(of_epoch(lengths, epoch))
            live = [rank for rank, length in numbers if length > batch]
            for number, act in enumerate(body):
                place = epoch, batch, number
                if act.is_done_in(batch) and (act.kind != "step" or place in steps):
                    data = [data_of(rank, batch + 7 * epoch, number) for rank in live]
                    _act(models, act, batch, [(one, float(len(lengths))) for one in data])
    return values_of(models)


def values_of(models: Sequence[Model]) -> list[torch.Tensor]:
    return [
        *(p.detach().clone() for model in models for p in model.module.parameters()),
        *(model.average.clone() for model in models),
        torch.tensor([float(model.num_steps) for model in models]),
    ]


def on_ranks(
    group: cl.Group,
    body: Sequence[Act],
    lengths: Sequence[int],
    num_models: int,
    epochs: int,
    momentum: float,
    way: str,
    joins: bool,
    follows: bool = False,
    hooks: bool = False,
) -> Any:
    """way: "zero"; "plain", where joined ranks step nothing; or "along", where they step along.
    follows: whether the Join has a group to follow. Returns the parameters and the numbers of
    steps, or an error."""
    with another_group(group) as own:
        beside = [own.new_group(range(own.size))] if follows else []
        models = [Model(number, momentum, own, way) for number in range(num_models)]
        for model in models if hooks else ():
            model.hook()
        steps = steps_of(body, max(lengths), epochs)
        listed = [[m.net, m.optimizer] if way == "zero" else [m.net] for m in models]
        along = [m.optimizer for m in models] if way == "along" else []
        try:
            joinables = list(itertools.chain(*listed))
            join = cl.Join(joinables, joins, step_along=along, groups=beside, skew_warning=None)
            for epoch in range(epochs):
                with join:
                    for batch in range(of_epoch(lengths, epoch)[own.rank]):
                        for number, act in enumerate(body):
                            place = epoch, batch, number
                            if act.is_done_in(batch) and (act.kind != "step" or place in steps):
                                data = data_of(own.rank, batch + 7 * epoch, number)
                                _act(models, act, batch, [(data, 1.0)])
        except (RuntimeError, cl.CollectiveError) as error:
            return f"{type(error).__name__}: {error}"
        if way == "zero":
            for model in models:
                model.num_steps = model.optimizer.num_steps
        return values_of(models)
