"""What was saved comes back, at any number of ranks, and others can read it."""

from __future__ import annotations

import copy
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import chorusline as cl
from chorusline.runtime.checkpoint.contents import STATE, whole_of
from chorusline.runtime.checkpoint.format.boxes import boxes_of, split_evenly
from chorusline.runtime.checkpoint.format.catalog import newest_whole
from chorusline.runtime.checkpoint.format.manifest import Manifest, merged, write_manifest
from chorusline.runtime.checkpoint.format.reader import CheckpointReader
from chorusline.runtime.checkpoint.format.shard_file import write_part
from chorusline.runtime.checkpoint.format.storage import Folder, open_storage
from chorusline.runtime.commands.command_line import main
from chorusline.runtime.program.context import call_of
from tests.harness.gpus import gpus_of
from tests.harness.ranks import Rank
from tests.references.checkpoint_runs import Parts, in_run, make_model, run_train, same


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 3), (3, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 4), (4, 1)))],
)
def test_a_run_goes_on_at_another_number_of_ranks_from_exactly_what_was_saved(
    ranks_of, tmp_path, before, after
):
    config = cl.CheckpointConfig(tmp_path)
    options = {"is_local": False}
    ((end, saved), *_) = ranks_of(before).run(
        run_train, config, dict(until=5, save_at=3, **options)
    )
    assert saved["step"] == 3
    ((resumed, _), *_) = ranks_of(after).run(run_train, config, dict(until=3, **options))
    assert same(resumed, saved)
    ((gone_on, _), *_) = ranks_of(after).run(run_train, config, dict(until=5, **options))
    assert gone_on["step"] == 5
    for name, tensor in gone_on["model"].items():
        assert torch.allclose(tensor, end["model"][name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        (torch.float32, torch.optim.AdamW),
        (torch.float64, torch.optim.SGD),
        (torch.bfloat16, torch.optim.AdamW),
        (torch.float32, torch.optim.Adafactor),
    ],
    ids=["AdamW", "no state", "masters", "whole parameters"],
)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_interrupted(
    ranks_of, tmp_path, dtype, optimizer
):
    config = cl.CheckpointConfig(tmp_path)
    options = {"dtype": dtype, "optimizer": optimizer}
    uninterrupted = ranks_of(2).run(run_train, config, dict(until=6, save_at=3, **options))
    resumed = ranks_of(2).run(run_train, config, dict(until=6, **options))
    assert [same(a, b) for (a, _), (b, _) in zip(uninterrupted, resumed, strict=True)] == [True] * 2


