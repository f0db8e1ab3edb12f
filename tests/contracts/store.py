"""What every store promises to those who meet in it."""

from __future__ import annotations

import threading
import time

import pytest

from chorusline.collectives.contract.errors import StoreTimeout
from chorusline.collectives.stores.store import Store
from chorusline.collectives.stores.torch_store import TorchStore


class StoreContract:
    """What every store promises. A module that uses it has a fixture `store`, empty of our keys."""

    def test_what_is_set_is_got_as_bytes(self, store: Store) -> None:
        before = store.num_keys()
        store.set("text", "grüß dich")
        store.set("bytes", b"\0\xff" * 5000)
        store.set("", b"")
        store.set("buffer", memoryview(b"abc")[1:])
        assert store.get("text") == "grüß dich".encode()
        assert store.get("bytes") == b"\0\xff" * 5000
        assert store.get("") == b""
        assert store.get("buffer") == b"bc"
        store.set("text", "over")
        assert store.get("text") == b"over"
        assert store.num_keys() == before + 4

    def test_what_is_posted_is_found_by_who_waits_for_it(self, store: Store) -> None:
        store.post("posted", "here")
        assert store.get("posted", 10) == b"here"

    def test_a_key_is_any_bytes_and_a_string_is_its_utf8(self, store: Store) -> None:
        store.set("grüß\n/\0", "1")
        assert store.get("grüß\n/\0".encode()) == b"1"
        assert not store.check(["grüß\n/"])
        if keys_are_text(store):
            return
        store.set(b"\xff\0\xfe", b"2")
        assert store.get(b"\xff\0\xfe") == b"2"
        assert store.add(b"\xff", 1) == 1
        assert store.delete_key(b"\xff")
        with pytest.raises(StoreTimeout, match=r"\\xfd did not appear"):
            store.wait([b"\xff\0\xfe", b"\xfd"], 0)

    def test_check_wants_all_keys(self, store: Store) -> None:
        store.set("a", "1")
        assert store.check(["a"])
        assert not store.check(["a", "b"])
        assert store.check([])

    def test_add_counts_from_zero_and_in_decimal(self, store: Store) -> None:
        assert store.add("count", 5) == 5
        assert store.add("count", -7) == -2
        assert store.get("count") == b"-2"
        store.set("count", "40")
        assert store.add("count", 2) == 42

    def test_add_to_what_is_no_number_is_an_error_and_the_store_goes_on(self, store: Store) -> None:
        store.set("word", "hello")
        with pytest.raises(ValueError, match=r"add: the value of key '.*word' is b'hello', which"):
            store.add("word", 1)
        with pytest.raises(ValueError, match="amount must fit 64 bits"):
            store.add("count", 2**63)
        with pytest.raises(TypeError):
            store.add("count", 0.5)  # type: ignore[arg-type]
        assert store.get("word") == b"hello"
        assert not store.check(["count"])

    def test_compare_set_writes_only_over_what_was_expected(self, store: Store) -> None:
        assert store.compare_set("key", "something", "new") == b"something"
        assert not store.check(["key"])
        assert store.compare_set("key", "", "first") == b"first"
        assert store.compare_set("key", "", "second") == b"first"
        assert store.compare_set("key", "first", b"\0\xff") == b"\0\xff"
        assert store.get("key") == b"\0\xff"

    def test_append_writes_behind_what_is_there(self, store: Store) -> None:
        store.append("lines", "one\n")
        store.append("lines", b"\xff\0")
        assert store.get("lines") == b"one\n\xff\0"

    def test_a_deleted_key_is_absent_and_can_come_back(self, store: Store) -> None:
        before = store.num_keys()
        store.set("key", "1")
        assert store.delete_key("key")
        assert not store.delete_key("key")
        assert not store.check(["key"])
        assert store.num_keys() == before
        assert store.add("key", 1) == 1

    def test_several_keys_travel_at_once(self, store: Store) -> None:
        store.multi_set(["a", "b"], ["1", b"\xff"])
        assert store.multi_get(["b", "a"]) == [b"\xff", b"1"]
        store.multi_set([], [])
        assert store.multi_get([]) == []
        with pytest.raises(ValueError, match="multi_set got 2 keys and 1 values"):
            store.multi_set(["a", "c"], ["1"])
        assert not store.check(["c"])

    def test_waiting_in_vain_names_the_missing_keys(self, store: Store) -> None:
        store.set("here", "")
        began_at = time.monotonic()
        with pytest.raises(StoreTimeout, match=r"missing did not appear .* within 0.3 s") as caught:
            store.wait(["here", "missing"], 0.3)
        assert 0.25 < time.monotonic() - began_at < 5
        (missing,) = caught.value.keys
        assert missing.endswith("missing")
        with pytest.raises(StoreTimeout) as caught:
            store.multi_get(["absent", "here", "missing"], 0)
        assert len(caught.value.keys) == 2

    def test_what_all_ranks_write_comes_to_each_of_them(self, store: Store) -> None:
        found: dict[int, list[bytes]] = {}

        def gather(rank: int) -> None:
            found[rank] = store.gather("all", rank, 3, f"value {rank}", 20)

        ranks = [threading.Thread(target=gather, args=(rank,)) for rank in (2, 0)]
        for rank in ranks:
            rank.start()
        with pytest.raises(StoreTimeout) as caught:
            store.gather("all", 0, 4, "value 0", 0.2)  # Another size is another gathering.
        assert {"1", "3"} <= {key.rsplit("/", 1)[-1] for key in caught.value.keys}
        assert not found
        gather(1)
        for rank in ranks:
            rank.join(20)
        values = [b"value 0", b"value 1", b"value 2"]
        assert found == dict.fromkeys(range(3), values)
        assert store.gather("all", 1, 3, "value 1", 0) == values, "again, and too late for the rest"

    def test_a_rank_that_gathers_in_vain_may_do_so_again(self, store: Store) -> None:
        for _ in range(3):
            with pytest.raises(StoreTimeout) as caught:
                store.gather("all", 0, 2, "here", 0.05)
            (missing,) = caught.value.keys
            assert missing.endswith("all/1")
        store.set("all/1", "set by itself")
        assert store.gather("all", 0, 2, "here", 20) == [b"here", b"set by itself"]

    def test_the_timeout_of_the_store_is_that_of_its_calls(self, store: Store) -> None:
        store.set_timeout(0.05)
        with pytest.raises(StoreTimeout, match=r"within 0.05 s"):
            store.get("missing")
        for wrong in (0, -1, float("nan")):
            with pytest.raises(ValueError, match="timeout_s must be positive, got"):
                store.set_timeout(wrong)
        with pytest.raises(ValueError, match="timeout_s must not be negative, got -1"):
            store.wait(["missing"], -1)

    def test_a_waiting_thread_sees_what_another_one_writes(self, store: Store) -> None:
        found: list[bytes] = []
        waiting = threading.Thread(target=lambda: found.append(store.get("late", 20)))
        waiting.start()
        time.sleep(0.1)
        store.set("other", "1")  # Who waits stands in nobody's way.
        store.set("late", "now")
        waiting.join(10)
        assert found == [b"now"]

    def test_additions_by_several_threads_are_all_there(self, store: Store) -> None:
        def work() -> None:
            for _ in range(20):
                store.add("count", 1)
                store.append("letters", "ab")

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.get("count") == b"60"
        assert store.get("letters") == b"ab" * 60

    def test_what_is_no_key_or_value_is_refused(self, store: Store) -> None:
        with pytest.raises(TypeError, match="value must be bytes or str, got int"):
            store.set("key", 5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="key must be bytes or str, got NoneType"):
            store.get(None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"keys must be a list of keys, .* write \['key'\]"):
            store.wait("key")
        with pytest.raises(ValueError, match="has no UTF-8 form; pass bytes"):
            store.set("key", "\ud800")
        assert not store.check(["key"])


def keys_are_text(store: Store) -> bool:
    """torch hands keys to a store of Python as text."""
    below = getattr(store, "torch_store", None)
    return isinstance(getattr(below, "underlying_store", below), TorchStore)
