"""Which GPU a worker takes: the whole table of what Ray assigns and what CUDA shows.

And Ray itself, which deals GPUs that are not there: what it tells actors, with its hiding of GPUs
switched off and on.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray
import torch

from chorusline.actors.worker.devices import (
    RAY_HIDES_NONE,
    VISIBLE,
    Gpu,
    NoGpu,
    check_gpu,
    choose_gpu,
    environment_of_workers,
    narrowed_by,
)
from chorusline.actors.worker.gpu import own_gpu
from chorusline.collectives.transports.shared_gpus import MAY_SHARE
from tests import ROOT

ALL = {}  # All GPUs of the node are visible.
SHARES = {MAY_SHARE: "1"}


def seen(text: str) -> dict[str, str]:
    return {VISIBLE: text}


def chosen(
    assigned: list[int | str], share: float, environment: dict[str, str], num_visible: int
) -> Gpu:
    """num_visible: how many GPUs torch sees with the variables of the choice."""
    gpu = choose_gpu(assigned, share, environment)
    check_gpu(gpu, assigned, {**environment, **gpu.environment}, num_visible)
    return gpu


@pytest.mark.parametrize("num_visible", range(1, 9))
@pytest.mark.parametrize("assigned", range(8))
def test_with_all_gpus_visible_a_worker_takes_the_one_of_its_number(
    assigned: int, num_visible: int
) -> None:
    if assigned < num_visible:
        assert chosen([assigned], 1, ALL, num_visible) == Gpu(assigned)
        return
    with pytest.raises(NoGpu, match=rf"assigned GPU {assigned} .*torch sees only {num_visible} "):
        chosen([assigned], 1, ALL, num_visible)


def test_among_those_that_are_listed_a_worker_takes_the_place_of_its_own() -> None:
    for listed in itertools.permutations(["4", "5", "GPU-8f2a"]):
        for own in listed:
            found = chosen([own], 1, seen(",".join(listed)), 3)
            assert found == Gpu(listed.index(own))


@pytest.mark.parametrize(
    ("assigned", "share", "environment", "num_visible", "gpu"),
    [
        ([3], 1, seen("3"), 1, Gpu(0)),  # Ray has hidden the others.
        (["3"], 1, seen("3"), 1, Gpu(0)),
        (["5"], 1, seen("4, 5"), 2, Gpu(1)),  # as people write it
        ([2, 1], 2, ALL, 4, Gpu(1)),  # Ray's lists have no order.
        (["7", "6"], 2, seen("6,7"), 2, Gpu(0)),
        ([2], 0.5, ALL, 4, Gpu(2, SHARES)),
        ([0, 1], 1.5, ALL, 2, Gpu(0)),
        (["MIG-b"], 1, seen("MIG-a,MIG-b"), 1, Gpu(0, {VISIBLE: "MIG-b"})),
        ([3], 1, {RAY_HIDES_NONE: "0"}, 4, Gpu(0, {VISIBLE: "3"})),  # which Ray 2.50 does not do
        (["3"], 1, {RAY_HIDES_NONE: "0", **seen("3")}, 1, Gpu(0, {VISIBLE: "3"})),
        (["7", "6"], 2, {RAY_HIDES_NONE: "0", **seen("6,7")}, 2, Gpu(0, {VISIBLE: "6,7"})),
        ([3], 1, {RAY_HIDES_NONE: "1"}, 4, Gpu(3)),
        (["MIG-b"], 0.5, seen("MIG-b"), 1, Gpu(0, {VISIBLE: "MIG-b", **SHARES})),
    ],
)
def test_what_ray_assigns_and_what_cuda_shows_make_one_gpu(
    assigned: list[int | str],
    share: float,
    environment: dict[str, str],
    num_visible: int,
    gpu: Gpu,
) -> None:
    assert chosen(assigned, share, environment, num_visible) == gpu


@pytest.mark.parametrize(
    ("assigned", "share", "environment", "num_visible", "says"),
    [
        ([], 0, ALL, 8, "no GPU; ask for one with use_gpu=True"),
        ([0], 1, ALL, 0, r"sees no CUDA device \(CUDA_VISIBLE_DEVICES is not set\)"),
        (["MIG-a"], 1, seen("MIG-a,MIG-b"), 0, r"no CUDA device \(.* is 'MIG-a'\)"),
        ([0], 1, seen(""), 0, "is '' in it, which does not contain that GPU"),
        ([0], 1, seen("NoDevFiles"), 0, "is 'NoDevFiles'"),
        ([3], 1, seen("0,1"), 2, "assigned GPU 3 .*'0,1' in it, which does not contain that GPU"),
        (["GPU-b"], 1, seen("GPU-a"), 1, "assigned GPU GPU-b .*does not contain that GPU. Set it"),
        (
            ["0", "1", "2"],
            1,
            seen("0,1,2"),
            3,
            "assigned 1 GPU .* and names 0, 1, 2: .*differs from",
        ),
        (["1"], 1, seen("0,-1,1"), 1, "would be number 2 here, and torch sees only 1"),
        ([1], 1, ALL, 1, "would be number 1 here, and torch sees only 1"),
    ],
)
def test_what_fits_no_gpu_is_told_in_a_sentence(
    assigned: list[int | str],
    share: float,
    environment: dict[str, str],
    num_visible: int,
    says: str,
) -> None:
    with pytest.raises(NoGpu, match=says.replace("Set it", "Set CUDA_VISIBLE_DEVICES where")):
        chosen(assigned, share, environment, num_visible)


def test_no_two_workers_of_a_node_get_one_gpu_however_it_is_listed() -> None:
    uuids = ["GPU-c", "GPU-a", "GPU-d", "GPU-b"]
    for environment, names in (
        (ALL, [0, 1, 2, 3]),
        (seen("0,1,2,3"), ["0", "1", "2", "3"]),
        (seen("6,2,4,0"), ["6", "2", "4", "0"]),
        (seen(",".join(uuids)), uuids),
    ):
        taken = [chosen([name], 1, environment, 4).index for name in names]
        assert taken == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("variables", "assigned", "shown"),
    [
        (seen("MIG-a,MIG-b"), ["MIG-b"], "MIG-b"),
        ({RAY_HIDES_NONE: "0", **seen("0,1")}, ["1"], "1"),
    ],
)
def test_a_list_that_a_worker_narrows_is_counted_afterwards_only(
    variables: dict[str, str], assigned: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch may ask CUDA for the number, and CUDA reads the list once."""
    counted: list[str | None] = []

    def device_count() -> int:
        counted.append(os.environ.get(VISIBLE))
        return 1

    context = SimpleNamespace(runtime_env={}, get_assigned_resources=lambda: {"GPU": 1})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: assigned)
    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert own_gpu() == torch.device("cuda:0")
    assert {*counted} == {shown}


