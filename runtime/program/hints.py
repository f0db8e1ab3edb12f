"""What scripts do elsewhere and a rank cannot do: a note to the error, with what to write here."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from chorusline.collectives.contract.torch_hints import TOO_FEW

_VARIABLES = {
    "RANK": "ctx.rank",
    "WORLD_SIZE": "ctx.world_size",
    "LOCAL_RANK": "ctx.local_rank, and ctx.device for the device",
    "LOCAL_WORLD_SIZE": "ctx.local_world_size",
    "GROUP_RANK": "ctx.node_rank",
    "MASTER_ADDR": "ctx.group, which is connected already",
    "MASTER_PORT": "ctx.group, which is connected already",
}
"""What torchrun sets in the environment, and what to write in a train function."""

_WITHOUT_TORCH_DISTRIBUTED = (
    "In a train function, ctx.shard(dataset, batch_size, epoch=epoch) gives each rank its "
    "samples, not a DistributedSampler, and chorusline's DistributedDataParallel needs no "
    "torch.distributed. For classes of torch.distributed, call ctx.init_torch_distributed() first"
)

_INSTEAD = {
    "size": "world_size",
    "num_workers": "world_size",
    "get_rank": "rank",
    "get_world_size": "world_size",
    "get_local_rank": "local_rank",
    "get_device": "device",
    "get_world_rank": "rank",
    "log": "report(loss=loss)",
    "print": "report(loss=loss), or print, which every rank does for itself",
    "all_reduce": "reduce(value), or ctx.group.all_reduce(tensor).wait()",
    "all_gather": "group.all_gather(output, tensor).wait()",
    "get_checkpoint": "resumed_from; ctx.register(name, object) loads its state",
    "save_checkpoint": "save()",
    "get_dataset_shard": "shard(dataset, batch_size, epoch=epoch)",
    "dataloader": "shard(dataset, batch_size, epoch=epoch)",
}
"""By a name that a Context does not have, the one to write after `ctx.`."""


OF_A_LOADER = {
    "timeout": "the session's timeout_s bounds the wait of the other ranks; leave it out",
    "generator": (
        "seed= and epoch= decide the order, and the random numbers of loader processes; leave it "
        "out"
    ),
    "in_order": "batches always come in order; leave it out",
    "sampler": (
        "ctx.shard distributes the samples itself, each to one rank; leave the sampler out, or, "
        "for one that picks, write ctx.shard(torch.utils.data.Subset(dataset, list(sampler)), …)"
    ),
    "batch_sampler": "ctx.shard makes the batches itself; write batch_size",
    TOO_FEW: "write ctx.shard(dataset, batch_size, epoch=epoch)",
}
"""By name of a DataLoader's argument, what to write for `ctx.shard`."""


def instead_of(name: str) -> str:
    """The end of an AttributeError of a Context; it may be empty."""
    return f"; write ctx.{_INSTEAD[name]}" if name in _INSTEAD else ""


def note_on(error: BaseException, device: torch.device) -> str | None:
    """A note to an error of a train function. device: of the rank."""
    # torch's and Python's errors of these kinds have no class of their own: their texts tell.
    text = str(error)
    if isinstance(error, ValueError):
        is_torchs = "Default process group has not" in text or "env:// rendezvous" in text
        return _WITHOUT_TORCH_DISTRIBUTED if is_torchs else None
    if isinstance(error, KeyError) and error.args and error.args[0] in _VARIABLES:
        return (
            f"{error.args[0]} is a variable that torchrun sets; in a train function write "
            f"{_VARIABLES[error.args[0]]}. ctx.init_torch_distributed() sets these variables for "
            "libraries that read them"
        )
    name = error.filename if isinstance(error, FileNotFoundError) else None
    if isinstance(name, str | Path) and not Path(name).is_absolute():
        return (
            f"{name!r} is a relative path, and a rank looks for it in its own folder, "
            f"{Path.cwd()} on {socket.gethostname()}, not in that of the program. Pass a path that "
            "every node has, or send the program's folder with the session: "
            "Session(runtime_env={'working_dir': '.'})"
        )
    if isinstance(error, EOFError) and "reading a line" in text:
        return (
            "A rank has no terminal, so input() and breakpoint() do not work there: ask in the "
            "program, and pass the answer, session.run(train, answer=input())"
        )
    if isinstance(error, AssertionError | RuntimeError) and device.type == "cpu":
        has_asked = "not compiled with CUDA" in text or "Found no NVIDIA driver" in text
        if has_asked or "No CUDA GPUs are available" in text:
            return (
                "This rank's device is the CPU: write .to(ctx.device) in place of .cuda() and "
                '.to("cuda"); Session(use_gpu=True) gives each rank a GPU'
            )
    return None
