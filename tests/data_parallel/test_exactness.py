"""Everything together, drawn at random, against one process in float64.

A scenario is a model, inputs of uneven length and options; the reference takes the same steps with
one model and torch's own optimizer.
"""

import itertools
from array import array
from dataclasses import dataclass

import torch
from hypothesis import given, strategies as st

import chorusline as cl
from chorusline.runtime.data_parallel.distributed_data_parallel import engine_of

_OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.003}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.02}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


@dataclass(frozen=True)
class Scenario:
    """lengths: batches per rank. accumulate: batches per step. branches: parts of the model that
    a batch uses only one of. sharded: with ZeRO. weighed: losses by their number of samples. norm:
    "none", or statistics of each rank ("local") or of all ("synced"). looks_ahead: over a Shard,
    else over a list."""

    lengths: tuple[int, ...]
    optimizer: str
    sharded: bool
    norm: str
    looks_ahead: bool
    branches: int
    frozen: bool
    accumulate: int
    divide_by_initial: bool
    weighed: bool
    max_norm: float | None
    bucket_cap_mb: float
    seed: int


scenarios = st.builds(
    Scenario,
    lengths=st.lists(st.integers(0, 5), min_size=2, max_size=3).map(tuple).filter(any),
    optimizer=st.sampled_from(sorted(_OPTIMIZERS)),
    sharded=st.booleans(),
    norm=st.sampled_from(["none", "local", "synced"]),
    looks_ahead=st.booleans(),
    branches=st.integers(1, 3),
    frozen=st.booleans(),
    accumulate=st.integers(1, 3),
    divide_by_initial=st.booleans(),
    weighed=st.booleans(),
    max_norm=st.sampled_from([None, 0.05]),
    bucket_cap_mb=st.sampled_from([25.0, 2**-11]),
    seed=st.integers(0, 1000),
)


class Model(torch.nn.Module):
    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        torch.manual_seed(scenario.seed)
        has_norm = scenario.norm != "none"
        # A bias before BatchNorm has no gradient but rounding, which adaptive optimizers blow up.
        self.first = torch.nn.Linear(5, 9, bias=not has_norm)
        self.norm = torch.nn.BatchNorm1d(9) if has_norm else torch.nn.Identity()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(9, 4) for _ in range(scenario.branches))
        self.frozen = torch.nn.Linear(4, 3).requires_grad_(not scenario.frozen)
        self.never_used = torch.nn.Linear(3, 3)

    def forward(self, batch: torch.Tensor, branch: int) -> torch.Tensor:
        return self.head(self.norm(self.first(batch)), branch)

    def head(self, hidden: torch.Tensor, branch: int) -> torch.Tensor:
        return self.frozen(self.branches[branch](torch.tanh(hidden)))

    def forward_all(self, batches):
        """The outputs of several (samples, branch) pairs, with common statistics."""
        hidden = self.norm(self.first(torch.cat([samples for samples, _ in batches])))
        parts = hidden.split([len(samples) for samples, _ in batches])
        return [self.head(part, branch) for part, (_, branch) in zip(parts, batches, strict=True)]


def batches_of(scenario, rank):
    """(samples, branch) pairs; numbers of samples differ, and are at least 2 for BatchNorm."""
    generator = torch.Generator().manual_seed(1000 * scenario.seed + rank)
    made = []
    for number in range(scenario.lengths[rank]):
        samples = torch.randn(2 + (rank + number) % 3, 5, generator=generator, dtype=torch.float64)
        made.append((samples, (rank + number) % scenario.branches))
    return made


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def distributed(group, scenario):
    module = Model(scenario).double()
    if scenario.norm == "synced":
        module = cl.SyncBatchNorm.convert_sync_batchnorm(module)
    model = cl.DistributedDataParallel(module, group, bucket_cap_mb=scenario.bucket_cap_mb)
    kind, options = _OPTIMIZERS[scenario.optimizer]
    if scenario.sharded:
        optimizer = cl.ZeroRedundancyOptimizer(model, kind, max_norm=scenario.max_norm, **options)
        join = cl.Join(
            [model, optimizer],
            divide_by_initial_world_size=scenario.divide_by_initial,
            skew_warning=None,
        )
    else:
        optimizer = Clipped(trainable(model), kind, scenario.max_norm, options)
        join = cl.Join(
            [model],
            step_along=[optimizer],
            divide_by_initial_world_size=scenario.divide_by_initial,
            skew_warning=None,
        )
    batches = AsDealt(scenario, group) if scenario.looks_ahead else batches_of(scenario, group.rank)
    with join:
        for number, (samples, branch) in enumerate(batches, start=1):
            sends = number % scenario.accumulate == 0
            engine_of(model).reducer.is_syncing = sends
            loss = model(samples, branch).square().mean()
            (model.weigh(loss, len(samples)) if scenario.weighed else loss).backward()
            if sends:
                optimizer.step()
                optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


