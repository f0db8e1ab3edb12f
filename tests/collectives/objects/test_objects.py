"""Objects that do not arrive: what the ranks are told. What does arrive: contracts/group.py."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    PayloadUnreadable,
    PeerLost,
)
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object, broadcast_object
from chorusline.collectives.objects.payloads import GpusTo, loads, pickled, words_of
from tests.harness.gpus import OnGpu5
from tests.harness.ranks import GLOO, SHARED_MEMORY, Rank, Ranks, error_of, run_ranks, transports
from tests.references.script_values import Mode, Options, Point


class Touchy:
    """Cannot be unpickled on rank `refuses`."""

    here = -1

    def __init__(self, refuses: int) -> None:
        self.refuses = refuses

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__.update(state)
        if self.refuses == Touchy.here:
            raise ValueError(f"not on rank {self.refuses}")


def send_the_unreadable(rank: Rank) -> list[Any]:
    Touchy.here = rank.rank
    group = rank.group()
    works = [
        lambda: group.broadcast_object_list([Touchy(1)], root=0),
        lambda: group.all_gather_object(Touchy(2)),
        lambda: group.gather_object(Touchy(0), root=2),
        lambda: group.scatter_object_list([Touchy(0)] * 3, root=1),
    ]
    errors = [error_of(lambda issue=issue: issue().wait()) for issue in works]
    assert group.all_gather_object(rank.rank).wait() == [0, 1, 2]
    assert all_gather_object(group, "also the other way") == ["also the other way"] * 3
    return errors


@transports
def test_a_payload_that_cannot_be_read_is_told_to_all_and_the_group_goes_on(
    transport: str, tmp_path: Path
) -> None:
    for broadcast, gathered, fine, scattered in run_ranks(
        send_the_unreadable, 3, tmp_path, transport
    ):
        assert isinstance(broadcast, PayloadUnreadable)
        assert broadcast.ranks == [1]
        assert "rank 1 cannot unpickle what rank 0 sent: ValueError: not on" in str(broadcast)
        assert "in __setstate__" in broadcast.traceback
        assert gathered.ranks == [2]
        assert fine is None
        assert scattered.ranks == [0]
        assert "what rank 1 sent" in str(scattered)


def send_the_unreadable_to_one(rank: Rank) -> Any:
    Touchy.here = rank.rank
    group = rank.group()
    if rank.rank == 0:
        for value in (Touchy(1), "fine"):
            group.send_object_list([value], 1).wait()
        error = None
    else:
        into: list[Any] = ["as it was"]
        error = error_of(lambda: group.recv_object_list(into).wait())
        assert into == ["as it was"]
        group.recv_object_list(into, 0).wait()
        assert into == ["fine"]
    group.barrier().wait()
    return error


@transports
def test_objects_that_only_the_receiver_cannot_read_end_nothing(
    transport: str, tmp_path: Path
) -> None:
    _, error = run_ranks(send_the_unreadable_to_one, 2, tmp_path, transport)
    assert isinstance(error, PayloadUnreadable)
    assert error.ranks == [1]
    assert "recv_object_list from rank 0 (1 objects)" in str(error)
    assert "rank 1 cannot unpickle what rank 0 sent: ValueError: not on rank 1" in str(error)
    assert "in __setstate__" in error.traceback


def take_too_few(rank: Rank) -> Any:
    group = rank.group()
    if rank.rank == 0:
        group.send_object_list([1, 2, 3], 1)
        return error_of(lambda: group.barrier().wait())
    return error_of(lambda: group.recv_object_list([None] * 2, 0).wait())


@transports
def test_a_list_of_another_length_is_a_mismatch_with_both_numbers(
    transport: str, tmp_path: Path
) -> None:
    for error in run_ranks(take_too_few, 2, tmp_path, transport):
        assert isinstance(error, CollectiveMismatch)
        assert error.ranks == [0, 1]
        assert "rank 0 sent 3 objects and rank 1 expects 2" in str(error)


def wait_for_nothing(rank: Rank) -> Any:
    group = rank.group()
    error = None
    if rank.rank == 0:
        error = error_of(lambda: group.recv_object_list([None], timeout_s=0.4).wait())
        state = group.flight_recorder.collectives[-1]
        assert (state.state.value, state.file) == ("failed", __file__)
        rank.say("over")
    rank.store.wait(["said/over/0"], 30)
    return error


@transports
def test_objects_that_nobody_sends_are_a_timeout_of_what_was_called(
    transport: str, tmp_path: Path
) -> None:
    error, *_ = run_ranks(wait_for_nothing, 3, tmp_path, transport)
    assert isinstance(error, CollectiveTimeout)
    assert error.ranks == [1, 2]
    assert error.operation == "recv_object_list from any rank (1 objects)"


def gather_and_scatter_much(rank: Rank) -> Any:
    group = rank.group()
    group.gather_object(bytes(80_000), root=1).wait()
    group.scatter_object_list([bytes(80_000)] * 3 if rank.rank == 1 else None, root=1).wait()
    assert group._channel is not None and group._channel._group is not None
    return group._channel._group.statistics.elements_sent


def test_objects_for_one_rank_are_sent_to_that_one_only(tmp_path: Path) -> None:
    for rank, sent in enumerate(run_ranks(gather_and_scatter_much, 3, tmp_path)):
        gathered, scattered = sent["gather"], sent["scatter"]
        assert (gathered == 0) if rank == 1 else (10_000 <= gathered < 10_100)
        assert (20_000 <= scattered < 20_100) if rank == 1 else scattered == 0


def disagree(rank: Rank) -> Any:
    group = rank.group()
    if rank.rank == 1:
        return error_of(lambda: group.gather_object(1, root=1).wait())
    return error_of(lambda: group.broadcast_object_list([1, 2], root=0).wait())


@transports
def test_ranks_in_different_object_collectives_are_told_both_sides(
    transport: str, tmp_path: Path
) -> None:
    theirs = disagree.__code__.co_firstlineno + 3
    for error in run_ranks(disagree, 3, tmp_path, transport):
        assert isinstance(error, CollectiveMismatch)
        assert error.ranks == [1]
        usual = "ranks [0, 2] issued broadcast_object_list of 2 objects with root 0"
        assert f"{usual} at test_objects.py:{theirs + 1}" in str(error)
        assert f"rank 1 issued gather_object with root 1 at test_objects.py:{theirs}" in str(error)


def cancel_an_object(rank: Rank) -> Any:
    """Rank 0's task is cancelled while it awaits an object; 1 waits for a tensor, 2 for both."""
    group = rank.group()
    group.all_gather_object("connected").wait()
    if rank.rank == 0:

        async def main() -> None:
            async with asyncio.timeout(0.2):
                await group.all_gather_object("x")

        with pytest.raises(TimeoutError):
            asyncio.run(main())
        return error_of(lambda: group.barrier().wait())
    if rank.rank == 1:
        return error_of(lambda: group.barrier().wait())
    return error_of(lambda: group.all_gather_object("x").wait())


