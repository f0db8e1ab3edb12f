"""Replicas of a stock FSDP2 model that lose ranks and get them back: a prototype, with figures.

    python -m benchmarks.compatibility.fsdp2_replicas --kills 4 --json

Ranks form replicas of two. Inside one, torch's `fully_shard` runs on our groups; between them, the
ranks that hold the same shard average its gradient. A step counts when all ranks have voted that
they hold the averaged gradient. A process of its own, which stands in for a session's driver, kills
a rank at a random instant with SIGKILL, and decides who goes on:

1. A rank dies. Its generation ends on all ranks: they share one fate.
2. The replicas that are whole go on, as a new generation; the other rank of the dead one's replica
   waits. If some rank has seen the vote of a step, all have the gradient of that step, and take it.
   Otherwise all compute it again, over the same samples, which fewer ranks now share.
3. A new process comes. At the next step boundary the ranks form a generation with it, and its
   replica gets each shard from the rank of another replica that holds it.

Every step has the same samples at any number of replicas, so one process with the whole batch is
the reference for all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import chorusline as cl
from chorusline.collectives.objects.blocking import all_gather_object
from chorusline.collectives.torch_backend.options import Options
from chorusline.collectives.torch_backend.registration import NAME

RANKS_PER_REPLICA = 2
BATCH = 16  # samples of a step, of all ranks together
WIDTH = 65  # odd, so that shards are uneven
NEWCOMER = -1
_PATIENCE_S = 240.0


# -- the model, and what one process makes of it ---------------------------------------------------


def network(layers: int) -> torch.nn.Sequential:
    """The same weights in every process."""
    torch.manual_seed(0)
    inner = [
        part for _ in range(layers) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
    ]
    return torch.nn.Sequential(*inner, torch.nn.Linear(WIDTH, 1))


def loss_of(net: torch.nn.Module, step: int, part: int, parts: int) -> torch.Tensor:
    """The mean loss of one of `parts` equal parts of the step's samples."""
    rows = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    mine = rows.chunk(parts)[part]
    return (net(mine).squeeze(1) - mine.sum(1) / 8).square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def reference(layers: int, steps: int) -> list[torch.Tensor]:
    """The parameters after as many steps of one process, in float64."""
    net = network(layers).double()
    optim = adamw(net.parameters())
    torch.set_default_dtype(torch.float64)
    try:
        for step in range(steps):
            rows = torch.randn(
                BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float32
            ).double()
            (net(rows).squeeze(1) - rows.sum(1) / 8).square().mean().backward()
            optim.step()
            optim.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    return [one.detach() for one in net.parameters()]


# -- a rank ----------------------------------------------------------------------------------------


@dataclass
class Roster:
    """Who takes part in a generation, in the order of the ranks. Its writer is the Driver."""

    generation: int
    seats: list[int]

    @classmethod
    def read(cls, folder: Path) -> Roster:
        return cls(**json.loads((folder / "roster.json").read_text()))

    def write(self, folder: Path) -> None:
        (folder / "roster.tmp").write_text(json.dumps(vars(self)))
        (folder / "roster.tmp").replace(folder / "roster.json")


