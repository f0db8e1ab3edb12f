"""How samples are dealt, without any rank: a pure function and the iterator over it."""

import itertools

import pytest
import torch

from runtime.dealing import deal
from runtime.sharding import Shard


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


def test_epoch_and_seed_change_the_order_and_nothing_else_does():
    first = deal(50, world_size=2, seed=3, epoch=1)
    assert first == deal(50, world_size=2, seed=3, epoch=1)
    assert first != deal(50, world_size=2, seed=3, epoch=2)
    assert first != deal(50, world_size=2, seed=4, epoch=1)


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
    with pytest.raises(TypeError, match=r"list\(dataset\) makes one"):
        Shard(iter([1]), 1, rank=0, world_size=1)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        Shard([1], 0, rank=0, world_size=1)
    with pytest.raises(ValueError, match="has 2 keys for 3 samples"):
        deal(3, world_size=1, keep_together=["a", "b"])
