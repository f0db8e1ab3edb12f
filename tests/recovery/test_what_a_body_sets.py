"""What the loop's body sets by hand outlives a lost worker, and reaches one that comes later."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.collectives.objects.blocking import all_gather_object
from chorusline.runtime.data_parallel.buffers import Buffers
from chorusline.runtime.process.registry import Registered, Registry
from chorusline.runtime.program.context import call_of
from chorusline.runtime.recovery.restart import RestartState
from chorusline.runtime.recovery.state_transfer import transfer_state
from tests.harness.stand_in_gpu.runs import in_run
from tests.references.training import per_channel
from tests.references.training_to_kill import die

NUM_STEPS = 6


class Cooling(torch.nn.Module):
    """The body lowers its temperature, and its norm writes buffers in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.linear = torch.nn.Linear(4, 2)
        self.register_buffer("temperature", torch.ones(()))
        self.seen = {"batches": 0}

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(self.norm(inputs)) / self.temperature
        return outputs


class Metric(torch.nn.Module):
    """As those of torchmetrics: its state_dict() has what is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "total"] = self.total

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self.total = state_dict[prefix + "total"]


class Versioned(torch.nn.Linear):
    """It converts what it would have saved earlier, and has a buffer."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("count", torch.zeros(()))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel").T
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


class Reading(torch.nn.Linear):
    """It reads its own parameter from what it loads, and has a buffer."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("count", torch.zeros(()))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        assert state_dict[prefix + "weight"].shape == self.weight.shape
        super()._load_from_state_dict(state_dict, prefix, *others)


class Points:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((4,), float(number))


# -- after a loss --------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_kept_buffers_have_what_the_body_has_written_since_the_step(
    alone: cl.Group, sharded: bool
) -> None:
    """Up to the forward pass of the next step, which does not count yet."""
    module = Cooling()
    buffers = Buffers(module, travel=True, is_kept=True)
    buffers.count_when_agreed = sharded

    def kept() -> tuple[float, int]:
        now = buffers.committed()
        return float(now["temperature"]), int(now["norm.num_batches_tracked"])

    for step in range(3):
        for _ in range(2):  # Of two micro-batches the first one begins the step.
            buffers.begin_forward()
            module(torch.randn(3, 4))
            assert kept() == (0.25**step, 2 * step)
        buffers.sync(0, alone)
        if not sharded:
            assert kept() == (0.25**step, 2 * step), "the step is agreed on, and not taken"
            buffers.keep_agreed()
        module.temperature.mul_(0.5)
        assert kept() == (0.5 * 0.25**step, 2 * step + 2)
        buffers.begin_forward(begins_step=False)  # A validation.
        module.eval()(torch.randn(3, 4))
        module.train().temperature.mul_(0.5)
        assert kept() == (0.25 ** (step + 1), 2 * step + 2)
        # A rank that is inside the step runs all this itself.
        assert float(buffers.agreed()["temperature"]) == 0.25**step


def train(ctx: cl.Context, folder: Path, sharded: bool) -> dict[str, Any]:
    """Rank 1 is killed once, in the fourth step: behind its forward pass, or before that, where the
    others wait for it outside of a step."""
    torch.manual_seed(0)
    module = Cooling()
    model = ctx.register("model", cl.DistributedDataParallel(module))
    optim: Any
    if sharded:
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, replicas=2)
    else:
        optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ctx.register("optim", optim)
    began_at, is_victim = ctx.step, ctx.rank == 1 and not (folder / "died").exists()
    for epoch in ctx.epochs(1):
        for step in ctx.steps(Points(), 4, 2, epoch=epoch):
            dies = is_victim and step.number == 3
            # What the body puts back at its end is not kept.
            was_training = module.linear.training
            module.linear.eval()
            if dies and sharded:
                (folder / "died").touch()
                die()
            ctx.reduce(1.0)
            for batch in step:
                loss = model(batch).square().mean()
                if dies:
                    (folder / "died").touch()
                    die()
                loss.backward()
            optim.step()
            optim.zero_grad()
            module.linear.train(was_training)
            module.temperature.mul_(0.5)
            module.seen["batches"] += 1
            if step.number == 1:
                module.norm.eval()
                module.linear.bias.requires_grad_(False)
    return {
        "began at": began_at,
        "temperature": float(module.temperature),
        "seen": module.seen["batches"],
        "batches": int(module.norm.num_batches_tracked),
        "training": [module.training, module.linear.training, module.norm.training],
        "trained": [name for name, p in module.named_parameters() if p.requires_grad],
    }


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
async def test_what_the_body_sets_is_there_when_the_function_runs_again(
    session: cl.Session, tmp_path: Path, sharded: bool
) -> None:
    told = await session.run(train, folder=tmp_path, sharded=sharded)
    assert (tmp_path / "died").exists()
    assert max(one.pop("began at") for one in told) == 3
    for one in told:
        assert one == {
            "temperature": 0.5**NUM_STEPS,
            "seen": NUM_STEPS,
            "batches": 2,
            "training": [True, True, False],
            "trained": ["norm.weight", "norm.bias", "linear.weight"],
        }


def made(max_norm: float | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(Cooling())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, max_norm=max_norm)
    beside = {"metric": Metric(), "quantized": per_channel()}
    counting = {"versioned": Versioned(), "reading": Reading()}
    return {"model": model, "optim": optim, **beside, **counting}


class Meter:
    """Averages a loss, and does not detach it."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@dataclass
