"""Which checkpoints of a place count and which stay, and what is said of those that do not."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.collectives.objects.blocking import all_gather_object
from chorusline.runtime.checkpoint.checkpoints import Checkpoints
from chorusline.runtime.checkpoint.format.catalog import candidates, newest_whole, prune, sweep
from chorusline.runtime.checkpoint.format.manifest import read_manifest, write_manifest
from chorusline.runtime.checkpoint.format.shard_file import write_part
from chorusline.runtime.checkpoint.format.storage import Folder, open_storage
from chorusline.runtime.commands.command_line import main
from chorusline.runtime.process.registry import Registry
from tests.harness.ranks import SHARED_MEMORY, Rank, run_ranks
from tests.references.checkpoint_places import (
    DAMAGES,
    folder_of,
    resume_and_listen,
    steps_in,
    write_two,
)
from tests.references.checkpoint_runs import run_train


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(ranks_of, tmp_path, damage):
    write_two(ranks_of, tmp_path)
    DAMAGES[damage](folder_of(tmp_path, 4))
    config = cl.CheckpointConfig(tmp_path, num_to_keep=2)
    ranks_of(2).run(run_train, config, {"until": 5, "save_at": 5})
    assert {2, 5} <= set(steps_in(tmp_path))  # The two that are whole.
    ranks_of(2).run(run_train, config, {"until": 6, "save_at": 6})
    assert steps_in(tmp_path)[-2:] == [5, 6] and 2 not in steps_in(tmp_path)


def test_a_damaged_checkpoint_that_no_run_has_read_does_not_count_either(ranks_of, tmp_path):
    """A run that begins afresh sees the sizes of its files only."""
    write_two(ranks_of, tmp_path)
    (folder_of(tmp_path, 4) / "rank-1.distcp").unlink()
    afresh = cl.CheckpointConfig(tmp_path, num_to_keep=2, resume="never")
    ranks_of(2).run(run_train, afresh, {"until": 1, "save_at": 1})
    assert steps_in(tmp_path) == [1, 2, 4], "the two that are whole, and the damaged one"


def _save_while_another_run_begins(group: cl.Group, place: Path) -> str:
    has_written, gate = threading.Event(), threading.Event()

    def write_and_wait(*args: Any) -> Any:
        part = write_part(*args)
        has_written.set()
        gate.wait(20)
        return part

    registry = Registry()
    registry.add("model", torch.nn.Linear(3, 3))
    config = cl.CheckpointConfig(place)
    with pytest.MonkeyPatch.context() as patch, Checkpoints(group, registry, config) as checkpoints:
        patch.setattr("chorusline.runtime.checkpoint.checkpoints.write_part", write_and_wait)
        saving = checkpoints.save(None, 1, [0])
        assert has_written.wait(20)
        with Checkpoints(group, Registry(), config):
            gate.set()
        with pytest.raises(cl.CheckpointWriteFailed) as raised:
            saving.wait(20)
    return str(raised.value)


def test_two_runs_in_one_place_are_told_what_they_do_to_each_other(ranks_of, tmp_path):
    (word,) = ranks_of(1).run(_save_while_another_run_begins, tmp_path)
    assert "its files were deleted while it was being written" in word
    assert f"A run that begins in {tmp_path} deletes the files of unfinished runs there" in word
    assert "give each run a storage_path of its own" in word


def _complete_what_was_deleted(group: cl.Group, place: Path) -> tuple[str, list[int]]:
    """What is said of a save whose files another run deletes right before the manifest is written,
    and the steps that are left."""
    sees_all, gate = threading.Event(), threading.Event()

    def wait_and_write(*args: Any) -> None:
        sees_all.set()
        gate.wait(20)
        write_manifest(*args)

    registry = Registry()
    registry.add("model", torch.nn.Linear(3, 3))
    config = cl.CheckpointConfig(place, num_to_keep=1)
    with pytest.MonkeyPatch.context() as patch, Checkpoints(group, registry, config) as checkpoints:
        checkpoints.save(None, 1, [0]).wait(20)
        patch.setattr("chorusline.runtime.checkpoint.writing.write_manifest", wait_and_write)
        saving = checkpoints.save(None, 2, [0])
        assert sees_all.wait(20)
        with Checkpoints(group, Registry(), config):
            gate.set()
        with pytest.raises(cl.CheckpointWriteFailed) as raised:
            saving.wait(20)
    newest_whole(open_storage(place))
    return str(raised.value), steps_in(place)


def test_a_checkpoint_that_has_lost_its_files_deletes_no_older_one(alone, tmp_path):
    word, steps = _complete_what_was_deleted(alone, tmp_path)
    assert "its files were deleted while it was being written" in word
    assert steps == [1]


def _save_after_steps(group: cl.Group, place: Path, steps: list[int]) -> str:
    """By rank."""
    registry = Registry()
    registry.add("model", torch.nn.Linear(3, 3))
    with Checkpoints(group, registry, cl.CheckpointConfig(place)) as checkpoints:
        saving = checkpoints.save(None, steps[group.rank], [0, 1])
        with pytest.raises(cl.CheckpointWriteFailed) as raised:
            saving.wait(20)
    return str(raised.value)


def test_ranks_that_save_after_different_steps_write_no_checkpoint(ranks_of, tmp_path):
    for word in ranks_of(2).run(_save_after_steps, tmp_path, [3, 4]):
        assert "the ranks are at different steps (by rank: [3, 4])" in word
    assert candidates(Folder(tmp_path)) == []


def test_a_file_that_has_lost_bytes_before_the_end_of_the_save_is_no_checkpoint(
    alone, tmp_path, monkeypatch
):
    """Also at a place that the program has named, in which nothing is deleted."""

    def write_and_lose(*args: Any) -> Any:
        part = write_part(*args)
        os.truncate(tmp_path / "named" / "rank-0.distcp", 100)
        return part

    monkeypatch.setattr("chorusline.runtime.checkpoint.checkpoints.write_part", write_and_lose)
    registry = Registry()
    registry.add("model", torch.nn.Linear(3, 3))
    with Checkpoints(alone, registry, None) as checkpoints:
        saving = checkpoints.save(tmp_path / "named", 1, [0])
        with pytest.raises(cl.CheckpointWriteFailed, match=r"rank-0.distcp has 100 bytes of the"):
            saving.wait(20)
    with pytest.raises(cl.CheckpointNotFound):
        newest_whole(open_storage(tmp_path / "named"))


def test_one_without_a_manifest_does_not_exist_and_is_swept(ranks_of, tmp_path):
    write_two(ranks_of, tmp_path)
    for last_written in ("chorusline.json", ".metadata"):  # So it is after a kill in a save.
        (folder_of(tmp_path, 4) / last_written).unlink()
    told = ranks_of(2).run(resume_and_listen, cl.CheckpointConfig(tmp_path))
    assert told == [(2, []), (2, [])]
    assert steps_in(tmp_path) == [2]


def test_one_that_lacks_only_its_manifest_is_named_and_stays(ranks_of, tmp_path):
    write_two(ranks_of, tmp_path)
    lacking, before = folder_of(tmp_path, 4), folder_of(tmp_path, 2)
    manifest = (lacking / "chorusline.json").read_bytes()
    (lacking / "chorusline.json").unlink()
    config = cl.CheckpointConfig(tmp_path, num_to_keep=1)
    (step, (word,)), (other_step, silence) = ranks_of(2).run(resume_and_listen, config)
    assert (step, other_step, silence) == (2, 2, [])
    assert word.startswith(f"{lacking} is not used, because chorusline.json is missing in it; ")
    assert f"So the run resumes from {before}, of step 2. The folder stays: put the file" in word

    ranks_of(2).run(run_train, config, {"until": 3, "save_at": 3})
    assert steps_in(tmp_path) == [3, 4]  # The save deletes an old checkpoint, and not this folder.
    shutil.rmtree(folder_of(tmp_path, 3))
    (step, (word,)), _ = ranks_of(2).run(resume_and_listen, config)
    assert step == 0
    assert f"{lacking} is not used" in word and "So the run starts afresh." in word

    (lacking / "chorusline.json").write_bytes(manifest)
    assert ranks_of(2).run(resume_and_listen, config) == [(4, []), (4, [])]


def test_the_list_and_a_chosen_path_say_that_only_the_manifest_is_missing(
    ranks_of, tmp_path, capsys
):
    ranks_of(1).run(run_train, cl.CheckpointConfig(tmp_path), {"until": 1, "save_at": 1})
    folder = folder_of(tmp_path, 1)
    (folder / "chorusline.json").unlink()
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert f"{folder} is not used, because chorusline.json is" in capsys.readouterr().out
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "plain.pt")]) == 1
    assert f"{folder} is not used, because chorusline.json is" in capsys.readouterr().err
    config = cl.CheckpointConfig(tmp_path / "other", resume=folder)
    ((_, (word,)),) = ranks_of(1).run(resume_and_listen, config)
    assert "it has .metadata, as checkpoints of torch.distributed.checkpoint do" in word


def _saved(group: cl.Group, config: cl.CheckpointConfig, run_id: str, step: int) -> Path:
    registry = Registry()
    registry.add("model", torch.nn.Linear(3, 3))
    checkpoints = Checkpoints(group, registry, config)
    checkpoints.run_id = run_id
    with checkpoints:
        saving = checkpoints.save(None, step, [0])
    return Path(saving.path)


def _way_back(group: cl.Group, config: cl.CheckpointConfig, run_id: str) -> str | None:
    checkpoints = Checkpoints(group, Registry(), config)
    checkpoints.run_id, checkpoints.goes_back = run_id, True
    if not checkpoints.can_go_back(group, config.resume):
        return None
    with checkpoints:
        assert checkpoints.reader is not None
        return checkpoints.reader.path


@pytest.mark.parametrize("resume", ["auto", "never", "a path", "a path elsewhere"])
def test_a_run_goes_back_to_what_it_has_saved_itself_or_to_what_it_began_from(
    alone, tmp_path, resume
):
    place, mine, another = tmp_path / "place", 32 * "a", 32 * "b"
    first = _saved(alone, cl.CheckpointConfig(place), another, 3)
    newest = _saved(alone, cl.CheckpointConfig(place), another, 5)
    began_from = None
    if resume == "a path":
        began_from = first
    elif resume == "a path elsewhere":
        began_from = _saved(alone, cl.CheckpointConfig(tmp_path / "elsewhere"), another, 1)
    config = cl.CheckpointConfig(place, resume=began_from or resume)
    expected = str(newest if resume == "auto" else began_from) if resume != "never" else None
    assert _way_back(alone, config, mine) == expected

    never = cl.CheckpointConfig(place, resume="never")
    own = _saved(alone, never, mine, 1)
    # Whoever has written there meanwhile.
    last = _saved(alone, never, another, 7)
    assert _way_back(alone, config, mine) == str(last if resume == "auto" else own)


def test_a_checkpoint_at_the_place_itself_hides_no_newer_one(alone, tmp_path):
    def save_there(step: int, config: cl.CheckpointConfig | None, path: Path | None) -> str:
        registry = Registry()
        registry.add("model", torch.nn.Linear(3, 3))
        with Checkpoints(alone, registry, config) as checkpoints:
            return checkpoints.save(path, step, [0]).path

    def newest() -> tuple[int, list[str]]:
        reader = newest_whole(open_storage(tmp_path))
        return reader.manifest.step, candidates(reader.storage)

    root = save_there(5, None, tmp_path)
    assert (root, newest()) == (str(tmp_path), (5, [""]))
    config = cl.CheckpointConfig(tmp_path)
    first, second = (Path(save_there(step, config, None)).name for step in (6, 4))
    assert newest() == (4, [second, first, ""])
    # One that is torn is tried first, and so named.
    manifest = tmp_path / "chorusline.json"
    manifest.write_text("torn")
    assert newest() == (4, ["", second, first])
    manifest.unlink()
    (tmp_path / ".metadata").unlink()
    save_there(3, None, tmp_path)
    assert newest() == (3, ["", second, first])


def test_a_run_does_not_save_at_its_storage_path_itself(alone, tmp_path):
    registry = Registry()
    registry.add("model", torch.nn.Linear(3, 3))
    place, link = tmp_path / "place", tmp_path / "link"
    link.symlink_to(place)
    with Checkpoints(alone, registry, cl.CheckpointConfig(place)) as checkpoints:
        for path in (place, f"{place}/", place / ".." / "place", link):
            with pytest.raises(ValueError, match=r"is the session's storage path.*ctx\.save\(\)"):
                checkpoints.save(path, 1, [0])
        checkpoints.save(place / "named", 1, [0]).wait()
    assert newest_whole(open_storage(place / "named")).manifest.step == 1


def test_a_clock_that_is_behind_makes_no_old_checkpoint_the_newest(alone, tmp_path, monkeypatch):
    """As where rank 0 is now on another host than in the run before, or that host was set right."""
    config = cl.CheckpointConfig(tmp_path, num_to_keep=2)
    now = time.time()
    for step, clock in ((1, now + 7200), (2, now + 7201), (3, now), (4, now - 60), (5, now + 1)):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        _saved(alone, config, 32 * "a", step)
        assert newest_whole(open_storage(tmp_path)).manifest.step == step
        assert steps_in(tmp_path) == [*range(max(step - 1, 1), step + 1)]
    monkeypatch.setattr(time, "time", lambda: now + 9000)
    saved = _saved(alone, config, 32 * "a", 6)
    assert read_manifest(open_storage(tmp_path), saved.name).time == now + 9000


def test_saves_of_one_run_are_in_order_whatever_the_clock_does(alone, tmp_path, monkeypatch):
    registry, now = Registry(), time.time()
    registry.add("model", torch.nn.Linear(3, 3))
    config = cl.CheckpointConfig(tmp_path, num_to_keep=2)
    with Checkpoints(alone, registry, config) as checkpoints:
        for step in range(1, 5):
            monkeypatch.setattr(time, "time", lambda step=step: now - step)
            checkpoints.save(None, step, [0]).wait()
            assert newest_whole(open_storage(tmp_path)).manifest.step == step


def test_a_save_deletes_nothing_of_one_that_other_ranks_have_begun(alone, tmp_path):
    saved = _saved(alone, cl.CheckpointConfig(tmp_path), 32 * "a", 3)
    begun = saved.with_name(f"{saved.name.rpartition('-')[0]}-1")
    begun.mkdir()
    (begun / "rank-1.distcp").write_bytes(b"half")
    assert prune(open_storage(tmp_path), 1, saved.name)
    assert (begun / "rank-1.distcp").exists()
    # The next run does, in which nobody writes it any more.
    assert sweep(open_storage(tmp_path)) == [] and not begun.exists()


class _Slow(Folder):
    """Where each look takes a while, as in an object store. calls: the names that were read."""

    pause_s = 0.0
    calls: list[str]

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.calls = []

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        self.calls.append(name)
        return super().read(name, start, length)

    def children(self, name: str = "") -> list[str]:
        time.sleep(self.pause_s if name else 0)
        return super().children(name)

    def sizes(self, name: str = "") -> dict[str, int]:
        time.sleep(self.pause_s)
        return super().sizes(name)


def test_old_checkpoints_are_not_read_where_nothing_is_to_be_deleted(alone, tmp_path):
    config = cl.CheckpointConfig(tmp_path)
    saved = [_saved(alone, config, 32 * "a", step) for step in (1, 2, 3)]
    storage = _Slow(tmp_path)
    assert sweep(storage) == [] and storage.calls == []
    assert prune(storage, None, saved[-1].name)
    assert storage.calls == [f"{saved[-1].name}/chorusline.json"]


def _begin_slowly(rank: Rank, place: Path, resume: str) -> tuple[int, float]:
    group = rank.group(timeout_s=1.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Slow, "pause_s", 0.4)
        patch.setattr("chorusline.runtime.checkpoint.checkpoints.open_storage", _Slow)
        checkpoints = Checkpoints(
            group, Registry(), cl.CheckpointConfig(place, resume=resume, timeout_s=60)
        )
        began_at = time.monotonic()
        checkpoints.begin()
        took_s = time.monotonic() - began_at
    assert all_gather_object(group, group.rank) == [0, 1]  # As what comes after it.
    return checkpoints.reader.manifest.step if checkpoints.reader else 0, took_s


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_place_with_many_checkpoints_may_take_longer_than_a_collective(alone, tmp_path, resume):
    config = cl.CheckpointConfig(tmp_path)
    for step in range(1, 6):
        _saved(alone, config, 32 * "a", step)
    ranks = tmp_path / "ranks"
    for step, took_s in run_ranks(_begin_slowly, 2, ranks, SHARED_MEMORY, tmp_path, resume):
        assert step == (5 if resume == "auto" else 0)
        assert took_s > 1.5  # The deadline of a collective.


@pytest.mark.parametrize("num_deleted", [1, 2])
def test_one_whose_deletion_was_killed_is_deleted_by_the_next_save(alone, tmp_path, num_deleted):
    class Killed(Folder):
        left = num_deleted

        def delete(self, name: str) -> None:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            super().delete(name)

    config = cl.CheckpointConfig(tmp_path)
    old, newest = (_saved(alone, config, 32 * "a", step) for step in (1, 2))
    with pytest.raises(KeyboardInterrupt):
        prune(Killed(tmp_path), 1, newest.name)
    assert old.exists() and newest_whole(open_storage(tmp_path)).manifest.step == 2
    assert sweep(open_storage(tmp_path)) == []  # None of which a run would warn.
    assert prune(open_storage(tmp_path), 1, newest.name)
    assert steps_in(tmp_path) == [2]


def test_of_a_link_to_a_checkpoint_elsewhere_only_the_link_is_deleted(alone, tmp_path):
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    old = _saved(alone, cl.CheckpointConfig(elsewhere), 32 * "a", 1)
    place.mkdir()
    (place / old.name).symlink_to(old)
    _saved(alone, cl.CheckpointConfig(place, num_to_keep=1), 32 * "b", 2)
    assert steps_in(place) == [2]
    assert newest_whole(open_storage(elsewhere)).manifest.step == 1


def test_a_save_deletes_nothing_that_is_newer(alone, tmp_path):
    """Another run may have saved since this one has written its manifest."""
    first, second, third = (
        _saved(alone, cl.CheckpointConfig(tmp_path), 32 * run, step)
        for step, run in enumerate("abc", 1)
    )
    assert prune(open_storage(tmp_path), 1, second.name)
    assert [path.exists() for path in (first, second, third)] == [False, True, True]
