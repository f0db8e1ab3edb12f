"""Weights as safetensors: read back bit by bit by that library's own loaders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import chorusline as cl
from chorusline.runtime.checkpoint.contents import STATE, pickled, whole_of
from chorusline.runtime.checkpoint.export import export, safetensors_of
from chorusline.runtime.checkpoint.format.catalog import newest_whole
from chorusline.runtime.checkpoint.format.manifest import Manifest, merged, write_manifest
from chorusline.runtime.checkpoint.format.shard_file import write_part
from chorusline.runtime.checkpoint.format.storage import Folder, open_storage
from chorusline.runtime.commands.command_line import main
from tests.references.checkpoint_runs import in_run


class Tied(torch.nn.Module):
    """The last layer has the weights of the first; a buffer; an empty tensor; bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(11, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.wte.weight
        self.norm = torch.nn.BatchNorm1d(6)
        self.shift = torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.arange(6).reshape(2, 3).t())
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.wte(batch))) + self.shift.sum()


def save(group: cl.Group, place: Path, is_wrapped: bool, more: bool) -> dict[str, torch.Tensor]:
    def train(ctx: cl.Context) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        plain = Tied()
        model = cl.DistributedDataParallel(plain) if is_wrapped else plain
        ctx.register("model", model)
        ctx.register("optim", torch.optim.AdamW(plain.parameters()))
        if more:
            ctx.register("critic", torch.nn.Linear(2, 1))
        ctx.save().wait()
        return dict(plain.state_dict())

    kept: dict[str, torch.Tensor] = in_run(group, train, cl.CheckpointConfig(place))
    return kept


class Scaled(torch.nn.Linear):
    """Has a tensor that is no entry of its state dictionary."""

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"scale": torch.ones(2)}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        assert state["scale"].shape == (2,)


def save_scaled(group: cl.Group, place: Path, is_wrapped: bool) -> None:
    def train(ctx: cl.Context) -> None:
        model = torch.nn.Sequential(Scaled(2, 3), Scaled(3, 1))
        ctx.register("model", cl.DistributedDataParallel(model) if is_wrapped else model)
        ctx.save().wait()

    in_run(group, train, cl.CheckpointConfig(place))


def train_without_a_module(ctx: cl.Context) -> None:
    ctx.register("optim", torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], momentum=0.9))
    ctx.save().wait()


