"""Runs of a small model that save and resume, as the ranks of a group; no Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import chorusline as cl
from chorusline.actors.messages.messages import Assignment, RunRequest
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.reporting.report_buffer import ReportBuffer
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.runtime.program.program import Program

GLOBAL_BATCH = 12  # samples of a step, over all ranks; 1, 2, 3 and 4 divide it


def in_run(
    group: cl.Group, train: Callable[..., Any], config: cl.CheckpointConfig | None, **kwargs: Any
) -> Any:
    """What a session's worker does with a train function."""
    assignment = Assignment(
        generation=group.generation,
        rank=group.rank,
        world_size=group.size,
        local_rank=group.rank,
        local_world_size=group.size,
        node_rank=0,
    )
    request = RunRequest(0, group.timeout_s, keep_reports=False)
    # Of a run that does not go on when a rank is lost.
    lifeline = Lifeline(request, None, assignment, lambda: group)
    lifeline.begin()
    program = Program(train, kwargs, config)
    return program(assignment, group, ReportBuffer(keep=False), lifeline, RunStatus(), None)


def make_model(
    dtype: torch.dtype = torch.float32, width: int = 13, is_local: bool = True
) -> torch.nn.Module:
    """is_local: with a layer whose result depends on how samples are dealt out to ranks."""
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(width) if is_local else torch.nn.LayerNorm(width)
    return torch.nn.Sequential(
        torch.nn.Linear(7, width), torch.nn.Tanh(), norm, torch.nn.Linear(width, 5)
    ).to(dtype)


def batch_of(step: int, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    samples = torch.randn(GLOBAL_BATCH, 7, generator=generator, dtype=torch.float64)
    return samples.to(dtype)[rank * GLOBAL_BATCH // size : (rank + 1) * GLOBAL_BATCH // size]


class Parts:
    """The objects of a run. zero: of the sharded optimizer."""

    def __init__(
        self,
        ctx: cl.Context,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        dtype: torch.dtype = torch.float32,
        width: int = 13,
        is_local: bool = True,
        **zero: Any,
    ) -> None:
        self.ctx = ctx
        self.is_local = is_local
        self.dtype = dtype
        self.model = cl.DistributedDataParallel(make_model(dtype, width, is_local).to(ctx.device))
        self.optim = cl.ZeroRedundancyOptimizer(self.model, optimizer, lr=1e-2, **zero)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optim, 2, 0.5)
        ctx.register("model", self.model)
        ctx.register("optimizer", self.optim)
        ctx.register("schedule", self.schedule)
        ctx.register("random", cl.RandomState())

    def step(self) -> None:
        batch = batch_of(self.ctx.step, self.ctx.rank, self.ctx.world_size, self.dtype)
        batch = batch.to(self.ctx.device)
        loss = self.model(batch).square().mean()
        if self.is_local:
            loss = loss * (1 + torch.rand(()).to(self.dtype))  # Each rank's generator is saved.
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        self.schedule.step()

    def state(self) -> dict[str, Any]:
        """Everything, the same on all ranks, in the plain format."""
        self.optim.consolidate_state_dict(to=0)
        told = self.optim.state_dict() if self.ctx.rank == 0 else None
        return {
            "model": {k: v.to("cpu", copy=True) for k, v in self.model.module.state_dict().items()},
            "optimizer": self.ctx.broadcast(told),
            "schedule": self.schedule.state_dict(),
            "step": self.ctx.step,
        }


def train(
    ctx: cl.Context, until: int, save_at: int = -1, place: str | Path | None = None, **options: Any
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Steps up to number `until`; the last state, and the state when it was saved."""
    parts = Parts(ctx, **options)
    saved = None
    while ctx.step < until:
        parts.step()
        if ctx.step == save_at:
            saving = ctx.save(place)
            saved = parts.state()
            saving.wait()
    return parts.state(), saved


def run_train(group: cl.Group, config: cl.CheckpointConfig | None, kwargs: dict[str, Any]) -> Any:
    return in_run(group, train, config, **kwargs)


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
