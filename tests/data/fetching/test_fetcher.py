"""Batches that other processes make ahead, and the cut when the plan changes; without Ray."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from chorusline.runtime.data.fetching.fetcher import Fetcher
from chorusline.runtime.data.fetching.options import FetchOptions
from tests import ROOT

LISTS = [[3, 1], [0, 2], [5, 4], [6]]


class Numbers(Dataset[Any]):
    """Sample n is n. made_by: the process that made it."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 13:
            raise LookupError("sample 13 cannot be read")
        return torch.tensor([number, os.getpid()])


class Drawn(Dataset[Any]):
    """Samples that are drawn at random, by all three libraries."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> torch.Tensor:
        drawn = [random.random(), numpy.random.rand(), torch.rand(()).item()]
        return torch.tensor([number, *drawn], dtype=torch.float64)


def numbers(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].tolist()


def makers(batch: torch.Tensor) -> set[int]:
    return set(batch[:, 1].tolist())


def fetcher_of(dataset: Any, **options: Any) -> Fetcher:
    return Fetcher(dataset, FetchOptions(**options))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_batches_come_in_the_order_of_the_lists(num_workers: int) -> None:
    fetcher = fetcher_of(Numbers(), num_workers=num_workers)
    try:
        fetching = fetcher.fetch(LISTS)
        batches = []
        for indices in LISTS:
            assert fetching.next_indices == indices
            batches.append(next(fetching))
        assert fetching.next_indices is None and next(fetching, None) is None
        assert [numbers(batch) for batch in batches] == LISTS
        made_by = set.union(*map(makers, batches))
        assert len(made_by) == max(num_workers, 1)
        assert (os.getpid() in made_by) == (num_workers == 0)
    finally:
        fetcher.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cut_drops_what_was_fetched_and_the_same_processes_go_on(num_workers: int) -> None:
    fetcher = fetcher_of(Numbers(), num_workers=num_workers, prefetch_factor=num_workers or None)
    try:
        asked = []

        def lists() -> Any:
            for indices in LISTS:
                asked.append(indices)
                yield indices

        former = fetcher.fetch(lists())
        made_by = makers(next(former))
        # Four lists are fetched ahead by two processes; without one, none is.
        assert asked == (LISTS if num_workers else LISTS[:1])
        later = fetcher.fetch([[7], [8, 9], [10]])
        assert former.next_indices is None and next(former, None) is None
        batches = list(later)
        assert [numbers(batch) for batch in batches] == [[7], [8, 9], [10]]
        assert made_by <= set.union(*map(makers, batches))
    finally:
        fetcher.close()


def test_as_many_batches_are_made_ahead_as_was_asked_for() -> None:
    fetcher, asked = fetcher_of(Numbers(), num_workers=1, prefetch_factor=1), []
    try:
        next(fetcher.fetch(asked.append(indices) or indices for indices in LISTS))  # type: ignore[func-returns-value]
        assert asked == LISTS[:2], "the one that was taken, and one ahead"
    finally:
        fetcher.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_pinned_where_that_was_asked_for(num_workers: int) -> None:
    for pins in (False, True):
        fetcher = fetcher_of(Numbers(), num_workers=num_workers, pin_memory=pins)
        loader = fetcher._made()  # torch's, which pins where there is a GPU.
        assert loader.pin_memory is pins


def test_a_sample_that_fails_is_reported_and_the_next_list_goes_on() -> None:
    for num_workers in (0, 2):
        fetcher = fetcher_of(Numbers(), num_workers=num_workers)
        try:
            fetching = fetcher.fetch([[1], [12, 13], [2]])
            assert numbers(next(fetching)) == [1]
            with pytest.raises(LookupError, match="sample 13 cannot be read"):
                next(fetching)
            assert fetching.next_indices == [2]
            assert numbers(next(fetching)) == [2]
        finally:
            fetcher.close()


def test_loader_processes_are_seeded_as_torch_seeds_them_and_ours_is_not_touched() -> None:
    generator = torch.Generator()
    generator.manual_seed(5)
    theirs = DataLoader(
        Drawn(),
        batch_sampler=LISTS,
        num_workers=2,
        generator=generator,
        multiprocessing_context="fork",
    )
    expected = list(theirs)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    fetcher = fetcher_of(Drawn(), num_workers=2)
    try:
        drawn = list(fetcher.fetch(LISTS, seed=5))
    finally:
        fetcher.close()
    assert all(torch.equal(one, other) for one, other in zip(drawn, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]


def test_close_ends_the_processes_and_a_later_fetch_starts_others() -> None:
    fetcher = fetcher_of(Numbers(), num_workers=1)
    try:
        (first,) = makers(next(fetcher.fetch(LISTS)))
        fetcher.close()
        assert not Path(f"/proc/{first}").exists()
        (second,) = makers(next(fetcher.fetch(LISTS)))
        assert second != first
    finally:
        fetcher.close()


def test_a_connection_that_a_rank_closes_is_closed_though_loader_processes_were_forked() -> None:
    ours, theirs = socket.socketpair()
    fetcher = fetcher_of(Numbers(), num_workers=2)
    try:
        next(fetcher.fetch([[1], [2], [3]]))
        ours.close()
        theirs.settimeout(10)
        assert theirs.recv(1) == b"", "a loader process keeps the other end open"
    finally:
        fetcher.close()
        theirs.close()


class Heavy(Dataset[Any]):
    """Samples that fill the pipe to the rank, so that a loader process waits in writing."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> str:
        return "x" * 300_000