class Average:
    value: torch.Tensor


def test_a_state_with_the_graph_of_a_loss_is_kept_without_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = weight.sum()
    registry = Registry()
    registry.add("meter", Meter(loss=loss, last=[loss], inside=Average(weight * 3), of=weight))
    kept = RestartState.of(registry, (1, 1), {}).states["meter"]
    assert (float(kept["loss"]), kept["inside"].value.tolist()) == (2.0, [3.0, 3.0])
    assert kept["last"][0] is kept["loss"] is not loss
    assert not kept["loss"].requires_grad and kept["of"].requires_grad
    assert kept["of"] is not weight


def test_the_error_for_a_state_that_cannot_be_copied_names_the_object() -> None:
    registry = Registry()
    registry.add("meter", Meter(lock=threading.Lock()))
    with pytest.raises(TypeError, match="lock") as caught:
        RestartState.of(registry, (1, 1), {})
    assert "'meter'" in str(caught.value.__notes__)


def begin_again(ctx: cl.Context) -> dict[str, Any]:
    """Keeps what it has after a step, makes its objects again, and gives it to them."""
    first = made(max_norm=2.0)
    model, optim = first["model"], first["optim"]
    for name, one in first.items():
        ctx.register(name, one)
    model(torch.randn(3, 4)).square().mean().backward()
    optim.step()
    # Of the ranks the first leads, and the other one may not have come to this.
    if ctx.rank == 0:
        optim.max_norm = 0.25
        model.module.seen["batches"] = 7
        first["metric"].total += 3.0
        first["versioned"].count += 5
        first["reading"].count += 6
        first["quantized"](torch.tensor([[0.0, 127.5, 255.0]]))
    call = call_of(ctx)
    kept = RestartState.of(call.registry, (0, 0), {})
    summaries = all_gather_object(ctx.group, kept.summary(True, None))
    again = made(max_norm=1.0)
    for name, one in again.items():
        kept.restore(Registered(name, one, per_rank=False), summaries, ctx.group)
    model.module.seen["batches"] = 8
    return {
        "max_norm": again["optim"].max_norm,
        "seen": again["model"].module.seen["batches"],
        "metric": float(again["metric"].total),
        "counts": [int(again[name].count) for name in ("versioned", "reading")],
        "maxima": again["quantized"].activation_post_process.max_val.tolist(),
    }


def _begins_again(group: Any) -> Any:
    return in_run(group, begin_again, goes_on=True)


def test_objects_that_are_made_again_have_what_the_body_has_set(ranks_of: Any) -> None:
    for one in ranks_of(2).run(_begins_again):
        assert one == {
            "max_norm": 0.25,
            "seen": 7,
            "metric": 3.0,
            "counts": [5, 6],
            "maxima": [0.0, 127.5, 255.0],
        }


def begin_again_per_rank(ctx: cl.Context) -> tuple[float, float, float]:
    """The last rank is a newcomer, which has kept nothing."""
    norms = [torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)]
    model = cl.DistributedDataParallel(norms[1], broadcast_buffers=False)
    models: list[Any] = [norms[0], model, norms[1]]

    def fill(of_rank: float) -> None:
        torch.nn.init.constant_(norms[0].weight, of_rank)
        for one in norms:
            torch.nn.init.constant_(one.running_mean, of_rank)

    fill(ctx.rank)
    for name, one in zip(("norm", "model", "module"), models, strict=True):
        ctx.register(name, one, per_rank=True)
    was_there = ctx.rank < ctx.world_size - 1
    kept = RestartState.of(call_of(ctx).registry, (0, 0), {}) if was_there else RestartState()
    if ctx.rank == 1:  # It had not taken the leader's last step.
        kept.tensors["module"]["weight"].zero_()
    torch.nn.init.constant_(norms[1].weight, -1.0 - ctx.rank)
    fill(9)
    summaries = all_gather_object(ctx.group, kept.summary(was_there, None))
    for entry in call_of(ctx).registry:
        kept.restore(entry, summaries, ctx.group)
    means = [float(one.running_mean[0]) for one in norms if one.running_mean is not None]
    assert norms[1].weight.eq(1.0).all(), "the parameters of a model are equal on all ranks"
    return float(norms[0].weight[0]), means[0], means[1]


def _begins_again_per_rank(group: Any) -> Any:
    return in_run(group, begin_again_per_rank, goes_on=True)


def test_a_module_that_is_registered_per_rank_takes_what_its_own_rank_has_kept(
    ranks_of: Any,
) -> None:
    told = ranks_of(3).run(_begins_again_per_rank)
    assert told == [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (9.0, 9.0, 9.0)]


