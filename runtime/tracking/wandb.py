"""Runs in Weights & Biases, offline too (extra `wandb`)."""

from __future__ import annotations

import logging
import netrc
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chorusline.collectives.contract.argument_kinds import check_kinds

from .tracker import NUM_WORKERS, TrackedEvent, TrackedRun, Tracker

_log = logging.getLogger("chorusline")


class WandbTracker(Tracker):
    """Makes a W&B run of each run.

        cl.run(train, num_workers=2, trackers=cl.WandbTracker("my project", mode="offline"))

    project, entity: as W&B has them. Default: WANDB_PROJECT or "chorusline", and your entity.
    mode: "online" or "offline". Default: WANDB_MODE; without it "online" if there is an API key,
        else "offline", so that a run never waits for a password.
    dir: the folder in which W&B writes `wandb/`. Default: WANDB_DIR, or the current folder.
    settings: more arguments of `wandb.init`, such as `{"tags": ["baseline"]}`.

    Each reported name is logged at its step, and the arguments are the config. It is a run beside
    one that the program has open: `wandb.log` does not write into it. What happens to the
    workers is in the summary, as `chorusline/events`, and their number is logged as
    `chorusline/num_workers`. A run that resumes from a checkpoint has the id of the run that wrote
    it (`resume="allow"`): online it continues in it; offline `wandb sync --append` joins the two.
    W&B's steps cannot go back: steps that a run takes again are left out.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        entity: str | None = None,
        mode: str | None = None,
        dir: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        check_kinds(WandbTracker.__init__, locals())
        if mode not in (None, "online", "offline"):
            raise ValueError(f'mode must be "online" or "offline", got {mode!r}')
        self._project, self._entity, self._mode = project, entity, mode
        self._dir, self._settings = dir, dict(settings or {})
        self._run: Any = None
        self._step = 0
        self._events: list[str] = []
        self._has_told = False

    def begin(self, run: TrackedRun) -> None:
        import wandb

        mode = self._mode or os.environ.get("WANDB_MODE")
        if mode is None:
            mode = "online" if _has_key() else "offline"
        self._events, self._step = [], run.resumed_step
        given = {
            "project": self._project or os.environ.get("WANDB_PROJECT") or "chorusline",
            "entity": self._entity,
            "dir": str(self._dir) if self._dir is not None else None,
            "id": run.id[:16],
            "name": run.title,
            "config": dict(run.config),
            "mode": mode,
            "resume": "allow",
            # Else it would be a run that the program has open, which then ends with this one.
            "reinit": "create_new",
            # The output of the ranks is the session's to show, and signals are the program's.
            "settings": wandb.Settings(console="off", silent=True),
        }
        self._run = wandb.init(**(given | self._settings))

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        if step < self._step:
            if not self._has_told:
                self._has_told = True
                _log.warning(
                    "the run has gone back to step %d, but the steps of W&B cannot go back: it "
                    "keeps the first record of the steps up to %d",
                    step,
                    self._step,
                )
            return
        self._step = step
        self._run.log(dict(numbers), step=step)

    def event(self, event: TrackedEvent) -> None:
        self._events.append(f"step {event.step}: {event.text}")
        self._run.summary["chorusline/events"] = self._events
        self._run.log({NUM_WORKERS: event.num_workers}, step=max(self._step, event.step))

    def end(self, status: str, error: str) -> None:
        self._run.summary["chorusline/end"] = f"{status}: {error}" if error else status
        self._run.finish(exit_code=0 if status == "finished" else 1)
        self._run = None


def _has_key() -> bool:
    """Whether there is an API key, in the environment or from `wandb login`."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        return netrc.netrc().authenticators(urllib.parse.urlsplit(url).netloc) is not None
    except (OSError, netrc.NetrcParseError):
        return False
