"""Checks that all ranks have the same model, and then copies one rank's tensors to all."""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from chorusline.collectives.contract.call_site import users_level
from chorusline.collectives.contract.dtypes import DTYPES
from chorusline.collectives.contract.errors import listed
from chorusline.collectives.contract.work import Work
from chorusline.collectives.diagnosis.blame import check_like_rank_0
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object, all_gather_row

from .gradients.gradient_bucket import ordered_sum

IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module in which torch's DistributedDataParallel looks for names."""


def check_wrapping(module: object, group: object) -> None:
    """Raises TypeError for arguments of a wrapper that cannot be a module and a group."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    # By name: torch's own, and a module that was wrapped here.
    if type(module).__name__ == "DistributedDataParallel":
        raise TypeError(
            "module is a DistributedDataParallel already, and its gradients would be reduced "
            "twice; wrap a module once, the one below it: DistributedDataParallel(model.module)"
        )
    if group is None or isinstance(group, Group):
        return
    if isinstance(group, torch.distributed.ProcessGroup):
        remedy = (
            "that is a group of torch; leave it out in a train function, or pass a group of "
            "ctx.group.new_group(ranks)"
        )
    else:
        remedy = (
            "here, the second argument is not device_ids. A rank owns one device, on which the "
            "module is; leave device_ids out"
        )
    raise TypeError(f"group must be a chorusline Group, got {type(group).__name__}: {remedy}")


def ignored_in(module: torch.nn.Module) -> Collection[str]:
    """The names in the module's attribute `IGNORED`. Raises ValueError for trainable parameters."""
    ignored = {*getattr(module, IGNORED, ())}
    trained = [name for name, p in module.named_parameters() if p.requires_grad and name in ignored]
    if trained:
        raise ValueError(
            f"{listed(trained, 3)} of {IGNORED} would be a parameter of each rank's own, and a "
            "DistributedDataParallel reduces all trainable parameters of its module. Keep what "
            "ranks train apart outside of that module, or freeze it (requires_grad_(False))"
        )
    return ignored


def check_devices(named: Sequence[tuple[str, torch.nn.Parameter]], group: Group) -> None:
    """Raises ValueError if the trainable parameters are not all on the device of the group."""
    first_name, first = named[0]
    for name, parameter in named:
        if parameter.device != first.device:
            raise ValueError(
                f"parameters are on several devices: {first_name} on {first.device}, {name} on "
                f"{parameter.device}. A rank owns one device; {_moved(parameter, group)}"
            )
    if first.device != group.device:
        raise ValueError(
            f"the module is on {first.device}, but this rank's group reduces on {group.device}; "
            f"{_moved(first, group)}"
        )


def check_have_values(kind: str, named: Iterable[tuple[str, torch.Tensor]], group: Group) -> None:
    """Raises ValueError for one on meta. What is not trained may be on any other device: rank 0's
    values travel by way of the group's (`broadcast_tensors`)."""
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError(
                f"{kind} {name} is on {tensor.device}, but this rank's group reduces on "
                f"{group.device}, where the other tensors of the module are; "
                f"{_moved(tensor, group)}"
            )


def _moved(tensor: torch.Tensor, group: Group) -> str:
    where = repr(str(group.device))
    if not tensor.is_meta:
        return f"move the module with .to({where}) (in a session: ctx.device)"
    return (
        f"on meta it has no values: make it on {group.device}, or call "
        f"module.to_empty(device={where}) and set the values of all tensors"
    )


