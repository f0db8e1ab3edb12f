"""A network that stops carrying anything, between ranks that both live: as with a cable pulled at
the switch, no packet comes back to say so."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.references.killed_runs import Kind, assert_as_if_nothing_was

RANK = """
import json, sys, time
from pathlib import Path
import torch
import chorusline as cl

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
store = cl.FileStore(folder / "store")
group = cl.Group.create(store, rank, 2, timeout_s=30)
assert group.backend == "gloo"
group.timeout_s = 3.0
(folder / f"ready-{rank}").touch()
began_at = time.monotonic()
try:
    while True:
        began_at = time.monotonic()
        group.all_reduce(torch.ones(1000)).wait()
        time.sleep(0.01)
except cl.CollectiveError as error:
    took_s = time.monotonic() - began_at
    told = [type(error).__name__, str(error)]
(folder / f"over-{rank}").touch()
while not (folder / "healed").exists():
    time.sleep(0.02)
group.close()
with cl.Group.create(store, rank, 2, generation=1, timeout_s=30) as again:
    values = torch.full((3,), rank + 1.0)
    again.all_reduce(values).wait()
print(json.dumps([took_s, told, values.tolist()]))
"""

# In a network of its own, with a /run of its own, where `ip netns` keeps its names, and with ids of
# processes of its own: all of it goes with the first process.
NETWORK = """
set -e
python=$1 program=$2 folder=$3
mount -t tmpfs tmpfs /run
ip link add switch type bridge
ip link set switch up
for number in 0 1; do
    ip netns add host$number
    ip link add port$number type veth peer name eth0 netns host$number
    ip link set port$number master switch up
    ip -n host$number addr add 10.11.12.1$number/24 dev eth0
    ip -n host$number link set eth0 up
    ip -n host$number link set lo up
done
on() { GLOO_SOCKET_IFNAME=eth0 CHORUSLINE_HOST_ID=host$1 ip netns exec host"$@"; }
until_there() { for i in $(seq 900); do [ -e "$1" ] && return; sleep 0.1; done; exit 3; }
"""

OF_RANKS = """
for rank in 0 1; do on $rank "$python" "$program" $rank "$folder" > "$folder/said-$rank" 2>&1 & done
until_there "$folder/ready-0"; until_there "$folder/ready-1"
sleep 0.3
ip link set port1 down
until_there "$folder/over-0"; until_there "$folder/over-1"
ip link set port1 up
touch "$folder/healed"
wait
"""


def in_networks(script: str, program: str, folder: Path, timeout_s: float) -> None:
    """Run NETWORK and then `script`, which starts `program` on the hosts; skips where it may not.
    What they have printed is in the files said-* of the folder."""
    allowed = shutil.which("ip") and shutil.which("unshare")
    if not allowed or subprocess.run(["unshare", "-mnpf", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets us make no network namespaces, or has no `ip`")
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [
            *("unshare", "-mnpf", "--mount-proc", "--kill-child", "bash", "-c", NETWORK + script),
            *("network", sys.executable, str(folder / "program.py"), str(folder)),
        ],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    said = [file.read_text() for file in folder.glob("said-*")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *said])


@pytest.mark.promise("a stopped process, a network that carries nothing any more")
def test_a_partition_is_found_by_the_deadline_on_both_sides_and_they_meet_again(
    tmp_path: Path,
) -> None:
    in_networks(OF_RANKS, RANK, tmp_path, timeout_s=110)
    for rank in range(2):
        words = (tmp_path / f"said-{rank}").read_text()
        took_s, (kind, text), values = json.loads(words.splitlines()[-1])
        assert kind == "CollectiveTimeout", text
        assert "all_reduce" in text and "within 3 s" in text, text
        assert 2.5 < took_s < 10, f"rank {rank} was stuck for {took_s} s"
        assert values == [3.0, 3.0, 3.0]


SESSION = """
import asyncio, os, pickle, sys, time
from pathlib import Path
import ray
import chorusline as cl
from chorusline.actors.fault_plan import Instant
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.references.killed_runs import Kind, train

