"""Workers, and what happens to them, for tests of the driver's decisions: no process runs."""

from __future__ import annotations

from chorusline.actors.driver.events import WorkerDied
from chorusline.actors.driver.instructions import Instruction, ResumeRank
from chorusline.actors.messages.messages import Resumption, RunRequest, WorkerInfo
from chorusline.collectives.contract.errors import PeerLost

GONE = PeerLost("all_reduce #7", 0, [1], "gone")


def request(
    run: int = 0,
    fewest: int = 1,
    max_failures: int | None = 0,
    saves_last: bool = False,
    replica_size: int = 1,
) -> RunRequest:
    return RunRequest(
        run,
        timeout_s=30.0,
        keep_reports=False,
        fewest=fewest,
        max_failures=max_failures,
        last_save_s=60.0 if saves_last else None,
        replica_size=replica_size,
    )


def worker(seat: int, node: str = "node-a", incarnation: int = 0) -> WorkerInfo:
    name = f"worker-{seat}-{incarnation}"
    return WorkerInfo(name, seat, node, node, 100 + seat, "cpu")


def death(seat: int, incarnation: int = 0) -> WorkerDied:
    return WorkerDied(worker(seat, incarnation=incarnation).worker_id, "SIGKILL")


def resumptions(told: list[Instruction]) -> dict[str, Resumption]:
    return {one.worker_id: one.resumption for one in told if isinstance(one, ResumeRank)}
