"""Ranks that share a GPU: what NCCL finds in its environment, and that it then connects them."""

from __future__ import annotations

import os

import pytest
import torch

import chorusline as cl
from chorusline.collectives.contract.errors import CollectiveError
from chorusline.collectives.transports.shared_gpus import MAY_SHARE, GpuPlace, environment_for
from chorusline.runtime.commands import doctor
from tests.harness.ranks import Rank, error_of
from tests.harness.stand_in_gpu import nccl
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in

OLD, NEW, NEWER = 22809, 23007, 23102
SMALL, TOGETHER = {"NCCL_MAX_CTAS": "2"}, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
NO_NVLS = {"NCCL_NVLS_ENABLE": "0"}
LOCAL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
A, B = GpuPlace("host", "01", "", "a"), GpuPlace("host", "01", "", "b")
OTHER_GPU, ELSEWHERE = GpuPlace("host", "02", "", "c"), GpuPlace("another host", "01", "", "d")
PART, OTHER_PART = GpuPlace("host", "03", "MIG-1", "e"), GpuPlace("host", "03", "MIG-2", "f")
LATER = GpuPlace("host", "04", "", "h", may_share=True)


@pytest.mark.parametrize(
    ("places", "version", "expected"),
    [
        ([A, OTHER_GPU], OLD, {}),
        ([A, ELSEWHERE], NEW, {}),  # the same address, on another machine
        ([A, B], NEW, SMALL | TOGETHER | NO_NVLS),
        ([A, B], NEWER, SMALL | TOGETHER),
        ([OTHER_GPU, A, B], NEWER, SMALL | TOGETHER),  # NCCL compares all pairs of ranks.
        ([ELSEWHERE, A, B], NEWER, SMALL | TOGETHER),
        ([A, B], OLD, SMALL | LOCAL | {"NCCL_HOSTID": "a"}),
        ([A, B, OTHER_GPU], OLD, SMALL | LOCAL | {"NCCL_HOSTID": "a"}),
        ([OTHER_GPU, A, B], OLD, SMALL | LOCAL),
        ([A, B, ELSEWHERE], OLD, SMALL | {"NCCL_HOSTID": "a"}),  # lo does not reach that host
        ([LATER], NEWER, SMALL | TOGETHER),
        ([LATER], OLD, SMALL | LOCAL | {"NCCL_HOSTID": "h"}),
        ([PART, A], NEW, {}),
        ([PART, OTHER_PART], NEWER, TOGETHER),
        ([PART, OTHER_PART], OLD, LOCAL | {"NCCL_HOSTID": "e"}),
        ([PART, PART._replace(process="g")], NEWER, SMALL | TOGETHER),
    ],
)
def test_a_rank_gets_what_nccl_needs_of_its_version(
    places: list[GpuPlace], version: int, expected: dict[str, str]
) -> None:
    assert environment_for(places, 0, version) == expected


def test_no_two_ranks_of_a_shared_gpu_have_one_host_hash() -> None:
    ids = [environment_for([A, B, OTHER_GPU], rank, OLD).get("NCCL_HOSTID") for rank in range(3)]
    assert ids == ["a", "b", None]


def sum_on(rank: Rank, version: int, gpus: list[str]) -> tuple[list[float], str]:
    nccl.settings.bus, nccl.settings.version = gpus[rank.rank], version
    with rank.group() as group:
        tensor = torch.full((3,), rank.rank + 1.0, device=group.device)
        group.all_reduce(tensor).wait_on_host()
    return tensor.tolist(), os.environ.get("NCCL_HOSTID", "")


@needs_stand_in
@pytest.mark.parametrize("version", [OLD, NEW, NEWER])
@pytest.mark.parametrize("gpus", ["aaa", "aab", "baa"])
def test_ranks_on_one_gpu_and_others_connect_with_any_nccl(version: int, gpus: str) -> None:
    with StandInRanks(3) as ranks:
        sums, hosts = zip(*ranks.run(sum_on, version, list(gpus)), strict=True)
    assert list(sums) == [[6.0] * 3] * 3
    assert len(set(hosts)) == (3 if version == OLD else 1)


def sum_alone_and_then_together(rank: Rank, version: int) -> list[float]:
    nccl.settings.bus, nccl.settings.version = "a", version
    os.environ[MAY_SHARE] = "1"
    if rank.rank == 0:
        with cl.Group.create(cl.HashStore(), 0, 1, "cuda:0") as alone:
            alone.barrier().wait_on_host()
    return sum_on(rank, version, ["a", "a"])[0]


@needs_stand_in
@pytest.mark.parametrize("version", [OLD, NEW, NEWER])
def test_a_rank_that_comes_later_may_share_the_gpu_of_the_first(version: int) -> None:
    """NCCL reads its environment once, when the first one is still alone."""
    with StandInRanks(2) as ranks:
        assert ranks.run(sum_alone_and_then_together, version) == [[3.0] * 3] * 2


def refused(rank: Rank) -> str:
    nccl.settings.bus, nccl.settings.version = "0000:01:00.0", OLD
    os.environ["NCCL_HOSTID"] = "of the user"
    error = error_of(lambda: rank.group())
    assert isinstance(error, CollectiveError)
    return str(error)


@needs_stand_in
def test_what_the_user_sets_stays_and_an_error_names_the_version() -> None:
    with StandInRanks(2) as ranks:
        for said in ranks.run(refused):
            assert "NCCL_ERROR_INVALID_USAGE" in said and "NCCL 2.28.9" in said


def ask_doctor(rank: Rank, version: int, variables: dict[str, str]) -> list[str]:
    nccl.settings.version = version
    os.environ.update(variables)
    return [finding.says for finding in doctor._nccl()]


@needs_stand_in
def test_doctor_names_the_version_and_what_keeps_ranks_on_one_gpu_from_connecting() -> None:
    nvls = {"NCCL_NVLS_ENABLE": "1"}
    with StandInRanks(1) as ranks:
        (usual,) = ranks.run(ask_doctor, 23203, {})
        (refused,) = ranks.run(ask_doctor, 23203, nvls)
        (old,) = ranks.run(ask_doctor, OLD, nvls)  # Here each such rank is the only one of a host.
    assert "2.32.3" in usual[0] and "cannot connect" not in usual[0]
    assert "cannot connect with NCCL_NVLS_ENABLE=1" in refused[0]
    assert "good enough for tests and notebooks on one GPU, but slow" in old[0]
    assert "cannot connect" not in old[0]


def connect_with_nvls(rank: Rank, version: int) -> str:
    nccl.settings.bus, nccl.settings.version = "a", version
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    return str(error_of(lambda: rank.group()))


@needs_stand_in
def test_what_doctor_says_of_nvls_is_what_happens() -> None:
    with StandInRanks(2) as ranks:
        assert all("INVALID_USAGE" in told for told in ranks.run(connect_with_nvls, 23203))
    with StandInRanks(2) as ranks:
        assert ranks.run(connect_with_nvls, OLD) == ["None", "None"]
