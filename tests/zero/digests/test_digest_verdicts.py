"""Which copies are wrong, by their digests: all cases for up to four copies."""

import itertools

import pytest
import torch

from chorusline.runtime.zero.digests.digest_verdicts import (
    Copy,
    CopyState,
    Digests,
    Kept,
    judge,
    judge_all,
)
from chorusline.runtime.zero.digests.digests import as_votes, digest
from chorusline.runtime.zero.digests.state_digests import runs

RIGHT = 7


def all_cases(num_copies):
    one = list(itertools.product((RIGHT, 8, 9), CopyState))
    for case in itertools.product(one, repeat=num_copies):
        yield [Copy(rank, *copy) for rank, copy in enumerate(case)]


@pytest.mark.parametrize("num_copies", [1, 2, 3, 4])
def test_a_verdict_names_only_copies_that_differ_from_their_source(num_copies):
    for copies in all_cases(num_copies):
        verdict = judge(copies)
        digests = {copy.rank: copy.digest for copy in copies}
        for rank, source in verdict.sources.items():
            assert digests[rank] != digests[source]
        # After the copies all are equal.
        healed = {digests[verdict.sources.get(rank, rank)] for rank in digests}
        if not verdict.undecided:
            assert len(healed) == 1
        assert not (verdict.sources and verdict.undecided)
        if len(set(digests.values())) > 1:
            assert not verdict.is_fine


@pytest.mark.parametrize("num_copies", [2, 3, 4])
def test_memory_that_changed_on_all_ranks_but_one_is_healed_from_that_one(num_copies):
    """Of copies that were written equal, each may have changed at rest, and one has not."""
    for copies in all_cases(num_copies):
        at_rest = all((copy.digest == RIGHT) == (copy.rest is CopyState.STEADY) for copy in copies)
        if not at_rest or not any(copy.rest is CopyState.STEADY for copy in copies):
            continue
        if any(copy.rest is CopyState.UNKNOWN for copy in copies):
            continue
        source = min(copy.rank for copy in copies if copy.digest == RIGHT)
        wrong = {copy.rank: source for copy in copies if copy.digest != RIGHT}
        assert judge(copies).sources == wrong


@pytest.mark.parametrize("rest", CopyState)
def test_two_copies_of_which_both_or_none_was_written_so_are_undecided(rest):
    assert judge([Copy(0, 7, rest), Copy(1, 8, rest)]).undecided == (0, 1)


@pytest.mark.parametrize("rest", CopyState)
def test_more_than_half_decide_where_rest_does_not(rest):
    copies = [Copy(0, 8, rest), Copy(1, 7, rest), Copy(2, 7, rest)]
    assert judge(copies).sources == {0: 1}
    assert judge([*copies, Copy(3, 8, rest)]).undecided == (0, 1, 2, 3)


def test_a_lone_copy_that_changed_is_wrong_without_a_source():
    assert judge([Copy(2, 7, CopyState.CHANGED)]).undecided == (2,)
    assert judge([Copy(2, 7, CopyState.STEADY)]).is_fine and judge([Copy(2, 7)]).is_fine


def on_ranks(parameters, written, replicas=2):
    kept = [
        [Kept(5, CopyState.STEADY, 6, written[(r - d) % 3]) for d in range(replicas)]
        for r in range(3)
    ]
    return [Digests(one, tuple(kept[rank])) for rank, one in enumerate(parameters)]


def test_parameters_are_right_if_they_are_what_the_owners_have_written():
    assert judge_all(on_ranks([60, 60, 60], [10, 20, 30])).are_fine
    # Here the majority is wrong, and the owners' sum says so.
    assert judge_all(on_ranks([61, 61, 60], [10, 20, 30])).parameters.sources == {0: 2, 1: 2}
    assert judge_all(on_ranks([61, 62, 60], [10, 20, 30])).parameters.sources == {0: 2, 1: 2}
    # A program has changed them on all ranks.
    assert judge_all(on_ranks([99, 99, 99], [10, 20, 30])).are_fine
    assert judge_all(on_ranks([98, 99, 97], [10, 20, 30])).parameters.undecided == (0, 1, 2)
    assert judge_all(on_ranks([1, 2, 3], [None] * 3)).are_fine


def test_votes_carry_64_bits():
    numbers = torch.tensor([-1, 1, -(2**63), CopyState.CHANGED, 2**63 - 1, 2**62 + 1])
    read = Digests.read(as_votes(numbers).tolist())
    assert read == Digests(2**64 - 1, (Kept(2**63, CopyState.CHANGED, 2**63 - 1, 2**62 + 1),))
    assert 2 * len(numbers) == Digests.numel(1)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 3, 8, 65])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_each_single_flip_changes_a_digest(dtype, numel, offset):
    room = torch.randn(numel + offset, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    tensor = room[offset:]
    before = digest(tensor)
    octets = tensor.view(torch.uint8)
    for at in range(octets.numel()):
        for bit in range(8):
            octets[at] ^= 1 << bit
            assert digest(tensor) != before
            octets[at] ^= 1 << bit
    assert digest(tensor) == before


def test_signs_of_zero_and_payloads_of_nan_count():
    zero, nan = torch.zeros(4), torch.full((4,), float("nan"))
    for tensor in (zero, nan):
        other = tensor.clone()
        other.view(torch.int32)[2] ^= -(2**31)
        assert digest(other) != digest(tensor)


def test_any_memory_format_is_read():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert digest(image) == digest(image.permute(0, 2, 3, 1))  # As it lies in memory …
    sliced = torch.randn(6, 6)[:, 1:3]
    assert digest(sliced) == digest(sliced.clone())  # … and gaps are not read.


def test_tensors_side_by_side_in_one_memory_are_read_as_one():
    torch.manual_seed(0)
    memory, other = torch.randn(40), torch.randn(8)
    first, second, third = memory[:8], memory[8:12].view(2, 2), memory[12:16]
    odd, behind = memory[20:23], memory[23:29]
    tensors = [first, second, third, other, memory[16:20], odd, behind, memory.t()[30:40:2]]
    found = list(runs(tensors))
    assert [one.numel() for one in found] == [16, 8, 4, 3, 6, 5]
    assert sum(map(digest, found)) == sum(map(digest, tensors))


def test_neighbours_by_chance_are_read_one_by_one():
    memory = torch.randn(16)
    first = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=8)
    second = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=8, offset=32)
    assert first.data_ptr() + first.nbytes == second.data_ptr()
    assert [one.numel() for one in runs([first, second])] == [8, 8]