def same(found: torch.Tensor, saved: torch.Tensor) -> bool:
    """Bit by bit."""
    return (found.dtype, found.shape) == (saved.dtype, saved.shape) and found.contiguous().view(
        -1
    ).view(torch.uint8).tolist() == saved.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_safetensors_loads_back_every_bit_and_ties_what_was_tied(
    ranks_of, tmp_path: Path, is_wrapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    from safetensors.torch import load_file, load_model

    place, file = tmp_path / "place", tmp_path / "weights.safetensors"
    saved, _ = ranks_of(2).run(save, place, is_wrapped, False)
    assert main(["checkpoint", "export", str(place), str(file)]) == 0
    assert "step 0" in capsys.readouterr().out
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == [file.name]

    found = load_file(file)
    assert found.keys() == saved.keys() - {"head.weight"}, "tied weights are written once"
    assert all(same(found[name], saved[name]) for name in found)
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert metadata == {"format": "pt", "chorusline.step": "0", "head.weight": "wte.weight"}

    torch.manual_seed(9)
    model = Tied()
    assert load_model(model, file) == (set(), []), (
        "strict: nothing is missing, nothing is left over"
    )
    assert model.head.weight is model.wte.weight
    assert all(same(tensor, saved[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_what_is_handed_to_safetensors_has_every_bit_and_names_what_is_tied(
    ranks_of, tmp_path: Path, is_wrapped: bool
) -> None:
    """As above, where the library is not installed."""
    saved, _ = ranks_of(2).run(save, tmp_path, is_wrapped, False)
    tensors, metadata = safetensors_of(newest_whole(open_storage(tmp_path)))
    assert tensors.keys() == saved.keys() - {"head.weight"}
    assert all(same(tensors[name], saved[name]) for name in tensors)
    assert metadata == {"format": "pt", "chorusline.step": "0", "head.weight": "wte.weight"}


def test_several_modules_have_their_registered_names_before_their_tensors(
    ranks_of, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    from safetensors.torch import load_file

    (saved,) = ranks_of(1).run(save, tmp_path / "place", True, True)
    target = tmp_path / "weights.bin"
    export(tmp_path / "place", target, "safetensors")
    found = load_file(target)
    assert found.keys() == {
        *(f"model.{name}" for name in saved if name != "head.weight"),
        "critic.weight",
        "critic.bias",
    }


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_tensors_of_an_extra_state_are_left_out_by_their_names(
    ranks_of, tmp_path: Path, is_wrapped: bool
) -> None:
    ranks_of(1).run(save_scaled, tmp_path, is_wrapped)
    with pytest.warns(UserWarning, match="left out of the export") as caught:
        tensors, _ = safetensors_of(newest_whole(open_storage(tmp_path)))
    assert tensors.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert [str(one.message).rpartition(": ")[2] for one in caught] == [
        "0._extra_state.scale of 'model'",
        "1._extra_state.scale of 'model'",
    ]


class Average:
    """Not a module, and its state has tensors under plain names."""

    def __init__(self) -> None:
        self.total = torch.ones(3)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.total = state["total"]


def save_beside_others(ctx: cl.Context) -> None:
    ctx.register("model", torch.nn.Linear(2, 3))
    ctx.register("average", Average())
    ctx.register("generators", cl.RandomState())
    ctx.register("own", torch.nn.Linear(2, 1), per_rank=True)
    ctx.save().wait()


def test_an_object_that_is_no_module_is_none_and_one_of_each_rank_is_named(
    alone: cl.Group, tmp_path: Path
) -> None:
    in_run(alone, save_beside_others, cl.CheckpointConfig(tmp_path))
    with pytest.warns(UserWarning, match="each rank has a state of its own: 'own'") as caught:
        tensors, _ = safetensors_of(newest_whole(open_storage(tmp_path)))
    assert len(caught) == 1
    assert tensors.keys() == {"weight", "bias"}


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_checkpoint_from_before_modules_were_listed_is_exported(
    alone: cl.Group, tmp_path: Path, is_wrapped: bool
) -> None:
    """It names no module of which nothing is tied. What is deeper in a state is an optimizer's."""

    def save_some(ctx: cl.Context) -> None:
        model, critic = torch.nn.Linear(2, 3), Scaled(2, 1)
        ctx.register("model", cl.DistributedDataParallel(model) if is_wrapped else model)
        ctx.register("critic", critic)
        optim = torch.optim.SGD(critic.parameters(), momentum=0.9)
        critic(torch.ones(2)).sum().backward()
        optim.step()
        ctx.register("optim", optim)
        ctx.save().wait()

    in_run(alone, save_some, cl.CheckpointConfig(tmp_path))
    reader, storage = newest_whole(open_storage(tmp_path)), Folder(tmp_path)
    folder = next(tmp_path.glob("step-*")).name
    write_manifest(storage, folder, replace(reader.manifest, tied={}))
    with pytest.warns(UserWarning, match="_extra_state"):
        tensors, _ = safetensors_of(newest_whole(storage))
    assert tensors.keys() == {"model.weight", "model.bias", "critic.weight", "critic.bias"}


def test_a_few_bytes_do_not_become_many_in_an_export(tmp_path: Path) -> None:
    storage, weight = Folder(tmp_path), torch.ones(2)
    expanded = pickled(torch.zeros(1).expand(1 << 40))
    ranges = [whole_of(("model", "weight"), weight)]
    part = write_part(storage, "", 0, 1, ranges, {("model", "forged"): expanded})
    kinds = {"model": STATE}
    manifest = Manifest(1, 1, 0.0, kinds, part.files, merged([part]), [{}], tied={"model": {}})
    write_manifest(storage, "", manifest)
    with pytest.warns(UserWarning, match="left out of the export.*: forged of 'model'"):
        tensors, _ = safetensors_of(newest_whole(storage))
    assert tensors.keys() == {"weight"}


@pytest.mark.parametrize("file_format", ["torch", "safetensors"])
def test_an_export_follows_no_link_that_waits_under_a_temporary_name(
    ranks_of, tmp_path: Path, file_format: str
) -> None:
    if file_format == "safetensors":
        pytest.importorskip("safetensors", reason="safetensors is not installed")
    ranks_of(1).run(save, tmp_path / "place", False, False)
    victim, target = tmp_path / "victim", tmp_path / "out" / "weights"
    victim.write_text("precious")
    target.parent.mkdir()
    for name in ("weights.tmp", ".weights.part"):
        (target.parent / name).symlink_to(victim)
    export(tmp_path / "place", target, file_format)
    assert victim.read_text() == "precious"
    assert not target.is_symlink() and target.stat().st_size > len("precious")


def test_what_cannot_be_written_as_safetensors_is_said(
    ranks_of, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, file = tmp_path / "place", tmp_path / "weights.safetensors"
    ranks_of(1).run(in_run, train_without_a_module, cl.CheckpointConfig(place))
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda name: None)
        assert main(["checkpoint", "export", str(place), str(file)]) == 1
    assert "pip install -e '.[safetensors]'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="format must be one of torch, safetensors, got 'gguf'"):
        export(place, file, "gguf")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    assert main(["checkpoint", "export", str(place), str(file)]) == 1
    assert "has no weights: no module is among what was registered (optim)" in (
        capsys.readouterr().err
    )
    assert not file.exists()
