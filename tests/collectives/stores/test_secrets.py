"""Who may speak to a rank: the addresses that listen, and what a secret keeps out."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import chorusline as cl
from chorusline.collectives.contract.deadlines import Seconds
from chorusline.collectives.contract.errors import ChoruslineError, SecretMismatch
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object, broadcast_object
from chorusline.collectives.stores.rendezvous import store_from_url
from chorusline.collectives.stores.signed_store import VARIABLE, SignedStore, signed
from chorusline.collectives.stores.store import (
    Data,
    HashStore,
    PrefixStore,
    Store,
    encoded_keys,
)
from chorusline.collectives.transports import gloo
from tests import ROOT
from tests.harness.ranks import GLOO, SHARED_MEMORY, Rank, run_ranks, transports

SECRET = "a secret of the tests, 32 bytes."


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def reaches(address: str, port: int) -> bool:
    with socket.socket() as caller:
        caller.settimeout(5)
        return caller.connect_ex((address, port)) == 0


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    """What each body returns or raises."""
    found: list[Any] = [None] * len(bodies)

    def run(number: int) -> None:
        try:
            found[number] = bodies[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_rank_0_listens_only_where_the_url_says(host: str, port: int) -> None:
    store = store_from_url(f"tcp://{host}:{port}?rank=0&world_size=1").store
    store.set("here", "1")
    assert reaches("127.0.0.1", port) or reaches("::1", port)
    assert not reaches("127.0.0.2", port)


def test_the_variables_of_torchrun_name_an_address_as_well(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ADDR": "127.0.0.1", "PORT": str(port)}.items():
        monkeypatch.setenv(f"MASTER_{name}", value)
    store = store_from_url("env://", 0, 1).store
    assert reaches("127.0.0.1", port)
    assert not reaches("127.0.0.2", port)
    del store


def test_a_host_that_a_gateway_hides_listens_where_it_is_told_to(port: int) -> None:
    unlike = "tcp://192.0.2.1"  # an address of nobody, as one of a service of Kubernetes
    with pytest.raises(cl.StoreLost, match=r"requested address .* add the parameter listen=0"):
        store_from_url(f"{unlike}:{port}?rank=0&world_size=1", timeout_s=1)
    store = store_from_url(f"{unlike}:{port}?rank=0&world_size=1&listen=0.0.0.0").store
    store.set("here", "1")
    assert reaches("127.0.0.2", port)


def test_a_port_serves_several_urls_of_one_process_until_the_last_is_gone(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}?rank=0&world_size=1"
    first, second = store_from_url(url).store, store_from_url(url).store
    first.set("key", "1")
    del first
    assert second.get("key") == b"1"
    del second
    assert store_from_url(url).store.num_keys() < 2


@pytest.mark.parametrize("theirs", [None, SECRET + "!"])
def test_a_stranger_at_the_port_is_no_rank(
    theirs: str | None, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHORUSLINE_HOST_ID", "")

    def victim() -> Any:
        url = f"tcp://127.0.0.1:{port}?rank=0&world_size=2"
        with Group.from_url(url, timeout_s=10, secret=SECRET) as group:
            return group.all_gather_object(0).wait()

    def stranger() -> Any:
        url = f"tcp://127.0.0.1:{port}?rank=1&world_size=2"
        with Group.from_url(url, timeout_s=10, secret=theirs) as group:
            return group.all_gather_object(Bomb(tmp_path / "bomb")).wait()

    mine, other = in_threads(victim, stranger)
    assert isinstance(mine, SecretMismatch)
    assert "has no signature" in str(mine) or "another secret" in str(mine)
    assert isinstance(other, ChoruslineError)
    assert not (tmp_path / "bomb").exists()


def in_two_groups(body: Callable[[Group], Any], *stores: Store, backend: str) -> list[Any]:
    def rank(number: int) -> Any:
        with Group.create(stores[number], number, 2, backend=backend, timeout_s=20) as group:
            return body(group)

    return in_threads(lambda: rank(0), lambda: rank(1))


@transports
@pytest.mark.parametrize("theirs", [None, SECRET + "!"])
def test_ranks_with_different_secrets_are_told_so(theirs: str | None, transport: str) -> None:
    below = HashStore()
    stores = signed(below, SECRET), signed(below, theirs)
    for error in in_two_groups(lambda group: group.rank, *stores, backend=transport):
        assert isinstance(error, SecretMismatch), repr(error)


class StoreWithoutNumbers(SignedStore):
    """A store that is lost when the ranks have connected."""

    def multi_get(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> list[bytes]:
        if any(b"/nonce/" in key for key in encoded_keys(keys)):
            raise cl.StoreLost("multi_get", "the server is gone")
        return super().multi_get(keys, timeout_s)


def test_a_rank_that_cannot_read_the_others_numbers_leaves_the_group() -> None:
    before = set(gloo._open)
    below = HashStore()
    stores = signed(below, SECRET), StoreWithoutNumbers(below, SECRET)
    left, lost = in_two_groups(lambda group: group.barrier().wait(), *stores, backend="gloo")
    assert isinstance(lost, cl.StoreLost)
    assert isinstance(left, cl.PeerLost), repr(left)
    assert left.ranks == [1]
    assert set(gloo._open) <= before


OBJECTS: dict[str, Callable[[Group, Any], Any]] = {
    "broadcast_object_list": lambda group, value: group.broadcast_object_list([value], 1).wait(),
    "all_gather_object": lambda group, value: group.all_gather_object(value).wait(),
    "gather_object": lambda group, value: group.gather_object(value, 0).wait(),
    "scatter_object_list": lambda group, value: group.scatter_object_list([value, 1], 1).wait(),
    "send_object_list": lambda group, value: (
        group.recv_object_list([None], 1).wait()
        if group.rank == 0
        else group.send_object_list([value], 0).wait()
    ),
    "among tensors": lambda group, value: all_gather_object(group, value),
    "to all, among tensors": lambda group, value: broadcast_object(group, value, 1),
}


@pytest.mark.parametrize("operation", OBJECTS)
def test_an_object_that_no_rank_has_signed_is_not_unpickled(operation: str, tmp_path: Path) -> None:
    store = signed(HashStore(), SECRET)

    def body(group: Group) -> Any:
        assert OBJECTS[operation](group, group.rank) is not None or group.rank == 1
        if group.rank == 1:
            assert group.seal is not None
            group.seal._key = b"as a stranger on the wire has it"
        return OBJECTS[operation](group, Bomb(tmp_path / "bomb") if group.rank == 1 else 0)

    mine, _ = in_two_groups(body, store, store, backend="gloo")
    assert type(mine) is (SecretMismatch if "among tensors" in operation else cl.GroupAborted)
    assert "the object from rank 1 does not have this group's signature" in str(mine)
    assert not (tmp_path / "bomb").exists()


def test_the_memory_of_one_host_needs_no_signature() -> None:
    store = signed(HashStore(), SECRET)
    assert in_two_groups(lambda group: group.seal, store, store, backend="shared-memory") == [
        None,
        None,
    ]


def test_the_environment_has_a_secret_for_every_store(monkeypatch: pytest.MonkeyPatch) -> None:
    below = HashStore()
    monkeypatch.setenv(VARIABLE, SECRET)
    assert (
        in_two_groups(
            lambda group: group.all_gather_object(group.rank).wait(), below, below, backend="gloo"
        )
        == [[0, 1]] * 2
    )
    values = [value for key, value in below._data.items() if b"given_up" not in key]
    assert values
    assert all(value.startswith(b"signed 1") for value in values)


def test_what_was_sent_in_one_group_does_not_pass_in_another() -> None:
    """Also with one secret: a recording of an earlier run is of no use."""
    keys = set()
    for _ in range(2):
        store = signed(HashStore(), SECRET)
        first, second = in_two_groups(lambda group: group.seal, store, store, backend="gloo")
        assert first._key == second._key
        keys.add(first._key)
    assert len(keys) == 2


class ReplayingStore(HashStore):
    """A store in which somebody without the secret puts back signed values of an earlier run."""

    def __init__(self, earlier: dict[bytes, bytes]) -> None:
        super().__init__()
        self._earlier = earlier

    def multi_get(self, keys: Sequence[Data], timeout_s: Seconds | None = None) -> list[bytes]:
        found = super().multi_get(keys, timeout_s)
        asked = zip(encoded_keys(keys), found, strict=True)
        return [self._earlier.get(key, value) for key, value in asked]


def test_a_recorded_run_does_not_pass_where_the_store_returns_its_numbers() -> None:
    below = HashStore()
    store = signed(below, SECRET)
    _, recording = in_two_groups(lambda group: group.seal, store, store, backend="gloo")
    recorded = recording.sealed(b"what rank 1 sent", 1)
    numbers = {key: value for key, value in below._data.items() if b"/nonce/" in key}
    assert len(numbers) == 2

    def body(group: Group) -> Any:
        # Each rank has the other's earlier number, so that neither reads the other's objects.
        with pytest.raises(
            cl.GroupAborted, match=r"SecretMismatch: the object from rank [01] does"
        ):
            group.all_gather_object(group.rank).wait()
        return group.seal

    replaying = signed(ReplayingStore(numbers), SECRET)
    for seal in in_two_groups(body, replaying, replaying, backend="gloo"):
        with pytest.raises(SecretMismatch, match="object from rank 1 does not have this group's"):
            seal.opened(recorded, 1)


@pytest.mark.parametrize("secret", ["short", b"", 5, ["a" * 32]])
def test_a_secret_that_is_none_is_refused_and_not_shown(secret: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"secret (has|must be)") as caught:
        store_from_url("tcp://127.0.0.1:29500", 1, 2, secret=secret)
    assert "short" not in str(caught.value)


@given(st.binary(max_size=20), st.integers(0, 10**6), st.integers(0, 255))
def test_a_value_that_somebody_changed_is_not_read(value: bytes, at: int, byte: int) -> None:
    below = HashStore()
    store = SignedStore(below, SECRET.encode())
    store.set("key", value)
    store.append("key", b"more")
    stored = bytearray(below.get("key"))
    if stored[at % len(stored)] == byte:
        return
    stored[at % len(stored)] = byte
    below.set("key", bytes(stored))
    with pytest.raises(SecretMismatch, match=r"^key "):
        store.get("key")


def test_a_value_does_not_pass_under_another_key_and_a_cut_one_not_at_all() -> None:
    below = HashStore()
    store = SignedStore(below, SECRET.encode())
    PrefixStore("a", store).set("address", "1")
    for forged in (below.get("a/address"), b"1", below.get("a/address")[:-1]):
        below.set("b/address", forged)
        for read in (
            lambda: PrefixStore("b", store).get("address"),
            lambda: store.add("b/address", 1),
            lambda: store.compare_set("b/address", "1", "2"),
        ):
            with pytest.raises(SecretMismatch):
                read()


async def test_the_ranks_of_a_session_sign_without_being_asked(session: cl.Session) -> None:
    def train(ctx: cl.Context) -> tuple[bool, bytes | None]:
        return ctx.group._store.is_signed, ctx.group._store.secret

    found = await session.run(train)
    assert len(set(found)) == 1
    is_signed, secret = found[0]
    assert is_signed
    assert secret is not None
    assert len(secret) == 32


def where_this_rank_listens(rank: Rank, url: str) -> list[str]:
    """The addresses at which this process accepts connections, in a group that has worked."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    before = listening()
    group = Group.from_url(url, rank.rank, rank.size) if url else rank.group()
    tensor = torch.ones(3)
    group.all_reduce(tensor).wait()
    assert group.all_gather_object(rank.rank).wait() == [0, 1]
    group.barrier().wait()
    return sorted(listening() - before)


