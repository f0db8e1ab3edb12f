"""What is tried again beside a run until it has worked."""

from __future__ import annotations

import logging

import pytest

from chorusline.actors.ray_calls.calls import ActorGone
from chorusline.actors.worker_group import retry as persisting
from chorusline.actors.worker_group.retry import persist


async def test_an_error_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(persisting, "AGAIN_S", 0.001)
    outcomes: list[bool | Exception] = [
        ConnectionError("the head does not answer"),
        ExceptionGroup("tasks", [KeyError(3), ActorGone("it died")]),
        False,
        True,
        RuntimeError("never reached"),
    ]

    async def attempt() -> bool:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with caplog.at_level(logging.WARNING, "chorusline"):
        await persist(attempt, "seat 3 is not filled")
    assert len(outcomes) == 1
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("seat 3 is not filled: retrying in 0.001 s, after")
    assert "ConnectionError: the head does not answer" in first
    assert "KeyError: 3" in second


@pytest.mark.parametrize(
    "error", [ActorGone("it died"), ExceptionGroup("tasks", [ActorGone("it died")])]
)
async def test_an_actor_that_is_gone_ends_it(error: Exception) -> None:
    async def attempt() -> bool:
        raise error

    with pytest.raises(ActorGone):
        await persist(attempt, "seats")
