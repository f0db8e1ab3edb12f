"""Who can get at what ranks share: nobody but this user, and nobody by the network unless told."""

from __future__ import annotations

import os
import stat
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.open_sockets import descriptors, names_of_sockets, ports
from tests.harness.programs import output_of
from tests.harness.ranks import GLOO, SHARED_MEMORY, Rank, run_ranks

NOBODY = 65534


def may_a_stranger_open(path: str) -> bool:
    """Whether another user of this host may, who is nobody in particular."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.close(os.open(path, os.O_RDONLY))
            os.write(writer, b"yes")
        except PermissionError:
            os.write(writer, b"no")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    answer = os.read(reader, 9)
    os.close(reader)
    assert answer, "the child could not become another user"
    return answer == b"yes"


def use_everything(rank: Rank, path: str) -> Any:
    """What a rank has open in a group that has moved tensors, messages and objects."""
    before, ports_before = descriptors(), ports()
    with rank.group() as group:
        group.all_reduce(torch.ones(3)).wait()
        group.all_gather_object("anything").wait()
        with group.coalesce() as work:
            group.send(torch.ones(3), 1 - rank.rank)
            group.recv(torch.ones(3), 1 - rank.rank)
        work.wait()
        new = {fd: to for fd, to in descriptors().items() if before.get(fd) != to}
        memory = [fd for fd, to in new.items() if "memfd:" in to]
        modes = [stat.S_IMODE(os.fstat(fd).st_mode) for fd in memory]
        opened: list[bool] = []
        if os.getuid() == 0 and rank.rank == 0:
            assert may_a_stranger_open("/proc/version")
            ours = [f"/proc/{os.getpid()}/fd/{fd}" for fd in memory]
            opened = [may_a_stranger_open(one) for one in (path, *ours)]
        group.barrier().wait()
        listening = [at for at in ports() if at not in ports_before]
        return modes, names_of_sockets(), opened, listening


def test_memory_and_the_stores_file_are_private_and_nothing_listens(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for modes, names, opened, listening in run_ranks(
        use_everything, 2, tmp_path, SHARED_MEMORY, str(path)
    ):
        assert len(modes) >= 2, "the group's memory, and that of its objects"
        assert set(modes) == {0o600}
        assert names == []
        assert not any(opened)
        assert listening == []


def mode_of_the_store(rank: Rank, path: str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def test_the_stores_file_is_for_this_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        modes = run_ranks(mode_of_the_store, 1, tmp_path, SHARED_MEMORY, str(tmp_path / "store"))
    finally:
        os.umask(before)
    assert modes == [0o600]


def test_gloo_listens_on_the_interface_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo, not we; docs/collectives.md says so. Also: the test above sees what listens."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for _, names, _, listening in run_ranks(
        use_everything, 2, tmp_path, GLOO, str(tmp_path / "store")
    ):
        assert names == []
        assert listening
        assert {at.partition(":")[0] for at in listening} <= {"0100007F", f"{1 << 24:032X}"}


# -- Ray's token authentication --------------------------------------------------------------------

WITH_TOKEN = """
    import asyncio, os, subprocess, sys
    import ray, torch
    import chorusline as cl

    STRANGER = '''
    import sys
    from ray._raylet import GcsClient
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)
    '''

    def train(ctx):
        tensor = torch.ones(3)
        ctx.group.all_reduce(tensor).wait()
        ctx.report(total=tensor.sum().item())
        return tensor.tolist()

    def ask(mode):
        return subprocess.run(
            [sys.executable, "-c", STRANGER.replace("    ", ""), address],
            env=os.environ | {"RAY_AUTH_MODE": mode}, capture_output=True, text=True, timeout=60,
        )

    async def main():
        global address
        async with cl.Session(num_workers=2, startup_timeout_s=150) as session:
            print(await session.run(train))
            address = ray.get_runtime_context().gcs_address
            assert ask("token").returncode == 0, "this user's token opens the cluster"
            assert "InvalidAuthToken" in ask("disabled").stderr, "nobody else gets in"

    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_session_works_where_rays_token_authentication_is_on(tmp_path: Path) -> None:
    """The token lies in a home of the test's own."""
    program = textwrap.dedent(WITH_TOKEN)
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    said = output_of("-c", program, timeout_s=280, environment=environment)
    assert said.strip() == str([[2.0] * 3] * 2)
    assert (tmp_path / ".ray" / "auth_token").read_text()
