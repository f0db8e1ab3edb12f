"""The store in an actor: torch's meanings, bounded waits, and threads that can be freed."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from chorusline.actors import errors
from chorusline.actors.messages.messages import Loss, RunFailed, WorkerInfo
from chorusline.actors.messages.outcomes import raise_failure
from chorusline.actors.ray_calls.actor_store import STORE_CONCURRENCY, ActorStore, StoreActor
from chorusline.actors.ray_calls.calls import actor_class
from chorusline.collectives.contract.errors import (
    ChoruslineError,
    GroupAborted,
    PeerLost,
    StoreLost,
    StoreTimeout,
)
from chorusline.collectives.group import Group
from chorusline.collectives.stores.signed_store import signed
from chorusline.collectives.stores.store import HashStore, PrefixStore, Store
from tests.contracts.store import StoreContract


class StoreActorToEmpty(StoreActor):
    """A new actor for every test would take longer than all the tests."""

    @ray.method(concurrency_group="store")
    async def empty(self) -> None:
        self._store = HashStore()


def start_actor() -> Any:
    return actor_class(StoreActorToEmpty, concurrency_groups=STORE_CONCURRENCY, num_cpus=0).remote()


@pytest.fixture(scope="module")
def actor(cluster: None) -> Iterator[Any]:
    """One for all tests, each of which writes keys of its own."""
    actor = start_actor()
    ray.get(actor.store_call.remote("num_keys"), timeout=60)
    yield actor
    ray.kill(actor)


@pytest.fixture
def store(actor: Any) -> ActorStore:
    return ActorStore(actor)


class TestContract(StoreContract):
    @pytest.fixture(params=["bare", "prefixed"])
    def store(self, actor: Any, request: pytest.FixtureRequest) -> Store:
        """The actor's store, empty; or a part of it."""
        store = ActorStore(actor)
        if request.param == "prefixed":
            return PrefixStore(request.node.name, store)
        ray.get(actor.empty.remote(), timeout=10)
        return store


async def test_a_waiter_is_woken_by_the_write(store: ActorStore) -> None:
    waiting = asyncio.create_task(asyncio.to_thread(store.wait, ["a", "b"], 30.0))
    await asyncio.to_thread(store.set, "a", "1")
    assert not waiting.done()
    began_at = time.monotonic()
    await asyncio.to_thread(store.append, "b", "1")
    await waiting
    assert time.monotonic() - began_at < 2


@pytest.mark.parametrize(
    "write",
    [
        lambda store, key: store.set(key, "1"),
        lambda store, key: store.add(key, 1),
        lambda store, key: store.append(key, "1"),
        lambda store, key: store.compare_set(key, "", "1"),
        lambda store, key: store.multi_set(["another", key], ["0", "1"]),
        lambda store, key: store.post(key, "1"),
    ],
    ids=["set", "add", "append", "compare_set", "multi_set", "post"],
)
async def test_every_kind_of_write_wakes(
    store: ActorStore, write: Callable[[ActorStore, str], object], request: pytest.FixtureRequest
) -> None:
    key = request.node.name
    waiting = asyncio.create_task(asyncio.to_thread(store.get, key, 30.0))
    await asyncio.sleep(0.5)
    began_at = time.monotonic()
    await asyncio.to_thread(write, store, key)
    assert await waiting == b"1"
    assert time.monotonic() - began_at < 15, "it was found by the deadline alone"


def test_a_timeout_names_the_keys_that_are_missing(store: ActorStore) -> None:
    store.set("rank/0", "here")
    with pytest.raises(StoreTimeout) as caught:
        store.wait(["rank/0", "rank/1", "rank/2"], 0.1)
    assert caught.value.keys == ["rank/1", "rank/2"]
    assert caught.value.waited_s == 0.1


def test_the_default_timeout_is_the_stores_own(store: ActorStore) -> None:
    store.set_timeout(0.1)
    with pytest.raises(StoreTimeout):
        store.get("absent")
    copy = pickle.loads(ray.cloudpickle.dumps(store))
    assert copy.timeout_s == 0.1


def test_a_copy_that_travels_has_the_secret(actor: Any) -> None:
    store = ActorStore(actor, b"sixteen bytes or more")
    copy = pickle.loads(ray.cloudpickle.dumps(store))
    signed(store).set("signed", "here")
    assert signed(copy).get("signed", 10) == b"here"
    assert copy.get("signed", 10).startswith(b"signed 1")


