"""One contract for all stores; the life of a FileStore's file; torch's stores, in both directions.

test_actor_store.py runs the contract over the store in an actor.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives.contract.errors import StaleStore, StoreLost, StoreTimeout
from collectives.stores.file_store import _TURN, FileStore, _lock, _turn
from collectives.stores.store import HashStore, PrefixStore, Store
from collectives.stores.torch_store import Caller, NoAnswer, StoreFromTorch, TorchStore
from tests.contracts.store import StoreContract
from tests.harness.ranks import FORKS, Rank, Ranks, run_ranks


def tcp_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


MAKERS: dict[str, Callable[[Path], Store]] = {
    "HashStore": lambda path: HashStore(),
    "FileStore": FileStore,
    "PrefixStore of HashStore": lambda path: PrefixStore("ours", HashStore()),
    "PrefixStore of FileStore": lambda path: PrefixStore(
        b"\xff", PrefixStore("c", FileStore(path))
    ),
    "torch's TCPStore": lambda path: StoreFromTorch(tcp_store()),
    "torch's HashStore": lambda path: StoreFromTorch(dist.HashStore()),
    "torch's FileStore": lambda path: StoreFromTorch(dist.FileStore(str(path), 1)),
    "torch's PrefixStore": lambda path: StoreFromTorch(dist.PrefixStore("theirs", tcp_store())),
    "ours as torch's": lambda path: StoreFromTorch(TorchStore(HashStore())),
    # Through torch's C++, which nothing but the adapter keeps alive.
    "ours below torch's": lambda path: StoreFromTorch(
        dist.PrefixStore("theirs", TorchStore(FileStore(path)))
    ),
}


class TestContract(StoreContract):
    @pytest.fixture(params=MAKERS)
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
        return MAKERS[request.param](tmp_path / "store")


def test_prefixes_keep_users_of_one_store_apart() -> None:
    below = HashStore()
    first, second = PrefixStore("first", below), PrefixStore("second", below)
    first.set("key", "1")
    assert not second.check(["key"])
    assert below.get("first/key") == b"1"
    assert second.num_keys() == 1


def test_a_prefix_costs_no_round_trip() -> None:
    class Counting(HashStore):
        calls = 0

        def multi_get(self, *args: Any) -> list[bytes]:
            self.calls += 1
            return super().multi_get(*args)

    below = Counting()
    store = PrefixStore("a", PrefixStore("b", below))
    store.multi_set(["x", "y"], ["1", "2"])
    assert store.get("x") == b"1"
    assert store.multi_get(["x", "y"]) == [b"1", b"2"]
    assert below.calls == 2


@pytest.mark.parametrize(
    "error", [StoreLost("set", "gone"), StaleStore("/tmp/it's", "process 4")], ids=repr
)
def test_errors_of_stores_survive_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


# -- FileStore between processes -------------------------------------------------------------------


def write_in_turns(rank: Rank) -> list[int]:
    rank.say("here")
    rank.store.wait([f"said/here/{other}" for other in range(rank.size)], 30)
    winners = 0
    totals = []
    for turn in range(200):
        totals.append(rank.store.add("count", 1))
        rank.store.append("letters", "ab")
        name = f"rank {rank.rank}"
        winners += rank.store.compare_set(f"turn/{turn}", "", name) == name.encode()
        rank.store.set(f"own/{rank.rank}", str(turn))
    rank.store.add("winners", winners)
    return totals


def test_changes_by_several_processes_are_all_there(tmp_path: Path) -> None:
    with Ranks(write_in_turns, 3, tmp_path) as ranks:
        totals = ranks.results()
        assert sorted(total for of_rank in totals for total in of_rank) == list(range(1, 601))
        assert ranks.store.get("letters") == b"ab" * 600
        assert ranks.store.get("winners") == b"200"
        assert ranks.store.multi_get([f"own/{rank}" for rank in range(3)]) == [b"199"] * 3


def write_for_ever(rank: Rank) -> None:
    rank.say("writing")
    while True:
        rank.store.set("large", os.urandom(1 << 20))


def test_a_writer_killed_in_the_middle_takes_nothing_with_it(tmp_path: Path) -> None:
    with Ranks(write_for_ever, 1, tmp_path) as ranks:
        ranks.wait_for("writing")
        time.sleep(0.05)
        ranks.signal(0, signal.SIGKILL)
        ranks.store.set("after", "1")
        assert FileStore(tmp_path / "store").get("after", 1) == b"1"


def write_too_much(rank: Rank) -> str:
    rank.store.set("before", "1")
    size = rank.store.path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, size + 10))
    with pytest.raises(OSError, match="File too large"):
        rank.store.set("large", "x" * 1000)
    return rank.store.get("before").decode()


def test_a_full_disk_is_an_error_and_half_an_entry_is_written_over(tmp_path: Path) -> None:
    with Ranks(write_too_much, 1, tmp_path) as ranks:
        assert ranks.results() == ["1"]
        assert not ranks.store.check(["large"])
        ranks.store.set("after", "2")
        assert ranks.store.get("after") == b"2"
        assert ranks.store.num_keys() == 2
        assert FileStore(tmp_path / "store").get("after", 1) == b"2"


# -- the life of a FileStore's file ----------------------------------------------------------------


def keep_open(pipe: Connection, path: Path, key: str) -> None:
    """Open the store, write a key, wait for a word, close; or be killed."""
    with FileStore(path) as store:
        store.set(key, "1")
        pipe.send(os.getpid())
        pipe.recv()


class User:
    """A process that has the store open."""

    def __init__(self, path: Path, key: str) -> None:
        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=keep_open, args=(theirs, path, key), daemon=True)
        self._process.start()
        self.pid = self._pipe.recv()

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self._process.kill()
        else:
            self._pipe.send("enough")
        self._process.join(10)
        assert not self._process.is_alive()


def test_processes_that_come_and_go_share_the_file_until_the_last_has_closed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    first = User(path, "first")
    second = User(path, "second")
    first.end()
    third = User(path, "third")
    second.end(kill=True)
    assert path.stat().st_mode & 0o777 == 0o600
    with FileStore(path) as store:
        assert store.multi_get(["first", "second", "third"], 0) == [b"1"] * 3
        third.end()
        assert store.num_keys() == 3
    assert not path.exists()
    with FileStore(path) as store:
        assert store.num_keys() == 0


def test_the_file_of_a_run_that_was_killed_is_reported_with_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "the store"
    users = [User(path, f"{rank}") for rank in range(2)]
    for user in users:
        user.end(kill=True)
    left = path.read_bytes()
    for _ in range(2):  # Every rank of the next run hears the same.
        with pytest.raises(StaleStore) as caught:
            FileStore(path)
        assert str(caught.value).startswith(
            f"{path} was left behind by an earlier run, made by process {users[0].pid} ("
        )
        assert "no process that used it is alive" in str(caught.value)
        assert f"Remove it (rm '{path}') and start all ranks again" in str(caught.value)
        assert path.read_bytes() == left, "it is evidence"
    path.unlink()
    with FileStore(path) as store:
        assert store.num_keys() == 0


def test_ranks_that_open_the_file_of_an_earlier_run_at_one_instant_all_hear_of_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    user = User(path, "key")
    user.end(kill=True)
    heard: list[str] = []

    def open_often() -> None:
        for _ in range(300):
            with pytest.raises(StaleStore):
                FileStore(path)
        heard.append("always")

    threads = [threading.Thread(target=open_often) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == ["always"] * 3


def test_stores_opened_and_closed_at_one_instant_share_one_file(tmp_path: Path) -> None:
    """Whoever opens it while the last user removes it makes a new one; nobody is left with two."""
    path = tmp_path / "store"
    ended: list[str] = []

    def use_often(rank: int) -> None:
        for turn in range(200):
            with FileStore(path) as store:
                store.set(f"{rank}/{turn}", "1")
                with FileStore(path) as other:
                    assert other.check([f"{rank}/{turn}"])
        ended.append("well")

    threads = [threading.Thread(target=use_often, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == ["well"] * 3
    assert not path.exists()


def test_a_file_that_nobody_wrote_to_is_no_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        header = path.read_bytes()
        store.set("key", "1")
    for content in (b"", header[:10], header[:-1], header):
        path.write_bytes(content)
        with FileStore(path) as store:
            assert store.num_keys() == 0
            store.set("key", "1")
        assert not path.exists()


def test_a_file_of_another_kind_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("hello,world\n")
    with pytest.raises(ValueError, match=r"data.csv' is a file of another kind .* path of its own"):
        FileStore(path)
    assert path.read_text() == "hello,world\n"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for _ in range(2):  # The target is missing, and then it is there.
        with pytest.raises(ValueError, match=r"link' is a symbolic link, .* name the file itself"):
            FileStore(link)
        target.write_text("")
    assert target.read_text() == ""


def test_a_device_is_no_file_of_a_store() -> None:
    with pytest.raises(ValueError, match=r"null' is no plain file"):
        FileStore("/dev/null")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_text("")
    os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match=r"store' belongs to user 12345, and this process"):
        FileStore(path)
    assert path.read_text() == ""


def test_a_removed_file_is_mentioned_by_who_waits_in_vain(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store:
        store.set("key", "1")
        with pytest.raises(StoreTimeout, match=r"; the store is .*store, made by process \d+ \("):
            store.wait(["other"], 0.05)
        store.path.unlink()
        with pytest.raises(StoreTimeout, match="store was removed meanwhile; opening it now"):
            store.wait(["other"], 0.05)
        assert store.get("key") == b"1"


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.close()
    store.close()
    for use in (lambda: store.get("a"), lambda: store.set("a", "b"), lambda: store.check(["a"])):
        with pytest.raises(ValueError, match="is closed; make a new one"):
            use()


def use_in_a_fork(rank: Rank) -> int:
    child = os.fork()
    if child == 0:
        try:
            rank.store.set("forked", "1")
        except ValueError as error:
            os._exit(7 if "a forked process must make its own" in str(error) else 1)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_must_make_its_own(tmp_path: Path) -> None:
    assert run_ranks(use_in_a_fork, 1, tmp_path) == [7]


def test_a_process_stopped_amid_a_write_holds_nobody_for_ever(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store:
        file = os.open(store.path, os.O_RDWR)
        _lock(file, _TURN, 1)
        with (
            pytest.raises(StoreLost, match=r"has kept the lock of .* for 0.1 s, so it must have"),
            _turn(store._file, store.path, 0.1),
        ):
            pass
        os.close(file)
        store.set("key", "1")


# -- torch -----------------------------------------------------------------------------------------


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
    store.barrier("all", 1)


def test_an_adapter_that_is_released_is_collected() -> None:
    ours = TorchStore(HashStore())
    ours.release()
    assert ours not in TorchStore._kept


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
    pipe.recv()


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
    with pytest.raises(StoreLost, match=r"check: the server of torch's TCPStore .* mostly rank 0"):
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


def test_a_call_without_an_answer_is_given_up() -> None:
    caller = Caller()
    assert caller.call(5, pow, 2, 10) == 1024
    with pytest.raises(ZeroDivisionError):
        caller.call(5, lambda: 1 / 0)
    with pytest.raises(NoAnswer):
        caller.call(0.05, time.sleep, 0.5)


def test_what_is_no_store_of_torchs_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.distributed.Store, got HashStore"):
        StoreFromTorch(HashStore())