@transports
def test_cancelling_who_awaits_an_object_ends_the_generation(
    transport: str, tmp_path: Path
) -> None:
    for error in run_ranks(cancel_an_object, 3, tmp_path, transport):
        assert isinstance(error, GroupAborted)
        assert error.ranks == [0]
        assert "the task that awaited all_gather_object #1 was cancelled" in str(error)


def wait_for_the_dead(rank: Rank, is_connected: bool) -> Any:
    group = rank.group()
    group.barrier().wait()
    if is_connected:
        group.all_gather_object("connected").wait()
    rank.say("ready")
    if rank.rank == 1:
        time.sleep(60)
    return error_of(lambda: group.all_gather_object("x").wait())


@pytest.mark.parametrize(("transport", "is_connected"), [(SHARED_MEMORY, True), (GLOO, False)])
def test_a_rank_that_dies_is_named_by_those_who_wait_for_its_object(
    transport: str, is_connected: bool, tmp_path: Path
) -> None:
    with Ranks(wait_for_the_dead, 3, tmp_path, transport, is_connected) as ranks:
        ranks.wait_for("ready")
        ranks.signal(1, signal.SIGKILL)
        for error in ranks.results(ranks=[0, 2], timeout_s=20):
            assert isinstance(error, PeerLost)
            assert error.ranks == [1]
            assert "all_gather_object #0" in str(error) or is_connected


def map_what_comes(group: Group) -> list[str]:
    """Where the tensors are that this rank is given."""
    tensor = torch.ones(3)
    copied = [tensor]
    group.broadcast_object_list(copied, root=0, map_location="meta").wait()
    gathered = group.gather_object(tensor, root=1, map_location="meta").wait() or []
    scattered = [tensor, tensor] if group.rank == 0 else None
    dealt = group.scatter_object_list(scattered, root=0, map_location="meta").wait()
    received: list[Any] = []
    if group.rank == 0:
        group.send_object_list([tensor], 1).wait()
    else:
        received = [None]
        group.recv_object_list(received, 0, map_location="meta").wait()
    return [str(one.device) for one in (*copied, *gathered, dealt, *received)]


