"""Random programs on groups, by seed, against numpy (harness/random_programs.py).

CHORUSLINE_SEEDS=5000 runs that many; CHORUSLINE_SEEDS=17:18 runs those of one range.
"""

import os
import threading
import time

import pytest
import torch

from tests.harness import random_programs
from tests.harness.ranks import GLOO
from tests.harness.reused_ranks import ReusedRanks, another_group

SIZES = (2, 3, 4)


def asked(default):
    given = os.environ.get("CHORUSLINE_SEEDS", default)
    first, _, last = given.rpartition(":")
    return int(first or 0), int(last)


def run_all(first, last, ranks_of_size):
    for size, seeds in random_programs.spread(first, last, SIZES).items():
        for part in random_programs.parts(seeds, 100):
            steps = ranks_of_size(size).run(random_programs.run, part)
            assert all(steps)


def test_random_programs_give_what_numpy_gives(ranks_of):
    run_all(*asked("200"), ranks_of)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_five_thousand_random_programs_give_what_numpy_gives(ranks_of):
    run_all(*asked("5000"), ranks_of)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", SIZES)
def test_random_programs_give_what_numpy_gives_between_hosts(size):
    ranks = ReusedRanks(size, GLOO)
    try:
        for part in random_programs.parts(random_programs.spread(0, 300, SIZES)[size], 25):
            ranks.run(random_programs.run, part)
    finally:
        ranks.stop()


def test_a_program_is_a_function_of_its_seed():
    assert [random_programs.program(seed, 3) for seed in range(20)] == [
        random_programs.program(seed, 3) for seed in range(20)
    ]


def behind_another(group):
    """Rank 1 issues an operation behind one that has only to end, and waits elsewhere."""
    ours, other = another_group(group, timeout_s=5), another_group(group, timeout_s=5)
    if group.rank == 0:
        time.sleep(0.2)
        first, second = ours.barrier(), ours.barrier()
        second.wait()
        other.barrier().wait()
    else:
        first, second = ours.barrier(), ours.barrier()
        other.barrier().wait()
        second.wait()
    first.wait()
    group.barrier().wait()
    ours.close()
    other.close()


def test_an_operation_behind_another_goes_on_while_its_rank_waits_in_another_group(ranks_of):
    """Seed 1134: it was taken for one that no rank waits for, and ran to the deadline."""
    ranks_of(2).run(behind_another)


def beside_a_block(group):
    """A message that another thread issues while a coalesced block is open."""
    sent = torch.full((3,), float(group.rank))
    place = torch.empty(3)
    works = []

    def message():
        other = 1 - group.rank
        works.extend([group.send(sent, other, 5), group.recv(place, other, 5)])
        for work in works:
            work.wait()

    total = torch.ones(2)
    with group.coalesce() as work:
        group.all_reduce(total)
        thread = threading.Thread(target=message)
        thread.start()
        thread.join()
    work.wait()
    assert place.tolist() == [1.0 - group.rank] * 3
    assert total.tolist() == [2.0, 2.0]


def test_a_message_of_another_thread_is_not_in_a_coalesced_block(ranks_of):
    """Seed 379: its work could not be waited for before the block's end."""
    ranks_of(2).run(beside_a_block)