def listening() -> set[str]:
    held = set()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # That of the listing itself.
            held.add(str(one.readlink()))
    found = set()
    for family, file in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/self/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found


LISTENS = {
    "memory between ranks of one host": (SHARED_MEMORY, "", [[], []]),
    "`FileStore`": (SHARED_MEMORY, "file://{folder}/store", [[], []]),
    "`tcp://`, `env://`": (SHARED_MEMORY, "tcp://127.0.0.1:{port}", [["127.0.0.1"], []]),
    "Gloo and NCCL between hosts": (GLOO, "", [["127.0.0.1"], ["127.0.0.1"]]),
}
"""By row of the table in docs/security.md: a transport, a URL, and where each rank listens."""
OF_OTHERS = {
    *("`MASTER_PORT`", "Ray", "actors of a session", "what ranks print", "checkpoints"),
    "the process of which later workers",
}
"""How the rows begin of what Ray, a library, a place of files or `is_ours` lets in."""


@pytest.mark.parametrize("row", LISTENS)
def test_the_ranks_listen_where_the_page_says_and_nowhere_else(
    row: str, tmp_path: Path, port: int
) -> None:
    transport, url, expected = LISTENS[row]
    url = url.format(folder=tmp_path, port=port)
    assert run_ranks(where_this_rank_listens, 2, tmp_path, transport, url) == expected


def test_each_row_of_the_page_is_measured_or_of_others() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition("## What listens where")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:]
    begins = {*LISTENS, *OF_OTHERS}
    assert {next(iter(b for b in begins if row.startswith(b)), row) for row in rows} == begins
