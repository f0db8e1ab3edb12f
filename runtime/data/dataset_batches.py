"""`Shard`: one rank's batches of one epoch, over a dataset with a length."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from chorusline.collectives.contract.argument_kinds import check_kinds, checked_place
from chorusline.collectives.contract.errors import with_article

from .batches import Batches
from .cursor import Cursor
from .dealer import Cut, Dealer, Left
from .dealing import Hands, Remainder, dealt_hands, digest_of_keys, keys_of, redeal
from .fetching.fetcher import Fetcher, loader_seed
from .fetching.fetchers import Fetchers
from .fetching.options import FetchOptions


class MapStyleDataset(Protocol):
    """What `Shard` takes: an object with a length, and a sample for each number below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_dataset(dataset: Any, method: str) -> None:
    """Raises TypeError for a dataset without numbered samples, ValueError for one without any or
    without end. method: of the Context, for the text."""
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise TypeError(
            f"{method} takes a dataset, and a DataLoader makes batches of it already; write "
            f"ctx.{method}(loader.dataset, ...), with loader.collate_fn if it has one of "
            "its own"
        )
    is_iterated = isinstance(dataset, torch.utils.data.IterableDataset)
    if is_iterated or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"{method} needs a dataset with a length and numbered samples, got "
            f"{type(dataset).__name__}. To distribute another iterable, or a ray.data.Dataset, "
            "make a Stream(data) in the program that has the session; list(data) makes a dataset "
            "of a short iterable. Iterate what belongs to this rank alone (an iterator of "
            "streaming_split) as it is, inside Join"
        )
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise TypeError(
            f"{method} needs numbered samples, dataset[0] to dataset[n - 1], and "
            f"{with_article(type(dataset))} has names; make samples of its columns, as in "
            "list(zip(columns['x'], columns['y']))"
        )
    if len(dataset) == 0:
        raise ValueError("the dataset is empty, so no rank would get a batch; check its source")
    # The largest length that Python allows, as of a MapDataset of Grain after repeat().
    if len(dataset) == sys.maxsize:
        raise ValueError(
            f"the {type(dataset).__name__} has no end, and {method} deals each sample once in an "
            "epoch; leave repeat() out, and write for epoch in ctx.epochs(n)"
        )


