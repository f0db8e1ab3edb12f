"""Every pair of what docs/training.md says to combine, against one process.

The reference takes float64, except where half precision is one of the pair: then it takes the same
dtype, and rounding may lead it one unit of the last place away.
"""

import itertools
import operator
from dataclasses import dataclass, replace

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data_parallel.distributed_data_parallel import engine_of
from tests.harness.ranks import error_of
from tests.references.training import batches_of


@dataclass(frozen=True)
class Options:
    """lengths: batches per rank. half: "parameters" in bfloat16, or "autocast". norm: "local" or
    "synced" statistics. hook: a communication hook that gives half the mean."""

    zero: bool = False
    accumulate: int = 1
    max_norm: float | None = None
    scaling: bool = False
    half: str | None = None
    weighed: bool = False
    lengths: tuple[int, int] = (4, 4)
    norm: str | None = None
    hook: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return {None: torch.float64, "autocast": torch.float32, "parameters": torch.bfloat16}[
            self.half
        ]


FEATURES = {
    "zero": {"zero": True},
    "accumulation": {"accumulate": 2},
    "clipping": {"max_norm": 0.2},
    "loss scaling": {"scaling": True},
    "half parameters": {"half": "parameters"},
    "autocast": {"half": "autocast"},
    "weighed losses": {"weighed": True},
    "join": {"lengths": (6, 2)},
    "batch norm": {"norm": "local"},
    "sync batch norm": {"norm": "synced"},
    "hook": {"hook": True},
}
REFUSED = [{"hook", "zero"}, {"hook", "weighed losses"}]  # test_comm_hooks.py has the reasons
PAIRS = [
    (one, other)
    for one, other in itertools.combinations(FEATURES, 2)
    if not FEATURES[one].keys() & FEATURES[other].keys() and {one, other} not in REFUSED
]


def make_model(options):
    torch.manual_seed(0)
    # A bias before BatchNorm has no gradient but rounding.
    norm = [torch.nn.BatchNorm1d(13)] if options.norm else []
    return torch.nn.Sequential(
        torch.nn.Linear(7, 13, bias=not norm), *norm, torch.nn.Tanh(), torch.nn.Linear(13, 5)
    ).to(options.dtype)


def samples_of(rank, options):
    return [b[: 3 - rank] for b in batches_of(rank, options.lengths[rank], options.dtype)]


def outputs_of(model, batch, options):
    with torch.autocast("cpu", torch.bfloat16, enabled=options.half == "autocast"):
        return model(batch)


def loss_of(output):
    return (
        output.float().square().mean() if output.dtype == torch.bfloat16 else output.square().mean()
    )


class ScaledStep:
    """What a loop does between backward and zero_grad; with a plain optimizer, `step_along` too."""

    def __init__(self, optimizer, scaler, max_norm):
        self.optimizer, self.scaler, self.max_norm = optimizer, scaler, max_norm

    def step(self):
        if self.scaler and self.max_norm:
            self.scaler.unscale_(self.optimizer)
        if self.max_norm:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()


def half_the_mean(group, bucket):
    work = group.all_reduce(bucket.buffer(), cl.ReduceOp.AVG)
    return work.get_future().then(lambda future: future.value()[0] / 2)


