"""The checkpoints of one run, on one rank: saved at step boundaries, written during training.

    save   (1) waits for the last checkpoint, (2) copies this rank's part to the host. Training
    continues, and a thread puts the line that called into the group's store, (3) writes the part,
           (4) puts a record of it into the store. Rank 0's thread (5) waits for all records, (6)
           writes the manifest, (7) deletes old checkpoints, (8) puts the outcome into the store.

A save runs no collective: ranks that reach the boundary at different times do not wait for each
other, and a rank that has joined saves in the steps that it shadows. But all ranks have to come:
the group's deadline for collectives is also that for the calls, and the config's is for writing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import Any, Self

import torch

from chorusline.collectives.contract.call_site import is_users_file, short_site, users_frame
from chorusline.collectives.contract.errors import CollectiveError, StoreLost
from chorusline.collectives.diagnosis.debug import logger
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import broadcast_object
from chorusline.collectives.stores.store import PrefixStore

from ..join.active import active_join
from ..process.between_runs import between_runs
from ..process.registry import Registered, Registry
from ..process.sharded_tensors import has_shards
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer, optimizer_engine_of
from .config import AUTO, NEVER, CheckpointConfig
from .contents import (
    PER_RANK,
    STATE,
    ZERO,
    HostCopy,
    RegisteredObjects,
    apart_in,
    collect_own,
    collect_replicated,
    kind_of,
    state_of,
)
from .epoch_end import EpochEnd, LastSave
from .format import catalog
from .format.epoch_end import has_note
from .format.errors import CheckpointCorrupted, CheckpointWriteFailed
from .format.manifest import MANIFEST, METADATA
from .format.pieces import Contents, Path
from .format.reader import CheckpointReader
from .format.shard_file import write_part
from .format.storage import Storage, open_storage
from .opening import candidates_on_all, choose, probe, swept, warn_of_unlisted
from .replica_check import Numbers, checksums_of, numbers_in
from .restore import changes_in_words, options_of, restore
from .saving import Saving
from .sharded_state import SavedOptimizer
from .writing import LAST_SAVE_S, Writing


class Checkpoints:
    """Saves and restores the registered objects.

    config: None: only `save(path)` works, and no checkpoint is resumed.
    reader: reads the checkpoint that the run resumes from, or None.
    resumes_at_epoch_end: whether that checkpoint is the one of an epoch's end (epoch_end.py).
    run_id: of the call of `Session.run`, equal on all ranks; empty if it is not known.
    has_trained: the train function is called again in a run, after steps that this rank has taken.
    goes_back: the run begins again from a checkpoint: from one that it has written itself, if the
        config does not say that those of other runs will do.
    tell_progress: returns this rank's position in its data; the manifest keeps it, by rank.
    check_progress: raises ValueError for positions, by rank, that no run has told.
    """

    def __init__(self, group: Group, registry: Registry, config: CheckpointConfig | None) -> None:
        self.config = config
        self.registry = registry
        self.reader: CheckpointReader | None = None  # None: nothing to resume from
        self.resumes_at_epoch_end = False
        self.run_id = ""
        self.has_trained = False
        self.goes_back = False
        self.tell_progress: Callable[[], Any] = dict
        self.check_progress: Callable[[list[Any]], None] = lambda positions: None
        self._group = group
        self._storage = open_storage(config.storage_path) if config else None
        self._host = HostCopy(group.device)
        self.last_step = -1
        """The step of the last automatic save."""
        self._run = ""  # drawn by rank 0
        self._corrupted: list[str] = []  # the folders that this run has found so at its beginning
        self._count = 0
        self._step = -1  # of the last save
        self._begun_elsewhere = (0, -1)
        self._in_flight: Saving | None = None  # None: nothing is being written
        self._thread: threading.Thread | None = None  # of the newest save; None: no save yet
        self._last_save: LastSave | None = None  # of the epoch under way; None: it has none
        self._epoch_ends: list[EpochEnd] = []  # that are being noted
        self._looked_at: set[Path] = set()  # by writing.py: objects that checkpoints had
        self._last_times: list[float] = []  # by writing.py: of the newest checkpoint of the storage

    # -- The beginning -------------------------------------------------------------------------

    def begin(self) -> None:
        """Check the storage and choose a checkpoint, on all ranks before the train function.

        Raises CheckpointPlaceUnusable, CheckpointNotFound, CheckpointCorrupted, each on all ranks.
        The first is a warning if the run continues.
        """
        config, storage = self.config, self._storage
        if config is None or storage is None or self._run:
            return  # No storage, or begun already: a coroutine enters twice.
        # As rank 0 knows them, since a new worker knows of no save and of no way back.
        drawn = self._mark + secrets.token_hex(4), self.last_step, self.goes_back
        self._run, self.last_step, self.goes_back = broadcast_object(self._group, drawn)
        is_usable = probe(storage, self._group, self._run, has_trained=self.has_trained)
        # Before the choice: what an unfinished run has left is no candidate.
        unlisted: list[str] = []
        if is_usable:
            unlisted = swept(storage) if self._group.rank == 0 else []
            # The others wait for rank 0, as long as a save may take: a place may have hundreds of
            # folders, and a collective's deadline is for ranks that hang.
            broadcast_object(self._group, None, timeout_s=self._look_s(self._group))
        own = self._own(self._group, config.resume) if self.goes_back else ""
        if own or config.resume != NEVER:
            is_own_place = own or config.resume == AUTO
            source = storage if is_own_place else open_storage(config.resume)
            self.reader, corrupted = choose(
                source,
                self._group,
                may_be_absent=config.resume == AUTO,
                weights_only=config.weights_only,
                check=self._check_progress,
                run=own,
                timeout_s=self._look_s(self._group),
            )
            # Those of another place are not this run's to delete.
            if source.path == storage.path:
                self._corrupted = corrupted
        # A user who names a checkpoint, or wants none, does not ask what else is there.
        for folder in unlisted if config.resume == AUTO else ():
            warn_of_unlisted(storage, folder, self.reader)
        if self.reader is not None:
            # Asked on one rank: a place that answers two ranks differently would divide the run.
            is_noted = self._group.rank == 0 and has_note(self.reader.storage, self.reader.folder)
            self.resumes_at_epoch_end = broadcast_object(self._group, is_noted)

    def _check_progress(self, reader: CheckpointReader) -> None:
        try:
            self.check_progress(reader.manifest.progress)
        except ValueError as error:
            raise CheckpointCorrupted(
                f"{reader.path}/{MANIFEST}",
                f"the saved progress of the run cannot be read ({error})",
            ) from error

    @property
    def _mark(self) -> str:
        """What the folders of the run's checkpoints have in common (catalog.folder_name)."""
        return self.run_id[:8]

    def _look_s(self, group: Group) -> float:
        """Seconds that a rank may take to look through a place. A save may have less than that."""
        assert self.config is not None
        return max(self.config.deadline_s, group.timeout_s)

    def _own(self, group: Group, resume: str | FilePath) -> str:
        """The mark of the checkpoints that the run itself has written, if it may go back to no
        others and there are any; else empty. All ranks of `group` call it.

        resume: with what the run began. With AUTO it may go back to those of other runs."""
        if resume == AUTO or self._storage is None or self.config is None:
            return ""
        limit_s = self._look_s(group)
        found, _ = candidates_on_all(self._storage, group, self._mark, timeout_s=limit_s)
        return self._mark if found else ""

    def can_go_back(self, group: Group, resume: str | FilePath) -> bool:
        """Whether there is a checkpoint for a run that began with `resume` to go back to: one that
        it has written, or, unless it is NEVER, that it can begin from. All ranks of `group` call
        it."""
        if self._storage is None or self.config is None:
            return False
        if self._own(group, resume):
            return True
        if resume == NEVER:
            return False
        source = self._storage if resume == AUTO else open_storage(resume)
        return bool(candidates_on_all(source, group, timeout_s=self._look_s(group))[0])

    def change_group(self, group: Group) -> None:
        """Continue in another generation. A save in flight is dropped without an error, unless
        all ranks had written: no rank is to blame, and the next checkpoint is soon."""
        self._group = group
        # Its other ranks may be gone, and with them their parts.
        self._in_flight = self._last_save = None
        self._epoch_ends = []
        self._host = HostCopy(group.device)  # The thread of the save may still read the old one.

    @property
    def begun(self) -> tuple[int, int]:
        """How many saves this rank has begun, and of which step the last one was."""
        return self._count, self._step

    def skip(self, begun: tuple[int, int]) -> None:
        """The ranks continue in place, and some have begun to save a step before the others have
        ended it. These leave the saves of it out: the former are in the next step already.

        begun: of the rank that has begun the most."""
        self._begun_elsewhere = begun

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint, or the end of an epoch, is being written."""
        return self._in_flight is not None and not self._in_flight.is_ready

    @property
    def place(self) -> tuple[str, int, int]:
        """What ranks have in common here, for a worker that comes to them."""
        return self._run, self._count, self.last_step

    @place.setter
    def place(self, place: tuple[str, int, int]) -> None:
        self._run, self._count, self.last_step = place

    def restore(self, entry: Registered, *, required: bool) -> bool:
        """Load an object from the checkpoint to resume from. Returns whether this was done."""
        reader = self.reader
        # A new object, beside those that were saved, begins as it was made.
        if reader is None or (not required and entry.name not in reader.names()):
            return False
        given = options_of(entry.object)
        restore(entry, reader, self._group.rank)
        changes, line = changes_in_words(given, options_of(entry.object))
        if self._group.rank == 0 and changes:
            logger.warning(
                # Registering a schedule puts back what was loaded into its optimizer.
                "%r resumes with the options of the checkpoint: %s. To use yours instead, set "
                "them after the last ctx.register, as in optimizer.%s; a schedule computes "
                "from what it has loaded (base_lrs) and from max_lr in the groups: set these too",
                entry.name,
                changes,
                line,
            )
        # Not saved again at the step from which it has just been loaded.
        if isinstance(entry.object, ZeroRedundancyOptimizer):
            self.last_step = entry.object.num_steps
        return True

    # -- Saving --------------------------------------------------------------------------------

    def save_if_due(self, step: int, before: int | None = None) -> None:
        """Save if every_n_steps says so; all ranks call it at the same step boundary. before: the
        step for which it was called last; None: the step before this one."""
        every = self.config.every_n_steps if self.config else None
        if every is None or step <= 0:
            return
        is_due = step // every > (step - 1 if before is None else before) // every
        # A boundary may come again at the same step, as after a batch that only accumulates.
        if is_due and step != self.last_step:
            join = active_join()
            # Ranks that shadow have no current state of the loop's body.
            live = join.last_step_live if join else ()
            self.save(None, step, live or tuple(range(self._group.size)))
            # Not before: where the wait for the save before ends with the generation, this one is
            # due again when the function runs again.
            self.last_step = step

    def save(self, path: str | FilePath | None, step: int, live: Sequence[int]) -> Saving:
        """Copy the state of this step, and write it during training; see the top of this file.

        path: the place of this checkpoint alone; None: the storage of the config.
        live: the ranks whose state is current.
        """
        began_at = time.monotonic()
        if path is None and self._storage is None:
            raise RuntimeError(
                "the session has no storage for checkpoints; make it with "
                "checkpoint=CheckpointConfig(storage_path=...), or name a path: ctx.save(path)"
            )
        if not len(self.registry):
            raise RuntimeError(
                "nothing is registered, so there is nothing to save; call "
                "ctx.register('model', model), and the same for the optimizer, first"
            )
        if sharded := [one.name for one in self.registry if has_shards(one.object)]:
            raise RuntimeError(
                f"{sharded[0]!r} is a model of fully_shard, whose shards a checkpoint cannot hold; "
                "save it with torch.distributed.checkpoint"
            )
        storage = self._storage if path is None else open_storage(path)
        assert storage is not None
        if path is not None and self._storage is not None and _are_one(storage, self._storage):
            raise ValueError(
                f"{storage.path} is the session's storage path, in which each checkpoint has a "
                "folder of its own; call ctx.save(), or name another path"
            )
        # The host's copy is one: its bytes must be on disk before others take their place.
        self._finish_last()  # (1)
        folder = catalog.folder_name(step, self._run, self._count) if path is None else ""
        unread = None if path is None else _check_free(storage)
        if step == self._begun_elsewhere[1] and self._count < self._begun_elsewhere[0]:
            return self._left_out(storage.path_of(folder), step)
        waited_s = time.monotonic() - began_at
        # Read now: the loop continues while this is written.
        progress, before = self.tell_progress(), self._last_save
        # Asked before the copies are written over. Then the epoch's end is noted beside both.
        is_again = before is not None and before.holds(step, progress, self._collect)
        # Of another step, as all ranks know. Else the content may differ on one rank alone, and
        # rank 0, where it does not, waits for that rank's word.
        if before is not None and not is_again and before.step == step:
            self._tell_epoch_end(before.writings, is_end=False)
        contents = self._collect(live)
        writing = self._begin(
            storage,
            folder,
            step,
            contents,
            began_at,
            waited_s,
            objects=RegisteredObjects.of(self.registry),
            world_size=self._group.size,
            progress=progress,
            numbers=self._numbers(is_current=self._group.rank in live),
            unread=unread,
        )
        writings = [*(before.writings if before is not None and is_again else ()), writing]
        self._last_save = LastSave(
            step, live, progress, self._host.taken, contents.leaves, writings
        )
        return writing.saving

    def _left_out(self, path: str, step: int) -> Saving:
        """As on the ranks that have begun it, where it has ended with their generation."""
        self._count += 1  # Folders are named by it.
        saving = Saving(path, step)
        why = "the generation in which other ranks have called ctx.save() has ended"
        saving.end(CheckpointWriteFailed(path, why, (), is_by_loss=True))
        return saving

    def note_epoch_end(self, step: int) -> None:
        """The body of an epoch has ended: note it beside the newest checkpoint, if nothing that the
        checkpoint holds has changed since."""
        last, self._last_save = self._last_save, None
        # No save in this epoch, so that there is nothing to note the end beside.
        if last is None:
            return
        is_end = last.holds(step, self.tell_progress(), self._collect)
        self._tell_epoch_end(last.writings, is_end)

    def _tell_epoch_end(self, writings: Sequence[Writing], is_end: bool) -> None:
        for writing in writings:
            self._epoch_ends.append(EpochEnd(writing, is_end))
            self._epoch_ends[-1].start()

    def _numbers(self, *, is_current: bool) -> Numbers:
        numbers: Numbers = {}
        for entry in self.registry:
            # What is compared between ranks before a checkpoint counts; of ranks without data it is
            # old.
            if isinstance(entry.object, torch.nn.Module) and not entry.per_rank and is_current:
                numbers |= checksums_of(entry.name, apart_in(entry.object))
            if kind_of(entry) == STATE and is_current:
                numbers |= numbers_in(entry.name, state_of(entry))
            elif isinstance(entry.object, ZeroRedundancyOptimizer):
                # A rank that has run out of data drops what the others drop in the next step only.
                dropped = optimizer_engine_of(entry.object).state_changes.own.dropped
                numbers[f"{entry.name}.parameters_without_state_since_the_step"] = len(dropped)
        return numbers

    def save_contents(
        self,
        step: int,
        contents: Contents,
        objects: RegisteredObjects,
        progress: list[Any],
        world_size: int,
    ) -> Saving:
        """`save` to the storage of the config, for objects that are no longer in the registry.

        contents: this rank's part. objects: what was registered.
        progress: the progress of all ranks that have some, the same on all ranks.
        world_size: the number of ranks with a state of their own.
        """
        assert self._storage is not None
        return self._begin(
            self._storage,
            catalog.folder_name(step, self._run, self._count),
            step,
            contents,
            time.monotonic(),
            objects=objects,
            world_size=world_size,
            progress_by_rank=progress,
        ).saving

    def _begin(
        self,
        storage: Storage,
        folder: str,
        step: int,
        contents: Contents,
        began_at: float,
        waited_s: float = 0.0,
        **fields: Any,
    ) -> Writing:
        """Copy `contents`, and start the thread that writes it. fields: of `Writing`."""
        rank = self._group.rank
        ranges = self._host.take(contents.ranges)  # (2)
        known = between_runs().of_group(self._group)
        writing = Writing(
            config=self.config,
            group=self._group,
            saving=Saving(storage.path_of(folder), step),
            storage=storage,
            folder=folder,
            # By run if it has a name: a rank may have missed a save of an earlier run.
            key_prefix=f"{self._run}/{self._count}" if self._run else str(known.num_saves),
            leaves=contents.leaves,
            number=known.num_saves,
            run_id=self.run_id,
            site=_calling_line(),
            call_by=began_at + waited_s + self._group.timeout_s,
            write=lambda: write_part(
                storage, folder, rank, step, ranges, contents.leaves, contents.places
            ),
            waited_s=waited_s,
            paused_s=time.monotonic() - began_at - waited_s,
            ended_saves=known.ended_saves,
            corrupted=self._corrupted,
            looked_at=self._looked_at,
            last_times=self._last_times,
            **fields,
        )
        self._count, self._step = self._count + 1, step
        known.num_saves += 1
        self._in_flight = writing.saving
        # A daemon thread, so that a process that has to exit does not wait for a disk that hangs.
        name = f"checkpoint-{step}"
        self._thread = threading.Thread(target=writing.carry_out, name=name, daemon=True)
        self._thread.start()
        return writing

    def _collect(self, live: Sequence[int]) -> Contents:
        rank = self._group.rank
        alike = [e for e in self.registry if kind_of(e) not in (ZERO, PER_RANK)]
        found = collect_replicated(alike, rank, live)
        for entry in self.registry:
            optimizer = entry.object
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                saved = SavedOptimizer.of(entry.name, optimizer)
                shard = optimizer_engine_of(optimizer).shard
                saved.collect(shard.held(), shard.kept(1), found)
                # What is equal on all ranks is written once, by a rank whose state is current.
                if rank == live[0]:
                    saved.collect_leaves(optimizer.num_steps, optimizer.max_norm, found)
            elif kind_of(entry) == PER_RANK:
                collect_own((entry.name, rank), state_of(entry), found)
        return found

    def say_over(self) -> None:
        """This rank's function has returned: another rank that still saves hears at once that this
        one does not come."""
        if len(self.registry) and self.run_id:
            store = PrefixStore("checkpoint/over", self._group._store)
            # Without it the others find out by their deadline.
            with contextlib.suppress(StoreLost, CollectiveError):
                known = between_runs().of_group(self._group)
                key = f"{self.run_id}/{self._group.generation}/{self._group.rank}"
                store.set(key, str(known.num_saves).encode())
                if known.over_key not in ("", key):  # No save of an earlier run is under way.
                    store.delete_key(known.over_key)
                known.over_key = key

    def finish(self) -> None:
        """Return when no checkpoint is in flight any more. Raises CheckpointWriteFailed."""
        self._finish_last()

    def _finish_last(self, is_end: bool = False) -> None:
        self._finish_saving(is_end)
        for end in self._epoch_ends:
            end.finish()
        self._epoch_ends.clear()

    def _finish_saving(self, is_end: bool) -> None:
        """Wait for the save in flight. A failure that no caller has waited for ends no training:
        the next save may have room. Only of the last save of a run is there no next one."""
        last, self._in_flight = self._in_flight, None
        # A caller that has waited for it has had its error.
        if last is None or last.is_observed:
            return
        try:
            last.wait()
        except CheckpointWriteFailed as error:
            if is_end:
                raise
            if self._group.rank == 0:
                logger.warning("Training continues, but %s", error)

    # -- The end -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the checkpoint in flight. After another rank is lost the wait is short, and
        a failed checkpoint raises nothing: it is not the cause. After any other error there is no
        wait: peers wait to hear of the error."""
        # The run has ended well, and its last checkpoint has to be whole, or be told of.
        if error is None:
            self._finish_last(is_end=True)
            return
        last, self._in_flight = self._in_flight, None
        if last is not None and isinstance(error, CollectiveError):
            with contextlib.suppress(Exception):
                last.wait(LAST_SAVE_S)
        # A thread that is inside torch when the interpreter goes ends the process by abort(), in
        # place of the error with which its program ends. So a disk that works is waited for.
        if last is not None and not last.is_ready and self._thread is not None:
            atexit.register(self._thread.join, LAST_SAVE_S)
        # If the function runs again from the top, this save is due again.
        if last is not None and not (last.is_ready and last.is_whole_at_the_end()):
            self.last_step = -1


def _are_one(storage: Storage, other: Storage) -> bool:
    return os.path.realpath(storage.path) == os.path.realpath(other.path)


def _check_free(storage: Storage) -> Exception | None:
    """Raise FileExistsError if a place that the user has named holds a checkpoint of any kind.
    Returns the error of a place that cannot be looked at: all ranks hear of it with the save."""
    try:
        there = storage.children()
    except Exception as error:
        return error
    if MANIFEST in there:
        raise FileExistsError(
            f"{storage.path} holds a checkpoint already, and overwriting it would leave none if "
            "this process died; save to another path"
        )
    if METADATA in there:
        raise FileExistsError(
            f"{storage.path} holds {METADATA} of a checkpoint that this version of chorusline has "
            "not completed, such as one of torch.distributed.checkpoint, and a save would "
            "overwrite it; save to another path, or delete that file if you do not need it"
        )
    return None


def _calling_line() -> str:
    frame = users_frame(sys._getframe(1))
    known = is_users_file[frame.f_code.co_filename]
    return short_site(frame.f_code, frame.f_lasti) if known else ""
