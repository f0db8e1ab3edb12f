"""Other kernels, processors and files: no pidfd, other numbers of calls, other users who write."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import PeerLost
from chorusline.collectives.shared_memory import futex, layout, robust_list
from chorusline.collectives.shared_memory.layout import make_memory
from chorusline.collectives.shared_memory.segment import SharedSegment
from chorusline.collectives.shared_memory.symmetric_memory import NOWHERE, make_symmetric, place_of
from tests.harness.ranks import SHARED_MEMORY, Rank, Ranks, error_of

REFUSALS = {
    "a kernel": OSError(errno.ENOSYS, "Function not implemented"),
    "a Python": AttributeError("module 'os' has no attribute 'pidfd_open'"),
}


def _refuse(error: Exception) -> Callable[..., Any]:
    def refused(*_: object, **__: object) -> Any:
        raise error

    return refused


def meet_without_pidfd(rank: Rank, whose: str) -> str:
    robust_list._SYS_SET_ROBUST_LIST = None
    os.pidfd_open = _refuse(REFUSALS[whose])  # type: ignore[assignment]
    group = rank.group()
    assert group.all_gather_object(rank.rank).wait() == [0, 1]
    rank.say("met")
    if rank.rank == 1:
        os.kill(os.getpid(), 9)
    return str(error_of(lambda: group.barrier().wait(), PeerLost))


@pytest.mark.parametrize("whose", REFUSALS)
def test_ranks_notice_a_death_without_pidfds(whose: str, tmp_path: Path) -> None:
    with Ranks(meet_without_pidfd, 2, tmp_path, SHARED_MEMORY, whose) as ranks:
        assert "rank 1 is gone" in ranks.results(ranks=[0])[0]


def test_a_rank_that_died_before_the_others_looked_is_lost_without_pidfds_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(os, "pidfd_open", _refuse(REFUSALS["a kernel"]))
    with pytest.raises(PeerLost, match=f"process {ended.pid} ended"):
        SharedSegment(make_memory(2, 1 << 16), [os.getpid(), ended.pid], 0, 0, 1 << 16)


def test_a_rank_without_file_descriptors_does_not_take_another_one_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = OSError(errno.EMFILE, "Too many open files")
    with subprocess.Popen(["sleep", "60"]) as other:
        pids = [os.getpid(), other.pid]
        with monkeypatch.context() as without:
            without.setattr(os, "pidfd_open", _refuse(full))
            with pytest.raises(OSError, match="Too many open files"):
                SharedSegment(make_memory(2, 1 << 16), pids, 0, 0, 1 << 16)
            without.setattr(os, "pidfd_open", _refuse(REFUSALS["a kernel"]))
            segment = SharedSegment(make_memory(2, 1 << 16), pids, 0, 0, 1 << 16)
            without.setattr(Path, "read_text", _refuse(full))
            assert segment.ended_ranks() == set()
        other.kill()
        other.wait()
        assert segment.ended_ranks() == {1}
        segment.leave()


@pytest.mark.parametrize(
    ("machine", "number"),
    [
        *[("x86_64", 202), ("aarch64", 98), ("riscv64", 98), ("ppc64le", 221), ("s390x", 238)],
        ("sparc64", None),
    ],
)
def test_a_wait_calls_futex_and_not_another_function_of_the_kernel(
    machine: str, number: int | None
) -> None:
    program = (
        "import platform\n"
        f"platform.machine = lambda: {machine!r}\n"
        "from chorusline.collectives.shared_memory import futex\n"
        "print(futex._SYS_FUTEX)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == str(number)
    assert platform.machine() in ("x86_64", "aarch64")


def add_without_futex(rank: Rank) -> list[float]:
    futex._SYS_FUTEX = None
    group = rank.group()
    for _ in range(20):
        tensor = torch.full((3,), float(rank.rank + 1))
        group.all_reduce(tensor).wait()
    return tensor.tolist()


def test_ranks_on_a_processor_whose_futex_is_not_known_meet_and_compute(tmp_path: Path) -> None:
    with Ranks(add_without_futex, 2, tmp_path, SHARED_MEMORY) as ranks:
        assert ranks.results() == [[3.0] * 3] * 2


@pytest.mark.parametrize("refuses", [errno.EINVAL, errno.EACCES], ids=["before 6.3", "noexec=2"])
def test_memory_is_made_by_kernels_that_want_it_not_executable_and_by_older_ones(
    refuses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, noexec_seal = layout._memfd_create, 8

    def refusing(name: str, flags: int) -> int:
        if bool(flags & noexec_seal) == (refuses == errno.EINVAL):
            raise OSError(refuses, os.strerror(refuses))
        return make(name, flags & ~noexec_seal)

    monkeypatch.setattr(layout, "_memfd_create", refusing)
    assert place_of(make_symmetric(1000, torch.float32)) is not NOWHERE


def test_a_python_that_was_built_for_an_older_c_library_makes_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, names in ((os, ("memfd_create", "MFD_")), (fcntl, ("F_SEAL_", "F_ADD_SEALS"))):
        for name in [name for name in vars(module) if name.startswith(names)]:
            monkeypatch.delattr(module, name)
    tensor = make_symmetric(1000, torch.float32)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{place_of(tensor).descriptor}", 0)


def test_memory_that_a_kernel_refuses_is_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_ALLOW_SEALING", 1 << 30)
    with pytest.raises(OSError, match="share between the 2 ranks of this host: Invalid argument"):
        make_memory(2, 1 << 16)


def test_no_two_threads_ring_a_bell_with_the_same_value() -> None:
    rung: list[int] = []

    class Words(list[int]):
        def __setitem__(self, at: Any, value: Any) -> None:
            rung.append(value)

    segment = SharedSegment(make_memory(2, 1 << 16), [os.getpid()] * 2, 0, 1, 1 << 16)
    words = segment._words
    segment._words = Words(words)  # type: ignore[assignment]

    def ring_in_another_thread(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not SharedSegment.ring_bell.__code__:
            return None
        other = threading.Thread(target=segment.ring_bell, args=(1,))
        other.start()
        other.join()
        return ring_in_another_thread

    before = sys.gettrace()
    sys.settrace(ring_in_another_thread)
    try:
        segment.ring_bell(1)
    finally:
        sys.settrace(before)
    segment._words = words
    segment.leave()
    assert len(rung) >= 4 and len({*rung}) == len(rung)


@pytest.mark.parametrize("length", [0, 1 << 30])
def test_no_process_can_cut_or_grow_the_memory_that_ranks_have_mapped(length: int) -> None:
    tensor, memory = make_symmetric(1000, torch.float32), make_memory(2, 1 << 16)
    try:
        for descriptor in (memory, place_of(tensor).descriptor):
            with pytest.raises(PermissionError):
                os.truncate(f"/proc/self/fd/{descriptor}", length)
            with pytest.raises(PermissionError):
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(memory)