async def test_cancel_frees_a_blocked_thread_at_once(store: ActorStore) -> None:
    waiting = asyncio.create_task(
        asyncio.to_thread(PrefixStore("group/0", store).wait, ["rank/1"], 60.0)
    )
    await asyncio.sleep(0.2)
    error = GroupAborted(3, [1], "ValueError: boom")
    began_at = time.monotonic()
    store.cancel(error)
    with pytest.raises(GroupAborted, match="boom") as caught:
        await waiting
    assert time.monotonic() - began_at < 1
    assert caught.value is not error, "each thread raises a copy of its own"
    with pytest.raises(GroupAborted, match="boom"):
        store.set("later", "1")


async def test_a_dead_actor_is_a_lost_store(cluster: None) -> None:
    actor = start_actor()
    store = ActorStore(actor)
    store.set("key", "1")
    waiting = asyncio.create_task(asyncio.to_thread(store.wait, ["absent"], 60.0))
    await asyncio.sleep(0.2)
    ray.kill(actor)
    with pytest.raises(StoreLost, match="wait: the actor that holds the store is gone"):
        await waiting
    with pytest.raises(StoreLost):
        store.get("key")


def test_many_waiters_do_not_keep_the_store_from_answering(actor: Any, store: ActorStore) -> None:
    calls = [actor.store_wait.remote(["flag"], 30.0) for _ in range(200)]
    store.set("flag", "1")
    assert ray.get(calls, timeout=10) == [([], [])] * 200


@pytest.mark.parametrize(
    "error",
    [
        errors.WorkerLost("run", 3, [1], "it was killed", "pid 5 on vm", 881, "Write more."),
        errors.StartupError("num_workers=9", "the cluster has CPU 4"),
        errors.NoCluster("no Ray cluster runs on this machine", "start one"),
        errors.RankFailed(1, 3, "SystemExit: 2"),
        errors.DriverLost(0, "SIGKILL"),
        errors.HeadLost(0, "it takes no connections"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: ChoruslineError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.args == error.args


def test_a_lost_worker_is_a_lost_peer_to_who_catches_that() -> None:
    error = errors.WorkerLost("run", 3, [1], "it was killed", "pid 5 on vm", 881, "Write more.")
    assert isinstance(error, PeerLost)
    begins = "rank 1 (pid 5 on vm) died after step 881: it was killed. The other ranks were stopped"
    assert str(error).startswith(f"{begins}. Write more. Call run() again")


@pytest.mark.parametrize(
    ("num_ranks", "may_lose", "says"),
    [
        (3, False, r"Session\(num_workers=\(1, 3\)\) and .*replicas=2.*\(ctx.register\)"),
        (1, False, r"stopped. With Session\(checkpoint="),
        (3, True, r"stopped. With Session\(checkpoint="),
    ],
)
def test_a_run_that_a_loss_has_ended_says_what_survives_it(
    num_ranks: int, may_lose: bool, says: str
) -> None:
    workers = tuple(
        WorkerInfo(f"w{rank}", rank, "n", "vm", 10 + rank, "cpu") for rank in range(num_ranks)
    )
    loss = Loss(0, workers[0], "it was killed")
    failed = RunFailed(0, loss, workers, (), (), may_lose=may_lose)
    with pytest.raises(errors.WorkerLost, match=says) as raised:
        raise_failure(failed, 7)
    assert "rank 0 (pid 10 on vm, cpu) died after step 7" in str(raised.value)


def test_ranks_that_ray_runs_meet_in_a_store_that_was_started_for_them(cluster: None) -> None:
    @ray.remote(num_cpus=0.1)
    def total(store: ActorStore, rank: int) -> float:
        import torch

        with Group.create(store, rank, 2, timeout_s=30) as group:
            ones = torch.ones(1)
            group.all_reduce(ones).wait()
            return ones.item()

    store = ActorStore.start(name="meeting")
    try:
        assert ray.get_actor("meeting") == store._actor
        assert ray.get([total.remote(store, rank) for rank in range(2)], timeout=60) == [2.0, 2.0]
    finally:
        ray.kill(store._actor)


async def test_a_store_keeps_nothing_of_keys_that_were_waited_for_in_vain() -> None:
    actor = StoreActor()
    for i in range(100):
        key = b"%d" % i
        assert await actor.store_wait([key], 0) == ([key], [])
    others = [asyncio.create_task(actor.store_wait([b"late"], t)) for t in (0.01, 20, 20)]
    assert await others[0] == ([b"late"], [])
    await actor.store_call("set", b"late", b"")
    assert await asyncio.gather(*others[1:]) == [([], [])] * 2
    assert actor._written == {}
