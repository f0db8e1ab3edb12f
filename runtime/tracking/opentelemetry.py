"""Runs as OpenTelemetry spans (extra `otel`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from chorusline.actors.ray_calls.versions import our_version
from chorusline.collectives.contract.argument_kinds import check_kinds, check_range

from .tracker import TrackedEvent, TrackedRun, Tracker

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

_log = logging.getLogger("chorusline")


class OpenTelemetryTracker(Tracker):
    """Makes spans of each run, for whatever collects spans in your cluster.

        cl.run(train, num_workers=2, trackers=cl.OpenTelemetryTracker(every_n_steps=10))

        chorusline.run            the whole run; its status is that of the run
          chorusline.generation   the time in which the same workers train
            chorusline.step       every n-th step, with the numbers that were reported
          chorusline.recovery     from the death of ranks until all others continue

    every_n_steps: how often there is a span of a step; 0: never.
    tracer_provider: default: the global one, as your program or `opentelemetry-instrument` has
        configured it.

    The span of the run is a child of the span in which `Session.run` was called. A step is a span
    from the report before it to its own report, so it needs `ctx.report` in each step. Attributes:
    `chorusline.run.id`, `.step`, `.generation`, `.num_workers`, `.ranks.lost`, `.ranks.left`,
    `.ranks.came`, `.seconds`, and the reported numbers as `chorusline.reported.<name>`.
    """

    def __init__(
        self, every_n_steps: int = 100, *, tracer_provider: TracerProvider | None = None
    ) -> None:
        check_kinds(OpenTelemetryTracker.__init__, locals())
        check_range("every_n_steps", every_n_steps, 0)
        if tracer_provider is not None and not hasattr(tracer_provider, "get_tracer"):
            raise TypeError(
                "tracer_provider must be a TracerProvider of OpenTelemetry, got "
                f"{type(tracer_provider).__name__}"
            )
        self._every, self._provider = every_n_steps, tracer_provider
        self._tracer: Any = None
        self._run: Span | None = None  # None: between two runs
        self._generation: Span | None = None  # None: as `_run`
        self._number = 0
        self._last_at = 0.0

    def begin(self, run: TrackedRun) -> None:
        from opentelemetry import trace

        provider = self._provider or trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            _log.warning(
                "no OpenTelemetry tracer provider is configured, so the spans of this run go "
                "nowhere: call opentelemetry.trace.set_tracer_provider(...) before the run, or "
                "start the program with `opentelemetry-instrument`"
            )
        self._tracer = provider.get_tracer("chorusline", our_version())
        attributes: dict[str, Any] = {"chorusline.run.id": run.id, "chorusline.run.name": run.name}
        if run.resumed_from is not None:
            attributes["chorusline.resumed.from"] = run.resumed_from
            attributes["chorusline.resumed.step"] = run.resumed_step
        attributes |= {
            f"chorusline.config.{name}": value
            for name, value in run.config.items()
            if value is not None
        }
        self._run = self._tracer.start_span(
            "chorusline.run", start_time=_ns(run.began_at), attributes=attributes
        )
        self._number = 0
        self._last_at = run.began_at
        self._generation = self._begun("chorusline.generation", run.began_at, self._run)

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        if self._every and step % self._every == 0:
            span = self._begun("chorusline.step", min(self._last_at, time), self._generation)
            span.set_attribute("chorusline.step", step)
            for name, number in numbers.items():
                span.set_attribute(f"chorusline.reported.{name}", number)
            span.end(_ns(time))
        self._last_at = max(self._last_at, time)

    def event(self, event: TrackedEvent) -> None:
        if self._generation is not None:
            self._generation.end(_ns(event.began_at))
        span = self._begun("chorusline.recovery", event.began_at, self._run)
        span.set_attributes(
            {
                "chorusline.event": event.kind,
                "chorusline.step": event.step,
                "chorusline.generation": event.generation,
                "chorusline.num_workers": event.num_workers,
                "chorusline.ranks.lost": event.lost,
                "chorusline.ranks.left": event.left,
                "chorusline.ranks.came": event.came,
                "chorusline.seconds": event.seconds,
            }
        )
        span.end(_ns(event.ended_at))
        self._number = event.generation
        self._generation = self._begun("chorusline.generation", event.ended_at, self._run)
        self._generation.set_attribute("chorusline.num_workers", event.num_workers)
        self._last_at = max(self._last_at, event.ended_at)

    def end(self, status: str, error: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        if self._generation is not None:
            self._generation.end()
        if self._run is not None:
            self._run.set_attribute("chorusline.end", status)
            code = StatusCode.ERROR if error else StatusCode.OK
            self._run.set_status(Status(code, error or None))
            self._run.end()
        self._run = self._generation = None

    def _begun(self, name: str, at: float, parent: Span | None) -> Span:
        from opentelemetry import trace

        context = trace.set_span_in_context(parent) if parent is not None else None
        span: Span = self._tracer.start_span(name, context=context, start_time=_ns(at))
        span.set_attribute("chorusline.generation", self._number)
        return span


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
