"""Has the kernel mark a word of shared memory when this process ends.

A thread may give Linux a list of words that say that it holds a lock (robust futexes, as pthread
uses them): when the thread ends, the kernel marks those words. It does so before it takes down the
memory of the process, which takes 15 to 30 ms for one that has loaded torch, and ten times as long
on a busy machine. Only after that do a pidfd and closed connections show the end.

The thread that has the list here does nothing else, and lives as long as there are words: so it
ends with its process, whatever ends that.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

_SYS_SET_ROBUST_LIST = {
    **dict.fromkeys(("x86_64", "AMD64"), 273),
    **dict.fromkeys(("aarch64", "riscv64", "loongarch64"), 99),
}.get(platform.machine())
"""The number of the call; None for a processor that is not listed, where nothing is marked."""
_OWNER_DIED = 0x40000000  # FUTEX_OWNER_DIED
_NEXT, _OFFSET = 0, 1  # words of the kernel's struct robust_list_head; the third stays 0
_libc = ctypes.CDLL(None, use_errno=True)


class _RobustList:
    """The thread of one process, and its list: each entry is two words of shared memory, the
    thread's id and the address of the next entry's second word."""

    def __init__(self) -> None:
        self._head = (ctypes.c_uint64 * 3)()
        self._head[_NEXT] = ctypes.addressof(self._head)  # The last entry leads back to the head.
        self._head[_OFFSET] = -8 & 0xFFFFFFFFFFFFFFFF  # From the second word to the first.
        self._entries: list[tuple[memoryview, int]] = []  # as they are linked, the first one first
        self._thread_id = 0  # 0: the kernel has not taken the list
        self._is_set = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._main, name="chorusline-exit", daemon=True)
        self._thread.start()
        self._is_set.wait()

    def _main(self) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(self._head))
        if _libc.syscall(_SYS_SET_ROBUST_LIST, ctypes.byref(self._head), size) == 0:
            self._thread_id = threading.get_native_id()
        self._is_set.set()
        self._is_over.wait()

    def add(self, words: memoryview, at: int, address: int) -> None:
        # At any instant the process may be killed: what the head leads to is whole.
        words[at + 1] = self._head[_NEXT]
        words[at] = self._thread_id
        self._head[_NEXT] = address + 8
        self._entries.insert(0, (words, at))

    def remove(self, words: memoryview, at: int) -> None:
        """Does nothing if it was not added."""
        number = next(
            (n for n, (one, place) in enumerate(self._entries) if one is words and place == at),
            None,
        )
        if number is None:
            return
        if number == 0:
            self._head[_NEXT] = words[at + 1]
        else:
            before, place = self._entries[number - 1]
            before[place + 1] = words[at + 1]
        words[at] = 0
        del self._entries[number]

    def end_if_empty(self) -> bool:
        if self._entries:
            return False
        self._is_over.set()
        self._thread.join()
        return True


_lock = threading.Lock()
_list: _RobustList | None = None  # None: this process has no word that is to be marked


def mark_at_exit(words: memoryview, at: int, address: int) -> None:
    """From now on the end of this process is marked in the word `at`, for `has_ended`; the word
    after it is used, too. address: of the word `at`. Where the system lacks it, nothing is marked.
    """
    global _list
    if _SYS_SET_ROBUST_LIST is None:
        return
    with _lock:
        _list = _list or _RobustList()
        _list.add(words, at, address)


def forget(words: memoryview, at: int) -> None:
    """Undo `mark_at_exit`, as has to be done before the memory is unmapped."""
    global _list
    with _lock:
        if _list is not None:
            _list.remove(words, at)
            if _list.end_if_empty():
                _list = None


def has_ended(words: memoryview, at: int) -> bool:
    """Whether the process that called `mark_at_exit` for this word has ended."""
    return bool(words[at] & _OWNER_DIED)


def _after_fork() -> None:
    """The list and its thread are the parent's."""
    global _lock, _list
    _lock, _list = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)
