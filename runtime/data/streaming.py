"""`Stream`: rows without a length or without access by number, each exactly once per iteration.

One reader, an actor beside the session (row_reader.py), reads the rows, numbers them, and hands
them to the ranks on request. It keeps a row until it belongs to a step that counts. When a rank is
lost, the survivors know from the votes (dealer.py) how many of its rows count and tell the reader,
which deals the other rows again.

If the reader dies, Ray starts another, which knows nothing of the iteration. The rank that notices
ends the generation, and the functions run again from the top. The new reader reads the source from
its beginning and leaves out the rows that count. The ranks tell it their numbers: each rank knows
those of its own rows, and those that the former reader has listed for lost ranks.

The number of batches of a rank is unknown. Each rank looks one batch ahead, so each step's vote
says which ranks take the next step, except for the first step and the first one after a death.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import ActorDiedError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from chorusline.actors.errors import StreamLost
from chorusline.actors.ray_calls.calls import GONE, Actor, nodes_leaving, why_gone

from .batches import Batches
from .cursor import Cursor
from .dealer import Cut, Dealer, Left
from .fetching.collating import collated
from .fetching.loader_rows import LoaderRows
from .number_set import Numbers
from .row_reader import ReaderDied, ReadingKey, Row, RowReader, is_restarted

_log = logging.getLogger("chorusline")

SLICE_S = 0.2  # A thread waits for Ray in slices, and can be interrupted between two of them.
TELL_S = 60.0
RESTART_S = 30.0
"""The time for Ray to replace a reader that died."""


class ReaderGone(Exception):
    """The reader with which this iteration began is gone, and Ray starts another. has_come: the
    new one answers already."""

    def __init__(self, why: str, has_come: bool) -> None:
        super().__init__(why)
        self.has_come = has_come


class Stream:
    """Rows for `ctx.shard`, from any iterable or from Ray Data; each row exactly once per epoch.

        with cl.Stream(iterable_dataset) as rows:
            await session.run(train, rows=rows)  # In train: ctx.shard(rows, batch_size=32)

    Make it in the program that has the session, and pass it to `session.run` as an argument (to
    `chorusline.run` after your own `ray.init()`). Its reader starts there with the first run, and
    ends with `close()`, with this object, or with the program.

    source: an object that gives the same rows in each iteration, such as an IterableDataset, or a
        `ray.data.Dataset`. It is pickled and sent to the reader. If it has `set_epoch`, that is
        called before each iteration with the epoch of `ctx.shard`. Or a DataLoader over an
        IterableDataset: its loader processes make the rows, beside the reader. Its batch_size,
        collate_fn, drop_last and pin_memory hold for `ctx.shard`, which may say otherwise.

    Raises TypeError for a source that is not iterable, or only once, ValueError for a dataset that
    gives the rows of one rank only.
    """

    _is_sent = False
    """True on a rank, which has only the reader's handle."""

    def __init__(self, source: Any) -> None:
        # By name: ray.data is not imported for users who have no dataset of it.
        if type(source).__name__ == "StreamSplitDataIterator":
            raise TypeError(
                "an iterator of streaming_split has only one rank's part of the rows; pass the "
                "Dataset itself to Stream"
            )
        if isinstance(source, Iterator):
            raise TypeError(
                f"{type(source).__name__} can be iterated only once, but every epoch iterates "
                "over the rows: pass Stream the object that makes such iterators, one with "
                "__iter__"
            )
        if not hasattr(source, "iter_rows") and not hasattr(source, "__iter__"):
            raise TypeError(
                f"source must be something to iterate, got {type(source).__name__}; a dataset with "
                "a length and numbered samples is passed to ctx.shard directly"
            )
        # Of Hugging Face's datasets.
        if getattr(getattr(source, "dataset", source), "_distributed", None) is not None:
            raise ValueError(
                "split_dataset_by_node has left this dataset with the rows of one rank. A Stream "
                "distributes the rows itself, each to one rank: pass it the whole dataset"
            )
        self.batch_size: int | None = None  # None: the source is no DataLoader
        self.drop_last = self.pin_memory = False
        self.collate_fn: Callable[[list[Any]], Any] | None = None  # None: as batch_size
        has_epochs = hasattr(source, "set_epoch")
        if isinstance(source, DataLoader):
            self.drop_last, self.pin_memory = source.drop_last, source.pin_memory
            source = LoaderRows(source)
            has_epochs = source.has_epochs
            self.batch_size, self.collate_fn = source.batch_size, source.collate_fn
        self._source = source
        self.has_epochs = has_epochs
        """Whether the order of the rows may depend on the epoch."""
        self._reader: Actor | None = None  # None: not started, or closed
        self._started_in = ("", "")  # cluster and job
        self._is_closed = False

    @property
    def reader(self) -> Actor:
        """The handle of the RowReader, which starts at the first access in each cluster. Raises
        RuntimeError after `close`, and before Ray has started."""
        if self._is_closed:
            raise RuntimeError("this Stream was closed; make another one of its source")
        # A copy that was sent has a handle, and nothing to start a reader with.
        if self._is_sent:
            return self._reader
        if not ray.is_initialized():
            raise RuntimeError(
                "the reader of a Stream starts when the Stream is sent, and Ray is not running "
                "yet: call ray.init() before chorusline.run, or use a Session"
            )
        runtime = ray.get_runtime_context()
        here_and_now = runtime.gcs_address, runtime.get_job_id()
        # An actor ends with its job; the program may have connected to another cluster since.
        if self._reader is None or self._started_in != here_and_now:
            self._started_in = here_and_now
            # On the program's node: files that the program sees are there, and the node stays. For
            # an actor without resources only a hard affinity counts, and a node that is drained
            # takes no actor.
            node_id = runtime.get_node_id()
            here = NodeAffinitySchedulingStrategy(node_id, soft=node_id in nodes_leaving())
            # It mostly waits, so it reserves no CPU.
            kind = ray.remote(num_cpus=0, max_restarts=-1)(RowReader).options(
                scheduling_strategy=here
            )
            self._reader = kind.remote(self._source, is_restarted)
        return self._reader

    def close(self) -> None:
        """End the reader; runs that read from it fail."""
        self._is_closed = True
        reader, self._reader = self._reader, None
        if reader is not None and ray.is_initialized():
            ray.kill(reader)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_source": None, "_reader": self.reader, "_is_sent": True}