def check_layouts(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError for tensors that cannot be copied from rank to rank element by element."""
    for name, tensor in named:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        if tensor.is_quantized:
            raise ValueError(
                f"{kind} {name} is quantized ({tensor.dtype}), and its scale does not travel with "
                "it. Keep it as a plain attribute that every rank makes in the same way "
                "(module.name = values, without register_buffer), or hold its values: dequantize()"
            )
        if layout != "strided":
            raise ValueError(
                f"{kind} {name} is {layout.replace('_', ' ')}, and only dense tensors travel "
                "between ranks. Make it dense, keep it as a plain attribute that every rank "
                "computes in the same way, or hold its parts (indices, values) as dense buffers"
            )
        # Zero strides: several elements are one memory location, which torch refuses to write to.
        if any(n > 1 and not by for n, by in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"{kind} {name} is expanded: several of its elements share their memory, so rank "
                f"0's values cannot be copied into it. Make it from {name}.clone()"
            )


def warn_of_forward_passes_that_write(module: torch.nn.Module, group: Group) -> None:
    """A warning on rank 0 for an embedding whose forward pass changes its weight on one rank."""
    # Alone there is nothing to drift from, and one rank warns for all.
    if group.size == 1 or group.rank != 0:
        return
    for warning in forward_passes_that_write(module):
        warnings.warn(warning, stacklevel=users_level())


def forward_passes_that_write(module: torch.nn.Module) -> list[str]:
    """For each such embedding, a sentence that says so, and what to do."""
    return [
        f"{name or 'the module'} is an {type(part).__name__} with "
        f"max_norm={part.max_norm:g}: its forward pass shortens the rows that its own "
        "batch uses, on this rank alone, so the parameters of the ranks drift apart. Leave "
        "max_norm out, and shorten the rows on all ranks after each step, under "
        f"torch.no_grad(): weight.renorm_({part.norm_type:g}, 0, {part.max_norm:g})"
        for name, part in module.named_modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        and part.max_norm is not None
        and part.weight.requires_grad
    ]


def check_same_model(
    operation: str,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    group: Group,
    buffers: Iterable[tuple[str, torch.Tensor]] = (),
    settings: Mapping[str, int] | None = None,
    ignored: Collection[str] = (),
) -> None:
    """`check_same_parameters` for names, shapes, dtypes, and which parameters are frozen; and for
    the buffers' names, shapes and dtypes.

    ignored: names in `IGNORED`. torch leaves these tensors as each rank has them, and here they
        become rank 0's, so their values are compared too."""

    def values(name: str, tensor: torch.Tensor) -> str:
        if name not in ignored:
            return ""
        (bits,) = sums_of_bits([tensor.detach()])
        return f"; {name}, which {IGNORED} names, with values that add up to {int(bits)}"

    check_same_parameters(
        operation,
        [
            f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}{values(name, p)}"
            for name, p in named
        ],
        group,
        [f"{name} {tuple(b.shape)} {b.dtype}{values(name, b)}" for name, b in buffers],
        settings,
    )


