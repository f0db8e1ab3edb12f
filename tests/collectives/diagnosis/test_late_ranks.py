"""A rank that is late is blamed for what it did before it came, and for nothing that came after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from chorusline.collectives.group import Group
from chorusline.collectives.stores.store import HashStore


def rests(group: Group) -> None:
    group.rest()


def closes(group: Group) -> None:
    group.close()


@pytest.mark.parametrize("then", [rests, closes])
def test_a_rank_that_comes_and_ends_while_another_has_no_cpu_is_not_blamed(
    then: Callable[[Group], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    looks, has_ended, is_over = (threading.Event() for _ in range(3))

    def late() -> None:
        group = Group.create(store, 1, 2)
        looks.wait(30)
        group.barrier().wait()
        then(group)
        has_ended.set()
        is_over.wait(30)
        group.close()

    def waiting() -> None:
        with Group.create(store, 0, 2) as group:
            segment: Any = group._communicator._segment  # type: ignore[attr-defined]
            look = type(segment).ended_ranks

            def looks_and_loses_its_cpu(self: Any) -> set[int]:
                if self is segment and not looks.is_set():
                    looks.set()
                    assert has_ended.wait(30)
                found: set[int] = look(self)
                return found

            monkeypatch.setattr(type(segment), "ended_ranks", looks_and_loses_its_cpu)
            try:
                group.barrier().wait()
            finally:
                is_over.set()

    with ThreadPoolExecutor(2) as pool:
        for rank in [pool.submit(late), pool.submit(waiting)]:
            rank.result(60)