def maker_of_batches(
    stream: Stream, collate_fn: Callable[[list[Any]], Any] | None, *, pins: bool
) -> Callable[[list[Any]], Any]:
    """collate_fn: None: that of the stream's loader, or torch's. pins: batches come in page-locked
    memory, where there is an accelerator."""
    collate = collate_fn or stream.collate_fn or collated
    if (pins or stream.pin_memory) and torch.accelerator.is_available():
        return lambda rows: pin_memory(collate(rows))
    return collate


class StreamShard(Batches):
    """This rank's batches of one iteration over a Stream, made by `ctx.shard`. It can be iterated
    more than once.

        shard = ctx.shard(rows, batch_size=32)  # rows: a Stream
        for batch in shard:
            model(batch).square().mean().backward()
        print(len(shard.taken_ids), "rows on this rank")

    The number of rows is not known before the end: there is no `len`, and `num_steps` and
    `num_steps_left` raise TypeError.

    taken_ids, committed_ids, ids_of_the_lost: as those of a Shard, but numbers of rows, in the
        order of the stream from 0.
    """

    needs_ids = True

    def __init__(
        self,
        stream: Stream,
        batch_size: int,
        *,
        dealer: Dealer,
        epoch: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        cursor: Cursor | None = None,
        at_boundary: Callable[[], None] | None = None,
        survives: Callable[[], bool] = lambda: False,
        without_reader: Callable[[Exception], Exception] | None = None,
    ) -> None:
        """survives: whether the run continues when a rank is lost; if so, the reader keeps rows.
        without_reader: called with an error when the reader is gone; returns the error to raise.
            If the functions can run again, it ends the generation. Default: raise the same error.
        The other parameters are those of Batches."""
        super().__init__(
            batch_size,
            key=f"stream/{epoch}",
            dealer=dealer,
            epoch=epoch,
            cursor=cursor,
            at_boundary=at_boundary,
            device=device,
        )
        self._reader = stream.reader
        self._collate = maker_of_batches(stream, collate_fn, pins=pin_memory)
        self._drop_last = drop_last
        self._survives = survives
        self._without_reader = without_reader or (lambda error: error)
        self._gone: ReaderGone | None = None  # None: unless a step ends without it
        self._num_unknown = 0
        """How many counted rows of lost ranks have numbers that died with the reader."""
        self._reading: ReadingKey | None = None  # None: there is nothing left to read.
        self._holder = 0
        self._numbers = Numbers()  # of the rows that this rank was given
        self._ahead: deque[list[Row]] = deque()  # batches that have arrived and were not taken
        self._asked: Any = None  # the request for the batch after them

    @property
    def num_steps(self) -> int:
        """Not known: raises TypeError."""
        raise TypeError(
            "how many steps a Stream gives is not known before its end. Count them in one epoch "
            "(ctx.step), choose a number of steps for the schedule yourself, or pass ctx.shard a "
            "dataset with a length"
        )

    num_steps_left = num_steps

    @property
    def taken_ids(self) -> Numbers:
        return self._numbers[: self.counts.num_taken]

    @property
    def committed_ids(self) -> Numbers:
        found = Numbers(self.ids_of_the_lost)
        found.extend(self.ids_by_counts(self.counts.committed or ()))
        return found

    # -- batches ---------------------------------------------------------------------------------

    def _batches_by_rank(self) -> list[int] | None:
        if self._reading is None:
            return [0] * self._dealer.world_size
        return None

    def _num_left(self) -> int | None:
        return None

    def has_more(self) -> bool:
        return bool(self._ahead) or self._gone is not None

    def _take(self) -> Any:
        # The step that could end without the reader has ended, and there is no batch after it.
        if self._gone is not None:
            raise self._lost(self._gone)
        # First: an error of collate_fn must not count the rows as taken.
        batch = self._collate([row for _, row in self._ahead[0]])
        rows = self._ahead.popleft()
        # By number: a count would not say which rows they were.
        self._numbers.extend(number for number, _ in rows)
        self.counts.take(len(rows))
        try:
            self._look_ahead()
        except ReaderGone as gone:
            raise self._lost(gone) from None
        return batch

    def _end(self) -> None:
        # The function may run again inside the reading, whose last rows are in no step yet; then
        # the next reading ends it.
        if self.counts.awaits_step and self._survives():
            return
        if self._reading is not None:
            with contextlib.suppress(ReaderGone):  # A new reader knows no reading to end.
                answer(self._reader.end.remote(self._reading, self._holder))

    def _lost(self, gone: ReaderGone) -> Exception:
        if not gone.has_come:
            # Ray delivers this call to the new reader, so that it meets this generation first and
            # refuses it (row_reader.py).
            retried = self._reader.end.options(max_task_retries=-1)
            retried.remote(self._reading, self._holder)
        return self._without_reader(
            StreamLost(
                str(gone),
                "They are read again when a run continues without lost workers and everything is "
                "registered (ctx.register); otherwise resume from a checkpoint",
            )
        )

    # -- the reader ------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Receive a batch if there is none, and request the one after it."""
        if not self._ahead and self._asked is None:
            self._ask()
        if not self._ahead:
            self._receive()
        # While the model computes, the reader reads.
        if self._ahead and self._asked is None:
            self._ask()

    def _ask(self) -> None:
        counted: int | None = None
        if self._survives():  # Otherwise a loss ends the run, and the reader need not keep rows.
            counted = self._dealer.num_settled(self)
        self._asked = self._reader.take.remote(
            self._reading, self._holder, self.batch_size, self._drop_last, counted
        )

    def _receive(self) -> None:
        asked, self._asked = self._asked, None
        rows: list[Row] = answer(asked)
        if rows:
            self._ahead.append(rows)

    # -- for the dealer --------------------------------------------------------------------------

    def begin_dealt(self, cuts: Sequence[Cut]) -> None:
        dealer = self._dealer
        self._numbers, self._asked = Numbers(), None
        self._gone, self._num_unknown = None, 0
        self._ahead.clear()
        self._holder = dealer.holders[dealer.rank]
        self._reading = None
        if self.rest.given is None:
            return  # The iteration was over when the function ran last.
        self._reading = (*dealer.call_key, self.counts.number)
        # Of holders that were lost in an earlier iteration nothing was taken in this one.
        lost: dict[int, int | None] = dict.fromkeys(sorted(dealer.lost), 0)
        for cut in cuts:
            lost.update(cut.lost)
        give_up_at = time.monotonic() + RESTART_S
        while True:
            call = self._reader.begin.remote(
                self._reading,
                self.iteration or None,
                self.epoch,
                dealer.num_holders,
                self.rest.given,
                lost,
                self._holder,
                [*dealer.inside(), *dealer.unused()],
            )
            try:
                self.ids_of_the_lost = answer(call)
                self._look_ahead()
                return
            except ReaderGone as gone:
                # If the reader died before this iteration, the next reader can begin it: retry.
                if gone.has_come or self._ahead or time.monotonic() > give_up_at:
                    raise self._lost(gone) from None
            time.sleep(SLICE_S)

    def redeal(self, cut: Cut) -> Left:
        ranks = len(cut.former_ranks)
        left = Left([1] * ranks, [1] * ranks)  # Unknown, as at the start: any rank may continue.
        if self._reading is not None:
            try:
                if self._asked is not None:
                    self._receive()  # An empty answer is out of date: a lost rank's rows come back.
                lost = self._reader.lose.remote(self._reading, dict(cut.lost))
                self.ids_of_the_lost = answer(lost)
                self._look_ahead()
            except ReaderGone as gone:
                # The step that waits for this can be taken; `_take` raises for the batch after it.
                self._gone = gone
                self._num_unknown += sum(
                    1 if counted is None else counted for counted in cut.lost.values()
                )
        left.to_take[self._dealer.rank] = int(self.has_more())
        return left

    def ids_by_counts(self, counts: Sequence[int]) -> Numbers:
        if self._reading is None or not counts:
            return Numbers()
        by_holder = dict(zip(self.counts.holders, counts, strict=True))
        try:
            ids: Numbers = answer(self._reader.ids.remote(self._reading, by_holder))
        except ReaderGone:
            return self._numbers[: by_holder.get(self._holder, 0)]  # Other ranks know their own.
        return ids

    @property
    def num_committed(self) -> int:
        return super().num_committed + self._num_unknown