class _Halves(torch.nn.Module):
    """In bfloat16; its second layer is used when the program says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(3, 3, dtype=torch.bfloat16) for _ in range(2))
        self.uses_both = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.first(batch) + (self.second(batch) if self.uses_both else 0)


def test_a_plain_optimizer_begins_the_state_of_a_parameter_that_a_sharded_one_has_not_stepped(
    alone, tmp_path
):
    def train(ctx: cl.Context, *, is_sharded: bool) -> int:
        model = ctx.register("model", cl.DistributedDataParallel(_Halves()))
        optim = (
            cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW)
            if is_sharded
            else torch.optim.AdamW(model.parameters())
        )
        ctx.register("optim", optim)
        model.module.uses_both = not is_sharded
        model(torch.ones(2, 3, dtype=torch.bfloat16)).square().mean().backward()
        optim.step()
        ctx.save().wait()
        return 0 if is_sharded else sum("exp_avg" in state for state in optim.state.values())

    config = cl.CheckpointConfig(tmp_path)
    in_run(alone, train, config, is_sharded=True)
    assert in_run(alone, train, config, is_sharded=False) == 4
    in_run(alone, train, config, is_sharded=True)  # And back.


@pytest.mark.parametrize("replicas", [1, 2])
def test_each_byte_of_what_all_ranks_have_is_written_once_and_a_third_by_each_of_three(
    ranks_of, tmp_path, replicas
):
    options = {"until": 1, "save_at": 1, "width": 40_000, "replicas": replicas}
    ranks_of(3).run(run_train, cl.CheckpointConfig(tmp_path), options)
    (folder,) = tmp_path.iterdir()
    manifest = newest_whole(open_storage(tmp_path)).manifest
    numel = sum(p.numel() for p in make_model(width=40_000).parameters())
    sizes = [(folder / f"rank-{rank}.distcp").stat().st_size for rank in range(3)]
    # Parameters and two moments in float32, three buffers, and a few kB around each piece.
    assert sum(sizes) == pytest.approx(3 * 4 * numel + 2 * 4 * 40_000, rel=0.1)
    assert max(sizes) < 1.2 * min(sizes)
    for entry in manifest.entries:
        if entry.dtype is not None:
            assert [item.start for item in entry.items] == [0, *(i.stop for i in entry.items[:-1])]


def _go_on_with_replicas(group: cl.Group, config: cl.CheckpointConfig) -> tuple[int, list[Any]]:
    def train(ctx: cl.Context) -> tuple[int, list[Any]]:
        parts = Parts(ctx, replicas=2, check_every=1)
        for _ in range(2):
            parts.step()
        return ctx.step, parts.optim.corrections

    return in_run(group, train, config)


@pytest.mark.parametrize("size", [2, 3])
def test_each_replica_of_a_shard_is_loaded_as_its_owner_loads_it(ranks_of, tmp_path, size):
    """Else the loss of the owner would bring up what the replica never had."""
    config = cl.CheckpointConfig(tmp_path)
    ranks_of(3).run(run_train, config, {"until": 3, "save_at": 3, "replicas": 2})
    assert ranks_of(size).run(_go_on_with_replicas, config) == [(5, [])] * size


def _load_some(group: cl.Group, config: cl.CheckpointConfig) -> tuple[int, int]:
    """Bytes that this rank read to restore, and those of all files."""
    read = []

    def train(ctx: cl.Context) -> None:
        reader = call_of(ctx).checkpoints.reader
        verified = reader.bytes_read
        Parts(ctx, width=40_000)
        read.append((reader.bytes_read - verified, sum(reader.manifest.files.values())))

    in_run(group, train, config)
    return read[0]


def test_a_rank_reads_the_model_and_its_own_part_of_the_optimizer(ranks_of, tmp_path):
    config = cl.CheckpointConfig(tmp_path)
    ranks_of(4).run(run_train, config, {"until": 1, "save_at": 1, "width": 40_000})
    for read, whole in ranks_of(4).run(_load_some, config):
        # A model of a third, and a quarter of two moments of the same size.
        assert read == pytest.approx(whole * (1 / 3 + 2 / 3 / 4), rel=0.1)


class _Shadow:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


_SHADOW: dict[str, Any] = {
    "layer2": torch.full((30,), 2.0),
    "none": None,
    "layer10": {"b": torch.full((20,), 10.0), "empty": torch.empty(0, 3), "a": torch.ones(1)},
    "layer1": torch.full((30,), 1.0),
    "last": 1.5,
}


def _keep_a_shadow(group: cl.Group, config: cl.CheckpointConfig) -> list[list[str]]:
    def train(ctx: cl.Context) -> list[list[str]]:
        shadows = _Shadow(), _Shadow()
        if ctx.resumed_from is None:
            for shadow in shadows:
                shadow.state = {"shadow": _SHADOW, "by": {10: torch.ones(1), 2: torch.ones(1)}}
        ctx.register("shadow", shadows[0])
        ctx.register("own", shadows[1], per_rank=True)
        ctx.save().wait()
        keys = [one.state["shadow"] for one in shadows]
        keys += [keys[0]["layer10"], shadows[0].state, shadows[0].state["by"]]
        return [[*map(str, one)] for one in keys]

    return in_run(group, train, config)


@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_state_that_is_loaded_has_its_keys_in_the_order_of_the_saved_one(
    ranks_of, tmp_path, before
):
    config = cl.CheckpointConfig(tmp_path)
    (saved, *_) = ranks_of(before).run(_keep_a_shadow, config)
    assert saved[0] == list(_SHADOW)
    assert ranks_of(1).run(_keep_a_shadow, config) == [saved]


ZEROS, ONES = torch.zeros(2), torch.ones(2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # As it should be.
@pytest.mark.parametrize(
    ("other", "read"),
    [
        (("a.b", "c"), {"a": {"b.c": ZEROS}, "a.b": {"c'": ONES}}),
        (("a", "b", "c"), {"a": {"b": {"c": ONES}, "b.c'": ZEROS}}),
    ],
)
def test_two_names_that_are_one_with_dots_are_two_for_torch(tmp_path, other, read):
    storage = Folder(tmp_path)
    part = write_part(storage, "", 0, 1, [whole_of(("a", "b.c"), ZEROS), whole_of(other, ONES)], {})
    kinds = dict.fromkeys(read, STATE)
    write_manifest(storage, "", Manifest(1, 1, 0.0, kinds, part.files, merged([part]), [{}]))
    dcp_to_torch_save(tmp_path, tmp_path / "converted.pt")
    assert same(torch.load(tmp_path / "converted.pt"), read)


def _save_with_its_part(ctx: cl.Context, fill: float) -> float:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    torch.nn.init.constant_(net[0].weight, fill)
    ctx.register("model", net)
    ctx.register("model.0", net[0])
    ctx.save().wait()
    return net[0].weight.tolist()[0][0]


def test_a_module_and_its_part_are_saved_under_one_name_with_dots(alone, tmp_path):
    config = cl.CheckpointConfig(tmp_path)
    assert [in_run(alone, _save_with_its_part, config, fill=fill) for fill in (3.0, 4.0)] == [3, 3]


def test_of_a_range_only_the_pieces_that_it_lies_in_are_read(tmp_path):
    tensor = torch.randn(5, 1_000_003)
    storage = Folder(tmp_path)
    part = write_part(storage, "", 0, 0, [whole_of(("t",), tensor)], {})
    manifest = Manifest(0, 1, 0.0, {"t": STATE}, part.files, merged([part]), [])
    write_manifest(storage, "", manifest)
    reader = CheckpointReader(storage, "")
    (entry,) = reader.manifest.entries
    assert len(entry.items) > 5
    for start, stop in [(0, 1), (1_234_567, 2_222_222), (5_000_014, 5_000_015)]:
        before = reader.bytes_read
        assert torch.equal(reader.tensor(entry, start, stop), tensor.flatten()[start:stop])
        touched = [i.length for i in entry.items if i.start < stop and start < i.stop]
        assert reader.bytes_read - before == sum(touched)


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(0, 700), st.integers(0, 700))
def test_a_range_is_made_of_boxes_each_contiguous(shape, one, other):
    numbers = torch.arange(math.prod(shape)).view(shape)
    start, stop = sorted(min(end, numbers.numel()) for end in (one, other))
    at = start
    for first, last, (offsets, lengths) in boxes_of(shape, start, stop):
        box = numbers
        for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            box = box.narrow(dimension, offset, length)
        assert box.flatten().tolist() == list(range(first, last)) and first == at
        at = last
    assert at == stop


@given(
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([1, 2, 4, 8])), max_size=8),
    st.integers(1, 7),
)
def test_every_element_has_one_writer_and_writers_have_about_the_same(sizes, num_parts):
    parts = [split_evenly(sizes, part, num_parts) for part in range(num_parts)]
    for number, (numel, _) in enumerate(sizes):
        ends = [0, *(part[number][1] for part in parts)]
        assert [part[number][0] for part in parts] == ends[:-1] and ends[-1] == numel
    loads = [
        sum((stop - start) * size for (start, stop), (_, size) in zip(part, sizes, strict=True))
        for part in parts
    ]
    assert max(loads) - min(loads) <= 2 * 8 + 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # As it should be.
def test_dcp_and_torch_load_read_what_we_write(ranks_of, tmp_path, capsys):
    place = tmp_path / "place"
    ((_, saved), _) = ranks_of(2).run(
        run_train, cl.CheckpointConfig(place), {"until": 2, "save_at": 2}
    )
    (folder,) = place.iterdir()

    model = make_model()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert same(dict(state["model"]), saved["model"])

    dcp_to_torch_save(folder, tmp_path / "converted.pt")
    converted = torch.load(tmp_path / "converted.pt", weights_only=False)
    assert same(converted["model"], dict(sorted(saved["model"].items())))
    by_number = saved["optimizer"]["state"]
    by_name = converted["optimizer"]["state"]
    names = [name for name, _ in model.named_parameters()]
    assert same(by_name, {name: by_number[number] for number, name in enumerate(names)})

    assert main(["checkpoint", "export", str(place), str(tmp_path / "plain.pt")]) == 0
    assert "step 2" in capsys.readouterr().out
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)
    model.load_state_dict(plain["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(plain["optimizer"])
    assert same(optimizer.state_dict()["state"], by_number)
    assert plain["schedule"] == saved["schedule"]
    assert len(plain["random"]) == 2


def test_the_command_lists_whole_and_torn_ones_and_says_when_there_is_none(
    ranks_of, tmp_path, capsys
):
    assert main(["checkpoint", "list", str(tmp_path)]) == 1
    assert f"there is no checkpoint in {tmp_path}" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "x.pt")]) == 1
    assert "there is no complete checkpoint here" in capsys.readouterr().err
    ranks_of(1).run(run_train, cl.CheckpointConfig(tmp_path), {"until": 1, "save_at": 1})
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert "whole, step 1, 1 ranks" in capsys.readouterr().out
    (folder,) = tmp_path.iterdir()
    os.truncate(folder / "rank-0.distcp", 100)
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert "rank-0.distcp is torn or corrupted: it has 100 bytes of" in capsys.readouterr().out


def _train_plainly(
    group: cl.Group, config: cl.CheckpointConfig, sharded: bool, frozen: bool = False
) -> dict:
    """Steps with a plain or a sharded optimizer; the state of the optimizer before and after.
    frozen: the first layer is."""

    def train(ctx: cl.Context) -> dict:
        module = make_model()
        module[0].requires_grad_(not frozen)
        model = ctx.register("model", cl.DistributedDataParallel(module))
        kind = cl.ZeroRedundancyOptimizer if sharded else _plain
        optim = ctx.register("optimizer", kind(model.parameters(), torch.optim.AdamW, lr=1e-2))
        average = ctx.register("average", torch.optim.swa_utils.AveragedModel(model.module))
        start = _whole_state(ctx, optim)
        for _ in range(2):
            model(torch.ones(3, 7) * ctx.rank).square().mean().backward()
            optim.step()
            optim.zero_grad()
            average.update_parameters(model.module)
        ctx.save().wait()
        averaged = {name: value.clone() for name, value in average.state_dict().items()}
        return {"start": start, "end": _whole_state(ctx, optim), "average": averaged}

    return in_run(group, train, config)


def _plain(parameters, kind, **options):
    return kind(parameters, **options)


def _whole_state(ctx, optim):
    """A copy of rank 0's, on every rank."""
    if isinstance(optim, cl.ZeroRedundancyOptimizer):
        optim.consolidate_state_dict(to=0)
    return ctx.broadcast(copy.deepcopy(optim.state_dict()["state"]) if ctx.rank == 0 else None)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("legs", [(True, False), (False, True), (True, True)])