def test_workers_on_gpus_see_all_of_them_unless_the_user_says_otherwise() -> None:
    assert environment_of_workers({}, use_gpu=False) == {}
    assert environment_of_workers({}, use_gpu=True) == {"env_vars": {RAY_HIDES_NONE: "1"}}
    mine = {"pip": ["timm"], "env_vars": {RAY_HIDES_NONE: "0", "A": "b"}}
    assert environment_of_workers(mine, use_gpu=True) == mine


def test_a_list_of_gpus_in_the_runtime_environment_is_told_where_it_belongs() -> None:
    assert narrowed_by({}) is None and narrowed_by({"env_vars": None}) is None
    told = narrowed_by({"env_vars": seen("0,1")})
    assert told is not None and "two workers may get the same one" in told
    assert "before `ray start`" in told


# -- Ray's own dealing -------------------------------------------------------------------------

WITH_RAY = """
import asyncio, os, sys
import ray
import chorusline as cl
from chorusline.actors.worker.devices import NoGpu, choose_gpu, environment_of_workers
from chorusline.actors.worker.gpu import own_gpu

ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)

class Actor:
    def found(self):
        share = ray.get_runtime_context().get_assigned_resources()["GPU"]
        gpu = choose_gpu(ray.get_gpu_ids(), share, os.environ)
        return gpu.index, os.environ.get("CUDA_VISIBLE_DEVICES")

    def own(self):
        try:
            return str(own_gpu())
        except NoGpu as error:
            return str(error)

def deal(share, count, variables):
    environment = environment_of_workers({"env_vars": variables}, use_gpu=True)
    kind = ray.remote(Actor).options(num_cpus=0, num_gpus=share, runtime_env=environment)
    actors = [kind.remote() for _ in range(count)]
    found = ray.get([actor.found.remote() for actor in actors], timeout=60)
    for actor in actors:
        ray.kill(actor)
    return sorted(found, key=str)

print(deal(1, 4, {}))
print(deal(0.5, 2, {}))
print(deal(1, 2, {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}))

narrow = {"env_vars": {"CUDA_VISIBLE_DEVICES": "0"}}
kind = ray.remote(Actor).options(num_cpus=0, num_gpus=1, runtime_env=narrow)
print(ray.get(kind.remote().own.remote(), timeout=60))

async def refused():
    try:
        async with cl.Session(2, use_gpu=True):
            pass
    except cl.StartupError as error:
        print(error)

asyncio.run(refused())
"""


@pytest.mark.slow  # A cluster with GPUs, and processes of the workers' own environment.
def test_ray_deals_gpus_and_workers_find_their_own_among_all() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITH_RAY],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key not in (VISIBLE, "RAY_ADDRESS")}
        | {"RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr
    whole, halves, hidden, narrowed, *refused = done.stdout.splitlines()
    assert whole == str([(number, None) for number in range(4)])
    # Of one GPU; Ray may not have counted that of the last session's rank 0 as free yet.
    assert halves in [str([(number, None)] * 2) for number in range(4)]
    assert [index for index, _ in eval(hidden)] == [0, 0]
    assert len({shown for _, shown in eval(hidden)}) == 2
    assert "the runtime environment sets CUDA_VISIBLE_DEVICES='0' in all workers" in narrowed
    said = "\n".join(refused)
    assert "2 of 2 workers did not start" in said
    assert "torch sees no CUDA device (CUDA_VISIBLE_DEVICES is not set)" in said
    assert "Traceback" not in said