folder = Path(sys.argv[1])


def is_cut_off_in_the_third_step(ctx, optim):
    if os.environ["CHORUSLINE_HOST_ID"] != "host1":
        return

    def wait():
        (folder / "pid").write_text(str(os.getpid()))
        (folder / "ready").touch()
        while not (folder / "is-cut").exists():
            time.sleep(0.02)

    optimizer_engine_of(optim).faults.at(Instant.REDUCED, wait, 3)


def host_of(ctx):
    assert ctx.group.backend == "gloo" or ctx.world_size == 1
    return os.environ["CHORUSLINE_HOST_ID"]


async def main():
    ray.init("10.11.12.10:6399", _node_ip_address="10.11.12.10", log_to_driver=False)
    async with cl.Session((1, 2), timeout_s=4, startup_timeout_s=120) as session:
        while len(hosts := await session.run(host_of)) < 2:
            await asyncio.sleep(0.5)
        acts = dict.fromkeys(range(2), is_cut_off_in_the_third_step)
        victim = hosts.index("host1")
        (folder / "victim").write_text(str(victim))
        told = await session.run(train, kind=Kind(), folder=str(folder), victims={}, acts=acts)
    (folder / "told").write_bytes(pickle.dumps(told))


asyncio.run(main())
"""

# Ray notices in 2 s that a node does not answer; by default in 15 s.
OF_A_SESSION = """
start() { on $1 "$python" -m ray.scripts.scripts start --block --num-cpus=1 "${@:2}" \\
    --object-store-memory=80000000 --node-ip-address=10.11.12.1$1 > "$folder/said-$1" 2>&1 & }
until_up() { for i in $(seq 900); do grep -q "runtime started" "$folder/said-$1" && return;
    sleep 0.1; done; exit 4; }
start 0 --head --port=6399 --include-dashboard=false --temp-dir=/run/ray --system-config='{
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4
}'
until_up 0
start 1 --address=10.11.12.10:6399
until_up 1
on 0 "$python" "$program" "$folder" > "$folder/said-program" 2>&1 &
session=$!
until_there "$folder/ready"
cut_off=$(cat "$folder/pid")
ip link set port1 down
touch "$folder/is-cut"
cp "$folder/$(cat "$folder/victim").diary" "$folder/at-the-cut"
wait $session
for i in $(seq 900); do [ -e /proc/$cut_off ] || break; sleep 0.1; done
[ ! -e /proc/$cut_off ]
cat /run/ray/session_latest/logs/worker-*-$cut_off.err > "$folder/said-last"
"""


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_session_goes_on_without_a_node_that_is_cut_off_and_the_worker_there_ends(
    tmp_path: Path,
) -> None:
    """Its node lives, and so does Ray there, which does not know that the others have given it up:
    no packet comes to say so."""
    in_networks(OF_A_SESSION, SESSION, tmp_path, timeout_s=340)
    told = pickle.loads((tmp_path / "told").read_bytes())
    victim = int((tmp_path / "victim").read_text())
    assert [one.world_size for one in told] == [1]
    assert_as_if_nothing_was(Kind(), str(tmp_path), told, victims={victim: (2, "is cut off")})
    # What it had taken when it was cut off is all that it has ever taken.
    assert (tmp_path / f"{victim}.diary").read_bytes() == (tmp_path / "at-the-cut").read_bytes()
    said = (tmp_path / "said-program").read_text()
    # Ray and the session each ask it, and either may be first to give it up.
    given_up = ("its control loop does not answer", "The actor died because its node has died")
    assert any(why in said for why in given_up) and "no step is lost" in said, said
    last = (tmp_path / "said-last").read_text()
    assert f"rank {victim} in generation 0 waits for the driver" in last
    assert "this worker is cut off, and ends" in last