def test_a_plain_optimizer_goes_on_from_a_sharded_one_and_the_other_way_round(
    ranks_of, tmp_path, legs, frozen
):
    first, second = legs
    config = cl.CheckpointConfig(tmp_path)
    saved = ranks_of(3).run(_train_plainly, config, first)
    loaded = ranks_of(2).run(_train_plainly, config, second, frozen)
    for told in loaded:
        assert same(told["start"], saved[0]["end"])
        assert told["average"]["n_averaged"] == 4


def _clips_by(group: cl.Group, config, given: float | None, then: float | None) -> float | None:
    """The max_norm with which a run begins. then: what its body sets."""

    def train(ctx: cl.Context) -> float | None:
        model = ctx.register("model", cl.DistributedDataParallel(make_model()))
        optim = ctx.register(
            "optimizer", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, max_norm=given)
        )
        before, optim.max_norm = optim.max_norm, then
        model(torch.ones(3, 7)).square().mean().backward()
        optim.step()
        ctx.save().wait()
        return before

    return in_run(group, train, config)


def test_a_limit_of_the_gradient_that_the_body_has_set_is_saved(ranks_of, tmp_path):
    config = cl.CheckpointConfig(tmp_path)
    limits = [(1.0, 0.25), (1.0, None), (1.0, 0.5)]
    assert [ranks_of(2).run(_clips_by, config, *one)[0] for one in limits] == [1.0, 0.25, None]


