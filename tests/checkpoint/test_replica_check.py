"""The numbers of an object that a save compares between the ranks."""

import math

import torch

from chorusline.runtime.checkpoint.replica_check import numbers_in, why_unlike


def test_counts_are_found_and_what_is_no_count_is_left_out():
    state = {
        "step": 3,
        "rates": [0.5, torch.tensor(0.25)],
        "average": {"n": torch.tensor([7])},
        "weights": torch.zeros(2),
        "name": "sgd",
        "large": 1 << 2000,
        "nowhere": torch.zeros((), device="meta"),
        "wave": torch.zeros((), dtype=torch.complex64),
    }
    found = {"o.step": 3.0, "o.rates.0": 0.5, "o.rates.1": 0.25, "o.average.n": 7.0}
    assert numbers_in("o", state) == found


def test_a_state_of_any_depth_and_size_is_looked_at_in_part():
    deep, twice, itself = [], (1,), [5]
    for _ in range(10_000):
        deep = [deep]
    for _ in range(60):
        twice = (twice, twice)  # 2**60 numbers in 60 tuples
    itself.append(itself)
    state = {"deep": deep, "itself": itself, "step": 3, "twice": twice, "x": [["x"] * 10**6]}
    found = numbers_in("o", state)
    assert (found["o.step"], found["o.itself.0"], found["o.itself.1.0"]) == (3.0, 5.0, 5.0)
    assert len(found) <= 10_000


def test_what_differs_is_named_with_its_ranks():
    alike = {"o.step": 3.0, "o.loss": math.nan}
    assert why_unlike([alike, {}, dict(alike), {}]) is None
    unlike = why_unlike([{}, alike, {"o.step": 2.0}])
    assert unlike == ("o.step is 3 on rank 1, 2 on rank 2", (2,))
