"""The numbers of an object that a save compares between the ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import chorusline as cl
from chorusline.runtime.checkpoint.replica_check import checksums_of, numbers_in, why_unlike
from tests.references.checkpoint_runs import in_run


def test_counts_are_found_and_what_is_no_count_is_left_out():
    state = {
        "step": 3,
        "rates": [0.5, torch.tensor(0.25)],
        "average": {"n": torch.tensor([7])},
        "weights": torch.zeros(2),
        "name": "sgd",
        "large": 1 << 2000,
        "nowhere": torch.zeros((), device="meta"),
        "wave": torch.zeros((), dtype=torch.complex64),
    }
    found = {"o.step": 3.0, "o.rates.0": 0.5, "o.rates.1": 0.25, "o.average.n": 7.0}
    assert numbers_in("o", state) == found


def test_a_state_of_any_depth_and_size_is_looked_at_in_part():
    deep, twice, itself = [], (1,), [5]
    for _ in range(10_000):
        deep = [deep]
    for _ in range(60):
        twice = (twice, twice)  # 2**60 numbers in 60 tuples
    itself.append(itself)
    state = {"deep": deep, "itself": itself, "step": 3, "twice": twice, "x": [["x"] * 10**6]}
    found = numbers_in("o", state)
    assert (found["o.step"], found["o.itself.0"], found["o.itself.1.0"]) == (3.0, 5.0, 5.0)
    assert len(found) <= 10_000


def test_what_differs_is_named_with_its_ranks():
    alike = {"o.step": 3.0, "o.loss": math.nan}
    assert why_unlike([alike, {}, dict(alike), {}]) is None
    unlike = why_unlike([{}, alike, {"o.step": 2.0}])
    assert unlike == ("o.step is 3 on rank 1, 2 on rank 2", (2,))


def test_a_conjugate_view_has_the_checksum_of_its_values():
    wave = torch.tensor([1 + 2j, 3 - 1j])
    for view in (wave.conj(), wave.conj().imag):
        found = checksums_of("o", [("w", view)])
        assert found == checksums_of("o", [("w", view.resolve_conj().resolve_neg())])


# -- Ranks that train apart ------------------------------------------------------------------------


def _train_apart(group: cl.Group, config: cl.CheckpointConfig, kind: str) -> list[str]:
    """What is said of a save after each of six steps. The ranks average after steps 1 and 4."""

    def train(ctx: cl.Context) -> list[str]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1, bias=False))
        model: torch.nn.Module = net
        if kind == "hook":
            model = cl.DistributedDataParallel(net)
            state = cl.PostLocalSGDState(ctx.group, None, 0, post_local_gradient_allreduce=False)
            model.register_comm_hook(state, cl.post_localSGD_hook)
        ctx.register("model", model)
        averager = cl.PeriodicModelAverager(period=3, process_group=ctx.group)
        optim: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "optimizer":
            optim = cl.PostLocalSGDOptimizer(optim, averager)
        ctx.register("optim", optim)
        said = []
        for step in range(1, 7):
            model(torch.ones(2, 3) * (1 + ctx.rank)).sum().backward()
            optim.step()
            optim.zero_grad()
            # A hook is enough for the ranks to differ, whoever averages.
            if kind == "hook" and step in (1, 4):
                for parameter in net.parameters():
                    parameter.data = ctx.reduce(parameter.data) / ctx.world_size
            elif kind not in ("hook", "optimizer"):
                averager.average_parameters(net.parameters())
            try:
                ctx.save(config.storage_path + f"/{step}").wait()
                said.append("")
            except cl.CheckpointWriteFailed as error:
                said.append(str(error))
        return said

    return in_run(group, train, config)


@pytest.mark.parametrize("kind", ["hook", "optimizer", "averager"])
def test_parameters_that_the_ranks_train_apart_are_saved_only_where_they_are_averaged(
    ranks_of, tmp_path: Path, kind: str
):
    said, other = ranks_of(2).run(_train_apart, cl.CheckpointConfig(tmp_path), kind)
    assert said == other
    assert [bool(word) for word in said] == [False, True, True, False, True, True]
    assert "was not written, on rank 1: the checksum of model.0.weight is " in said[1]
    assert "save right after a step in which all ranks average" in said[1]
    assert "per_rank=True" in said[1]


def _average_more_later(group: cl.Group, config: cl.CheckpointConfig) -> str:
    """What is said of a save after a step apart with all parameters, when so far only those of the
    head were averaged."""

    def train(ctx: cl.Context) -> str:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
        ctx.register("model", net)
        averager = cl.PeriodicModelAverager(period=2, process_group=ctx.group)
        averager.average_parameters(net[1].parameters())
        net[1].requires_grad_(False)
        optim = torch.optim.SGD(net[0].parameters(), lr=0.1)
        net(torch.ones(2, 3) * (1 + ctx.rank)).sum().backward()
        optim.step()
        averager.average_parameters(net.parameters())
        try:
            ctx.save().wait()
        except cl.CheckpointWriteFailed as error:
            return str(error)
        return ""

    return in_run(group, train, config)


def test_parameters_that_are_averaged_later_are_compared_too(ranks_of, tmp_path: Path):
    for word in ranks_of(2).run(_average_more_later, cl.CheckpointConfig(tmp_path)):
        assert "was not written, on rank 1: the checksum of model.0.weight is " in word


def _keep_own_parameters(
    group: cl.Group, config: cl.CheckpointConfig, num_steps: int
) -> list[list[float]]:
    """The parameters of this rank, and the momenta, at the end of steps that no average follows."""

    def train(ctx: cl.Context) -> list[list[float]]:
        model = cl.DistributedDataParallel(torch.nn.Linear(3, 2))
        state = cl.PostLocalSGDState(ctx.group, None, 0, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, cl.post_localSGD_hook)
        averager = cl.PeriodicModelAverager(100, 1, ctx.group)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optim = cl.PostLocalSGDOptimizer(inner, averager)
        ctx.register("model", model, per_rank=True)
        ctx.register("optim", optim, per_rank=True)
        for _ in range(num_steps):
            model(torch.ones(2, 3) * (1 + ctx.rank)).sum().backward()
            optim.step()
            optim.zero_grad()
        ctx.save().wait()
        kept = [optim.state[one]["momentum_buffer"] for one in model.parameters()]
        return [one.flatten().tolist() for one in (*model.parameters(), *kept)]

    return in_run(group, train, config)


def test_with_per_rank_each_rank_goes_on_with_its_own_parameters(ranks_of, tmp_path: Path):
    config = cl.CheckpointConfig(tmp_path)
    saved = ranks_of(2).run(_keep_own_parameters, config, 3)
    assert saved[0] != saved[1]
    assert ranks_of(2).run(_keep_own_parameters, config, 0) == saved


def test_in_the_first_steps_of_post_local_sgd_the_ranks_are_equal(ranks_of, tmp_path: Path):
    assert ranks_of(2).run(_save_in_the_warmup, cl.CheckpointConfig(tmp_path)) == [True, True]


def _save_in_the_warmup(group: cl.Group, config: cl.CheckpointConfig) -> bool:
    def train(ctx: cl.Context) -> bool:
        model = cl.DistributedDataParallel(torch.nn.Linear(3, 5))
        model.register_comm_hook(cl.PostLocalSGDState(ctx.group, None, 4), cl.post_localSGD_hook)
        ctx.register("model", model)
        averager = cl.PeriodicModelAverager(3, 4, ctx.group)
        optim = cl.PostLocalSGDOptimizer(torch.optim.AdamW(model.parameters()), averager)
        ctx.register("optim", optim)
        model(torch.randn(2, 3)).sum().backward()
        optim.step()
        return ctx.save().wait().num_bytes > 0

    return in_run(group, train, config)
