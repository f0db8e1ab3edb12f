"""What torch's own Join and ZeRO do on the same inputs, printed beside what ours do.

Run with -s to see the figures. Only ours are asserted: torch may mend its own.
"""

import copy
import time

import pytest
import torch
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.harness.torch_groups import torch_over
from tests.references.training import (
    OPTIMIZERS,
    batches_of,
    largest_difference,
    loss_of,
    make_model,
    reference,
)


def with_torch(group, body, *args, timeout_s=60.0):
    """Run `body` with torch.distributed over Gloo among the same ranks."""
    with torch_over(group, "gloo", timeout_s):
        return body(group, *args)


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


def all_reduces(step):
    """How many all-reduces torch issues in step()."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    return sum(event.name == "c10d::allreduce_" for event in profiled.events())


def all_reduces_around_torchs_join(group):
    model = TorchDDP(make_model(torch.float32, batch_norm=True))

    def step():
        loss_of(model, batches_of(group.rank, 1, torch.float32)[0]).backward()

    step()  # The first one builds the buckets.
    step()
    counts = [all_reduces(step)]
    with TorchJoin([model]):
        counts.append(all_reduces(step))
    counts.append(all_reduces(step))
    return counts


def operations_around_our_join(group):
    model = cl.DistributedDataParallel(make_model(torch.float32, batch_norm=True), group)
    counts = []

    def step():
        before = group.statistics.snapshot()
        loss_of(model, batches_of(group.rank, 1, torch.float32)[0]).backward()
        counts.append(group.statistics.since(before).total_operations())

    for _ in range(3):  # In the first two the ranks compare their parameters.
        step()
    with cl.Join([model]):
        step()
    step()
    return counts[2:]


def test_a_join_leaves_no_collective_behind_where_torchs_does(ranks_of):
    before, inside, after = ranks_of(2).run(with_torch, all_reduces_around_torchs_join)[0]
    ours = ranks_of(2).run(operations_around_our_join)[0]
    print(f"all-reduces of a step before, inside and after: torch {before}, {inside}, {after}")
    print(f"operations of a step before, inside and after: ours {ours}")
    assert len(set(ours)) == 1


_TIMEOUT_S = 3.0


def stranded_by_torch(group):
    """Rank 1 raises in its second step and lives on; how long rank 0 waits, in seconds."""
    model = TorchDDP(make_model(torch.float32))
    waited = None
    try:
        with TorchJoin([model]):
            for number, batch in enumerate(batches_of(group.rank, 3, torch.float32)):
                if group.rank == 1 and number == 1:
                    raise KeyError("no such column")
                began = time.monotonic()
                loss_of(model, batch).backward()
    except KeyError:
        pass
    except RuntimeError:
        waited = time.monotonic() - began
    group.barrier().wait()
    return waited


def freed_by_ours(group):
    with another_group(group, _TIMEOUT_S) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        waited, told = None, ""
        try:
            with cl.Join([model]):
                for number, batch in enumerate(batches_of(own.rank, 3, torch.float32)):
                    if own.rank == 1 and number == 1:
                        raise KeyError("no such column")
                    began = time.monotonic()
                    loss_of(model, batch).backward()
        except KeyError:
            pass
        except cl.GroupAborted as error:
            waited, told = time.monotonic() - began, str(error)
        group.barrier().wait()
    return waited, told


def test_an_exception_frees_the_peers_where_torchs_wait_for_the_timeout(ranks_of):
    torchs, _ = ranks_of(2).run(_with_short_timeout, stranded_by_torch)
    (ours, told), _ = ranks_of(2).run(freed_by_ours)
    print(f"waited of a timeout of {_TIMEOUT_S} s: torch {torchs}, ours {ours:.3f} s")
    assert "no such column" in told
    assert ours < _TIMEOUT_S / 2


def _with_short_timeout(group, body):
    return with_torch(group, body, timeout_s=_TIMEOUT_S)