def test_a_checkpoint_without_a_limit_of_the_gradient_leaves_the_one_that_is_given(
    ranks_of, tmp_path
):
    config = cl.CheckpointConfig(tmp_path)
    ranks_of(2).run(_train_plainly, config, False)
    assert ranks_of(2).run(_clips_by, config, 2.0, None) == [2.0, 2.0]


def _train_on_gpus(rank: Rank, place: str) -> Any:
    return run_train(rank.group(), cl.CheckpointConfig(place), {"until": 2, "save_at": 2})


@pytest.mark.parametrize("gpus", gpus_of(2))
def test_what_gpus_saved_goes_on_on_cpus(ranks_of, tmp_path, gpus):
    place = tmp_path / "place"
    (_, saved), _ = gpus.run(_train_on_gpus, tmp_path, str(place))
    ((resumed, _),) = ranks_of(1).run(run_train, cl.CheckpointConfig(place), {"until": 2})
    assert same(resumed, saved)


def _go_on_on_gpus(rank: Rank, place: str, until: int) -> Any:
    kwargs = {"until": until, "save_at": 2, "is_local": False}
    return run_train(rank.group(), cl.CheckpointConfig(place), kwargs)


@pytest.mark.parametrize("gpus", gpus_of(2))
def test_training_goes_on_on_another_number_of_gpus(ranks_of, tmp_path, gpus):
    place = tmp_path / "place"
    of_save = replace(gpus, size=3)
    saved = of_save.run(_go_on_on_gpus, tmp_path / "before", str(place), 2)[0][0]
    for told, _ in gpus.run(_go_on_on_gpus, tmp_path / "after", str(place), 4):
        assert told["step"] == 4
        assert not same(told["model"], saved["model"])
        ((expected, _),) = ranks_of(1).run(run_train, None, {"until": 4, "is_local": False})
        for name, parameter in expected["model"].items():
            torch.testing.assert_close(told["model"][name], parameter, rtol=1e-4, atol=2e-6)


