"""Workers that are killed and stopped, again and again, while a training goes on.

    python benchmarks/chaos.py [--seed 0] [--minutes 2] [--json]

Each round is one run of a session whose workers, three or four, train for some epochs. The seed
draws its faults from the table FAULTS: which worker (by seat), in which step, at which numbered
phase of the step, or in the recovery from the fault before. Faults are tied to steps and phases and
not to time, so the same seed commits the same faults again.

At the end of each round one process takes the steps that counted, in float64, over the samples
that counted, and has to come to the same bits; and over all ranks, dead or not, every sample was
used once in every epoch. At the end of all, nothing may be left: no process of an actor, no file
in /dev/shm.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

import ray
import torch
from ray import cloudpickle

sys.path[0] = str(Path(__file__).resolve().parents[1])

import chorusline as cl
from benchmarks.alternation import finish, parser, table

NUM_SAMPLES, BATCH, EPOCHS, RATE = 157, 4, 3, 0.02
TIMEOUT_S = 6.0
"""Of a collective, and so of how long a stopped worker is waited for."""

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# -- the faults ------------------------------------------------------------------------------------


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: dict[str, Callable[[], None]] = {"kill": _kill, "stop": _stop}
"""What a worker does to itself, by name. To fault another way, add a row."""


def _around(owner: Any, name: str, act: Callable[[], None], *, is_after: bool) -> None:
    """Act once, before or after the next call of `owner.name`."""
    original = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        if not is_after:
            act()
        result = original(*args, **kwargs)
        if is_after:
            act()
        return result

    setattr(owner, name, called)


Arm = Callable[[cl.Context, Any, Callable[[], None]], None]

PHASES: dict[str, Arm] = {
    "(1) before": lambda _, optim, act: _around(optim.reducer, "wait", act, is_after=False),
    "(1) after": lambda _, optim, act: _around(optim.reducer, "wait", act, is_after=True),
    "(2)": lambda _, optim, act: _around(optim.shard, "start_replicating", act, is_after=True),
    "(3) before": lambda _, optim, act: _around(optim._ballot, "hold", act, is_after=False),
    "(3) after": lambda _, optim, act: _around(optim._ballot, "hold", act, is_after=True),
    "(4) before": lambda _, optim, act: _around(optim.shard, "apply", act, is_after=False),
    "(4) after": lambda _, optim, act: _around(optim.shard, "apply", act, is_after=True),
    "(5)": lambda _, optim, act: _around(optim.shard, "start_gather", act, is_after=True),
    "after the step": lambda _, optim, act: _around(optim, "_try_step", act, is_after=True),
    "recovery (c)": lambda ctx, _, act: _around(
        ctx.recovery._lifeline, "connect", act, is_after=False
    ),
    "recovery (d)": lambda _, optim, act: _around(optim.shard, "complete", act, is_after=False),
    "recovery (e)": lambda ctx, _, act: _around(ctx.recovery, "_deal", act, is_after=False),
    "recovery (f)": lambda _, optim, act: _around(optim.shard, "gather", act, is_after=True),
    "after the recovery": lambda ctx, _, act: _around(ctx.recovery, "recover", act, is_after=True),
}
"""Where a fault may strike. Those of a recovery strike in the next one that there is."""


@dataclass(frozen=True)
class Fault:
    """ballots: how many the seat has seen when the phase is armed."""

    seat: int
    ballots: int
    kind: str
    phase: str


@dataclass(frozen=True)
class Plan:
    seed: int
    num_workers: int
    replicas: int
    bucket_cap_mb: float
    faults: tuple[Fault, ...]


def draw(seed: int) -> Plan:
    """At most as many faults as the replicas stand if they come at once, and somebody is left.

    Faults may meet: the second in the same step as the first, or in the recovery from it.
    """
    rng = random.Random(seed)
    num_workers = rng.choice((3, 4))
    replicas = rng.choice((2, 3))
    seats = rng.sample(range(num_workers), rng.randint(1, replicas - 1 + (num_workers == 4)))
    steps = NUM_SAMPLES // (BATCH * num_workers)
    faults: list[Fault] = []
    at = 0
    for number, seat in enumerate(seats):
        # Apart, where there would be more deaths at once than copies.
        is_near = number + 1 < replicas and number > 0
        at += rng.randint(0, 1) if is_near else rng.randint(2, steps - 2)
        phases = [name for name in PHASES if number > 0 or "recovery" not in name]
        kind = "stop" if rng.random() < 0.15 else "kill"
        faults.append(Fault(seat, at, kind, rng.choice(phases)))
    return Plan(seed, num_workers, replicas, rng.choice((0.001, 25.0)), tuple(faults))


# -- the training ----------------------------------------------------------------------------------


class Samples:
    """(number, input, target), float64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return number, self.inputs[number], self.targets[number]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3)
    ).double()


