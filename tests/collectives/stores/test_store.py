"""One contract for all stores, and what prefixes promise.

test_file_store.py and test_torch_store.py have what is peculiar to theirs. test_actor_store.py runs
the contract over the store in an actor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from chorusline.collectives.contract.errors import StoreTimeout
from chorusline.collectives.stores.file_store import FileStore
from chorusline.collectives.stores.signed_store import signed
from chorusline.collectives.stores.store import HashStore, PrefixStore, Store
from chorusline.collectives.stores.torch_store import StoreFromTorch, TorchStore
from tests.contracts.store import StoreContract
from tests.harness.torch_groups import tcp_store

SECRET = b"sixteen bytes or more"

MAKERS: dict[str, Callable[[Path], Store]] = {
    "HashStore": lambda path: HashStore(),
    "FileStore": FileStore,
    "PrefixStore of HashStore": lambda path: PrefixStore("ours", HashStore()),
    "PrefixStore of FileStore": lambda path: PrefixStore(
        b"\xff", PrefixStore("c", FileStore(path))
    ),
    "SignedStore of HashStore": lambda path: signed(HashStore(), SECRET),
    "SignedStore of FileStore": lambda path: PrefixStore("a", signed(FileStore(path), SECRET)),
    "SignedStore of torch's TCPStore": lambda path: signed(StoreFromTorch(tcp_store()), SECRET),
    "SignedStore below torch's": lambda path: StoreFromTorch(
        TorchStore(signed(FileStore(path), SECRET))
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


@pytest.mark.parametrize(
    "over",
    [
        lambda below: PrefixStore("a", below),
        lambda below: signed(below, SECRET),
        lambda below: StoreFromTorch(TorchStore(below)),
    ],
    ids=["PrefixStore", "SignedStore", "StoreFromTorch"],
)
def test_what_is_made_of_a_store_waits_as_long(over: Callable[[Store], Store]) -> None:
    below = HashStore()
    below.set_timeout(0.25)
    store = over(below)
    assert store.timeout_s == 0.25
    with pytest.raises(StoreTimeout, match=r"within 0.25 s"):
        store.get("missing")


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
