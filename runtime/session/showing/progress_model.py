"""What the progress of a run is made of: the ranks' reports, and their places in their loops."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from chorusline.actors.messages.messages import Report, numbers_of
from chorusline.actors.messages.run_status import RunStatus

from ...notebook.history import BOOKKEEPING
from ...tracking.tracker import TrackedEvent

MAX_RANKS_LISTED = 8  # More ranks than this are counted, not listed.
_MAX_NUMBERS = 5  # in a line
_MOST_DIGITS = 1e15  # From here on a number is shown with an exponent, and counts nothing.
_WINDOW_S = 20.0


@dataclass(frozen=True)
class RankProgress:
    """The reports of one rank. numbers: the last one of each name."""

    step: int  # the global_step of the last one
    epoch: int
    taken: int  # batches of that epoch, one per report
    left: int | None  # batches of that epoch; None: not reported
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class ProgressModel:
    """The sum of all reports so far. Frozen, since the display draws it from a thread.

    Reports come in bursts, one rank's before another's. So a rank counts as joined only when it
    has reported no batch left and another rank has taken more batches of the same epoch. If all
    ranks end an epoch with equal numbers, no rank joins.
    """

    ranks: Mapping[int, RankProgress] = field(default_factory=dict)
    step: int = 0  # of the rank that is furthest, as in Report.global_step
    steps_of: Mapping[int, int] = field(default_factory=dict)  # epoch -> most reports of any rank
    tokens: float = 0.0  # after the first report, whose step includes the start
    first_s: float = 0.0
    last_s: float = 0.0

    def add(self, report: Report) -> ProgressModel:
        numbers = numbers_of(report.values)
        epoch = _whole(numbers, "epoch") or 0
        before = self.ranks.get(report.rank)
        rank = RankProgress(
            step=report.global_step,
            epoch=epoch,
            taken=1 if before is None or before.epoch != epoch else before.taken + 1,
            left=_whole(numbers, "batches_left"),
            numbers={**(before.numbers if before is not None else {}), **numbers},
        )
        longest = max(self.steps_of.get(epoch, 0), rank.taken)
        runs_again = before is not None and rank.step < before.step
        return ProgressModel(
            ranks={**self.ranks, report.rank: rank},
            step=rank.step if runs_again else max(self.step, rank.step),
            steps_of={**self.steps_of, epoch: longest},
            # The first report is where the time begins, so its tokens came before it.
            tokens=self.tokens + numbers.get("tokens", 0.0) if self.ranks else 0.0,
            first_s=self.first_s if self.ranks else report.time,
            last_s=max(self.last_s, report.time),
        )

    @property
    def joined(self) -> frozenset[int]:
        epoch = max(self.steps_of, default=0)
        return frozenset(
            rank
            for rank, its in self.ranks.items()
            if its.left == 0 and its.epoch == epoch and its.taken < self.steps_of[epoch]
        )

    @property
    def left(self) -> dict[int, int]:
        """By rank, the batches that are left of its epoch, where they are reported."""
        return {rank: its.left for rank, its in self.ranks.items() if its.left is not None}

    @property
    def numbers(self) -> dict[str, float]:
        """By name, the mean of the last numbers of the ranks that still have data; the loss comes
        first."""
        return _means({rank: its.numbers for rank, its in self.ranks.items()}, self.joined)

    @property
    def tokens_per_s(self) -> float | None:
        elapsed_s = self.last_s - self.first_s
        return self.tokens / elapsed_s if self.tokens and elapsed_s > 0 else None


@dataclass(frozen=True)
class Places:
    """Where the ranks are. epoch: the earliest that a rank is in, from 0; None outside of loops.
    num_epochs: None if unknown. taken: optimizer steps in this run. step: those of the whole chain
    of runs. left, batches: of the epoch, by rank; batches: with those of the epoch's steps that it
    has taken no part in. joined: ranks that are out of data. numbers: as in ProgressModel. ranks:
    of the workers that are in the run."""

    epoch: int | None = None
    num_epochs: int | None = None
    taken: int = 0
    step: int = 0
    left: Mapping[int, int] = field(default_factory=dict)
    batches: Mapping[int, int] = field(default_factory=dict)
    joined: frozenset[int] = frozenset()
    num_workers: int = 0
    num_lost: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)
    ranks: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        statuses: Mapping[int, RunStatus],
        numbers: Mapping[int, Mapping[str, float]] | None = None,
        num_lost: int = 0,
    ) -> Places:
        """statuses, numbers: by seat."""
        # A worker that waits for a rank is in no loop yet.
        by_rank = {one.rank: one for one in statuses.values() if one.rank is not None}
        joined = frozenset(seat for seat, one in statuses.items() if one.has_joined)
        epochs = [one.epoch for one in by_rank.values() if one.epoch is not None]
        # Ranks are asked one after another, so some may have begun the next epoch. Their places in
        # it would not compare with those of the others.
        epoch = min(epochs, default=None)
        inside = {rank: one for rank, one in by_rank.items() if one.epoch == epoch}
        return cls(
            epoch,
            max((one.num_epochs for one in by_rank.values() if one.num_epochs), default=None),
            max((one.taken for one in by_rank.values()), default=0),
            max((one.step for one in by_rank.values()), default=0),
            {rank: one.batches_left for rank, one in inside.items() if one.batches_left is not None}
            if epoch is not None
            else {},
            {rank: one.place_in_epoch for rank, one in inside.items()} if epoch is not None else {},
            frozenset(rank for rank, one in by_rank.items() if one.has_joined),
            len(by_rank),
            num_lost,
            _means(numbers or {}, joined),
            frozenset(by_rank),
        )

    @property
    def has_begun(self) -> bool:
        return self.taken > 0 or any(self.batches.values()) or bool(self.numbers)

    @property
    def done(self) -> int:
        """Steps of the epoch that were begun."""
        return max(self.batches.values(), default=0)

    @property
    def total(self) -> int | None:
        """Steps of the epoch; None if unknown."""
        if not self.left:
            return None
        # Ranks are asked one after another, so some are a step ahead; a worker that has come takes
        # part from here on, and does not know of the steps before.
        here = self.done - 1
        return max(count + max(self.batches[rank], here) for rank, count in self.left.items())

    @property
    def of_epochs(self) -> str:
        """`epoch 2/3`; empty outside of loops over several epochs."""
        # With one epoch the number says nothing.
        if self.epoch is None or (self.epoch == 0 and (self.num_epochs or 1) == 1):
            return ""
        return f"epoch {self.epoch + 1}" + (f"/{self.num_epochs}" if self.num_epochs else "")

    def epoch_over(self, later: Places) -> str:
        """A phrase about the epoch that is over, if there is one: of several, the last."""
        if self.epoch is None or later.epoch is None or self.epoch == later.epoch:
            return ""
        last = replace(self, epoch=max(self.epoch, later.epoch - 1)).of_epochs
        return f"{last} is over" if last else ""


NOWHERE = Places()


class Pace:
    """Samples and steps a second of all ranks, over the last seconds."""

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}  # by seat
        self._done = 0
        self._looks: deque[tuple[float, int, int]] = deque()  # seconds, samples, steps

    def look(self, statuses: Mapping[int, RunStatus], now_s: float, num_steps: int = 0) -> None:
        for seat, status in statuses.items():
            before = self._samples.get(seat, 0)
            # A worker that has come in the place of a lost one begins at 0.
            self._done += status.samples - before if status.samples >= before else status.samples
            self._samples[seat] = status.samples
        if self._done or num_steps:
            self._looks.append((now_s, self._done, num_steps))
        while len(self._looks) > 2 and now_s - self._looks[1][0] > _WINDOW_S:
            self._looks.popleft()

    @property
    def samples_per_s(self) -> float | None:
        return self._rate(1)

    @property
    def steps_per_s(self) -> float | None:
        return self._rate(2)

    def _rate(self, of: int) -> float | None:
        if len(self._looks) < 2:
            return None
        first, last = self._looks[0], self._looks[-1]
        count, seconds = last[of] - first[of], last[0] - first[0]
        return count / seconds if count > 0 and seconds > 0 else None


def _means(of_all: Mapping[int, Mapping[str, float]], joined: frozenset[int]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {"loss": []}
    for who, numbers in of_all.items():
        for name, value in numbers.items():
            # The last numbers of a rank without data are of an earlier step.
            if who not in joined and name not in BOOKKEEPING:
                by_name.setdefault(name, []).append(value)
    return {name: mean(values) for name, values in by_name.items() if values}


def _whole(numbers: Mapping[str, float], name: str) -> int | None:
    number = numbers.get(name)
    return int(number) if number is not None and abs(number) < _MOST_DIGITS else None


def step_of(model: ProgressModel, places: Places) -> int:
    """The optimizer step. Where no optimizer of a session steps, the reports count."""
    return places.step if places.taken else model.step or places.step


def headline(
    model: ProgressModel,
    places: Places = NOWHERE,
    pace: Pace | None = None,
    num_steps: int | None = None,
    over: str = "",
) -> str:
    """`epoch 2/3  step 33/120  loss 2.991  312 samples/s  2 workers`. over: of an epoch that is
    over, instead of the place in the next one."""
    step = step_of(model, places)
    if over:
        parts = [over, f"step {step}"]
    # Of the two bars one is shown: that of the run, if the user has said how long it is.
    elif num_steps or not places.total:
        of_all = f"/{num_steps}" if num_steps else ""
        parts = [places.of_epochs, f"step {step}{of_all}" if step or of_all else ""]
    else:
        parts = [places.of_epochs, f"step {places.done}/{places.total}"]
    if not over and pace is not None and (left := time_left(places, pace, num_steps)):
        parts.append(left)
    numbers = places.numbers or model.numbers  # The reports of lost ranks stay in the model.
    parts += [f"{name} {_short(value)}" for name, value in [*numbers.items()][:_MAX_NUMBERS]]
    # What the function counts itself comes before what is counted for it.
    if model.tokens_per_s is not None:
        parts.append(f"{_rate(model.tokens_per_s)} tokens/s")
    elif pace is not None and pace.samples_per_s is not None:
        parts.append(f"{pace.samples_per_s:,.0f} samples/s")
    if places.num_workers:
        lost = f", {places.num_lost} lost" if places.num_lost else ""
        parts.append(f"{places.num_workers} worker{'s' * (places.num_workers > 1)}{lost}")
    return "  ".join(filter(None, parts))


def time_left(places: Places, pace: Pace, num_steps: int | None = None) -> str:
    """`3:10 left`, of the whole run as far as its steps are known, else of the epoch; empty if the
    ranks have taken too few steps to tell."""
    if num_steps:
        steps = num_steps - places.step
    elif places.total and places.epoch is not None:
        # The epochs to come are taken to be as long as this one.
        later = max(0, (places.num_epochs or 0) - places.epoch - 1)
        steps = places.total - places.done + later * places.total
    else:
        return ""
    rate = pace.steps_per_s
    if rate is None or steps <= 0:
        return ""
    minutes, seconds = divmod(round(steps / rate), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


def living(of_ranks: Mapping[int, int], places: Places) -> dict[int, int]:
    """Those of the ranks that are in the run, as far as that is known."""
    return {rank: n for rank, n in of_ranks.items() if not places.ranks or rank in places.ranks}


def batches_left(model: ProgressModel, places: Places = NOWHERE) -> str:
    """`batches left: rank 0 130, rank 1 none`; many ranks are summed up in one phrase. Empty
    where nobody has reported it, and all ranks have the same number."""
    joined = places.joined | model.joined
    left = dict(sorted(living(model.left, places).items()))
    # What the ranks' loops say is in the headline as well, as long as all have the same left.
    if not left and (len(set(places.left.values())) > 1 or joined):
        left = dict(sorted(places.left.items()))
    if not left:
        return ""
    if len(left) <= MAX_RANKS_LISTED:
        says = (f"rank {rank} {'none' if rank in joined else n}" for rank, n in left.items())
        return "batches left: " + ", ".join(says)
    live = [n for rank, n in left.items() if rank not in joined]
    return f"batches left: {min(live, default=0)} to {max(live, default=0)}; {len(joined)} of " + (
        f"{len(left)} ranks are out of data"
    )


def in_the_end(happened: Sequence[TrackedEvent]) -> str:
    """The sum of what happened to the workers of a run, as its last line; empty if nothing did."""
    lost = sum(len(event.lost) for event in happened)
    left = sum(len(event.left) for event in happened)
    came = sum(len(event.came) for event in happened)
    if not happened:
        return ""
    num_workers = happened[-1].num_workers
    parts = [f"{num_workers} worker{'s' * (num_workers > 1)} at the end"]
    if lost and came == lost and not left:  # The usual end of a run whose session replaces workers.
        parts.append(f"{lost} lost and replaced")
    else:
        counts = (lost, "lost"), (left, "left"), (came, "new")
        parts += [f"{count} {verb}" for count, verb in counts if count]
    repeated = sum(event.repeated for event in happened)
    return ", ".join(parts) + f"; {repeated} step{'s' * (repeated != 1)} repeated"


def joining(before: ProgressModel, after: ProgressModel) -> str:
    """A sentence about the ranks that have joined between the two, or an empty text."""
    ranks = sorted(after.joined - before.joined)
    if not ranks:
        return ""
    subject = (
        f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
    )
    return f"step {after.step}: {subject} out of data; the others finish the epoch"


def _short(value: float) -> str:
    if 1000 <= abs(value) < _MOST_DIGITS and float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.4g}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value < _MOST_DIGITS else f"{value:.4g}"