def loss_of(model: torch.nn.Module, samples: Samples, numbers: list[int]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(samples.inputs[numbers]), samples.targets[numbers])


@dataclass
class Told:
    """What a rank returns. lost: by epoch, the samples that ranks which are gone have used in steps
    that count."""

    seat: int
    parameters: list[torch.Tensor]
    lost: list[list[int]]
    num_steps: int
    recoveries: int


def train(ctx: cl.Context, plan: Plan, folder: str) -> Told:
    torch.set_num_threads(1)
    seat, samples = ctx.rank, Samples()
    faults = [fault for fault in plan.faults if fault.seat == seat]
    model = cl.DistributedDataParallel(make_model(), bucket_cap_mb=plan.bucket_cap_mb)
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=RATE, replicas=plan.replicas)
    lost = []
    with (Path(folder) / f"{seat}.diary").open("ab", buffering=0) as diary:
        for epoch in ctx.epochs(EPOCHS):
            with cl.Join([model, optim], divide_by_initial_world_size=False):
                shard = ctx.shard(samples, BATCH, epoch=epoch)
                for numbers, _, _ in shard:
                    _strike(ctx, optim, faults, folder)
                    loss_of(model, samples, numbers.tolist()).backward()
                    diary.write(pickle.dumps((epoch, optim.progress.ballots, numbers.tolist())))
                    optim.step()
                    optim.zero_grad()
                lost.append(list(shard.ids_of_the_lost))
    assert ctx.recovery is not None
    parameters = [p.detach().clone() for p in model.parameters()]
    return Told(seat, parameters, lost, optim.num_steps, ctx.recovery.num_recoveries)


def _strike(ctx: cl.Context, optim: Any, faults: list[Fault], folder: str) -> None:
    """Arm the faults of this step."""
    for fault in faults:
        if fault.ballots == optim.progress.ballots:

            def act(fault: Fault = fault) -> None:
                with (Path(folder) / "struck").open("ab") as file:
                    file.write(pickle.dumps(astuple(fault)))
                FAULTS[fault.kind]()

            PHASES[fault.phase](ctx, optim, act)


# -- what has to be true ---------------------------------------------------------------------------


def entries_of(path: Path) -> Iterator[Any]:
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    yield pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    return


def steps_that_count(
    plan: Plan, told: list[Told], folder: str
) -> dict[int, dict[int, tuple[int, list[int]]]]:
    """By ballot, by seat: the epoch and the samples. Of a seat that is gone those of its batches
    count that the survivors know of."""
    alive = {one.seat for one in told}
    known = [Counter(ids) for ids in told[0].lost]
    steps: dict[int, dict[int, tuple[int, list[int]]]] = {}
    for seat in range(plan.num_workers):
        for epoch, ballot, numbers in entries_of(Path(folder) / f"{seat}.diary"):
            if seat not in alive:
                # What was lost before it counted was dealt to others; it is the seat's last batch.
                if Counter(numbers) - known[epoch]:
                    continue
                known[epoch] -= Counter(numbers)
            steps.setdefault(ballot, {})[seat] = (epoch, numbers)
    return steps


def reference(steps: dict[int, dict[int, tuple[int, list[int]]]]) -> list[torch.Tensor]:
    """One process that takes the same steps and adds in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # As on the ranks: a product's inner sum depends on it.
    model, samples = make_model(), Samples()
    optim = torch.optim.AdamW(model.parameters(), lr=RATE)
    for ballot in sorted(steps):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for _, (_, numbers) in sorted(steps[ballot].items()):
            model.zero_grad()
            loss_of(model, samples, numbers).backward()
            for so_far, p in zip(total, model.parameters(), strict=True):
                so_far += p.grad
        for so_far, p in zip(total, model.parameters(), strict=True):
            p.grad = so_far / len(steps[ballot])
        optim.step()
    torch.set_num_threads(threads)
    return [p.detach() for p in model.parameters()]


def complaints(plan: Plan, told: list[Told], folder: str) -> list[str]:
    """What is wrong with a round; nothing, we hope."""
    wrong = []
    for one in told[1:]:
        if not all(map(torch.equal, one.parameters, told[0].parameters)):
            wrong.append(f"the parameters of seats {told[0].seat} and {one.seat} differ")
        if one.num_steps != told[0].num_steps:
            wrong.append(f"seat {one.seat} has taken {one.num_steps} steps, {told[0].num_steps}")
    steps = steps_that_count(plan, told, folder)
    for epoch in range(EPOCHS):
        used = Counter(
            number
            for of_step in steps.values()
            for at, numbers in of_step.values()
            if at == epoch
            for number in numbers
        )
        missing = sorted(set(range(NUM_SAMPLES)) - set(used))
        again = sorted(number for number, count in used.items() if count > 1)
        if missing or again:
            wrong.append(f"epoch {epoch}: samples {missing} not used, {again} more than once")
    if len(steps) != told[0].num_steps:
        wrong.append(f"{len(steps)} steps in the diaries, {told[0].num_steps} taken")
    elif not all(map(torch.equal, told[0].parameters, reference(steps))):
        wrong.append("the parameters are not those of one process that took the same steps")
    return wrong


def left_behind(session_pid: int) -> list[str]:
    """Processes of actors, stopped ones too, of this program's cluster."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            command = (path / "cmdline").read_bytes().decode(errors="replace")
            if not command.startswith(("ray::Worker", "ray::Driver")):
                continue
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            grandparent = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
            if int(grandparent) == session_pid:
                found.append(f"process {path.name} {command.split('(')[0][:40]} ({state})")
    return found


