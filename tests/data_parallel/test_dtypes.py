"""Numbers of every dtype reach the other ranks bit by bit, or are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

import chorusline as cl
from chorusline.collectives.objects.blocking import broadcast_object
from chorusline.runtime.program.reducing import reduced
from tests.harness.reused_ranks import another_group
from tests.harness.torch_groups import with_torch
from tests.references.checkpoint_runs import in_run

NOT_MADE = {"quint4x2", "quint2x4"}
"""torch makes tensors of them only as packed weights of layers."""
DTYPES = sorted({str(v)[6:] for v in vars(torch).values() if isinstance(v, torch.dtype)} - NOT_MADE)
"""Those of torch, without "torch."."""


def values_of(name: str, shape: tuple[int, ...], turned: bool, seed: int) -> torch.Tensor:
    """Of small bytes: a number, above 0, whatever the dtype. turned: at odd strides."""
    dtype = getattr(torch, name)
    if name.startswith("q"):
        return torch.quantize_per_tensor(torch.arange(3.0) + seed, 0.5 + seed, 1, dtype)
    width = torch.empty(0, dtype=torch.uint8).view(dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype is torch.bool else 0x3C
    flat = torch.randint(most, (math.prod(shape) * width,), generator=generator).to(torch.uint8)
    values = flat.view(dtype).view(shape)
    return values.transpose(0, -1) if turned else values


def bits_of(tensor: torch.Tensor) -> list[float]:
    if tensor.is_quantized:
        return [*tensor.int_repr().tolist(), tensor.q_scale()]
    # torch itself copies no sub-byte dtypes.
    as_they_are = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor = tensor.view(as_they_are.get(tensor.element_size(), tensor.dtype))
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def wrapped(group: cl.Group, values: torch.Tensor, as_parameter: bool) -> torch.Tensor:
    module = torch.nn.Linear(2, 1)
    if as_parameter:
        module.frozen = torch.nn.Parameter(values, requires_grad=False)
    else:
        module.register_buffer("frozen", values)
    return cl.DistributedDataParallel(module, group).module.frozen


class Holding(torch.nn.Module):
    """`writes`: what the next forward pass makes of its buffer or frozen parameter."""

    def __init__(self, values: torch.Tensor, as_parameter: bool) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)
        self.writes: torch.Tensor | None = None
        self.hold(values, as_parameter)

    def hold(self, values: torch.Tensor, as_parameter: bool) -> None:
        if as_parameter:
            self.frozen = torch.nn.Parameter(values, requires_grad=False)
        else:
            self.register_buffer("frozen", values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes is not None:
            self.frozen.data = self.writes
        return self.inner(x)


def stepped(group: cl.Group, values: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
    """A sharded step copies a buffer that rank 0 has written."""
    net = Holding(values, False)
    model = cl.DistributedDataParallel(net, group)
    optim = cl.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    net.writes = again if group.rank == 0 else None
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    return net.frozen


def joined(
    group: cl.Group, values: torch.Tensor, again: torch.Tensor, *, as_parameter: bool, sharded: bool
) -> torch.Tensor:
    """Rank 1 alone has data, and writes; rank 0 has what it has written after the Join."""
    net = Holding(values, as_parameter)
    model = cl.DistributedDataParallel(net, group)
    if sharded:
        optim = cl.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    else:
        optim = torch.optim.SGD(net.inner.parameters(), lr=0.1)
    net.writes = again
    with cl.Join([model, optim] if sharded else [model], skew_warning=None):
        for _ in range(group.rank):
            model(torch.ones(1, 2)).sum().backward()
            optim.step()
    return net.frozen


def resumed(group: cl.Group, values: torch.Tensor, place: str) -> torch.Tensor:
    """What a run saves is there in the next one, whose module begins with zeros."""

    def train(ctx: cl.Context, net: Holding) -> torch.Tensor:
        model = ctx.register("model", cl.DistributedDataParallel(net))
        optim = cl.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        ctx.register("optimizer", optim)
        if ctx.resumed_from is None:
            model(torch.ones(1, 2)).sum().backward()
            optim.step()
            ctx.save().wait()
        return net.frozen

    with another_group(group) as own:
        config = cl.CheckpointConfig(place)
        in_run(own, train, config, net=Holding(values, False))
        if values.is_quantized:  # Refused by now.
            return values
        nothing = torch.zeros(values.numel() * values.element_size(), dtype=torch.uint8)
        other = nothing.view(values.dtype).view(values.shape)
        return in_run(own, train, config, net=Holding(other, False))


def reduced_to(group: cl.Group, values: torch.Tensor) -> torch.Tensor:
    """The sum with zeros of the other rank."""
    if values.is_quantized or values.is_conj() or values.is_neg():
        return reduced(group, values, "sum", None)
    nothing = torch.zeros(values.numel() * values.element_size(), dtype=torch.uint8)
    own = values if group.rank == 0 else nothing.view(values.dtype).view(values.shape)
    return reduced(group, own, "sum", None).to(values.dtype)


def broadcast(group: cl.Group, values: torch.Tensor) -> torch.Tensor:
    group.broadcast(values, 0).wait()
    return values


PLACES: dict[str, Callable[[cl.Group, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "parameter": lambda group, values, _: wrapped(group, values, True),
    "buffer": lambda group, values, _: wrapped(group, values, False),
    "ctx.reduce": lambda group, values, _: reduced_to(group, values),
    "ctx.broadcast": lambda group, values, _: broadcast_object(group, values, 0),
    "group.broadcast": lambda group, values, _: broadcast(group, values),
    "sharded step": stepped,
    "parameter, Join": lambda *args: joined(*args, as_parameter=True, sharded=False),
    "buffer, Join": lambda *args: joined(*args, as_parameter=False, sharded=False),
    "buffer, Join, sharded": lambda *args: joined(*args, as_parameter=False, sharded=True),
}
"""They get the values twice: for the model, and for a pass that writes them."""
FROM_RANK_1 = {place for place in PLACES if "Join" in place}


def moved(group: cl.Group, place: str, name: str, *drawn: Any) -> tuple[str, list[float]]:
    """Why it was refused, or the bits on this rank of what rank 0's values had to replace."""
    try:
        values, again = (values_of(name, *drawn, seed=group.rank) for _ in range(2))
        return "", bits_of(PLACES[place](group, values, again))
    except Exception as error:
        return f"{type(error).__name__}: {error}", []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    place=st.sampled_from(sorted(PLACES)),
    name=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    turned=st.booleans(),
)
@pytest.mark.filterwarnings("ignore")
def test_every_dtype_is_moved_bit_by_bit_or_refused_by_name(
    ranks_of: Callable[[int], Any], place: str, name: str, shape: tuple[int, ...], turned: bool
) -> None:
    expected = bits_of(values_of(name, shape, turned, seed=int(place in FROM_RANK_1)))
    for refused, bits in ranks_of(2).run(moved, place, name, shape, turned):
        if refused:
            assert f"torch.{name}" in refused, refused
        else:
            assert bits == expected