class Rank:
    """One process. steps: how many of them count here; NEWCOMER before it has a state. The local
    shards and their optimizer outlive the FSDP2 model, which is made anew in each generation."""

    def __init__(self, seat: int, folder: Path, layers: int) -> None:
        self.seat, self.folder, self.layers = seat, folder, layers
        self.driver = os.getppid()
        self.steps = NEWCOMER
        self.holds: int | None = None  # The number of the step whose averaged gradient is held.
        self.shards: list[torch.nn.Parameter] = []
        self.optim: torch.optim.Optimizer | None = None
        self.log = (folder / f"log-{seat}-{os.getpid()}").open("w", buffering=1)

    def say(self, what: str, **more: Any) -> None:
        record = {"at": time.time(), "what": what, "steps": self.steps, **more}
        self.log.write(json.dumps(record) + "\n")

    def run(self) -> None:
        (self.folder / f"ready-{self.seat}-{os.getpid()}").touch()
        generation = -1
        while True:
            while (roster := Roster.read(self.folder)).generation <= generation:
                self.leave_without_driver()
                time.sleep(0.002)
            generation = roster.generation
            if self.seat not in roster.seats:
                continue  # Its replica is not whole: it waits.
            try:
                if self.take_part(roster):
                    return
            except Exception as error:
                if not isinstance(error, cl.ChoruslineError):
                    raise
                self.say("lost", error=type(error).__name__)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

    def leave_without_driver(self) -> None:
        if os.getppid() != self.driver:
            raise SystemExit("the driver is gone")

    def take_part(self, roster: Roster) -> bool:
        """One generation. Whether the training is over; False at a step boundary where others have
        come."""
        rank, size = roster.seats.index(self.seat), len(roster.seats)
        store = cl.FileStore(self.folder / f"generation-{roster.generation}")
        began = time.perf_counter()
        group = cl.Group.create(
            store, rank, size, generation=roster.generation, timeout_s=60, name="replicas"
        )
        with group:
            replica, member = divmod(rank, RANKS_PER_REPLICA)
            inside = group.split(replica, name="inside")
            between = group.split(member, name="between")
            assert inside is not None and between is not None
            dist.init_process_group(
                NAME,
                store=dist.HashStore(),  # Unused: they meet in the group's own.
                rank=inside.rank,
                world_size=inside.size,
                pg_options=Options(parent=inside),
            )
            connected = time.perf_counter()
            model, parameters = self.sharded()
            self.agree_on_state(group, between)
            self.say(
                "entered",
                size=size,
                connect_ms=1e3 * (connected - began),
                rebuild_ms=1e3 * (time.perf_counter() - connected),
            )
            while True:
                outcome = self.step(model, parameters, group, between, roster)
                if outcome is not None:
                    break
            if outcome:
                whole = [one.full_tensor().detach() for one in parameters]
                if rank == 0:
                    torch.save((self.steps, whole), self.folder / "result.tmp")
                    (self.folder / "result.tmp").replace(self.folder / "result.pt")
                group.barrier().wait()
                self.say("over")
            return outcome

    def sharded(self) -> tuple[torch.nn.Module, list[Any]]:
        """The FSDP2 model on this generation's process group, and its sharded parameters: the list
        keeps them also while FSDP2 has swapped whole ones in."""
        mesh = DeviceMesh("cpu", list(range(RANKS_PER_REPLICA)))
        model = network(self.layers)
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        parameters: list[Any] = list(model.parameters())
        if self.optim is None:
            self.shards = [torch.nn.Parameter(one.to_local().detach()) for one in parameters]
            self.optim = adamw(self.shards)
            # So that a newcomer has tensors to receive its state in.
            for one in self.shards:
                one.grad = torch.zeros_like(one)
            fresh = [one.detach().clone() for one in self.shards]
            self.optim.step()
            for one, weights in zip(self.shards, fresh, strict=True):
                one.data.copy_(weights)
                state = self.optim.state[one]
                state["step"].zero_()
        else:
            for one, shard in zip(parameters, self.shards, strict=True):
                one.to_local().detach().copy_(shard.data)
                shard.data = one.to_local().detach()
        return model, parameters

    def agree_on_state(self, group: cl.Group, between: cl.Group) -> None:
        """All ranks end with the state of those that have most steps. A rank that only lacks the
        vote of the last step has its gradient, and takes it."""
        assert self.optim is not None
        said = [one for one, _ in all_gather_object(group, (self.steps, self.seat))]
        furthest = max(said)
        if furthest == NEWCOMER:
            self.steps = 0
            return
        if self.steps == furthest - 1 and self.holds == self.steps:
            self.apply()
        by_member = all_gather_object(between, self.steps)
        if self.steps == NEWCOMER or min(by_member) < furthest:
            if furthest not in by_member:
                raise SystemExit("both copies of a shard are gone")
            root = by_member.index(furthest)
            tensors = [one.data for one in self.shards]
            for one in self.shards:
                state = self.optim.state[one]
                tensors += [state["exp_avg"], state["exp_avg_sq"], state["step"]]
            for tensor in tensors:
                if tensor.numel():
                    whole = tensor.contiguous().view(-1)
                    between.broadcast(whole, root).wait()
                    tensor.copy_(whole.view(tensor.shape))
            self.steps = furthest
        self.holds = None

    def step(
        self,
        model: torch.nn.Module,
        parameters: list[Any],
        group: cl.Group,
        between: cl.Group,
        roster: Roster,
    ) -> bool | None:
        """One step. True: it was the last; False: others have come; None: go on."""
        self.leave_without_driver()
        began = time.perf_counter()
        model.zero_grad()
        loss = loss_of(model, self.steps, group.rank, group.size)
        loss.backward()
        computed = time.perf_counter()
        gradients = [one.grad.to_local().contiguous() for one in parameters]
        flat = torch.cat([one.view(-1) for one in gradients])
        if between.size > 1:
            between.all_reduce(flat, cl.ReduceOp.AVG).wait()
        for one, part in zip(
            self.shards, flat.split([one.numel() for one in gradients]), strict=True
        ):
            one.grad = part.view(one.shape)
        self.holds = self.steps
        # The vote: whoever sees it complete knows that every rank holds its gradient.
        others = float(Roster.read(self.folder).generation > roster.generation)
        over = float((self.folder / "over").exists())
        said = torch.tensor([others, over]) if group.rank == 0 else torch.zeros(2)
        group.all_reduce(said).wait()
        voted = time.perf_counter()
        self.apply()
        self.say(
            "step",
            size=group.size,
            ms=1e3 * (time.perf_counter() - began),
            between_ms=1e3 * (voted - computed),
        )
        if said[1]:
            return True
        return False if said[0] else None

    def apply(self) -> None:
        assert self.optim is not None
        self.optim.step()
        self.steps += 1
        self.holds = None


# -- the driver's stand-in -------------------------------------------------------------------------


