"""Tensors that ranks read in place: the same bits as through the slots, whoever has one, and
nothing of them left; in real processes."""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from chorusline.collectives.contract.errors import CollectiveTimeout, PeerLost
from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from chorusline.collectives.shared_memory.algorithms import SLOT_BYTES
from chorusline.collectives.shared_memory.in_place import IN_PLACE_BYTES, Sharing
from chorusline.collectives.shared_memory.layout import make_memory
from chorusline.collectives.shared_memory.segment import SharedSegment
from chorusline.collectives.shared_memory.symmetric_memory import NOWHERE, make_symmetric, place_of
from chorusline.collectives.shared_memory.work_queue import Body
from chorusline.runtime.data_parallel.distributed_data_parallel import DistributedDataParallel
from tests.harness.combinations import combinations
from tests.harness.ranks import GLOO, Rank, Ranks, error_of, run_ranks
from tests.harness.reused_ranks import ReusedRanks

NUMEL = IN_PLACE_BYTES // 4 + 33
"""Elements of float32, which no number of ranks divides evenly and which are read in place."""

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int16]


@pytest.fixture(scope="module")
def reused_ranks() -> Iterator[Callable[[int], ReusedRanks]]:
    started: dict[int, ReusedRanks] = {}
    yield lambda size: started.setdefault(size, ReusedRanks(size))
    for ranks in started.values():
        ranks.stop()


def share_in_place(group: Group) -> Sharing:
    """Read in place, also with more ranks than cores."""
    sharing: Sharing = group._communicator._sharing  # type: ignore[attr-defined]
    sharing.pays = True
    return sharing


