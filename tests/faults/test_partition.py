"""A network that stops carrying anything, between ranks that both live: as with a cable pulled at
the switch, no packet comes back to say so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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

# In a network of its own, and with a /run of its own, where `ip netns` keeps its names: all of it
# goes with the process.
NETWORK = """
set -e
python=$1 program=$2 folder=$3
mount -t tmpfs tmpfs /run
ip link add switch type bridge
ip link set switch up
for rank in 0 1; do
    ip netns add host$rank
    ip link add port$rank type veth peer name eth0 netns host$rank
    ip link set port$rank master switch up
    ip -n host$rank addr add 10.11.12.1$rank/24 dev eth0
    ip -n host$rank link set eth0 up
    ip -n host$rank link set lo up
    GLOO_SOCKET_IFNAME=eth0 CHORUSLINE_HOST_ID=host$rank ip netns exec host$rank \\
        "$python" "$program" $rank "$folder" > "$folder/said-$rank" 2>&1 &
done
until_there() { for i in $(seq 900); do [ -e "$1" ] && return; sleep 0.1; done; exit 3; }
until_there "$folder/ready-0"; until_there "$folder/ready-1"
sleep 0.3
ip link set port1 down
until_there "$folder/over-0"; until_there "$folder/over-1"
ip link set port1 up
touch "$folder/healed"
wait
"""


@pytest.mark.promise("a stopped process, a network that carries nothing any more")
def test_a_partition_is_found_by_the_deadline_on_both_sides_and_they_meet_again(
    tmp_path: Path,
) -> None:
    allowed = shutil.which("ip") and shutil.which("unshare")
    if not allowed or subprocess.run(["unshare", "-mn", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets us make no network namespaces, or has no `ip`")
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    done = subprocess.run(
        [
            *("unshare", "-mn", "--kill-child", "bash", "-c", NETWORK, "network"),
            *(sys.executable, str(program), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert done.returncode == 0, (done.stdout, done.stderr, said)
    for rank, words in enumerate(said):
        took_s, (kind, text), values = json.loads(words.splitlines()[-1])
        assert kind == "CollectiveTimeout", text
        assert "all_reduce" in text and "within 3 s" in text, text
        assert 2.5 < took_s < 10, f"rank {rank} was stuck for {took_s} s"
        assert values == [3.0, 3.0, 3.0]