class Driver:
    """Starts ranks, kills one at a time, and says who goes on."""

    def __init__(self, folder: Path, replicas: int, layers: int) -> None:
        self.folder, self.layers = folder, layers
        self.num_seats = replicas * RANKS_PER_REPLICA
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.generation = -1

    def start(self, seat: int) -> None:
        self.processes[seat] = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.compatibility.fsdp2_replicas"),
                *("--seat", str(seat)),
                *("--folder", str(self.folder), "--layers", str(self.layers)),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def is_ready(self, seat: int) -> bool:
        pid = self.processes[seat].pid
        return (self.folder / f"ready-{seat}-{pid}").exists()

    def form(self, seats: list[int]) -> None:
        self.generation += 1
        Roster(self.generation, seats).write(self.folder)

    def whole_replicas(self, without: int) -> list[int]:
        of_it = without // RANKS_PER_REPLICA
        return [one for one in range(self.num_seats) if one // RANKS_PER_REPLICA != of_it]

    def records(self) -> list[dict[str, Any]]:
        found = []
        for log in self.folder.glob("log-*"):
            for line in log.read_text().splitlines():
                if line.endswith("}"):  # A killed rank may have left half a line.
                    found.append(json.loads(line) | {"seat": int(log.name.split("-")[1])})
        return sorted(found, key=lambda one: one["at"])

    def wait_for_steps(self, size: int, more: int, since: float) -> float:
        """Wait until seat 0 or its stand-ins have taken `more` steps with `size` ranks after
        `since`; the time of the first of them."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            for process in self.processes.values():
                if process.poll() not in (None, -signal.SIGKILL):
                    raise RuntimeError(f"a rank ended with {process.returncode}")
            at = [
                one["at"]
                for one in self.records()
                if one["what"] == "step" and one["size"] == size and one["at"] > since
            ]
            if len(at) >= more * size:
                return float(at[0])
            time.sleep(0.2)  # The records have the instants.
        raise TimeoutError(f"no {more} steps of {size} ranks within {_PATIENCE_S:.0f} s")


def measured(kills: int, replicas: int, layers: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        driver = Driver(folder, replicas, layers)
        everybody = list(range(driver.num_seats))
        driver_began = time.time()
        losses = []
        try:
            Roster(-1, []).write(folder)
            for seat in everybody:
                driver.start(seat)
            while not all(driver.is_ready(seat) for seat in everybody):
                time.sleep(0.05)
            driver.form(everybody)
            since = driver_began
            for _ in range(kills):
                driver.wait_for_steps(len(everybody), 10, since)
                time.sleep(chance.random() * 0.05)
                seat = chance.choice(everybody)
                killed_at = time.time()
                driver.processes[seat].kill()
                driver.processes[seat].wait()
                driver.form(driver.whole_replicas(seat))
                driver.start(seat)
                fewer = len(everybody) - RANKS_PER_REPLICA
                first = driver.wait_for_steps(fewer, 1, killed_at)
                while not driver.is_ready(seat):
                    time.sleep(0.02)
                ready_at = time.time()
                driver.form(everybody)
                since = driver.wait_for_steps(len(everybody), 1, ready_at)
                losses.append(
                    {
                        "seat": seat,
                        "to_next_step_s": first - killed_at,
                        "from_ready_to_full_size_s": since - ready_at,
                    }
                )
            driver.wait_for_steps(len(everybody), 10, since)
            (folder / "over").touch()
            for process in driver.processes.values():
                if process.wait(_PATIENCE_S) != 0:
                    raise RuntimeError(f"a rank ended with {process.returncode}")
        finally:
            for process in driver.processes.values():
                if process.poll() is None:
                    process.kill()
                process.wait()
        steps, whole = torch.load(folder / "result.pt")
        records = driver.records()
    expected = reference(layers, steps)
    off = max(
        float((mine.double() - theirs).abs().max())
        for mine, theirs in zip(whole, expected, strict=True)
    )
    by_size = {
        size: [one for one in records if one["what"] == "step" and one["size"] == size]
        for size in {one["size"] for one in records if one["what"] == "step"}
    }
    entered = [one for one in records if one["what"] == "entered"]
    return {
        "steps": steps,
        "kills": len(losses),
        "largest_difference_from_one_process": off,
        "parameters": sum(one.numel() for one in expected),
        "errors_of_survivors": sorted({one["error"] for one in records if one["what"] == "lost"}),
        "to_next_step_s": [round(one["to_next_step_s"], 3) for one in losses],
        "from_ready_to_full_size_s": [round(one["from_ready_to_full_size_s"], 3) for one in losses],
        "connect_ms": statistics.median(one["connect_ms"] for one in entered),
        "rebuild_ms": statistics.median(one["rebuild_ms"] for one in entered),
        "step_ms": {
            f"{size} ranks": round(statistics.median(one["ms"] for one in of_size), 2)
            for size, of_size in by_size.items()
        },
        "between_and_vote_ms": {
            f"{size} ranks": round(statistics.median(one["between_ms"] for one in of_size), 2)
            for size, of_size in by_size.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="a JSON object on the last line")
    parser.add_argument("--seat", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.seat is not None:
        Rank(options.seat, options.folder, options.layers).run()
        return
    figures = measured(options.kills, options.replicas, options.layers, options.seed)
    for name, value in figures.items():
        print(f"{name}: {value}")
    if options.json:
        print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
