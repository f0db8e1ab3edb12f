"""A checkpoint in the thread that writes it: phases (3) to (8) of a save (checkpoints.py)."""

from __future__ import annotations

import contextlib
import pickle
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from chorusline.actors.errors import ends_a_generation
from chorusline.collectives.contract.errors import (
    ChoruslineError,
    PeerLost,
    StoreLost,
    StoreTimeout,
)
from chorusline.collectives.group import Group
from chorusline.collectives.stores.store import PrefixStore

from .config import CheckpointConfig
from .contents import RegisteredObjects
from .format import catalog
from .format.errors import CheckpointError, CheckpointWriteFailed
from .format.manifest import (
    METADATA,
    Manifest,
    RankManifest,
    is_whole,
    merged,
    name_of,
    within,
    write_manifest,
)
from .format.pieces import Path
from .format.plain_values import beyond_plain
from .format.storage import Storage
from .replica_check import CHECKSUM, Numbers, why_unlike
from .saving import Saving, SavingTimes

LAST_SAVE_S = 2.0
"""Seconds for a checkpoint in flight to become whole after another rank is lost. This is less
than the grace period of a run, after which a worker that has not stopped is replaced."""

STORE_S = 60.0
"""Seconds, besides a collective's, in which another driver takes the place of one that died."""

_STEPS_ALONG = (
    "list what the loop's body steps or updates in Join(..., step_along=[...]), or register it "
    "with per_rank=True; drop the state of a sharded optimizer at the beginning of a batch, not at "
    "its end"
)
_AVERAGES = (
    "save right after a step in which all ranks average their parameters, or register model and "
    "optimizer with per_rank=True, so that each rank's own are saved"
)

_TICK_S = 1e-3
"""Seconds between the times of two checkpoints, at least."""

