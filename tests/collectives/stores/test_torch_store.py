"""Stores of torch in our groups, and ours in torch's, in both directions."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from chorusline.collectives.contract.errors import StoreLost
from chorusline.collectives.stores import torch_store
from chorusline.collectives.stores.store import HashStore
from chorusline.collectives.stores.torch_store import (
    Caller,
    CallTimedOut,
    StoreFromTorch,
    TorchStore,
)
from tests.harness.ranks import FORKS, Rank, error_of, run_ranks
from tests.harness.torch_groups import tcp_store


def all_reduce_through_torch(rank: Rank) -> list[Any]:
    """torch's own users of a store: a ProcessGroupGloo, and the global groups."""
    below = dist.PrefixStore("direct", TorchStore(rank.store))
    gc.collect()
    gloo = dist.ProcessGroupGloo(below, rank.rank, rank.size, timedelta(seconds=30))
    tensor = torch.full((3,), rank.rank + 1.0)
    gloo.allreduce([tensor]).wait()
    dist.init_process_group(
        "gloo", store=TorchStore(rank.store), rank=rank.rank, world_size=rank.size
    )
    gc.collect()
    told: list[Any] = [None] * rank.size
    dist.all_gather_object(told, f"rank {rank.rank}")
    dist.new_group([0, 1], backend="gloo")
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    dist.destroy_process_group()
    return [tensor.tolist(), told]


def test_torchs_process_groups_meet_in_our_store(tmp_path: Path) -> None:
    found = run_ranks(all_reduce_through_torch, 2, tmp_path)
    assert found == [[[3.0] * 3, ["rank 0", "rank 1"]]] * 2


def test_torch_gets_its_own_error_of_a_timeout_that_it_has_set(tmp_path: Path) -> None:
    ours = HashStore()
    ours.set_timeout(7)
    store = dist.PrefixStore("a", TorchStore(ours))
    assert store.timeout == timedelta(seconds=7)
    store.set_timeout(timedelta(seconds=0.05))
    for wait in (
        lambda: store.get("missing"),
        lambda: store.multi_get(["missing"]),
        lambda: store.wait(["missing"]),
        lambda: store.clone().get("missing"),
        lambda: store.wait(["missing"], timedelta(seconds=0.05)),
    ):
        with pytest.raises(dist.DistStoreError, match=r"a/missing did not appear .* within 0.05 s"):
            wait()


def test_every_operation_of_torchs_comes_through_from_its_cpp() -> None:
    ours = HashStore()
    store = dist.PrefixStore("a", dist.PrefixStore("b", TorchStore(ours)))
    assert store.has_extended_api()
    store.set("key", b"\0\xff")
    assert ours.get("b/a/key") == b"\0\xff" == store.get("key")
    assert store.add("count", 3) == 3
    assert store.compare_set("key", b"\0\xff", "new") == b"new"
    store.append("key", b"\xfe")
    store.multi_set(["x", "y"], ["1", b"\xff"])
    assert store.multi_get(["y", "key"]) == [b"\xff", b"new\xfe"]
    assert store.num_keys() == 4
    assert store.delete_key("x")
    assert not store.delete_key("x")
    assert store.check(["y"])
    assert not store.check(["x", "y"])
    if hasattr(store, "barrier"):  # torch 2.11 lacks it.
        store.barrier("all", 1)


def test_an_adapter_that_is_released_is_collected() -> None:
    ours = TorchStore(HashStore())
    ours.release()
    assert ours not in TorchStore._kept


def test_a_group_that_has_met_in_an_adapter_does_not_keep_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: set[TorchStore] = set()
    monkeypatch.setattr(TorchStore, "_kept", kept)
    below = TorchStore(HashStore())
    dist.init_process_group("chorusline", store=below, rank=0, world_size=1)
    dist.destroy_process_group()
    below.release()
    assert kept == set()


class Forgetful(dist.HashStore):
    """Its keys are gone as soon as somebody has seen them, by another client's delete_key."""

    def clone(self) -> Forgetful:
        return self

    def check(self, keys: list[str]) -> bool:
        is_there = super().check(keys)
        for key in keys:
            super().delete_key(key)
        return is_there

    def has_extended_api(self) -> bool:
        return False


def test_adding_and_appending_do_not_wait_for_a_key_that_is_deleted_meanwhile() -> None:
    store = StoreFromTorch(Forgetful())
    store.set_timeout(5)
    began_at = time.monotonic()
    store.set("count", "7")
    assert store.add("count", 3) == 10
    assert store.add("new", 3) == 3
    store.set("text", "old")
    store.append("text", "er")
    assert store.compare_set("text", "older", "read") == b"read"
    assert time.monotonic() - began_at < 4


def test_a_blocked_user_of_torchs_store_does_not_block_us() -> None:
    below = tcp_store()
    store = StoreFromTorch(below)
    blocked = threading.Thread(target=below.wait, args=(["late"], timedelta(seconds=30)))
    blocked.start()
    began_at = time.monotonic()
    store.set("key", "1")
    assert store.get("key") == b"1"
    assert time.monotonic() - began_at < 5
    store.set("late", "")
    blocked.join()


def host_a_store(pipe: Connection) -> None:
    store = tcp_store()
    pipe.send(store.port)
    time.sleep(60)


def start_host() -> tuple[Any, StoreFromTorch]:
    ours, theirs = FORKS.Pipe()
    host = FORKS.Process(target=host_a_store, args=(theirs,), daemon=True)
    host.start()
    client = dist.TCPStore("127.0.0.1", ours.recv(), wait_for_workers=False)
    return host, StoreFromTorch(client)


def test_a_host_that_was_killed_is_a_lost_store() -> None:
    host, store = start_host()
    store.set("key", "1")
    waiting = []

    def wait() -> None:
        with pytest.raises(StoreLost):
            store.wait(["never"], 60)
        waiting.append("freed")

    thread = threading.Thread(target=wait)
    thread.start()
    host.kill()
    host.join()
    thread.join(10)
    assert waiting == ["freed"]
    with pytest.raises(StoreLost, match=r"check: the server of torch's TCPStore .* usually rank 0"):
        store.get("key")


@pytest.mark.slow
def test_a_host_that_is_stopped_is_a_lost_store_after_ten_seconds() -> None:
    host, store = start_host()
    os.kill(host.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreLost, match=r"torch's TCPStore did not answer within 10 s"):
            store.wait(["never"], 1)
    finally:
        host.kill()


def test_a_host_that_was_stopped_for_a_while_is_reached_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_store, "_ANSWER_S", 0.5)
    host, store = start_host()
    try:
        store.set("key", "1")
        os.kill(host.pid, signal.SIGSTOP)
        with pytest.raises(StoreLost, match=r"did not answer within 0\.5 s"):
            store.wait(["never"], 10)
        with pytest.raises(StoreLost, match=r"did not answer within 0\.5 s"):
            store.get("key")
        os.kill(host.pid, signal.SIGCONT)
        give_up_at = time.monotonic() + 20
        while error_of(lambda: store.get("key"), StoreLost) is not None:
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        assert store.get("key") == b"1"
    finally:
        host.kill()


def test_a_call_without_an_answer_is_given_up() -> None:
    caller = Caller()
    assert caller.call(5, pow, 2, 10) == 1024
    with pytest.raises(ZeroDivisionError):
        caller.call(5, lambda: 1 / 0)
    with pytest.raises(CallTimedOut):
        caller.call(0.05, time.sleep, 0.5)


def test_what_is_no_store_of_torchs_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.distributed.Store, got HashStore"):
        StoreFromTorch(HashStore())
