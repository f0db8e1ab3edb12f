"""The kernel marks words of shared memory when the process ends that has asked for it."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, strategies as st

from chorusline.collectives.shared_memory import robust_list
from chorusline.collectives.shared_memory.robust_list import forget, has_ended, mark_at_exit

pytestmark = pytest.mark.skipif(
    robust_list._SYS_SET_ROBUST_LIST is None, reason="the number of the call is not known here"
)


class Words:
    """Memory that a process shares with those that it forks."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.words = memoryview(self._memory).cast("Q")

    def mark(self, at: int) -> None:
        mark_at_exit(self.words, at, self._address + 8 * at)

    def forget(self, at: int) -> None:
        forget(self.words, at)

    def marked(self) -> list[int]:
        return [at for at in range(0, 64, 2) if has_ended(self.words, at)]


@pytest.fixture
def shared() -> Iterator[Words]:
    words = Words()
    yield words
    for at in range(0, 64, 2):
        words.forget(at)
    assert robust_list._list is None, "without words there is no thread"


def forked(does: Callable[[], None]) -> int:
    """The process that does it, and then waits to be killed."""
    ready, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            does()
            os.write(says, b"1")
            time.sleep(60)
        finally:
            os._exit(3)
    os.close(says)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    return pid


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_kill_is_marked_and_only_in_the_words_of_that_process(shared: Words) -> None:
    shared.mark(0)
    pids = [forked(lambda at=at: shared.mark(at)) for at in (2, 4)]  # type: ignore[misc]
    assert shared.marked() == []
    end(pids[1])
    assert shared.marked() == [4]
    end(pids[0])
    assert shared.marked() == [2, 4]


def test_a_kill_is_marked_before_the_parent_has_seen_the_end(shared: Words) -> None:
    pid = forked(lambda: shared.mark(2))
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while not shared.marked() and time.monotonic() < until:
        time.sleep(0.001)
    assert shared.marked() == [2]
    os.waitpid(pid, 0)


def test_a_process_that_ends_by_itself_is_marked_too(shared: Words) -> None:
    pid = os.fork()
    if pid == 0:
        shared.mark(2)
        os._exit(0)
    os.waitpid(pid, 0)
    assert shared.marked() == [2]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=20))
def test_what_was_forgotten_in_any_order_is_not_marked(steps: list[tuple[bool, int]]) -> None:
    shared = Words()

    def do_all() -> None:
        held = set[int]()
        for adds, number in steps:
            if not adds:
                shared.forget(2 * number)
                held.discard(number)
            elif number not in held:
                shared.mark(2 * number)
                held.add(number)

    end(forked(do_all))
    last = {number: adds for adds, number in steps}
    assert shared.marked() == sorted(2 * number for number, adds in last.items() if adds)


def test_a_fork_neither_marks_nor_forgets_the_words_of_its_parent(shared: Words) -> None:
    shared.mark(0)
    end(forked(lambda: shared.forget(0)))
    assert shared.marked() == []
    assert shared.words[0] != 0, "the parent's word still says that it lives"


def test_words_of_several_memories_have_one_thread(shared: Words) -> None:
    others = [Words() for _ in range(3)]

    def do() -> None:
        for at, one in itertools.product((0, 6), others):
            one.mark(at)
        others[1].forget(0)

    end(forked(do))
    assert [one.marked() for one in others] == [[0, 6], [6], [0, 6]]