def test_every_operation_on_objects_takes_map_location(ranks_of: Any) -> None:
    assert ranks_of(2).run(map_what_comes) == [["cpu", "meta"], ["meta"] * 5]


# -- one rank ------------------------------------------------------------------------------------


def test_tensors_inside_go_where_map_location_says(alone: Group) -> None:
    value = {"deep": [torch.arange(3)], "p": torch.nn.Parameter(torch.ones(2))}
    (plain,) = alone.all_gather_object(value).wait()
    assert plain["deep"][0].tolist() == [0, 1, 2]
    (mapped,) = alone.all_gather_object(value, map_location="meta").wait()
    assert mapped["deep"][0].device.type == "meta"
    seen: list[str] = []

    def where(storage: Any, location: str) -> Any:
        seen.append(location)
        return storage

    alone.scatter_object_list([value], map_location=where).wait()
    assert seen == ["cpu", "cpu"]


def test_what_was_on_another_gpu_comes_to_the_own_one_and_the_host_keeps_its_own() -> None:
    payload = pickled([OnGpu5(), torch.arange(3)])
    # A device that any machine has.
    there, kept = loads(payload, GpusTo(torch.device("meta")))
    assert there._untyped_storage.device.type == "meta" and kept.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="CUDA device"):
        loads(payload, GpusTo(torch.device("cpu")))  # As without it.


class Carrying:
    """The group of rank 1, to which rank 0 sends `payload`. Only when it has come, the group's
    device is one that any machine has, and that carries nothing."""

    is_dry_run, rank, size, timeout_s, seal = False, 1, 2, 1.0, None

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.device = torch.device("cpu")

    def _carried(self, tensor: torch.Tensor) -> Any:
        if tensor.numel() > self.size:  # It is no length.
            self.device = torch.device("meta")
        return SimpleNamespace(wait_on_host=lambda: None)

    def broadcast(self, tensor: torch.Tensor, root: int, **_: Any) -> Any:
        length = len(self.payload)
        is_length = tensor.numel() == 1
        tensor.copy_(torch.tensor([length]) if is_length else words_of(self.payload, length))
        return self._carried(tensor)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, **_: Any) -> Any:
        output.view(self.size, -1).copy_(input)
        return self._carried(output)


def test_objects_of_the_library_bring_no_tensor_to_the_gpu_of_another_rank() -> None:
    group: Any = Carrying(pickled(OnGpu5()))
    assert broadcast_object(group, None)._untyped_storage.device.type == "meta"
    group = Carrying(b"")
    assert [one._untyped_storage.device.type for one in all_gather_object(group, OnGpu5())] == [
        "meta"
    ] * 2


def test_what_cannot_be_pickled_is_refused_before_anything_is_sent(alone: Group) -> None:
    with pytest.raises(TypeError, match="value cannot be pickled"):
        alone.all_gather_object(lambda: None)
    with pytest.raises(TypeError, match=r"objects\[0\] cannot be pickled"):
        alone.scatter_object_list([lambda: None])
    assert alone.all_gather_object(1).wait() == [1]


@pytest.mark.parametrize("value", [Mode.EVAL, Point(1, 2), Options(0.1), [Mode]], ids=repr)
def test_what_only_the_script_has_is_refused_with_the_remedy(alone: Group, value: Any) -> None:
    with pytest.raises(TypeError, match=r"into a module that every rank .* ctx\.broadcast\(\)"):
        alone.all_gather_object({"deep": value})


def test_bad_arguments_are_refused(alone: Group) -> None:
    with pytest.raises(ValueError, match="root must be a rank"):
        alone.gather_object(1, root=1)
    with pytest.raises(TypeError, match="objects must be a list, got tuple"):
        alone.broadcast_object_list((1,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one object for each of the 1 ranks, got None"):
        alone.scatter_object_list()
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        alone.all_gather_object(1, timeout_s=0)
    with pytest.raises(ValueError, match="dst is 0, this rank itself"):
        alone.send_object_list([1], 0)
    with pytest.raises(ValueError, match="nobody can send"):
        alone.recv_object_list([1])
    with pytest.raises(TypeError, match="objects must be a list, got tuple"):
        alone.recv_object_list((1,))  # type: ignore[arg-type]


def test_an_object_in_flight_fails_when_the_group_is_closed(alone: Group) -> None:
    work = alone.all_gather_object("x" * 1_000_000)
    alone.close()
    assert work.is_completed()