class Shard(Batches):
    """This rank's batches of one epoch, made by `ctx.shard`. It can be iterated more than once.

        shard = ctx.shard(dataset, batch_size=32)
        print(shard.num_steps, len(shard), shard.hands[ctx.rank][:3])
        for batch in shard:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    In a loop over `ctx.epochs(..., resume=name)` that was stopped inside an epoch, the iteration
    begins after the samples whose steps were taken.

    hands: the sample numbers of each rank, by rank. sample_ids: those of this rank, in order.
    len(shard): the number of this rank's batches. Other ranks may have another number; use
        num_steps for a schedule, which is the same on all ranks.
    num_steps: the steps of the whole epoch, by all ranks together inside Join: as many as the rank
        with most batches has. Known before the first batch, equal on all ranks, and the same after
        a resume at this number of ranks. If ranks are lost or join later, the epoch has more or
        fewer steps, and a shard that is made after that has the new number.
    num_steps_left: those of them that are left when the iteration begins: all, or after a resume
        inside the epoch the rest. ctx.step + num_steps_left is where the epoch ends.
    num_used: the samples of the epoch that belong to steps that count, over all ranks, including
        lost ranks and earlier runs. After the last step it is the size of the dataset.
    """

    def __init__(
        self,
        dataset: MapStyleDataset,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        epoch: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        keep_together: Sequence[Hashable] | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        options: FetchOptions | None = None,
        fetchers: Fetchers | None = None,
        dealer: Dealer | None = None,
        cursor: Cursor | None = None,
        at_boundary: Callable[[], None] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """options: how batches are made, with their own collate_fn; None: by collate_fn, in this
            thread.
        fetchers: where loader processes come from; None: they end with each iteration.
        dealer: deals samples again when ranks are lost; None: nothing is dealt again.
        cursor: records which samples this rank was given, for checkpoints.
        at_boundary: called between two batches.
        The other parameters are those of `ctx.shard`.

        Raises TypeError for a dataset without a length, ValueError for an empty one."""
        if isinstance(dataset, torch.utils.data.DataLoader):
            raise TypeError(
                "shard takes a dataset, and a DataLoader makes batches of it already; write "
                "ctx.shard(loader), without a batch size, which takes over the options of the "
                "loader; or write ctx.shard(loader.dataset, batch_size), with loader.collate_fn "
                "if it has one of its own"
            )
        check_dataset(dataset, "shard")
        check_kinds(Shard.__init__, locals())
        rank, world_size = checked_place(rank, world_size, "world_size")
        self.dataset = dataset
        self.num_samples = len(dataset)
        self._seed, self._shuffle = seed, shuffle
        self._options = options or FetchOptions(collate_fn=collate_fn)
        self._fetchers = fetchers or Fetchers()
        self._fetcher: Fetcher | None = None  # None: nothing is fetched
        self._keep_together = keys = keys_of(keep_together)
        # Without a cursor nothing is resumed.
        groups = "" if keys is None or cursor is None else f"/{digest_of_keys(keys)}"
        super().__init__(
            batch_size,
            key=f"{len(dataset)}/{epoch}/{seed}/{shuffle}{groups}",
            dealer=dealer or Dealer(rank, world_size),
            epoch=epoch,
            cursor=cursor,
            at_boundary=at_boundary,
            device=device,
        )
        # Before hands are taken: it says how many batches a hand is.
        self._round_up = 0 if drop_last else batch_size - 1
        self._take_hand(self._dealt(world_size), rank)
        # A schedule is made for whole epochs, even where this one is resumed in its middle.
        whole = self._hands if self.rest == Remainder() else self._whole(world_size)
        self.num_steps = max(map(self._num_batches, map(len, whole)))

    def __len__(self) -> int:
        return self._num_batches(len(self._hand))

    @property
    def batches_per_rank(self) -> list[int]:
        """The number of batches of the whole epoch, by rank."""
        return [self._num_batches(len(hand)) for hand in self._hands]

    @property
    def num_steps_left(self) -> int:
        """As described at the top of the class."""
        return max(self.batches_per_rank)

    @property
    def num_used(self) -> int:
        """As described at the top of the class."""
        # What is left is dealt to one rank: the others are used.
        resumed = self.num_samples - len(self._dealt(1)[0])
        return resumed + self.num_committed

    @property
    def hands(self) -> list[list[int]]:
        """As described at the top of the class."""
        return [hand.tolist() for hand in self._hands]

    @property
    def sample_ids(self) -> list[int]:
        """As described at the top of the class."""
        return self._hand.tolist()

    @property
    def taken_ids(self) -> list[int]:
        return self._hand[: self.counts.num_taken].tolist()

    def _check(self) -> None:
        if len(self.dataset) != self.num_samples:
            raise ValueError(
                f"the dataset had {self.num_samples} samples when ctx.shard was called, and "
                f"has {len(self.dataset)} now, so some samples would be left out. Change a "
                "dataset between two epochs only, and call ctx.shard again then, on all ranks"
            )

    def _batches_by_rank(self) -> list[int]:
        return self.batches_per_rank

    def _num_left(self) -> int:
        return self._num_batches(len(self._hand) - self.counts.num_taken)

    def has_more(self) -> bool:
        return self._num_left() > 0

    def _take(self) -> Any:
        hand, size, left = self._hand, self.batch_size, self._num_left()
        first = self.counts.num_taken
        ids = hand[first : first + size].tolist()
        starts = range(first + size, first + left * size, size)
        coming = (hand[start : start + size].tolist() for start in starts)
        # Loader processes of two ranks draw different numbers, and so do those that start inside
        # the epoch after a resume.
        seed = loader_seed(torch.initial_seed(), self._seed, self.epoch, self._dealer.rank, left)
        # They are kept from one epoch to the next: to start them takes seconds.
        if self._fetcher is None:
            self._fetcher = self._fetchers.take(self.dataset, self._options)
        # First: an error of the dataset must not count the samples as taken.
        batch = self._fetcher.batch(ids, coming, seed=seed)
        self.counts.take(len(ids))
        return batch

    def _left(self) -> None:
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            self._fetchers.give_back(fetcher)

    def _dealt(self, num_ranks: int) -> Hands:
        return self.rest.dealt(self._whole, num_ranks, self._keep_together)

    def _whole(self, num_ranks: int) -> Hands:
        return dealt_hands(
            self.num_samples,
            world_size=num_ranks,
            epoch=self.epoch,
            seed=self._seed,
            shuffle=self._shuffle,
            keep_together=self._keep_together,
        )

    def _num_batches(self, num_samples: int) -> int:
        return (num_samples + self._round_up) // self.batch_size

    def _take_hand(self, hands: Hands, rank: int) -> None:
        self._hands = hands
        self._hand = hands[rank]

    # -- for the dealer --------------------------------------------------------------------------

    def begin_dealt(self, cuts: Sequence[Cut]) -> None:
        """Begin an epoch of which `cuts` have already distributed a part."""
        hands = self._dealt(self.counts.dealt_for)
        for cut in cuts:
            self._note_lost(hands, cut)
            hands = self._cut(hands, cut)
        self._take_hand(hands, self._dealer.rank)

    def redeal(self, cut: Cut) -> Left:
        """Distribute again what no rank has taken; how many batches each rank has left."""
        taken, busy = _taken(self._hands, cut), cut.busy
        # Counted before the hands change.
        lost = set(range(len(taken))) - set(cut.former_ranks)
        dealt_again = sum(self._num_batches(len(self._hands[old]) - taken[old]) for old in lost)
        self._note_lost(self._hands, cut)
        self._take_hand(self._cut(self._hands, cut), self._dealer.rank)
        to_take = [
            len(hand) - (taken[old] if old >= 0 else 0)
            for hand, old in zip(self._hands, cut.former_ranks, strict=True)
        ]
        to_do = [
            count + (busy[old] if old >= 0 else 0)
            for count, old in zip(to_take, cut.former_ranks, strict=True)
        ]
        by_rank = [*map(self._num_batches, to_take)], [*map(self._num_batches, to_do)]
        return Left(*by_rank, dealt_again)

    def ids_by_counts(self, counts: Sequence[int]) -> list[int]:
        return [n for hand, count in zip(self._hands, counts, strict=False) for n in hand[:count]]

    def _note_lost(self, hands: Hands, cut: Cut) -> None:
        taken = _taken(hands, cut)
        for old in sorted(set(range(len(taken))) - set(cut.former_ranks)):
            self.ids_of_the_lost = [*self.ids_of_the_lost, *hands[old][: taken[old]]]

    def _cut(self, hands: Hands, cut: Cut) -> Hands:
        return redeal(hands, _taken(hands, cut), cut.former_ranks, self._keep_together, cut.busy)


def _taken(hands: Hands, cut: Cut) -> list[int]:
    return [
        len(hand) if count is None else count for hand, count in zip(hands, cut.taken, strict=True)
    ]
