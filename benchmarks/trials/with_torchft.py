"""torchft by itself: replicas of one rank each, one of them a spare, over Gloo, with a lighthouse.

A replica that is lost is started again by this program, as a scheduler would, and gets the state
from the others. So is the lighthouse, at the same port.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.trials.replicated import LIGHTHOUSE, train_replica
from benchmarks.trials.workload import Workload


def keep_lighthouse(port: str) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind=f"[::]:{port}", **LIGHTHOUSE)
    while lighthouse:
        time.sleep(3600)


def main() -> None:
    workload = Workload.of(sys.argv[-1])
    match sys.argv[1:-1]:
        case ["lighthouse", port]:
            keep_lighthouse(port)
            return
        case [replica, address]:
            train_replica(workload, int(replica), address)
            return
    port = _free_port()

    program = (sys.executable, "-m", "benchmarks.trials.with_torchft")

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*program, *arguments, sys.argv[-1]])

    lighthouse = start("lighthouse", port)
    address = f"http://localhost:{port}"
    replicas = {number: start(str(number), address) for number in range(workload.num_workers + 1)}
    while replicas:
        time.sleep(0.05)
        if lighthouse.poll() is not None:
            lighthouse = start("lighthouse", port)
        for number, process in list(replicas.items()):
            if process.poll() == 0:
                del replicas[number]
            elif process.poll() is not None:
                replicas[number] = start(str(number), address)
        if any(_has_finished(workload, number) for number in range(workload.num_workers + 1)):
            # Whoever comes now would train alone, from the beginning.
            for number in [n for n, one in replicas.items() if one.poll() not in (None, 0)]:
                del replicas[number]
    lighthouse.kill()
    lighthouse.wait()


def _free_port() -> str:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return str(probe.getsockname()[1])


def _has_finished(workload: Workload, replica: int) -> bool:
    return (Path(workload.folder) / f"parameters-{replica}.pt").exists()


if __name__ == "__main__":
    main()