def train(group, options):
    module = make_model(options)
    if options.norm == "synced":
        module = cl.SyncBatchNorm.convert_sync_batchnorm(module)
    model = cl.DistributedDataParallel(module, group)
    if options.hook:
        model.register_comm_hook(group, half_the_mean)
    scaler = None
    if options.zero:
        optimizer = cl.ZeroRedundancyOptimizer(
            model, torch.optim.SGD, lr=0.5, momentum=0.5, max_norm=options.max_norm
        )
        joined, followers = [model, optimizer], []
        if options.scaling:
            scaler = cl.GradScaler(optimizer, init_scale=2.0**6, growth_interval=2)
            joined.append(scaler)
        stepper = ScaledStep(optimizer, scaler, None)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        if options.scaling:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
        stepper = ScaledStep(optimizer, scaler, options.max_norm)
        joined, followers = [model], [stepper]
    with cl.Join(joined, step_along=followers, skew_warning=None):
        for number, batch in enumerate(samples_of(group.rank, options), start=1):
            engine_of(model).reducer.is_syncing = number % options.accumulate == 0
            loss = loss_of(outputs_of(model, batch, options))
            loss = model.weigh(loss, len(batch)) if options.weighed else loss
            (scaler.scale(loss) if scaler else loss).backward()
            if engine_of(model).reducer.is_syncing:
                stepper.step()
                optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def reference(options):
    """Each step: all live ranks' accumulated gradients, summed, divided, clipped, applied once."""
    model = make_model(options)
    parameters = list(model.parameters())
    # Sharded parameters of half precision are stepped as float32 copies.
    has_masters = options.zero and options.half == "parameters"
    masters = [p.detach().float() if has_masters else p for p in parameters]
    optimizer = torch.optim.SGD(masters, lr=0.5, momentum=0.5)
    data = [samples_of(rank, options) for rank in range(2)]
    longest, k = max(options.lengths), options.accumulate
    buffers = [_buffers(model), _buffers(model)]
    for start in range(0, longest, k):
        live = [rank for rank in range(2) if start < options.lengths[rank]]
        totals = [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            for p in parameters
        ]
        weights = 0
        if options.norm == "synced":
            model.zero_grad()
            for number in range(start, min(start + k, longest)):
                batches = [own[number] for own in data if number < len(own)]
                sizes = [len(batch) for batch in batches]
                losses = map(loss_of, outputs_of(model, torch.cat(batches), options).split(sizes))
                factors = sizes if options.weighed else [1] * len(sizes)
                sum(map(operator.mul, losses, factors)).backward()
                weights += sum(sizes)
            totals = [p.grad.to(t) for p, t in zip(parameters, totals, strict=True)]
        else:
            for rank in live:
                model.zero_grad()
                model.load_state_dict(buffers[rank], strict=False)
                for batch in data[rank][start : start + k]:
                    loss = loss_of(outputs_of(model, batch, options))
                    (loss * len(batch) if options.weighed else loss).backward()
                    weights += len(batch)
                totals = [t + p.grad for p, t in zip(parameters, totals, strict=True)]
                buffers[rank] = _buffers(model)
            # Outside Join, too, all take those of one rank.
            buffers = [buffers[max(live)]] * 2
            model.load_state_dict(buffers[0], strict=False)
        for master, total, parameter in zip(masters, totals, parameters, strict=True):
            total = total.to(parameter.dtype).to(master.dtype)
            master.grad = total / (weights if options.weighed else 2) / (2 if options.hook else 1)
        if options.max_norm:
            torch.nn.utils.clip_grad_norm_(masters, options.max_norm)
        optimizer.step()
        if has_masters:
            with torch.no_grad():
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.copy_(master)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize(
    "pair",
    [
        # Half of the pairs of each feature are left to the slow suite.
        pytest.param(pair, marks=[pytest.mark.slow] if number % 2 else [], id=" and ".join(pair))
        for number, pair in enumerate(PAIRS)
    ],
)
def test_a_pair_of_the_table_equals_one_process(ranks_of, pair):
    options = Options(**FEATURES[pair[0]], **FEATURES[pair[1]])
    alone = options.zero or options.hook
    for case in [options] if alone else [options, replace(options, zero=True)]:
        expected = reference(case)
        start = make_model(case).state_dict()
        # In bfloat16 the last place of a number below one is 2**-8; torch rounds running
        # statistics at every stage of their update.
        tolerance = 1e-10 if case.half is None else 2**-7
        for state in ranks_of(2).run(train, case):
            for name, tensor in expected.items():
                difference = (state[name].double() - tensor.double()).abs().max().item()
                assert difference <= tolerance * (2 if "running" in name else 1), (case, name)
        moved = max((expected[n].double() - start[n].double()).abs().max() for n in expected)
        assert moved > 4 * tolerance, "a wrong divisor would be seen"


def refusals(group):
    model = cl.DistributedDataParallel(make_model(Options()), group)
    calls = (
        lambda: cl.ZeroRedundancyOptimizer(model, torch.optim.LBFGS),
        lambda: cl.ZeroRedundancyOptimizer(model, torch.optim.SparseAdam),
    )
    return [str(error_of(call, ValueError)) for call in calls]


def test_what_does_not_combine_is_refused_with_the_reason(ranks_of):
    lbfgs, sparse = ranks_of(1).run(refusals)[0]
    assert "its line search" in lbfgs
    assert "only dense gradients are reduced" in sparse