# -- rounds ----------------------------------------------------------------------------------------


@dataclass
class Round:
    plan: Plan
    seconds: float
    struck: list[Fault]
    steps: int = 0
    recoveries: int = 0
    wrong: list[str] = field(default_factory=list)


async def play(session: cl.Session, plan: Plan) -> Round:
    """One run of a session that has as many workers as the plan says."""
    with tempfile.TemporaryDirectory() as folder:
        began_at = time.monotonic()
        told: list[Told] = []
        try:
            told = await session.run(train, plan=plan, folder=folder)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        else:
            wrong = complaints(plan, told, folder)
        struck = [Fault(*entry) for entry in entries_of(Path(folder) / "struck")]
        seconds = time.monotonic() - began_at
    steps, recoveries = (told[0].num_steps, told[0].recoveries) if told else (0, 0)
    return Round(plan, seconds, struck, steps, recoveries, wrong)


def _do_nothing(ctx: cl.Context) -> None:
    pass


async def play_all(first_seed: int, seconds: float) -> list[Round]:
    """Rounds, each with the next seed, until the time is over; at least one."""
    rounds: list[Round] = []
    ends_at = time.monotonic() + seconds
    few = {"CPU": 0.1}
    async with contextlib.AsyncExitStack() as stack:
        sessions: dict[int, cl.Session] = {}
        for number in itertools.count():
            plan = draw(first_seed * 1_000_003 + number)
            size = plan.num_workers
            if size not in sessions:
                session = cl.Session((1, size), resources_per_worker=few, timeout_s=TIMEOUT_S)
                sessions[size] = await stack.enter_async_context(session)
            session = sessions[size]
            await session.run(_do_nothing)  # All seats are taken again.
            rounds.append(await play(session, plan))
            one = rounds[-1]
            faults = "; ".join(f"seat {f.seat}: {f.kind} {f.phase}" for f in one.struck)
            print(f"{number}: {one.seconds:.1f} s, {one.steps} steps, {faults or 'nothing struck'}")
            for wrong in one.wrong:
                print(f"   WRONG (plan {plan}): {wrong}")
            if time.monotonic() > ends_at:
                break
    await asyncio.sleep(1.0)
    rounds[-1].wrong += [f"left behind: {what}" for what in left_behind(os.getpid())]
    return rounds


def shared_memory_files() -> set[str]:
    """Of ours and of torch's; Ray's own object store is Ray's."""
    return {p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(("torch_", "chorus"))}


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--minutes", type=float, default=2.0)
    args = flags.parse_args()
    files = shared_memory_files()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        rounds = asyncio.run(play_all(args.seed, args.minutes * 60))
    finally:
        ray.shutdown()
    wrong = [told for one in rounds for told in one.wrong]
    wrong += [f"left in /dev/shm: {name}" for name in sorted(shared_memory_files() - files)]
    struck = [fault for one in rounds for fault in one.struck]
    by_phase = Counter((fault.phase, fault.kind) for fault in struck)
    table(
        f"seed {args.seed}: {len(rounds)} rounds",
        ("phase", *FAULTS),
        [(phase, *(str(by_phase[phase, kind]) for kind in FAULTS)) for phase in PHASES],
    )
    for told in wrong:
        print(f"WRONG: {told}")
    figures = {
        "rounds": len(rounds),
        "steps": sum(one.steps for one in rounds),
        "faults": len(struck),
        "recoveries": sum(one.recoveries for one in rounds),
        "wrong": len(wrong),
        "struck": [[f.seat, f.ballots, f.kind, f.phase] for f in struck],
    }
    print(", ".join(f"{name} {value}" for name, value in figures.items() if name != "struck"))
    finish(args, {}, figures)
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