def _train_in_memory(group: cl.Group) -> str:
    config = cl.CheckpointConfig("memory://place", num_to_keep=1)

    def train(ctx: cl.Context, until: int) -> str | None:
        parts = Parts(ctx)
        while ctx.step < until:
            parts.step()
            ctx.save()
        return ctx.resumed_from

    assert in_run(group, train, config, until=3) is None
    path = in_run(group, train, config, until=4)
    assert len(open_storage("memory://place").children()) == 1
    return path


def test_any_place_that_fsspec_knows_will_do(ranks_of, tmp_path):
    (path,) = ranks_of(1).run(_train_in_memory)
    assert path.startswith("memory://place/step-00000003-")
    url = f"file://{tmp_path}"
    ranks_of(1).run(run_train, cl.CheckpointConfig(url), {"until": 1, "save_at": 1})
    assert [Path(name).name[:13] for name in tmp_path.iterdir()] == ["step-00000001"]


def test_a_folder_that_is_made_is_synchronised_in_the_one_above_it(tmp_path, monkeypatch):
    """Or a power cut leaves no new checkpoint, after the older ones were deleted for it."""
    synced: list[Path] = []
    monkeypatch.setattr("chorusline.runtime.checkpoint.format.storage._sync_folder", synced.append)
    place = tmp_path / "new" / "place"
    Folder(place).write("step/file", b"x")
    assert synced == [place, place.parent, tmp_path, place / "step"]
    synced.clear()
    Folder(place).write("step/other", b"x")
    assert synced == [place / "step"]


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_write_returns(
    tmp_path, monkeypatch
):
    """Or a power cut leaves a whole checkpoint by its names, with files of zeros."""
    told: list[str] = []
    rename, fsync = Path.rename, os.fsync

    def synced(descriptor: int) -> None:
        told.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        told.append(f"rename to {target.name}")
        return rename(path, target)

    place = Folder(tmp_path / "step")
    place.write("first", b"x")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    place.write("file", b"x")
    assert told == ["sync file.tmp", "rename to file", "sync step"]
