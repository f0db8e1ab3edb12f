"""What a tracker is told of a run: `Tracker`, which the classes of this folder and of users are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NUM_WORKERS = "chorusline/num_workers"
"""The number that trackers with charts log when the number of workers has changed."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """One call of `Session.run`, as a tracker sees it.

        class Titles(cl.Tracker):
            def begin(self, run):
                print(run.title, run.config)

    id: 32 hex digits. A run that resumes from a checkpoint has the id of the run that wrote it, so
        that a tracker can continue where that run stopped.
    name: of the train function.
    began_at: seconds since the epoch.
    config: the function's arguments that are numbers, strings, booleans or None, by name;
        `optimizer.lr` for one inside a dictionary, a dataclass or a namespace. And the session's
        `num_workers` and `seed`, where the function has no arguments of these names.
    resumed_from: the path of the checkpoint that the run resumes from; None if it does not resume.
    resumed_step: the optimizer step of that checkpoint.
    """

    id: str
    name: str
    began_at: float
    config: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)
    resumed_from: str | None = None
    resumed_step: int = 0

    @property
    def title(self) -> str:
        """The name and a part of the id: `train-1f0c93ab`."""
        return f"{self.name}-{self.id[:8]}"


@dataclass(frozen=True, slots=True)
class TrackedEvent:
    """Something that happened to the workers during a run.

        class Losses(cl.Tracker):
            def event(self, event):
                if event.lost:
                    print(f"{event.text}; the run stood still for {event.seconds:.1f} s")

    kind: "ranks lost", "ranks left" (they had notice, and handed over their state), or
        "workers came".
    began_at, ended_at: seconds since the epoch: when the first rank noticed it, and when all ranks
        continued.
    step: the last optimizer step before it.
    generation: the generation in which the run continues.
    num_workers: its size.
    lost, left: ranks of the generation before, which are gone.
    came: ranks of the new one that were not there before.
    text: the same as a sentence.
    repeated: steps that are taken once more because of it.
    """

    kind: str
    began_at: float
    ended_at: float
    step: int
    generation: int
    num_workers: int
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    came: tuple[int, ...] = ()
    text: str = ""
    repeated: int = 0

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended_at - self.began_at)


class Tracker:
    """Follows the runs of a session: `Session(trackers=[...])`.

        class LossOnly(cl.Tracker):
            def log(self, step, numbers, time):
                print(step, numbers.get("loss"))
        cl.run(train, num_workers=2, trackers=[LossOnly()])

    A tracker lives in the process of the session, and its methods are called in a thread of its
    own, one after another: `begin`, then `log` and `event`, then `end`; and again for the next run.
    So they may block. An error that a method raises is logged once, and the run continues. Write
    your own by overriding what you need; by default, no method does anything.
    """

    def begin(self, run: TrackedRun) -> None:
        """A run begins: called when its function was called on the ranks, or has failed before."""

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Numbers that were reported with `ctx.report`.

        step: the optimizer step, counted over resumed runs; where no optimizer has stepped, the
            number of the report, from 1. Steps grow, except after the run has gone back to a
            checkpoint.
        numbers: by name, the mean over the ranks that reported it in this step; of `tokens` and
            `samples` the sum. A number in a dictionary is called `accuracy.top1`.
        time: seconds since the epoch, of the last of these reports.
        """

    def event(self, event: TrackedEvent) -> None:
        """Ranks were lost, left or joined, and the run continues."""

    def flush(self) -> None:
        """No more calls are waiting: write what is buffered."""

    def end(self, status: str, error: str) -> None:
        """The run is over.

        status: "finished", "failed" or "interrupted".
        error: the error that it failed with; empty if it did not fail.
        """