_LOOK_S = 0.5
"""Seconds between two checks for the end of the group while the thread waits for the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """One rank's part in one checkpoint.

    config: None: the session has no place for checkpoints.
    group: the run may be in another generation when the writing ends.
    key_prefix: of the keys in the group's store that belong to this checkpoint.
    leaves: the objects of this rank's part, as bytes.
    number: how many saves this rank has called in the generation before this one.
    run_id: of the run, equal on all ranks; empty if it is not known.
    site: the user's line that called, `train.py:41`, or empty.
    call_by: the time.monotonic() at which all ranks must have called.
    write: writes this rank's part.
    numbers: of what is equal on all ranks (replica_check.py), as far as this rank's is current.
    progress: this rank's position in its data.
    progress_by_rank: of all ranks; None: each rank sends its `progress` with its part.
    ended_saves: the prefixes of earlier saves whose outcomes are in the store; this adds its own.
    corrupted: folders of the storage that the run has found so.
    unread: why the place could not be looked at: then nothing there may be ours, or is written.
        None: it could.
    looked_at: the objects that earlier checkpoints of the run had; this one adds its own.
    last_times: when the newest checkpoint of the storage was written; empty before rank 0 has
        looked; this one adds its own.
    The other fields are those of Manifest and SavingTimes.
    """

    config: CheckpointConfig | None
    group: Group
    saving: Saving
    storage: Storage
    folder: str
    key_prefix: str
    leaves: dict[Path, bytes]
    number: int
    run_id: str
    site: str
    call_by: float
    write: Callable[[], RankManifest]
    objects: RegisteredObjects
    world_size: int
    ended_saves: list[str]
    corrupted: Collection[str]
    looked_at: set[Path]
    last_times: list[float]
    numbers: Numbers = field(default_factory=dict)
    unread: Exception | None = None
    progress: Any = None
    progress_by_rank: list[Any] | None = None
    waited_s: float = 0.0
    paused_s: float = 0.0

    def carry_out(self) -> None:
        """Phases (3) to (8); ends the Saving in any case."""
        began_at = time.monotonic()
        rank = self.group.rank
        part: RankManifest | None = None
        trouble: str | None = None
        try:
            store = PrefixStore(f"checkpoint/{self.key_prefix}", self.group._store)
            # `_agree` says it again, to the driver that is there then.
            with contextlib.suppress(StoreLost):
                store.set(f"called/{rank}", self.site)
            try:
                if self.unread is not None:
                    raise self.unread
                self._warn_of_pickles()
                part = self.write()  # (3)
            except Exception as error:
                # Not raised: the other ranks wait for this one's part, and are told why there is
                # none.
                trouble = self._in_words(error)
            wrote_s = time.monotonic() - began_at
            failure = self._agree(store, part, trouble)
            if failure is not None:
                raise failure
            num_bytes = sum(part.files.values()) if part else 0
            total_s = time.monotonic() - began_at + self.paused_s
            self.saving.end(SavingTimes(self.waited_s, self.paused_s, wrote_s, total_s, num_bytes))
        # It is what all ranks raise, made on rank 0.
        except CheckpointError as error:
            self.saving.end(error)
        except BaseException as error:
            # Whatever its own trouble: rank 0 may have cleared the folder while this rank wrote.
            if ends_a_generation(error):
                self.saving.end(self._interrupted(error, (rank,)))
                return
            detail = trouble or f"{type(error).__name__}: {error}"
            self.saving.end(CheckpointWriteFailed(self.saving.path, detail, (rank,)))

    def _agree(
        self, store: PrefixStore, part: RankManifest | None, trouble: str | None
    ) -> CheckpointError | None:
        """Phases (4) to (8). Returns the error, or None if the checkpoint is whole.

        The store is the driver's. If the driver dies, another one has an empty store, and all ranks
        that do not know the outcome put in it what they have put into the first.
        """
        rank = self.group.rank
        record = pickle.dumps((part, trouble, self.progress, self.numbers))
        give_up_at = time.monotonic() + self.group.timeout_s + STORE_S
        while True:
            try:
                store.set(f"called/{rank}", self.site)
                store.set(f"part/{rank}", record)  # (4)
                if rank != 0:
                    # Only rank 0 can say that the checkpoint is whole: it has all parts, and writes
                    # the manifest.
                    try:
                        failure = pickle.loads(self._await(store, "outcome", (0,)))
                    except CheckpointWriteFailed:
                        # It is there, and rank 0 still deletes older ones.
                        if is_whole(self.storage, self.folder):
                            return None
                        raise
                    if failure is not None:  # Rank 0 may have given up before this part came.
                        store.delete_key(f"part/{rank}")
                    break
                failure = self._conclude(store)
                try:
                    # Before the others hear: once they do, they may begin the next save.
                    failure = self._tidy(store, failure)  # (7)
                finally:
                    with contextlib.suppress(StoreLost):  # The others look for the manifest then.
                        store.set("outcome", pickle.dumps(failure))  # (8)
                break
            except StoreLost:
                # The outcome went with the store, and rank 0 may have ended: the manifest is the
                # proof.
                if rank != 0 and is_whole(self.storage, self.folder):
                    return None
                # The save ends with its group; and a driver that has not come by now will not.
                if self.group.failure() is not None or time.monotonic() > give_up_at:
                    raise
                time.sleep(_LOOK_S)
        return failure  # type: ignore[no-any-return]

    def _warn_of_pickles(self) -> None:
        """Say of each object, when it is first saved, if it would not load by default."""
        # With weights_only=False such objects load.
        if self.config is not None and not self.config.weights_only:
            return
        for path, data in self.leaves.items():
            if path in self.looked_at:
                continue
            self.looked_at.add(path)
            names = beyond_plain(data)
            if names:
                warnings.warn(
                    f"{name_of(path)} is made of {', '.join(names)}: a checkpoint with it loads "
                    "only with CheckpointConfig(weights_only=False), or when these names are "
                    "allowed with torch.serialization.add_safe_globals. Registered states of "
                    "tensors and plain values load as they are",
                    stacklevel=2,
                )

    def _conclude(self, store: PrefixStore) -> CheckpointError | None:
        """Phases (5) and (6), on rank 0. Returns the error, or None if the checkpoint is whole."""
        size = self.group.size
        try:
            records = [
                pickle.loads(self._await(store, f"part/{rank}", (rank,))) for rank in range(size)
            ]
            # The words of the first one; the error names them all.
            failed = [rank for rank, (_, trouble, *_) in enumerate(records) if trouble]
            if failed:
                raise CheckpointWriteFailed(self.saving.path, records[failed[0]][1], tuple(failed))
            parts = [part for part, *_ in records]
            self._check(parts)
            if unlike := why_unlike([numbers for *_, numbers in records]):
                raise CheckpointWriteFailed(
                    self.saving.path,
                    f"{unlike[0]}, but a registered object must be the same on all ranks",
                    unlike[1],
                    _AVERAGES if unlike[0].startswith(CHECKSUM) else _STEPS_ALONG,
                )
            manifest = Manifest(
                step=self.saving.step,
                world_size=self.world_size,
                time=self._time(),
                kinds=self.objects.kinds,
                files={file: length for part in parts for file, length in part.files.items()},
                entries=merged(parts),
                progress=self.progress_by_rank or [progress for *_, progress, _ in records],
                tied=self.objects.tied,
                optimizers=self.objects.optimizers,
            )
            write_manifest(self.storage, self.folder, manifest)  # (6)
            if self.folder and self.last_times:
                self.last_times[0] = manifest.time
        except StoreLost:
            raise  # `_agree` tries it again.
        except CheckpointError as error:
            self._clear()
            return error
        except Exception as error:
            self._clear()
            return CheckpointWriteFailed(self.saving.path, self._in_words(error), (0,))
        return None

    def _time(self) -> float:
        """Now, or a little after the newest checkpoint of the place: checkpoints are ordered by
        their times, and the clock of this host may be slower than that of the last one's host."""
        if self.folder and not self.last_times:
            # A place that cannot be listed now can still be written to; the next save looks again.
            with contextlib.suppress(Exception):
                self.last_times.append(catalog.newest_time(self.storage))
        last = self.last_times[0] + _TICK_S if self.folder and self.last_times else 0.0
        return max(time.time(), last)

    def _tidy(self, store: PrefixStore, failure: CheckpointError | None) -> CheckpointError | None:
        """Phase (7), on rank 0: delete the records, and old checkpoints if this one is whole. What
        fails is a warning. Returns the outcome: another one only if this checkpoint has lost files
        since it was completed."""
        with contextlib.suppress(ChoruslineError):  # They are gone with the store.
            self._delete_records(store, self.group.size)
            if failure is None:  # All ranks came, so all have read the outcomes before this one.
                while self.ended_saves:
                    prefix = self.ended_saves[-1]
                    earlier = PrefixStore(f"checkpoint/{prefix}", self.group._store)
                    # Of the epoch's end (epoch_end.py), which rank 0 may not have asked all for.
                    ends = [f"end/{rank}" for rank in range(1, self.group.size)]
                    for key in ("outcome", "called/0", *ends):
                        earlier.delete_key(key)
                    self.ended_saves.remove(prefix)  # The end of an epoch may have added one.
        # Its outcome stays until the next save: a slow rank may not have read it yet.
        self.ended_saves.append(self.key_prefix)
        # A failed save deletes nothing older, and in a place that the user has named nothing is
        # ours.
        if failure is not None or not self.folder or self.config is None:
            return failure
        try:
            keep = self.config.num_to_keep
            if catalog.prune(self.storage, keep, self.folder, self.corrupted):
                return None
            lost = FileNotFoundError(self.saving.path)
            failure = CheckpointWriteFailed(self.saving.path, self._in_words(lost), (0,))
            self._clear()
        except Exception as error:  # The next prune tries again.
            warnings.warn(
                f"old checkpoints in {self.storage.path} could not be deleted: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
        return failure

    def _check(self, parts: Sequence[RankManifest]) -> None:
        """Check that all files are there: another run may have swept the storage meanwhile."""
        steps = [part.step for part in parts]
        if len(set(steps)) > 1:
            raise ValueError(
                f"the ranks are at different steps (by rank: {steps}); all ranks must save after "
                "the same step"
            )
        for part in parts:
            for file, size in part.files.items():
                found = self.storage.size(within(self.folder, file))
                if found != size:
                    raise OSError(f"{file} has {found} bytes of the {size} that were written")

    def _delete_records(self, store: PrefixStore, size: int) -> None:
        """Delete the parts from the store: they take megabytes, and no rank reads them again."""
        for rank in range(size):
            store.delete_key(f"part/{rank}")
            if rank != 0:  # That rank 0 has called is what the others look for.
                store.delete_key(f"called/{rank}")

    def _clear(self) -> None:
        """Delete the files of a failed checkpoint, since the disk may be full. A folder that the
        user has named may hold other files, which stay."""
        with contextlib.suppress(Exception):  # `sweep` deletes the rest later.
            if self.folder:
                catalog.remove(self.storage, self.folder)
            elif self.unread is None:
                for rank in range(self.group.size):
                    self.storage.delete(f"rank-{rank}.distcp")
                self.storage.delete(METADATA)  # Ours: `save` has refused a place that had one.

    def _await(self, store: PrefixStore, key: str, ranks: tuple[int, ...]) -> bytes:
        """The value that `ranks` put in the store. Gives up after timeout_s, or with the group."""
        timeout_s = self.config.deadline_s if self.config else 1800.0
        give_up_at = time.monotonic() + timeout_s
        patience_ends_at: float | None = None
        while True:
            try:
                store.wait([key], _LOOK_S)
                return store.get(key)
            except StoreTimeout:
                pass
            # The driver is gone: `_agree` looks for the manifest, and tries it again.
            except StoreLost:
                raise
            except ChoruslineError as error:
                raise self._interrupted(error, ranks) from error
            # A rank that has left the function will not call any more, and its deadline need not
            # pass.
            if over := self._over(ranks):
                raise self._not_called(over, "returned from the function without ctx.save()")
            now = time.monotonic()
            failure = self.group.failure()
            if failure is not None:
                # Ranks that are alive may still write; a lost rank among `ranks` never will.
                patience_ends_at = patience_ends_at or now + LAST_SAVE_S
                is_silent_for_good = isinstance(failure, PeerLost) and set(ranks) & set(
                    failure.ranks
                )
                if is_silent_for_good or now > patience_ends_at:
                    raise self._interrupted(failure, ranks)
            # A rank that never calls is named as that, and not as one that is slow to write.
            if now > min(self.call_by, give_up_at):
                self._check_called(store)
            if now > give_up_at:
                raise CheckpointWriteFailed(
                    self.saving.path, f"it was not written within {timeout_s:g} s", ranks
                )

    def _check_called(self, store: PrefixStore) -> None:
        """Raise CheckpointWriteFailed if ranks did not call: rank 0 looks for all of them, and the
        others for rank 0, which tells them of all others."""
        group = self.group
        keys = {r: f"called/{r}" for r in (range(group.size) if group.rank == 0 else (0,))}
        if store.check(list(keys.values())):
            return
        absent = tuple(r for r, key in keys.items() if not store.check([key]))
        if not absent:
            return  # The last of them called meanwhile.
        limit_s = min(group.timeout_s, self.config.deadline_s if self.config else group.timeout_s)
        raise self._not_called(absent, f"did not call ctx.save() within {limit_s:g} s")

    def _over(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those whose function is over, and has not called this save."""
        if not self.run_id:
            return ()
        store = PrefixStore(f"checkpoint/over/{self.run_id}", self.group._store)
        keys = {r: f"{self.group.generation}/{r}" for r in ranks}
        # The number of the save that was the rank's last, so that one that has called it is not
        # blamed.
        over = [r for r, key in keys.items() if store.check([key])]
        return tuple(r for r in over if int(store.get(keys[r])) <= self.number)

    def _not_called(self, absent: tuple[int, ...], what: str) -> CheckpointWriteFailed:
        who = "it" if len(absent) == 1 else "they"
        here = f", which rank {self.group.rank} called at {self.site}" if self.site else ""
        return CheckpointWriteFailed(
            self.saving.path,
            f"{who} {what}{here}",
            absent,
            "call ctx.save() on all ranks, after the same step",
        )

    def _interrupted(self, error: BaseException, ranks: tuple[int, ...]) -> CheckpointWriteFailed:
        """error: of the group, or of its store."""
        return CheckpointWriteFailed(
            self.saving.path,
            f"the group has ended ({error})",
            ranks,
            is_by_loss=ends_a_generation(error),
        )

    def _in_words(self, error: Exception) -> str:
        """What has kept a rank from writing."""
        if isinstance(error, FileNotFoundError) and self.folder:
            # A run deletes only what no run can be writing, if it is the only one in its place.
            return (
                f"its files were deleted while it was being written ({error}). A run that begins "
                f"in {self.storage.path} deletes the files of unfinished runs there, so two runs "
                "at a time disturb each other: give each run a storage_path of its own"
            )
        return f"{type(error).__name__}: {error}"
