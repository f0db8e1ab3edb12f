"""Exports a checkpoint to one file, as plain states or safetensors, and lists checkpoints."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE

from chorusline.collectives.contract.errors import plain

from .contents import MODEL, PER_RANK, STATE, ZERO
from .format.catalog import candidates, listing, newest_whole, why_unlisted
from .format.errors import CheckpointCorrupted, CheckpointUntrusted
from .format.reader import CheckpointReader
from .format.storage import Folder, open_storage
from .restore import plain_optimizer_state, read_tree

TORCH, SAFETENSORS = "torch", "safetensors"
FORMATS = (TORCH, SAFETENSORS)


def export(
    source: str | Path, target: str | Path, file_format: str | None = None
) -> CheckpointReader:
    """Write a checkpoint to one file; returns the reader of the checkpoint.

    source: a checkpoint, or a place, whose newest complete checkpoint is taken.
    target: the file.
    file_format: "torch" (torch.save) or "safetensors"; default: the latter for a target that ends
        in .safetensors.

    torch: the file holds, by registered name, the state that a plain module or optimizer loads, or
    a list by rank where each rank has a state of its own. safetensors: it holds the weights of the
    registered modules (`safetensors_of`). Needs memory for all that is written. No code that the
    checkpoint names is run: a state that needs it is left out, with a warning.

    Raises CheckpointNotFound, CheckpointCorrupted; CheckpointUntrusted if no state could be read;
    ValueError if there are no weights to write; ImportError without the library safetensors.
    """
    path = Path(target).absolute()
    if file_format is None:
        file_format = SAFETENSORS if path.suffix == f".{SAFETENSORS}" else TORCH
    if file_format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {file_format!r}")
    # Before anything is read: verifying a large checkpoint takes minutes.
    if file_format == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        raise ImportError(
            "writing safetensors needs the library safetensors, which is not installed: "
            "pip install -e '.[safetensors]' in a checkout of Chorusline, or export to a file that "
            "torch.load reads (--format torch)"
        )
    reader = newest_whole(open_storage(source))
    if file_format == SAFETENSORS:
        _save_safetensors(reader, path)
        return reader
    with Folder(path.parent).create(path.name) as file:
        torch.save(plain_states(reader), file)
    return reader


def safetensors_of(reader: CheckpointReader) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The weights and buffers of the registered modules, by name; and the file's metadata.

    The names are those of the plain module, so that its load_state_dict takes them; of several
    modules they begin with the registered name and a dot. A tensor that is tied to another one is
    written once, and the metadata has its name with the other's, as `safetensors.torch.save_model`
    does it, so that `load_model` ties them again.
    """
    manifest = reader.manifest
    modules = []
    # Earlier checkpoints name no module of which nothing is tied.
    is_earlier = not any(manifest.kinds.get(name) in (MODEL, STATE) for name in manifest.tied)
    for name, kind in manifest.kinds.items():
        is_found = is_earlier and kind == STATE and _seems_a_module(name, reader)
        if name not in manifest.tied and kind != MODEL and not is_found:
            continue
        if kind != PER_RANK:
            modules.append(name)
            continue
        warnings.warn(
            f"left out of the export, since each rank has a state of its own: {name!r}",
            stacklevel=2,
        )
    if not modules:
        raise ValueError(
            f"{reader.path} has no weights: no module is among what was registered "
            f"({plain(', '.join(manifest.kinds)) or 'nothing'})"
        )
    tensors: dict[str, torch.Tensor] = {}
    metadata = {"format": "pt", "chorusline.step": str(manifest.step)}
    for module in modules:
        within = f"{module}." if len(modules) > 1 else ""
        tied = manifest.tied.get(module, {})
        metadata |= {within + name: within + one for name, one in tied.items()}
        for entry in reader.below(module):
            name = ".".join(map(str, entry.path[1:]))
            if name in tied:
                continue
            value = None
            # Tensors within a get_extra_state() have no place among those of a state dictionary.
            if len(entry.path) == 2:
                # An untrusted one is no tensor, so it does not go into the file in any case.
                with contextlib.suppress(CheckpointUntrusted):
                    value = reader.value(entry)
            # Others among the objects are sparse, or no save has written them: of a few bytes one
            # may have any number of elements.
            if isinstance(value, torch.Tensor) and (entry.dtype is not None or not value.numel()):
                tensors[within + name] = value.contiguous()
            else:
                warnings.warn(
                    "left out of the export, since safetensors files hold the dense tensors of a "
                    f"state dictionary only: {plain(name)} of {module!r}",
                    stacklevel=2,
                )
    return tensors, metadata


def _seems_a_module(name: str, reader: CheckpointReader) -> bool:
    """Whether a state has tensors under their names. Those of a plain optimizer are deeper."""
    paths = [entry.path[1:] for entry in reader.below(name) if entry.dtype is not None]
    named = [path for path in paths if not any(str(key).endswith(EXTRA_STATE) for key in path)]
    return bool(named) and all(len(path) == 1 for path in named)


def _save_safetensors(reader: CheckpointReader, path: Path) -> None:
    from safetensors.torch import save_file

    tensors, metadata = safetensors_of(reader)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a new folder of this user: safetensors would follow a link that is there under the name.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        part = Path(folder) / path.name
        save_file(tensors, part, metadata)
        part.replace(path)


def plain_states(reader: CheckpointReader) -> dict[str, Any]:
    """All states in a checkpoint, by registered name; see `export`."""
    states: dict[str, Any] = {}
    refused: list[CheckpointUntrusted] = []
    for name, kind in reader.manifest.kinds.items():
        try:
            states[name] = _plain_state(name, kind, reader)
        except CheckpointUntrusted as error:
            refused.append(error)
    if refused and not states:
        raise refused[0]
    for untrusted in refused:
        warnings.warn(
            "left out of the export, which does not run code that a checkpoint names: "
            f"{plain(untrusted.detail)}",
            stacklevel=2,
        )
    return states


def _plain_state(name: str, kind: str, reader: CheckpointReader) -> Any:
    if kind == ZERO:
        return plain_optimizer_state(name, reader)
    if kind == PER_RANK:
        return [read_tree(reader, name, rank) for rank in range(reader.manifest.world_size)]
    return read_tree(reader, name)


def described(source: str | Path) -> Iterator[str]:
    """A line for each checkpoint of a place, the newest first; each is read and verified. At the
    end, a line for each folder that lacks only the manifest."""
    storage = open_storage(source)
    for folder in candidates(storage):
        try:
            reader = CheckpointReader(storage, folder)
            reader.verify()
        except (CheckpointCorrupted, OSError) as error:
            yield f"{folder or storage.path}: {error}"
            continue
        manifest = reader.manifest
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
        size = sum(manifest.files.values()) / 1e6
        yield (
            f"{folder or storage.path}: whole, step {manifest.step}, {manifest.world_size} ranks, "
            f"{size:.1f} MB, {when}; {', '.join(manifest.kinds)}"
        )
    for folder in listing(storage).unlisted:
        yield f"{folder}: {why_unlisted(storage, folder)}"