class AsDealt(cl.Shard):
    """A Shard that gives each rank the batches of the scenario."""

    def __init__(self, scenario, group):
        self._lengths = scenario.lengths
        ranks = range(group.size)
        everybodys = [batch for rank in ranks for batch in batches_of(scenario, rank)]
        own = {"rank": group.rank, "world_size": group.size}
        super().__init__(everybodys, 1, collate_fn=lambda items: items[0], **own)

    def _dealt(self, num_ranks):
        ends = list(itertools.accumulate(self._lengths))
        return [
            array("q", range(end - length, end))
            for end, length in zip(ends, self._lengths, strict=True)
        ]


class Clipped:
    """A plain optimizer that clips first, as a loop without ZeRO does."""

    def __init__(self, parameters, kind, max_norm, options):
        self.parameters = parameters
        self.optimizer = kind(parameters, **options)
        self.max_norm = max_norm
        self.zero_grad = self.optimizer.zero_grad

    def step(self):
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        self.optimizer.step()


def reference(scenario):
    """Step by step: each live rank's accumulated gradient on the common state, then one update.

    A rank's last batches that do not fill a step belong to the step of the others, and to none if
    no rank fills it. Buffers follow each rank's own batches within a step; after it all take those
    of the largest rank that had its last batch. With synced statistics each forward is over all
    ranks that have a batch, and buffers are equal throughout.
    """
    model = Model(scenario).double()
    kind, options = _OPTIMIZERS[scenario.optimizer]
    optimizer = Clipped(trainable(model), kind, scenario.max_norm, options)
    k = scenario.accumulate
    steps = [
        [batches[i : i + k] for i in range(0, len(batches), k)]
        for batches in (batches_of(scenario, rank) for rank in range(len(scenario.lengths)))
    ]
    buffers = [dict(_copied(model.named_buffers())) for _ in steps]
    for step in range(max(map(len, steps))):
        live = [rank for rank, own in enumerate(steps) if step < len(own)]
        optimizer.zero_grad()
        weights = 0.0
        if scenario.norm == "synced":
            weights += _backward_together(model, [steps[rank][step] for rank in live], scenario)
            buffers = [dict(_copied(model.named_buffers())) for _ in steps]
        for rank in live if scenario.norm != "synced" else ():
            _restore(model, buffers[rank])
            for samples, branch in steps[rank][step]:
                loss = model(samples, branch).square().mean()
                weights += len(samples)
                (loss * len(samples) if scenario.weighed else loss).backward()
            buffers[rank] = dict(_copied(model.named_buffers()))
        divisor = len(steps) if scenario.divide_by_initial else len(live)
        for parameter in trainable(model):
            if parameter.grad is not None:
                parameter.grad /= weights if scenario.weighed else divisor
        if any(len(steps[rank][step]) == k for rank in live):
            optimizer.step()
        last = max(len(steps[rank][step]) for rank in live)
        newest = max(rank for rank in live if len(steps[rank][step]) == last)
        buffers = [buffers[newest] for _ in steps]
        _restore(model, buffers[0])
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _backward_together(model, batches_by_rank, scenario):
    weights = 0.0
    for batches in itertools.zip_longest(*batches_by_rank):
        there = [batch for batch in batches if batch is not None]
        losses = [output.square().mean() for output in model.forward_all(there)]
        sizes = [len(samples) for samples, _ in there]
        weights += sum(sizes)
        factors = sizes if scenario.weighed else [1] * len(sizes)
        sum(loss * factor for loss, factor in zip(losses, factors, strict=True)).backward()
    return weights


def _copied(named):
    return [(name, tensor.clone()) for name, tensor in named]


def _restore(model, saved):
    for name, buffer in model.named_buffers():
        buffer.copy_(saved[name])


@given(scenario=scenarios)
def test_any_training_run_equals_the_one_process_reference(ranks_of, scenario):
    expected = reference(scenario)
    for state in ranks_of(len(scenario.lengths)).run(distributed, scenario):
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.allclose(state[name], tensor, rtol=1e-9, atol=1e-12), (
                name,
                (state[name] - tensor).abs().max(),
            )
