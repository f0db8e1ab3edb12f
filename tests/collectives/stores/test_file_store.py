"""A FileStore between processes, and the life of its file. Its contract: test_store.py."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from chorusline.collectives.contract.errors import StaleStore, StoreLost, StoreTimeout
from chorusline.collectives.stores.file_store import _TURN, FileStore, _lock, _turn
from tests.harness.ranks import FORKS, Rank, Ranks, run_ranks


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


def test_what_another_one_writes_is_seen_by_each_question(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store, FileStore(tmp_path / "store") as other:
        other.set("key", "1")
        assert store.num_keys() == 1
        other.set("second", "2")
        assert store.check(["key", "second"])
        other.delete_key("key")
        assert store.num_keys() == 1
        other.delete_key("second")
        assert not store.check(["second"])


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
        path.touch(0o600)
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
    with pytest.raises(ValueError, match=r"null' is not a regular file"):
        FileStore("/dev/null")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_text("")
    os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match=r"store' belongs to user 12345, and this process"):
        FileStore(path)
    assert path.read_text() == ""


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o666, 0o620, 0o602])
def test_a_file_with_content_that_is_open_to_others_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path):
        content = path.read_bytes()
        path.chmod(mode)
        refusal = rf"store' is open to other users \(mode {mode:o}\): .* Remove it, .*chmod go="
        with pytest.raises(PermissionError, match=refusal):
            FileStore(path)
        assert path.read_bytes() == content


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o664, 0o666])
def test_an_empty_file_that_is_open_to_others_is_replaced_by_one_for_this_user(
    mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    path.touch()
    path.chmod(mode)
    with path.open("rb") as of_another_user, FileStore(path) as store, FileStore(path) as other:
        store.set("key", "what only ranks may read")
        assert path.stat().st_mode & 0o777 == 0o600
        assert other.get("key") == b"what only ranks may read"
        assert of_another_user.read() == b""
    assert not path.exists()


def test_a_file_system_on_which_every_file_is_open_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode: kernels(path, flags, 0o755))
    with pytest.raises(PermissionError, match="choose a path on a file system that keeps"):
        FileStore(tmp_path / "store")


def test_ranks_that_open_an_empty_file_at_one_instant_share_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for turn in range(30):
        path.touch()
        path.chmod(0o644)
        ready, seen = threading.Barrier(4), []

        def use(rank: int, ready: threading.Barrier = ready, seen: list[int] = seen) -> None:
            ready.wait(10)
            with FileStore(path) as store:
                seen.append(store.add("ranks", 1))
                ready.wait(10)

        threads = [threading.Thread(target=use, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(seen) == [1, 2, 3, 4], f"in turn {turn}"
        assert not path.exists()


def test_a_removed_file_is_mentioned_by_who_waits_in_vain(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store:
        store.set("key", "1")
        with pytest.raises(StoreTimeout, match=r"; the store is .*store, made by process \d+ \("):
            store.wait(["other"], 0.05)
        store.path.unlink()
        with pytest.raises(StoreTimeout, match="store was removed while this store was open"):
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
            pytest.raises(StoreLost, match=r"has held the lock of .* for 0.1 s, so it must have"),
            _turn(store._file, store.path, 0.1),
        ):
            pass
        os.close(file)
        store.set("key", "1")
