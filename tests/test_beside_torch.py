"""What torch's own Join and ZeRO do on the same inputs, printed beside what ours do.

Run with -s to see the figures. Only ours are asserted: torch may mend its own.
"""

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from training_reference import (
    OPTIMIZERS,
    batches_of,
    largest_difference,
    loss_of,
    make_model,
    reference,
)

import chorusline as cl
from collectives.objects import broadcast_object


def with_torch(group, body, *args):
    """Run `body` with torch.distributed over Gloo among the same ranks."""
    path = broadcast_object(group, tempfile.mktemp(prefix="chorusline-gloo-"))
    store = dist.FileStore(path, group.size)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    try:
        return body(group, *args)
    finally:
        dist.destroy_process_group()


def torchs_join(group, lengths, optimizer):
    model = TorchDDP(make_model(torch.float32))
    kind, options = OPTIMIZERS[optimizer]
    zero = TorchZero(model.parameters(), kind, **options)
    with TorchJoin([model, zero]):
        for batch in batches_of(group.rank, lengths[group.rank], torch.float32):
            loss_of(model, batch).backward()
            zero.step()
            zero.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def our_join(group, lengths, optimizer):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    kind, options = OPTIMIZERS[optimizer]
    zero = cl.ZeroRedundancyOptimizer(model, kind, **options)
    with cl.Join([model, zero]):
        for batch in batches_of(group.rank, lengths[group.rank], torch.float32):
            loss_of(model, batch).backward()
            zero.step()
            zero.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_join_with_zero_is_exact_where_torchs_is_not(ranks_of, optimizer):
    lengths = (5, 9)
    expected = reference(lengths, optimizer, torch.float64)
    torchs = ranks_of(2).run(with_torch, torchs_join, lengths, optimizer)
    ours = ranks_of(2).run(our_join, lengths, optimizer)
    theirs = max(largest_difference(mine, expected) for mine in torchs)
    own = max(largest_difference(mine, expected) for mine in ours)
    print(f"{optimizer}, 5 and 9 batches, off the reference by: torch {theirs:.1e}, ours {own:.1e}")
    assert own < 1e-6


def loaded_dictionaries(group):
    """Load a plain AdamW's state into both; which entries of the caller's dictionary survive."""
    plain_model = make_model(torch.float32)
    plain = torch.optim.AdamW(plain_model.parameters())
    loss_of(plain_model, batches_of(0, 1, torch.float32)[0]).backward()
    plain.step()
    survived = []
    for zero in (
        TorchZero(make_model(torch.float32).parameters(), torch.optim.AdamW),
        cl.ZeroRedundancyOptimizer(
            make_model(torch.float32).parameters(), torch.optim.AdamW, group=group
        ),
    ):
        given = copy.deepcopy(plain.state_dict())
        zero.load_state_dict(given)
        survived.append(sum(value is not None for value in given["state"].values()))
    return len(plain.state_dict()["state"]), *survived


def test_loading_leaves_the_callers_dictionary_as_it_is(ranks_of):
    for entries, torchs, ours in ranks_of(2).run(with_torch, loaded_dictionaries):
        print(f"entries of the caller's state: {entries}; left by torch {torchs}, by ours {ours}")
        assert ours == entries
