"""Runs in MLflow (extra `mlflow`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from chorusline.collectives.contract.argument_kinds import check_kinds

from .tracker import NUM_WORKERS, TrackedEvent, TrackedRun, Tracker

_log = logging.getLogger("chorusline")

_TAG = "chorusline.run"
_MOST_METRICS = 1000  # that MLflow takes in one call
_MOST_PARAMS = 100
_MOST_KEPT = 100_000  # metrics, while the server is away
_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MLflowTracker(Tracker):
    """Makes an MLflow run of each run.

        cl.run(train, num_workers=2, trackers=cl.MLflowTracker("my experiment"))

    experiment: its name, made if there is none. Default: MLFLOW_EXPERIMENT_NAME, or "Default".
    tracking_uri: of the server, database or folder. Default: as `mlflow.set_tracking_uri` or
        MLFLOW_TRACKING_URI say.

    Each reported name is a metric, and the config its params. A name that MLflow does not allow,
    such as "p(x)", is left out, and a warning says so. What happens to the workers is a tag
    `chorusline.event.<n>`, and their number the metric `chorusline/num_workers`. A run that resumes
    from a checkpoint continues in the MLflow run of the run that wrote it. Steps are sent together,
    several times a second.
    """

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        check_kinds(MLflowTracker.__init__, locals())
        self._experiment, self._tracking_uri = experiment, tracking_uri
        self._client: Any = None
        self._run_id = ""
        self._metrics: list[Any] = []
        self._num_events = 0

    def begin(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Param
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        self._client = mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        self._metrics, self._num_events = [], 0
        name = self._experiment or MLFLOW_EXPERIMENT_NAME.get() or "Default"
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        mine = f"tags.`{_TAG}` = '{run.id}'"
        before = self._client.search_runs([number], mine) if run.resumed_from is not None else []
        # The record continues where the run that is resumed has left it.
        if before:
            self._run_id = before[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            tags = before[0].data.tags
            self._num_events = sum(tag.startswith("chorusline.event.") for tag in tags)
            return
        made = self._client.create_run(
            number,
            start_time=_ms(run.began_at),
            tags={_TAG: run.id, "mlflow.source.name": run.name},
            run_name=run.title,
        )
        self._run_id = made.info.run_id
        params = [Param(key, str(value)) for key, value in run.config.items()]
        refused: dict[str, Exception] = {}
        for first in range(0, len(params), _MOST_PARAMS):
            batch = params[first : first + _MOST_PARAMS]
            try:
                self._send_params(batch)
            except Exception as error:
                if not _is_refused(error):
                    raise
                refused |= _sent_by_name(batch, self._send_params)
        if refused:
            _log.warning("MLflow has refused the arguments %s", _in_words(refused))

    def _send_params(self, params: list[Any]) -> None:
        self._client.log_batch(self._run_id, params=params)

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        self._metrics += [Metric(name, one, _ms(time), step) for name, one in numbers.items()]
        if len(self._metrics) >= _MOST_METRICS:
            self.flush()

    def event(self, event: TrackedEvent) -> None:
        self._num_events += 1
        self._client.set_tag(self._run_id, f"chorusline.event.{self._num_events}", event.text)
        self.log(event.step, {NUM_WORKERS: float(event.num_workers)}, event.ended_at)

    def flush(self) -> None:
        refused: dict[str, Exception] = {}
        while self._metrics:
            batch = self._metrics[:_MOST_METRICS]
            try:
                self._send(batch)
            except Exception as error:
                # A server that is away gets them with the next flush.
                if not _is_refused(error):
                    if len(self._metrics) > _MOST_KEPT:
                        self._drop(batch)
                    raise
                refused |= _sent_by_name(batch, self._send, self._drop)
        if refused:
            raise ValueError(f"MLflow has refused what was reported as {_in_words(refused)}")

    def _send(self, metrics: list[Any]) -> None:
        self._client.log_batch(self._run_id, metrics=metrics)
        self._drop(metrics)

    def _drop(self, metrics: list[Any]) -> None:
        gone = {id(one) for one in metrics}
        self._metrics = [one for one in self._metrics if id(one) not in gone]

    def end(self, status: str, error: str) -> None:
        with ExitStack() as calls:  # The last one first, and each of them though another raises.
            calls.callback(self._client.set_terminated, self._run_id, _STATUSES[status])
            if error:
                calls.callback(self._client.set_tag, self._run_id, "chorusline.error", error[:5000])
            calls.callback(self.flush)


def _sent_by_name(
    batch: list[Any],
    send: Callable[[list[Any]], None],
    drop: Callable[[list[Any]], None] = lambda _: None,
) -> dict[str, Exception]:
    """Returns the names that MLflow refuses, such as one with "%", which it does each time: a call
    with one of them is refused as a whole. drop: called with what is refused."""
    refused: dict[str, Exception] = {}
    for name in dict.fromkeys(one.key for one in batch):
        of_name = [one for one in batch if one.key == name]
        try:
            send(of_name)
        except Exception as error:
            if not _is_refused(error):
                raise
            refused[name] = error
            drop(of_name)
    return refused


def _in_words(refused: dict[str, Exception]) -> str:
    (*_, why) = refused.values()
    return f"{', '.join(map(repr, refused))} ({why})"


def _is_refused(error: Exception) -> bool:
    return getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
