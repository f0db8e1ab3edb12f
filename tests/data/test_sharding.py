"""How samples are dealt, without any rank: a pure function and the iterator over it."""

import itertools
import sys
import tracemalloc

import numpy as np
import pytest
import torch

import chorusline as cl
from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.data.dealing import deal


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("num_samples", [1, 10, 97])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_is_dealt_exactly_once(world_size, num_samples, shuffle):
    hands = deal(num_samples, world_size=world_size, shuffle=shuffle)
    assert sorted(itertools.chain(*hands)) == list(range(num_samples))
    assert max(map(len, hands)) - min(map(len, hands)) <= 1


def test_samples_of_one_key_stay_on_one_rank():
    keys = ["a"] * 3 + ["b"] * 11 + ["c"] + ["a"] * 2 + ["d"] * 5
    hands = deal(len(keys), world_size=3, keep_together=keys)
    assert sorted(itertools.chain(*hands)) == list(range(len(keys)))
    held = [{keys[number] for number in hand} for hand in hands]
    assert sum(len(kinds) for kinds in held) == len(set(keys))


def test_the_hands_of_all_ranks_take_eight_bytes_a_sample():
    num_samples = 200_000
    tracemalloc.start()
    shard = Shard(range(num_samples), 4, rank=1, world_size=4)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(shard) == num_samples // 16
    assert kept < 12 * num_samples, "lists take five times as much"


def test_epoch_and_seed_change_the_order_and_nothing_else_does():
    first = deal(50, world_size=2, seed=3, epoch=1)
    assert first == deal(50, world_size=2, seed=3, epoch=1)
    assert first != deal(50, world_size=2, seed=3, epoch=2)
    assert first != deal(50, world_size=2, seed=4, epoch=1)


def test_a_loop_over_unequal_batches_without_a_join_is_warned_of_where_it_stands(alone):
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1), group=alone)
    optimizer = torch.optim.SGD(model.parameters())
    shard = Shard(range(3), 1, rank=0, world_size=2)

    def train() -> None:
        for numbers in shard:
            model(numbers.float()[:, None]).sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="rank 0: 2, rank 1: 1.*not inside a Join") as warned:
        train()
    assert [one.filename for one in warned] == [__file__]


def test_where_a_rank_has_no_batch_at_all_the_loop_is_warned_of_when_it_begins(alone):
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1), group=alone)
    shard = Shard(range(1), 1, rank=0, world_size=2)
    with pytest.warns(UserWarning, match="rank 0: 1, rank 1: 0.*not inside a Join"):
        next(iter(shard))
    del model  # Without a model that lives there is nothing to warn of.


def test_batches_that_are_listed_before_a_join_need_none_there(alone, recwarn):
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1), group=alone)
    batches = list(Shard(range(3), 1, rank=0, world_size=2))
    with cl.Join([model]):
        for numbers in batches:
            model(numbers.float()[:, None]).sum().backward()
    assert not [str(one.message) for one in recwarn if "inside a Join" in str(one.message)]


def test_batches_of_all_ranks_cover_the_dataset():
    dataset = torch.arange(23)
    shards = [Shard(dataset, 4, rank=rank, world_size=3, epoch=5) for rank in range(3)]
    batches = [[batch.tolist() for batch in shard] for shard in shards]
    assert [len(mine) for mine in batches] == shards[0].batches_per_rank == list(map(len, shards))
    assert sorted(itertools.chain(*itertools.chain(*batches))) == list(range(23))


def test_drop_last_leaves_out_what_does_not_fill_a_batch():
    shard = Shard(range(10), 4, rank=0, world_size=1, drop_last=True, collate_fn=tuple)
    assert [len(batch) for batch in shard] == [4, 4]


def test_unfit_datasets_are_refused_with_the_mend():
    with pytest.raises(ValueError, match="the dataset is empty"):
        Shard([], 1, rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"the range has no end, .*leave repeat\(\) out"):
        Shard(range(sys.maxsize), 1, rank=0, world_size=1)
    with pytest.raises(TypeError, match=r"make a Stream\(data\) in the program"):
        Shard(iter([1]), 1, rank=0, world_size=1)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        Shard([1], 0, rank=0, world_size=1)
    with pytest.raises(ValueError, match="has 2 keys for 3 samples"):
        deal(3, world_size=1, keep_together=["a", "b"])


@pytest.mark.parametrize("lengths", [(4, 7), (7, 4), (5, 5)])
def test_two_shards_may_be_iterated_side_by_side(lengths):
    shards = [Shard(range(n), 1, rank=0, world_size=1, shuffle=False) for n in lengths]
    pairs = [(one.item(), other.item()) for one, other in zip(*shards, strict=False)]
    assert pairs == [(n, n) for n in range(min(lengths))]
    first, second = iter(shards[0]), iter(shards[1])
    next(first), next(second)
    first.close()
    assert next(second).item() == 1, "it is still there when the one around it was left"
    second.close()


@pytest.mark.parametrize(
    ("device", "told"),
    [("gpu", "torch does not know the device"), ("cuda", "ctx.device"), ("cuda:3", "ctx.device")],
)
def test_a_device_that_the_process_does_not_have_is_refused_when_sharded(device, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=told):
        Shard(torch.arange(6), 2, rank=0, world_size=1, device=device)


def test_a_dataset_that_has_changed_its_length_is_refused_until_it_is_sharded_again():
    samples = list(range(6))
    shard = Shard(samples, 2, rank=0, world_size=2)
    assert len(list(shard)) == 2
    samples += [6, 7, 8]
    with pytest.raises(ValueError, match=r"6 samples when ctx\.shard was called, and has 9 now"):
        next(iter(shard))
    again = [Shard(samples, 2, rank=rank, world_size=2, epoch=1) for rank in range(2)]
    assert sorted(n for shard in again for batch in shard for n in batch.tolist()) == [*range(9)]


KEYS_OF_13 = [number // 3 for number in range(13)]


@pytest.mark.parametrize(
    "keys",
    [
        torch.tensor(KEYS_OF_13),
        np.array(KEYS_OF_13),
        [torch.tensor(key) for key in KEYS_OF_13],
        [np.int64(key) for key in KEYS_OF_13],
        [[key, "a"] for key in KEYS_OF_13],
        torch.tensor([[key, 1] for key in KEYS_OF_13]),
        torch.utils.data.TensorDataset(torch.tensor(KEYS_OF_13)),
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_keys_are_what_is_in_tensors_arrays_and_lists(keys):
    assert deal(13, world_size=3, keep_together=keys) == deal(
        13, world_size=3, keep_together=KEYS_OF_13
    )
    for rank in range(2):
        shards = [
            list(cl.Shard(list(range(13)), 2, rank=rank, world_size=2, keep_together=one))
            for one in (keys, KEYS_OF_13)
        ]
        assert [batch.tolist() for batch in shards[0]] == [batch.tolist() for batch in shards[1]]


def test_what_cannot_be_a_key_is_refused():
    with pytest.raises(TypeError, match="a key of keep_together cannot be compared"):
        deal(2, world_size=1, keep_together=[{1}, {2}])


def test_an_iteration_that_an_error_has_ended_does_not_look_as_if_its_epoch_were_over():
    class Torn:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, number: int) -> int:
            if number == 2:
                raise OSError("the file is torn")
            return number

    shard = Shard(Torn(), 2, rank=0, world_size=1, shuffle=False)
    batches = iter(shard)
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(OSError, match="the file is torn"):
        next(batches)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"ended with an error \(OSError: the file is torn\)"
        ):
            next(batches)
    assert shard.taken_ids == [0, 1]