def hold_batches() -> None:
    """A rank's process, which takes one batch and then waits."""
    fetcher = fetcher_of(Heavy(), num_workers=2, collate_fn=list)
    fetching = fetcher.fetch([number] for number in range(1000))
    next(fetching)
    loader = fetcher._loader
    assert loader is not None
    print(*[worker.pid for worker in loader._iterator._workers], flush=True)  # type: ignore[union-attr]
    threading.Event().wait()


def check_loader_processes_end_with(holds: Callable[[], None]) -> None:
    """Kill a process that `holds` has told of its loader processes."""
    name = holds.__name__
    program = f"from {holds.__module__} import {name}; {name}()"
    rank = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        time.sleep(0.5)  # The pipe is full by now.
    finally:
        rank.kill()
        rank.wait()
    give_up_at = time.monotonic() + 20
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    assert not left


def test_loader_processes_end_with_a_rank_that_is_killed_also_while_they_write() -> None:
    check_loader_processes_end_with(hold_batches)


def runs(pid: int) -> bool:
    """Whether a process is there, and is not the corpse of one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Held(Dataset[Any]):
    """A dataset that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> int:
        with self.lock:
            return number


def test_what_cannot_be_pickled_works_in_forks_and_is_named_where_it_is_sent() -> None:
    forks = fetcher_of(Held(), num_workers=1)
    try:
        assert [batch.tolist() for batch in forks.fetch([[1], [2, 0]])] == [[1], [2, 0]]
    finally:
        forks.close()
    sent = fetcher_of(Held(), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(TypeError) as raised:
        sent.fetch([[1]])
    for text in ("the dataset (Held)", "'spawn'", "Leave multiprocessing_context out"):
        assert text in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_processes_that_are_no_forks_get_local_classes_and_map_files_again(
    context: str, tmp_path: Path
) -> None:
    numpy.save(tmp_path / "rows.npy", numpy.arange(40, dtype=numpy.float32).reshape(20, 2))

    class Rows(Dataset[Any]):
        def __init__(self) -> None:
            self.rows = numpy.load(tmp_path / "rows.npy", mmap_mode="r")
            self.offsets = torch.full((2,), 0.5)

        def __len__(self) -> int:
            return 20

        def __getitem__(self, number: int) -> torch.Tensor:
            assert isinstance(self.rows, numpy.memmap), "it was copied"
            return torch.tensor(self.rows[number]) + self.offsets

    fetcher = fetcher_of(
        Rows(), num_workers=1, multiprocessing_context=context, collate_fn=lambda rows: rows
    )
    try:
        batches = list(fetcher.fetch([[1, 2], [19]]))
    finally:
        fetcher.close()
    assert [[row.tolist() for row in batch] for batch in batches] == [
        [[2.5, 3.5], [4.5, 5.5]],
        [[38.5, 39.5]],
    ]


@pytest.mark.slow  # torch looks every 5 s.
def test_a_loader_process_that_is_killed_is_reported_with_the_mend() -> None:
    fetcher = fetcher_of(Heavy(), num_workers=1, collate_fn=list, prefetch_factor=1)
    try:
        fetching = fetcher.fetch([number] for number in range(1000))
        next(fetching)
        loader = fetcher._loader
        assert loader is not None
        os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match=r"a loader process of this rank has ended.*fewer"):
            for _ in range(10):
                next(fetching)
    finally:
        fetcher.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_workers": -1}, "num_workers must be at least 0, got -1"),
        ({"prefetch_factor": 2}, "prefetch_factor needs num_workers of at least 1"),
        ({"persistent_workers": True}, "persistent_workers needs num_workers of at least 1"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor must be at least 1, got 0"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, "must be one of 'fork'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FetchOptions(**options)
