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
from tests.harness.reused_ranks import another_group

CLEARS = (
    *("optimizer", "optimizer, to zeros", "model", "module"),
    *("by hand", "by hand, to zeros", "by hand, zeros in .data", "by hand, zeros by a product"),
)
PARTIAL_CLEARS = ("one parameter", "one parameter, to zeros", "one layer", "one layer, to zeros")
PARTIAL_PASSES = ("pass without the branch", "pass without the branch on odd ranks")
OPTIONS = {"rate": ("lr", 0.01), "decay": ("weight_decay", 0.1), "momentum": ("momentum", 0.3)}
"""Of an option that a body writes, by batch, its name and the unit of its values."""
WRITES = ("weights", "weights, replaced", *OPTIONS, "max_norm", "state")
"""What a body writes beside gradients: the weights, in place or as new tensors, options, the norm
to which a sharded optimizer clips, and the state of the optimizer, which it drops."""
FREEZES = ("freeze the branch", "unfreeze the branch", "freeze the first", "unfreeze the first")
EDITS = ("scaled", "clipped")
"""What a body does to the gradients before a step."""
COLLECTIVE = "collective"
"""A sum over the ranks that have the batch, on the group that the Join follows."""


@dataclass(frozen=True)
class Act:
    """kind: "pass", "pass in no_sync", "pass through both", "step", or one of those above.
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
            if act.kind == "pass" or act.kind in PARTIAL_PASSES:
                sent.add(act.model)
            elif act.kind == "pass through both":
                sent = {0, 1}
            elif act.kind == "pass in no_sync":
                sent.discard(act.model)
            elif act.kind == "step" and act.model in sent:
                sent.remove(act.model)
                found.add((epoch, batch, number))
    return found


class Net(torch.nn.Sequential):
    """Three layers, of which the second is a branch that a pass need not use."""

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(*size) for size in ((3, 4), (4, 4), (4, 3))))

    def forward(self, x: torch.Tensor, uses_branch: bool = True) -> torch.Tensor:
        first, branch, last = self
        x = first(x)
        out: torch.Tensor = last(x + branch(x).sin() if uses_branch else x)
        return out


class Model:
    """A small network, and its optimizer; alone, or on one of several ranks."""

    def __init__(self, number: int, momentum: float, group: Any = None, way: str = "") -> None:
        generator = torch.Generator().manual_seed(number + 5)
        self.net: Any = Net().double()
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
        self.max_norm: float | None = None
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
        if what in OPTIONS:
            name, unit = OPTIONS[what]
            self.optimizer.param_groups[0][name] = unit * (1 + batch % 3)
        elif what == "max_norm":
            norm = (0.1, None, 0.3)[batch % 3]
            clips = isinstance(self.optimizer, cl.ZeroRedundancyOptimizer)
            (self.optimizer if clips else self).max_norm = norm
        elif what == "state":
            self.optimizer.state.clear()
        for parameter in self.module.parameters() if what.startswith("weights") else ():
            if "replaced" in what:
                parameter.data = parameter.data * 0.9
            else:
                parameter.clamp_(-0.3, 0.4)

    def step(self) -> None:
        """Gradients that stay after the step are not clipped."""
        kept = [(p, p.grad.clone()) for p in self.module.parameters() if p.grad is not None]
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_norm)
        self.optimizer.step()
        for parameter, gradient in kept if self.max_norm is not None else ():
            parameter.grad.copy_(gradient)
        self.num_steps += 1

    def edit(self, how: str) -> None:
        if how == "clipped":
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.1)
        for parameter in self.module.parameters() if how == "scaled" else ():
            if parameter.grad is not None:
                parameter.grad *= 0.5

    def clear(self, how: str) -> None:
        if how.startswith("optimizer"):
            self.optimizer.zero_grad(set_to_none="zeros" not in how)
        elif how in ("model", "module"):
            (self.net if how == "model" else self.module).zero_grad()
        else:
            one_layer = [*self.module[1 if "layer" in how else 2].parameters()]
            some = one_layer[: 1 if "parameter" in how else None]
            for parameter in some if how in PARTIAL_CLEARS else self.net.parameters():
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


def loss_of(models: Sequence[Model], act: Act, data: torch.Tensor, rank: int) -> torch.Tensor:
    first, *others = [models[act.model], *models]
    if act.kind == "pass through both":
        for other in others:
            if other is not first:
                return other.net(first.net(data)).sin().mean()
    leaves_out = act.kind in PARTIAL_PASSES and ("odd" not in act.kind or rank % 2 == 1)
    return first.net(data, not leaves_out).sin().mean() / 2


def _act(
    models: Sequence[Model], act: Act, place: Place, ranks: Sequence[int], divisor: float
) -> None:
    """ranks: whose passes are run. divisor: of their losses."""
    model = models[act.model]
    epoch, batch, number = place
    if act.kind == "step":
        model.step()
    elif act.kind in WRITES:
        model.write(act.kind, batch)
    elif act.kind in EDITS:
        model.edit(act.kind)
    elif act.kind in FREEZES:
        layer = model.module[1 if "branch" in act.kind else 0]
        layer.requires_grad_("unfreeze" in act.kind)
    elif "pass" not in act.kind:
        model.clear(act.kind)
    for rank in ranks if "pass" in act.kind else ():
        data = data_of(rank, batch + 7 * epoch, number)
        is_quiet = "no_sync" in act.kind and model.net is not model.module
        with model.net.no_sync() if is_quiet else contextlib.nullcontext():
            (loss_of(models, act, data, rank) / divisor).backward()


def live_in(lengths: Sequence[int], epoch: int, batch: int) -> list[int]:
    numbers = enumerate(of_epoch(lengths, epoch))
    return [rank for rank, length in numbers if length > batch]


def _sum_up(group: cl.Group, lengths: Sequence[int], epoch: int, batch: int) -> None:
    total = torch.tensor([float(group.rank + 1 + batch)])
    group.all_reduce(total).wait()
    expected = sum(rank + 1 + batch for rank in live_in(lengths, epoch, batch))
    assert total.item() == expected, (epoch, batch, total, expected)


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
            for number, act in enumerate(body):
                place = epoch, batch, number
                is_done = act.is_done_in(batch) and act.kind != COLLECTIVE
                if is_done and (act.kind != "step" or place in steps):
                    _act(models, act, place, live_in(lengths, epoch, batch), len(lengths))
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
    """way: "zero"; "plain", where joined ranks step nothing; or "along", where they step along what
    the body calls to step.
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
                            if act.is_done_in(batch) and act.kind == COLLECTIVE:
                                _sum_up(beside[0], lengths, epoch, batch)
                            elif act.is_done_in(batch) and (act.kind != "step" or place in steps):
                                _act(models, act, place, [own.rank], 1)
        except (RuntimeError, cl.CollectiveError) as error:
            return f"{type(error).__name__}: {error}"
        if way == "zero":
            for model in models:
                model.num_steps = model.optimizer.num_steps
        return values_of(models)
