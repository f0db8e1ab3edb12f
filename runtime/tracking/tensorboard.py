"""Runs in TensorBoard's event files, by torch's own SummaryWriter (extra `tensorboard`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from chorusline.collectives.contract.argument_kinds import check_kinds

from .tracker import NUM_WORKERS, TrackedEvent, TrackedRun, Tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker(Tracker):
    """Writes each run into a folder of its own below `log_dir`; look at them with
    `tensorboard --logdir runs`.

        cl.run(train, num_workers=2, trackers=cl.TensorBoardTracker("runs"))

    log_dir: a folder; default `runs`, as torch's SummaryWriter has it.

    Each reported name is a scalar; events of the workers are text, and their number is the scalar
    `chorusline/num_workers`; the config is text. A run that resumes from a checkpoint continues in
    the folder of the run that wrote it, and its steps after the checkpoint replace those that were
    lost.
    """

    def __init__(self, log_dir: str | Path = "runs") -> None:
        check_kinds(TensorBoardTracker.__init__, locals())
        self._log_dir = Path(log_dir)
        self._folder = self._log_dir
        self._writer: SummaryWriter | None = None  # None: before `begin`
        self._step = 0

    def begin(self, run: TrackedRun) -> None:
        self._folder = self._log_dir / run.title
        self._step = run.resumed_step
        self._open(run.resumed_step + 1 if run.resumed_from is not None else None)
        config = "\n".join(f"| {name} | {value} |" for name, value in run.config.items())
        table = f"| argument | value |\n|---|---|\n{config}"
        self._written().add_text("config", table, run.resumed_step, run.began_at)

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        if step < self._step:  # The run has gone back: what TensorBoard has from here on is void.
            self._written().close()
            self._open(step)
        self._step = step
        for name, number in numbers.items():
            self._written().add_scalar(name, number, step, time)

    def event(self, event: TrackedEvent) -> None:
        at = event.step, event.ended_at
        self._written().add_text("chorusline/events", event.text, *at)
        self._written().add_scalar(NUM_WORKERS, event.num_workers, *at)

    def flush(self) -> None:
        self._written().flush()

    def end(self, status: str, error: str) -> None:
        text = f"{status}: {error}" if error else status
        self._written().add_text("chorusline/end", text, self._step)
        self._written().close()
        self._writer = None

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)

    def _written(self) -> SummaryWriter:
        assert self._writer is not None, "begin comes first"
        return self._writer