def filled(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """`tensor`, with numbers of which each rank has others."""
    numbers = torch.Generator().manual_seed(rank)
    if tensor.is_floating_point():
        return tensor.copy_(torch.randn(tensor.shape, generator=numbers))
    return tensor.copy_(torch.randint(-9, 9, tensor.shape, generator=numbers))


def results(group: Group, dtype: torch.dtype, symmetric_on: list[int], inset: int) -> list[str]:
    """The digests of what all operations give. inset: elements before each tensor in its memory."""
    share_in_place(group)

    def new(numel: int) -> torch.Tensor:
        if group.rank in symmetric_on:
            return group.empty_symmetric(numel + inset, dtype)[inset:]
        return torch.empty(numel + inset, dtype=dtype)[inset:]

    found: list[torch.Tensor] = []
    rank, numel = group.rank, NUMEL * 4 // dtype.itemsize
    n = -(-numel // group.size)
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        tensor = filled(new(numel), rank)
        group.all_reduce(tensor, op).wait()
        whole, part = filled(new(n * group.size), rank), new(n)
        group.reduce_scatter(part, whole, op).wait()
        group.all_gather(whole, part).wait()
        found += [tensor, whole]
    whole = filled(new(n * group.size), rank)
    own = whole[rank * n : (rank + 1) * n]
    group.all_gather(whole, own).wait()  # In place in the other sense: a part of the output.
    found.append(whole.clone())
    group.reduce_scatter(own, filled(whole, rank)).wait()
    group.all_gather(new(n * group.size), own).wait()
    found.append(whole)
    return [hashlib.sha256(t.view(torch.uint8).numpy()).hexdigest() for t in found]


@combinations(3, size=[1, 2, 3, 4], dtype=DTYPES)
def test_bits_are_those_of_ordinary_tensors(
    size: int, dtype: torch.dtype, reused_ranks: Callable[[int], ReusedRanks]
) -> None:
    ranks = reused_ranks(size)
    ordinary = ranks.run(results, dtype, [], 0)
    assert ranks.run(results, dtype, [*range(size)], 0) == ordinary
    if dtype is torch.float32:
        assert ranks.run(results, dtype, [*range(size)], 3) == ordinary, "views of larger memory"
        for some in ([0], [size - 1], [*range(1, size)]):
            assert ranks.run(results, dtype, some, 1) == ordinary, f"only ranks {some}"


def read_in_place(group: Group) -> tuple[int, int]:
    """How many files this rank has mapped, before it has used a symmetric tensor and after that."""
    sharing = share_in_place(group)
    before = len(sharing._known)
    tensor = group.empty_symmetric(NUMEL).fill_(1)
    for _ in range(3):
        group.all_reduce(tensor).wait()
    assert tensor[-1] == group.size**3
    return before, len(sharing._known)


def test_symmetric_tensors_are_read_in_place_and_mapped_once(
    reused_ranks: Callable[[int], ReusedRanks],
) -> None:
    # Otherwise every test of this file would pass with ordinary tensors.
    for before, after in reused_ranks(3).run(read_in_place):
        assert after == before + 1


def train_a_step(group: Group) -> tuple[bool, int]:
    """Whether the gradients lie where others can map them, and how often that was done."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1100, 1100), group)
    sharing = share_in_place(group)
    before = len(sharing._known)
    model(torch.full((2, 1100), group.rank + 1.0)).square().mean().backward()
    gradient = model.module.weight.grad
    assert gradient is not None and gradient.nbytes > IN_PLACE_BYTES
    return place_of(gradient) != NOWHERE, len(sharing._known) - before


def test_buckets_of_gradients_are_read_in_place(reused_ranks: Callable[[int], ReusedRanks]) -> None:
    assert reused_ranks(2).run(train_a_step) == [(True, 1)] * 2


def many_tensors(group: Group) -> int:
    """How much of this process's shared memory is resident after tensors have come and gone."""
    for value in range(40):
        tensor = group.empty_symmetric(1 << 20).fill_(value)
        group.all_reduce(tensor).wait()
        assert tensor[-1] == value * group.size
    del tensor
    gc.collect()
    group.barrier().wait()
    lines = Path("/proc/self/status").read_text().splitlines()
    (resident,) = [line for line in lines if line.startswith("RssShmem:")]
    return int(resident.split()[1]) >> 10


def test_memory_of_a_tensor_goes_with_it_although_others_have_mapped_it(
    reused_ranks: Callable[[int], ReusedRanks],
) -> None:
    # 40 tensors of 4 MiB; a peer keeps the mappings, without their pages.
    assert max(reused_ranks(2).run(many_tensors)) < 40


def open_files() -> int:
    gc.collect()  # Other tests leave cycles, which may end at any time.
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_tensor_of_symmetric_memory_is_a_tensor_like_others() -> None:
    before = open_files()
    tensor = make_symmetric(1000, torch.float32)
    assert tensor.eq(0).all(), "memory of the kernel's"
    view = torch.nn.Parameter(tensor[10:20].view(2, 5).t())
    place = place_of(view)
    assert place.inode == place_of(tensor).inode != 0
    assert place.offset == 40
    assert place_of(tensor.clone()) == place_of(torch.zeros(3)) == NOWHERE
    del tensor
    assert open_files() == before + 1, "a view keeps the memory"
    del view
    assert open_files() == before
    assert make_symmetric(0, torch.float32).numel() == 0


def test_memory_that_has_moved_is_not_read_where_it_was() -> None:
    tensor = make_symmetric(1000, torch.float32).fill_(3)
    tensor.share_memory_()  # As torch.multiprocessing does with each tensor that it sends.
    assert place_of(tensor) == NOWHERE
    assert tensor.eq(3).all()


def test_a_fork_does_not_take_the_memory_away() -> None:
    tensor = make_symmetric(1000, torch.float32).fill_(7)
    child = os.fork()
    if not child:
        is_nowhere = place_of(tensor) == NOWHERE
        del tensor
        gc.collect()
        os._exit(0 if is_nowhere else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.eq(7).all()


def allowed_no_memory(rank: Rank) -> list[bool]:
    """Rank 1 may not make large files, and later not open another one."""
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with rank.group() as group:
        sharing = share_in_place(group)
        tensor = group.empty_symmetric(NUMEL).fill_(1)
        was_symmetric = place_of(tensor) != NOWHERE
        if rank.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        group.all_reduce(tensor).wait()
        assert tensor.eq(group.size).all()
        tensor = group.empty_symmetric(NUMEL).fill_(1)
        if rank.rank == 1:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            os.close(unused := os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (unused, limit[1]))
        for turn in range(3):
            group.all_reduce(tensor).wait()
            assert tensor.eq(group.size ** (turn + 1)).all()
        if rank.rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        return [was_symmetric, [*sharing._known.values()] == [False]]


def test_ranks_go_through_the_slots_where_one_may_not_share(tmp_path: Path) -> None:
    told = run_ranks(allowed_no_memory, 3, tmp_path)
    assert told == [[True, True], [False, True], [True, True]]


def ordinary_over_gloo(rank: Rank) -> bool:
    with rank.group() as group:
        tensor = group.empty_symmetric(NUMEL).fill_(1)
        group.all_reduce(tensor).wait()
        assert tensor.eq(group.size).all()
        return place_of(tensor) == NOWHERE


def test_between_hosts_the_tensors_are_ordinary(tmp_path: Path) -> None:
    assert run_ranks(ordinary_over_gloo, 2, tmp_path, GLOO) == [True, True]


ROUNDS = 500


def goes_on_after_a_death(rank: Rank) -> str:
    """All ranks reduce until one dies; those that are left go on with the same tensors."""
    own = torch.full((NUMEL,), float(rank.rank + 1))
    tensor = None
    with rank.group(timeout_s=20) as group:
        share_in_place(group)
        tensor = group.empty_symmetric(NUMEL)

        def until_it_dies() -> None:
            for turn in range(ROUNDS):
                tensor.copy_(own)
                group.all_reduce(tensor).wait()
                assert tensor.eq(6).all(), turn
                if turn == 2:
                    rank.say("runs")

        error = error_of(until_it_dies, PeerLost)
        assert error is not None
        assert [*error.ranks] == [1]
    left = 0 if rank.rank == 0 else 1
    with Group.create(rank.store, left, 2, generation=1, timeout_s=20) as group:
        for _ in range(20):
            tensor.copy_(own)
            group.all_reduce(tensor).wait()
            assert tensor.eq(4).all()
        return hashlib.sha256(tensor.numpy()).hexdigest()


@pytest.mark.parametrize("delay_s", [0.0, 0.0103, 0.0217])
def test_a_rank_is_killed_while_tensors_are_read_in_place(tmp_path: Path, delay_s: float) -> None:
    with Ranks(goes_on_after_a_death, 3, tmp_path) as ranks:
        ranks.wait_for("runs")
        time.sleep(delay_s)
        ranks.signal(1, signal.SIGKILL)
        assert len({*ranks.results(ranks=[0, 2])}) == 1


def two_segments() -> list[SharedSegment]:
    """Of two ranks in this process, who have met."""
    descriptor = make_memory(2, SLOT_BYTES)
    pids = [os.getpid()] * 2
    both = [SharedSegment(os.dup(descriptor), pids, rank, 0, SLOT_BYTES) for rank in range(2)]
    os.close(descriptor)
    other = threading.Thread(target=both[1].meet, args=(10.0, lambda: None))
    other.start()
    both[0].meet(10.0, lambda: None)
    other.join()
    return both


def test_what_was_read_from_a_rank_that_gave_up_is_not_believed() -> None:
    """Rank 0 gives an operation up and writes to its tensor, while rank 1 still reads it."""
    segments = two_segments()
    tensors = [make_symmetric(NUMEL, torch.float32).fill_(rank) for rank in range(2)]
    outputs = [torch.empty(2 * NUMEL) for _ in range(2)]

    def no_other_way(tick: int) -> Body:
        raise AssertionError("through the slots")

    def bodies() -> list[Body]:
        return [
            sharing.choose(tick, tensor, no_other_way, partial(sharing.all_gather, output))
            for sharing, tensor, output in zip(sharings, tensors, outputs, strict=True)
        ]

    sharings = [Sharing(segment) for segment in segments]
    tick = 2
    gives_up, reads = bodies()
    for _ in range(3):  # Where they lie; that both have mapped it; that both have read it.
        assert {next(gives_up), next(reads)} == {tick}
        tick += 1
    assert [*gives_up, *reads] == []
    assert outputs[1].view(2, -1)[:, 0].tolist() == [0, 1]

    gives_up, reads = bodies()
    assert {next(gives_up), next(reads)} == {tick}
    assert next(gives_up) == tick + 1
    segments[0].abort(CollectiveTimeout("all_gather", 0, [1], 1.0, "in a test"))
    tensors[0].fill_(1e9)
    with pytest.raises(CollectiveTimeout):
        next(reads)
    for segment in segments:
        segment.leave()