def answer(call: Any) -> Any:
    """The reader's answer to a call. Blocks the training thread, without a limit of its own: a
    source may wait for data. It ends when a peer's deadline, or anything else, ends the generation.
    Raises ReaderGone; StreamLost if the reader was ended for good, RuntimeError if the source
    raised."""
    tell_at = time.monotonic() + TELL_S
    while not ray.wait([call], timeout=SLICE_S)[0]:
        if time.monotonic() > tell_at:
            tell_at = math.inf
            _log.warning(
                "the source of a Stream has given no rows for %.0f s, and this rank waits for them "
                "without a limit. If the source hangs, give it a timeout of its own",
                TELL_S,
            )
    try:
        # It is there; `ray.get` would warn of blocking, where the function is an `async def`.
        return call.future().result()
    except ActorDiedError as error:  # `Stream.close`, or its program has ended: no restart.
        raise StreamLost(
            why_gone(error), "Make a new Stream, and resume from a checkpoint if there is one"
        ) from None
    except GONE as error:
        # Ray restarts the reader, or it lives and cannot be reached: it may have got the call.
        raise ReaderGone(why_gone(error), has_come=False) from None
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ReaderDied):
            raise ReaderGone(str(cause), has_come=True) from None
        raise RuntimeError(
            f"the rows of a Stream cannot be read: {type(cause).__name__}: {cause}"
        ) from error