def check_same_parameters(
    operation: str,
    parameters: Sequence[str],
    group: Group,
    buffers: Sequence[str] = (),
    settings: Mapping[str, int] | None = None,
) -> None:
    """Compare the ranks' parameters and buffers by number, in two small collectives.

    operation: the name of the operation whose arguments are compared, for the error.
    parameters, buffers: a text for each, equal on all ranks: its shape, dtype and so on.
    settings: whole numbers and booleans that are to be equal too, by their names for people.

    Raises CollectiveMismatch on all ranks, naming the first one that differs.
    """
    if group.is_dry_run:
        return  # There is no other rank yet; they compare when this one comes to them.
    settings = settings or {}
    kinds = {"parameter": parameters, "buffer": buffers}
    with group.unkept():
        rows = all_gather_row(group, [*map(len, kinds.values()), *settings.values()])
    for place, (name, own) in enumerate(settings.items(), len(kinds)):
        values = [type(own)(row[place]) for row in rows]
        each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
        remedy = f"Give {operation} the same options on every rank."
        check_like_rank_0(operation, group.generation, values, f"{name} is {each}", remedy)
    remedy = (
        "All ranks must make the same model: the same parameters and buffers, with the same "
        "shapes and dtypes, in the same order, with the same options."
    )
    for place, kind in enumerate(kinds):
        counts = [row[place] for row in rows]
        by_rank = dict(enumerate(counts))
        detail = f"the models have different numbers of {kind}s, by rank: {by_rank}"
        check_like_rank_0(operation, group.generation, counts, detail, remedy)
    descriptions = [*parameters, *buffers]
    digests = [
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
        for text in descriptions
    ]
    with group.unkept():
        everybody = all_gather_row(group, digests)
    named = [(kind, number) for kind, texts in kinds.items() for number in range(len(texts))]
    for place, (kind, number) in enumerate(named):
        values = [theirs[place] for theirs in everybody]
        if len({*values}) < 2:
            continue
        with group.unkept():
            of_ranks = all_gather_object(group, descriptions[place].split("; "))
        parts = [part for part in of_ranks[group.rank] if any(part not in one for one in of_ranks)]
        text = "; ".join(parts or of_ranks[group.rank])
        detail = f"{kind} {number} differs from rank 0's; on rank {group.rank} it is {text}"
        check_like_rank_0(operation, group.generation, values, detail, remedy)


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def sums_of_bits(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A whole number for each tensor, on its device: if the numbers of two tensors differ, so do
    their bits. It reads the tensors twice."""
    plain = [without_lazy_bits(t) for t in tensors]
    flat = [
        (torch.view_as_real(t) if t.is_complex() else t).reshape(-1).contiguous() for t in plain
    ]
    return [ordered_sum(t.view(_WHOLE[t.element_size()])) for t in flat]


@torch.no_grad()
def unlike_values(
    tensors: Sequence[torch.Tensor], group: Group, ranks: Sequence[int] = ()
) -> tuple[int, list[int]] | None:
    """The number of the first tensor whose bits are not the same on these ranks, and the ranks
    where they are not the first one's; None if all are. Gathers a sum of each.

    ranks: default: all."""
    ranks = ranks or range(group.size)
    sums = [one.to(group.device) for one in sums_of_bits(tensors)]
    everybody = all_gather_row(group, torch.stack(sums).tolist())
    for number, by_rank in enumerate(zip(*everybody, strict=True)):
        unlike = [rank for rank in ranks if by_rank[rank] != by_rank[ranks[0]]]
        if unlike:
            return number, unlike
    return None


@torch.no_grad()
def broadcast_tensors(
    tensors: Sequence[torch.Tensor], root: int, group: Group, *, on_host: bool = False
) -> Work | None:
    """Copy rank `root`'s tensors into the tensors of all ranks: one broadcast per dtype.

    tensors: any shapes and dtypes, the same on all ranks; what is not on the group's device, as a
        frozen part that was left on the CPU, travels by way of it.
    on_host: also on a GPU, change the tensors only when all have come.

    Returns the last broadcast, which tells for all; None without tensors.
    """
    if group.is_dry_run:
        return None  # The values come when this rank comes to the others.
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
        # The host would copy what a stopped operation has left on the GPU.
        on_host = on_host or tensor.device != group.device
    work: Work | None = None
    sent: list[tuple[list[torch.Tensor], torch.Tensor]] = []
    for dtype, same in by_dtype.items():
        # float8, unsigned and other dtypes that no backend adds travel as their bits.
        wire = dtype if dtype in DTYPES else _WHOLE[dtype.itemsize]
        bits = (without_lazy_bits(t).view(wire).reshape(-1) for t in same)
        flat = torch.cat([one.to(group.device) for one in bits])
        with group.unkept():
            work = group.broadcast(flat, root)
        sent.append((same, flat))
        if on_host:
            work.order_stream()
        else:
            work.wait()
    if work is not None and on_host:
        work.wait_on_host()
    for same, flat in sent if group.rank != root else ():
        for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
            if tensor.is_conj() or tensor.is_neg():
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
            else:  # As bits: torch copies no dtypes of less than a byte.
                tensor.view(part.dtype).copy_(part.view(tensor.shape))
    return work


def without_lazy_bits(tensor: torch.Tensor) -> torch.Tensor:
    """What `conj()` and its `imag` return says by a bit that its values are conjugate or negative;
    torch has no view of such a tensor as another dtype."""
    return tensor.resolve_conj().resolve_neg()
