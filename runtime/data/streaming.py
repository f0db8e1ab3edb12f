"""`Stream`: rows that have no length or cannot be had by number, each exactly once per pass.

One reader, an actor beside the session (runtime/data/row_reader.py), reads the rows, numbers them,
and hands them to whatever rank asks. It keeps what was handed out until it belongs to a step that
counts. So when a rank is lost, those that go on say how many of its rows do, which they know from
the votes (dealer.py), and the reader deals the rest again.

If the reader dies, Ray starts another, which knows nothing of the pass. The rank that notices ends
the generation; the functions run again from the top, and the new reader reads the source from its
beginning and leaves out the rows that count. Their numbers come from the ranks, each of which knows
its own, and the last that it was told of those of lost ranks.

Nobody knows how many batches a rank will have. A rank looks one batch ahead; so each step still
says exactly who takes the next one, but for the first, and the first after a loss.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.calls import Actor, why_gone

from .batches import Batches
from .cursor import Cursor
from .dealer import Counted, Cut, Dealer, Left
from .row_reader import ReaderDied, ReadingKey, Row, row_reader_class

_SLICE_S = 0.2  # A thread that waits for Ray can be interrupted between two of these.
_RESTART_S = 30.0
"""For Ray to start a reader in the place of one that died."""


class ReaderGone(Exception):
    """The reader that this pass was begun with is gone, and Ray starts another. has_come: it
    answers already."""

    def __init__(self, why: str, has_come: bool) -> None:
        super().__init__(why)
        self.has_come = has_come


class Stream:
    """Rows for `ctx.shard`, from any iterable or from Ray Data; each row exactly once per epoch.

    Made in the program that has the session, and handed to `session.run` as an argument (to
    `chorusline.run` behind a `ray.init()` of your own). Its reader starts there with the first run,
    and ends with `close()`, with this object, or with the program.

    source: what gives the same rows whenever it is iterated, as an IterableDataset, or a
    `ray.data.Dataset`. It is sent to the reader. Where it has `set_epoch`, as many have, that is
    called before each pass with the epoch of `ctx.shard`.

    Raises TypeError for what is not iterable, or only once.
    """

    _is_sent = False
    """To a rank, which has the handle only."""

    def __init__(self, source: Any) -> None:
        if type(source).__name__ == "StreamSplitDataIterator":
            raise TypeError(
                "an iterator of streaming_split has a part of the rows, and belongs to one rank; "
                "give Stream the Dataset itself"
            )
        if isinstance(source, Iterator):
            raise TypeError(
                f"{type(source).__name__} can be iterated once, and every epoch is a pass over the "
                "rows: give Stream what makes such iterators, an object with __iter__"
            )
        if not hasattr(source, "iter_rows") and not hasattr(source, "__iter__"):
            raise TypeError(
                f"Stream needs something to iterate, got {type(source).__name__}; a dataset with a "
                "length and numbered samples is handed to ctx.shard as it is"
            )
        self._source = source
        self._reader: Actor | None = None
        self._started_in = ("", "")  # cluster and job
        self._is_closed = False

    @property
    def reader(self) -> Actor:
        """The handle of the RowReader; started when it is asked for first, in each cluster."""
        if self._is_closed:
            raise RuntimeError("this Stream was closed; make another one of its source")
        if self._is_sent:
            return self._reader
        if not ray.is_initialized():
            raise RuntimeError(
                "the reader of a Stream starts when it is sent, and Ray does not run yet: call "
                "ray.init() before chorusline.run, or use a Session"
            )
        runtime = ray.get_runtime_context()
        here_and_now = runtime.gcs_address, runtime.get_job_id()
        if self._reader is None or self._started_in != here_and_now:
            self._started_in = here_and_now
            # Beside the program: what it reads from there it can read here, and its node stays.
            here = NodeAffinitySchedulingStrategy(runtime.get_node_id(), True)
            kind = row_reader_class().options(scheduling_strategy=here)
            self._reader = kind.remote(self._source)
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
        return {"_reader": self.reader, "_is_sent": True, "_is_closed": False}


class StreamShard(Batches):
    """This rank's batches of one pass over a Stream. `ctx.shard` makes it.

    What `taken_ids`, `committed_ids` and `ids_of_the_lost` list are the numbers of rows, in the
    order of the stream from 0.
    """

    is_told_by_id = True

    def __init__(
        self,
        stream: Stream,
        batch_size: int,
        *,
        dealer: Dealer,
        epoch: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        cursor: Cursor | None = None,
        at_boundary: Callable[[], None] | None = None,
        survives: Callable[[], bool] = lambda: False,
        without_reader: Callable[[Exception], Exception] | None = None,
    ) -> None:
        """survives: whether the run goes on when a rank is lost, so that rows are kept for it.
        without_reader: ends the generation if the functions can run again, and gives what is to be
        raised: by default, and where they cannot, the error that it is given."""
        super().__init__(
            batch_size,
            key=f"stream/{batch_size}/{epoch}",
            dealer=dealer,
            epoch=epoch,
            collate_fn=collate_fn,
            cursor=cursor,
            at_boundary=at_boundary,
        )
        self._reader = stream.reader
        self._drop_last = drop_last
        self._survives = survives
        self._without_reader = without_reader or (lambda error: error)
        self._gone: ReaderGone | None = None  # seen inside a step, which does not need it
        self._num_unknown = 0
        """Rows that count, of lost ranks, whose numbers the reader cannot tell any more."""
        self._pass: ReadingKey | None = None  # None: there is nothing left to read.
        self._holder = 0
        self._numbers: list[int] = []  # of the rows that this rank was given
        self._ahead: deque[list[Row]] = deque()  # batches that have come
        self._asked: Any = None

    @property
    def taken_ids(self) -> list[int]:
        return self._numbers[: self.taken]

    # -- batches ---------------------------------------------------------------------------------

    def _place_key(self) -> Hashable:
        return self._key

    def _skip(self, done: int) -> None:
        if done:
            raise RuntimeError(
                f"a pass over a Stream was stopped when this rank had used {done} rows of it, and "
                "it cannot be gone on with in another run: which rows the others had is not known "
                "any more. Call ctx.forget() on all ranks, or go on from a checkpoint"
            )

    def _batches_by_rank(self) -> list[int] | None:
        if self._pass is None:
            return [0] * self._dealer.world_size
        return None

    def _num_left(self) -> int | None:
        return None

    def _has_more(self) -> bool:
        return bool(self._ahead) or self._gone is not None

    def _take(self) -> list[Any]:
        if self._gone is not None:
            raise self._lost(self._gone)
        batch = self._ahead.popleft()
        self._numbers += [number for number, _ in batch]
        self.taken += len(batch)
        try:
            self._look_ahead()
        except ReaderGone as gone:
            raise self._lost(gone) from None
        return [row for _, row in batch]

    def _end(self) -> None:
        if self._pass is not None:
            with contextlib.suppress(ReaderGone):  # Then nobody has anything to end.
                _answer(self._reader.end.remote(self._pass, self._holder))

    def _lost(self, gone: ReaderGone) -> Exception:
        if not gone.has_come:
            # Comes to the new reader when it is there, so that it hears of this generation first.
            retried = self._reader.end.options(max_task_retries=-1)
            retried.remote(self._pass, self._holder)
        told = (
            f"the reader of a Stream is gone ({gone}), and with it the rows that it had read. They "
            "are read again where a run goes on without lost workers and all is registered "
            "(ctx.register); or go on from a checkpoint if there is one"
        )
        return self._without_reader(RuntimeError(told))

    # -- the reader ------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Have a batch, if there is one, and ask for the one behind it."""
        if not self._ahead and self._asked is None:
            self._ask()
        if not self._ahead:
            self._receive()
        if self._ahead and self._asked is None:
            self._ask()

    def _ask(self) -> None:
        counted: int | None = None
        if self._survives():
            counted = self._dealer.num_settled(self)
        self._asked = self._reader.take.remote(
            self._pass, self._holder, self.batch_size, self._drop_last, counted
        )

    def _receive(self) -> None:
        asked, self._asked = self._asked, None
        rows: list[Row] = _answer(asked)
        if rows:
            self._ahead.append(rows)

    # -- for the dealer --------------------------------------------------------------------------

    def begin_dealt(self, dealer: Dealer, number: int, cuts: Sequence[Cut]) -> None:
        self._numbers, self._asked = [], None
        self._gone, self._num_unknown = None, 0
        self._ahead.clear()
        self._holder = dealer.holders[dealer.rank]
        self._pass = None
        if self._rest.given is None:
            return  # It was over when the function ran last.
        self._pass = (*dealer.pass_, number)
        lost: dict[int, int | None] = dict.fromkeys(sorted(dealer.lost), 0)
        for cut in cuts:
            lost.update(cut.lost)
        give_up_at = time.monotonic() + _RESTART_S
        while True:
            call = self._reader.begin.remote(
                self._pass,
                self._pass_name,
                self._epoch,
                dealer.num_holders,
                self._rest.given,
                lost,
                self._holder,
                dealer.inside(),
            )
            try:
                self.ids_of_the_lost = _answer(call)
                self._look_ahead()
                return
            except ReaderGone as gone:
                # It may have died before this pass, which then begins as soon as there is another.
                if gone.has_come or self._ahead or time.monotonic() > give_up_at:
                    raise self._lost(gone) from None
            time.sleep(_SLICE_S)

    def go_on(self, cut: Cut) -> Left:
        ranks = len(cut.former_ranks)
        left = Left([1] * ranks, [1] * ranks)  # As at the beginning, nobody knows of the others.
        if self._pass is not None:
            try:
                if self._asked is not None:
                    self._receive()  # It may say "the end", which was true when it was asked.
                lost = self._reader.lose.remote(self._pass, dict(cut.lost))
                self.ids_of_the_lost = _answer(lost)
                self._look_ahead()
            except ReaderGone as gone:
                # The step that waits for this can be taken; the batch after it cannot be had.
                self._gone = gone
                self._num_unknown += sum(
                    1 if counted is None else counted for counted in cut.lost.values()
                )
        left.to_take[self._dealer.rank] = int(self._has_more())
        return left

    def ids_of(self, counted: Counted) -> list[int]:
        if self._pass is None:
            return []
        by_holder = dict(zip(counted.holders, counted.counts, strict=True))
        try:
            ids: list[int] = _answer(self._reader.ids.remote(self._pass, by_holder))
        except ReaderGone:
            return self._numbers[: by_holder.get(self._holder, 0)]  # The others know theirs.
        return ids

    @property
    def num_committed(self) -> int:
        return super().num_committed + self._num_unknown


def _answer(call: Any) -> Any:
    """What the reader says. Blocks the training thread. Raises ReaderGone."""
    while not ray.wait([call], timeout=_SLICE_S)[0]:
        pass
    try:
        return ray.get(call)
    except ActorUnavailableError as error:
        # Of one that lives and could not be reached, too: whether it heard the call is not known.
        raise ReaderGone(why_gone(error), has_come=False) from None
    except ActorDiedError as error:
        raise RuntimeError(
            f"the reader of a Stream is gone ({why_gone(error)}), and with it the rows that it had "
            "read; make the Stream anew, and go on from a checkpoint if there is one"
        ) from None
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ReaderDied):
            raise ReaderGone(str(cause), has_come=True) from None
        raise RuntimeError(
            f"the rows of a Stream cannot be read: {type(cause).__name__}: {cause}"
        ) from error