def lazy(kind: str, seed: int) -> torch.Tensor:
    """A tensor of which a bit says that its values are conjugate or negative."""
    values = torch.complex(torch.arange(6.0) + seed, torch.arange(6.0) - 2).view(3, 2).conj()
    return values if kind == "conjugate" else values.imag


def moved_lazily(group: cl.Group, place: str, kind: str) -> list[Any]:
    values, again = (lazy(kind, seed=group.rank) for _ in range(2))
    return PLACES[place](group, values, again).tolist()


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
@pytest.mark.parametrize("place", [*PLACES])
def test_conjugate_and_negative_views_are_moved_as_their_values(
    ranks_of: Callable[[int], Any], place: str, kind: str
) -> None:
    expected = lazy(kind, seed=int(place in FROM_RANK_1)).tolist()
    if place == "ctx.reduce":
        expected = (lazy(kind, seed=0) + lazy(kind, seed=1)).tolist()
    assert ranks_of(2).run(moved_lazily, place, kind) == [expected, expected]


def saved(group: cl.Group, name: str, place: str) -> tuple[str, list[float]]:
    try:
        values = values_of(name, (3, 2), False, seed=group.rank)
        return "", bits_of(resumed(group, values, place))
    except Exception as error:
        return f"{type(error).__name__}: {error}", []


@pytest.mark.filterwarnings("ignore")
def test_every_dtype_of_a_buffer_goes_through_a_checkpoint_bit_by_bit_or_is_refused_by_name(
    ranks_of: Callable[[int], Any], tmp_path: Path
) -> None:
    for name in DTYPES:
        told = ranks_of(2).run(saved, name, str(tmp_path / name))
        for refused, bits in told:
            assert name in refused if refused else True, refused
            assert refused or bits == bits_of(values_of(name, (3, 2), False, seed=0)), name
        if name[0] != "q" and told[0][0]:  # A quantized buffer is refused when it is wrapped.
            assert all("model.frozen is a tensor" in refused for refused, _ in told), told


def broadcast_by_torch(rank: int, size: int) -> dict[str, tuple[str, list[float]]]:
    found = {}
    for name in DTYPES:
        values = values_of(name, (3, 2), False, seed=rank)
        try:
            dist.broadcast(values, 0)
            found[name] = "", bits_of(values)
        except Exception as error:
            found[name] = str(error), []
    return found


@pytest.mark.filterwarnings("ignore")
def test_every_dtype_goes_through_torch_distributed_bit_by_bit_or_is_refused_by_name(
    ranks_of: Callable[[int], Any],
) -> None:
    for found in ranks_of(2).run(with_torch, "chorusline", broadcast_by_torch):
        for name, (refused, bits) in found.items():
            assert f"torch.{name}" in refused if refused else True, refused
            assert refused or bits == bits_of(values_of(name, (3, 2), False, seed=0))