def keep_beside(ctx: cl.Context, beside: str) -> dict[str, int]:
    """The module, or a part of it, is registered beside the model over it, or in a model of its
    own. The last forward pass has no step. Returns the batches that each has counted."""
    counter, part = torch.nn.BatchNorm1d(4, affine=False), Cooling()
    module = torch.nn.Sequential(counter, part)
    made = {"module": module, "part": part, "part without parameters": counter}
    own = made[beside] if beside in made else cl.DistributedDataParallel(part)
    ctx.register(beside, own)
    model = ctx.register("model", cl.DistributedDataParallel(module))
    optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1))
    model(torch.randn(3, 4)).square().mean().backward()
    optim.step()
    model(torch.randn(3, 4))
    kept = RestartState.of(call_of(ctx).registry, (0, 0), {})
    return {
        name: max(int(n) for key, n in tensors.items() if key.endswith("num_batches_tracked"))
        for name, tensors in kept.tensors.items()
    }


@pytest.mark.parametrize("beside", ["module", "part", "part without parameters", "part's model"])
def test_a_module_beside_its_model_has_no_buffers_of_a_step_that_does_not_count(
    alone: cl.Group, beside: str
) -> None:
    keep = partial(keep_beside, beside=beside)
    assert in_run(alone, keep, goes_on=True) == {"model": 1, beside: 1}


def wrap_again(ctx: cl.Context, dtype: torch.dtype) -> bool:
    """The function has its module from outside, and begins with what that had before the run.
    Whether the module is as trained when it has been registered again."""
    torch.manual_seed(0)
    module = Cooling().to(dtype)
    before = copy.deepcopy(module.state_dict())

    def register(kept: RestartState | None, summaries: Any = ()) -> tuple[Any, Any]:
        module.load_state_dict(before)
        model = cl.DistributedDataParallel(module)
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1, replicas=2)
        for name, one in {"model": model, "optim": optim}.items():
            if kept is None:
                ctx.register(name, one)
            else:
                kept.restore(Registered(name, one, per_rank=False), summaries, ctx.group)
        return model, optim

    model, optim = register(None)
    for _ in range(3):
        model(torch.randn(3, 4, dtype=dtype)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    with torch.no_grad():  # As a body clamps them.
        module.linear.weight.fill_(0.5)
    trained = [p.detach().clone() for p in module.parameters()]
    kept = RestartState.of(call_of(ctx).registry, (0, 0), {})
    register(kept, all_gather_object(ctx.group, kept.summary(True, None)))
    return all(map(torch.equal, module.parameters(), trained))


def _wraps_again(group: Any, dtype: torch.dtype) -> Any:
    return in_run(group, partial(wrap_again, dtype=dtype), goes_on=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_module_from_outside_that_is_wrapped_again_is_as_trained(
    ranks_of: Any, dtype: torch.dtype
) -> None:
    assert all(ranks_of(3).run(_wraps_again, dtype))


# -- for a worker that comes ----------------------------------------------------------------------


def transfer(ctx: cl.Context) -> dict[str, Any]:
    """Rank 1 has run by itself, and takes the state of rank 0 between two steps."""
    torch.manual_seed(0)
    module = Cooling()
    model = ctx.register("model", cl.DistributedDataParallel(module))
    optim = ctx.register(
        "optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, replicas=2)
    )
    quantized: Any = ctx.register("quantized", per_channel())
    own = ctx.register("own", torch.nn.BatchNorm1d(2), per_rank=True)
    torch.nn.init.constant_(own.weight, ctx.rank)
    torch.nn.init.constant_(own.running_mean, ctx.rank)
    recovery, is_new = call_of(ctx).recovery, ctx.rank == 1
    assert recovery is not None
    for _ in ctx.epochs(1):
        for step in ctx.steps(Points(), 8, 4):
            for batch in step:
                model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
            if step.number == 1 and not is_new:
                module.temperature.mul_(0.5)
                optim.max_norm = 0.25
                module.seen["batches"] = 7
                quantized(torch.tensor([[0.0, 127.5, 255.0]]))
                module.norm.eval()
                module.linear.bias.requires_grad_(False)
            if step.number == 1:
                steps = recovery.arrivals.steps
                assert steps is not None
                transfer_state(recovery._objects, steps, 0, ctx.group, is_new=is_new)
                assert own.weight.eq(ctx.rank).all() and own.running_mean.eq(ctx.rank).all()
    return {
        "temperature": float(module.temperature),
        "max_norm": optim.max_norm,
        "seen": module.seen["batches"],
        "maxima": quantized.activation_post_process.max_val.tolist(),
        "training": [module.training, module.norm.training],
        "trained": [name for name, p in module.named_parameters() if p.requires_grad],
    }


def _transfers(group: Any) -> Any:
    return in_run(group, transfer, goes_on=True)


def test_a_worker_that_comes_has_what_the_body_of_the_others_has_set(ranks_of: Any) -> None:
    for one in ranks_of(2).run(_transfers):
        assert one == {
            "temperature": 0.5,
            "max_norm": 0.25,
            "seen": 7,
            "maxima": [0.0, 127.5, 255.0],
            "training": [True, False],
            "trained": ["norm.weight", "norm.bias", "linear.weight"],
        }
