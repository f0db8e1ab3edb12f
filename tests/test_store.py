"""One contract for all stores; FileStore also between processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import Rank, Ranks, run_ranks

from collectives.errors import StoreTimeout
from collectives.store import FileStore, HashStore, PrefixStore, Store

MAKERS: dict[str, Callable[[Path], Store]] = {
    "HashStore": lambda path: HashStore(),
    "FileStore": FileStore,
    "PrefixStore of HashStore": lambda path: PrefixStore("ours", HashStore()),
    "PrefixStore of FileStore": lambda path: PrefixStore("a/b", PrefixStore("c", FileStore(path))),
}


@pytest.fixture(params=MAKERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MAKERS[request.param](tmp_path / "store")


def test_what_is_set_is_got_as_bytes(store: Store) -> None:
    store.set("text", "grüß dich")
    store.set("bytes", b"\0\xff" * 5000)
    store.set("", b"")
    assert store.get("text") == "grüß dich".encode()
    assert store.get("bytes") == b"\0\xff" * 5000
    assert store.get("") == b""
    store.set("text", "over")
    assert store.get("text") == b"over"
    assert store.num_keys() == 3


def test_check_wants_all_keys(store: Store) -> None:
    store.set("a", "1")
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.check([])


def test_add_counts_from_zero_and_in_decimal(store: Store) -> None:
    assert store.add("count", 5) == 5
    assert store.add("count", -7) == -2
    assert store.get("count") == b"-2"
    store.set("count", "40")
    assert store.add("count", 2) == 42


def test_compare_set_writes_only_over_what_was_expected(store: Store) -> None:
    assert store.compare_set("key", "something", "new") == b"something"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "", "second") == b"first"
    assert store.compare_set("key", "first", "third") == b"third"
    assert store.get("key") == b"third"


def test_append_writes_behind_what_is_there(store: Store) -> None:
    store.append("lines", "one\n")
    store.append("lines", b"two\n")
    assert store.get("lines") == b"one\ntwo\n"


def test_a_deleted_key_is_absent_and_can_come_back(store: Store) -> None:
    store.set("key", "1")
    assert store.delete_key("key")
    assert not store.delete_key("key")
    assert not store.check(["key"])
    assert store.num_keys() == 0
    assert store.add("key", 1) == 1


def test_several_keys_travel_at_once(store: Store) -> None:
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    with pytest.raises(ValueError, match="multi_set got 2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])


def test_waiting_in_vain_names_the_missing_keys(store: Store) -> None:
    store.set("here", "")
    with pytest.raises(StoreTimeout, match=r"missing did not appear .* within 0.05 s") as caught:
        store.wait(["here", "missing"], 0.05)
    assert len(caught.value.keys) == 1
    assert caught.value.keys[0].endswith("missing")
    store.set_timeout(0.05)
    with pytest.raises(StoreTimeout):
        store.get("missing")
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        store.set_timeout(0)


def test_a_waiting_thread_sees_what_another_one_writes(store: Store) -> None:
    writing = threading.Timer(0.1, store.set, ("late", "now"))
    writing.start()
    assert store.get("late", 10) == b"now"
    writing.join()


def test_prefixes_keep_users_of_one_store_apart() -> None:
    below = HashStore()
    first, second = PrefixStore("first", below), PrefixStore("second", below)
    first.set("key", "1")
    assert not second.check(["key"])
    assert below.get("first/key") == b"1"
    assert second.num_keys() == 1


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
    totals = run_ranks(write_in_turns, 3, tmp_path)
    assert sorted(total for of_rank in totals for total in of_rank) == list(range(1, 601))
    store = FileStore(tmp_path / "store")
    assert store.get("letters") == b"ab" * 600
    assert store.get("winners") == b"200"
    assert store.multi_get([f"own/{rank}" for rank in range(3)]) == [b"199"] * 3


def write_for_ever(rank: Rank) -> None:
    rank.say("writing")
    while True:
        rank.store.set("large", os.urandom(1 << 20))


def test_a_writer_killed_in_the_middle_takes_nothing_with_it(tmp_path: Path) -> None:
    with Ranks(write_for_ever, 1, tmp_path) as ranks:
        ranks.wait_for("writing")
        time.sleep(0.05)
        ranks.signal(0, signal.SIGKILL)
    store = FileStore(tmp_path / "store")
    store.set("after", "1")
    assert FileStore(tmp_path / "store").get("after", 1) == b"1"


def test_half_an_entry_at_the_end_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "store"
    FileStore(path).set("before", "1")
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole[:-1])
    reader = FileStore(path)
    assert reader.get("before") == b"1"
    FileStore(path).set("after", "2")
    assert reader.get("after", 1) == b"2"
    assert reader.num_keys() == 2