class Turned(torch.nn.Module):
    """Parameters with imaginary parts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        begin = torch.linspace(1, 2, 70)
        self.weight = torch.nn.Parameter(torch.complex(begin, -3 * begin).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).abs().square().sum()


def norm_of(group: cl.Group, dtype: str, max_norm: float) -> tuple[float, list[complex]]:
    model = cl.DistributedDataParallel(Turned(getattr(torch, dtype)), group)
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, max_norm=max_norm)
    model(torch.ones(())).backward()
    optim.step()
    return float(optim.grad_norm), model.module.weight.detach().tolist()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_the_norm_of_complex_gradients_has_their_imaginary_part(
    ranks_of: Callable[[int], Any], dtype: str, max_norm: float
) -> None:
    alone = Turned(getattr(torch, dtype))
    alone(torch.ones(())).backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for ours, weights in ranks_of(2).run(norm_of, dtype, max_norm):
        assert ours == pytest.approx(norm.item(), rel=1e-6)
        assert weights == pytest.approx(alone.weight.tolist(), rel=1e-5)


Remedy = Callable[[torch.nn.Module, torch.Tensor], object]


def as_attribute(module: torch.nn.Module, values: torch.Tensor) -> None:
    del module.held
    module.held = values


def as_parts(module: torch.nn.Module, values: torch.Tensor) -> None:
    del module.held
    module.register_buffer("indices", values.coalesce().indices())
    module.register_buffer("values", values.coalesce().values())


def made_on_the_cpu(module: torch.nn.Module, _: torch.Tensor) -> None:
    module.to_empty(device="cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        torch.nn.init.ones_(tensor)


def held(function: Callable[[torch.Tensor], torch.Tensor]) -> Remedy:
    return lambda module, values: module.register_buffer("held", function(values))


UNFIT: dict[str, tuple[Callable[[], torch.Tensor], str, dict[str, Remedy]]] = {
    # The buffer; why it is refused; what the text says to do.
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.5, 1, torch.qint8),
        "buffer layer.held is quantized (torch.qint8)",
        {"a plain attribute": as_attribute, "dequantize()": held(torch.Tensor.dequantize)},
    ),
    "quantized by channel": (
        lambda: torch.quantize_per_channel(
            torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8
        ),
        "buffer layer.held is quantized (torch.quint8)",
        {"a plain attribute": as_attribute, "dequantize()": held(torch.Tensor.dequantize)},
    ),
    "sparse": (
        lambda: torch.eye(3).to_sparse(),
        "buffer layer.held is sparse coo",
        {
            "Make it dense": held(torch.Tensor.to_dense),
            "a plain attribute": as_attribute,
            "its parts (indices, values)": as_parts,
        },
    ),
    "compressed": (
        lambda: torch.eye(3).to_sparse_csr(),
        "buffer layer.held is sparse csr",
        {"Make it dense": held(torch.Tensor.to_dense), "a plain attribute": as_attribute},
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "buffer layer.held is nested",
        {"a plain attribute": as_attribute},
    ),
    "expanded": (
        lambda: torch.ones(1).expand(3),
        "buffer layer.held is expanded",
        {"layer.held.clone()": held(torch.clone)},
    ),
    "on meta": (
        lambda: torch.ones(3, device="meta"),
        "buffer layer.held is on meta, but this rank's group reduces on cpu",
        {
            "make it on cpu": held(lambda values: torch.ones_like(values, device="cpu")),
            "module.to_empty(device='cpu') and set the values": made_on_the_cpu,
        },
    ),
}


def refused_and_mended(group: cl.Group, kind: str) -> list[str]:
    """The refusal, and what raises where its remedies are taken."""
    make, _, remedies = UNFIT[kind]
    told = []
    for remedy in (None, *remedies):
        values, module = make(), torch.nn.Sequential()
        layer = torch.nn.Linear(2, 1)
        layer.register_buffer("held", values)
        module.add_module("layer", layer)
        if remedy is not None:
            remedies[remedy](layer, values)
        try:
            model = cl.DistributedDataParallel(module, group)
            optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
            model(torch.ones(1, 2)).sum().backward()
            optim.step()
        except ValueError as error:
            told.append(str(error))
    return told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNFIT)
def test_a_buffer_that_cannot_travel_is_refused_by_name_with_remedies_that_help(
    ranks_of: Callable[[int], Any], kind: str
) -> None:
    _, says, remedies = UNFIT[kind]
    for told in ranks_of(2).run(refused_and_mended, kind):
        assert len(told) == 1, told
        assert told[0].startswith(says)
        assert all(remedy in told[0] for remedy in remedies), told[0]


def test_a_frozen_parameter_without_values_and_a_lazy_buffer_are_refused(alone: cl.Group) -> None:
    module = torch.nn.Linear(2, 1)
    module.frozen = torch.nn.Parameter(torch.ones(2, device="meta"), requires_grad=False)
    with pytest.raises(ValueError, match="parameter frozen is on meta, but"):
        cl.DistributedDataParallel(module, alone)
    module = torch.nn.Linear(2, 1)
    module.register_buffer("lazy", torch.nn.parameter.UninitializedBuffer())
    with pytest.raises(RuntimeError, match="Run a dummy forward pass"):
        cl.DistributedDataParallel(module, alone)
